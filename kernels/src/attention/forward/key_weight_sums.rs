//! Key weight sums: the sum of the weights that all rows and heads give to each key.

use crate::attention::call::Task;
use crate::attention::forward::key_block::tables;
use crate::attention::forward::scores::Spans;
use crate::attention::forward::task::AttentionTask;
use crate::attention::steps::by_isa::Steps;
use crate::attention::steps::score_passes::ScoreBlock;
use crate::attention::steps::softmax;
use crate::attention::tiling::Regions;
use crate::simd::quiet;
use crate::tensor::rows::KEY_BLOCK;
use crate::tensor::view::SharedMut;

impl<S: Steps> AttentionTask<'_, '_, S> {
    /// Sums each key's weights over all the rows of the task, in row order.
    ///
    /// Computes a second and a third QKᵀ, row block by row block: one for the rows' maxima and sums, one for their
    /// finished weights. That takes no memory, and adds the same numbers in the same order on any worker.
    ///
    /// # Safety
    /// Same contract as [`Self::run`], with all keys of the sequence and head in place of the rows; `outputs` has no
    /// score outputs.
    pub(crate) unsafe fn key_weight_sums(&self, output: &SharedMut<'_, f32>, mut regions: Regions<'_>) {
        // SAFETY: key `j` of the sequence is inside the output, and this task's alone.
        let at = |j: usize| unsafe { output.row(self.seq.batch, self.task.kv_head, self.seq.first_key + j).0 };
        // All keys there is memory for: the sums of keys beyond the sequence's length are 0.
        for j in 0..self.call.keys_of(self.task.index).len() {
            // SAFETY: key `j` is inside the output, and this task's alone.
            unsafe { *at(j) = 0.0 };
        }
        if self.task.rows.is_empty() {
            return;
        }
        for row_block in self.row_blocks() {
            // Each row block is a task of its own: scratch for copied queries and states holds one task's rows, not the
            // whole head's.
            let task = Task { rows: row_block.clone(), ..self.task.clone() };
            let part = Self::new(self.s, self.mods, self.call, self.outputs, task, self.tiling);
            let (row_block, rows) = (0..row_block.len(), row_block.len());
            regions.max.fill(f32::NEG_INFINITY);
            regions.sum.fill(0.0);
            // SAFETY: the caller guarantees the contract of `run`; the row block lies inside the task.
            unsafe {
                let queries = part.queries(&mut regions);
                let (mut spans, mut tables) = (Spans::NONE, tables());
                for first in part.blocks() {
                    let mut block = part.block(first, &mut tables);
                    if !part.compute_scores(&mut block, queries, row_block.clone(), &mut spans, &mut regions) {
                        continue;
                    }
                    let Regions { scores, max, sum, rescale_prev, rescale_block, .. } = &mut regions;
                    self.s.softmax(scores, &spans, rows, softmax::Rows { max, sum, rescale_prev, rescale_block });
                }
                let references = part.references(row_block.clone(), regions.max, regions.sum);
                for first in part.blocks() {
                    let mut block = part.block(first, &mut tables);
                    if !part.compute_scores(&mut block, queries, row_block.clone(), &mut spans, &mut regions) {
                        continue;
                    }
                    self.s.weights(ScoreBlock { scores: regions.scores, spans: &spans, rows }, &references);
                    let mut sums = [0.0f32; KEY_BLOCK];
                    for (j, sum) in sums[..block.len].iter_mut().enumerate() {
                        *sum = *at(first + j);
                    }
                    self.s.add_weight_sums(ScoreBlock { scores: regions.scores, spans: &spans, rows }, &mut sums);
                    for (j, sum) in sums[..block.len].iter().enumerate() {
                        *at(first + j) = quiet(*sum);
                    }
                }
            }
        }
    }
}
