//! One row block against one key block, in the backward pass.

use crate::attention::backward::call::BiasColumns;
use crate::attention::backward::column::{Column, ColumnKeys};
use crate::attention::backward::memory::{Own, RowNumber, ScoreScratch};
use crate::attention::backward::pass::BlockAt;
use crate::attention::backward::row_block::rows_of;
use crate::attention::backward::rows::BlockRows;
use crate::attention::blocks::key_block::{BlockMemory, KeyBlock, ScoreCopies};
use crate::attention::blocks::queries::Queries;
use crate::attention::blocks::task::AttentionTask;
use crate::attention::scratch::{MAX_ROW_BLOCK, SCORE_STRIDE};
use crate::attention::steps::dropout::{self, Kept};
use crate::attention::steps::score_passes::ScoreBlock;
use crate::attention::steps::softmax_backward::{self, SavedRow};
use crate::attention::steps::span::Spans;
use crate::matmul::pack::NonFinite;
use crate::matmul::prefetch::PrefetchQueue;
use crate::simd::{LANES, QUIET_NAN, Simd};
use crate::tensor::rows::KEY_BLOCK;

/// Gradients that are sums over query rows.
#[derive(Clone, Copy)]
pub(crate) enum Of {
    Keys,
    Values,
}

/// Scores of a row block against the column's keys, which become weights, and the rows they belong to.
pub(crate) struct TileScores<'b> {
    pub(crate) scores: &'b mut [f32],
    /// Derivatives of the softcap, and scores before the caller's function, if there is one.
    copies: ScoreCopies<'b>,
    /// Weights that dropout keeps, if the call drops any.
    dropout: Option<Kept>,
    pub(crate) spans: &'b Spans,
    pub(crate) q: BlockRows,
    pub(crate) d_out: BlockRows,
    saved: [SavedRow; MAX_ROW_BLOCK],
    /// True if the gradients of the queries are written, not added to.
    pub(crate) fresh: bool,
    /// Memory to prefetch meanwhile.
    pub(crate) prefetch: &'b mut PrefetchQueue,
}

/// Turn of a key block among those that a row block sees.
#[derive(Clone, Copy)]
pub(crate) struct Turn {
    pub(crate) is_first: bool,
    pub(crate) is_last: bool,
}

