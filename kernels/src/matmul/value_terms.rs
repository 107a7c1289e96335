//! Terms of sums over keys: values row by row, in pairs of rows, or in fours.

use crate::matmul::operands::{MulAdd, Operand};
use crate::simd::Simd;
use crate::tensor::rows::Rows;
use core::ops::Range;

/// Terms of sums over keys, each the values of one, two or four keys in [one row or two](Operand::ROWS).
#[derive(Clone, Copy)]
pub(crate) struct ValueTerms<S, T> {
    pub(crate) s: S,
    pub(crate) rows: Rows<T>,
    /// End of the keys. A last one that has no neighbour is a pair with itself.
    pub(crate) end: usize,
}

impl<S: Simd, T: Operand<S>> ValueTerms<S, T> {
    /// Returns the terms of some keys, which start with a whole term.
    #[inline(always)]
    pub(crate) fn of_keys(keys: &Range<usize>) -> Range<usize> {
        keys.start / T::By::PRODUCTS..keys.end.div_ceil(T::By::PRODUCTS)
    }

    /// Returns the number of bytes from one term to the next, where terms are evenly spaced.
    #[inline(always)]
    pub(crate) fn step(self) -> isize {
        self.rows.step().wrapping_mul((T::ROWS * size_of::<T>()) as isize)
    }

    /// Returns the addresses of a term's rows.
    ///
    /// # Safety
    /// The term exists.
    #[inline(always)]
    pub(crate) unsafe fn at(self, term: usize) -> [*const T; 2] {
        // SAFETY: the caller guarantees the term, and so its first row; the second index is at most the last key.
        unsafe {
            let first = self.rows.at(T::ROWS * term);
            [first, if T::ROWS == 1 { first } else { self.rows.at((2 * term + 1).min(self.end - 1)) }]
        }
    }

    /// Returns how many terms from this one on are evenly spaced.
    ///
    /// # Safety
    /// The term exists.
    #[inline(always)]
    pub(crate) unsafe fn evenly(self, term: usize) -> usize {
        // SAFETY: the caller guarantees the term, and so its first row.
        let rows = unsafe { self.rows.evenly(T::ROWS * term) };
        // A pair is alone where a row's neighbour is not evenly spaced, or is the row itself.
        if T::ROWS == 1 { rows } else { (rows.min(self.end - 2 * term) / 2).max(1) }
    }

    /// Returns the addresses of a term's rows, to prefetch it, and how many terms from it on are evenly spaced: see
    /// [`Rows::later`].
    ///
    /// # Safety
    /// The keys exist.
    #[inline(always)]
    pub(crate) unsafe fn later(self, term: usize) -> Option<([*const T; 2], usize)> {
        let rows = self.end.div_ceil(T::By::PRODUCTS / T::ROWS);
        // SAFETY: the caller guarantees the keys.
        let (first, together) = unsafe { self.rows.later(T::ROWS * term, rows)? };
        Some(([first, first.wrapping_offset(self.rows.step())], (together / T::ROWS).max(1)))
    }
}

/// Returns the addresses `bytes` bytes further on.
#[inline(always)]
pub(crate) fn offset<T>(rows: [*const T; 2], bytes: isize) -> [*const T; 2] {
    rows.map(|row| row.wrapping_byte_offset(bytes))
}
