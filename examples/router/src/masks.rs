//! Additive masks.

use crate::Options;
use candle_core::{DType, Device, Result, Tensor};
use std::ops::Range;

/// Makes the additive mask `[batch, 1, 1, keys]` of a tokenizer's mask `[batch, keys]`: 0 for tokens, `f32::MIN` for padding.
///
/// # Errors
/// Candle's, if the tokenizer's mask has other dimensions.
pub fn padding_mask(attention_mask: &Tensor) -> Result<Tensor> {
    let (batch, keys) = attention_mask.dims2()?;
    let real = attention_mask.to_dtype(DType::F32)?.reshape((batch, 1, 1, keys))?;
    real.affine(-f64::from(f32::MIN), f64::from(f32::MIN))
}

/// Makes a mask `[rows, keys]` of −∞ where causality or the window hides a key, if there is such a rule. Rows are positions
/// among the keys.
pub(crate) fn rules(
    rows: &Range<usize>,
    keys: &Range<usize>,
    options: &Options,
    scores: &Tensor,
) -> Result<Option<Tensor>> {
    if options.window.is_none() && !options.causal {
        return Ok(None);
    }
    let side = options.window.unwrap_or(usize::MAX);
    let hidden = |row: usize, key: usize| row.abs_diff(key) > side || options.causal && key > row;
    let mut mask = Vec::with_capacity(rows.len() * keys.len());
    for row in rows.clone() {
        mask.extend(keys.clone().map(|key| if hidden(row, key) { f32::NEG_INFINITY } else { 0.0 }));
    }
    Tensor::from_vec(mask, (rows.len(), keys.len()), &Device::Cpu)?
        .to_device(scores.device())?
        .to_dtype(scores.dtype())
        .map(Some)
}

/// Adds the padding mask and the rules to scores `[batch, heads, rows, keys]`.
pub(crate) fn masked(mut scores: Tensor, pad_mask: Option<Tensor>, rules: Option<Tensor>) -> Result<Tensor> {
    for mask in [pad_mask, rules].into_iter().flatten() {
        scores = scores.broadcast_add(&mask.to_dtype(scores.dtype())?)?;
    }
    Ok(scores)
}
