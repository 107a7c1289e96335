//! Fused loop: one pass over the keys, one block at a time, for the rows of one task.
//!
//! ```text
//! (max, sum, out) ← (−∞, 0, 0) for every row
//! for each block of 256 keys:
//!     for each row block of up to 96 rows:
//!         S ← the row block's final scores                    compute_scores: QKᵀ, options, −∞ where hidden
//!         P ← exp(S − rowmax S)                               softmax; also merges (rowmax S, Σ P) into (max, sum)
//!         out ← rescale_prev · out + rescale_block · P V      accumulate_pv
//! out ← out / sum;  lse ← max + ln sum                        finish, or accumulate_pv with the last block
//! ```
//! (Dao, Fu, Ermon, Rudra and Ré 2022, arXiv:2205.14135.) No memory grows with the number of keys.

use crate::attention::blocks::key_block::{BlockMemory, KeyBlock, Scaling};
use crate::attention::blocks::queries::Queries;
use crate::attention::blocks::task::AttentionTask;
use crate::attention::call::outputs::{Point, Seen};
use crate::attention::forward::epilogue::EndedRowBlocks;
use crate::attention::forward::nonfinite::VisibleBits;
use crate::attention::forward::pv::PvMode;
use crate::attention::forward::score_outputs;
use crate::attention::forward::state::StateTransfer;
use crate::attention::products::by_arithmetic;
use crate::attention::products::multiply::{Arithmetic, Multiply};
use crate::attention::scratch::{MAX_ROW_BLOCK, Regions, SCORE_STRIDE, Scratch};
use crate::attention::steps::epilogue::RowBlockEnds;
use crate::attention::steps::score_passes::{self, ScoreBlock};
use crate::attention::steps::softmax_merge::SoftmaxState;
use crate::matmul::pack::NonFinite;
use crate::simd::Simd;
use crate::tensor::rows::Room;
use core::ops::Range;

/// Weights that a pass multiplies values by.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Weights {
    /// Exponentials under the running maximum, which outputs are rescaled by. A pass before that of finished ones multiplies
    /// nothing.
    Running,
    /// Finished weights of a weight function, in a second pass: the first has computed maxima and sums, and nothing is rescaled.
    Finished,
}

/// Passes of rows that nothing is known of. Hidden values have weight 0, and 0 times a finite number adds nothing. The first pass
/// assumes that all values are finite; if a hidden or visible one is not, the result shows it, and there is a second.
pub(crate) const ASSUMED_FINITE: [NonFinite; 2] = [NonFinite::Ignored, NonFinite::Handled];

/// Pass over key blocks.
pub(crate) struct Pass {
    pub(crate) weights: Weights,
    pub(crate) nonfinite: NonFinite,
    /// Block that row blocks may end with: see [`AttentionTask::accumulate`].
    pub(crate) last: Option<usize>,
    /// True until the first block is done, if nothing is accumulated before it. Row blocks are not cleared before if it writes
    /// their outputs whole.
    pub(crate) fresh: bool,
}

