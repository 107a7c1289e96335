//! Attention by three operations of candle.

use crate::{Options, masks};
use candle_core::{Result, Tensor};
use candle_nn::ops::softmax_last_dim;

/// Computes what [`chunked_sdpa`](crate::chunked_sdpa) does by matmul, softmax, matmul, with all scores in memory: `[batch, heads,
/// rows, keys]`. A row that sees no key is NaN. No gradients: candle's fused softmax has none.
///
/// # Errors
/// Candle's, if tensors do not fit together.
pub fn plain(q: &Tensor, k: &Tensor, v: &Tensor, pad_mask: Option<&Tensor>, options: &Options) -> Result<Tensor> {
    let (rows, keys) = (options.q_offset..options.q_offset + q.dim(2)?, 0..k.dim(2)?);
    let scores = (q * options.scale)?.contiguous()?.matmul(&k.t()?.contiguous()?)?;
    let rules = masks::rules(&rows, &keys, options, &scores)?;
    softmax_last_dim(&masks::masked(scores, pad_mask.cloned(), rules)?)?.matmul(&v.contiguous()?)
}
