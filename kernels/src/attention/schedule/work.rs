//! Schedule of a call: the list of all its work, in the order in which workers take it from one queue. Workers and
//! explanations of plans read the same list.

use crate::attention::call::outputs::Outputs;
use crate::attention::call::selection::SelectedKeys;
use crate::attention::call::{Call, RowSet};
use crate::attention::schedule::units::Units;
use crate::attention::scratch::Tiling;
use core::ops::Range;

/// Work that one worker does alone.
#[derive(Debug, Clone)]
pub(crate) enum Work {
    /// Rows of one sequence against all keys they see, into the outputs or the caller's state.
    Rows(RowSet<'static>),
    /// Run of [units](Units), by their numbers: key blocks, each with all rows that share it, into partial results.
    Blocks(Range<usize>),
    /// Sums of the weights of each key of a head over all rows that share it.
    KeyWeightSums { sequence: usize, kv_head: usize },
}

/// List of the work of a call, by number. First tasks, the last rows first: under a causal mask these see the most keys, so
/// that what is left for the end is short. Then runs of units, each shorter than a task; those of common prefixes first, the
/// short blocks at the ends of sequences last. Then key weight sums.
#[derive(Clone, Copy)]
pub(crate) struct Schedule<'a> {
    /// Largest number of rows of a task.
    task_rows: usize,
    /// Number of tasks; some may have no rows.
    task_count: usize,
    /// Key blocks of the sequences with few rows, if these are divided among workers.
    pub(crate) units: Option<Units<'a>>,
    /// Ragged sequences that have tasks.
    listed: Listed,
    /// Number of parts, of `task_rows` rows at most, of a list of keys.
    parts_of_list: usize,
    /// Number of pairs of a sequence and a key/value head with key weight sums to compute.
    sums: usize,
}

/// Ragged sequences that have tasks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Listed {
    /// Those with rows, and no more others than there are rows.
    WithRows,
    /// All: a task without rows writes the rows of score outputs beyond its sequence.
    All,
}

impl<'a> Schedule<'a> {
    /// Lists the work of a call: the units, if there are any, the rows of sequences that have none, and the key weight sums that
    /// are wanted. Sequences without rows are listed too, for score outputs.
    pub(crate) fn new(call: &Call<'_>, outputs: &Outputs<'_>, tiling: &Tiling, units: Option<Units<'a>>) -> Self {
        let (kv_heads, sequences) = (call.kv.kv_heads(), call.sequence_count());
        let listed = if outputs.wants_all_keys() { Listed::All } else { Listed::WithRows };
        let wanted = outputs.key_weight_sums.is_some() && !call.key_weight_sums_shape().contains(&0);
        let sums = if wanted { sequences * kv_heads } else { 0 };
        let task_rows = tiling.task_rows;
        let parts_of_list = call.list_rows().div_ceil(task_rows.max(1)).max(1);
        let schedule = Self { task_rows, task_count: 0, units, listed, parts_of_list, sums };
        let together = call.options.ragged.is_some() || call.options.selected.is_some();
        let heads = if together { kv_heads } else { sequences * kv_heads };
        let any = heads > 0 && (0..sequences).any(|sequence| !schedule.is_split(call, sequence));
        Self { task_count: if any { heads * schedule.per_head(call) } else { 0 }, ..schedule }
    }

    /// Number of pieces of work.
    pub(crate) fn len(&self) -> usize {
        self.task_count + self.runs() + self.sums
    }

    /// Number of tasks.
    pub(crate) fn tasks(&self) -> usize {
        self.task_count
    }

    /// Number of runs of units.
    pub(crate) fn runs(&self) -> usize {
        self.units.map_or(0, |units| units.runs.len())
    }

    /// Returns the work with this number, which is below [`Self::len`].
    #[inline]
    pub(crate) fn work(&self, call: &Call<'_>, number: usize) -> Work {
        if number < self.task_count {
            return Work::Rows(self.task(call, self.task_count - 1 - number));
        }
        let number = number - self.task_count;
        match &self.units {
            Some(units) if number < units.runs.len() => Work::Blocks(units.runs.units(number)),
            _ => {
                let (number, kv_heads) = (number - self.runs(), call.kv.kv_heads());
                Work::KeyWeightSums { sequence: number / kv_heads, kv_head: number % kv_heads }
            }
        }
    }

    /// Returns true if a sequence is cut by key blocks, and so has no tasks.
    #[inline]
    fn is_split(&self, call: &Call<'_>, sequence: usize) -> bool {
        self.units.is_some_and(|units| call.is_split(sequence, units.most_rows))
    }

