//! Functions of every element of a slice.

use crate::simd::exp::{Accuracy, Full, exp_as};
use crate::simd::isa::Isa;
use crate::simd::{LANES, Simd};

/// Computes `eˣ` of every element in place, as the softmax does: for x ≤ 0.
pub fn exp_in_place(isa: Isa, xs: &mut [f32]) {
    exp_to::<Full>(isa, xs);
}

/// Computes `eˣ` of every element in place, to an accuracy, for x ≤ 0.
pub(crate) fn exp_to<A: Accuracy>(isa: Isa, xs: &mut [f32]) {
    dispatch!(isa, |s| s.vectorize(
        #[inline(always)]
        || exp_slice::<_, A>(s, xs),
    ));
}

/// Computes `eˣ` of every element of a slice, x ≤ 0 or NaN.
#[inline(always)]
fn exp_slice<S: Simd, A: Accuracy>(s: S, xs: &mut [f32]) {
    for chunk in xs.chunks_mut(LANES) {
        let mut lanes = [0.0; LANES];
        lanes[..chunk.len()].copy_from_slice(chunk);
        // SAFETY: `lanes` is an array of 16 floats, readable and writable.
        unsafe { s.store(lanes.as_mut_ptr(), exp_as::<S, A>(s, s.load(lanes.as_ptr()))) };
        chunk.copy_from_slice(&lanes[..chunk.len()]);
    }
}
