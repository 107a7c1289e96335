//! Operands of products: numbers; pairs of bfloat16, two products a lane; or fours of bytes, or halves of bytes, and rounded
//! weights. Scores and outputs are sums of the same kinds of product.

use crate::matmul::byte_weights::{CENTRES, ROW_FLOATS, UNIT};
use crate::matmul::int4::NibbleQuad;
use crate::matmul::int8::{LARGEST_WEIGHT, QUAD, ValueQuad, WEIGHT_UNIT};
use crate::simd::{Bf16Dot, Bf16x2, Half, Int8Dot, LANES, Simd, Upper, Words4};
use crate::tensor::element::{Bf16, Load};

/// Multiply-add: the two operands of a product, and its addition to a sum.
///
/// # Safety
/// [`Self::x`] reads no more than element `i`, and [`Self::total`] no more than what lies behind a row's weights:
/// tiles rely on that.
pub(crate) unsafe trait MulAdd<S: Simd> {
    /// Element of a row (of queries, of weights), repeated in all lanes.
    type X: Copy;
    /// Elements of the columns of a vector.
    type Y: Copy;
    /// Sums of products, a column in each lane.
    type Sum: Copy;
    /// Number of products that are added to a lane at once.
    const PRODUCTS: usize;
    /// Largest number of rows of a register tile.
    const TILE_ROWS: usize = S::TILE_ROWS;
    /// Largest number of vectors of a register tile of P·V.
    const TILE_VECS: usize = S::TILE_VECS;
    /// Largest number of vectors of a tile of scores: of few rows on a core with a large first-level cache, where two of pairs
    /// are read from memory more slowly, and of many rows.
    const DOT_VECS: [usize; 2] = [1, S::TILE_VECS];
    /// Number of floats from one row to the next in P·V, where that is not the scores'.
    const ROW_FLOATS: Option<usize> = None;
    /// True if sums can be stored as floats and gone on with.
    const RESUMES: bool = true;

    /// Returns the part of the depth of a dot product that one chain of sums covers.
    #[inline(always)]
    fn chain(depth: usize) -> usize {
        depth
    }
    /// Returns the sums of which these are the [totals](Self::total): if it [does not resume](Self::RESUMES), sums of
    /// nothing.
    fn start(s: S, totals: S::V) -> Self::Sum;
    /// Loads element `i` of a row, repeated in all lanes.
    ///
    /// # Safety
    /// Element `i` of the row is readable; where operands are pairs, the row is one of pairs; where they
    /// are fours, one of rounded weights.
    unsafe fn x(s: S, row: *const f32, i: usize) -> Self::X;
    /// Returns `sum + x·y`.
    fn fma(s: S, x: Self::X, y: Self::Y, sum: Self::Sum) -> Self::Sum;
    /// Returns the sums of a row as floats.
    ///
    /// # Safety
    /// The row is readable, and one of rounded weights where operands are fours, with what else they have behind them.
    unsafe fn total(s: S, row: *const f32, sum: Self::Sum) -> S::V;
}

/// Elements of packed keys, or of rows of values.
///
/// # Safety
/// [`Self::y`] reads the elements that hold a vector's columns, and nothing else.
pub(crate) unsafe trait Operand<S: Simd>: Copy {
    /// Number of rows of elements that a term of a sum takes: two if pairs are elements of two rows.
    const ROWS: usize = 1;
    /// Number of elements of a packed key that lie side by side, 1 or 2, and are loaded together.
    const TERMS: usize = 1;
    /// Largest number of rows of a register tile: fewer than of its multiply-add, where a load holds more.
    const TILE_ROWS: usize = <Self::By as MulAdd<S>>::TILE_ROWS;
    /// Number of bytes of an element in each of its columns.
    const COLUMN_BYTES: usize = size_of::<Self>();
    /// True if tiles of P·V can end (finish) rows of these: only with `f32`, so that the code is not compiled for others.
    const ENDS: bool = false;
    /// Multiply-add of these elements.
    type By: MulAdd<S>;

    /// Returns the number of elements of a packed panel of sixteen keys.
    #[inline(always)]
    fn panel(depth: usize) -> usize {
        depth * LANES
    }
    /// Loads element `e` of load `load` of a packed panel of sixteen keys; a load has [`Self::TERMS`].
    ///
    /// # Safety
    /// The panel has such an element.
    #[inline(always)]
    unsafe fn of_panel(s: S, panel: *const Self, load: usize, e: usize) -> <Self::By as MulAdd<S>>::Y {
        debug_assert!(e == 0, "element {e} of a load of one");
        let row = panel.wrapping_add(load * LANES);
        // SAFETY: the caller guarantees the element in each of sixteen lanes.
        unsafe { Self::y(s, [row; 2], 0) }
    }
    /// Loads vector `n` of a term. Its rows begin at these addresses; the second counts if a term has [two](Self::ROWS).
    ///
    /// # Safety
    /// The rows have a column for each lane.
    unsafe fn y(s: S, rows: [*const Self; 2], n: usize) -> <Self::By as MulAdd<S>>::Y;
}

