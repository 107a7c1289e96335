//! AV: the weighted sum of a block's values, folded into the rows' running output.
//!
//! An output column is one chain of FMAs over the block's keys, or pairs of keys, in order; the block's sum then joins the
//! running output with two factors, `o ← o·keep + sum·join`, once per block. Keys hidden from a row have weight exactly 0 and
//! add exactly nothing, so it does not matter how many of them a tile runs over.

use crate::ahead::{Ahead, Trail};
use crate::block::{SCORE_STRIDE, Span, asks_ahead};
use crate::dots::{FAR, FEW_ROWS, asks};
use crate::element::{Bf16, Load};
use crate::rows::Rows;
use crate::simd::{LANES, Pair, Pairs, Simd};
use crate::tensor::AnyRows;
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
    pub(crate) keep: &'a [f32],
    pub(crate) join: &'a [f32],
    /// Nothing was gathered before, and the running outputs are not read: every tile of rows sees something of this block.
    pub(crate) fresh: bool,
    /// Running outputs from the run's first column on, rows `out_stride` apart.
    pub(crate) out: &'a mut [f32],
    pub(crate) out_stride: usize,
    /// What comes later.
    pub(crate) ahead: &'a mut Ahead,
}

impl<'a, R> Values<'a, R> {
    /// With these rows.
    #[inline(always)]
    pub(crate) fn of<T>(self, values: T) -> Values<'a, T> {
        let Values { weights, vecs, spans, rows, keep, join, fresh, out, out_stride, ahead, .. } = self;
        Values { weights, values, vecs, spans, rows, keep, join, fresh, out, out_stride, ahead }
    }
}

/// What a sum over keys is made of: keys one by one, or in pairs.
pub(crate) trait Terms<S: Simd>: Copy {
    /// Keys of a term.
    const KEYS: usize;
    /// Bytes of a term in each column.
    const BYTES: usize;
    /// Where a term's columns are.
    type At: Copy;
    /// A term's weight, as often as there are lanes.
    type X: Copy;
    /// A term in sixteen columns.
    type Y: Copy;

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
    /// Zeros.
    fn zero(s: S) -> Self::Y;
    /// # Safety
    /// There is such a term in this row of weights, which are pairs if terms are.
    unsafe fn x(s: S, weights: *const f32, term: usize) -> Self::X;
    /// # Safety
    /// The term has sixteen columns from `column` on.
    unsafe fn y(s: S, at: Self::At, column: usize) -> Self::Y;
    /// `sum + x·y`.
    fn fma(s: S, x: Self::X, y: Self::Y, sum: S::V) -> S::V;
}

impl<S: Simd, T: Load> Terms<S> for Rows<T> {
    const KEYS: usize = 1;
    const BYTES: usize = size_of::<T>();
    type At = *const T;
    type X = S::V;
    type Y = S::V;

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
    fn zero(s: S) -> S::V {
        s.splat(0.0)
    }

    #[inline(always)]
    unsafe fn x(s: S, weights: *const f32, term: usize) -> S::V {
        // SAFETY: the caller's promise.
        s.splat(unsafe { *weights.add(term) })
    }

    #[inline(always)]
    unsafe fn y(s: S, at: *const T, column: usize) -> S::V {
        // SAFETY: the caller's promise.
        unsafe { T::load(s, at.add(column)) }
    }

    #[inline(always)]
    fn fma(s: S, x: S::V, y: S::V, sum: S::V) -> S::V {
        s.fma(x, y, sum)
    }
}

/// Rows two by two. Where the last has no neighbour, it is its own: that one's weight is 0.
#[derive(Clone, Copy)]
pub(crate) struct RowPairs {
    pub(crate) rows: Rows<Bf16>,
    /// The last row there is.
    pub(crate) last: usize,
}

impl<S: Pairs> Terms<S> for RowPairs {
    const KEYS: usize = 2;
    const BYTES: usize = size_of::<Pair>();
    type At = [*const Bf16; 2];
    type X = S::P;
    type Y = S::P;

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
    fn zero(s: S) -> S::P {
        s.splat_pair(Pair::default())
    }

    #[inline(always)]
    unsafe fn x(s: S, weights: *const f32, term: usize) -> S::P {
        // SAFETY: the caller's promise; a pair is as large as an `f32`, and aligned alike.
        s.splat_pair(unsafe { *weights.cast::<Pair>().add(term) })
    }

    #[inline(always)]
    unsafe fn y(s: S, [first, second]: [*const Bf16; 2], column: usize) -> S::P {
        // SAFETY: the caller's promise.
        unsafe { s.zip(first.add(column), second.add(column)) }
    }

    #[inline(always)]
    fn fma(s: S, x: S::P, y: S::P, sum: S::V) -> S::V {
        s.dot2(sum, x, y)
    }
}

