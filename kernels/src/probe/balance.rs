//! Balance of a call's work: how busy each worker is, by a model in which time is work.

use crate::attention::call::outputs::Outputs;
use crate::attention::call::{Call, RowSet};
use crate::attention::schedule::split_sequences::{SplitRows, SplitSequences};
use crate::attention::schedule::units::{Merge, Unit, Units};
use crate::attention::schedule::work::{Schedule, Work};
use crate::attention::scratch::Tiling;
use crate::simd::LANES;
use crate::tensor::rows::KEY_BLOCK;
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Cost of reading or packing a key, in query rows.
const KEY_COST: u64 = 3;

/// Returns how busy each of `workers` workers is with a call under a tiling, where the sequences with few rows are split if
/// `split` says so: the fraction of the call's time in which it works rather than waits for the last to finish, if all are
/// equally fast and work from the start. Workers that find nothing to do are left out. 0 workers count as 1.
///
/// Work is counted in visible pairs of query rows and keys, and in reading or packing keys; masks and functions do not count.
///
/// Complexity: query rows, and units.
pub fn balance(call: &Call<'_>, tiling: &Tiling, split: Option<SplitRows>, workers: usize) -> Vec<f64> {
    let [accumulated, merged] = costs(call, tiling, split);
    let mut done = vec![0; workers.max(1).min(accumulated.len().max(merged.len()))];
    // Nobody merges before all is accumulated.
    let [accumulating, merging] = [accumulated, merged].map(|costs| take_in_turn(&costs, &mut done) as f64);
    let time = accumulating + merging;
    done.into_iter().filter(|&done| done > 0).map(|done| done as f64 / time).collect()
}

/// Lets each worker take the next piece of work as soon as it is done with the one before. Adds what they do to `done`, and
/// returns the time until the last is done.
fn take_in_turn(costs: &[u64], done: &mut [u64]) -> u64 {
    let mut free: BinaryHeap<_> = (0..done.len()).map(|worker| Reverse((0, worker))).collect();
    for &cost in costs {
        let Some(Reverse((time, worker))) = free.pop() else { break };
        done[worker] = u64::saturating_add(done[worker], cost);
        free.push(Reverse((u64::saturating_add(time, cost), worker)));
    }
    free.into_iter().map(|Reverse((time, _))| time).max().unwrap_or(0)
}

/// Returns the costs of all that workers take, in the order in which they take it, in visible pairs of a query row and a key
/// (`u64::MAX` on overflow): of tasks, then runs of key blocks; and of merges, which begin when all of that is done.
fn costs(call: &Call<'_>, tiling: &Tiling, split: Option<SplitRows>) -> [Vec<u64>; 2] {
    let mut entries = SplitSequences::new();
    let units = split.and_then(|split| Units::of(call, split, &mut entries));
    let schedule = Schedule::new(call, &Outputs::NONE, tiling, units);
    let accumulated = (0..schedule.len()).map(|number| match schedule.work(call, number) {
        Work::Rows(rows) => cost_of_rows(call, &rows),
        Work::Blocks(run) => {
            schedule.units.map_or(0, |units| run.map(|unit| cost_of_unit(call, &units, units.at(unit))).sum())
        }
        Work::KeyWeightSums { .. } => 0,
    });
    let merged = schedule.units.map_or(Vec::new(), |units| {
        let merges = (0..units.merges()).filter_map(|number| units.merge(number));
        merges.map(|Merge { entry, rows }| (rows.rows.len() * units.entry(entry).parts()) as u64).collect()
    });
    [accumulated.collect(), merged]
}

/// Returns the cost of rows of one sequence: the keys that each of them sees, and reading all of these.
fn cost_of_rows(call: &Call<'_>, set: &RowSet<'_>) -> u64 {
    let sequence = call.sequence(set.sequence);
    let (mut pairs, mut kept, mut first, mut end) = (0u64, 0, usize::MAX, 0);
    for row in set.rows.clone() {
        let keys = call.keys_of_row(&sequence, row % sequence.q_len);
        kept = kept.max(keys.prefix);
        if keys.start < keys.end {
            (first, end) = (first.min(keys.start), end.max(keys.end));
        }
        pairs = pairs.saturating_add((keys.prefix + keys.end.saturating_sub(keys.start)) as u64);
    }
    let read = kept + end.saturating_sub(first.max(kept));
    pairs.saturating_add(KEY_COST.saturating_mul(read as u64))
}

/// Returns the cost of a unit, for all the sequences that share its block.
fn cost_of_unit(call: &Call<'_>, units: &Units<'_>, unit: Unit) -> u64 {
    let kv_len = call.sequence(units.entry(unit.entry).sequence).kv_len;
    let read = KEY_BLOCK.min(kv_len.saturating_sub(units.first_key(unit))) as u64;
    let sequences = units.sharers(unit).map(|entry| units.entry(entry).sequence);
    let rows: u64 = sequences.map(|sequence| call.rows_of(sequence) as u64).sum();
    // Few rows are memory-bound.
    read * (rows.max(LANES as u64) + KEY_COST)
}
