//! Online softmax, block by block.
//!
//! Each 256-key block takes its own maximum, exponentiates against it and sums; the block is then merged into the row's
//! running `(max, sum)` and output by two factors. Blocks start at key multiples of 256 and are merged in order, so the
//! result does not depend on the thread that computed them, or on whether the rows came one at a time. (Milakov and
//! Gimelshein 2018, arXiv:1805.02867; Dao 2023, arXiv:2307.08691; the block-local form is Flash-Decoding's.)
//!
//! Edge cases, all handled here:
//! - A score of −∞ hides its key. A block without a visible key has max −∞ and sum 0; −∞ − (−∞) is never computed,
//!   because a max of −∞ is replaced by 0 before it is subtracted.
//! - A NaN score makes the row's sum NaN, and so the whole row: maxima ignore NaN, exponentials do not.
//! - A score of +∞ becomes ∞ − ∞ = NaN, as in IEEE softmax.
//! - The sum of a block is taken in 16 lanes, lane `key mod 16`, each in key order, then a fixed tree; over weights as
//!   this step stores them.

use crate::attention::scratch::SCORE_STRIDE;
use crate::attention::steps::score_passes::ScoreBlock;
use crate::attention::steps::softmax_merge::{SoftmaxState, merge_block_state};
use crate::attention::steps::span::Span;
use crate::matmul::operands::Floats;
use crate::matmul::tile_shape::next_part;
use crate::simd::exp::{self, Accuracy, Begun};
use crate::simd::{LANES, Simd};
use core::marker::PhantomData;
use core::ops::Range;

/// Form in which weights are stored, and how exactly they are computed for it.
pub(crate) trait WeightForm<S: Simd> {
    type Accuracy: Accuracy;
    /// True if each weight lies where its score was.
    const IN_PLACE: bool;
    /// True if scores are multiplied by a factor as they are read.
    const SCALES: bool = false;
    /// Number of rows behind which rows hold the rest of the weights; 0 if there is no rest.
    const ROWS_BEHIND: usize = 0;

    /// Writes the sixteen weights of a panel of a row of scores, and returns them as they were written: the numbers that
    /// the row's sum is taken over.
    ///
    /// # Safety
    /// The panel and those before it are writable, and their scores have been read; so is the row [`Self::ROWS_BEHIND`] rows behind.
    unsafe fn store(s: S, row: *mut f32, panel: usize, weights: S::V) -> S::V;
}

/// Weights as floats, each where its score was.
impl<S: Simd> WeightForm<S> for Floats {
    type Accuracy = exp::Full;
    const IN_PLACE: bool = true;

    #[inline(always)]
    unsafe fn store(s: S, row: *mut f32, panel: usize, weights: S::V) -> S::V {
        // SAFETY: the caller guarantees that the panel is writable.
        unsafe { s.store(row.add(panel * LANES), weights) };
        weights
    }
}

/// Form of weights `W` of scores that are multiplied by a positive factor as they are read: the bits of a pass before.
pub(crate) struct Scaled<W>(PhantomData<W>);

impl<S: Simd, W: WeightForm<S>> WeightForm<S> for Scaled<W> {
    type Accuracy = W::Accuracy;
    const IN_PLACE: bool = W::IN_PLACE;
    const SCALES: bool = true;
    const ROWS_BEHIND: usize = W::ROWS_BEHIND;

    #[inline(always)]
    unsafe fn store(s: S, row: *mut f32, panel: usize, weights: S::V) -> S::V {
        // SAFETY: same contract.
        unsafe { W::store(s, row, panel, weights) }
    }
}

