//! AV: the weighted sum of a block's values, folded into the rows' running output.
//!
//! An output column is one chain of FMAs over the block's keys, or pairs of keys, in order; the block's sum then joins the
//! running output with two factors, `o ← o·rescale_prev + sum·rescale_block`, once per block. Keys hidden from a row have weight exactly 0 and
//! add exactly nothing, so it does not matter how many of them a tile runs over.
//!
//! Rows that end with the block are not accumulated but written, normalised, by the tile that has their sums.
//!
//! Few rows take wide values a run of keys at a time. Between runs their chains wait in the running outputs, where nothing else
//! is yet.

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

/// A group of rows, their weights for one block, and the running outputs.
pub(crate) struct Values<'a, R = AnyRows> {
    /// `[row][SCORE_STRIDE]`, zero where hidden.
    pub(crate) weights: &'a [f32],
    /// From key 0 of the block and the first column of the run on, contiguous.
    pub(crate) values: R,
    /// Vectors (16 columns each) of the run.
    pub(crate) vecs: usize,
    /// The keys each tile of rows needs.
    pub(crate) spans: &'a [Span],
    pub(crate) rows: usize,
    /// Per row: factor of the running output, and of this block's sum.
    pub(crate) rescale_prev: &'a [f32],
    pub(crate) rescale_block: &'a [f32],
    /// Nothing was accumulated before, and the running outputs are not read: every tile of rows sees something of this block.
    pub(crate) fresh: bool,
    /// Running outputs from the run's first column on, rows `out_stride` apart.
    pub(crate) out: &'a mut [f32],
    pub(crate) out_stride: usize,
    /// If all rows end with this block: how, and where they go, in place of the running outputs.
    pub(crate) ends: Option<ColumnEnds<'a>>,
    /// What comes later.
    pub(crate) prefetch: &'a mut PrefetchQueue,
}

impl<R> Values<'_, R> {
    /// With these rows. By reference: handed on by value, all of it would be copied on the way.
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

/// Keys of a run that few rows meet with all columns before they go on, if a tile has not all of them: else half of each row would
/// be read, and the other half come back for, which memory is slower at.
const RUN: usize = 4 * LANES;
const _: () = assert!(KEY_BLOCK.is_multiple_of(RUN) && RUN.is_multiple_of(LANES));