/// Operands that are floats, widened where they are shorter than `f32`.
pub(crate) struct Floats;

// SAFETY: `x` reads one float.
unsafe impl<S: Simd> MulAdd<S> for Floats {
    type X = S::V;
    type Y = S::V;
    type Sum = S::V;
    const PRODUCTS: usize = 1;
    // Many rows have a loop of their own.
    const DOT_VECS: [usize; 2] = [S::DOT_VECS, 1];

    /// Returns the length of a chain: the depth is split into at least two chains of about equal length, none longer
    /// than 32. Half of that where products are rounded before they are added, which makes up for it. Part of what
    /// defines a result's bits.
    #[inline(always)]
    fn chain(depth: usize) -> usize {
        let chains = depth.div_ceil(32).max(2);
        depth.div_ceil(if S::FUSED { chains } else { 2 * chains })
    }

    #[inline(always)]
    fn start(_: S, totals: S::V) -> S::V {
        totals
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

    #[inline(always)]
    unsafe fn total(_: S, _: *const f32, sum: S::V) -> S::V {
        sum
    }
}

// SAFETY: `Load::load` reads an element for each lane.
unsafe impl<S: Simd, T: Load> Operand<S> for T {
    // Four bytes: `f32`.
    const ENDS: bool = size_of::<T>() == size_of::<f32>();
    type By = Floats;

    #[inline(always)]
    unsafe fn y(s: S, [row, _]: [*const T; 2], n: usize) -> S::V {
        // SAFETY: the caller guarantees an element for each lane.
        unsafe { T::load(s, row.add(n * LANES)) }
    }
}

/// Operands that are pairs of bfloat16. Dot products are one chain: sums have half the terms, of operands that were rounded.
pub(crate) struct Bf16Pairs;

// SAFETY: `x` reads one pair.
unsafe impl<S: Bf16Dot> MulAdd<S> for Bf16Pairs {
    type X = S::Pair;
    type Y = S::P;
    type Sum = S::V;
    const PRODUCTS: usize = 2;

    #[inline(always)]
    fn start(_: S, totals: S::V) -> S::V {
        totals
    }

    #[inline(always)]
    unsafe fn x(s: S, row: *const f32, i: usize) -> S::Pair {
        // SAFETY: the caller guarantees that element `i` of a row of pairs is readable; a pair is as large as an `f32`,
        // and aligned alike.
        s.splat_bf16x2(unsafe { *row.cast::<Bf16x2>().add(i) })
    }

    #[inline(always)]
    fn fma(s: S, x: S::Pair, y: S::P, sum: S::V) -> S::V {
        s.dot2(sum, x, y)
    }

    #[inline(always)]
    unsafe fn total(_: S, _: *const f32, sum: S::V) -> S::V {
        sum
    }
}

// SAFETY: sixteen pairs are read.
unsafe impl<S: Bf16Dot> Operand<S> for Bf16x2 {
    type By = Bf16Pairs;

    #[inline(always)]
    unsafe fn y(s: S, [row, _]: [*const Self; 2], n: usize) -> S::P {
        // SAFETY: the caller guarantees sixteen pairs.
        unsafe { s.load_bf16x2(row.add(n * LANES)) }
    }
}

/// Element of one of two rows of values; neighbours make pairs. A last value without a neighbour is its own neighbour, with
/// weight 0.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(crate) struct HalfPair(Bf16);

// SAFETY: sixteen elements of both rows are read.
unsafe impl<S: Bf16Dot> Operand<S> for HalfPair {
    const ROWS: usize = 2;
    type By = Bf16Pairs;

    #[inline(always)]
    unsafe fn y(s: S, [first, second]: [*const Self; 2], n: usize) -> S::P {
        // SAFETY: the caller guarantees sixteen columns of both rows.
        unsafe { s.zip(first.add(n * LANES).cast(), second.add(n * LANES).cast()) }
    }
}

/// Operands that are two floats. Their products are added one after the other.
pub(crate) struct TwoFloats;

// SAFETY: `x` reads two floats.
unsafe impl<S: Simd> MulAdd<S> for TwoFloats {
    type X = [S::V; 2];
    type Y = [S::V; 2];
    type Sum = S::V;
    const PRODUCTS: usize = 2;
    const TILE_ROWS: usize = S::TWO_TERM_ROWS;

    #[inline(always)]
    fn start(_: S, totals: S::V) -> S::V {
        totals
    }

    #[inline(always)]
    unsafe fn x(s: S, row: *const f32, i: usize) -> [S::V; 2] {
        // SAFETY: the caller guarantees that term `i`, of two floats, is readable.
        unsafe { [s.splat(*row.add(2 * i)), s.splat(*row.add(2 * i + 1))] }
    }

    #[inline(always)]
    fn fma(s: S, x: [S::V; 2], y: [S::V; 2], sum: S::V) -> S::V {
        s.fma(x[1], y[1], s.fma(x[0], y[0], sum))
    }

