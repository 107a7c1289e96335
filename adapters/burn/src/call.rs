//! Calls on burn's tensors.

use crate::error::Error;
use crate::{gradients, views};
use burn_flex::{Flex, FlexTensor};
use burn_tensor::ops::AttentionModuleOptions;
use burn_tensor::{Bool, DType, Element, Tensor, TensorData, bf16, f16};
use sdpa::{Alignment, Attention, Inputs, Outputs, TensorMut, ViewMut};

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

/// Tensors of a call. Clones share their memory.
#[derive(Debug, Clone)]
pub(crate) struct Operands {
    pub(crate) query: FlexTensor,
    pub(crate) key: FlexTensor,
    pub(crate) value: FlexTensor,
    pub(crate) mask: Option<FlexTensor>,
    pub(crate) bias: Option<FlexTensor>,
}

impl Operands {
    pub(crate) fn inputs(&self) -> Result<Inputs<'_>, Error> {
        let mut inputs = Inputs::new(
            views::tensor("query", &self.query)?,
            views::tensor("key", &self.key)?,
            views::tensor("value", &self.value)?,
        );
        if let Some(mask) = &self.mask {
            inputs = inputs.mask(views::mask(mask)?);
        }
        if let Some(bias) = &self.bias {
            inputs = inputs.bias(views::tensor("attn_bias", bias)?);
        }
        Ok(inputs)
    }

    /// Returns the output, of the type of the queries; writes the log-sum-exp to `lse`, if there is such a vector.
    pub(crate) fn attention(&self, attention: &Attention, lse: Option<&mut Vec<f32>>) -> Result<FlexTensor, Error> {
        let inputs = self.inputs()?;
        match self.query.dtype() {
            DType::BF16 => run::<bf16>(attention, inputs, lse),
            DType::F16 => run::<f16>(attention, inputs, lse),
            _ => run::<f32>(attention, inputs, lse),
        }
    }
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

/// Runs the call into memory of its own.
fn run<T>(attention: &Attention, inputs: Inputs<'_>, lse: Option<&mut Vec<f32>>) -> Result<FlexTensor, Error>
where
    T: Element + Default,
    for<'a> TensorMut<'a>: From<ViewMut<'a, T>>,
{
    let shape = inputs.shape()?;
    let sizes = [shape.batch, shape.heads, shape.q_len, shape.value_dim];
    let len = sizes.iter().try_fold(1usize, |n, &size| n.checked_mul(size));
    let len = len.ok_or(sdpa::Error::TooLarge { what: "output", sizes })?;
    let mut out = vec![T::default(); len];
    let mut outputs = Outputs::new(ViewMut::bhld(&mut out, sizes)?);
    if let Some(lse) = lse {
        lse.resize(shape.batch * shape.heads * shape.q_len, 0.0);
        outputs = outputs.lse(ViewMut::bhl(lse, [shape.batch, shape.heads, shape.q_len])?);
    }
    sdpa::attention(attention, inputs, outputs)?;
    Ok(FlexTensor::from_data(TensorData::new(out, sizes)))
}
