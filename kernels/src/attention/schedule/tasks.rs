//! Tasks of a call: its query rows, cut up and numbered.

use crate::attention::call::tiling::Tiling;
use crate::attention::call::{Call, RowSet};

/// Rows of a call, cut into tasks that are numbered.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Tasks {
    task_rows: usize,
    /// Largest number of rows a key/value head of a sequence that is split into units and so has no rows left; `None` if
    /// no sequence is.
    most_rows: Option<usize>,
}

impl Tasks {
    /// Cuts the rows of the sequences with more than `most_rows` rows a key/value head; without `most_rows`, of all sequences.
    pub(crate) fn new(tiling: &Tiling, most_rows: Option<usize>) -> Self {
        Self { task_rows: tiling.task_rows, most_rows }
    }

    /// Number of tasks, some of which may have no rows.
    pub(crate) fn len(self, call: &Call<'_>) -> usize {
        let all = |most_rows| (0..call.sequence_count()).all(|sequence| call.is_split(sequence, most_rows));
        if self.most_rows.is_some_and(all) {
            return 0;
        }
        let (kv_heads, per_head) = (call.kv.kv_heads(), self.per_head(call));
        let heads = if call.options.ragged.is_some() { kv_heads } else { call.sequence_count() * kv_heads };
        if heads == 0 { 0 } else { heads * per_head }
    }

    /// Number of tasks of one key/value head: of one sequence, or of all sequences if they are ragged.
    #[inline]
    fn per_head(self, call: &Call<'_>) -> usize {
        // Saturating: without batches or heads the rows may be any number.
        let rows = call.group_size().saturating_mul(call.q.shape()[2]);
        match call.options.ragged {
            None => rows.div_ceil(self.task_rows),
            Some(ragged) if ragged.q.len() > 1 => rows / self.task_rows + ragged.q.len() - 1,
            Some(_) => 0,
        }
    }

    /// Returns the rows of the task with this number, which is below [`Self::len`].
    #[inline]
    pub(crate) fn at(self, call: &Call<'_>, number: usize) -> RowSet<'static> {
        let (task_rows, per_head, kv_heads) = (self.task_rows, self.per_head(call), call.kv.kv_heads());
        let (head, part) = (number / per_head, number % per_head);
        let group_size = call.group_size();
        let (sequence, kv_head, first) = match call.options.ragged {
            None => (head / kv_heads, head % kv_heads, part * task_rows),
            Some(ragged) => {
                // Sequence s owns the parts from s + ⌊rows before it / task_rows⌋ on: always enough of them, sometimes
                // one more.
                let first_part = |s: usize| ragged.q[s] * group_size / task_rows + s;
                // No more of them are an owner's own than there are whole tasks: with short sequences, nearly each has one.
                let whole = group_size.saturating_mul(call.q.shape()[2]) / task_rows;
                let (mut low, mut high) = (part.saturating_sub(whole), (ragged.q.len() - 1).min(part + 1));
                while high - low > 1 {
                    let middle = low.midpoint(high);
                    if first_part(middle) <= part { low = middle } else { high = middle }
                }
                (low, head, (part - first_part(low)) * task_rows)
            }
        };
        let split = self.most_rows.is_some_and(|most_rows| call.is_split(sequence, most_rows));
        let rows = if split { 0 } else { call.rows_of(sequence) };
        RowSet::of(sequence, kv_head, first.min(rows)..rows.min(first + task_rows))
    }
}
