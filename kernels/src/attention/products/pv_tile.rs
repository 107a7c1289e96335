//! Register tile of P·V: a few rows of weights by a few vectors of columns.
//!
//! ```text
//! sum[MR][NV] = 0, or what the part before left
//! for each term (a key, or a pair of keys) of the part:
//!     value[NV] = values[term]
//!     for each row: sum[row] += weights[row][term] · value
//! last part: sum = out · rescale_prev + sum · rescale_block
//! out = sum, or its rows are normalised and written
//! ```

use crate::attention::scratch::SCORE_STRIDE;
use crate::attention::steps::epilogue::{ColumnEnds, if_finite, normalised};
use crate::matmul::dot_tile::{self, FETCH_BOUND_ROWS};
use crate::matmul::operands::{MulAdd, Operand};
use crate::matmul::tile_rows::TileRows;
use crate::matmul::tile_shape::{MAX_TILE_ROWS, MAX_TILE_VECS};
use crate::matmul::value_terms::{ValueTerms, offset};
use crate::simd::{LANES, Level, Simd, Vector};
use crate::tensor::rows::Rows;
use core::ops::Range;

/// Destination of a tile's sums: the running outputs of its rows, and their factors.
#[derive(Clone, Copy)]
pub(crate) struct RunningRows<'a> {
    pub(crate) rescale_prev: *const f32,
    pub(crate) rescale_block: *const f32,
    pub(crate) rows: TileRows,
    pub(crate) fresh: bool,
    /// Factors and addresses of the rows, from the tile's first column on, if they end.
    pub(crate) ends: Option<ColumnEnds<'a>>,
}

/// Returns the number of floats from one row of weights to the next.
pub(crate) const fn row_floats<S: Simd, T: Operand<S>>() -> usize {
    match T::By::ROW_FLOATS {
        Some(floats) => floats,
        None => SCORE_STRIDE,
    }
}

/// Computes a register tile of `MR` rows by `NV` vectors of columns.
///
/// # Safety
/// Each of `MR` rows has weights up to the part's end, two factors, and outputs for `NV` vectors, where the part before, if
/// any, left its sums. For the values, and for rows that end, same contract as [`values`](super::pv::values).
#[inline(always)]
pub(crate) unsafe fn tile<S: Simd, T: Operand<S>, const MR: usize, const NV: usize>(
    s: S,
    terms: Terms<S, T>,
    running: RunningRows<'_>,
) {
    debug_assert!(MR <= MAX_TILE_ROWS && NV <= MAX_TILE_VECS, "a tile of {MR} rows");
    debug_assert!(!terms.weights.is_null() && !running.rows.out.is_null(), "an operand is missing");
    debug_assert!(terms.values.terms.end * T::By::PRODUCTS < SCORE_STRIDE, "terms outside");
    debug_assert!(MR == 1 || running.rows.stride >= NV * LANES, "rows overlap");
    let (weights, first, last) = (terms.weights, terms.values.are_first(), terms.values.are_last());
    let (mut sums, mut sum) = ([[T::By::start(s, s.splat(0.0)); NV]; MR], [[s.splat(0.0); NV]; MR]);
    // SAFETY: the caller guarantees `MR` rows of weights, factors and outputs, the values of the span's keys, and the
    // addresses of rows that end, for these columns.
    unsafe {
        if const { T::By::RESUMES } && !first {
            running.rows.load(s, &mut sum);
            for r in 0..MR {
                for n in 0..NV {
                    sums[r][n] = T::By::start(s, sum[r][n]);
                }
            }
        }
        terms.add_to(&mut sums);
        for r in 0..MR {
            for n in 0..NV {
                sum[r][n] = T::By::total(s, weights.wrapping_add(r * row_floats::<S, T>()), sums[r][n]);
            }
        }
        if last {
            running.merge(s, &mut sum);
            if let Some(ends) = running.ends.filter(|_| const { T::ENDS && S::ENDS_ROWS }) {
                return end_rows(s, &mut sum, ends);
            }
        }
        running.rows.store(s, &sum);
    }
}

