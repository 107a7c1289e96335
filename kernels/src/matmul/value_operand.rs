//! What sums over keys are made of: values row by row, or in pairs of rows.

use crate::matmul::operands::{Bf16Pairs, Floats, MulAdd};
use crate::simd::{Bf16Dot, Bf16x2, Simd};
use crate::tensor::element::{Bf16, Load};
use crate::tensor::rows::Rows;

/// What a sum over keys is made of: keys one by one, or in pairs.
pub(crate) trait ValueOperand<S: Simd>: Copy {
    /// Keys of a term.
    const KEYS: usize;
    /// Bytes of a term in each column.
    const BYTES: usize;
    /// Whether tiles of them can end rows: only of floats, so that for others there is no such code.
    const ENDS: bool = false;
    /// Where a term's columns are.
    type At: Copy;
    /// How a term meets its weight.
    type By: MulAdd<S>;

    /// Bytes from one term to the next, where they lie evenly.
    fn step(self) -> isize;
    /// How many terms from this one on lie evenly.
    ///
    /// # Safety
    /// There is such a term.
    unsafe fn evenly(self, term: usize) -> usize;
    /// Where a term is, to ask for it, and how many from it on lie evenly: see [`Rows::later`].
    ///
    /// # Safety
    /// There are terms up to `end`.
    unsafe fn later(self, term: usize, end: usize) -> Option<(Self::At, usize)>;
    /// The same from a column on.
    ///
    /// # Safety
    /// There is such a column.
    unsafe fn columns_from(self, column: usize) -> Self;
    /// # Safety
    /// There is such a term.
    unsafe fn at(self, term: usize) -> Self::At;
    /// So many bytes on.
    fn offset(at: Self::At, bytes: isize) -> Self::At;
    /// Where the memory of each of its keys begins.
    fn rows(at: Self::At) -> impl Iterator<Item = *const f32>;
    /// A term in sixteen columns.
    ///
    /// # Safety
    /// It has those, from `column` on.
    unsafe fn y(s: S, at: Self::At, column: usize) -> <Self::By as MulAdd<S>>::Y;
}

impl<S: Simd, T: Load> ValueOperand<S> for Rows<T> {
    const KEYS: usize = 1;
    const BYTES: usize = size_of::<T>();
    // Four bytes: `f32`.
    const ENDS: bool = size_of::<T>() == size_of::<f32>();
    type At = *const T;
    type By = Floats;

    #[inline(always)]
    fn step(self) -> isize {
        Rows::step(self).wrapping_mul(size_of::<T>() as isize)
    }

    #[inline(always)]
    unsafe fn evenly(self, term: usize) -> usize {
        // SAFETY: passed on.
        unsafe { Rows::evenly(self, term) }
    }

    #[inline(always)]
    unsafe fn later(self, term: usize, end: usize) -> Option<(*const T, usize)> {
        // SAFETY: passed on.
        unsafe { Rows::later(self, term, end) }
    }

    #[inline(always)]
    fn offset(at: *const T, bytes: isize) -> *const T {
        at.wrapping_byte_offset(bytes)
    }

    #[inline(always)]
    unsafe fn columns_from(self, column: usize) -> Self {
        // SAFETY: passed on.
        unsafe { Rows::columns_from(self, column) }
    }

    #[inline(always)]
    unsafe fn at(self, term: usize) -> *const T {
        // SAFETY: passed on.
        unsafe { Rows::at(self, term) }
    }

    #[inline(always)]
    fn rows(at: *const T) -> impl Iterator<Item = *const f32> {
        core::iter::once(at.cast())
    }

    #[inline(always)]
    unsafe fn y(s: S, at: *const T, column: usize) -> S::V {
        // SAFETY: the caller's promise.
        unsafe { T::load(s, at.add(column)) }
    }
}

/// Rows two by two. Where the last has no neighbour, it is its own: that one's weight is 0.
#[derive(Clone, Copy)]
pub(crate) struct RowPairs {
    pub(crate) rows: Rows<Bf16>,
    /// The last row there is.
    pub(crate) last: usize,
}

impl<S: Bf16Dot> ValueOperand<S> for RowPairs {
    const KEYS: usize = 2;
    const BYTES: usize = size_of::<Bf16x2>();
    type At = [*const Bf16; 2];
    type By = Bf16Pairs;

    #[inline(always)]
    fn step(self) -> isize {
        self.rows.step().wrapping_mul(2 * size_of::<Bf16>() as isize)
    }

    #[inline(always)]
    unsafe fn evenly(self, term: usize) -> usize {
        // SAFETY: passed on: `2 * term` is at most the last row.
        let rows = unsafe { self.rows.evenly(2 * term) };
        // Where a row's neighbour lies elsewhere, or is the row itself, a pair is alone.
        (rows.min(self.last + 1 - 2 * term) / 2).max(1)
    }

    #[inline(always)]
    unsafe fn later(self, term: usize, _: usize) -> Option<([*const Bf16; 2], usize)> {
        // SAFETY: there are rows up to the last.
        let (first, together) = unsafe { self.rows.later(2 * term, self.last + 1)? };
        Some(([first, first.wrapping_offset(self.rows.step())], (together / 2).max(1)))
    }

    #[inline(always)]
    fn offset(at: [*const Bf16; 2], bytes: isize) -> [*const Bf16; 2] {
        at.map(|at| at.wrapping_byte_offset(bytes))
    }

    #[inline(always)]
    unsafe fn columns_from(self, column: usize) -> Self {
        // SAFETY: passed on.
        Self { rows: unsafe { self.rows.columns_from(column) }, ..self }
    }

    #[inline(always)]
    unsafe fn at(self, term: usize) -> [*const Bf16; 2] {
        // SAFETY: passed on; no row beyond the last.
        unsafe { [self.rows.at(2 * term), self.rows.at((2 * term + 1).min(self.last))] }
    }

    #[inline(always)]
    fn rows(at: [*const Bf16; 2]) -> impl Iterator<Item = *const f32> {
        at.into_iter().map(<*const Bf16>::cast)
    }

    #[inline(always)]
    unsafe fn y(s: S, [first, second]: [*const Bf16; 2], column: usize) -> S::P {
        // SAFETY: the caller's promise.
        unsafe { s.zip(first.add(column).cast(), second.add(column).cast()) }
    }
}
