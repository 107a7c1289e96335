//! Memory of a row block from key block to key block: the gradients of its queries as they accumulate, and its numbers.

use crate::attention::backward::column::Column;
use crate::attention::backward::memory::{Own, RowMemory, RowNumber};
use crate::attention::backward::rows::BlockRows;
use crate::attention::backward::written::write_rows;
use crate::attention::blocks::key_block::BlockMemory;
use crate::attention::blocks::task::AttentionTask;
use crate::attention::scratch::{MAX_ROW_BLOCK, Regions};
use crate::attention::steps::softmax_backward::{self, Delta, RowDot, SavedRow, is_far};
use crate::matmul::pack::NonFinite;
use crate::simd::{LANES, Simd};

impl<S: Simd> Column<'_, S> {
    /// Returns the memory of the row block's rows, in which the gradients of its queries accumulate.
    ///
    /// # Safety
    /// It is this worker's, and nothing else of it is borrowed.
    #[expect(clippy::mut_from_ref, reason = "the caller guarantees sole access to the rows")]
    pub(crate) unsafe fn memory_of(&self, task: &AttentionTask<'_, S>) -> &mut [f32] {
        let Some((first, n)) = task.stretches(0..rows_of(task)).next() else { return &mut [] };
        // SAFETY: the caller guarantees sole access; the rows of a row block are of one head.
        unsafe { self.pass.rows.rows(first.index(), n) }
    }

    /// Iterates over the row block's rows: the gradient of each row's query, and the row's numbers.
    ///
    /// # Safety
    /// Same contract as [`Self::memory_of`].
    unsafe fn each_row(&self, task: &AttentionTask<'_, S>) -> impl Iterator<Item = (&mut [f32], &mut [f32; LANES])> {
        // SAFETY: same contract.
        let memory = unsafe { self.memory_of(task) };
        let rows = memory.chunks_exact_mut(RowMemory::floats(task.tiling.head_dim));
        rows.map(|row| row.split_last_chunk_mut().expect("a row is longer than its numbers"))
    }

    /// Returns what was saved of the rows, and their deltas, as the row block's first key block has left them.
    ///
    /// # Safety
    /// The row block's memory is this worker's.
    pub(crate) unsafe fn kept_rows(&self, task: &AttentionTask<'_, S>) -> [SavedRow; MAX_ROW_BLOCK] {
        let (mut kept, saved) = ([SavedRow::default(); MAX_ROW_BLOCK], &self.pass.saved);
        // SAFETY: the caller guarantees the memory, and nothing of it is borrowed.
        for (row, (_, numbers)) in task.rows(0..rows_of(task)).zip(unsafe { self.each_row(task) }) {
            let of = |number| numbers[number as usize];
            let (reference, lse) = (of(RowNumber::Reference), of(RowNumber::Lse));
            let (value, rounding) = (of(RowNumber::Delta), of(RowNumber::DeltaRounding));
            let d_lse = task.d_lse(saved, row);
            kept[row.n] = SavedRow { reference, lse, d_lse, delta: Delta { value, rounding } };
        }
        kept
    }

    /// Sums the exponentials of the row block's rows over all keys, if some are far from 0, and keeps the rounding errors of
    /// their log-sum-exps. A difference larger than any rounding counts as 0: the call then has only some of the keys that the
    /// saved log-sum-exp is over.
    ///
    /// # Safety
    /// The row block's memory is this worker's.
    pub(crate) unsafe fn sum_far_rows(&self, task: &AttentionTask<'_, S>, regions: &mut Regions<'_>) {
        let lse = |row| task.of_row(&self.pass.saved.lse, row);
        if !task.rows(0..rows_of(task)).any(|row| is_far(lse(row))) {
            return;
        }
        task.sum_exponentials(&mut BlockMemory::new(), regions);
        // SAFETY: the caller guarantees the memory, and nothing of it is borrowed.
        for (row, (_, numbers)) in task.rows(0..rows_of(task)).zip(unsafe { self.each_row(task) }) {
            let sum = task.row_sum(row, regions.max[row.n], regions.sum[row.n]);
            let (lse, rest) = (lse(row), sum.lse_rest(lse(row)));
            let unit = lse.abs().next_up() - lse.abs();
            numbers[RowNumber::Lse as usize] = if rest.abs() <= unit { rest } else { 0.0 };
        }
    }

    /// Makes the row block's numbers ready, before its first key block.
    ///
    /// # Safety
    /// The row block's memory is this worker's.
    pub(crate) unsafe fn begin_rows(&self, task: &AttentionTask<'_, S>, deltas: &[Delta; MAX_ROW_BLOCK]) {
        // SAFETY: the caller guarantees the memory, and nothing of it is borrowed.
        for (row, (_, numbers)) in task.rows(0..rows_of(task)).zip(unsafe { self.each_row(task) }) {
            let (delta, lse, summed) = (deltas[row.n], &self.pass.saved.lse, numbers[RowNumber::Lse as usize]);
            *numbers = [0.0; LANES];
            numbers[RowNumber::Delta as usize] = delta.value;
            numbers[RowNumber::DeltaRounding as usize] = delta.rounding;
            numbers[RowNumber::Begun as usize] = 1.0;
            let saved = task.of_row(lse, row);
            let rest = || lse.get([row.q_batch, row.head, row.at, 1]).copied().unwrap_or(summed);
            let [reference, lse] = if is_far(saved) { [saved, rest()] } else { [0.0, saved] };
            numbers[RowNumber::Reference as usize] = reference;
            numbers[RowNumber::Lse as usize] = lse;
        }
    }

    /// Returns true if the row block's numbers are ready, in memory that was clear when the pass began.
    ///
    /// # Safety
    /// The row block's memory is this worker's.
    pub(crate) unsafe fn has_begun(&self, task: &AttentionTask<'_, S>) -> bool {
        // SAFETY: the caller guarantees the memory, and nothing of it is borrowed.
        unsafe { self.each_row(task) }.next().is_some_and(|(_, numbers)| numbers[RowNumber::Begun as usize] == 1.0)
    }

    /// Writes the row block's gradients after all key blocks, when these came in parts.
    ///
    /// # Safety
    /// The row block's memory and gradients are this worker's; the saved tensors fit the call.
    pub(crate) unsafe fn end_parts(&self, task: &AttentionTask<'_, S>, own: &mut Own<'_>) {
        // SAFETY: the caller guarantees the memory, the gradients and the saved tensors.
        unsafe {
            if !self.has_begun(task) {
                if task.blocks().next().is_none() {
                    return self.write_unseen(task);
                }
                // What rules show, but something else hides from all rows.
                let d_out = task.block_rows(&self.pass.saved.d_out, NonFinite::Handled, own.d_out);
                let deltas = task.deltas(&self.pass.saved, &d_out, own.out);
                self.begin_rows(task, &deltas);
                self.clear_gradients(task);
            }
            let q = task.block_rows(&task.call.q, NonFinite::Handled, own.q);
            self.end_rows(task, &q);
        }
    }

    /// Clears the row block's running gradients, before a first key block that not all of its rows see.
    ///
    /// # Safety
    /// The row block's memory is this worker's.
    pub(crate) unsafe fn clear_gradients(&self, task: &AttentionTask<'_, S>) {
        // SAFETY: the caller guarantees the memory, and nothing of it is borrowed.
        unsafe { self.each_row(task) }.for_each(|(gradient, _)| gradient.fill(0.0));
    }

    /// Writes the row block's gradients, after its last key block.
    ///
    /// # Safety
    /// The row block's memory and gradients are this worker's.
    pub(crate) unsafe fn end_rows(&self, task: &AttentionTask<'_, S>, q: &BlockRows) {
        let Some(first) = task.rows(0..rows_of(task)).next() else { return };
        // SAFETY: the caller guarantees the memory and the gradients, and nothing else of the memory is borrowed; queries and
        // their gradients are whole vectors.
        unsafe {
            if self.pass.reduced.scale.is_some() {
                for (&q, (sums, numbers)) in q.addresses().iter().zip(self.each_row(task)) {
                    let mut dot = [RowDot::default()];
                    softmax_backward::row_dots(task.s, [&[q], &[sums.as_ptr()]], sums.len() / LANES, &mut dot);
                    numbers[RowNumber::Dot as usize] = dot[0].sum;
                }
            }
            if let Some(gradient) = &self.pass.gradients.q {
                let sums = self.each_row(task).map(|(sums, _)| &*sums);
                write_rows(task.s, gradient, first.index(), sums, task.call.scale);
            }
        }
    }

    /// Writes the gradients of queries that see no key: zeros.
    ///
    /// # Safety
    /// The row block's memory and gradients are this worker's.
    pub(crate) unsafe fn write_unseen(&self, task: &AttentionTask<'_, S>) {
        let Some(first) = task.rows(0..rows_of(task)).next() else { return };
        let mut deltas = [Delta::default(); MAX_ROW_BLOCK];
        for row in task.rows(0..rows_of(task)) {
            deltas[row.n] = Delta::new(RowDot::default(), task.d_lse(&self.pass.saved, row));
        }
        // SAFETY: the caller guarantees the memory and the gradients.
        unsafe {
            self.begin_rows(task, &deltas);
            if let Some(gradient) = &self.pass.gradients.q {
                let none: &[f32] = &[];
                write_rows(task.s, gradient, first.index(), (0..rows_of(task)).map(|_| none), 1.0);
            }
        }
    }
}

/// Returns the number of the row block's rows.
pub(crate) fn rows_of<S>(task: &AttentionTask<'_, S>) -> usize {
    task.set.rows.len()
}