impl RunningRows<'_> {
    /// Merges the running outputs into the sums of a block: `sum ← out·rescale_prev + sum·rescale_block`.
    ///
    /// # Safety
    /// Each of `MR` rows has two factors and outputs for `NV` vectors.
    #[inline(always)]
    pub(crate) unsafe fn merge<W: Vector, const MR: usize, const NV: usize>(self, w: W, sums: &mut [[W::V; NV]; MR]) {
        for r in 0..MR {
            // SAFETY: row `r < MR` has two factors and outputs for `NV` vectors.
            unsafe {
                let (rescale_prev, rescale_block) =
                    (w.splat(*self.rescale_prev.add(r)), w.splat(*self.rescale_block.add(r)));
                for n in 0..NV {
                    let before =
                        if self.fresh { w.splat(0.0) } else { w.mul(w.load(self.rows.at::<W>(r, n)), rescale_prev) };
                    sums[r][n] = w.fma(sums[r][n], rescale_block, before);
                }
            }
        }
    }
}

/// Terms of a tile's sums, and memory to prefetch meanwhile.
pub(crate) struct Terms<S, T> {
    pub(crate) values: ValueTerms<S, T>,
    /// Weights of the tile's first row.
    pub(crate) weights: *const f32,
    /// For few rows: distance in terms at which values are prefetched.
    pub(crate) far: Option<usize>,
    /// Instead of `far`: address from which on memory is prefetched in order.
    pub(crate) next: Option<[*const T; 2]>,
}

/// Largest distance in keys at which values in pages are prefetched.
const SCATTERED_FAR: usize = 2 * LANES;

/// Returns the distance in terms at which `rows` rows prefetch values: those of [`dot_tile::Later::far`], where a term has
/// `bytes`.
#[inline(always)]
pub(crate) fn prefetch_distance<S: Simd, T: Operand<S>>(s: S, values: Rows<T>, rows: usize, bytes: usize) -> usize {
    let far = dot_tile::Later::far(s, rows) / bytes;
    // Nothing follows the last row of a table: the first rows are prefetched before, and a longer distance would leave more of
    // them.
    if values.are_scattered() { far.min(SCATTERED_FAR / T::By::PRODUCTS) } else { far }
}

/// Values to prefetch beside evenly spaced terms: the first term, how many are evenly spaced, and by how many bytes.
struct Later<T> {
    at: Option<[*const T; 2]>,
    terms: usize,
    step: isize,
}

impl<S: Simd, T: Operand<S>> Terms<S, T> {
    /// Adds the terms, one stretch of evenly spaced values after the other.
    ///
    /// # Safety
    /// Same contract as [`tile`].
    #[inline(always)]
    unsafe fn add_to<const MR: usize, const NV: usize>(mut self, sums: &mut [[<T::By as MulAdd<S>>::Sum; NV]; MR]) {
        let Range { start: mut term, end } = self.values.terms;
        let (s, step) = (self.values.s, self.values.step());
        while term < end {
            // SAFETY: the caller guarantees the values of the span's keys.
            let (mut at, evenly, mut later) =
                unsafe { (self.values.at(term), self.values.evenly(term), self.later::<MR, NV>(term)) };
            // Short stretches of rows, of pages: prefetching those to the second-level cache is faster.
            let near = MR <= FETCH_BOUND_ROWS && s.has_large_l1() && evenly >= 4 * LANES;
            let level = if near { Level::First } else { Level::Second };
            // The loop over evenly spaced terms looks no address up: see `pack::StridedRows`.
            let stop = end.min(term.saturating_add(evenly.min(later.terms)));
            for j in term..stop {
                if let Some(later_at) = &mut later.at {
                    for row in &later_at[..T::ROWS] {
                        s.prefetch_far(level, row.cast(), NV * LANES * T::COLUMN_BYTES);
                    }
                    *later_at = offset(*later_at, later.step);
                }
                // SAFETY: `at` has been counted to term `j`: terms up to `stop` lie evenly.
                unsafe { multiply_add(s, at, self.weights, j, sums) };
                at = offset(at, step);
            }
            self.next = self.next.and(later.at);
            term = stop;
        }
    }