impl<S: Simd> Column<'_, S> {
    /// Adds what a row block, the `number`th of the column, contributes to the gradients of the column's keys and values, and of
    /// the row block's queries. Returns false if the work was stopped.
    ///
    /// # Safety
    /// The column's gradients are this worker's alone, and so are the row block's once the same row block of the column
    /// before is done.
    pub(crate) unsafe fn tile(
        &self,
        task: &AttentionTask<'_, S>,
        number: usize,
        keys: &mut ColumnKeys,
        scores: &mut ScoreScratch<'_>,
        own: &mut Own<'_>,
    ) -> bool {
        let (first, in_parts) = (self.keys().start, self.pass.part.sums.is_some());
        if task.blocks_in(first..first + 1).next().is_none() {
            if self.at.number == 0 && !in_parts && task.blocks().next().is_none() {
                // SAFETY: no column adds to the gradients of these queries, and one worker has the first.
                unsafe { self.write_unseen(task) };
            }
            return true;
        }
        // Blocks between that the rows do not see are passed over without a wait.
        let before = task.blocks_in(0..first).next_back();
        if let Some(before) = before
            && !self.pass.wait(BlockAt { number: before / KEY_BLOCK, ..self.at }, number + 1)
        {
            return false;
        }
        let turn = match in_parts {
            // SAFETY: the row block's turn has come, so its memory is this worker's.
            true => Turn { is_first: !unsafe { self.has_begun(task) }, is_last: false },
            false => {
                Turn { is_first: before.is_none(), is_last: task.blocks_in(first + 1..usize::MAX).next().is_none() }
            }
        };
        let regions = &mut scores.scratch.regions(task.tiling);
        let queries = Queries::of(task, regions);
        let mut memory = BlockMemory::new();
        let mut block = KeyBlock::of(task, first, queries, &mut memory, regions);
        // For all row blocks of the column.
        (block.needed, block.packed_keys) = (0..block.len, keys.packed);
        // SAFETY: the row block's turn has come, so its memory is this worker's.
        *block.prefetch = unsafe { self.prefetch(task, number, turn) };
        block.copies = ScoreCopies {
            derivatives: task.call.options.softcap.is_some().then_some(&mut *scores.derivatives),
            biased: task.given.score.then_some(&mut *scores.biased),
        };
        let seen = block.compute_scores(0..task.set.rows.len());
        keys.packed = block.packed_keys;
        let KeyBlock { spans, regions, copies, prefetch, .. } = block;
        // Whole rows are written by the first key block, if all of them see some of it.
        let fresh = seen && turn.is_first && !spans.iter().any(|span| span.is_empty());
        // SAFETY: the saved tensors fit the call; the row block's turn has come, so its memory is this worker's.
        let mut scores = unsafe {
            let d_out = task.block_rows(&self.pass.saved.d_out, NonFinite::Handled, own.d_out);
            let saved = self.saved_rows(task, &d_out, turn, own.out);
            let q = task.block_rows(&task.call.q, NonFinite::Handled, own.q);
            let dropout = task.draw_kept(0..rows_of(task), spans, first, None);
            TileScores { scores: regions.scores, copies, dropout, spans, q, d_out, saved, fresh, prefetch }
        };
        // SAFETY: the caller guarantees the column; the row block's turn has come.
        unsafe {
            if turn.is_first && !fresh {
                self.clear_gradients(task);
            }
            if seen {
                self.compute_weights(task, &mut scores, keys, own);
                self.apply_derivative(task, &scores, own);
                self.add_option_gradients(task, &mut scores, own);
                self.add_key_gradients(task, &mut scores, own);
                self.add_query_gradients(task, &mut scores, keys, own);
            }
            if turn.is_last {
                self.end_rows(task, &scores.q);
            }
        }
        true
    }

    /// Returns what was saved of the row block's rows; `d_out` are their output gradients. With the first key block it computes
    /// their deltas and makes the row block's memory ready; `copy` is memory for a row block of outputs.
    ///
    /// # Safety
    /// The saved tensors fit the call; the row block's memory is this worker's.
    unsafe fn saved_rows(
        &self,
        task: &AttentionTask<'_, S>,
        d_out: &BlockRows,
        turn: Turn,
        copy: &mut [f32],
    ) -> [SavedRow; MAX_ROW_BLOCK] {
        // SAFETY: same contract.
        unsafe {
            if turn.is_first {
                let deltas = task.deltas(&self.pass.saved, d_out, copy);
                self.begin_rows(task, &deltas);
            }
            self.kept_rows(task)
        }
    }

    /// Turns scores into weights, and computes the gradients of the scores.
    fn compute_weights(
        &self,
        task: &AttentionTask<'_, S>,
        tile: &mut TileScores<'_>,
        keys: &ColumnKeys,
        own: &mut Own<'_>,
    ) {
        let rows = task.set.rows.len();
        // SAFETY: the keys are the column's, and so are its values, packed in whole panels.
        unsafe { self.weight_gradients(task, tile, keys, own) }
        drop_weights(task.s, &tile.dropout, ScoreBlock { scores: own.gradients, spans: tile.spans, rows });
        let block = ScoreBlock { scores: tile.scores, spans: tile.spans, rows };
        softmax_backward::subtract_references(task.s, block, &tile.saved);
        let block = ScoreBlock { scores: tile.scores, spans: tile.spans, rows };
        softmax_backward::softmax_backward(task.s, block, own.gradients, &tile.saved);
        if tile.d_out.nonfinite.is_empty() {
            return;
        }
        // A row of output gradients that is not finite was copied with zeros: its weights carry the NaN to the keys it sees;
        // their gradients are NaN already.
        for row in (0..rows).filter(|&row| tile.d_out.nonfinite.has(row)) {
            let at = row * SCORE_STRIDE..row * SCORE_STRIDE + SCORE_STRIDE;
            for (weight, gradient) in tile.scores[at.clone()].iter_mut().zip(&own.gradients[at]) {
                *weight = if gradient.is_nan() { QUIET_NAN } else { *weight };
            }
        }
    }

    /// Turns gradients of what the caller's score function returned into gradients of the scores before it, and adds those in its
    /// parameters, if they are wanted.
    fn apply_derivative(&self, task: &AttentionTask<'_, S>, tile: &TileScores<'_>, own: &mut Own<'_>) {
        let Some(biased) = &tile.copies.biased else { return };
        for row in task.rows(0..rows_of(task)) {
            let keys = tile.spans.of_row(row.n).keys();
            let run = task.keys_from(row, self.keys().start + keys.start);
            let at = row.n * SCORE_STRIDE + keys.start..row.n * SCORE_STRIDE + keys.end;
            let (biased, gradients) = (&biased[at.clone()], &mut own.gradients[at]);
            if !own.parameters.is_empty() {
                task.mods.add_parameters(task.s, run, biased, gradients, own.parameters);
            }
            task.mods.apply_derivative(task.s, run, biased, gradients);
        }
    }

    /// Adds the gradients of the column's keys and values, and turns gradients of capped scores into those of scores.
    ///
    /// # Safety
    /// The rows of `tile` are the task's.
    unsafe fn add_key_gradients(&self, task: &AttentionTask<'_, S>, tile: &mut TileScores<'_>, own: &mut Own<'_>) {
        let block = |scores| ScoreBlock { scores, spans: tile.spans, rows: rows_of(task) };
        drop_weights(task.s, &tile.dropout, block(tile.scores));
        let in_parts = self.pass.part.sums.is_some();
        if in_parts || self.pass.gradients.v.is_some() {
            // SAFETY: the caller guarantees the rows.
            unsafe { self.add_key_sums(task, tile, Of::Values, own) }
        }
        if let Some(derivatives) = &tile.copies.derivatives {
            let block = ScoreBlock { scores: own.gradients, spans: tile.spans, rows: rows_of(task) };
            softmax_backward::softcap_backward(task.s, block, derivatives);
        }
        if in_parts || self.pass.gradients.k.is_some() {
            // SAFETY: the caller guarantees the rows.
            unsafe { self.add_key_sums(task, tile, Of::Keys, own) }
        }
    }

    /// Adds the gradients of bias and slopes: all that a row's keys add to.
    ///
    /// # Safety
    /// The column's gradients are this worker's, and so are the row block's numbers.
    unsafe fn add_option_gradients(&self, task: &AttentionTask<'_, S>, tile: &mut TileScores<'_>, own: &mut Own<'_>) {
        // Whether a pass in parts ends with gradients of slopes is not known yet.
        let in_parts = self.pass.part.sums.is_some();
        let slopes = self.pass.reduced.slopes.is_some() || in_parts && task.call.options.alibi.is_some();
        let bias = self.pass.gradients.bias.as_ref();
        if bias.is_none() && !slopes {
            return;
        }
        for row in task.rows(0..rows_of(task)) {
            let keys = tile.spans.of_row(row.n).keys();
            let gradients = &own.gradients[row.n * SCORE_STRIDE..][keys.clone()];
            let first = self.keys().start + keys.start;
            // SAFETY: the caller guarantees the row's numbers, and the elements of the bias that the column adds to.
            unsafe {
                let (_, numbers) = self.pass.rows.row(row.index());
                if slopes {
                    let position = task.row_position(row.i);
                    let sum = match task.key_positions() {
                        None => lane_sum(
                            task.s,
                            gradients,
                            #[inline(always)]
                            |key| position.abs_diff(first as isize + key as isize) as f32,
                        ),
                        Some(positions) => lane_sum(
                            task.s,
                            gradients,
                            #[inline(always)]
                            |key| position.abs_diff(positions[first + key] as isize) as f32,
                        ),
                    };
                    numbers[RowNumber::Distance as usize] += sum;
                }
                match bias {
                    Some(bias) if bias.columns == BiasColumns::One => {
                        numbers[RowNumber::Bias as usize] += lane_sum(
                            task.s,
                            gradients,
                            #[inline(always)]
                            |_| 1.0,
                        );
                    }
                    Some(bias) => bias.add([task.set.sequence, row.head, row.i], &task.seq, first, gradients),
                    None => {}
                }
            }
        }
    }
}

/// Multiplies what belongs to weights by the factors of dropout, if there is any.
fn drop_weights<S: Simd>(s: S, dropout: &Option<Kept>, block: ScoreBlock<'_>) {
    if let Some(kept) = dropout {
        dropout::drop_weights(s, block, kept);
    }
}

/// Returns the sum of `x · weight(its index)`, in sixteen lanes, then by one tree. `xs` starts with a panel.
fn lane_sum<S: Simd>(s: S, xs: &[f32], weight: impl Fn(usize) -> f32) -> f32 {
    s.vectorize(
        #[inline(always)]
        || {
            let mut lanes = [0.0f32; LANES];
            for (n, panel) in xs.chunks(LANES).enumerate() {
                for (i, (lane, &x)) in lanes.iter_mut().zip(panel).enumerate() {
                    *lane += x * weight(n * LANES + i);
                }
            }
            // SAFETY: an array of sixteen floats.
            s.reduce_sum(unsafe { s.load(lanes.as_ptr()) })
        },
    )
}
