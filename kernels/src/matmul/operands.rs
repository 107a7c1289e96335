//! Operands of products: numbers; pairs of bfloat16, two products a lane; or fours of bytes, or halves of bytes, and rounded
//! weights. Scores and outputs are sums of the same kinds of product.

use crate::matmul::byte_weights::{CENTRES, ROW_FLOATS, UNIT};
use crate::matmul::int8::{LARGEST_WEIGHT, WEIGHT_UNIT};
use crate::simd::{Bf16Dot, Bf16x2, Int8Dot, Vector, Words4};

/// Multiply-add: the two operands of a product, and its addition to a sum.
///
/// # Safety
/// [`Self::x`] reads no more than element `i`, and [`Self::total`] no more than what lies behind a row's weights:
/// tiles rely on that.
pub(crate) unsafe trait MulAdd<W: Vector> {
    /// Element of a row (of queries, of weights), repeated in all lanes.
    type X: Copy;
    /// Elements of the columns of a vector.
    type Y: Copy;
    /// Sums of products, a column in each lane.
    type Sum: Copy;
    /// Largest number of rows of a register tile, where that is not the backend's.
    const TILE_ROWS: usize = usize::MAX;
    /// Largest number of vectors of a register tile, where that is not the backend's.
    const TILE_VECS: usize = usize::MAX;
    /// Number of floats from one row to the next in P·V, where that is not the scores'.
    const ROW_FLOATS: Option<usize> = None;
    /// True if sums can be stored as floats and gone on with.
    const RESUMES: bool = true;

    /// Returns sums of nothing.
    fn start(w: W) -> Self::Sum;
    /// Loads element `i` of a row, repeated in all lanes.
    ///
    /// # Safety
    /// Element `i` of the row is readable; where operands are pairs, the row is one of pairs; where they
    /// are fours, one of rounded weights.
    unsafe fn x(w: W, row: *const f32, i: usize) -> Self::X;
    /// Returns `sum + x·y`.
    fn fma(w: W, x: Self::X, y: Self::Y, sum: Self::Sum) -> Self::Sum;
    /// Returns the sums of a row as floats.
    ///
    /// # Safety
    /// The row is readable, and one of rounded weights where operands are fours, with what else they have behind them.
    unsafe fn total(w: W, row: *const f32, sum: Self::Sum) -> W::V;
    /// Returns the sums of which these are the [totals](Self::total), if it [does](Self::RESUMES).
    fn resume(w: W, total: W::V) -> Self::Sum;
}

/// Operands that are floats, widened where they are shorter than `f32`.
pub(crate) struct Floats;

// SAFETY: `x` reads one float.
unsafe impl<W: Vector> MulAdd<W> for Floats {
    type X = W::V;
    type Y = W::V;
    type Sum = W::V;

    #[inline(always)]
    fn start(w: W) -> W::V {
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

    #[inline(always)]
    unsafe fn total(_: W, _: *const f32, sum: W::V) -> W::V {
        sum
    }

    #[inline(always)]
    fn resume(_: W, total: W::V) -> W::V {
        total
    }
}

/// Operands that are pairs of bfloat16.
pub(crate) struct Bf16Pairs;

// SAFETY: `x` reads one pair.
unsafe impl<S: Bf16Dot> MulAdd<S> for Bf16Pairs {
    type X = S::P;
    type Y = S::P;
    type Sum = S::V;

    #[inline(always)]
    fn start(s: S) -> S::V {
        s.splat(0.0)
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

    #[inline(always)]
    unsafe fn total(_: S, _: *const f32, sum: S::V) -> S::V {
        sum
    }

    #[inline(always)]
    fn resume(_: S, total: S::V) -> S::V {
        total
    }
}

/// Operands that are fours of bytes, and of weights in units of [`WEIGHT_UNIT`] of a row's largest. Sums are exact integers.
pub(crate) struct Int8Fours;

// SAFETY: `x` reads four weights, `total` the largest.
unsafe impl<S: Int8Dot> MulAdd<S> for Int8Fours {
    type X = Words4;
    type Y = S::Words;
    type Sum = S::Sums;
    const TILE_ROWS: usize = S::WEIGHT_ROWS;
    // A total is rounded.
    const RESUMES: bool = false;

    #[inline(always)]
    fn start(s: S) -> S::Sums {
        s.start(0)
    }

    #[inline(always)]
    unsafe fn x(_: S, row: *const f32, i: usize) -> Words4 {
        // SAFETY: the caller guarantees that four `i` of a row of 16-bit weights is readable, which is aligned as floats are.
        unsafe { *row.cast::<Words4>().add(i) }
    }

    #[inline(always)]
    fn fma(s: S, x: Words4, y: S::Words, sum: S::Sums) -> S::Sums {
        s.dot4_words(sum, x, y)
    }

    #[inline(always)]
    unsafe fn total(s: S, row: *const f32, sum: S::Sums) -> S::V {
        // Two products: the unit of weights that are hardly normal numbers would not be one.
        // SAFETY: the caller guarantees a row with its largest weight.
        let largest = unsafe { *row.add(LARGEST_WEIGHT) };
        s.mul(s.mul(s.to_f32(sum), s.splat(WEIGHT_UNIT)), s.splat(largest))
    }

    fn resume(_: S, _: S::V) -> S::Sums {
        unreachable!("sums of integers are taken at once")
    }
}

/// Operands that are fours of four-bit elements, and of weights as bytes (`byte_weights.rs`). Sums are exact integers.
pub(crate) struct Int4Fours;

// SAFETY: `x` reads four weights, `total` their unit and the sum of centres.
unsafe impl<S: Int8Dot> MulAdd<S> for Int4Fours {
    type X = u32;
    type Y = S::NibbleColumns;
    type Sum = S::Sums;
    const TILE_ROWS: usize = S::WEIGHT_ROWS;
    // Both halves of a block, which share their bytes; one, where tiles have one vector.
    const TILE_VECS: usize = if S::TILE_VECS > 1 { 2 } else { 1 };
    const ROW_FLOATS: Option<usize> = Some(ROW_FLOATS);
    const RESUMES: bool = false;

    #[inline(always)]
    fn start(s: S) -> S::Sums {
        s.start(0)
    }

    #[inline(always)]
    unsafe fn x(_: S, row: *const f32, i: usize) -> u32 {
        // SAFETY: the caller guarantees that four `i` of a row of bytes is readable, which is aligned as floats are.
        u32::from_le(unsafe { *row.cast::<u32>().add(i) })
    }

    #[inline(always)]
    fn fma(s: S, x: u32, y: S::NibbleColumns, sum: S::Sums) -> S::Sums {
        s.dot4_bytes(sum, x, y)
    }

    #[inline(always)]
    unsafe fn total(s: S, row: *const f32, sum: S::Sums) -> S::V {
        // SAFETY: the caller guarantees a row of bytes, with what lies behind them.
        let [unit, centres] = unsafe { [*row.add(UNIT), *row.add(CENTRES)] };
        s.fma(s.nibble_sums(sum), s.splat(unit), s.splat(centres))
    }

    fn resume(s: S, total: S::V) -> S::Sums {
        Int8Fours::resume(s, total)
    }
}