impl<S: Simd> AttentionTask<'_, S> {
    /// Computes the task's rows and writes them, in one pass after the other until what was accumulated is finite, or non-finite
    /// values were handled.
    pub(crate) fn run(&self, passes: &[NonFinite], scratch: &mut Scratch) {
        if self.set.rows.start == 0 {
            score_outputs::fill_rows_beyond(self);
        }
        if self.set.rows.is_empty() {
            return;
        }
        score_outputs::fill_unselected(self);
        let (regions, memory) = (&mut scratch.regions(self.tiling), &mut BlockMemory::new());
        let queries = Queries::of(self, regions);
        for &nonfinite in passes {
            let last = self.blocks().next_back();
            let pass = Pass { weights: Weights::Running, nonfinite, last, fresh: self.begin(regions) };
            let ended = self.accumulate(queries, pass, self.blocks(), memory, regions);
            if self.given.weight {
                regions.rescale_prev.fill(1.0);
                regions.rescale_block.fill(1.0);
                let pass = Pass { weights: Weights::Finished, nonfinite, last: None, fresh: false };
                self.accumulate(queries, pass, self.blocks(), memory, regions);
            }
            if self.finish(nonfinite, ended, regions) {
                break;
            }
        }
        score_outputs::finish_scores(self, regions);
    }

    /// Clears what the regions hold of other rows, or loads what was accumulated of these in earlier calls. Returns true if the
    /// first block is to write the outputs, which are not cleared then.
    fn begin(&self, regions: &mut Regions<'_>) -> bool {
        let (rows, width) = (0..self.set.rows.len(), self.tiling.width());
        let seen = self.outputs.state.as_ref().map_or(Seen::Nothing, |state| state.seen);
        let fresh = seen == Seen::Nothing && !self.given.weight;
        regions.clear_state(rows.len());
        // A state is loaded over them.
        if !fresh && (seen == Seen::Nothing || width > self.tiling.value_dim) {
            regions.clear_outputs(rows, width);
        }
        StateTransfer::Load.run(self, regions);
        fresh
    }

    /// Accumulates the given key blocks, some of [`Self::blocks`], in one pass, into what the regions hold of earlier ones. Row
    /// blocks that end with the pass's last block are written with it, where tiles can do that; returns which.
    pub(crate) fn accumulate(
        &self,
        queries: Queries<'_>,
        Pass { weights, nonfinite, last, mut fresh }: Pass,
        blocks: impl Iterator<Item = usize>,
        memory: &mut BlockMemory,
        regions: &mut Regions<'_>,
    ) -> EndedRowBlocks {
        let (mut ends, mut ended) = (None, EndedRowBlocks::NONE);
        let (mut exact_weights, scaling) = (Room::new(), self.scaling());
        for first in blocks {
            let mut block = KeyBlock::of(self, first, queries, memory, regions);
            block.scaling = scaling;
            for (number, row_block) in self.row_blocks().enumerate() {
                let visible = block.compute_scores(row_block.clone());
                let by_all = visible && !block.spans.iter().any(|span| span.is_empty());
                block.fresh = fresh && by_all;
                if fresh && !by_all {
                    block.regions.clear_outputs(row_block.clone(), self.tiling.width());
                }
                if !visible {
                    continue;
                }
                let visible_keys = match weights {
                    Weights::Running => block.softmax(nonfinite, row_block.clone()),
                    Weights::Finished => block.finished_weights(nonfinite, row_block.clone()),
                };
                if weights == Weights::Running && self.given.weight {
                    continue;
                }
                block.drop_weights(row_block.clone());
                let ending = S::ENDS_ROWS
                    && (nonfinite == NonFinite::Ignored && by_all && last == Some(first))
                    && self.products.values == Arithmetic::Floats
                    && block.values.are_floats()
                    && self.prepare_ends(row_block.clone(), ends.get_or_insert_with(RowBlockEnds::none), block.regions);
                let mode = match (nonfinite, &ends) {
                    (NonFinite::Handled, _) => PvMode::Handled(visible_keys.as_ref()),
                    (NonFinite::Ignored, Some(ends)) if ending => PvMode::Ending(ends),
                    (NonFinite::Ignored, _) => PvMode::Plain,
                };
                let exact = block.take_exact_weights(row_block.clone(), &mut exact_weights);
                // SAFETY: rows that end were prepared just now.
                by_arithmetic!(S: self.products.values, |A| unsafe { block.accumulate_pv::<A>(mode, row_block.clone()) });
                block.add_exact(exact, row_block);
                if let PvMode::Ending(ends) = mode {
                    debug_assert!(self.products.row_block() == MAX_ROW_BLOCK, "floats end rows");
                    ended.add(number, ends);
                }
            }
            fresh = false;
        }
        if fresh {
            regions.clear_outputs(0..self.set.rows.len(), self.tiling.width());
        }
        ended
    }

    /// Returns the step that multiplies scores by the scale: the softmax if it can, and no step before it reads or changes scores
    /// otherwise than by hiding keys.
    fn scaling(&self) -> Scaling {
        let (options, scale) = (&self.call.options, self.call.scale);
        // Keys of integers are multiplied by queries that have the scale already.
        let of_keys = by_arithmetic!(S: self.products.keys, |A| A::SCALES_IN_SOFTMAX);
        let by_softmax = of_keys && by_arithmetic!(S: self.products.weights, |A| A::SCALES_IN_SOFTMAX);
        let changed =
            options.softcap.is_some() || options.bias.is_some() || options.alibi.is_some() || self.given.score;
        let written = self.outputs.points.iter().any(Option::is_some);
        // A larger scale may make scores infinite, which hides keys.
        let scales = by_softmax && !changed && !written && scale > 0.0 && scale <= 1.0;
        if scales { Scaling::InSoftmax } else { Scaling::First }
    }

    /// Accumulates one of the task's key blocks: into what the regions hold of earlier ones, if it is `in_order`, where what is
    /// not finite stays so until the rows are finished; otherwise alone.
    pub(crate) fn accumulate_block(
        &self,
        first: usize,
        in_order: bool,
        memory: &mut BlockMemory,
        regions: &mut Regions<'_>,
    ) {
        let (queries, block) = (Queries::of(self, regions), core::iter::once(first));
        let running = |nonfinite, fresh| Pass { weights: Weights::Running, nonfinite, last: None, fresh };
        if in_order {
            self.accumulate(queries, running(NonFinite::Ignored, false), block, memory, regions);
            return;
        }
        // Once more, with non-finite values handled, if anything is not finite.
        for nonfinite in ASSUMED_FINITE {
            let pass = running(nonfinite, self.begin(regions));
            self.accumulate(queries, pass, block.clone(), memory, regions);
            if self.accumulated_is_finite(regions) {
                break;
            }
        }
    }
}

