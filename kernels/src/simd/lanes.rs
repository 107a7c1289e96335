//! Safe loads and stores: sixteen floats of a slice to and from a vector, with the length checked by the type.

use crate::simd::{LANES, Simd};

#[inline(always)]
pub(crate) fn load<S: Simd>(s: S, from: &[f32; LANES]) -> S::V {
    // SAFETY: the array holds sixteen floats.
    unsafe { s.load(from.as_ptr()) }
}

#[inline(always)]
pub(crate) fn store<S: Simd>(s: S, to: &mut [f32; LANES], v: S::V) {
    // SAFETY: the array holds sixteen floats and is borrowed exclusively.
    unsafe { s.store(to.as_mut_ptr(), v) }
}

/// Loads at most sixteen floats, the other lanes filled with `fill`.
#[inline(always)]
pub(crate) fn load_part<S: Simd>(s: S, from: &[f32], fill: f32) -> S::V {
    let mut lanes = [fill; LANES];
    lanes[..from.len()].copy_from_slice(from);
    load(s, &lanes)
}

/// Stores the first lanes: those that `to` has room for, at most sixteen.
#[inline(always)]
pub(crate) fn store_part<S: Simd>(s: S, to: &mut [f32], v: S::V) {
    let mut lanes = [0.0; LANES];
    store(s, &mut lanes, v);
    to.copy_from_slice(&lanes[..to.len()]);
}
