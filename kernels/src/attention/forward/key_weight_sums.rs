//! Key weight sums: how much weight each key has drawn, over all rows and heads that share it.

use crate::attention::call::Task;
use crate::attention::forward::key_block::tables;
use crate::attention::forward::scores::Spans;
use crate::attention::forward::task::AttentionTask;
use crate::attention::mods::{MaskMod, Mods, ProbMod, ScoreMod};
use crate::attention::steps::by_isa::Steps;
use crate::attention::steps::score_passes::ScoreBlock;
use crate::attention::steps::softmax;
use crate::attention::tiling::Regions;
use crate::simd::quiet;
use crate::tensor::rows::KEY_BLOCK;
use crate::tensor::view::SharedMut;

impl<S: Steps, A: ScoreMod, B: MaskMod, C: ProbMod> AttentionTask<'_, '_, S, Mods<A, B, C>> {
    /// The sum of each key's weights over all the rows of the task, in row order.
    ///
    /// A second and a third QKᵀ, row block by row block: one for the rows' maxima and sums, one for their finished weights. That
    /// takes no memory, and adds the same numbers in the same order whoever does it.
    ///
    /// # Safety
    /// As for [`Self::run`], with all keys of the sequence and head in place of the rows; `outputs` asks for no scores.
    pub(crate) unsafe fn key_weight_sums(&self, mass: &SharedMut<'_, f32>, mut regions: Regions<'_>) {
        // SAFETY: key `j` of the sequence is inside the output, and this task's alone.
        let at = |j: usize| unsafe { mass.row(self.seq.batch, self.task.kv_head, self.seq.first_key + j).0 };
        // All keys there is memory for: those beyond the sequence's length have no mass.
        for j in 0..self.call.keys_of(self.task.index).len() {
            // SAFETY: as above.
            unsafe { *at(j) = 0.0 };
        }
        if self.task.rows.is_empty() {
            return;
        }
        for row_block in self.row_blocks() {
            // A task of its own: scratch for copied queries and states holds one task's rows, not the whole head's.
            let task = Task { rows: row_block.clone(), ..self.task.clone() };
            let part = Self::new(self.s, self.mods, self.call, self.outputs, task, self.tiling);
            let (row_block, rows) = (0..row_block.len(), row_block.len());
            regions.max.fill(f32::NEG_INFINITY);
            regions.sum.fill(0.0);
            // SAFETY: passed on; the row block lies inside the task.
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