/// Turns the scores of a block into weights relative to the block's own maximum, in the form `W`, and merges the block
/// into the rows' running state. `factor` is 1 unless the form [scales](WeightForm::SCALES).
pub(crate) fn softmax<S: Simd, W: WeightForm<S>>(
    s: S,
    row_block: ScoreBlock<'_>,
    factor: f32,
    state: SoftmaxState<'_>,
) {
    debug_assert!(factor > 0.0 && (W::SCALES || factor == 1.0), "a factor of {factor}");
    let ScoreBlock { scores, spans, rows } = row_block;
    let padded = rows.next_multiple_of(LANES);
    assert!(spans.are_of(rows) && scores.len() >= (rows + W::ROWS_BEHIND) * SCORE_STRIDE);
    assert!(W::ROWS_BEHIND == 0 || rows <= W::ROWS_BEHIND);
    assert!(state.max.len() >= padded && state.sum.len() >= padded);
    assert!(state.rescale_prev.len() >= padded && state.rescale_block.len() >= padded);
    let (mut row, tile_rows) = (0, spans.tile_rows());
    for spans in spans.chunk_by(|a, b| a.apart.is_some() == b.apart.is_some()) {
        let end = rows.min(row + spans.len() * tile_rows);
        let scores = &mut scores[row * SCORE_STRIDE..];
        let (max, sum) = (&mut state.rescale_prev[row..end], &mut state.rescale_block[row..end]);
        let rows = TileScores { scores, factor, max, sum };
        // Compiled apart: together they would not have enough registers, which took a fifth of this step's time.
        if spans[0].apart.is_some() {
            s.vectorize(
                #[inline(always)]
                || weights_apart::<S, W>(s, spans, rows),
            );
        } else {
            s.vectorize(
                #[inline(always)]
                || weights_together::<S, W>(s, spans, tile_rows, rows),
            );
        }
        row = end;
    }
    s.vectorize(
        #[inline(always)]
        move || merge_block_state(s, padded, state),
    );
}

/// Scores of some tiles of rows, `[row][SCORE_STRIDE]`, and what lies behind them, their factor, and room for the rows' maxima and sums.
struct TileScores<'a> {
    scores: &'a mut [f32],
    factor: f32,
    max: &'a mut [f32],
    sum: &'a mut [f32],
}

/// Computes the weights of rows that are not [apart](Span::apart), in place, and their maxima and sums.
#[inline(always)]
fn weights_together<S: Simd, W: WeightForm<S>>(s: S, spans: &[Span], tile_rows: usize, rows: TileScores<'_>) {
    let TileScores { scores, factor, max, sum } = rows;
    // No part of a tile is larger than the one before it, so the maxima that were computed ahead are enough; across tiles if
    // a full tile's rows are computed SIDE_ROWS at a time.
    let whole = tile_rows.is_multiple_of(S::SIDE_ROWS);
    let (rows, mut known) = (max.len(), false);
    assert!(scores.len() >= (rows + W::ROWS_BEHIND) * SCORE_STRIDE && sum.len() == rows);
    for (tile, span) in spans.iter().enumerate() {
        let (mut row, tile_end) = (tile * tile_rows, rows.min((tile + 1) * tile_rows));
        let panels = span.first_panel()..span.end_panel();
        // End of the rows with the same panels, in this tile and the next.
        let same = whole && spans.get(tile + 1).is_some_and(|next| (next.first_panel()..next.end_panel()) == panels);
        let alike_end = if same { rows.min(tile_end + tile_rows) } else { tile_end };
        while row < tile_end {
            let side = next_part(tile_end - row, S::SIDE_ROWS);
            let next = row + side;
            let alike = !panels.is_empty() && next + side <= alike_end;
            let max = &mut max[row..if alike { next + side } else { next }];
            let rows = SideRows { panels: panels.clone(), factor, known, max, sum: &mut sum[row..next] };
            // SAFETY: `max` belongs to rows below `rows`, which lie inside `scores`, as asserted; spans end inside a block, so
            // panels inside a row.
            unsafe {
                let scores = scores.as_mut_ptr().add(row * SCORE_STRIDE);
                by_tile_rows!(side, most S::SIDE_ROWS, |N| weights::<S, W, N>(s, scores, rows));
            }
            (row, known) = (next, alike);
        }
    }
}

