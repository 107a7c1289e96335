//! The online softmax, block by block.
//!
//! Each 256-key block takes its own maximum, exponentiates against it and sums; the row's running `(max, sum)` and
//! output then take the block in by two factors. Blocks start at key multiples of 256 and join in order, so it does
//! not matter which thread computed them, or whether the rows came one at a time.
//! (Milakov and Gimelshein 2018, arXiv:1805.02867; Dao 2023, arXiv:2307.08691; the block-local form is Flash-Decoding's.)
//!
//! Rules for the corners, all here:
//! - A score of −∞ hides its key. A block with nothing visible has max −∞ and sum 0; −∞ − (−∞) is never computed,
//!   because a max of −∞ is replaced by 0 before it is subtracted.
//! - A NaN score makes the row's sum NaN, and so the whole row: maxima pass NaN over, exponentials do not.
//! - A score of +∞ makes ∞ − ∞ = NaN of itself, as IEEE softmax does.
//! - The sum of a block is taken in 16 lanes, lane `key mod 16`, each in key order, then a fixed tree.

use crate::block::{SCORE_STRIDE, Span};
use crate::exp::{exp, exp_each};
use crate::simd::{LANES, Simd};
use core::ops::Range;

/// Running state of a group of rows, padded to whole vectors, and what the last block did to it.
pub(crate) struct Rows<'a> {
    /// Largest score so far.
    pub(crate) max: &'a mut [f32],
    /// Σ exp(score − max) so far.
    pub(crate) sum: &'a mut [f32],
    /// Factor of everything gathered before this block. On entry of `join`: the block's own maxima.
    pub(crate) keep: &'a mut [f32],
    /// Factor of this block. On entry of `join`: the block's own sums.
    pub(crate) join: &'a mut [f32],
}

/// Turns the scores of a block into weights relative to the block's own maximum, and takes the block into the rows'
/// running state.
#[inline(always)]
pub(crate) fn softmax<S: Simd>(s: S, scores: &mut [f32], spans: &[Span], rows: usize, state: Rows<'_>) {
    let padded = rows.next_multiple_of(LANES);
    assert!(spans.len() == rows.div_ceil(S::TILE_ROWS) && scores.len() >= rows * SCORE_STRIDE);
    assert!(state.max.len() >= padded && state.sum.len() >= padded);
    assert!(state.keep.len() >= padded && state.join.len() >= padded);
    for (tile, span) in spans.iter().enumerate() {
        let tile_rows = tile * S::TILE_ROWS..rows.min((tile + 1) * S::TILE_ROWS);
        let panels = span.first_panel()..span.end_panel();
        // The maxima of all the tile's rows first: independent chains, which the exponentials can overlap.
        for row in tile_rows.clone() {
            // SAFETY: `row < rows` and spans end inside a block, so the panels lie inside `scores`.
            let scores = unsafe { scores.as_ptr().add(row * SCORE_STRIDE) };
            let mut max = s.splat(f32::NEG_INFINITY);
            for panel in panels.clone() {
                // SAFETY: as above.
                max = s.max(unsafe { s.load(scores.add(panel * LANES)) }, max);
            }
            state.keep[row] = s.reduce_max(max);
        }
        let mut row = tile_rows.start;
        while row < tile_rows.end {
            let side = (tile_rows.end - row).min(SIDE);
            let (max, sum) = (&state.keep[row..row + side], &mut state.join[row..row + side]);
            // SAFETY: as above, for all the rows.
            unsafe {
                let scores = scores.as_mut_ptr().add(row * SCORE_STRIDE);
                match side {
                    SIDE => weights::<S, SIDE>(s, scores, panels.clone(), max, sum),
                    2 => weights::<S, 2>(s, scores, panels.clone(), max, sum),
                    1 => weights::<S, 1>(s, scores, panels.clone(), max, sum),
                    _ => unreachable!("at most SIDE rows"),
                }
            }
            row += side;
        }
    }
    join(s, padded, state);
}

/// Rows that are exponentiated side by side: 8 % of the pass less than one at a time on AVX-512; more gain nothing.
const SIDE: usize = 3;

