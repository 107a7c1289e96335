//! The attention function of a router that sends all its encoders and decoders through one: as a call of sdpa, as candle's
//! plain products, and as a loop over blocks of query rows, which sdpa takes the place of.

#![forbid(unsafe_code)]

mod masks;
mod plain;
mod tiled;

use candle_core::{Result, Tensor};
pub use masks::padding_mask;
pub use plain::plain;
use sdpa_candle::{Alignment, Attention, Sdpa, Window};
pub use tiled::{Softmax, tiled};

/// Options of [`chunked_sdpa`], in the form in which a router's models give them.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Options {
    /// Number of keys that a row sees on either side of its position, besides the key there; all without.
    pub window: Option<usize>,
    /// Causal rule: a row sees no key after its position.
    pub causal: bool,
    /// Factor of the products of queries and keys.
    pub scale: f64,
    /// Number of query rows that a loop takes at once, or 0 for all. Kept for its callers: sdpa chooses its own blocks.
    pub block_size: usize,
    /// Position of row 0 among the keys: 0 in encoders and prompts, the number of cached keys in a decode step.
    pub q_offset: usize,
}

/// Computes attention of `q` `[batch, heads, rows, head_dim]` over `k` and `v` `[batch, kv_heads, keys, head_dim]`, and returns
/// `[batch, heads, rows, head_dim]`. `pad_mask` is added to the scores: `[batch, 1, 1, keys]`, 0 for tokens and a large negative
/// number for padding.
///
/// A row that sees no key is 0; one whose keys are all padding, by a finite number, has equal weights, as in the loop.
///
/// # Errors
/// Candle's error, which names the argument, if tensors do not fit together. Tensors of another device take the loop.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use router::{Options, chunked_sdpa, padding_mask};
/// # fn main() -> candle_core::Result<()> {
/// let x = Tensor::randn(0f32, 1.0, (2, 12, 300, 64), &Device::Cpu)?;
/// let tokens: Vec<u32> = (0..600).map(|n| u32::from(n < 420)).collect(); // the second text has 120
/// let pad_mask = padding_mask(&Tensor::from_vec(tokens, (2, 300), &Device::Cpu)?)?;
/// let options = Options { window: Some(64), causal: false, scale: 0.125, block_size: 512, q_offset: 0 };
/// assert_eq!(chunked_sdpa(&x, &x, &x, Some(&pad_mask), &options)?.dims(), [2, 12, 300, 64]);
/// # Ok(()) }
/// ```
pub fn chunked_sdpa(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    pad_mask: Option<&Tensor>,
    options: &Options,
) -> Result<Tensor> {
    if !q.device().is_cpu() {
        return tiled(q, k, v, pad_mask, options, Softmax::Composed);
    }
    let offset = isize::try_from(options.q_offset).unwrap_or(isize::MAX);
    let mut attention = Attention::new().scale(options.scale as f32).align(Alignment::Offset(offset));
    if options.causal {
        attention = attention.causal();
    }
    if let Some(side) = options.window {
        attention = attention.window(Window::inclusive(Some(side), Some(side)));
    }
    let sdpa = Sdpa::new(attention);
    let sdpa = pad_mask.map_or(sdpa.clone(), |mask| sdpa.bias(mask));
    sdpa.forward(q, k, v)
}
