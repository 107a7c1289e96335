//! Settings and tensors of a call, other than queries, keys and values.

use crate::attend::{Op, Order};
use candle_core::{Result, Tensor};
use sdpa::Attention;
use std::sync::OnceLock;

/// Attention as an operation on candle's CPU tensors: settings, and the tensors that options add.
///
/// Tensors are read where they lie in memory, whatever their strides: transposed, narrowed and broadcast ones are not
/// copied. Masks and biases are `[batch, heads, q_len, kv_len]`; each of the four may be 1 and then stands for all, and
/// dimensions that are missing in front count as 1, as candle broadcasts.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use sdpa_candle::{Alignment, Attention, Sdpa};
/// # fn main() -> candle_core::Result<()> {
/// let x = Tensor::randn(0f32, 1.0, (2, 10, 8, 64), &Device::Cpu)?.transpose(1, 2)?; // batch, heads, rows, head_dim
/// let kv = x.narrow(1, 0, 2)?; // two key/value heads for eight query heads
/// let lens = Tensor::new(&[10u32, 7], &Device::Cpu)?;
/// let causal = Attention::new().causal().align(Alignment::TopLeft); // row 0 is at key 0, in the shorter sequence too
/// let out = Sdpa::new(causal).kv_lens(&lens).forward(&x, &kv, &kv)?;
/// assert_eq!(out.dims(), [2, 8, 10, 64]);
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, Default)]
pub struct Sdpa {
    pub(crate) attention: Attention,
    pub(crate) mask: Option<Mask>,
    pub(crate) bias: Option<Tensor>,
    pub(crate) alibi: Option<Tensor>,
    pub(crate) sinks: Option<Tensor>,
    pub(crate) kv_lens: Option<Tensor>,
}

/// Boolean mask, and the meaning of its nonzero elements.
#[derive(Debug, Clone)]
pub(crate) enum Mask {
    Keep(Tensor),
    Drop(Tensor),
}

impl From<Attention> for Sdpa {
    fn from(attention: Attention) -> Self {
        Self::new(attention)
    }
}

impl Sdpa {
    /// Takes the settings: scale, softcap, causal, window, alignment, precision.
    pub fn new(attention: Attention) -> Self {
        Self { attention, ..Self::default() }
    }

    /// Sets a mask of type `u8` whose nonzero elements may be attended to (as in PyTorch and transformers). Replaces
    /// any other mask.
    #[must_use]
    pub fn keep_mask(self, mask: &Tensor) -> Self {
        Self { mask: Some(Mask::Keep(mask.clone())), ..self }
    }

    /// Sets a mask of type `u8` whose nonzero elements are hidden. Replaces any other mask.
    #[must_use]
    pub fn drop_mask(self, mask: &Tensor) -> Self {
        Self { mask: Some(Mask::Drop(mask.clone())), ..self }
    }

    /// Adds a bias of type `f32`, `bf16` or `f16` to the scores, after softcap; −∞ hides the key.
    #[must_use]
    pub fn bias(self, bias: &Tensor) -> Self {
        Self { bias: Some(bias.clone()), ..self }
    }

    /// Sets ALiBi slopes, `[heads]`, of any float type: see [`sdpa::alibi_slopes`].
    #[must_use]
    pub fn alibi(self, slopes: &Tensor) -> Self {
        Self { alibi: Some(slopes.clone()), ..self }
    }

    /// Sets attention sinks, one logit for each query head, `[heads]`, of any float type.
    #[must_use]
    pub fn sinks(self, logits: &Tensor) -> Self {
        Self { sinks: Some(logits.clone()), ..self }
    }

    /// Sets the number of keys of each sequence, `[batch]`, of any integer type. Keys beyond it are never seen, and
    /// what is in their memory does not matter.
    #[must_use]
    pub fn kv_lens(self, lens: &Tensor) -> Self {
        Self { kv_lens: Some(lens.clone()), ..self }
    }

    /// Computes attention of queries `[batch, heads, q_len, head_dim]`, keys `[batch, kv_heads, kv_len, head_dim]` and
    /// values `[batch, kv_heads, kv_len, value_dim]`, of types `f32`, `bf16` and `f16` in any mix; `heads` is a
    /// multiple of `kv_heads`.
    ///
    /// Returns `[batch, heads, q_len, value_dim]` in the type of the queries, which lies in memory as the queries do:
    /// if they are a transposed `[batch, q_len, heads, head_dim]`, transposing the output back copies nothing.
    ///
    /// # Errors
    /// Candle's error with the message of [`sdpa::Error`], which names the argument, if something does not fit. Tensors
    /// must be on the CPU.
    ///
    /// Candle's `backward` gives gradients in `q`, `k` and `v`, by [`sdpa::attention_backward`]; tensors of options (bias,
    /// slopes, sinks) get none.
    pub fn forward(&self, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
        let order = Order::of(q);
        // Candle asks only operations on variables, and on what depends on them, for gradients.
        let lse = [q, k, v].iter().any(|x| x.track_op()).then(OnceLock::new);
        order.restore(q.apply_op3(k, v, Op { sdpa: self.clone(), order, lse })?)
    }
}
