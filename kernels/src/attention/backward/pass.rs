//! What the workers of a backward pass share: the call, what was saved of it, its gradients, and how far each key block is.

use crate::attention::backward::call::{Reduced, Saved, SharedGradients};
use crate::attention::backward::memory::RowMemory;
use crate::attention::backward::parts::SharedPart;
use crate::attention::call::checked::CheckedCall;
use crate::attention::scratch::MAX_ROW_BLOCK;
use crate::tensor::rows::KEY_BLOCK;
use crate::work_queue::{Progress, Stop};
use std::sync::Mutex;

/// Call of the backward pass, and what its workers share.
pub(crate) struct BackwardPass<'a> {
    pub(crate) checked: CheckedCall<'a>,
    pub(crate) saved: Saved<'a>,
    pub(crate) gradients: SharedGradients<'a>,
    pub(crate) reduced: Reduced<'a>,
    /// Gradients in parameters, summed over each key/value head: `[sequence and head][parameter]`.
    pub(crate) parameter_sums: &'a Mutex<Vec<f64>>,
    pub(crate) part: SharedPart<'a>,
    pub(crate) rows: RowMemory<'a>,
    /// Number of key blocks of the longest sequence, at least 1.
    pub(crate) columns_per_head: usize,
    /// Number of row blocks that each key block is done with, `[sequence and head][key block]`; one more when its gradients in
    /// parameters are added.
    pub(crate) progress: &'a [Progress],
    pub(crate) stop: Stop<'a>,
}

/// Key block of a key/value head, by its number in the sequence.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BlockAt {
    pub(crate) sequence: usize,
    pub(crate) kv_head: usize,
    pub(crate) number: usize,
}

impl BackwardPass<'_> {
    /// Returns the number of key blocks of a sequence, at least 1.
    pub(crate) fn columns_of(&self, sequence: usize) -> usize {
        self.checked.call().sequence(sequence).kv_len.div_ceil(KEY_BLOCK).max(1)
    }

    /// Returns the counter of the row blocks that a key block is done with.
    pub(crate) fn progress(&self, BlockAt { sequence, kv_head, number }: BlockAt) -> &Progress {
        let head = sequence * self.checked.call().kv.kv_heads() + kv_head;
        &self.progress[head * self.columns_per_head + number]
    }

    /// Returns the number of row blocks of a sequence and key/value head.
    pub(crate) fn row_blocks(&self, sequence: usize) -> usize {
        let call = self.checked.call();
        let q_len = call.sequence(sequence).q_len;
        if q_len == 0 { 0 } else { call.group_size() * (self.part.first_row + q_len).div_ceil(MAX_ROW_BLOCK) }
    }

    /// Returns the number of parameters with gradients that are wanted.
    pub(crate) fn parameters(&self) -> usize {
        self.reduced.parameters.as_ref().map_or(0, |gradient| gradient.len())
    }

    /// Returns true if each query head's gradients of keys and values are summed apart from those of the others.
    pub(crate) fn sums_by_head(&self) -> bool {
        self.checked.call().group_size() > 1 || self.part.sums.is_some()
    }

    /// Waits until a key block is done with `row_blocks` row blocks. Returns false if the work was stopped.
    pub(crate) fn wait(&self, block: BlockAt, row_blocks: usize) -> bool {
        self.progress(block).wait(row_blocks, &self.stop)
    }
}