impl<S: Simd> KeyBlock<'_, '_, S> {
    /// Turns a row block's [scores](Self::compute_scores) into weights and merges them into the running maxima and sums.
    /// Returns the visible keys of each row as [`Self::visible_keys`] does.
    #[inline(always)]
    fn softmax(&mut self, nonfinite: NonFinite, row_block: Range<usize>) -> Option<VisibleBits> {
        self.write_scores(Point::Masked, row_block.clone());
        self.write_scores(Point::Weights, row_block.clone());
        let visible_keys = self.visible_keys(nonfinite, row_block.len());
        let Regions { scores, max, sum, rescale_prev, rescale_block, .. } = &mut *self.regions;
        let (max, sum) = (&mut max[row_block.start..], &mut sum[row_block.start..]);
        let state = SoftmaxState { max, sum, rescale_prev, rescale_block };
        let block = ScoreBlock { scores, spans: self.spans, rows: row_block.len() };
        let [_, factor] = self.scaling.factors(self.task.call.scale);
        by_arithmetic!(S: self.task.products.weights, |A| A::softmax(self.task.s, block, factor, state));
        visible_keys
    }

    /// Turns a row block's [scores](Self::compute_scores) into finished weights, and applies the weight function. Returns the
    /// visible keys of each row as [`Self::visible_keys`] does.
    fn finished_weights(&mut self, nonfinite: NonFinite, row_block: Range<usize>) -> Option<VisibleBits> {
        let visible_keys = self.visible_keys(nonfinite, row_block.len());
        let (task, rows, spans) = (self.task, row_block.len(), &*self.spans);
        let Regions { scores, max, sum, .. } = &mut *self.regions;
        let visible = VisibleBits::new(spans, rows, scores);
        let ends = task.references(row_block.clone(), max, sum);
        score_passes::weights(task.s, ScoreBlock { scores, spans, rows }, &ends);
        for row in task.rows(row_block) {
            let keys = spans.of_row(row.n).keys();
            let run = self.numbers.run(task, row, keys.start);
            let weights = &mut scores[row.n * SCORE_STRIDE..][keys.clone()];
            task.mods.apply_weight(run, weights, keys, visible.of_row(row.n));
        }
        visible_keys
    }
}
