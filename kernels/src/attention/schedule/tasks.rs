//! Tasks of a call: its query rows, cut up and numbered; and what tasks and units cost, for plans.

use crate::attention::call::tiling::Tiling;
use crate::attention::call::{Call, Task};
use crate::attention::schedule::partials::{MERGED_ROWS, merges};
use crate::attention::schedule::runs::FewRows;
use crate::attention::schedule::units::{Places, Unit, Units};
use crate::simd::LANES;
use crate::tensor::rows::KEY_BLOCK;

/// Rows of a call, cut into tasks that are numbered.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Tasks {
    task_rows: usize,
    /// Largest number of rows a key/value head of a sequence that is split into units and so has no rows left; `None` if
    /// no sequence is.
    few: Option<usize>,
}

impl Tasks {
    pub(crate) fn new(tiling: &Tiling) -> Self {
        Self { task_rows: tiling.task_rows, few: None }
    }

    /// Leaves out the sequences with at most `few` rows a key/value head.
    pub(crate) fn without(self, few: usize) -> Self {
        Self { few: Some(few), ..self }
    }

    /// Number of tasks, some of which may have no rows.
    pub(crate) fn len(self, call: &Call<'_>) -> usize {
        let all = |few| (0..call.sequences()).all(|sequence| call.has_few_rows(sequence, few));
        if self.few.is_some_and(all) {
            return 0;
        }
        let (kv_heads, per_head) = (call.kv.kv_heads(), self.per_head(call));
        let heads = if call.options.ragged.is_some() { kv_heads } else { call.sequences() * kv_heads };
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

    /// Returns the task with this number, which is below [`Self::len`].
    #[inline]
    pub(crate) fn at(self, call: &Call<'_>, number: usize) -> Task {
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
        let split = self.few.is_some_and(|few| call.has_few_rows(sequence, few));
        let rows = if split { 0 } else { call.rows_of(sequence) };
        Task { sequence, kv_head, rows: first.min(rows)..rows.min(first + task_rows) }
    }
}

/// Rows that reading or packing a key takes the time of.
const READING: u64 = 3;

/// Costs of all that workers take one after the other, in the order in which they take it, in visible pairs of a query row
/// and a key; `u64::MAX` if one overflows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Costs {
    /// Costs of tasks, then of runs of units.
    pub accumulated: Vec<u64>,
    /// Costs of merges, which begin when all runs are done.
    pub merged: Vec<u64>,
}

impl Call<'_> {
    /// Returns what the tasks of this call cost under a tiling, and if sequences with few rows are split, their units.
    ///
    /// Complexity: query rows, and units.
    pub fn costs(&self, tiling: &Tiling, split: Option<FewRows>) -> Costs {
        let tasks = Tasks::new(tiling);
        let tasks = split.map_or(tasks, |split| tasks.without(split.few));
        // The queue counts down.
        let mut costs = Costs {
            accumulated: (0..tasks.len(self)).rev().map(|number| self.task_cost(&tasks.at(self, number))).collect(),
            merged: Vec::new(),
        };
        let mut places = Places::new();
        if let Some(few) = split
            && places.try_fill(self, few).is_some()
        {
            let units = Units::new(&self.kv, &places);
            let runs = units.runs;
            costs.accumulated.extend((0..runs.len()).map(|run| {
                let units = runs.units(run).map(|number| self.unit_cost(&units, units.at(number)));
                units.sum::<u64>()
            }));
            for place in (0..units.places()).rev() {
                let sequence = units.sequence(place);
                let cost = (self.rows_of(sequence).min(MERGED_ROWS) * units.parts(place)) as u64;
                let merges = units.heads * merges(self.rows_of(sequence));
                costs.merged.extend(core::iter::repeat_n(cost, merges));
            }
        }
        costs
    }

    /// Returns the cost of a task: the keys that each of its rows sees, and reading all of them.
    fn task_cost(&self, task: &Task) -> u64 {
        let sequence = self.sequence(task.sequence);
        let (mut pairs, mut first, mut end) = (0u64, usize::MAX, 0);
        for row in task.rows.clone() {
            let position = sequence.offset.saturating_add_unsigned(row % sequence.q_len);
            let (from, to) = self.visible.keys(position, sequence.kv_len).key_range();
            if from < to {
                pairs = pairs.saturating_add((to - from) as u64);
                (first, end) = (first.min(from), end.max(to));
            }
        }
        pairs.saturating_add(READING.saturating_mul(end.saturating_sub(first) as u64))
    }

    /// Returns the cost of a unit, for all the sequences that share its block.
    fn unit_cost(&self, units: &Units<'_>, unit: Unit) -> u64 {
        let kv_len = self.sequence(units.sequence(unit.place)).kv_len;
        let read = KEY_BLOCK.min(kv_len.saturating_sub(units.first_key(unit))) as u64;
        let sequences = units.sharers(unit).map(|place| units.sequence(place));
        let rows: u64 = sequences.map(|sequence| self.rows_of(sequence) as u64).sum();
        // Few rows take the time of memory.
        read * (rows.max(LANES as u64) + READING)
    }
}
