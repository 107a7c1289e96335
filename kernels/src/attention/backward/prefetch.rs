//! Memory that the backward pass prefetches while it computes a row block of a column.
//!
//! Memory that is touched after a row block comes from far away: the row block's own gradients, which it adds to or writes
//! last; the queries, output gradients and outputs of the next row block; and a share of what lies at the column's ends, its
//! own gradients, and the keys and values of the column that is expected next.

use crate::attention::backward::column::Column;
use crate::attention::backward::memory::RowMemory;
use crate::attention::backward::pass::BlockAt;
use crate::attention::backward::row_block::rows_of;
use crate::attention::backward::tile::Turn;
use crate::attention::blocks::task::AttentionTask;
use crate::attention::scratch::MAX_ROW_BLOCK;
use crate::matmul::prefetch::PrefetchQueue;
use crate::simd::Simd;
use crate::tensor::rows::KEY_BLOCK;
use core::ops::Range;

/// Query rows of a head, from a row of its sequence on.
#[derive(Clone, Copy)]
struct RowsOfHead {
    sequence: usize,
    head: usize,
    first: usize,
    n: usize,
    /// True if their outputs are read, too: with the first key block that they see.
    outputs: bool,
}

impl<S: Simd> Column<'_, S> {
    /// Returns the memory to prefetch while the `number`th row block of the column is computed.
    ///
    /// # Safety
    /// The row block's memory is this worker's, and nothing of it is borrowed.
    pub(crate) unsafe fn prefetch(&self, task: &AttentionTask<'_, S>, number: usize, turn: Turn) -> PrefetchQueue {
        let mut queue = PrefetchQueue::nothing();
        let Some((row, n)) = task.stretches(0..rows_of(task)).next() else { return queue };
        let d = task.tiling.head_dim;
        if !turn.is_first {
            // SAFETY: the caller guarantees the memory.
            let gradients = unsafe { self.memory_of(task) };
            let bytes = size_of::<f32>();
            queue.push(gradients.as_ptr().cast(), (RowMemory::floats(d) * bytes) as isize, n, d * bytes);
        }
        if let Some(gradient) = self.pass.gradients.q.as_ref().filter(|_| turn.is_last) {
            let [b, h, l] = row.index();
            // SAFETY: the row block's rows are inside the gradient of the queries.
            queue.push_rows(unsafe { gradient.rows(b, h, l) }, n, d);
        }
        let here = RowsOfHead { sequence: self.at.sequence, head: row.head, first: row.i, n, outputs: turn.is_first };
        if let Some(next) = self.rows_after(here) {
            self.push_query_rows(next, &mut queue);
        }
        let all = self.pass.row_blocks(self.at.sequence);
        let share = |len: usize| len * number / all..len * (number + 1) / all;
        if let Some(next) = self.next {
            self.push_keys(next, share, &mut queue);
        }
        self.push_key_gradients(share(self.keys().len()), &mut queue);
        queue
    }

    /// Returns the row block after another one, in this column or the next.
    fn rows_after(&self, rows: RowsOfHead) -> Option<RowsOfHead> {
        let (call, group) = (self.bound.checked.call(), self.bound.checked.call().group_size());
        let most = |sequence: usize, first: usize| (call.sequence(sequence).q_len - first).min(MAX_ROW_BLOCK);
        let after = rows.first + rows.n;
        if after < call.sequence(rows.sequence).q_len {
            return Some(RowsOfHead { first: after, n: most(rows.sequence, after), ..rows });
        }
        if !(rows.head + 1).is_multiple_of(group) {
            return Some(RowsOfHead { head: rows.head + 1, first: 0, n: most(rows.sequence, 0), ..rows });
        }
        let BlockAt { sequence, kv_head, number } = self.next?;
        let n = most(sequence, 0);
        (n > 0).then_some(RowsOfHead { sequence, head: kv_head * group, first: 0, n, outputs: number == 0 })
    }

    /// Adds queries, their output gradients, and their outputs if these are read.
    fn push_query_rows(&self, rows: RowsOfHead, queue: &mut PrefetchQueue) {
        let (call, saved) = (self.bound.checked.call(), &self.pass.saved);
        let seq = call.sequence(rows.sequence);
        let outputs = rows.outputs.then_some(&saved.out);
        for tensor in [Some(&call.q), Some(&saved.d_out), outputs].into_iter().flatten() {
            // SAFETY: the rows are some of the sequence's, which the tensors have.
            let at = unsafe { tensor.rows(seq.q_batch, rows.head, seq.first_row + rows.first) };
            queue.push_rows(at, rows.n, tensor.shape()[3]);
        }
    }

    /// Adds a share of a column's keys and values.
    fn push_keys(&self, column: BlockAt, share: impl Fn(usize) -> Range<usize>, queue: &mut PrefetchQueue) {
        let call = self.bound.checked.call();
        let (seq, first) = (call.sequence(column.sequence), column.number * KEY_BLOCK);
        let keys = share(seq.kv_len.saturating_sub(first).min(KEY_BLOCK));
        let Some([k, v]) = call.kv.tensors().filter(|_| !keys.is_empty()) else { return };
        for tensor in [k, v] {
            // SAFETY: the keys are some of the sequence's, which both tensors have.
            let rows = unsafe { tensor.rows(seq.source, column.kv_head, seq.first_key + first + keys.start) };
            queue.push_rows(rows, keys.len(), tensor.shape()[3]);
        }
    }

    /// Adds the gradients of some of the column's keys and values.
    fn push_key_gradients(&self, keys: Range<usize>, queue: &mut PrefetchQueue) {
        if keys.is_empty() {
            return;
        }
        let [b, h, l] = self.index_of_key(self.keys().start + keys.start);
        for gradient in [&self.pass.gradients.k, &self.pass.gradients.v].into_iter().flatten() {
            // SAFETY: the keys are some of the column's, which the gradients have.
            queue.push_rows(unsafe { gradient.rows(b, h, l) }, keys.len(), gradient.shape()[3]);
        }
    }
}
