//! Infinite values that rows see: an output that sees ∞ is ∞, whatever the finite values beside it add up to.
//!
//! Sums are not normalised until a row ends, so finite values may add up to ∞ before that, and ∞ of one sign meet ∞ of the
//! other where the formula in IEEE arithmetic has a finite number. So an output that has seen a value that is not finite is
//! marked: it is a NaN with a payload of its own, which takes no more finite values in. The marks' arithmetic is the same
//! whoever gathers: block by block, units apart, or calls one after another.

use crate::simd::{LANES, Simd, quiet};

/// Marks of ∞, with the sign bit of −∞, and of NaN. Other NaNs of outputs that are accumulated with care come from sums that
/// overflow, and have no such payload.
const INFINITY: u32 = 0x7fc0_0001;
const NOT_A_NUMBER: u32 = 0x7fc0_0002;
const SIGN: u32 = 1 << 31;

/// The mark of ±∞ or NaN.
pub(crate) fn mark(x: f32) -> f32 {
    debug_assert!(!x.is_finite());
    f32::from_bits(if x.is_nan() { NOT_A_NUMBER } else { INFINITY | (x.to_bits() & SIGN) })
}

/// The infinity or NaN that a mark stands for.
#[inline(always)]
fn marked(x: f32) -> Option<f32> {
    match x.to_bits() {
        NOT_A_NUMBER => Some(f32::NAN),
        bits if bits & !SIGN == INFINITY => Some(f32::INFINITY.copysign(x)),
        _ => None,
    }
}

/// An output that sees one more product of a weight and a value that is not finite.
pub(crate) fn see(output: f32, product: f32) -> f32 {
    mark(marked(output).map_or(product, |before| before + product))
}

/// Running outputs as they end: ∞ for its mark.
#[inline(always)]
pub(crate) fn infinities<S: Simd>(s: S, x: S::V) -> S::V {
    let mut lanes = [0.0; LANES];
    // SAFETY: sixteen floats.
    unsafe { s.store(lanes.as_mut_ptr(), x) };
    for lane in &mut lanes {
        *lane = marked(*lane).unwrap_or(*lane);
    }
    // SAFETY: sixteen floats.
    unsafe { s.load(lanes.as_ptr()) }
}

/// `out · rescale_prev + later · factor` where either may be marked; `sum` is that in plain arithmetic.
pub(crate) fn merge([rescale_prev, factor]: [f32; 2], out: f32, later: f32, sum: f32) -> f32 {
    // A factor of 0 makes NaN of ∞, as it does of any.
    match [marked(out).map(|x| x * rescale_prev), marked(later).map(|x| x * factor)] {
        [None, None] => quiet(sum),
        [Some(x), None] | [None, Some(x)] => mark(x),
        [Some(x), Some(y)] => mark(x + y),
    }
}
