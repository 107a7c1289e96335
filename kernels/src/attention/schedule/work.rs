//! Schedule of a call: the list of all its work, in the order in which workers take it from one queue. A worker, an explanation
//! and a balance read the same list.

use crate::attention::call::tiling::Tiling;
use crate::attention::call::{Call, RowSet};
use crate::attention::schedule::split_sequences::{SplitRows, SplitSequences};
use crate::attention::schedule::units::Units;
use core::ops::Range;

/// Work that one worker does by itself.
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
    /// Number of tasks, of which some may have no rows.
    task_count: usize,
    /// Key blocks of the sequences with few rows, if these are divided among workers.
    pub(crate) units: Option<Units<'a>>,
    /// Ragged sequences that have tasks.
    listed: Listed,
    /// Number of sequences and key/value heads whose key weight sums are computed.
    sums: usize,
}

/// Ragged sequences that have tasks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Listed {
    /// Those with rows, and at most as many others as there are rows.
    WithRows,
    /// All: a task without rows writes the rows of score outputs beyond its sequence.
    All,
}

impl<'a> Schedule<'a> {
    /// Lists the work of a call, cut by rows, without key weight sums.
    pub(crate) fn by_rows(call: &Call<'_>, tiling: &Tiling) -> Self {
        Self::with_units(call, tiling, None)
    }

    /// Lists the work of a call without key weight sums. If `split` says so, the sequences with few rows are cut by key blocks,
    /// not by rows; they are listed in `entries`, which grows as needed and is kept. If there is no memory for that, all
    /// sequences are cut by rows.
    pub(crate) fn new(
        call: &Call<'_>,
        tiling: &Tiling,
        split: Option<SplitRows>,
        entries: &'a mut SplitSequences,
    ) -> Self {
        let split = split.filter(|&split| entries.try_fill(call, split).is_some());
        let units = split.map(|split| Units::new(&call.kv, entries, split.most_rows));
        Self::with_units(call, tiling, units)
    }

    /// Lists these units, and the rows of the sequences that have none.
    fn with_units(call: &Call<'_>, tiling: &Tiling, units: Option<Units<'a>>) -> Self {
        Self { task_rows: tiling.task_rows, task_count: 0, units, listed: Listed::WithRows, sums: 0 }.counted(call)
    }

    /// Lists sequences without rows too, for score outputs.
    pub(crate) fn with_all_sequences(self, call: &Call<'_>) -> Self {
        Self { listed: Listed::All, ..self }.counted(call)
    }

    /// Counts the tasks.
    fn counted(self, call: &Call<'_>) -> Self {
        let kv_heads = call.kv.kv_heads();
        let heads = if call.options.ragged.is_some() { kv_heads } else { call.sequence_count() * kv_heads };
        let any = heads > 0 && (0..call.sequence_count()).any(|sequence| !self.is_split(call, sequence));
        Self { task_count: if any { heads * self.per_head(call) } else { 0 }, ..self }
    }

    /// Adds the key weight sums of a call to the list.
    pub(crate) fn with_key_weight_sums(self, call: &Call<'_>) -> Self {
        Self { sums: call.sequence_count() * call.kv.kv_heads(), ..self }
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

    /// Number of tasks of one key/value head: of one sequence, or of all sequences if they are ragged.
    #[inline]
    fn per_head(&self, call: &Call<'_>) -> usize {
        // Saturating: without batches or heads the rows may be any number.
        let rows = call.group_size().saturating_mul(call.q.shape()[2]);
        match call.options.ragged {
            None => rows.div_ceil(self.task_rows),
            Some(ragged) => ragged.q.len().checked_sub(1).map_or(0, |end| self.first_part(call, ragged.q, end)),
        }
    }

    /// Returns the number of parts, of `task_rows` rows at most, of the ragged sequences before `sequence`, whose rows
    /// end at `ends`. A sequence of `n` rows has ⌊n / task_rows⌋ parts and one more if any row is left, sometimes two; if
    /// it has no rows, none or one.
    #[inline]
    fn first_part(&self, call: &Call<'_>, ends: &[usize], sequence: usize) -> usize {
        let before = ends[sequence];
        // At most as many sequences as there are rows before this one have rows.
        let sequences = if self.listed == Listed::All { sequence } else { sequence.min(before) };
        call.group_size().saturating_mul(before) / self.task_rows + sequences
    }

    /// Returns the rows of the task with this number, which is below [`Self::tasks`].
    #[inline]
    fn task(&self, call: &Call<'_>, number: usize) -> RowSet<'static> {
        let (task_rows, per_head, kv_heads) = (self.task_rows, self.per_head(call), call.kv.kv_heads());
        let (head, part) = (number / per_head, number % per_head);
        let group_size = call.group_size();
        let (sequence, kv_head, first) = match call.options.ragged {
            None => (head / kv_heads, head % kv_heads, part * task_rows),
            Some(ragged) => {
                // A part belongs to the last sequence that begins at it or before: those before it that begin there have no
                // rows, for each part of a sequence moves the next.
                let first_part = |s: usize| self.first_part(call, ragged.q, s);
                // No more parts are an owner's own than there are whole tasks: with short sequences, nearly each has one, and
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
