//! Sequences with key blocks that are divided among workers, in an order that makes those with a common prefix neighbours:
//! blocks that several sequences share are computed once for all of them.

use crate::attention::call::blocks::Blocks;
use crate::attention::call::selection::KeyList;
use crate::attention::call::{Call, SplitSequence};
use crate::attention::scratch::MAX_ROW_BLOCK;
use crate::simd::LANES;
use crate::tensor::rows::KEY_BLOCK;
use core::cmp::Ordering;
use core::ops::Range;

/// Sequences that are split into units, and how the units are handed out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SplitRows {
    /// Largest number of rows a key/value head of a sequence that is split.
    pub most_rows: usize,
    /// Number of runs that the units are handed out in, about.
    pub runs: usize,
    /// Bytes of partial results that are always few enough: with more than these and than a small share of what is read, nothing
    /// is split. `None`: any number of bytes is.
    pub few_bytes: Option<usize>,
    /// What follows when all units are accumulated.
    pub then: Then,
}

/// What follows when all units are accumulated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Then {
    /// Each row's parts are merged and written to the outputs.
    Merge,
    /// Parts of blocks stay apart.
    Apart,
}

/// Equal runs of units.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Runs {
    /// Number of units of all runs.
    units: usize,
    /// Number of units of a run.
    run: usize,
}

impl Runs {
    /// Cuts units into at most `runs` runs.
    pub(crate) const fn new(units: usize, runs: usize) -> Self {
        let run = units.div_ceil(if runs == 0 { 1 } else { runs });
        Self { units, run: if run == 0 { 1 } else { run } }
    }

    /// Number of runs.
    pub(crate) fn len(self) -> usize {
        self.units.div_ceil(self.run)
    }

    /// Returns the numbers of a run's units.
    pub(crate) fn units(self, run: usize) -> Range<usize> {
        run * self.run..self.units.min((run + 1) * self.run)
    }

    /// Returns true if one run has all of these units.
    pub(crate) fn together(self, units: Range<usize>) -> bool {
        units.is_empty() || units.start / self.run == (units.end - 1) / self.run
    }
}

impl SplitSequence {
    /// End of the last entry: no sequence.
    const END: Self = Self {
        sequence: usize::MAX,
        rows: 0,
        blocks: Blocks::all(0),
        shared: 0,
        in_order: false,
        first_unit: 0,
        first_float: 0,
    };

    /// Creates the entry of a sequence that comes first and shares nothing.
    pub(crate) fn new(call: &Call<'_>, sequence: usize) -> Self {
        let (rows, seq) = (call.rows_of(sequence), call.sequence(sequence));
        // Of the longest list: units beyond a shorter one have no keys.
        let lists = (0..call.kv.kv_heads()).filter_map(|head| call.key_list(sequence, head, &(0..rows), &seq));
        let blocks = match lists.map(KeyList::len).max() {
            Some(keys) => Blocks::all(keys),
            None => call.blocks(sequence, &seq, 0..rows),
        };
        Self { sequence, rows, blocks, ..Self::END }
    }

    /// Returns the number of parts of each head.
    pub(crate) fn parts(&self) -> usize {
        if self.in_order { 1 } else { self.blocks.len() }
    }
}

/// Factor of the number of runs where sequences share key blocks: the work of a unit then depends on how many they are.
const SHARED_RUNS: usize = 4;

/// Sequences with few rows, in an order in which those with a common prefix are neighbours, and the runs of their units.
#[derive(Debug)]
pub(crate) struct SplitSequences {
    /// The entries in order, then the end of the last.
    list: Vec<SplitSequence>,
    runs: Runs,
}

impl SplitSequences {
    /// Creates an empty list; the first use allocates.
    pub(crate) const fn new() -> Self {
        Self { list: Vec::new(), runs: Runs::new(0, 0) }
    }

    /// Number of bytes held.
    pub(crate) fn bytes(&self) -> usize {
        self.list.capacity() * size_of::<SplitSequence>()
    }

    /// Number of bytes that the list of a number of sequences takes; `usize::MAX` if it overflows.
    pub(crate) const fn bytes_for(sequences: usize) -> usize {
        sequences.saturating_add(1).saturating_mul(size_of::<SplitSequence>())
    }

    /// Fills the list with the sequences of 1 to `most_rows` rows a key/value head, and cuts their units into about `runs`
    /// runs. Returns the number of floats of all parts; `None` if a number overflows or there is no memory.
    ///
    /// Complexity: n log n comparisons of sequences, each as long as their common prefix in key blocks.
    pub(crate) fn try_fill(&mut self, call: &Call<'_>, split_rows: SplitRows) -> Option<usize> {
        let SplitRows { most_rows, runs, then, .. } = split_rows;
        self.list.clear();
        let sequences = || call.split_sequences(most_rows);
        // Exact: `Self::bytes_for` says how much is held.
        self.list.try_reserve_exact(sequences().count().checked_add(1)?).ok()?;
        self.list.extend(sequences().map(|sequence| SplitSequence::new(call, sequence)));
        if call.may_share_keys() {
            // First all blocks that might be shared, then those that are.
            for entry in &mut self.list {
                entry.shared = entry.blocks.leading().min(call.sequence(entry.sequence).kv_len / KEY_BLOCK);
            }
            self.list.sort_unstable_by(|a, b| common_blocks(call, a, b).1.then(a.sequence.cmp(&b.sequence)));
            for i in (1..self.list.len()).rev() {
                self.list[i].shared = common_blocks(call, &self.list[i - 1], &self.list[i]).0;
            }
            if let Some(first) = self.list.first_mut() {
                first.shared = 0;
            }
            self.limit_rows();
        }
        let finer = if runs > 1 && self.list.iter().any(|entry| entry.shared > 0) { SHARED_RUNS } else { 1 };
        // Merges are numbered, too.
        self.list.len().checked_mul(call.kv.kv_heads())?.checked_mul(merges_of(most_rows))?;
        let units = self.number_units(call.kv.kv_heads())?;
        self.runs = Runs::new(units, runs.saturating_mul(finer));
        let floats = self.lay_out_parts(call, units, then)?;
        self.list.push(SplitSequence { first_unit: units, first_float: floats, ..SplitSequence::END });
        Some(floats)
    }

