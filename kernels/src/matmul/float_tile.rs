//! Products of f32 rows and f32 columns: the inner loop of scores and of P·V of compute-bound rows, of short texts, and of the
//! sums over rows of the backward pass.
//!
//! ```text
//! sums[r][n] += Σ_i rows[r][i] · columns[i][n]         terms i in order, one chain of FMAs for each lane
//! ```
//!
//! Terms are evenly spaced, so the loop has nothing to decide. Four of them are one turn of it, which leaves the order of the
//! sums as it is.

use crate::matmul::operands::{Floats, MulAdd};
use crate::matmul::tile_rows::TileRows;
use crate::simd::terms::{Columns, TermRows};
use crate::simd::{FOUR, Simd, Vector};
use core::ops::Range;

/// Depth of dot products, and the chains of FMAs that they are sums of: see [`MulAdd::chain`].
#[derive(Clone, Copy)]
pub(crate) struct Chains {
    depth: usize,
    /// Number of terms of a chain.
    len: usize,
}

impl Chains {
    /// Creates the chains of a depth.
    #[inline(always)]
    pub(crate) fn new<S: Simd>(depth: usize) -> Self {
        Self { depth, len: <Floats as MulAdd<S>>::chain(depth).max(1) }
    }

    /// Returns the number of terms that are taken four at a time.
    #[inline(always)]
    pub(crate) fn in_fours(self) -> usize {
        let fours = |terms: usize| terms / FOUR * FOUR;
        self.depth / self.len * fours(self.len) + fours(self.depth % self.len)
    }

    /// Returns the dot products of `MR` rows and the columns of `NV` vectors, chains added up first to last; calls `beside` before
    /// each four terms. Until the last chain, sums are in `kept`: a wide tile has no registers for them, and vectors that the compiler
    /// keeps on the stack cross cache lines.
    ///
    /// # Safety
    /// As [`add_products`], for the terms of the depth; `kept` has `MR` rows of `NV` vectors of floats, nobody else's.
    #[inline(always)]
    pub(crate) unsafe fn dot_products<S: Simd, const MR: usize, const NV: usize>(
        self,
        s: S,
        rows: &[*const f32; MR],
        columns: Columns,
        kept: TileRows,
        mut beside: impl FnMut(),
    ) -> [[S::V; NV]; MR] {
        let mut first = 0;
        loop {
            let last = self.depth.min(first + self.len);
            let mut sums = [[s.splat(0.0); NV]; MR];
            // SAFETY: `last ≤ depth`, which the caller guarantees, as it does `kept`, which an earlier turn has written.
            unsafe {
                add_products(s, TermRows { at: *rows, step: 1 }, columns, first..last, &mut sums, &mut beside);
                if first > 0 {
                    kept.add_to(s, &mut sums);
                }
                if last == self.depth {
                    return sums;
                }
                kept.store(s, &sums);
            }
            first = last;
        }
    }
}

/// Adds the products of some terms to the sums of `MR` rows in `NV` vectors; calls `beside` before each four of them.
///
/// # Safety
/// The terms of each of `rows` are readable, and so are `columns`, `NV` vectors for each term.
#[inline(always)]
pub(crate) unsafe fn add_products<W: Vector, const MR: usize, const NV: usize>(
    w: W,
    rows: TermRows<MR>,
    columns: Columns,
    terms: Range<usize>,
    sums: &mut [[W::V; NV]; MR],
    mut beside: impl FnMut(),
) {
    let Range { start: mut i, end } = terms;
    let mut columns = columns.from(i);
    // SAFETY: terms below `end`, as the caller guarantees.
    unsafe {
        while i + FOUR <= end {
            beside();
            columns = w.add_four_terms(rows, columns, i, sums);
            i += FOUR;
        }
        while i < end {
            w.add_term(rows, columns, i, sums);
            columns = columns.next();
            i += 1;
        }
    }
}
