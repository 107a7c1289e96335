//! Memory of a row block from key block to key block: the gradients of its queries as they accumulate, and its numbers.

use crate::attention::backward::column::{Column, write_rows};
use crate::attention::backward::memory::{RowMemory, RowNumber};
use crate::attention::backward::rows::BlockRows;
use crate::attention::blocks::task::{AttentionTask, Row};
use crate::attention::steps::by_isa::Steps;
use crate::attention::steps::softmax_backward::SavedRow;
use crate::attention::tiling::MAX_ROW_BLOCK;
use crate::simd::LANES;

impl<S: Steps> Column<'_, S> {
    /// Returns the memory of the row block's rows, in which the gradients of its queries accumulate.
    ///
    /// # Safety
    /// It is this worker's, and nothing else of it is borrowed.
    #[expect(clippy::mut_from_ref, reason = "the caller guarantees sole access to the rows")]
    pub(crate) unsafe fn memory_of(&self, task: &AttentionTask<'_, S>) -> &mut [f32] {
        let Some((first, n)) = task.stretches(0..rows_of(task)).next() else { return &mut [] };
        // SAFETY: the caller guarantees sole access; the rows of a row block are of one head.
        unsafe { self.pass.rows.rows(place_of(task, first), n) }
    }

    /// Returns the rows' deltas, as the row block's first key block has left them.
    ///
    /// # Safety
    /// The row block's memory is this worker's.
    pub(crate) unsafe fn kept_deltas(&self, task: &AttentionTask<'_, S>) -> [f32; MAX_ROW_BLOCK] {
        let mut deltas = [0.0; MAX_ROW_BLOCK];
        for row in task.rows(0..rows_of(task)) {
            // SAFETY: the caller guarantees the row.
            let (_, numbers) = unsafe { self.pass.rows.row(place_of(task, row)) };
            deltas[row.n] = numbers[RowNumber::Delta as usize];
        }
        deltas
    }

    /// Makes the row block's numbers and running gradients ready, before its first key block.
    ///
    /// # Safety
    /// The row block's memory is this worker's.
    pub(crate) unsafe fn begin_rows(&self, task: &AttentionTask<'_, S>, saved: &[SavedRow]) {
        for row in task.rows(0..rows_of(task)) {
            // SAFETY: the caller guarantees the row.
            let (gradient, numbers) = unsafe { self.pass.rows.row(place_of(task, row)) };
            gradient.fill(0.0);
            *numbers = [0.0; LANES];
            numbers[RowNumber::Delta as usize] = saved[row.n].delta;
        }
    }

    /// Writes the row block's gradients, after its last key block.
    ///
    /// # Safety
    /// The row block's memory and gradients are this worker's.
    pub(crate) unsafe fn end_rows(&self, task: &AttentionTask<'_, S>, q: &BlockRows) {
        if self.pass.reduced.scale.is_some() {
            for row in task.rows(0..rows_of(task)) {
                let (q, dot) = (&q.addresses()[row.n..=row.n], RowNumber::Dot as usize);
                // SAFETY: the caller guarantees the row; queries and gradients are whole vectors.
                unsafe {
                    let (sums, numbers) = self.pass.rows.row(place_of(task, row));
                    task.s.row_dots([q, &[sums.as_ptr()]], sums.len() / LANES, &mut numbers[dot..=dot]);
                }
            }
        }
        let Some(first) = task.rows(0..rows_of(task)).next() else { return };
        let (floats, width) = (RowMemory::floats(task.tiling.head_dim), task.tiling.head_dim.next_multiple_of(LANES));
        if let Some(gradient) = &self.pass.gradients.q {
            // SAFETY: the caller guarantees the memory, of which no row is borrowed any more, and the gradients.
            unsafe {
                let sums = self.memory_of(task).chunks_exact(floats).map(|row| &row[..width]);
                write_rows(task.s, gradient, place_of(task, first), sums, task.call.scale);
            }
        }
    }

    /// Writes the gradients of queries that see no key: zeros.
    ///
    /// # Safety
    /// The row block's memory and gradients are this worker's.
    pub(crate) unsafe fn write_unseen(&self, task: &AttentionTask<'_, S>) {
        for row in task.rows(0..rows_of(task)) {
            let [b, h, l] = place_of(task, row);
            let d_lse = self.pass.saved.d_lse.and_then(|d_lse| d_lse.get([b, h, l, 0]).copied()).unwrap_or(0.0);
            // SAFETY: the caller guarantees the row.
            unsafe {
                let (_, numbers) = self.pass.rows.row([b, h, l]);
                *numbers = [0.0; LANES];
                numbers[RowNumber::Delta as usize] = -d_lse;
                if let Some(gradient) = &self.pass.gradients.q {
                    write_rows(task.s, gradient, [b, h, l], core::iter::once(&[][..]), 1.0);
                }
            }
        }
    }
}

/// Returns the number of the row block's rows.
pub(crate) fn rows_of<S>(task: &AttentionTask<'_, S>) -> usize {
    task.task.rows.len()
}

/// Returns the place of a row in q: batch, head, row.
pub(crate) fn place_of<S>(task: &AttentionTask<'_, S>, row: Row) -> [usize; 3] {
    [task.seq.batch, row.head, task.seq.first_row + row.i]
}
