//! Products of f32 rows and f32 columns: the inner loop of scores and of P·V of many rows, whose time is that of
//! arithmetic, of short texts, and of the sums over rows of the backward pass.
//!
//! ```text
//! sums[r][n] += Σ_i rows[r][i] · columns[i][n]         terms i in order, one chain of FMAs for each lane
//! ```
//!
//! Terms are evenly spaced, so the loop has nothing to decide. Four of them are one turn of it, which leaves the order of the
//! sums as it is.

use crate::matmul::operands::{Floats, MulAdd};
use crate::simd::{Simd, Vector};
use core::ops::Range;
use core::sync::atomic::{Ordering, compiler_fence};

/// Rows of a tile: term `i` of row `r` lies at `at[r] + i · step`.
#[derive(Clone, Copy)]
pub(crate) struct TermRows<const MR: usize> {
    pub(crate) at: [*const f32; MR],
    /// Floats from one term to the next.
    pub(crate) step: usize,
}

impl<const MR: usize> TermRows<MR> {
    /// Makes rows `apart` floats apart. The addresses wrap: only those of the tile may be used.
    #[inline(always)]
    pub(crate) fn strided(first: *const f32, apart: usize, step: usize) -> Self {
        let mut at = [first; MR];
        for r in 0..MR {
            at[r] = first.wrapping_add(r * apart);
        }
        Self { at, step }
    }
}

/// Columns of a tile: vector `n` of term `i` lies at `first + i · step + n · apart`.
#[derive(Clone, Copy)]
pub(crate) struct Columns {
    pub(crate) first: *const f32,
    /// Floats from one term to the next.
    pub(crate) step: isize,
    /// Floats from one vector to the next.
    pub(crate) apart: usize,
}

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

    /// Writes the dot products of `MR` rows and the columns of `NV` vectors to `sums`, chains added up first to last.
    ///
    /// # Safety
    /// As [`add_products`], for as many terms as the depth.
    #[inline(always)]
    pub(crate) unsafe fn dot_products<S: Simd, const MR: usize, const NV: usize>(
        self,
        s: S,
        rows: &[*const f32; MR],
        columns: Columns,
        sums: &mut [[S::V; NV]; MR],
    ) {
        let mut first = 0;
        loop {
            let last = self.depth.min(first + self.len);
            let mut chain = [[s.splat(0.0); NV]; MR];
            // SAFETY: `last ≤ depth`, which the caller guarantees.
            unsafe { add_products(s, TermRows { at: *rows, step: 1 }, columns, first..last, &mut chain) };
            for r in 0..MR {
                for n in 0..NV {
                    sums[r][n] = if first == 0 { chain[r][n] } else { s.add(sums[r][n], chain[r][n]) };
                }
            }
            if last == self.depth {
                return;
            }
            first = last;
        }
    }
}

/// Number of terms of a turn of the loop.
const TURN: usize = 4;

/// Adds the products of some terms to the sums of `MR` rows in `NV` vectors.
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
) {
    let Range { start: mut i, end } = terms;
    let mut column = columns.first.wrapping_offset(i as isize * columns.step);
    // SAFETY: terms below `end`, as the caller guarantees.
    unsafe {
        while i + TURN <= end {
            for term in 0..TURN {
                // No column of the next term is loaded ahead: in builds for some machines (`target-cpu=native`) that took a
                // register too many, and a sum went to memory and back with each term. Where its place lay across two
                // pages, in 1 process of 50, prompts took 2.5 times as long.
                compiler_fence(Ordering::SeqCst);
                add_product(w, rows, (column, columns.apart), i + term, sums);
                column = column.wrapping_offset(columns.step);
            }
            i += TURN;
        }
        while i < end {
            add_product(w, rows, (column, columns.apart), i, sums);
            column = column.wrapping_offset(columns.step);
            i += 1;
        }
    }
}

/// Adds the products of term `i`.
///
/// # Safety
/// Term `i` is readable in each of `rows`, and `at` has `NV` vectors, `apart` floats apart.
#[inline(always)]
unsafe fn add_product<W: Vector, const MR: usize, const NV: usize>(
    w: W,
    rows: TermRows<MR>,
    (at, apart): (*const f32, usize),
    i: usize,
    sums: &mut [[W::V; NV]; MR],
) {
    let mut column = [w.splat(0.0); NV];
    for n in 0..NV {
        // SAFETY: vector `n < NV` of the term, which the caller guarantees.
        column[n] = unsafe { w.load(at.add(n * apart)) };
    }
    for r in 0..MR {
        // SAFETY: term `i` of row `r < MR`, which the caller guarantees.
        let x = w.splat(unsafe { *rows.at[r].add(i * rows.step) });
        for n in 0..NV {
            sums[r][n] = w.fma(x, column[n], sums[r][n]);
        }
    }
}
