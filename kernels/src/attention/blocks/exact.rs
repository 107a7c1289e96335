//! Exact first tokens of a sequence in a key block: scores and outputs take them in place of their integers.

use crate::attention::blocks::key_block::KeyBlock;
use crate::attention::scratch::SCORE_STRIDE;
use crate::attention::steps::exact_rows::ExactWeights;
use crate::kv::cache::MAX_EXACT;
use crate::simd::Simd;
use crate::tensor::rows::Room;
use core::ops::Range;

impl<S: Simd> KeyBlock<'_, '_, S> {
    /// Overwrites the scores of exact keys that a row block has computed of their integers.
    #[inline(always)]
    pub(crate) fn exact_scores(&mut self, row_block: Range<usize>) {
        let Some(exact) = self.exact.as_ref().filter(|exact| exact.has_keys()) else { return };
        let task = self.task;
        let [scale, _] = self.scaling.factors(task.call.scale);
        for row in task.rows(row_block) {
            let scores = &mut self.regions.scores[row.n * SCORE_STRIDE..][..exact.len()];
            // SAFETY: the task's rows are inside the call's queries, which have `head_dim` elements.
            unsafe {
                let query = task.call.q.rows(row.q_batch, row.head, row.at);
                exact.scores(task.s, query, task.tiling.head_dim, scale, scores);
            }
        }
    }

    /// Takes the weights of exact values from those of a row block, to `room`: these become 0, so that the integers add nothing. Rows
    /// that do not compute the keys have weights of 0.
    #[inline(always)]
    pub(crate) fn take_exact_weights<'w>(
        &mut self,
        row_block: Range<usize>,
        room: &'w mut Room<ExactWeights>,
    ) -> &'w [ExactWeights] {
        let Some(exact) = self.exact.as_ref().filter(|exact| exact.has_values()) else { return &[] };
        let (spans, scores) = (&*self.spans, &mut *self.regions.scores);
        room.fill((0..row_block.len()).map(|n| {
            let (mut weights, keys) = ([0.0; MAX_EXACT], spans.of_row(n).keys());
            let keys = keys.start.min(exact.len())..keys.end.min(exact.len());
            let of_row = &mut scores[n * SCORE_STRIDE..][keys.clone()];
            weights[keys].copy_from_slice(of_row);
            of_row.fill(0.0);
            weights
        }))
    }

    /// Adds exact values, with the weights that [`Self::take_exact_weights`] took, to what a row block has accumulated of this block.
    #[inline(always)]
    pub(crate) fn add_exact(&mut self, weights: &[ExactWeights], row_block: Range<usize>) {
        let Some(exact) = self.exact.as_ref().filter(|_| !weights.is_empty()) else { return };
        let width = self.task.tiling.width();
        let rows = &mut self.regions.out[row_block.start * width..row_block.end * width];
        for ((row, weights), &factor) in rows.chunks_exact_mut(width).zip(weights).zip(&*self.regions.rescale_block) {
            exact.add_values(self.task.s, weights, factor, row);
        }
    }
}
