//! P·V: the weighted sum of a block's values, accumulated into the rows' running output.
//!
//! An output column is one chain of FMAs over the block's keys, or pairs of keys, in order; the block's sum is then
//! merged into the running output with two factors, `o ← o·rescale_prev + sum·rescale_block`, once per block. Keys
//! hidden from a row have weight exactly 0 and add exactly nothing, so it does not matter how many of them a tile
//! covers.
//!
//! Rows that end with the block are not accumulated but normalised and written by the tile that has their sums.
//!
//! Few rows read wide values a run of keys at a time. Between runs their sums are stored in the running outputs, which
//! hold nothing else yet.

use crate::attention::steps::epilogue::{ColumnEnds, if_finite, normalised};
use crate::attention::steps::span::{SCORE_STRIDE, Span};
use crate::matmul::dot_tile::{FAR, FEW_ROWS, asks};
use crate::matmul::operands::MulAdd;
use crate::matmul::prefetch::{PrefetchQueue, PrefetchStream};
use crate::matmul::prefetch::{READING_ROWS, asks_ahead};
use crate::matmul::value_operand::ValueOperand;
use crate::simd::{LANES, Level, Simd};
use crate::tensor::any::AnyRows;
use crate::tensor::rows::KEY_BLOCK;
use core::ops::Range;

/// Operands of P·V: a row block's weights for one key block, the block's values, and the running outputs.
pub(crate) struct Values<'a, R = AnyRows> {
    /// Weights, `[row][SCORE_STRIDE]`, zero where hidden.
    pub(crate) weights: &'a [f32],
    /// Values from key 0 of the block and the first column of the run on, with contiguous columns.
    pub(crate) values: R,
    /// Number of vectors (16 columns each) of the run.
    pub(crate) vecs: usize,
    /// Keys that each tile of rows needs.
    pub(crate) spans: &'a [Span],
    pub(crate) rows: usize,
    /// Factor of each row's running output.
    pub(crate) rescale_prev: &'a [f32],
    /// Factor of each row's sum over this block.
    pub(crate) rescale_block: &'a [f32],
    /// True if nothing was accumulated before and every tile of rows has a nonempty span: the running outputs are not
    /// read.
    pub(crate) fresh: bool,
    /// Running outputs from the run's first column on, rows `out_stride` apart.
    pub(crate) out: &'a mut [f32],
    pub(crate) out_stride: usize,
    /// Factors and addresses of the rows, if all of them end with this block: they are written there instead of to the
    /// running outputs.
    pub(crate) ends: Option<ColumnEnds<'a>>,
    /// Memory to prefetch meanwhile.
    pub(crate) prefetch: &'a mut PrefetchQueue,
}

impl<R> Values<'_, R> {
    /// Returns these operands with `values` as the rows of values. By reference: passed by value, the whole struct
    /// would be copied.
    #[inline(always)]
    pub(crate) fn of<T>(&mut self, values: T) -> Values<'_, T> {
        let Values {
            weights,
            vecs,
            spans,
            rows,
            rescale_prev,
            rescale_block,
            fresh,
            ref mut out,
            out_stride,
            ends,
            ref mut prefetch,
            ..
        } = *self;
        Values {
            weights,
            values,
            vecs,
            spans,
            rows,
            rescale_prev,
            rescale_block,
            fresh,
            out,
            out_stride,
            ends,
            prefetch,
        }
    }
}

/// Number of keys in a run of which few rows read all columns before the next run, if a tile does not cover all
/// columns: otherwise half of each row would be read first and the other half later, which is slower.
const RUN: usize = 4 * LANES;
const _: () = assert!(KEY_BLOCK.is_multiple_of(RUN) && RUN.is_multiple_of(LANES));

