//! Key weight sums: the sum of the weights that all rows and heads give to each key.

use crate::attention::blocks::key_block::{BlockMemory, KeyBlock};
use crate::attention::blocks::queries::Queries;
use crate::attention::blocks::task::{AttentionTask, BoundCall, Next};
use crate::attention::call::RowSet;
use crate::attention::scratch::{Regions, Scratch};
use crate::attention::steps::score_passes::{self, ScoreBlock};
use crate::attention::steps::softmax;
use crate::attention::steps::softmax_merge::SoftmaxState;
use crate::matmul::operands::Floats;
use crate::simd::{Simd, quiet};
use crate::tensor::rows::KEY_BLOCK;
use crate::tensor::view_mut::ViewMut;

/// Sums of the keys of one sequence and head, in the caller's memory.
struct Sums<'t> {
    output: &'t ViewMut<'t>,
    /// Batch index, head, first key.
    first: [usize; 3],
    /// Number of keys.
    len: usize,
}

impl Sums<'_> {
    /// Returns the address of a key's sum.
    fn at(&self, key: usize) -> *mut f32 {
        assert!(key < self.len, "a key outside the sequence");
        let [b, h, first] = self.first;
        // SAFETY: the sequence's keys are inside the output; its rows are one element. An address alone: nothing is
        // accessed.
        unsafe { self.output.row(b, h, first + key).0 }
    }

    /// Adds the weights that a task's rows, one row block, give to each key.
    ///
    /// # Safety
    /// The sums are this worker's alone.
    unsafe fn add<S: Simd>(&self, task: &AttentionTask<'_, S>, regions: &mut Regions<'_>) {
        let (s, all, rows) = (task.s, 0..task.set.rows.len(), task.set.rows.len());
        let mut memory = BlockMemory::new();
        let queries = task.sum_exponentials(&mut memory, regions);
        let references = task.references(all.clone(), regions.max, regions.sum);
        for first in task.blocks() {
            let mut block = KeyBlock::of(task, first, queries, &mut memory, regions);
            if !block.compute_scores(all.clone()) {
                continue;
            }
            score_passes::weights(s, block.scores(rows), &references);
            let mut totals = [0.0f32; KEY_BLOCK];
            let numbers = block.numbers;
            for (j, total) in totals[..block.len].iter_mut().enumerate() {
                // SAFETY: the caller guarantees that the sums are this worker's alone.
                *total = unsafe { *self.at(numbers.number(j)) };
            }
            score_passes::add_weight_sums(s, block.scores(rows), &mut totals);
            for (j, &total) in totals[..block.len].iter().enumerate() {
                // SAFETY: the caller guarantees that the sums are this worker's alone.
                unsafe { *self.at(numbers.number(j)) = quiet(total) };
            }
        }
    }
}

impl<S: Simd> AttentionTask<'_, S> {
    /// Computes the maxima and sums of the task's rows, one row block, over all keys, without outputs. Returns the queries, for
    /// another pass.
    pub(crate) fn sum_exponentials<'r>(&self, memory: &mut BlockMemory, regions: &mut Regions<'r>) -> Queries<'r> {
        let rows = self.set.rows.len();
        regions.clear_state(rows);
        let queries = Queries::of(self, regions);
        for first in self.blocks() {
            let mut block = KeyBlock::of(self, first, queries, memory, regions);
            if block.compute_scores(0..rows) {
                let Regions { scores, max, sum, rescale_prev, rescale_block, .. } = &mut *block.regions;
                let row_block = ScoreBlock { scores, spans: block.spans, rows };
                softmax::softmax::<_, Floats>(
                    self.s,
                    row_block,
                    1.0,
                    SoftmaxState { max, sum, rescale_prev, rescale_block },
                );
            }
        }
        queries
    }
}

/// Sums the weights of each key of a sequence and key/value head over all the rows that share the head, in row order.
///
/// Computes a second and a third QKᵀ, row block by row block: one for the rows' maxima and sums, one for their finished
/// weights. That takes no memory, and adds the same numbers in the same order on any worker.
///
/// # Safety
/// No other worker reads or writes the sums of this sequence and head meanwhile.
pub(crate) unsafe fn key_weight_sums<S: Simd>(
    bound: BoundCall<'_, S>,
    [sequence, kv_head]: [usize; 2],
    scratch: &mut Scratch,
) {
    let call = bound.checked.call();
    let Some(output) = &bound.checked.outputs().key_weight_sums else { return };
    // All keys there is memory for: the sums of keys beyond the sequence's length are 0.
    let (batch, keys) = call.key_weight_sums_of(sequence, output.shape()[2]);
    let sums = Sums { output, first: [batch, kv_head, keys.start], len: keys.len() };
    for j in 0..keys.len() {
        // SAFETY: the caller guarantees that the sums are this worker's alone.
        unsafe { *sums.at(j) = 0.0 };
    }
    let (order, step) = (call.row_order(call.sequence(sequence).q_len), bound.tiling.row_block_rows());
    let lists = (0..order.lists()).map(|list| order.rows_of_list(list));
    for (first, end) in lists.flat_map(|rows| rows.clone().step_by(step).map(move |first| (first, rows.end))) {
        // Each row block is a separate task: scratch for copied queries and states holds one task's rows, not the
        // whole head's.
        let set = RowSet::of(sequence, kv_head, first..end.min(first + step));
        let task = AttentionTask::reading(bound, set, Next::Nothing);
        // SAFETY: the caller guarantees that the sums are this worker's alone.
        unsafe { sums.add(&task, &mut scratch.regions(task.tiling)) }
    }
}