/// # Safety
/// For every key of every span, `16 · vecs` contiguous elements of its row of values are readable. If rows end, each pointer to one
/// is good for writing its columns, and nobody else's.
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
    // How many terms prefetch a few rows ask: so many take [`FAR`] bytes, if all columns are here; whole runs.
    let row_bytes = a.vecs.max(1) * LANES * R::BYTES;
    let far = FAR / row_bytes;
    let far = if in_runs { far.next_multiple_of(RUN / R::KEYS) } else { far };
    let in_order = in_runs && R::KEYS == 1 && a.values.step() == row_bytes as isize;
    for first in (0..KEY_BLOCK).step_by(run) {
        // Then columns: a tile of values is read by all the rows before the next columns are touched.
        let mut vec = 0;
        while vec < a.vecs {
            // Remainders are shared out evenly: 5 vectors as 3 + 2, not 4 + 1.
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
                // above put weights, factors and outputs inside their slices; the caller vouches for the values.
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

/// Where a tile's sums go: the running outputs of its rows, and their factors.
#[derive(Clone, Copy)]
struct Fold {
    rescale_prev: *const f32,
    rescale_block: *const f32,
    out: *mut f32,
    out_stride: usize,
    fresh: bool,
    ends: Option<TileEnds>,
}

/// How the rows of a tile end: columns `first..past`, see [`ColumnEnds`].
#[derive(Clone, Copy)]
struct TileEnds {
    factors: *const (f32, f32),
    rows: *const *mut f32,
    first: usize,
    past: usize,
    finite: *mut f32,
}

/// What a tile asks for while it computes.
#[derive(Clone, Copy)]
struct Asking<At> {
    /// A few rows: values, so many terms prefetch.
    far: Option<usize>,
    /// In place of that: what lies from here on.
    next: Option<At>,
    /// A tile that [`asks`]: what comes later, a line with each term.
    stream: PrefetchStream,
}

/// The terms of a span that a tile takes at a time.
struct Part {
    terms: Range<usize>,
    /// Where those of the span end.
    all: usize,
    /// Whether nothing came before.
    first: bool,
}

impl Part {
    /// Those of some keys. Spans and runs start at a panel, so with a whole term.
    #[inline(always)]
    fn new<S: Simd, R: ValueOperand<S>>(span: Span, keys: Range<usize>) -> Self {
        let (start, end) = (span.keys().start / R::KEYS, span.keys().end.div_ceil(R::KEYS));
        let terms = start.max(keys.start / R::KEYS)..end.min(keys.end / R::KEYS);
        Self { first: terms.start == start, terms, all: end }
    }

    /// Where a tile from vector `vec` on asks for its share of what lies `far` terms behind the part, if that is even: rows lie one
    /// right after the other, so the tiles of a part ask for all of it, in its own order.
    ///
    /// # Safety
    /// The values have the span's terms.
    #[inline(always)]
    unsafe fn later<S: Simd, R: ValueOperand<S>>(&self, values: R, far: usize, vec: usize) -> Option<R::At> {
        // SAFETY: the caller's promise.
        let (at, evenly) = unsafe { values.later(self.terms.start + far, self.all)? };
        (evenly >= self.terms.len()).then(|| R::offset(at, (self.terms.len() * vec * LANES * R::BYTES) as isize))
    }
}

/// `MR` rows by `NV` vectors of columns.
///
/// # Safety
/// For `MR` rows: weights up to the part's end, two factors, and `16 · NV` outputs, where the part before, if any, left its sums;
/// values, and where rows end, as for [`values`].
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
                // SAFETY: as above: what the part before left there.
                *sum = unsafe { s.load(out(r, n)) };
            }
        }
    }
    // Not where the full tile has one vector: it would pay for the question.
    let far = if const { S::TILE_VECS > 1 || MR <= FEW_ROWS && MR < S::TILE_ROWS } { far } else { None };
    let step = values.step();
    while term < end {
        // SAFETY: the caller vouches for the span's keys.
        let (mut at, evenly) = unsafe { (values.at(term), values.evenly(term)) };
        let (mut later, then_evenly, then_step) = if next.is_some() {
            (next, usize::MAX, (NV * LANES * R::BYTES) as isize)
        } else {
            // SAFETY: as above.
            match far.and_then(|far| unsafe { values.later(term + far, all) }) {
                Some((later, evenly)) => (Some(later), evenly, step),
                None => (None, usize::MAX, step),
            }
        };
        // Rows of pages are many short stretches, which the second-level cache is better at.
        let near = MR <= FEW_ROWS && s.has_large_l1() && evenly >= KEY_BLOCK;
        let level = if near { Level::First } else { Level::Second };
        // The loop looks nothing up: see `pack::Even`.
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
                // SAFETY: as above.
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
        // SAFETY: the caller's promise.
        return unsafe { end_rows(s, &mut sum, ends) };
    }
    for (r, sum) in sum.iter().enumerate() {
        for (n, &sum) in sum.iter().enumerate() {
            // SAFETY: as above.
            unsafe { s.store(out(r, n), sum) };
        }
    }
}

/// Writes the rows of a tile as [`finish`](crate::attention::steps::epilogue::finish) does without care: if something in them is found not to be
/// finite, what was written is worth nothing.
///
/// # Safety
/// There are `MR` rows, with as many columns as `NV` vectors hold, or as are left of them.
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
    // SAFETY: sixteen floats.
    unsafe { s.store(ends.finite, s.add(s.load(ends.finite), finite)) };
    // Looked at once: in the loop it would rescale_prev that from being unrolled, and the rows out of registers.
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
            // SAFETY: as above, as many columns as are left.
            unsafe { s.store_first((*ends.rows.add(r)).add(first), x, LANES.min(ends.past - first)) };
        }
    }
}