/// Accumulates P·V of a row block, one register tile after the other.
///
/// # Safety
/// For every key of every span, `16 · vecs` contiguous elements of its row of values are readable. If rows end, each
/// row's pointer is writable for its columns, which no other worker writes.
#[inline(always)]
pub(crate) unsafe fn values<S: Simd, R: ValueOperand<S>>(s: S, a: Values<'_, R>) {
    assert!(a.spans.len() == a.rows.div_ceil(S::TILE_ROWS));
    assert!(
        a.weights.len() >= a.rows * SCORE_STRIDE && a.rescale_prev.len() >= a.rows && a.rescale_block.len() >= a.rows
    );
    assert!(a.ends.is_none_or(|ends| {
        R::ENDS
            && S::ENDS_ROWS
            && ends.factors.len().min(ends.rows.len()) >= a.rows
            && ends.columns().div_ceil(LANES) == a.vecs
    }));
    assert!(a.rows == 0 || a.out.len() >= (a.rows - 1) * a.out_stride + a.vecs * LANES);
    debug_assert!(!a.fresh || !a.spans.iter().any(|span| span.is_empty()));
    let in_runs = a.rows <= READING_ROWS && S::TILE_VECS > 1 && a.vecs > S::TILE_VECS && a.fresh;
    let run = if in_runs { RUN } else { KEY_BLOCK };
    // Distance in terms at which few rows prefetch: [`FAR`] bytes, if all columns are here; whole runs.
    let row_bytes = a.vecs.max(1) * LANES * R::BYTES;
    let far = FAR / row_bytes;
    let far = if in_runs { far.next_multiple_of(RUN / R::KEYS) } else { far };
    let in_order = in_runs && R::KEYS == 1 && a.values.step() == row_bytes as isize;
    for first in (0..KEY_BLOCK).step_by(run) {
        // Columns outside, rows inside: all the rows read a tile of values before the next columns are touched.
        let mut vec = 0;
        while vec < a.vecs {
            // Remainders are divided evenly: 5 vectors as 3 + 2, not 4 + 1.
            let tiles_left = (a.vecs - vec).div_ceil(S::TILE_VECS);
            let vecs = (a.vecs - vec).div_ceil(tiles_left);
            for (index, span) in a.spans.iter().enumerate() {
                let part = Part::new::<S, R>(*span, first..first + run);
                if part.terms.is_empty() {
                    continue;
                }
                let row = index * S::TILE_ROWS;
                let rows = S::TILE_ROWS.min(a.rows - row);
                // SAFETY: `row + rows ≤ a.rows`, `vec + vecs ≤ a.vecs`, and spans end inside a block, so the assertions
                // above put weights, factors and outputs inside their slices; the caller guarantees that the values are
                // readable.
                unsafe {
                    let fold = Fold {
                        rescale_prev: a.rescale_prev.as_ptr().add(row),
                        rescale_block: a.rescale_block.as_ptr().add(row),
                        out: a.out.as_mut_ptr().add(row * a.out_stride + vec * LANES),
                        out_stride: a.out_stride,
                        fresh: a.fresh,
                        ends: a.ends.map(|ends| TileEnds {
                            factors: ends.factors.as_ptr().add(row),
                            rows: ends.rows.as_ptr().add(row),
                            first: ends.first + vec * LANES,
                            past: ends.past,
                            finite: ends.finite.as_ptr().cast(),
                        }),
                    };
                    let w = a.weights.as_ptr().add(row * SCORE_STRIDE);
                    let values = a.values.columns_from(vec * LANES);
                    let far = asks_ahead::<S>(row, rows, a.rows).then_some(far);
                    let next = if in_order { far.and_then(|far| part.later(a.values, far, vec)) } else { None };
                    a.prefetch.beside(
                        s,
                        if asks::<S>(rows, vecs) { part.terms.len() } else { 0 },
                        #[inline(always)]
                        |stream| {
                            let asking = Asking { far, next, stream };
                            by_tile_shape!(S, rows, vecs, |MR, NV| tile::<S, R, MR, NV>(
                                s,
                                w,
                                (values, asking),
                                part,
                                fold
                            ));
                        },
                    );
                }
            }
            vec += vecs;
        }
    }
}

/// Destination of a tile's sums: the running outputs of its rows, and their factors.
#[derive(Clone, Copy)]
struct Fold {
    rescale_prev: *const f32,
    rescale_block: *const f32,
    out: *mut f32,
    out_stride: usize,
    fresh: bool,
    ends: Option<TileEnds>,
}

/// Factors and addresses of a tile's rows that end, in columns `first..past`: see [`ColumnEnds`].
#[derive(Clone, Copy)]
struct TileEnds {
    factors: *const (f32, f32),
    rows: *const *mut f32,
    first: usize,
    past: usize,
    finite: *mut f32,
}

