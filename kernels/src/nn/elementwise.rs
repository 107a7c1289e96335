//! Functions of every element of a slice.

use crate::simd::Simd;
use crate::simd::exp::{self, Accuracy, Full};
use crate::simd::isa::Isa;

/// Computes `eˣ` of every element in place, as the softmax does: for x ≤ 0.
pub fn exp_in_place(isa: Isa, xs: &mut [f32]) {
    exp_to::<Full>(isa, xs);
}

/// Computes `eˣ` of every element in place, to an accuracy, for x ≤ 0.
pub(crate) fn exp_to<A: Accuracy>(isa: Isa, xs: &mut [f32]) {
    dispatch!(isa, |s| s.vectorize(
        #[inline(always)]
        || exp::exp_slice::<_, A>(s, xs),
    ));
}
