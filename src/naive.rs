//! Reference implementation, written to be read: attention as the formula states it, one pair of row and key at a time.
//! In `f64` it is the oracle. In `f32` it is the usual three passes (scores, softmax, weighted sum); their error is the
//! yardstick for that of the fused path. It shares nothing with the fused path but the argument types and their checks.
//! The arithmetic is all in `row.rs`.

mod backward;
mod choosing;
mod row;
mod sequence;

pub use backward::{Gradient, gradients};
pub use choosing::{index_scores, top_k};

use crate::attention::Attention;
use crate::error::Error;
use crate::inputs::Inputs;
use crate::shape::Shape;
use core::ops::Range;
use sdpa_kernels::{MaskMod, Mods, ScoreMod, Tensor, TokenPart, WeightMod};
use sequence::OracleSequence;

/// Results of attention, dense: `out` `[batch, heads, q_len, value_dim]`, `lse` `[batch, heads, q_len]`, the scores at
/// each [`crate::Point`] `[batch, heads, q_len, kv_len]`, `key_weight_sums` `[batch, kv_heads, kv_len]`. Ragged
/// sequences are the batch, each padded to the longest with the results of an empty row.
///
/// ```
/// use sdpa::{Attention, Inputs, View, naive};
/// let x = [0.0; 2 * 4];
/// let x = View::bhld(&x, [1, 1, 2, 4])?;
/// let naive::Answer { out, lse, points: [_, _, _, weights], .. } =
///     naive::oracle(&Attention::new().causal(), &Inputs::new(x, x, x))?;
/// assert_eq!((out.len(), lse, weights), (8, vec![0.0, 2f64.ln()], vec![1.0, 0.0, 0.5, 0.5]));
/// # Ok::<(), sdpa::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Answer<T> {
    /// Weighted sums of values.
    pub out: Vec<T>,
    /// Natural log of Σ exp(score) of each row.
    pub lse: Vec<T>,
    /// Raw, softcapped and masked scores, then weights.
    pub points: [Vec<T>; 4],
    /// Sum of each key's weights over the rows and heads that share it.
    pub key_weight_sums: Vec<T>,
}

/// Computes attention in `f64`: exact but for the rounding of `f64` sums. Time B·H·Lq·Lk·(D + Dv).
///
/// ```
/// use sdpa::{Attention, Inputs, Outputs, View, ViewMut, naive};
/// let x: Vec<f32> = (0..40 * 8).map(|i| (i as f32).sin()).collect();
/// let x = View::bhld(&x, [1, 1, 40, 8])?;
/// let mut out = vec![0.0; 40 * 8];
/// let outputs = Outputs::new(ViewMut::bhld(&mut out, [1, 1, 40, 8])?);
/// sdpa::attention(&Attention::new(), Inputs::new(x, x, x), outputs)?;
/// let exact = naive::oracle(&Attention::new(), &Inputs::new(x, x, x))?.out;
/// let error = out.iter().zip(&exact).map(|(&x, exact)| (f64::from(x) - exact).abs()).fold(0.0, f64::max);
/// assert!(error < 1e-6);
/// # Ok::<(), sdpa::Error>(())
/// ```
///
/// # Errors
/// Errors of [`Attention::problem`] that concern inputs.
pub fn oracle(attention: &Attention, inputs: &Inputs<'_>) -> Result<Answer<f64>, Error> {
    answer(attention, inputs, &Mods::new())
}

/// Computes attention in `f32`, in three passes.
///
/// ```
/// use sdpa::{Attention, Inputs, View, naive};
/// let x = [1.0, 2.0];
/// let x = View::bhld(&x, [1, 1, 2, 1])?;
/// let answer = naive::attention(&Attention::new().causal(), &Inputs::new(x, x, x))?;
/// assert_eq!(answer.out[0], 1.0); // the first row sees the first value only
/// # Ok::<(), sdpa::Error>(())
/// ```
///
/// # Errors
/// As [`oracle`].
pub fn attention(attention: &Attention, inputs: &Inputs<'_>) -> Result<Answer<f32>, Error> {
    answer(attention, inputs, &Mods::new())
}