/// Memory that a tile prefetches while it computes.
#[derive(Clone, Copy)]
struct Asking<At> {
    /// For few rows: distance in terms at which values are prefetched.
    far: Option<usize>,
    /// Instead of `far`: address from which on memory is prefetched in order.
    next: Option<At>,
    /// For a tile that [`asks`]: memory needed later, one line with each term.
    stream: PrefetchStream,
}

/// Terms of a span that a tile computes at a time.
struct Part {
    terms: Range<usize>,
    /// End of the span's terms.
    all: usize,
    /// True if the part is the span's first.
    first: bool,
}

impl Part {
    /// Returns the terms of `span` that belong to `keys`. Spans and runs start at a panel, so they start with a whole
    /// term.
    #[inline(always)]
    fn new<S: Simd, R: ValueOperand<S>>(span: Span, keys: Range<usize>) -> Self {
        let (start, end) = (span.keys().start / R::KEYS, span.keys().end.div_ceil(R::KEYS));
        let terms = start.max(keys.start / R::KEYS)..end.min(keys.end / R::KEYS);
        Self { first: terms.start == start, terms, all: end }
    }

    /// Returns the address from which the tile at vector `vec` prefetches its share of the values `far` terms after the
    /// part's start, if those are evenly spaced: rows are contiguous, so the tiles of a part together prefetch all of
    /// them, in the order of memory.
    ///
    /// # Safety
    /// The values have the span's terms.
    #[inline(always)]
    unsafe fn later<S: Simd, R: ValueOperand<S>>(&self, values: R, far: usize, vec: usize) -> Option<R::At> {
        // SAFETY: the caller guarantees the span's terms, up to `all`.
        let (at, evenly) = unsafe { values.later(self.terms.start + far, self.all)? };
        (evenly >= self.terms.len()).then(|| R::offset(at, (self.terms.len() * vec * LANES * R::BYTES) as isize))
    }
}

/// Computes a register tile of `MR` rows by `NV` vectors of columns.
///
/// # Safety
/// Each of `MR` rows has weights up to the part's end, two factors, and `16 · NV` outputs, where the part before, if
/// any, left its sums. For the values, and for rows that end, same contract as [`values`].
#[inline(always)]
unsafe fn tile<S: Simd, R: ValueOperand<S>, const MR: usize, const NV: usize>(
    s: S,
    weights: *const f32,
    (values, Asking { far, mut next, mut stream }): (R, Asking<R::At>),
    Part { terms: Range { start: mut term, end }, all, first }: Part,
    fold: Fold,
) {
    // SAFETY: row `r < MR`, vector `n < NV` of the outputs.
    let out = |r: usize, n: usize| unsafe { fold.out.add(r * fold.out_stride + n * LANES) };
    let mut sum = [[s.splat(0.0); NV]; MR];
    if !first {
        for (r, sum) in sum.iter_mut().enumerate() {
            for (n, sum) in sum.iter_mut().enumerate() {
                // SAFETY: row `r < MR`, vector `n < NV`: the part before left its sum there.
                *sum = unsafe { s.load(out(r, n)) };
            }
        }
    }
    // Where full tiles have one vector, only small tiles prefetch here: the test would cost full tiles time.
    let far = if const { S::TILE_VECS > 1 || MR <= FEW_ROWS && MR < S::TILE_ROWS } { far } else { None };
    let step = values.step();
    while term < end {
        // SAFETY: the caller guarantees the values of the span's keys.
        let (mut at, evenly) = unsafe { (values.at(term), values.evenly(term)) };
        let (mut later, then_evenly, then_step) = if next.is_some() {
            (next, usize::MAX, (NV * LANES * R::BYTES) as isize)
        } else {
            // SAFETY: the caller guarantees the values of the span's keys, up to term `all`.
            match far.and_then(|far| unsafe { values.later(term + far, all) }) {
                Some((later, evenly)) => (Some(later), evenly, step),
                None => (None, usize::MAX, step),
            }
        };
        // Rows of pages are many short stretches: prefetching those to the second-level cache is faster.
        let near = MR <= FEW_ROWS && s.has_large_l1() && evenly >= KEY_BLOCK;
        let level = if near { Level::First } else { Level::Second };
        // The loop over evenly spaced terms looks no address up: see `pack::Even`.
        let stop = end.min(term.saturating_add(evenly.min(then_evenly)));
        for j in term..stop {
            if let Some(later) = &mut later {
                for row in R::rows(*later) {
                    s.prefetch_far(level, row, NV * LANES * R::BYTES / R::KEYS);
                }
                *later = R::offset(*later, then_step);
            }
            if const { asks::<S>(MR, NV) } {
                stream.ask(s);
            }
            let mut value = [R::By::zero(s); NV];
            for (n, value) in value.iter_mut().enumerate() {
                // SAFETY: vector `n < NV` of term `j`, to which `at` has been counted: terms up to `stop` lie evenly.
                *value = unsafe { R::y(s, at, n * LANES) };
            }
            for (r, sum) in sum.iter_mut().enumerate() {
                // SAFETY: row `r < MR`, a term of the span.
                let weight = unsafe { R::By::x(s, weights.add(r * SCORE_STRIDE), j) };
                for (sum, &value) in sum.iter_mut().zip(&value) {
                    *sum = R::By::fma(s, weight, value, *sum);
                }
            }
            at = R::offset(at, step);
        }
        next = next.and(later);
        term = stop;
    }
    if end < all {
        for (r, sum) in sum.iter().enumerate() {
            for (n, &sum) in sum.iter().enumerate() {
                // SAFETY: row `r < MR`, vector `n < NV` of the outputs.
                unsafe { s.store(out(r, n), sum) };
            }
        }
        return;
    }
    for (r, sum) in sum.iter_mut().enumerate() {
        // SAFETY: row `r < MR` has two factors and `16 · NV` outputs.
        unsafe {
            let (rescale_prev, rescale_block) =
                (s.splat(*fold.rescale_prev.add(r)), s.splat(*fold.rescale_block.add(r)));
            for (n, sum) in sum.iter_mut().enumerate() {
                let before = if fold.fresh { s.splat(0.0) } else { s.mul(s.load(out(r, n)), rescale_prev) };
                *sum = s.fma(*sum, rescale_block, before);
            }
        }
    }
    if let Some(ends) = fold.ends.filter(|_| const { R::ENDS && S::ENDS_ROWS }) {
        // SAFETY: the caller guarantees the addresses of `MR` rows that end, for these columns.
        return unsafe { end_rows(s, &mut sum, ends) };
    }
    for (r, sum) in sum.iter().enumerate() {
        for (n, &sum) in sum.iter().enumerate() {
            // SAFETY: row `r < MR`, vector `n < NV` of the outputs.
            unsafe { s.store(out(r, n), sum) };
        }
    }
}

