//! What is multiplied: numbers, or pairs of bfloat16, two products a lane. Scores and values are sums of the same.

use crate::simd::{Bf16Dot, Bf16x2, Simd};

/// The two sides of a product, and how it joins a sum.
pub(crate) trait MulAdd<S: Simd> {
    /// An element of a row (of queries, of weights), as often as there are lanes.
    type X: Copy;
    /// An element of each of sixteen columns.
    type Y: Copy;

    /// Zeros.
    fn zero(s: S) -> Self::Y;
    /// # Safety
    /// Element `i` of the row is readable; where operands are pairs, the row is one of pairs.
    unsafe fn x(s: S, row: *const f32, i: usize) -> Self::X;
    /// `sum + x·y`.
    fn fma(s: S, x: Self::X, y: Self::Y, sum: S::V) -> S::V;
}

/// Floats, widened where they are shorter than `f32`.
pub(crate) struct Floats;

impl<S: Simd> MulAdd<S> for Floats {
    type X = S::V;
    type Y = S::V;

    #[inline(always)]
    fn zero(s: S) -> S::V {
        s.splat(0.0)
    }

    #[inline(always)]
    unsafe fn x(s: S, row: *const f32, i: usize) -> S::V {
        // SAFETY: the caller's promise.
        s.splat(unsafe { *row.add(i) })
    }

    #[inline(always)]
    fn fma(s: S, x: S::V, y: S::V, sum: S::V) -> S::V {
        s.fma(x, y, sum)
    }
}

/// Bf16Dot of bfloat16.
pub(crate) struct Bf16Pairs;

impl<S: Bf16Dot> MulAdd<S> for Bf16Pairs {
    type X = S::P;
    type Y = S::P;

    #[inline(always)]
    fn zero(s: S) -> S::P {
        s.splat_bf16x2(Bf16x2::default())
    }

    #[inline(always)]
    unsafe fn x(s: S, row: *const f32, i: usize) -> S::P {
        // SAFETY: the caller's promise; a pair is as large as an `f32`, and aligned alike.
        s.splat_bf16x2(unsafe { *row.cast::<Bf16x2>().add(i) })
    }

    #[inline(always)]
    fn fma(s: S, x: S::P, y: S::P, sum: S::V) -> S::V {
        s.dot2(sum, x, y)
    }
}
