//! The oracle, to be read: attention as the formula says it, one score at a time, sums in `f64`; and the three-pass
//! `f32` version most people would write, whose error is the yardstick for the fused path's.
//!
//! Shares nothing with the fused path but the types it is called with.

use crate::{Attention, Error, Inputs, Shape};
use sdpa_kernels::{Alignment, Causality};

/// What attention gives: `out` `[batch, heads, q_len, value_dim]` and `lse` `[batch, heads, q_len]`, dense.
#[derive(Debug, Clone, PartialEq)]
pub struct Answer<T> {
    /// Weighted sums of values.
    pub out: Vec<T>,
    /// Natural log of Σ exp(score).
    pub lse: Vec<T>,
}

/// True if row `i` may see key `j`.
fn sees(attention: &Attention, shape: &Shape, i: usize, j: usize) -> bool {
    let offset = match attention.alignment {
        Some(Alignment::BottomRight) => shape.kv_len as i128 - shape.q_len as i128,
        Some(Alignment::Offset(n)) => n as i128,
        _ => 0,
    };
    let (p, j) = (i as i128 + offset, j as i128);
    !(attention.visible.causality == Causality::Causal && j > p)
}

/// The answer in `f64`: exact but for the rounding of `f64` sums.
///
/// # Errors
/// As [`Attention::problem`], as far as inputs go.
pub fn oracle(attention: &Attention, inputs: &Inputs<'_>) -> Result<Answer<f64>, Error> {
    let shape = inputs.shape()?;
    let scale = attention.scale_for(shape.head_dim) as f64;
    let mut answer = Answer { out: Vec::new(), lse: Vec::new() };
    for (b, h, i) in rows(&shape) {
        let kv_head = h / (shape.heads / shape.kv_heads);
        let at = |x: &crate::View<'_>, head, row, n| *x.get([b, head, row, n]).expect("inside the shape") as f64;
        let score = |j| (0..shape.head_dim).map(|n| at(&inputs.q, h, i, n) * at(&inputs.k, kv_head, j, n)).sum::<f64>();
        let seen: Vec<usize> = (0..shape.kv_len).filter(|&j| sees(attention, &shape, i, j)).collect();
        let scores: Vec<f64> = seen.iter().map(|&j| scale * score(j)).collect();
        let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let weights: Vec<f64> = scores.iter().map(|s| (s - max).exp()).collect();
        let sum: f64 = weights.iter().sum();
        answer.lse.push(if seen.is_empty() { f64::NEG_INFINITY } else { max + sum.ln() });
        for n in 0..shape.value_dim {
            let total: f64 = seen.iter().zip(&weights).map(|(&j, w)| w * at(&inputs.v, kv_head, j, n)).sum();
            answer.out.push(if seen.is_empty() { 0.0 } else { total / sum });
        }
    }
    Ok(answer)
}

/// The same in `f32`, in three passes: scores, softmax, weighted sum.
///
/// # Errors
/// As [`oracle`].
pub fn attention(attention: &Attention, inputs: &Inputs<'_>) -> Result<Answer<f32>, Error> {
    let shape = inputs.shape()?;
    let scale = attention.scale_for(shape.head_dim);
    let mut answer = Answer { out: Vec::new(), lse: Vec::new() };
    for (b, h, i) in rows(&shape) {
        let kv_head = h / (shape.heads / shape.kv_heads);
        let at = |x: &crate::View<'_>, head, row, n| *x.get([b, head, row, n]).expect("inside the shape");
        let mut weights = vec![f32::NEG_INFINITY; shape.kv_len];
        for j in (0..shape.kv_len).filter(|&j| sees(attention, &shape, i, j)) {
            let mut dot = 0.0;
            for n in 0..shape.head_dim {
                dot += at(&inputs.q, h, i, n) * at(&inputs.k, kv_head, j, n);
            }
            weights[j] = dot * scale;
        }
        let max = weights.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let empty = max == f32::NEG_INFINITY;
        let mut sum = 0.0;
        for w in &mut weights {
            *w = if empty { 0.0 } else { (*w - max).exp() };
            sum += *w;
        }
        answer.lse.push(max + sum.ln());
        for n in 0..shape.value_dim {
            let mut total = 0.0;
            for (j, w) in weights.iter().enumerate().filter(|(_, w)| **w != 0.0) {
                total += w / sum * at(&inputs.v, kv_head, j, n);
            }
            answer.out.push(total);
        }
    }
    Ok(answer)
}

fn rows(shape: &Shape) -> impl Iterator<Item = (usize, usize, usize)> + use<> {
    let Shape { batch, heads, q_len, .. } = *shape;
    (0..batch).flat_map(move |b| (0..heads).flat_map(move |h| (0..q_len).map(move |i| (b, h, i))))
}