    /// Returns the entries in order, then the end of the last.
    pub(crate) fn list(&self) -> &[SplitSequence] {
        &self.list
    }

    /// Returns the runs that the units of the entries are handed out in.
    pub(crate) fn runs(&self) -> Runs {
        self.runs
    }

    /// Numbers the units of the entries, for each of `heads` heads. Returns their number; `None` if it overflows.
    fn number_units(&mut self, heads: usize) -> Option<usize> {
        let mut units = 0usize;
        for entry in &mut self.list {
            entry.first_unit = units;
            units = (entry.blocks.len() - entry.shared).checked_mul(heads)?.checked_add(units)?;
        }
        Some(units)
    }

    /// Lays out the parts of the entries' `units` units one after the other. Returns the number of their floats; `None` if it
    /// overflows.
    fn lay_out_parts(&mut self, call: &Call<'_>, units: usize, then: Then) -> Option<usize> {
        let (heads, [_, value_dim]) = (call.kv.kv_heads(), call.kv.dims());
        let (mut first, mut floats) = (0, 0usize);
        while first < self.list.len() {
            // Entries that share blocks. All units of these blocks lie between the first entry's and the end of the last's.
            let sharing = self.list[first + 1..].iter().take_while(|entry| entry.shared > 0).count();
            let past = first + 1 + sharing;
            let end = self.list.get(past).map_or(units, |next| next.first_unit);
            // One part may be written by one worker only, and in order: by that of the run that has all the units; `Parts`
            // relies on it. Values in rows are read in runs of keys, which a block alone can be (`pv.rs`).
            let together = then == Then::Merge && self.runs.together(self.list[first].first_unit..end);
            let in_order = together && call.kv.has_value_panels();
            for entry in &mut self.list[first..past] {
                (entry.in_order, entry.first_float) = (in_order && entry.blocks.len() > 0, floats);
                let part = part_floats(entry.rows, value_dim.next_multiple_of(LANES));
                floats = entry.parts().checked_mul(heads)?.checked_mul(part)?.checked_add(floats)?;
            }
            first = past;
        }
        Some(floats)
    }

    /// Lets at most [`MAX_ROW_BLOCK`] rows share a block: where more would, a later entry reads it again.
    fn limit_rows(&mut self) {
        let mut rows = 0usize;
        for entry in &mut self.list {
            rows = if entry.shared == 0 { entry.rows } else { rows.saturating_add(entry.rows) };
            if rows > MAX_ROW_BLOCK {
                (entry.shared, rows) = (0, entry.rows);
            }
        }
    }
}

/// Returns the number of first key blocks that two entries have in the same memory, of those that `shared` says might be,
/// and the order of the entries by the memory of their blocks.
fn common_blocks(call: &Call<'_>, a: &SplitSequence, b: &SplitSequence) -> (usize, Ordering) {
    let most = (a.shared.min(b.shared), a.shared.cmp(&b.shared));
    // Tensors that may share memory share all of it.
    if call.kv.tensors().is_some() {
        return most;
    }
    let sources = [a, b].map(|entry| call.sequence(entry.sequence).source);
    let orders = (0..a.shared.min(b.shared)).map(|block| call.kv.compare_memory(sources, block));
    orders.enumerate().find(|(_, order)| order.is_ne()).unwrap_or(most)
}

/// Number of rows with parts that are merged together: a vector of rows.
pub(crate) const MERGED_ROWS: usize = LANES;

/// Returns the number of merges of the parts of `rows` rows; one if there are none.
pub(crate) fn merges_of(rows: usize) -> usize {
    rows.div_ceil(MERGED_ROWS).max(1)
}

/// Number of floats of a part: maxima and sums in whole vectors, then rows of outputs.
pub(crate) fn part_floats(rows: usize, width: usize) -> usize {
    let padded = rows.checked_next_multiple_of(LANES).unwrap_or(usize::MAX);
    padded.saturating_mul(2).saturating_add(rows.saturating_mul(width))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_are_together_if_one_run_has_them() {
        for (all, runs) in (0..20).flat_map(|all| (0..9).map(move |runs| (all, runs))) {
            let cut = Runs::new(all, runs);
            for units in (0..=all).flat_map(|start| (start..=all).map(move |end| start..end)) {
                let run_of = |unit| (0..cut.len()).position(|run| cut.units(run).contains(&unit)).unwrap();
                let mut of_each = units.clone().map(run_of);
                let expected = of_each.next().is_none_or(|first| of_each.all(|run| run == first));
                assert_eq!(cut.together(units.clone()), expected, "{units:?} of {cut:?}");
            }
        }
    }
}
