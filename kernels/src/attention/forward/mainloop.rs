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

use crate::attention::forward::epilogue::EndedRowBlocks;
use crate::attention::forward::key_block::{Block, tables};
use crate::attention::forward::nonfinite::VisibleBits;
use crate::attention::forward::pv::Manner;
use crate::attention::forward::queries::Queries;
use crate::attention::forward::scores::Spans;
use crate::attention::forward::state::StateTransfer;
use crate::attention::forward::task::AttentionTask;
use crate::attention::outputs::Point;
use crate::attention::steps::by_isa::Steps;
use crate::attention::steps::epilogue::RowBlockEnds;
use crate::attention::steps::score_passes::ScoreBlock;
use crate::attention::steps::softmax;
use crate::attention::steps::span::{SCORE_STRIDE, Span};
use crate::attention::tiling::Regions;
use crate::matmul::pack::NonFinite;
use core::ops::Range;

impl<S: Steps> AttentionTask<'_, '_, S> {
    /// Computes the task's rows and writes them.
    ///
    /// # Safety
    /// The call is consistent with its outputs, the task lies inside it, `regions` were made for the tiling, and no
    /// other worker writes the task's rows.
    pub(crate) unsafe fn run(&self, mut regions: Regions<'_>) {
        if self.task.rows.start == 0 {
            // SAFETY: the caller guarantees this function's contract; every sequence and head has one task that starts
            // at row 0.
            unsafe { self.fill_rows_beyond() };
        }
        if self.task.rows.is_empty() {
            return;
        }
        // SAFETY: the caller guarantees this function's contract, which these steps share.
        unsafe {
            let queries = self.queries(&mut regions);
            // Hidden values have weight 0, and 0 times a finite number adds nothing. Assume that all values are finite;
            // if a hidden or visible one is not, the result shows it, and the task is done again with
            // `NonFinite::Handled`.
            for nonfinite in [NonFinite::Ignored, NonFinite::Handled] {
                let ended = self.accumulate(queries, nonfinite, self.blocks().next_back(), self.blocks(), &mut regions);
                if self.given.prob {
                    self.accumulate_modified(queries, nonfinite, &mut regions);
                }
                if self.finish(nonfinite, ended, &mut regions) {
                    break;
                }
            }
            self.finish_scores(&mut regions);
        }
    }

    /// Accumulates the given key blocks, in one pass. Row blocks that end with block `last` are written with it, where
    /// tiles can do that; returns which.
    ///
    /// # Safety
    /// Same contract as [`Self::run`]; the blocks are some of [`Self::blocks`].
    pub(crate) unsafe fn accumulate(
        &self,
        queries: Queries<'_>,
        nonfinite: NonFinite,
        last: Option<usize>,
        blocks: impl Iterator<Item = usize>,
        regions: &mut Regions<'_>,
    ) -> EndedRowBlocks {
        // True until the first block is done. Row blocks whose outputs it writes whole are not cleared before.
        let mut fresh = self.outputs.state.is_none() && !self.given.prob;
        self.clear_state(regions);
        if !fresh {
            self.clear_outputs(0..self.task.rows.len(), regions);
        }
        // SAFETY: the caller guarantees the contract of `run`.
        unsafe { self.transfer_state(regions, StateTransfer::Load) };
        let (mut ends, mut ended) = (RowBlockEnds::none(), EndedRowBlocks::NONE);
        let (mut spans, mut tables) = (Spans::NONE, tables());
        for first in blocks {
            // SAFETY: the caller guarantees the contract of `run` and that `first` is one of the task's blocks; the
            // tables outlive the block, and row blocks lie inside the task.
            unsafe {
                let mut block = self.block(first, &mut tables);
                for (number, row_block) in self.row_blocks().enumerate() {
                    let visible = self.compute_scores(&mut block, queries, row_block.clone(), &mut spans, regions);
                    let by_all = visible && !spans.iter().any(|span| span.is_empty());
                    block.fresh = fresh && by_all;
                    if fresh && !by_all {
                        self.clear_outputs(row_block.clone(), regions);
                    }
                    if !visible {
                        continue;
                    }
                    let visible_keys = self.softmax(&block, nonfinite, row_block.clone(), &spans, regions);
                    // With a weight function the outputs are accumulated in the second pass.
                    if self.given.prob {
                        continue;
                    }
                    let ending = S::ENDS_ROWS
                        && (nonfinite == NonFinite::Ignored && by_all && last == Some(first))
                        && block.values.are_floats()
                        && self.prepare_ends(row_block.clone(), &mut ends, regions);
                    let manner = match nonfinite {
                        NonFinite::Handled => Manner::Handled(visible_keys.as_ref()),
                        NonFinite::Ignored if ending => Manner::Ending(&ends),
                        NonFinite::Ignored => Manner::Plain,
                    };
                    self.accumulate_pv(&mut block, manner, row_block, &spans, regions);
                    if let Manner::Ending(ends) = manner {
                        ended.add(number, ends);
                    }
                }
            }
            fresh = false;
        }
        if fresh {
            self.clear_outputs(0..self.task.rows.len(), regions);
        }
        ended
    }

