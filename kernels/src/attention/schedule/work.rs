//! Schedule of a call: the list of all its work, in the order in which workers take it from one queue. A worker, an explanation
//! and a balance read the same list.

use crate::attention::call::tiling::Tiling;
use crate::attention::call::{Call, RowSet};
use crate::attention::schedule::split_sequences::{SplitRows, SplitSequences};
use crate::attention::schedule::tasks::Tasks;
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
    tasks: Tasks,
    /// Number of tasks, of which some may have no rows.
    task_count: usize,
    /// Key blocks of the sequences with few rows, if these are divided among workers.
    pub(crate) units: Option<Units<'a>>,
    /// Number of sequences and key/value heads whose key weight sums are computed.
    sums: usize,
}

impl<'a> Schedule<'a> {
    /// Lists the work of a call, cut by rows, without key weight sums.
    pub(crate) fn by_rows(call: &Call<'_>, tiling: &Tiling) -> Self {
        let tasks = Tasks::new(tiling, None);
        Self { tasks, task_count: tasks.len(call), units: None, sums: 0 }
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
        let Some(SplitRows { most_rows, .. }) = split.filter(|&split| entries.try_fill(call, split).is_some()) else {
            return Self::by_rows(call, tiling);
        };
        let tasks = Tasks::new(tiling, Some(most_rows));
        Self { tasks, task_count: tasks.len(call), units: Some(Units::new(&call.kv, entries, most_rows)), sums: 0 }
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
            return Work::Rows(self.tasks.at(call, self.task_count - 1 - number));
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
}