    /// Returns what to prefetch beside the terms from `term` on.
    ///
    /// # Safety
    /// The values have the span's terms.
    #[inline(always)]
    unsafe fn later<const MR: usize, const NV: usize>(&self, term: usize) -> Later<T> {
        if self.next.is_some() {
            return Later { at: self.next, terms: usize::MAX, step: (NV * LANES * T::COLUMN_BYTES) as isize };
        }
        let step = self.values.step();
        // Where full tiles have one vector, only small tiles prefetch here: the test would cost full tiles time.
        let prefetches = const { S::PREFETCHES && (S::TILE_VECS > 1 || MR <= FETCH_BOUND_ROWS && MR < S::TILE_ROWS) };
        let far = if prefetches { self.far } else { None };
        // SAFETY: the caller guarantees the values of the span's keys.
        match far.and_then(|far| unsafe { self.values.later(term + far) }) {
            Some((at, terms)) => Later { at: Some(at), terms, step },
            None => Later { at: None, terms: usize::MAX, step },
        }
    }
}

/// `sums[row][n] += weights[row][term] · values[term][n]`.
///
/// # Safety
/// `at` is the address of a term with columns for `NV` vectors; each of `MR` rows has its weight.
#[inline(always)]
unsafe fn multiply_add<S: Simd, T: Operand<S>, const MR: usize, const NV: usize>(
    s: S,
    at: [*const T; 2],
    weights: *const f32,
    term: usize,
    sums: &mut [[<T::By as MulAdd<S>>::Sum; NV]; MR],
) {
    // SAFETY: vector 0 of the term.
    let mut value = [unsafe { T::y(s, at, 0) }; NV];
    for n in 0..NV {
        // SAFETY: vector `n < NV` of the term.
        value[n] = unsafe { T::y(s, at, n) };
    }
    for r in 0..MR {
        // SAFETY: row `r < MR` has a weight for the term.
        let weight = unsafe { T::By::x(s, weights.add(r * row_floats::<S, T>()), term) };
        for n in 0..NV {
            sums[r][n] = T::By::fma(s, weight, value[n], sums[r][n]);
        }
    }
}

/// Normalises and writes the rows of a tile, as [`finish`](crate::attention::steps::epilogue::finish) does with
/// non-finite values ignored: if something in them is not finite, the rows written are not valid.
///
/// # Safety
/// `ends` has `MR` rows, each with the columns of `NV` vectors, or those left up to `past`.
#[inline(always)]
pub(crate) unsafe fn end_rows<W: Vector, const MR: usize, const NV: usize>(
    w: W,
    rows: &mut [[W::V; NV]; MR],
    ends: ColumnEnds<'_>,
) {
    let mut finite = w.splat(0.0);
    for r in 0..MR {
        // SAFETY: row `r < MR` has factors.
        let (high, low) = unsafe { *ends.factors.get_unchecked(r) };
        let mut found = w.splat(0.0);
        for n in 0..NV {
            found = if_finite(w, rows[r][n], found);
            rows[r][n] = normalised(w, rows[r][n], [w.splat(high), w.splat(low)]);
        }
        finite = w.add(finite, found);
    }
    let found = ends.finite.as_ptr().cast();
    // SAFETY: sixteen floats of a cell; nothing of it is borrowed.
    unsafe { w.store(found, w.add(w.load(found), finite)) };
    // Tested once: inside the loop, the test would keep the loop from being unrolled and the rows out of registers.
    if ends.first + NV * W::LANES <= ends.past {
        for r in 0..MR {
            for n in 0..NV {
                // SAFETY: row `r < MR` has these columns.
                unsafe { w.store(ends.rows.get_unchecked(r).add(ends.first + n * W::LANES), rows[r][n]) };
            }
        }
        return;
    }
    for r in 0..MR {
        for n in 0..NV {
            let first = ends.first + n * W::LANES;
            // SAFETY: row `r < MR` has the columns that are left up to `past`.
            unsafe {
                w.store_first(ends.rows.get_unchecked(r).add(first), rows[r][n], W::LANES.min(ends.past - first))
            };
        }
    }
}
