//! The fused loop: one pass over the keys, one block at a time, for the rows of one task.
//!
//! ```text
//! (max, sum, out) ← (−∞, 0, 0) for every row
//! for each block of 256 keys:
//!     for each group of up to 96 rows:
//!         S ← the group's final scores                 prepare.rs: QKᵀ, options, −∞ where hidden
//!         P ← exp(S − rowmax S)                        softmax; also takes (rowmax S, Σ P) into (max, sum)
//!         out ← keep · out + join · P V                values
//! out ← out / sum;  lse ← max + ln sum                 finish, or values with the last block
//! ```
//! (Dao, Fu, Ermon, Rudra and Ré 2022, arXiv:2205.14135.) Nothing grows with the number of keys.

use crate::attention::forward::epilogue::EndedGroups;
use crate::attention::forward::key_block::{Block, tables};
use crate::attention::forward::nonfinite::Seen;
use crate::attention::forward::pv::Manner;
use crate::attention::forward::queries::Queries;
use crate::attention::forward::scores::Spans;
use crate::attention::forward::state::Exchange;
use crate::attention::forward::task::Fused;
use crate::attention::mods::{MaskMod, Mods, ProbMod, ScoreMod};
use crate::attention::outputs::Point;
use crate::attention::steps::by_isa::Steps;
use crate::attention::steps::epilogue::GroupEnds;
use crate::attention::steps::score_passes::Group;
use crate::attention::steps::softmax;
use crate::attention::steps::span::{SCORE_STRIDE, Span};
use crate::attention::tiling::Regions;
use crate::matmul::pack::Care;
use core::ops::Range;

impl<S: Steps, A: ScoreMod, B: MaskMod, C: ProbMod> Fused<'_, '_, S, Mods<A, B, C>> {
    /// Computes the task's rows and writes them.
    ///
    /// # Safety
    /// The call is consistent with its outputs, the task lies inside it, `regions` were cut for the geometry, and nobody
    /// else writes the task's rows.
    pub(crate) unsafe fn run(&self, mut regions: Regions<'_>) {
        if self.task.rows.start == 0 {
            // SAFETY: passed on; every sequence and head has one task that starts at row 0.
            unsafe { self.fill_rows_beyond() };
        }
        if self.task.rows.is_empty() {
            return;
        }
        // SAFETY: passed on.
        unsafe {
            let queries = self.queries(&mut regions);
            // Hidden values have weight 0, and 0 times a finite number is nothing. Assume they are finite; if they
            // were not, or something visible was not, it shows in the result, and everything is done again with care.
            for care in [Care::Fast, Care::Careful] {
                let ended = self.gather(queries, (care, self.blocks().next_back()), self.blocks(), &mut regions);
                if C::ACTIVE {
                    self.gather_modified(queries, care, &mut regions);
                }
                if self.finish(care, ended, &mut regions) {
                    break;
                }
            }
            self.finish_scores(&mut regions);
        }
    }