    #[inline(always)]
    unsafe fn total(_: S, _: *const f32, sum: S::V) -> S::V {
        sum
    }
}

/// Values of two keys in one column, as floats. A last value without a neighbour is beside any number, with weight 0.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(crate) struct ValuePair(Bf16x2);

// SAFETY: sixteen pairs are read.
unsafe impl<S: Simd> Operand<S> for ValuePair {
    type By = TwoFloats;

    #[inline(always)]
    unsafe fn y(s: S, [row, _]: [*const Self; 2], n: usize) -> [S::V; 2] {
        let pairs = row.wrapping_add(n * LANES).cast();
        // SAFETY: the caller guarantees sixteen columns.
        unsafe { [s.load_of_pairs(pairs, 0), s.load_of_pairs(pairs, 1)] }
    }
}

/// Element of keys that are packed as pairs, as a float: elements `2i` and `2i + 1` of sixteen keys lie side by side.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(crate) struct PairElement(Bf16);

// SAFETY: sixteen pairs are read, which hold the element of each lane.
unsafe impl<S: Simd> Operand<S> for PairElement {
    const TERMS: usize = 2;
    const TILE_ROWS: usize = S::TWO_TERM_ROWS;
    type By = Floats;

    #[inline(always)]
    fn panel(depth: usize) -> usize {
        depth.next_multiple_of(2) * LANES
    }

    #[inline(always)]
    unsafe fn of_panel(s: S, panel: *const Self, load: usize, e: usize) -> S::V {
        // SAFETY: the caller guarantees the element, and so its pair.
        unsafe { s.load_of_pairs(panel.cast::<Bf16x2>().add(load * LANES), e) }
    }

    #[inline(always)]
    unsafe fn y(s: S, [row, _]: [*const Self; 2], _: usize) -> S::V {
        // SAFETY: the caller guarantees sixteen pairs.
        unsafe { s.load_of_pairs(row.cast(), 0) }
    }
}

/// Operands that are fours of bytes, and of weights in units of [`WEIGHT_UNIT`] of a row's largest. Sums are exact integers.
pub(crate) struct Int8Fours;

// SAFETY: `x` reads four weights, `total` the largest.
unsafe impl<S: Int8Dot> MulAdd<S> for Int8Fours {
    type X = Words4;
    type Y = S::Words;
    type Sum = S::Sums;
    const PRODUCTS: usize = QUAD;
    const TILE_ROWS: usize = S::WEIGHT_ROWS;
    // A total is rounded.
    const RESUMES: bool = false;

    #[inline(always)]
    fn start(s: S, _: S::V) -> S::Sums {
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
}

// SAFETY: `Int8Dot::words` reads sixteen fours of bytes.
unsafe impl<S: Int8Dot> Operand<S> for ValueQuad {
    type By = Int8Fours;

    #[inline(always)]
    unsafe fn y(s: S, [row, _]: [*const Self; 2], n: usize) -> S::Words {
        // SAFETY: the caller guarantees sixteen fours.
        unsafe { s.words(row.add(n * LANES).cast()) }
    }
}

/// Operands that are fours of four-bit elements, and of weights as bytes (`byte_weights.rs`). Sums are exact integers.
pub(crate) struct Int4Fours;

// SAFETY: `x` reads four weights, `total` their unit and the sum of centres.
unsafe impl<S: Int8Dot> MulAdd<S> for Int4Fours {
    type X = u32;
    type Y = S::NibbleColumns;
    type Sum = S::Sums;
    const PRODUCTS: usize = QUAD;
    const TILE_ROWS: usize = S::WEIGHT_ROWS;
    // Both halves of a block, which share their bytes; one, where tiles have one vector.
    const TILE_VECS: usize = if S::TILE_VECS > 1 { 2 } else { 1 };
    const ROW_FLOATS: Option<usize> = Some(ROW_FLOATS);
    const RESUMES: bool = false;

    #[inline(always)]
    fn start(s: S, _: S::V) -> S::Sums {
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
}

// SAFETY: `Int8Dot::nibble_columns` reads sixteen fours of bytes, which hold the columns of both halves of a block.
unsafe impl<S: Int8Dot, H: Half> Operand<S> for NibbleQuad<H> {
    // Two columns share a four; where tiles have one vector, each reads all of it.
    const COLUMN_BYTES: usize = size_of::<Self>() / <Int4Fours as MulAdd<S>>::TILE_VECS;
    type By = Int4Fours;

    #[inline(always)]
    unsafe fn y(s: S, [row, _]: [*const Self; 2], n: usize) -> S::NibbleColumns {
        debug_assert!(n == 0 || n == 1 && !H::IS_UPPER, "vector {n} of half a block");
        // SAFETY: the caller guarantees the columns, so there are sixteen fours at `row`.
        unsafe { if n == 0 { s.nibble_columns::<H>(row.cast()) } else { s.nibble_columns::<Upper>(row.cast()) } }
    }
}
