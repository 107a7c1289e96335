//! Attention by candle's operations on blocks of query rows.

use crate::{Options, masks};
use candle_core::{D, Result, Tensor, bail};
use candle_nn::ops::{softmax, softmax_last_dim};
use std::ops::Range;

/// Candle's softmax for [`tiled`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Softmax {
    /// Made of five operations, which have gradients, on any device.
    Composed,
    /// One operation, which has no gradients.
    Fused,
}

/// Computes what [`chunked_sdpa`](crate::chunked_sdpa) does by matmul, softmax, matmul for one block of query rows after another:
/// scores `[batch, heads, block_size, keys]` are in memory at once, of the keys that a rule leaves to the block.
///
/// # Errors
/// Candle's, if tensors do not fit together. A block that sees no key is an error too, and a row without one is NaN.
pub fn tiled(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    pad_mask: Option<&Tensor>,
    options: &Options,
    softmax: Softmax,
) -> Result<Tensor> {
    let scaled = (q * options.scale)?.contiguous()?;
    let (k, v) = (k.contiguous()?, v.contiguous()?);
    let (rows, key_count) = (q.dim(2)?, k.dim(2)?);
    let block_size = if options.block_size == 0 { rows.max(1) } else { options.block_size };
    let mut blocks = Vec::new();
    for first in (0..rows).step_by(block_size) {
        let len = block_size.min(rows - first);
        let positions = options.q_offset + first..options.q_offset + first + len;
        let keys = seen(&positions, key_count, options);
        if keys.is_empty() {
            bail!("tiled: rows at {positions:?} see none of {key_count} keys");
        }
        let of_block = |x: &Tensor| x.narrow(2, keys.start, keys.len());
        let transposed = of_block(&k)?.t()?.contiguous()?;
        let scores = scaled.narrow(2, first, len)?.contiguous()?.matmul(&transposed)?;
        let pad_mask = pad_mask.map(|mask| mask.narrow(D::Minus1, keys.start, keys.len())).transpose()?;
        let rules = masks::rules(&positions, &keys, options, &scores)?;
        let weights = softmax.of(&masks::masked(scores, pad_mask, rules)?)?;
        blocks.push(weights.matmul(&of_block(&v)?.contiguous()?)?);
    }
    Tensor::cat(&blocks, 2)
}

impl Softmax {
    fn of(self, scores: &Tensor) -> Result<Tensor> {
        match self {
            Self::Composed => softmax(scores, D::Minus1),
            Self::Fused => softmax_last_dim(scores),
        }
    }
}

/// Keys that a block of rows at these positions may see.
fn seen(positions: &Range<usize>, key_count: usize, options: &Options) -> Range<usize> {
    let side = options.window.unwrap_or(usize::MAX);
    let after = if options.causal { 0 } else { side };
    positions.start.saturating_sub(side)..positions.end.saturating_add(after).min(key_count)
}
