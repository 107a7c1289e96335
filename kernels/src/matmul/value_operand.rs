//! Terms of sums over keys: values row by row, in pairs of rows, or in fours.

use crate::matmul::int4::NibbleQuad;
use crate::matmul::int8::{QUAD, ValueQuad};
use crate::matmul::operands::{Bf16Pairs, Floats, Int4Fours, Int8Fours, MulAdd};
use crate::simd::{Bf16Dot, Bf16x2, Half, Int8Dot, LANES, Upper, Vector};
use crate::tensor::element::{Bf16, Load};
use crate::tensor::rows::Rows;

/// Terms of a sum over keys, each the values of one, two or four keys.
///
/// # Safety
/// Tiles compute the addresses that they read from these answers: terms that are evenly spaced are [`Self::step`] bytes
/// apart, and a term covers [`Self::KEYS`] keys.
pub(crate) unsafe trait ValueOperand<W: Vector>: Copy {
    /// Number of keys of a term.
    const KEYS: usize;
    /// Number of bytes of a term in each column.
    const BYTES: usize;
    /// Number of those bytes that lie at each of the term's [addresses](Self::rows).
    const ROW_BYTES: usize;
    /// True if tiles of these terms can end (finish) rows: only with floats, so that the code is not compiled for
    /// others.
    const ENDS: bool = false;
    /// Address of a term's columns.
    type At: Copy;
    /// Multiply-add of a term with its weight.
    type By: MulAdd<W>;

    /// Returns the number of bytes from one term to the next, where terms are evenly spaced.
    fn step(self) -> isize;
    /// Returns true if the terms' addresses are in a table.
    fn are_scattered(self) -> bool;
    /// Returns how many terms from this one on are evenly spaced.
    ///
    /// # Safety
    /// The term exists.
    unsafe fn evenly(self, term: usize) -> usize;
    /// Returns the address of a term, to prefetch it, and how many terms from it on are evenly spaced: see
    /// [`Rows::later`].
    ///
    /// # Safety
    /// The terms up to `end` exist.
    unsafe fn later(self, term: usize, end: usize) -> Option<(Self::At, usize)>;
    /// Returns the same terms from a column on.
    ///
    /// # Safety
    /// The column exists.
    unsafe fn columns_from(self, column: usize) -> Self;
    /// Returns the address of a term.
    ///
    /// # Safety
    /// The term exists.
    unsafe fn at(self, term: usize) -> Self::At;
    /// Returns the address `bytes` bytes further on.
    fn offset(at: Self::At, bytes: isize) -> Self::At;
    /// Returns the address of each key of a term.
    fn rows(at: Self::At) -> impl Iterator<Item = *const f32>;
    /// Loads a vector of a term's columns.
    ///
    /// # Safety
    /// The term has as many columns from `column` on as the vector has lanes.
    unsafe fn y(w: W, at: Self::At, column: usize) -> <Self::By as MulAdd<W>>::Y;
}

/// Elements of rows that are terms.
///
/// # Safety
/// [`Self::y`] reads the elements that hold a vector's columns, and nothing else; an element holds [`Self::KEYS`] keys.
pub(crate) unsafe trait ValueElement<W: Vector> {
    /// Number of keys of an element.
    const KEYS: usize;
    /// Number of bytes of an element in each of its columns.
    const COLUMN_BYTES: usize;
    /// Same as [`ValueOperand::ENDS`].
    const ENDS: bool;
    /// Multiply-add of elements with a weight.
    type By: MulAdd<W>;

    /// Loads the elements of a vector's columns, from `column` on. `p` is the first element of a row.
    ///
    /// # Safety
    /// The row has these columns.
    unsafe fn y(w: W, p: *const Self, column: usize) -> <Self::By as MulAdd<W>>::Y;
}

// SAFETY: `Load::load` reads an element for each lane; it is one key's.
unsafe impl<W: Vector, T: Load> ValueElement<W> for T {
    const KEYS: usize = 1;
    const COLUMN_BYTES: usize = size_of::<T>();
    // Four bytes: `f32`.
    const ENDS: bool = size_of::<T>() == size_of::<f32>();
    type By = Floats;

    #[inline(always)]
    unsafe fn y(w: W, p: *const T, column: usize) -> W::V {
        // SAFETY: the caller guarantees an element for each lane from `column` on.
        unsafe { T::load(w, p.add(column)) }
    }
}

// SAFETY: `Int8Dot::words` reads sixteen fours of bytes.
unsafe impl<S: Int8Dot> ValueElement<S> for ValueQuad {
    const KEYS: usize = QUAD;
    const COLUMN_BYTES: usize = size_of::<Self>();
    const ENDS: bool = false;
    type By = Int8Fours;

    #[inline(always)]
    unsafe fn y(s: S, p: *const Self, column: usize) -> S::Words {
        // SAFETY: the caller guarantees sixteen fours from `column` on.
        unsafe { s.words(p.add(column).cast()) }
    }
}

// SAFETY: `Int8Dot::nibble_columns` reads sixteen fours of bytes, which hold the columns of both halves of a block.
unsafe impl<S: Int8Dot, H: Half> ValueElement<S> for NibbleQuad<H> {
    const KEYS: usize = QUAD;
    // Two columns share a four; where tiles have one vector, each reads all of it.
    const COLUMN_BYTES: usize = size_of::<Self>() / <Int4Fours as MulAdd<S>>::TILE_VECS;
    const ENDS: bool = false;
    type By = Int4Fours;

