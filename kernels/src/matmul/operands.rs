//! Operands of products: numbers, or pairs of bfloat16, two products a lane. Scores and outputs are sums of the same
//! kinds of product.

use crate::simd::{Bf16Dot, Bf16x2, Simd};

/// Multiply-add: the two operands of a product, and its addition to a sum.
///
/// # Safety
/// [`Self::x`] reads no more than element `i`: tiles rely on that.
pub(crate) unsafe trait MulAdd<S: Simd> {
    /// Element of a row (of queries, of weights), repeated in all lanes.
    type X: Copy;
    /// Element of each of sixteen columns.
    type Y: Copy;

    /// Returns zeros.
    fn zero(s: S) -> Self::Y;
    /// Loads element `i` of a row, repeated in all lanes.
    ///
    /// # Safety
    /// Element `i` of the row is readable; where operands are pairs, the row is one of pairs.
    unsafe fn x(s: S, row: *const f32, i: usize) -> Self::X;
    /// Returns `sum + x·y`.
    fn fma(s: S, x: Self::X, y: Self::Y, sum: S::V) -> S::V;
}

/// Operands that are floats, widened where they are shorter than `f32`.
pub(crate) struct Floats;

// SAFETY: `x` reads one float.
unsafe impl<S: Simd> MulAdd<S> for Floats {
    type X = S::V;
    type Y = S::V;

    #[inline(always)]
    fn zero(s: S) -> S::V {
        s.splat(0.0)
    }

    #[inline(always)]
    unsafe fn x(s: S, row: *const f32, i: usize) -> S::V {
        // SAFETY: the caller guarantees that element `i` is readable.
        s.splat(unsafe { *row.add(i) })
    }

    #[inline(always)]
    fn fma(s: S, x: S::V, y: S::V, sum: S::V) -> S::V {
        s.fma(x, y, sum)
    }
}

/// Operands that are pairs of bfloat16.
pub(crate) struct Bf16Pairs;

// SAFETY: `x` reads one pair.
unsafe impl<S: Bf16Dot> MulAdd<S> for Bf16Pairs {
    type X = S::P;
    type Y = S::P;

    #[inline(always)]
    fn zero(s: S) -> S::P {
        s.splat_bf16x2(Bf16x2::default())
    }

    #[inline(always)]
    unsafe fn x(s: S, row: *const f32, i: usize) -> S::P {
        // SAFETY: the caller guarantees that element `i` of a row of pairs is readable; a pair is as large as an `f32`,
        // and aligned alike.
        s.splat_bf16x2(unsafe { *row.cast::<Bf16x2>().add(i) })
    }

    #[inline(always)]
    fn fma(s: S, x: S::P, y: S::P, sum: S::V) -> S::V {
        s.dot2(sum, x, y)
    }
}