/// Weights of the scores of `N` rows, in place, and their sums, each taken in the order of keys.
///
/// # Safety
/// `scores` is `N` rows, [`SCORE_STRIDE`] apart, whose `panels` are readable and writable.
#[inline(always)]
unsafe fn weights<S: Simd, const N: usize>(s: S, scores: *mut f32, panels: Range<usize>, max: &[f32], sum: &mut [f32]) {
    assert!(max.len() == N && sum.len() == N);
    let zero = [s.splat(0.0); N];
    let (mut reference, mut total) = (zero, zero);
    for (reference, &max) in reference.iter_mut().zip(max) {
        *reference = s.splat(if max == f32::NEG_INFINITY { 0.0 } else { max });
    }
    for panel in panels {
        // SAFETY: the caller's promise.
        let at = |row: usize| unsafe { scores.add(row * SCORE_STRIDE + panel * LANES) };
        let mut x = zero;
        for (row, x) in x.iter_mut().enumerate() {
            // SAFETY: as above.
            *x = s.sub(unsafe { s.load(at(row)) }, reference[row]);
        }
        for (row, weight) in exp_each(s, x).into_iter().enumerate() {
            // SAFETY: as above.
            unsafe { s.store(at(row), weight) };
            total[row] = s.add(total[row], weight);
        }
    }
    for (sum, total) in sum.iter_mut().zip(total) {
        *sum = s.reduce_sum(total);
    }
}

/// Takes rows gathered over later keys into rows gathered over earlier ones, as [`softmax`] and the values kernel do
/// with a block: `later.max` and `later.sum` go in as `keep` and `join`. Rows are `dim` long.
#[inline(always)]
pub(crate) fn fold<S: Simd>(s: S, state: Rows<'_>, out: &mut [f32], later: &[f32], dim: usize) {
    let rows = state.max.len();
    assert!(rows.is_multiple_of(LANES) && [state.sum.len(), state.keep.len(), state.join.len()] == [rows; 3]);
    assert!(out.len() == later.len() && out.len() <= rows * dim);
    let Rows { max, sum, keep, join: factor } = state;
    join(s, rows, Rows { max, sum, keep: &mut *keep, join: &mut *factor });
    for (row, (out, later)) in out.chunks_exact_mut(dim).zip(later.chunks_exact(dim)).enumerate() {
        let factors = [s.splat(keep[row]), s.splat(factor[row])];
        let ((out, out_rest), (later, later_rest)) = (out.as_chunks_mut(), later.as_chunks());
        for (out, later) in out.iter_mut().zip(later) {
            fold_vector(s, factors, out, later);
        }
        if !out_rest.is_empty() {
            let (mut a, mut b) = ([0.0; LANES], [0.0; LANES]);
            a[..out_rest.len()].copy_from_slice(out_rest);
            b[..later_rest.len()].copy_from_slice(later_rest);
            fold_vector(s, factors, &mut a, &b);
            out_rest.copy_from_slice(&a[..out_rest.len()]);
        }
    }
}

/// `out ← out · keep + later · factor`.
#[inline(always)]
fn fold_vector<S: Simd>(s: S, [keep, factor]: [S::V; 2], out: &mut [f32; LANES], later: &[f32; LANES]) {
    // SAFETY: both are sixteen floats.
    unsafe {
        let old = s.mul(s.load(out.as_ptr()), keep);
        s.store(out.as_mut_ptr(), s.fma(s.load(later.as_ptr()), factor, old));
    }
}

/// The running `(max, sum)` take the block in; its maxima and sums become the two factors.
#[inline(always)]
fn join<S: Simd>(s: S, padded: usize, state: Rows<'_>) {
    let hidden = s.splat(f32::NEG_INFINITY);
    for row in (0..padded).step_by(LANES) {
        // SAFETY: `row + 16 ≤ padded`, which `softmax` checked all four against.
        unsafe {
            let (old_max, old_sum) = (s.load(state.max.as_ptr().add(row)), s.load(state.sum.as_ptr().add(row)));
            let (max, sum) = (s.load(state.keep.as_ptr().add(row)), s.load(state.join.as_ptr().add(row)));
            let new_max = s.max(max, old_max);
            let reference = s.select_eq(new_max, hidden, s.splat(0.0), new_max);
            let keep = exp(s, s.sub(old_max, reference));
            let join = exp(s, s.sub(max, reference));
            s.store(state.max.as_mut_ptr().add(row), new_max);
            s.store(state.sum.as_mut_ptr().add(row), s.fma(sum, join, s.mul(old_sum, keep)));
            s.store(state.keep.as_mut_ptr().add(row), keep);
            s.store(state.join.as_mut_ptr().add(row), join);
        }
    }
}