    /// Turns a row block's scores into weights and merges them into the running maxima and sums. Returns the visible
    /// keys of each row as [`Self::visible_keys`] does.
    ///
    /// # Safety
    /// Same contract as [`Self::run`]; the scores have been [computed](Self::compute_scores).
    #[inline(always)]
    unsafe fn softmax(
        &self,
        block: &Block,
        nonfinite: NonFinite,
        row_block: Range<usize>,
        spans: &[Span],
        regions: &mut Regions<'_>,
    ) -> Option<VisibleBits> {
        // SAFETY: the caller guarantees the contract of `run`; the row block lies inside the task.
        unsafe {
            self.write_scores(Point::Masked, block, row_block.clone(), regions.scores);
            self.write_scores(Point::Weights, block, row_block.clone(), regions.scores);
            let visible_keys = self.visible_keys(block, nonfinite, row_block.len(), spans, regions.scores);
            let state = softmax::Rows {
                max: &mut regions.max[row_block.start..],
                sum: &mut regions.sum[row_block.start..],
                rescale_prev: regions.rescale_prev,
                rescale_block: regions.rescale_block,
            };
            self.s.softmax(regions.scores, spans, row_block.len(), state);
            visible_keys
        }
    }

    /// Accumulates the outputs in a second pass, for a weight function: weights are final before P·V, so nothing is
    /// rescaled.
    ///
    /// # Safety
    /// Same contract as [`Self::run`]; the first pass is complete.
    unsafe fn accumulate_modified(&self, queries: Queries<'_>, nonfinite: NonFinite, regions: &mut Regions<'_>) {
        regions.rescale_prev.fill(1.0);
        regions.rescale_block.fill(1.0);
        let (mut spans, mut tables) = (Spans::NONE, tables());
        for first in self.blocks() {
            // SAFETY: the caller guarantees the contract of `run`; `first` is one of the task's blocks, the tables
            // outlive the block, and row blocks lie inside the task.
            unsafe {
                let mut block = self.block(first, &mut tables);
                for row_block in self.row_blocks() {
                    if !self.compute_scores(&mut block, queries, row_block.clone(), &mut spans, regions) {
                        continue;
                    }
                    let visible = VisibleBits::new(S::TILE_ROWS, &spans, row_block.len(), regions.scores);
                    let visible_keys = self.visible_keys(&block, nonfinite, row_block.len(), &spans, regions.scores);
                    let (scores, rows) = (&mut *regions.scores, row_block.len());
                    let ends = self.references(row_block.clone(), regions.max, regions.sum);
                    self.s.weights(ScoreBlock { scores, spans: &spans, rows }, &ends);
                    for row in self.rows(row_block.clone()) {
                        let keys = spans[row.n / S::TILE_ROWS].keys();
                        let first = self.position(row, block.first + keys.start);
                        let weights = &mut regions.scores[row.n * SCORE_STRIDE..][keys.clone()];
                        self.mods.apply_prob(first, weights, keys, visible.of_row(row.n));
                    }
                    let manner = match nonfinite {
                        NonFinite::Handled => Manner::Handled(visible_keys.as_ref()),
                        NonFinite::Ignored => Manner::Plain,
                    };
                    self.accumulate_pv(&mut block, manner, row_block, &spans, regions);
                }
            }
        }
    }
}
