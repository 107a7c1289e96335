//! Cost of each piece of a call's work, for plans.

use crate::attention::call::tiling::Tiling;
use crate::attention::call::{Call, RowSet};
use crate::attention::schedule::split_sequences::{SplitRows, SplitSequences};
use crate::attention::schedule::units::{Merge, Unit, Units};
use crate::attention::schedule::work::{Schedule, Work};
use crate::simd::LANES;
use crate::tensor::rows::KEY_BLOCK;

/// Cost of reading or packing a key, in query rows.
const READING: u64 = 3;

/// Costs of all that workers take one after the other, in the order in which they take it, in visible pairs of a query row
/// and a key; `u64::MAX` if one overflows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Costs {
    /// Costs of tasks, then of runs of key blocks.
    pub accumulated: Vec<u64>,
    /// Costs of merges, which begin when all of that is done.
    pub merged: Vec<u64>,
}

impl Call<'_> {
    /// Returns what the work of this call costs under a tiling, where the sequences with few rows are split if `split` says so.
    ///
    /// Complexity: query rows, and units.
    pub fn costs(&self, tiling: &Tiling, split: Option<SplitRows>) -> Costs {
        let mut entries = SplitSequences::new();
        let schedule = Schedule::new(self, tiling, split, &mut entries);
        let accumulated = (0..schedule.len()).map(|number| match schedule.work(self, number) {
            Work::Rows(rows) => self.cost_of_rows(&rows),
            Work::Blocks(run) => {
                schedule.units.map_or(0, |units| run.map(|unit| self.cost_of(&units, units.at(unit))).sum())
            }
            Work::KeyWeightSums { .. } => 0,
        });
        let accumulated = accumulated.collect();
        let merged = schedule.units.map_or(Vec::new(), |units| {
            let merges = (0..units.merges()).filter_map(|number| units.merge(number));
            merges.map(|Merge { entry, rows }| (rows.rows.len() * units.entry(entry).parts()) as u64).collect()
        });
        Costs { accumulated, merged }
    }

    /// Returns the number of keys, counted once for each key/value head, that split-KV does not read again, because other
    /// sequences have them in the same memory.
    pub fn shared_keys(&self, tiling: &Tiling, split: SplitRows) -> usize {
        let mut entries = SplitSequences::new();
        let shared =
            Schedule::new(self, tiling, Some(split), &mut entries).units.map_or(0, |units| units.shared_blocks());
        shared.saturating_mul(KEY_BLOCK).saturating_mul(self.kv.kv_heads())
    }

    /// Returns the cost of rows of one sequence: the keys that each of them sees, and reading all of these.
    fn cost_of_rows(&self, set: &RowSet<'_>) -> u64 {
        let sequence = self.sequence(set.sequence);
        let (mut pairs, mut kept, mut first, mut end) = (0u64, 0, usize::MAX, 0);
        for row in set.rows.clone() {
            let keys = self.keys_of_row(&sequence, row % sequence.q_len);
            kept = kept.max(keys.prefix);
            if keys.start < keys.end {
                (first, end) = (first.min(keys.start), end.max(keys.end));
            }
            pairs = pairs.saturating_add(keys.count() as u64);
        }
        let read = kept + end.saturating_sub(first.max(kept));
        pairs.saturating_add(READING.saturating_mul(read as u64))
    }

    /// Returns the cost of a unit, for all the sequences that share its block.
    fn cost_of(&self, units: &Units<'_>, unit: Unit) -> u64 {
        let kv_len = self.sequence(units.entry(unit.entry).sequence).kv_len;
        let read = KEY_BLOCK.min(kv_len.saturating_sub(units.first_key(unit))) as u64;
        let sequences = units.sharers(unit).map(|entry| units.entry(entry).sequence);
        let rows: u64 = sequences.map(|sequence| self.rows_of(sequence) as u64).sum();
        // Few rows take the time of memory.
        read * (rows.max(LANES as u64) + READING)
    }
}