    /// The one pass over the keys, or over some of their blocks. Rows for which nothing comes after block `last` are written
    /// with it, where tiles can do that: says which.
    ///
    /// # Safety
    /// As for [`Self::run`]; the blocks are some of [`Self::blocks`].
    pub(crate) unsafe fn gather(
        &self,
        queries: Queries<'_>,
        (care, last): (Care, Option<usize>),
        blocks: impl Iterator<Item = usize>,
        regions: &mut Regions<'_>,
    ) -> EndedGroups {
        // Whether no block has come yet. Groups whose outputs the first one writes whole do not clear them before.
        let mut fresh = self.outputs.state.is_none() && !C::ACTIVE;
        self.clear_state(regions);
        if !fresh {
            self.clear_outputs(0..self.task.rows.len(), regions);
        }
        // SAFETY: passed on.
        unsafe { self.exchange(regions, Exchange::Load) };
        let (mut ends, mut ended) = (GroupEnds::none(), EndedGroups::NONE);
        let (mut spans, mut tables) = (Spans::NONE, tables());
        for first in blocks {
            // SAFETY: passed on.
            unsafe {
                let mut block = self.block(first, &mut tables);
                for (number, group) in self.groups().enumerate() {
                    let visible = self.prepare(&mut block, queries, group.clone(), &mut spans, regions);
                    let by_all = visible && !spans.iter().any(|span| span.is_empty());
                    block.fresh = fresh && by_all;
                    if fresh && !by_all {
                        self.clear_outputs(group.clone(), regions);
                    }
                    if !visible {
                        continue;
                    }
                    let seen = self.softmax(&block, (group.clone(), care), &spans, regions);
                    // With a weight function the outputs are gathered in the second pass.
                    if C::ACTIVE {
                        continue;
                    }
                    let ending = S::ENDS_ROWS
                        && (care == Care::Fast && by_all && last == Some(first))
                        && block.values.are_floats()
                        && self.end_group(group.clone(), &mut ends, regions);
                    let manner = match care {
                        Care::Careful => Manner::Careful(seen.as_ref()),
                        Care::Fast if ending => Manner::Ending(&ends),
                        Care::Fast => Manner::Plain,
                    };
                    self.add_values(&mut block, manner, group, &spans, regions);
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

    /// Turns a group's scores into weights, taken into the running maxima and sums. Notes who sees what, as [`Self::seen`] does.
    ///
    /// # Safety
    /// As for [`Self::run`]; the scores are [prepared](Self::prepare).
    #[inline(always)]
    unsafe fn softmax(
        &self,
        block: &Block,
        (group, care): (Range<usize>, Care),
        spans: &[Span],
        regions: &mut Regions<'_>,
    ) -> Option<Seen> {
        // SAFETY: passed on.
        unsafe {
            self.emit(Point::Masked, block, group.clone(), regions.scores);
            self.emit(Point::Weights, block, group.clone(), regions.scores);
            let seen = self.seen(block, care, group.len(), spans, regions.scores);
            let state = softmax::Rows {
                max: &mut regions.max[group.start..],
                sum: &mut regions.sum[group.start..],
                keep: regions.keep,
                join: regions.join,
            };
            self.s.softmax(regions.scores, spans, group.len(), state);
            seen
        }
    }

    /// The second pass, for a weight function: weights are finished one by one, so there is nothing to fold.
    ///
    /// # Safety
    /// As for [`Self::run`]; the first pass has been made.
    unsafe fn gather_modified(&self, queries: Queries<'_>, care: Care, regions: &mut Regions<'_>) {
        regions.keep.fill(1.0);
        regions.join.fill(1.0);
        let (mut spans, mut tables) = (Spans::NONE, tables());
        for first in self.blocks() {
            // SAFETY: passed on.
            unsafe {
                let mut block = self.block(first, &mut tables);
                for group in self.groups() {
                    if !self.prepare(&mut block, queries, group.clone(), &mut spans, regions) {
                        continue;
                    }
                    let visible = Seen::new(S::TILE_ROWS, &spans, group.len(), regions.scores);
                    let poisoned = self.seen(&block, care, group.len(), &spans, regions.scores);
                    let (scores, rows) = (&mut *regions.scores, group.len());
                    let ends = self.references(group.clone(), regions.max, regions.sum);
                    self.s.weights(Group { scores, spans: &spans, rows }, &ends);
                    for row in self.rows(group.clone()) {
                        for j in spans[row.n / S::TILE_ROWS].keys().filter(|&j| visible.sees(row.n, j)) {
                            let weight = &mut regions.scores[row.n * SCORE_STRIDE + j];
                            *weight = self.mods.prob.weight(*weight, self.position(row, block.first + j));
                        }
                    }
                    let manner = match care {
                        Care::Careful => Manner::Careful(poisoned.as_ref()),
                        Care::Fast => Manner::Plain,
                    };
                    self.add_values(&mut block, manner, group, &spans, regions);
                }
            }
        }
    }
}
