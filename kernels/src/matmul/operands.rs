//! Operands of products: numbers, or pairs of bfloat16, two products a lane. Scores and outputs are sums of the same
//! kinds of product.

use crate::simd::{Bf16Dot, Bf16x2, Vector};

/// Multiply-add: the two operands of a product, and its addition to a sum.
///
/// # Safety
/// [`Self::x`] reads no more than element `i`: tiles rely on that.
pub(crate) unsafe trait MulAdd<W: Vector> {
    /// Element of a row (of queries, of weights), repeated in all lanes.
    type X: Copy;
    /// Elements of the columns of a vector.
    type Y: Copy;

    /// Returns zeros.
    fn zero(w: W) -> Self::Y;
    /// Loads element `i` of a row, repeated in all lanes.
    ///
    /// # Safety
    /// Element `i` of the row is readable; where operands are pairs, the row is one of pairs.
    unsafe fn x(w: W, row: *const f32, i: usize) -> Self::X;
    /// Returns `sum + x·y`.
    fn fma(w: W, x: Self::X, y: Self::Y, sum: W::V) -> W::V;
}

/// Operands that are floats, widened where they are shorter than `f32`.
pub(crate) struct Floats;

// SAFETY: `x` reads one float.
unsafe impl<W: Vector> MulAdd<W> for Floats {
    type X = W::V;
    type Y = W::V;

    #[inline(always)]
    fn zero(w: W) -> W::V {
        w.splat(0.0)
    }

    #[inline(always)]
    unsafe fn x(w: W, row: *const f32, i: usize) -> W::V {
        // SAFETY: the caller guarantees that element `i` is readable.
        w.splat(unsafe { *row.add(i) })
    }

    #[inline(always)]
    fn fma(w: W, x: W::V, y: W::V, sum: W::V) -> W::V {
        w.fma(x, y, sum)
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