/// Normalises and writes the rows of a tile, as [`finish`](crate::attention::steps::epilogue::finish) does with
/// non-finite values ignored: if something in them is not finite, the rows written are not valid.
///
/// # Safety
/// `ends` has `MR` rows, each with as many columns as `NV` vectors hold, or as are left up to `past`.
#[inline(always)]
unsafe fn end_rows<S: Simd, const MR: usize, const NV: usize>(s: S, rows: &mut [[S::V; NV]; MR], ends: TileEnds) {
    let mut finite = s.splat(0.0);
    for (r, row) in rows.iter_mut().enumerate() {
        // SAFETY: row `r < MR` has factors.
        let (high, low) = unsafe { *ends.factors.add(r) };
        let mut found = s.splat(0.0);
        for x in row {
            found = if_finite(s, *x, found);
            *x = normalised(s, *x, [s.splat(high), s.splat(low)]);
        }
        finite = s.add(finite, found);
    }
    // SAFETY: `ends.finite` is sixteen floats.
    unsafe { s.store(ends.finite, s.add(s.load(ends.finite), finite)) };
    // Tested once: inside the loop, the test would keep the loop from being unrolled and the rows out of registers.
    if ends.first + NV * LANES <= ends.past {
        for (r, row) in rows.iter().enumerate() {
            for (n, &x) in row.iter().enumerate() {
                // SAFETY: row `r < MR` has these columns.
                unsafe { s.store((*ends.rows.add(r)).add(ends.first + n * LANES), x) };
            }
        }
        return;
    }
    for (r, row) in rows.iter().enumerate() {
        for (n, &x) in row.iter().enumerate() {
            let first = ends.first + n * LANES;
            // SAFETY: row `r < MR` has the columns that are left up to `past`.
            unsafe { s.store_first((*ends.rows.add(r)).add(first), x, LANES.min(ends.past - first)) };
        }
    }
}
