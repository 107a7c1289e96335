//! Functions of every element of a slice.

use crate::simd::isa::Isa;
use crate::simd::{Simd, exp};

/// Computes `eˣ` of every element in place, as the softmax does: for x ≤ 0.
pub fn exp_in_place(isa: Isa, xs: &mut [f32]) {
    dispatch!(isa, |s| s.vectorize(
        #[inline(always)]
        || exp::exp_slice(s, xs),
    ));
}