/// Computes the weights of rows that are [apart](Span::apart), in place, and their maxima and sums. Weights of the
/// panels of the span that are not a row's are 0. A row's panels are moved together, and the weights back.
#[inline(always)]
fn weights_apart<S: Simd, W: WeightForm<S>>(s: S, spans: &[Span], rows: TileScores<'_>) {
    let TileScores { scores, factor, max, sum } = rows;
    // Only products of floats take rows apart.
    assert!(W::IN_PLACE, "rows apart have their weights where their scores were");
    for (n, scores) in scores.chunks_exact_mut(SCORE_STRIDE).take(max.len()).enumerate() {
        let span = spans[n / S::TILE_ROWS];
        let (first, end) = (span.first_panel(), span.end_panel());
        let (seen, mut together) = (span.of_row(n % S::TILE_ROWS).panels, first);
        let (panels, _) = scores.as_chunks_mut::<LANES>();
        for panel in (first..end).filter(|panel| seen >> panel & 1 == 1) {
            panels[together] = panels[panel];
            together += 1;
        }
        let row =
            SideRows { panels: first..together, factor, known: false, max: &mut max[n..=n], sum: &mut sum[n..=n] };
        // SAFETY: the panels of a span lie inside the row, which is all that is read and written.
        unsafe { weights::<S, W, 1>(s, panels.as_mut_ptr().cast(), row) };
        for panel in (first..end).rev() {
            together -= usize::from(seen >> panel & 1);
            panels[panel] = if seen >> panel & 1 == 1 { panels[together] } else { [0.0; LANES] };
        }
    }
}

/// Rows of a tile that are exponentiated side by side.
struct SideRows<'a> {
    panels: Range<usize>,
    /// Factor of the scores, if the form of the weights scales.
    factor: f32,
    /// True if the rows' maxima have been computed already.
    known: bool,
    /// Maxima of the rows; then, if there are panels and the rows that follow have the same panels, room for
    /// theirs.
    max: &'a mut [f32],
    /// Room for the rows' sums.
    sum: &'a mut [f32],
}

/// Computes the weights of `N` rows of scores, in place, and their sums, each in the order of keys; meanwhile, computes
/// the maxima of the `N` rows that follow: their scores come from the second-level cache, and the exponentials hide the
/// latency.
///
/// A panel's exponentials are begun before those of the panel before are finished, if registers hold both
/// ([`Simd::BEGINS_AHEAD`]). One panel after the other would fill the core's queues with operations that all wait for the same
/// few.
///
/// # Safety
/// `scores` has one row of [`SCORE_STRIDE`] readable floats for each of `rows.max`, the first `N` of them writable, and so are the
/// rows [`WeightForm::ROWS_BEHIND`] behind those; `panels` lie inside a row.
#[inline(always)]
unsafe fn weights<S: Simd, W: WeightForm<S>, const N: usize>(s: S, scores: *mut f32, rows: SideRows<'_>) {
    let SideRows { panels, factor, known, max, sum } = rows;
    let factor = Factor::<S>::of::<W>(s, factor);
    let (max, after_max) = max.split_at_mut(N);
    assert!(sum.len() == N && (after_max.is_empty() || after_max.len() == N));
    // If no rows follow, the same rows are read again and the result is not used.
    let after = if after_max.is_empty() { scores } else { scores.wrapping_add(N * SCORE_STRIDE) };
    let none = [s.splat(f32::NEG_INFINITY); N];
    // SAFETY: the caller guarantees that whole rows are readable, and the first `N` writable; `after` is those rows or the
    // `N` that follow. A panel is written once it has been read, and the one after it too.
    unsafe {
        if !known {
            let mut most = none;
            for panel in panels.clone() {
                raise(s, scores.add(panel * LANES), &mut most);
            }
            reduce(s, most, factor, max);
        }
        let mut reference = none;
        for (reference, &mut max) in reference.iter_mut().zip(max) {
            *reference = s.splat(if max == f32::NEG_INFINITY { 0.0 } else { max });
        }
        let (mut total, mut most) = ([s.splat(0.0); N], none);
        if const { !S::BEGINS_AHEAD } {
            for panel in panels {
                let begun = begin(s, scores.add(panel * LANES), factor, &reference);
                raise(s, after.add(panel * LANES), &mut most);
                end::<S, W, N>(s, begun, scores, panel, &mut total);
            }
            reduce(s, most, factor, after_max);
        } else if let Some(last) = panels.clone().last() {
            let mut begun = begin(s, scores.add(panels.start * LANES), factor, &reference);
            raise(s, after.add(panels.start * LANES), &mut most);
            for panel in panels.start..last {
                let next = begin(s, scores.add((panel + 1) * LANES), factor, &reference);
                raise(s, after.add((panel + 1) * LANES), &mut most);
                end::<S, W, N>(s, begun, scores, panel, &mut total);
                begun = next;
            }
            reduce(s, most, factor, after_max);
            end::<S, W, N>(s, begun, scores, last, &mut total);
        }
        for (sum, total) in sum.iter_mut().zip(total) {
            *sum = s.reduce_sum(total);
        }
    }
}