    /// Number of tasks of one key/value head: of one sequence, or of all sequences if they are ragged or rows select keys.
    #[inline]
    fn per_head(&self, call: &Call<'_>) -> usize {
        if let Some(selected) = call.options.selected {
            return self.first_of_lists(call, selected, selected.sequences());
        }
        // Saturating: without batches or heads the rows may be any number.
        let rows = call.group_size().saturating_mul(call.q.shape()[2]);
        match call.options.ragged {
            None => rows.div_ceil(self.task_rows),
            Some(ragged) => ragged.q.len().checked_sub(1).map_or(0, |end| self.first_part(call, ragged.q, end)),
        }
    }

    /// Returns the number of parts, of `task_rows` rows at most, of the ragged sequences before `sequence`; `ends` are the ends
    /// of their rows. A sequence of `n` rows has ⌊n / task_rows⌋ parts and one more if any row is left, sometimes two; if it has
    /// no rows, none or one.
    #[inline]
    fn first_part(&self, call: &Call<'_>, ends: &[usize], sequence: usize) -> usize {
        let before = ends[sequence];
        // Of the sequences before this one, no more have rows than there are rows.
        let sequences = if self.listed == Listed::All { sequence } else { sequence.min(before) };
        call.group_size().saturating_mul(before) / self.task_rows + sequences
    }

    /// Returns the number of parts of the lists of one key/value head in the sequences before `sequence`; one more for each of
    /// these, without rows, if score outputs are filled by them.
    fn first_of_lists(&self, call: &Call<'_>, selected: &SelectedKeys, sequence: usize) -> usize {
        let others = if self.listed == Listed::All { sequence } else { 0 };
        selected.groups_before(sequence) * call.lists_of_kv_head() * self.parts_of_list + others
    }

    /// Returns the rows of a task by the number of its part among those of all lists of a key/value head.
    fn task_of_list(&self, call: &Call<'_>, selected: &SelectedKeys, kv_head: usize, part: usize) -> RowSet<'static> {
        let (mut low, mut high) = (0, selected.sequences());
        while high - low > 1 {
            let middle = low.midpoint(high);
            if self.first_of_lists(call, selected, middle) <= part { low = middle } else { high = middle }
        }
        let (sequence, parts) = (low, self.parts_of_list);
        let (list, part) = {
            let part = part - self.first_of_lists(call, selected, sequence);
            (part / parts, part % parts)
        };
        let (order, rows) = (call.row_order(call.sequence(sequence).q_len), call.rows_of(sequence));
        if self.is_split(call, sequence) || list >= order.lists() {
            let end = if self.is_split(call, sequence) { 0 } else { rows };
            return RowSet::of(sequence, kv_head, end..end);
        }
        let of_list = order.rows_of_list(list);
        let [start, end] = [part, part + 1].map(|part| of_list.end.min(of_list.start + part * self.task_rows));
        RowSet::of(sequence, kv_head, start..end)
    }

    /// Returns the rows of the task with this number, which is below [`Self::tasks`].
    #[inline]
    fn task(&self, call: &Call<'_>, number: usize) -> RowSet<'static> {
        let (task_rows, per_head, kv_heads) = (self.task_rows, self.per_head(call), call.kv.kv_heads());
        let (head, part) = (number / per_head, number % per_head);
        if let Some(selected) = call.options.selected {
            return self.task_of_list(call, selected, head, part);
        }
        let group_size = call.group_size();
        let (sequence, kv_head, first) = match call.options.ragged {
            None => (head / kv_heads, head % kv_heads, part * task_rows),
            Some(ragged) => {
                // A part belongs to the last sequence that begins at it or before: those before it that begin there have no
                // rows, for each part of a sequence moves the next.
                let first_part = |s: usize| self.first_part(call, ragged.q, s);
                // An owner has no more parts than there are whole tasks: with short sequences, nearly each has one, and
                // the owner is near the part's number unless sequences have no rows.
                let whole = group_size.saturating_mul(call.q.shape()[2]) / task_rows;
                let (mut low, mut high) = (part.saturating_sub(whole), (ragged.q.len() - 1).min(part + 1));
                if ragged.q[high] < high && first_part(high) <= part {
                    (low, high) = (high, ragged.q.len() - 1);
                }
                while high - low > 1 {
                    let middle = low.midpoint(high);
                    if first_part(middle) <= part { low = middle } else { high = middle }
                }
                (low, head, (part - first_part(low)) * task_rows)
            }
        };
        let rows = if self.is_split(call, sequence) { 0 } else { call.rows_of(sequence) };
        RowSet::of(sequence, kv_head, first.min(rows)..rows.min(first + task_rows))
    }
}

#[cfg(test)]
mod tests;
