//! Calls on burn's tensors.

use crate::error::Error;
use crate::gradients;
use crate::operands::Operands;
use crate::views;
use burn_flex::Flex;
use burn_tensor::ops::AttentionModuleOptions;
use burn_tensor::{Bool, Tensor};
use sdpa::{Alignment, Attention};

/// Computes softmax(scale · Q Kᵀ) V as `burn::tensor::module::attention` does, with its arguments and their meaning.
///
/// Shapes are `[batch, heads, q_len, head_dim]`, `[batch, kv_heads, kv_len, head_dim]` and
/// `[batch, kv_heads, kv_len, value_dim]`, where `heads` is a multiple of `kv_heads`; the result is
/// `[batch, heads, q_len, value_dim]`, of the type of the queries. `mask` (true hides a key) and `attn_bias` (added after
/// softcap) are `[batch, heads, q_len, kv_len]`, each of the four may be 1. Causal rows stand at the last keys. A row that
/// sees no key gives 0.
///
/// Gradients flow to queries, keys, values and bias that autodiff tracks.
///
/// # Errors
/// [`Error`], where burn's function panics: a tensor that is not on the Flex backend, elements of another type than `f32`,
/// `bf16` and `f16`, shapes that do not fit together, or options out of range.
pub fn attention(
    query: Tensor<4>,
    key: Tensor<4>,
    value: Tensor<4>,
    mask: Option<Tensor<4, Bool>>,
    attn_bias: Option<Tensor<4>>,
    options: AttentionModuleOptions,
) -> Result<Tensor<4>, Error> {
    attention_with(&settings(options), [query, key, value], mask, attn_bias)
}

/// Computes attention with the settings of `sdpa`, among them windows, alignments and dropout; otherwise as [`attention`].
///
/// # Errors
/// As for [`attention`].
pub fn attention_with(
    attention: &Attention,
    [query, key, value]: [Tensor<4>; 3],
    mask: Option<Tensor<4, Bool>>,
    attn_bias: Option<Tensor<4>>,
) -> Result<Tensor<4>, Error> {
    let mask = mask.map(|mask| views::bool("mask", mask.without_autodiff())).transpose()?;
    let floats = [Some(&query), Some(&key), Some(&value), attn_bias.as_ref()];
    let strategy = floats.into_iter().flatten().find_map(Tensor::gradient_checkpointing_strategy);
    if let Some(strategy) = strategy {
        return gradients::attention_by(strategy, attention, [query, key, value], mask, attn_bias);
    }
    let operands = Operands {
        query: views::float("query", query)?,
        key: views::float("key", key)?,
        value: views::float("value", value)?,
        mask,
        bias: attn_bias.map(|bias| views::float("attn_bias", bias)).transpose()?,
    };
    Ok(Tensor::from_primitive::<Flex>(operands.attention(attention, None)?))
}

/// Settings that burn's options stand for.
fn settings(options: AttentionModuleOptions) -> Attention {
    let AttentionModuleOptions { scale, softcap, is_causal } = options;
    let mut attention = Attention::new();
    if let Some(scale) = scale {
        attention = attention.scale(scale as f32);
    }
    if let Some(softcap) = softcap {
        attention = attention.softcap(softcap as f32);
    }
    if is_causal {
        attention = attention.causal().align(Alignment::BottomRight);
    }
    attention
}
