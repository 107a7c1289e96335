//! What is multiplied: numbers, or pairs of bfloat16, two products a lane. Scores and values are sums of the same.

use crate::simd::{Pair, Pairs, Simd};

/// The two sides of a product, and how it joins a sum.
pub(crate) trait Operands<S: Simd> {
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

/// Numbers, widened where they are shorter than `f32`.
pub(crate) struct Numbers;

impl<S: Simd> Operands<S> for Numbers {
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

/// Pairs of bfloat16.
pub(crate) struct Paired;

impl<S: Pairs> Operands<S> for Paired {
    type X = S::P;
    type Y = S::P;

    #[inline(always)]
    fn zero(s: S) -> S::P {
        s.splat_pair(Pair::default())
    }

    #[inline(always)]
    unsafe fn x(s: S, row: *const f32, i: usize) -> S::P {
        // SAFETY: the caller's promise; a pair is as large as an `f32`, and aligned alike.
        s.splat_pair(unsafe { *row.cast::<Pair>().add(i) })
    }

    #[inline(always)]
    fn fma(s: S, x: S::P, y: S::P, sum: S::V) -> S::V {
        s.dot2(sum, x, y)
    }
}