/// # Safety
/// For every key of every span, `16 · vecs` contiguous elements of its row of values are readable.
#[inline(always)]
pub(crate) unsafe fn values<S: Simd, R: Terms<S>>(s: S, a: Values<'_, R>) {
    assert!(a.spans.len() == a.rows.div_ceil(S::TILE_ROWS));
    assert!(a.weights.len() >= a.rows * SCORE_STRIDE && a.keep.len() >= a.rows && a.join.len() >= a.rows);
    assert!(a.rows == 0 || a.out.len() >= (a.rows - 1) * a.out_stride + a.vecs * LANES);
    debug_assert!(!a.fresh || !a.spans.iter().any(|span| span.is_empty()));
    // How many terms ahead a few rows ask: so many take [`FAR`] bytes, if all columns are here.
    let far = FAR / (a.vecs.max(1) * LANES * R::BYTES);
    // Columns outside: a tile of values is read by all the rows before the next columns are touched.
    let mut vec = 0;
    while vec < a.vecs {
        // Remainders are shared out evenly: 5 vectors as 3 + 2, not 4 + 1.
        let tiles_left = (a.vecs - vec).div_ceil(S::TILE_VECS);
        let vecs = (a.vecs - vec).div_ceil(tiles_left);
        for (index, span) in a.spans.iter().enumerate() {
            if span.is_empty() {
                continue;
            }
            let row = index * S::TILE_ROWS;
            let rows = S::TILE_ROWS.min(a.rows - row);
            // SAFETY: `row + rows ≤ a.rows`, `vec + vecs ≤ a.vecs`, and spans end inside a block, so the assertions
            // above put weights, factors and outputs inside their slices; the caller vouches for the values.
            unsafe {
                let fold = Fold {
                    keep: a.keep.as_ptr().add(row),
                    join: a.join.as_ptr().add(row),
                    out: a.out.as_mut_ptr().add(row * a.out_stride + vec * LANES),
                    out_stride: a.out_stride,
                    fresh: a.fresh,
                };
                let w = a.weights.as_ptr().add(row * SCORE_STRIDE);
                let values = a.values.columns_from(vec * LANES);
                let far = asks_ahead::<S>(row, rows, a.rows).then_some(far);
                a.ahead.beside(
                    s,
                    if asks::<S>(rows, vecs) { terms::<S, R>(*span).len() } else { 0 },
                    #[inline(always)]
                    |trail| {
                        let asking = Asking { far, trail };
                        by_tile_shape!(S, rows, vecs, |MR, NV| tile::<S, R, MR, NV>(
                            s,
                            w,
                            (values, asking),
                            *span,
                            fold
                        ));
                    },
                );
            }
        }
        vec += vecs;
    }
}

/// Where a tile's sums go: the running outputs of its rows, and their factors.
#[derive(Clone, Copy)]
struct Fold {
    keep: *const f32,
    join: *const f32,
    out: *mut f32,
    out_stride: usize,
    fresh: bool,
}

/// What a tile asks for while it computes.
#[derive(Clone, Copy)]
struct Asking {
    /// A few rows: values, so many terms ahead.
    far: Option<usize>,
    /// A tile that [`asks`]: what comes later, a line with each term.
    trail: Trail,
}

/// The terms of a span, which starts at a panel, so with a whole term.
#[inline(always)]
fn terms<S: Simd, R: Terms<S>>(span: Span) -> Range<usize> {
    span.keys().start / R::KEYS..span.keys().end.div_ceil(R::KEYS)
}

/// `MR` rows by `NV` vectors of columns.
///
/// # Safety
/// For `MR` rows: weights up to the span's end, two factors, and `16 · NV` outputs; values as for [`values`].
#[inline(always)]
unsafe fn tile<S: Simd, R: Terms<S>, const MR: usize, const NV: usize>(
    s: S,
    weights: *const f32,
    (values, Asking { far, mut trail }): (R, Asking),
    span: Span,
    fold: Fold,
) {
    let mut sum = [[s.splat(0.0); NV]; MR];
    let Range { start: mut term, end } = terms::<S, R>(span);
    // Not where the full tile has one vector: it would pay for the question.
    let far = if const { S::TILE_VECS > 1 || MR <= FEW_ROWS && MR < S::TILE_ROWS } { far } else { None };
    let step = values.step();
    while term < end {
        // SAFETY: the caller vouches for the span's keys.
        let (mut at, evenly) = unsafe { (values.at(term), values.evenly(term)) };
        // SAFETY: as above.
        let (mut later, then_evenly) = match far.and_then(|far| unsafe { values.later(term + far, end) }) {
            Some((later, evenly)) => (Some(later), evenly),
            None => (None, usize::MAX),
        };
        // The loop looks nothing up: see `pack::Even`.
        let stop = end.min(term.saturating_add(evenly.min(then_evenly)));
        for j in term..stop {
            if let Some(later) = &mut later {
                for row in R::rows(*later) {
                    s.prefetch_far(row, NV * LANES * R::BYTES / R::KEYS);
                }
                *later = R::offset(*later, step);
            }
            if const { asks::<S>(MR, NV) } {
                trail.ask(s);
            }
            let mut value = [R::zero(s); NV];
            for (n, value) in value.iter_mut().enumerate() {
                // SAFETY: vector `n < NV` of term `j`, to which `at` has been counted: terms up to `stop` lie evenly.
                *value = unsafe { R::y(s, at, n * LANES) };
            }
            for (r, sum) in sum.iter_mut().enumerate() {
                // SAFETY: row `r < MR`, a term of the span.
                let weight = unsafe { R::x(s, weights.add(r * SCORE_STRIDE), j) };
                for (sum, &value) in sum.iter_mut().zip(&value) {
                    *sum = R::fma(s, weight, value, *sum);
                }
            }
            at = R::offset(at, step);
        }
        term = stop;
    }
    for (r, sum) in sum.iter().enumerate() {
        // SAFETY: row `r < MR` has two factors and `16 · NV` outputs.
        unsafe {
            let (keep, join) = (s.splat(*fold.keep.add(r)), s.splat(*fold.join.add(r)));
            for (n, &sum) in sum.iter().enumerate() {
                let out = fold.out.add(r * fold.out_stride + n * LANES);
                let before = if fold.fresh { s.splat(0.0) } else { s.mul(s.load(out), keep) };
                s.store(out, s.fma(sum, join, before));
            }
        }
    }
}
