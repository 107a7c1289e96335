//! Reference implementation to be read: attention as the formula states it, one pair of row and key at a time. In `f64`
//! it is the oracle; in `f32` it is the usual three passes (scores, softmax, weighted sum), whose error is the
//! yardstick for the error of the fused path. It shares nothing with the fused path but the argument types. The
//! arithmetic is all in `row.rs`.

mod row;

use crate::{Attention, Error, Inputs, MaskMod, Mods, Position, ProbMod, ScoreMod, Shape};

/// Results of attention, dense: `out` `[batch, heads, q_len, value_dim]`, `lse` `[batch, heads, q_len]`, the scores at
/// each [`crate::Point`] `[batch, heads, q_len, kv_len]`, `key_weight_sums` `[batch, kv_heads, kv_len]`. Ragged
/// sequences count as batch, each padded to the longest with the results of an empty row.
#[derive(Debug, Clone, PartialEq)]
pub struct Answer<T> {
    /// Weighted sums of values.
    pub out: Vec<T>,
    /// Natural log of Σ exp(score) of each row.
    pub lse: Vec<T>,
    /// Scores raw, softcapped and masked, then weights.
    pub points: [Vec<T>; 4],
    /// Sum of each key's weights over the rows and heads that share it.
    pub key_weight_sums: Vec<T>,
}

/// Computes attention in `f64`: exact but for the rounding of `f64` sums. Time B·H·Lq·Lk·(D + Dv).
///
/// # Errors
/// Errors of [`Attention::problem`] that concern inputs.
pub fn oracle(attention: &Attention, inputs: &Inputs<'_>) -> Result<Answer<f64>, Error> {
    answer(attention, inputs, &Mods::new())
}

/// Computes attention in `f32`, in three passes.
///
/// # Errors
/// As [`oracle`].
pub fn attention(attention: &Attention, inputs: &Inputs<'_>) -> Result<Answer<f32>, Error> {
    answer(attention, inputs, &Mods::new())
}

/// Computes attention in `f32` or `f64` with the caller's functions.
///
/// # Errors
/// As [`oracle`].
pub fn answer<T: Real, S: ScoreMod, M: MaskMod, P: ProbMod>(
    attention: &Attention,
    inputs: &Inputs<'_>,
    mods: &Mods<S, M, P>,
) -> Result<Answer<T>, Error> {
    let shape = inputs.shape()?;
    let Shape { batch, heads, kv_heads, q_len, kv_len, .. } = shape;
    let kv = inputs.key_values()?;
    let mut sums = Vec::new();
    let bytes = (batch * kv_heads * kv_len).saturating_mul(size_of::<T>());
    sums.try_reserve_exact(batch * kv_heads * kv_len).map_err(|_| Error::Memory { what: "key weight sums", bytes })?;
    sums.resize(batch * kv_heads * kv_len, T::from(0.0));
    let mut all = Answer { out: Vec::new(), lse: Vec::new(), points: Default::default(), key_weight_sums: sums };
    if q_len == 0 || heads == 0 {
        return Ok(all);
    }
    let element = |x: Option<f32>| x.unwrap_or(f32::NAN);
    let tensors = [
        Dense::new(inputs.q.shape(), |at| element(inputs.q.get(at))),
        // Elements that a cache has evicted or never held must not be visible: they read as NaN.
        Dense::new(kv.k_shape(), |at| element(kv.key(at))),
        Dense::new(kv.v_shape(), |at| element(kv.value(at))),
    ];
    for b in 0..batch {
        for h in 0..heads {
            for i in 0..q_len {
                let at = Position { batch: b, head: h, row: i, key: 0, position: 0 };
                row::row(attention, inputs, &tensors, mods, at, &mut all)?;
            }
        }
    }
    Ok(all)
}

/// A dense copy of a tensor in the oracle's number type.
struct Dense<T> {
    shape: [usize; 4],
    data: Vec<T>,
}

impl<T: Real> Dense<T> {
    fn new(shape: [usize; 4], element: impl Fn([usize; 4]) -> f32) -> Self {
        let [batch, heads, rows, dim] = shape;
        let index = |i: usize| [i / dim / rows / heads, i / dim / rows % heads, i / dim % rows, i % dim];
        Self { shape, data: (0..batch * heads * rows * dim).map(|i| T::from(element(index(i)))).collect() }
    }

    fn row(&self, b: usize, h: usize, l: usize) -> &[T] {
        let [_, heads, rows, dim] = self.shape;
        &self.data[((b * heads + h) * rows + l) * dim..][..dim]
    }
}

/// Number type that the oracle computes in.
pub trait Real:
    Copy
    + From<f32>
    + PartialOrd
    + core::ops::Add<Output = Self>
    + core::ops::Sub<Output = Self>
    + core::ops::Mul<Output = Self>
    + core::ops::Div<Output = Self>
{
    /// Returns eˣ.
    fn exp(self) -> Self;
    /// Returns ln x.
    fn ln(self) -> Self;
    /// Returns tanh x.
    fn tanh(self) -> Self;
    /// Rounds to `f32`.
    fn to_f32(self) -> f32;
}

macro_rules! real {
    ($($t:ident)*) => {$(
        impl Real for $t {
            fn exp(self) -> Self { $t::exp(self) }
            fn ln(self) -> Self { $t::ln(self) }
            fn tanh(self) -> Self { $t::tanh(self) }
            fn to_f32(self) -> f32 { self as f32 }
        }
    )*};
}

real!(f32 f64);
