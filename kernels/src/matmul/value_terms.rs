//! Terms of sums over keys: values row by row, in pairs of rows, or in fours.

use crate::matmul::operands::{MulAdd, Operand};
use crate::simd::{LANES, Simd};
use crate::tensor::rows::Rows;
use core::ops::Range;

/// Terms of sums over keys, each the values of one, two or four keys in [one row or two](Operand::ROWS), from some column on:
/// the part of a span that a tile computes at a time.
pub(crate) struct ValueTerms<S, T> {
    pub(crate) s: S,
    rows: Rows<T>,
    /// Terms of the part.
    pub(crate) terms: Range<usize>,
    /// Terms of the span.
    all: Range<usize>,
    /// End of the span's keys. A last one that has no neighbour is a pair with itself, if a term has two rows.
    end: usize,
}

impl<S: Simd, T: Operand<S>> ValueTerms<S, T> {
    /// Makes the terms of a span that belong to a run of keys. Spans and runs start at a panel, so they start with a whole term.
    #[inline(always)]
    pub(crate) fn new(s: S, rows: Rows<T>, span: &Range<usize>, run: &Range<usize>) -> Self {
        let of = |keys: &Range<usize>| keys.start / T::By::PRODUCTS..keys.end.div_ceil(T::By::PRODUCTS);
        let (all, run) = (of(span), of(run));
        Self { s, rows, terms: all.start.max(run.start)..all.end.min(run.end), all, end: span.end }
    }

    /// Returns true if the part is the span's first.
    #[inline(always)]
    pub(crate) fn are_first(&self) -> bool {
        self.terms.start == self.all.start
    }

    /// Returns true if the part is the span's last.
    #[inline(always)]
    pub(crate) fn are_last(&self) -> bool {
        self.terms.end == self.all.end
    }

    /// Returns the number of bytes from one term to the next, where terms are evenly spaced.
    #[inline(always)]
    pub(crate) fn step(&self) -> isize {
        self.rows.step().wrapping_mul((T::ROWS * size_of::<T>()) as isize)
    }

    /// Returns the addresses of a term's rows.
    ///
    /// # Safety
    /// The term is one of the span's, and its values exist.
    #[inline(always)]
    pub(crate) unsafe fn at(&self, term: usize) -> [*const T; 2] {
        // SAFETY: the caller guarantees the term, and so its first row; the second index is at most the last key.
        unsafe {
            let first = self.rows.at(T::ROWS * term);
            [first, if T::ROWS == 1 { first } else { self.rows.at((2 * term + 1).min(self.end - 1)) }]
        }
    }

    /// Returns how many terms from this one on are evenly spaced.
    ///
    /// # Safety
    /// As [`Self::at`].
    #[inline(always)]
    pub(crate) unsafe fn evenly(&self, term: usize) -> usize {
        // SAFETY: the caller guarantees the term, and so its first row.
        let rows = unsafe { self.rows.evenly(T::ROWS * term) };
        // A pair is alone where a row's neighbour is not evenly spaced, or is the row itself.
        if T::ROWS == 1 { rows } else { (rows.min(self.end - 2 * term) / 2).max(1) }
    }

    /// Returns the addresses of a term's rows, to prefetch it, and how many terms from it on are evenly spaced: see
    /// [`Rows::later`].
    ///
    /// # Safety
    /// The span's values exist.
    #[inline(always)]
    pub(crate) unsafe fn later(&self, term: usize) -> Option<([*const T; 2], usize)> {
        let rows = self.end.div_ceil(T::By::PRODUCTS / T::ROWS);
        // SAFETY: the caller guarantees the rows.
        let (first, together) = unsafe { self.rows.later(T::ROWS * term, rows)? };
        Some(([first, first.wrapping_offset(self.rows.step())], (together / T::ROWS).max(1)))
    }

    /// Returns the address from which a tile that begins at vector `vec` of the rows prefetches its share of the values `far` terms
    /// after the part's start, if those are evenly spaced: rows are contiguous, so the tiles of a part together prefetch all of
    /// them, in the order of memory.
    ///
    /// # Safety
    /// The span's values exist.
    #[inline(always)]
    pub(crate) unsafe fn next_in_order(&self, far: usize, vec: usize) -> Option<[*const T; 2]> {
        // SAFETY: same contract.
        let (at, evenly) = unsafe { self.later(self.terms.start + far)? };
        let bytes = (self.terms.len() - 1) * vec * LANES * T::COLUMN_BYTES;
        (evenly >= self.terms.len()).then(|| offset(at, bytes as isize))
    }
}

/// Returns the addresses `bytes` bytes further on.
#[inline(always)]
pub(crate) fn offset<T>(rows: [*const T; 2], bytes: isize) -> [*const T; 2] {
    rows.map(|row| row.wrapping_byte_offset(bytes))
}
