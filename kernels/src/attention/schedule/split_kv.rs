//! Split-KV, for few rows and many keys: key blocks are shared out over workers, then what each has accumulated is merged in
//! order. (Flash-Decoding: Dao, Haziza, Massa and Sizov 2023.)
//!
//! A unit is one key block of one key/value head, with all the rows that share the head; where several sequences have
//! the block in common, with those of all of them (`key_blocks.rs`). Its maxima, sums and unnormalised outputs are
//! written where the merge reads them: into a separate part, or, where values lie in panels and one run has all units of a
//! sequence and of those it shares blocks with, into one part for each head, which its blocks are accumulated into in the
//! order of their keys, as in the fused loop. Units are taken in the order in which their memory lies, in runs, so that the
//! hardware prefetcher predicts the next reads, also from one unit to the next. The merge takes a head's parts in the order
//! of their keys, on whichever workers they were computed: the result is bit for bit that of one pass. It begins when all
//! units are accumulated, on the workers that are awake by then: waking the others a second time took longer than merging.

use crate::attention::blocks::task::{AttentionTask, BoundCall, Next};
use crate::attention::forward::epilogue::EndedRowBlocks;
use crate::attention::schedule::partials::Parts;
use crate::attention::schedule::units::{Merge, Unit};
use crate::attention::scratch::{Regions, Scratch};
use crate::attention::steps::softmax_merge::{self, SoftmaxState};
use crate::matmul::pack::NonFinite;
use crate::simd::{LANES, Simd};
use crate::tensor::rows::KEY_BLOCK;
use crate::work_queue::Stop;

impl<S: Simd> AttentionTask<'_, S> {
    /// Merges the parts of the task's rows in the order of their keys, and writes the rows.
    ///
    /// # Safety
    /// The parts were made for this call, the task is one of their merges, at this entry, all units are accumulated, and no
    /// other worker does this merge.
    unsafe fn merge_parts(&self, parts: &Parts<'_>, entry: usize, scratch: &mut Scratch) {
        let mut regions = scratch.regions(self.tiling);
        if !parts.units.entry(entry).in_order {
            // SAFETY: same contract.
            return unsafe { self.merge_units(parts, entry, &mut regions) };
        }
        let unit = Unit { entry, head: self.set.kv_head, block: 0 };
        // SAFETY: the part is accumulated, and only this worker finishes these rows of it.
        let [max, sum, out] = unsafe { parts.part(unit, self.set.rows.clone()) };
        let merged = &mut Regions { max, sum, out, ..regions };
        if !self.finish(NonFinite::Ignored, EndedRowBlocks::NONE, merged) {
            // From the first block on, with non-finite values handled.
            self.run(&[NonFinite::Handled], scratch);
        }
    }

    /// Merges the units of the task's rows (each unit has a part), and writes the rows.
    ///
    /// # Safety
    /// As [`Self::merge_parts`].
    unsafe fn merge_units(&self, parts: &Parts<'_>, entry: usize, regions: &mut Regions<'_>) {
        regions.clear_state(self.set.rows.len());
        regions.clear_outputs(0..self.set.rows.len(), self.tiling.width());
        let padded = self.set.rows.len().next_multiple_of(LANES);
        let units = || {
            let blocks = self.blocks().map(|first| self.blocks.place(first / KEY_BLOCK));
            blocks.map(|block| Unit { entry, head: self.set.kv_head, block })
        };
        for unit in units() {
            // SAFETY: the unit is accumulated, and only this worker merges these rows of it.
            let [max, sum, out] = unsafe { parts.part(unit, self.set.rows.clone()) };
            let state = SoftmaxState {
                max: &mut regions.max[..padded],
                sum: &mut regions.sum[..padded],
                rescale_prev: &mut *max,
                rescale_block: &mut *sum,
            };
            softmax_merge::merge_state(self.s, state);
            let merged = &mut regions.out[..out.len()];
            softmax_merge::merge_outputs(self.s, [max, sum], merged, out, parts.width, NonFinite::Ignored);
        }
        if self.finish(NonFinite::Ignored, EndedRowBlocks::NONE, regions) {
            return;
        }
        // Merge again with non-finite values handled: marks stay marks. The factors are those of the first merge.
        regions.clear_outputs(0..self.set.rows.len(), self.tiling.width());
        for unit in units() {
            // SAFETY: the unit is accumulated, and only this worker merges these rows of it.
            let [rescale_prev, factor, out] = unsafe { parts.part(unit, self.set.rows.clone()) };
            let merged = &mut regions.out[..out.len()];
            softmax_merge::merge_outputs(self.s, [rescale_prev, factor], merged, out, parts.width, NonFinite::Handled);
        }
        self.finish(NonFinite::Handled, EndedRowBlocks::NONE, regions);
    }
}

/// Takes merges until none is left, unless other workers are still accumulating.
///
/// # Safety
/// The parts were made for this call.
pub(crate) unsafe fn merge<S: Simd>(
    parts: &Parts<'_>,
    bound: BoundCall<'_, S>,
    stop: &Stop<'_>,
    scratch: &mut Scratch,
) {
    if stop.is_stopped() || !parts.is_accumulated(stop) {
        return;
    }
    while let Some(number) = parts.merges.take_unless(stop) {
        let Some(Merge { entry, rows }) = parts.units.merge(number) else { continue };
        // SAFETY: each merge is taken once, so its rows, of the outputs and of its units' parts, are this worker's.
        unsafe { AttentionTask::new(bound, rows, Next::Nothing).merge_parts(parts, entry, scratch) }
    }
}