/// Raises `most` to the maximum of itself and the panel's scores.
///
/// # Safety
/// The caller guarantees sixteen readable floats in each of `N` rows, [`SCORE_STRIDE`] apart.
#[inline(always)]
unsafe fn raise<S: Simd, const N: usize>(s: S, scores: *const f32, most: &mut [S::V; N]) {
    for (row, most) in most.iter_mut().enumerate() {
        // SAFETY: the caller guarantees sixteen floats in row `row < N`.
        *most = s.raise(*most, unsafe { s.load(scores.add(row * SCORE_STRIDE)) });
    }
}

/// Factor of scores: `None`, which the compiler knows, where the form of the weights does not scale.
#[derive(Clone, Copy)]
struct Factor<S: Simd>(Option<(f32, S::V)>);

impl<S: Simd> Factor<S> {
    #[inline(always)]
    fn of<W: WeightForm<S>>(s: S, factor: f32) -> Self {
        Self(if const { W::SCALES } { Some((factor, s.splat(factor))) } else { None })
    }
}

/// Writes the largest lane of each vector, multiplied by the factor, for the vectors that `max` has room for.
#[inline(always)]
fn reduce<S: Simd, const N: usize>(s: S, most: [S::V; N], factor: Factor<S>, max: &mut [f32]) {
    for (max, most) in max.iter_mut().zip(most) {
        let most = s.reduce_max(most);
        *max = if let Some((factor, _)) = factor.0 { most * factor } else { most };
    }
}

/// Begins the exponentials of a panel's scores, multiplied by the factor, less each row's reference.
///
/// # Safety
/// The caller guarantees sixteen readable floats in each of `N` rows, [`SCORE_STRIDE`] apart.
#[inline(always)]
unsafe fn begin<S: Simd, const N: usize>(
    s: S,
    scores: *const f32,
    factor: Factor<S>,
    reference: &[S::V; N],
) -> Begun<S::V, N> {
    let mut x = *reference;
    for (row, x) in x.iter_mut().enumerate() {
        // SAFETY: the caller guarantees sixteen floats in row `row < N`.
        let score = unsafe { s.load(scores.add(row * SCORE_STRIDE)) };
        *x = s.sub(if let Some((_, factor)) = factor.0 { s.mul(score, factor) } else { score }, *x);
    }
    exp::begin(s, x)
}

/// Finishes the exponentials that [`begin`] began for a panel, writes them as weights and adds them to the sums.
///
/// # Safety
/// The panel and those before it are writable in each of `N` rows, [`SCORE_STRIDE`] apart, and their scores have been
/// read; the rows [`WeightForm::ROWS_BEHIND`] behind are writable.
#[inline(always)]
unsafe fn end<S: Simd, W: WeightForm<S>, const N: usize>(
    s: S,
    begun: Begun<S::V, N>,
    scores: *mut f32,
    panel: usize,
    total: &mut [S::V; N],
) {
    for (row, weight) in exp::end::<S, W::Accuracy, N>(s, begun).into_iter().enumerate() {
        // SAFETY: the caller guarantees this for row `row < N`.
        let weight = unsafe { W::store(s, scores.add(row * SCORE_STRIDE), panel, weight) };
        total[row] = s.add(total[row], weight);
    }
}