    #[inline(always)]
    unsafe fn y(s: S, p: *const Self, column: usize) -> S::NibbleColumns {
        debug_assert!(column == 0 || column == LANES && !H::IS_UPPER, "column {column} of half a block");
        // SAFETY: the caller guarantees the columns, so there are sixteen fours at `p`.
        unsafe {
            match column {
                0 => s.nibble_columns::<H>(p.cast()),
                _ => s.nibble_columns::<Upper>(p.cast()),
            }
        }
    }
}

// SAFETY: a term is a row; rows say how they lie.
unsafe impl<W: Vector, T: ValueElement<W>> ValueOperand<W> for Rows<T> {
    const KEYS: usize = T::KEYS;
    const BYTES: usize = T::COLUMN_BYTES;
    const ROW_BYTES: usize = T::COLUMN_BYTES;
    const ENDS: bool = T::ENDS;
    type At = *const T;
    type By = T::By;

    #[inline(always)]
    fn step(self) -> isize {
        Rows::step(self).wrapping_mul(size_of::<T>() as isize)
    }

    #[inline(always)]
    fn are_scattered(self) -> bool {
        Rows::are_scattered(self)
    }

    #[inline(always)]
    unsafe fn evenly(self, term: usize) -> usize {
        // SAFETY: same contract: the caller guarantees that the row exists.
        unsafe { Rows::evenly(self, term) }
    }

    #[inline(always)]
    unsafe fn later(self, term: usize, end: usize) -> Option<(*const T, usize)> {
        // SAFETY: same contract: the caller guarantees the rows up to `end`.
        unsafe { Rows::later(self, term, end) }
    }

    #[inline(always)]
    fn offset(at: *const T, bytes: isize) -> *const T {
        at.wrapping_byte_offset(bytes)
    }

    #[inline(always)]
    unsafe fn columns_from(self, column: usize) -> Self {
        // SAFETY: same contract: the caller guarantees that the column exists.
        unsafe { Rows::columns_from(self, column) }
    }

    #[inline(always)]
    unsafe fn at(self, term: usize) -> *const T {
        // SAFETY: same contract: the caller guarantees that the row exists.
        unsafe { Rows::at(self, term) }
    }

    #[inline(always)]
    fn rows(at: *const T) -> impl Iterator<Item = *const f32> {
        core::iter::once(at.cast())
    }

    #[inline(always)]
    unsafe fn y(w: W, at: *const T, column: usize) -> <T::By as MulAdd<W>>::Y {
        // SAFETY: same contract: the caller guarantees a column for each lane from `column` on.
        unsafe { T::y(w, at, column) }
    }
}

/// Pairs of rows. A last row without a neighbour is its own neighbour, with weight 0.
#[derive(Clone, Copy)]
pub(crate) struct RowPairs {
    pub(crate) rows: Rows<Bf16>,
    /// Index of the last row.
    pub(crate) last: usize,
}

// SAFETY: a term is two rows, or the last row twice; both rows of a term are as evenly spaced as they say.
unsafe impl<S: Bf16Dot> ValueOperand<S> for RowPairs {
    const KEYS: usize = 2;
    const BYTES: usize = size_of::<Bf16x2>();
    const ROW_BYTES: usize = size_of::<Bf16>();
    type At = [*const Bf16; 2];
    type By = Bf16Pairs;

    #[inline(always)]
    fn step(self) -> isize {
        self.rows.step().wrapping_mul(2 * size_of::<Bf16>() as isize)
    }

    #[inline(always)]
    fn are_scattered(self) -> bool {
        self.rows.are_scattered()
    }

    #[inline(always)]
    unsafe fn evenly(self, term: usize) -> usize {
        // SAFETY: the caller guarantees that the term exists, so `2 * term` is at most the last row.
        let rows = unsafe { self.rows.evenly(2 * term) };
        // A pair is alone where a row's neighbour is not evenly spaced, or is the row itself.
        (rows.min(self.last + 1 - 2 * term) / 2).max(1)
    }

    #[inline(always)]
    unsafe fn later(self, term: usize, _: usize) -> Option<([*const Bf16; 2], usize)> {
        // SAFETY: the rows up to the last exist.
        let (first, together) = unsafe { self.rows.later(2 * term, self.last + 1)? };
        Some(([first, first.wrapping_offset(self.rows.step())], (together / 2).max(1)))
    }

    #[inline(always)]
    fn offset(at: [*const Bf16; 2], bytes: isize) -> [*const Bf16; 2] {
        at.map(|at| at.wrapping_byte_offset(bytes))
    }

    #[inline(always)]
    unsafe fn columns_from(self, column: usize) -> Self {
        // SAFETY: same contract: the caller guarantees that the column exists.
        Self { rows: unsafe { self.rows.columns_from(column) }, ..self }
    }

    #[inline(always)]
    unsafe fn at(self, term: usize) -> [*const Bf16; 2] {
        // SAFETY: the caller guarantees that the term exists, so `2 * term` is a row; the second index is at most the
        // last row.
        unsafe { [self.rows.at(2 * term), self.rows.at((2 * term + 1).min(self.last))] }
    }

    #[inline(always)]
    fn rows(at: [*const Bf16; 2]) -> impl Iterator<Item = *const f32> {
        at.into_iter().map(<*const Bf16>::cast)
    }

    #[inline(always)]
    unsafe fn y(s: S, [first, second]: [*const Bf16; 2], column: usize) -> S::P {
        // SAFETY: the caller guarantees sixteen columns of both rows from `column` on.
        unsafe { s.zip(first.add(column).cast(), second.add(column).cast()) }
    }
}