/// Computes attention in `f32` or `f64` with your own functions.
///
/// ```
/// use sdpa::{Attention, Inputs, Mods, Position, View, naive};
/// let x = [0.0; 3];
/// let (x, v) = (View::bhld(&x, [1, 1, 3, 1])?, View::bhld(&[1.0f32, 2.0, 6.0], [1, 1, 3, 1])?);
/// let others = Mods::new().mask(|at: Position| at.key != at.row);
/// let answer: naive::Answer<f64> = naive::answer(&Attention::new(), &Inputs::new(x, x, v), &others)?;
/// assert_eq!(answer.out, [4.0, 3.5, 1.5]); // the means of the other two
/// # Ok::<(), sdpa::Error>(())
/// ```
///
/// # Errors
/// As [`oracle`]; [`Error::Mask`] if the mask function does not fit the call ([`MaskMod::fits`]).
pub fn answer<T: Real, S: ScoreMod, M: MaskMod, P: WeightMod>(
    attention: &Attention,
    inputs: &Inputs<'_>,
    mods: &Mods<S, M, P>,
) -> Result<Answer<T>, Error> {
    let checked = attention.call_alone(inputs)?;
    let (call, shape) = (checked.call(), Shape::of(checked.call()));
    let Shape { batch, heads, kv_heads, q_len, kv_len, .. } = shape;
    call.check_mask(&mods.mask)?;
    let kv = call.kv;
    let mut sums = Vec::new();
    let bytes = (batch * kv_heads * kv_len).saturating_mul(size_of::<T>());
    sums.try_reserve_exact(batch * kv_heads * kv_len).map_err(|_| Error::Memory { what: "key weight sums", bytes })?;
    sums.resize(batch * kv_heads * kv_len, T::from(0.0));
    let mut all = Answer { out: Vec::new(), lse: Vec::new(), points: Default::default(), key_weight_sums: sums };
    if q_len == 0 || heads == 0 {
        return Ok(all);
    }
    let tensors = [
        Dense::of(inputs.q),
        // Rows that a cache has evicted or never held must not be visible: they read as NaN.
        Dense::new(kv.k_shape(), |at, all| kv.elements(TokenPart::Key, at, all)),
        Dense::new(kv.v_shape(), |at, all| kv.elements(TokenPart::Value, at, all)),
    ];
    for sequence in (0..batch).map(|index| OracleSequence::new(attention, inputs, shape, index)) {
        for (head, row) in (0..heads).flat_map(|head| (0..q_len).map(move |row| (head, row))) {
            sequence.row(&tensors, mods, sequence.at(head, row), &mut all);
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
    /// Copies rows `[b, h, l]`; those that are not there read as NaN.
    fn new(shape: [usize; 4], row: impl Fn([usize; 3], Range<usize>) -> Option<Vec<f32>>) -> Self {
        let [batch, heads, rows, dim] = shape;
        let at = |i: usize| [i / rows / heads, i / rows % heads, i % rows];
        let all = (0..batch * heads * rows).flat_map(|i| row(at(i), 0..dim).unwrap_or_else(|| vec![f32::NAN; dim]));
        Self { shape, data: all.map(T::from).collect() }
    }

    fn of(x: Tensor<'_>) -> Self {
        Self::new(x.shape(), |at, all| x.elements(at, all))
    }

    /// Returns a row of `of`, a tensor of this shape.
    fn slot<'x>(&self, [b, h, l]: [usize; 3], of: &'x mut [T]) -> &'x mut [T] {
        let [_, heads, rows, dim] = self.shape;
        &mut of[((b * heads + h) * rows + l) * dim..][..dim]
    }

    fn row(&self, [b, h, l]: [usize; 3]) -> &[T] {
        let [_, heads, rows, dim] = self.shape;
        &self.data[((b * heads + h) * rows + l) * dim..][..dim]
    }
}

/// Number type that the oracle computes in.
///
/// ```
/// use sdpa::naive::Real;
/// fn log_of_sum<T: Real>(a: T, b: T) -> T {
///     (a.exp() + b.exp()).ln()
/// }
/// assert!((log_of_sum(0f64, 3f64.ln()) - 4f64.ln()).abs() < 1e-15);
/// assert!((log_of_sum(0f32, 3f32.ln()) - 4f32.ln()).abs() < 1e-6);
/// ```
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
