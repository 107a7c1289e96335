//! Infinite values of visible keys: an output with a visible value of ∞ is ∞, whatever the finite values beside it add
//! up to.
//!
//! Sums are not normalised until a row ends, so finite values may overflow to ∞ before that, and meet an ∞ of the other
//! sign where the formula in IEEE arithmetic has a finite number. Therefore an output that accumulates a non-finite
//! value is marked: it becomes a NaN with its own payload, which ignores further finite values. The arithmetic of
//! marks is the same however the keys are accumulated: block by block, in separate units, or in one call after another.

use crate::simd::{LANES, Simd, quiet};

/// Mark of ∞; with the sign bit, of −∞. Other NaNs of outputs accumulated with non-finite values handled come from sums
/// that overflow, and have no such payload.
const INFINITY: u32 = 0x7fc0_0001;
/// Mark of NaN.
const NOT_A_NUMBER: u32 = 0x7fc0_0002;
const SIGN: u32 = 1 << 31;

/// Returns the mark of ±∞ or NaN.
pub(crate) fn mark(x: f32) -> f32 {
    debug_assert!(!x.is_finite());
    f32::from_bits(if x.is_nan() { NOT_A_NUMBER } else { INFINITY | (x.to_bits() & SIGN) })
}

/// Returns the infinity or NaN that a mark stands for; `None` if `x` is not a mark.
#[inline(always)]
fn marked(x: f32) -> Option<f32> {
    match x.to_bits() {
        NOT_A_NUMBER => Some(f32::NAN),
        bits if bits & !SIGN == INFINITY => Some(f32::INFINITY.copysign(x)),
        _ => None,
    }
}

/// Adds to an output the product of a weight and a non-finite value, and returns the new mark.
pub(crate) fn add_nonfinite(output: f32, product: f32) -> f32 {
    mark(marked(output).map_or(product, |before| before + product))
}

/// Replaces marks in running outputs by the infinity or NaN they stand for.
#[inline(always)]
pub(crate) fn infinities<S: Simd>(s: S, x: S::V) -> S::V {
    let mut lanes = [0.0; LANES];
    // SAFETY: `lanes` is sixteen floats.
    unsafe { s.store(lanes.as_mut_ptr(), x) };
    for lane in &mut lanes {
        *lane = marked(*lane).unwrap_or(*lane);
    }
    // SAFETY: `lanes` is sixteen floats.
    unsafe { s.load(lanes.as_ptr()) }
}

/// Returns `out · rescale_prev + later · factor` where either output may be marked; `sum` is the result in plain
/// arithmetic.
pub(crate) fn merge([rescale_prev, factor]: [f32; 2], out: f32, later: f32, sum: f32) -> f32 {
    // A factor of 0 turns ∞ into NaN, as in plain arithmetic.
    match [marked(out).map(|x| x * rescale_prev), marked(later).map(|x| x * factor)] {
        [None, None] => quiet(sum),
        [Some(x), None] | [None, Some(x)] => mark(x),
        [Some(x), Some(y)] => mark(x + y),
    }
}
