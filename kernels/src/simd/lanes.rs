//! Sixteen floats of a slice in and out of a vector, checked by their types.

use crate::simd::{LANES, Simd};

#[inline(always)]
pub(crate) fn load<S: Simd>(s: S, from: &[f32; LANES]) -> S::V {
    // SAFETY: sixteen floats.
    unsafe { s.load(from.as_ptr()) }
}

#[inline(always)]
pub(crate) fn store<S: Simd>(s: S, to: &mut [f32; LANES], v: S::V) {
    // SAFETY: sixteen floats, borrowed exclusively.
    unsafe { s.store(to.as_mut_ptr(), v) }
}

/// At most sixteen floats, filled up.
#[inline(always)]
pub(crate) fn load_part<S: Simd>(s: S, from: &[f32], fill: f32) -> S::V {
    let mut lanes = [fill; LANES];
    lanes[..from.len()].copy_from_slice(from);
    load(s, &lanes)
}

/// As many lanes as there is room for, at most sixteen.
#[inline(always)]
pub(crate) fn store_part<S: Simd>(s: S, to: &mut [f32], v: S::V) {
    let mut lanes = [0.0; LANES];
    store(s, &mut lanes, v);
    to.copy_from_slice(&lanes[..to.len()]);
}
