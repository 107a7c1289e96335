//! What split-KV of a call would accumulate and read, for plans; and which sequences may share key blocks.

use crate::attention::call::{Call, Sequence};
use crate::attention::schedule::partials::Partials;
use crate::attention::schedule::split_sequences::part_floats;
use crate::simd::LANES;
use core::ops::Range;

/// Amount of data that the units of a call accumulate under split-KV, and of keys that they read for it. Each number is
/// `usize::MAX` if it overflows.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Accumulation {
    /// Number of units.
    pub units: usize,
    /// Number of floats accumulated by all units together, if each has a part of its own.
    pub floats: usize,
    /// Number of floats accumulated if one worker does all of it: the blocks of a head that have value panels then have one
    /// part together.
    pub floats_of_one: usize,
    /// Number of keys read, counted once for each key/value head.
    pub keys: usize,
    /// Number of sequences.
    pub sequences: usize,
}

impl Accumulation {
    /// Returns the sum of two amounts.
    fn plus(self, more: Self) -> Self {
        Self {
            units: self.units.saturating_add(more.units),
            floats: self.floats.saturating_add(more.floats),
            floats_of_one: self.floats_of_one.saturating_add(more.floats_of_one),
            keys: self.keys.saturating_add(more.keys),
            sequences: self.sequences + more.sequences,
        }
    }

    /// Bytes that new [`Partials`] hold for it, if it is handed out in `runs` runs to be merged: an upper bound if values lie in
    /// panels and there are several runs and sequences, otherwise exact. `usize::MAX` if the number overflows.
    pub fn bytes(&self, runs: usize) -> usize {
        let floats = if runs > 1 { self.floats } else { self.floats_of_one };
        Partials::bytes_for(floats, self.sequences)
    }
}

impl Call<'_> {
    /// Returns how much the key blocks of the sequences with at most `most_rows` rows a key/value head would accumulate under
    /// split-KV, at most: maxima, sums and outputs of all the rows that share a head, for each block with a key that may be
    /// visible to some row of its sequence.
    pub fn accumulation(&self, most_rows: usize) -> Accumulation {
        let sequences = self.split_sequences(most_rows);
        sequences.map(|sequence| self.accumulation_of(sequence)).fold(Accumulation::default(), Accumulation::plus)
    }

    /// Returns the sequences that have rows, at most `most_rows` of which share a key/value head.
    pub(crate) fn split_sequences(&self, most_rows: usize) -> impl Iterator<Item = usize> {
        (0..self.sequence_count()).filter(move |&sequence| (1..=most_rows).contains(&self.rows_of(sequence)))
    }

    /// Returns true if at most `most_rows` rows of a sequence share a key/value head.
    pub(crate) fn is_split(&self, sequence: usize, most_rows: usize) -> bool {
        self.rows_of(sequence) <= most_rows
    }

    /// Returns what a sequence that has rows accumulates if it is split.
    fn accumulation_of(&self, sequence: usize) -> Accumulation {
        let (rows, heads, [_, value_dim]) = (self.rows_of(sequence), self.kv.kv_heads(), self.kv.dims());
        let blocks = self.blocks(sequence, &self.sequence(sequence), 0..rows);
        let units = heads.saturating_mul(blocks.len());
        let part = part_floats(rows, value_dim.next_multiple_of(LANES));
        let parts_of_one = if self.kv.has_value_panels() { units.min(heads) } else { units };
        Accumulation {
            units,
            floats: units.saturating_mul(part),
            floats_of_one: parts_of_one.saturating_mul(part),
            keys: heads.saturating_mul(blocks.keys()),
            sequences: 1,
        }
    }

    /// Returns true if every row of a sequence sees all of these keys by its length and the range rules. Positions of their
    /// own are not looked at: then it is false if there is any rule.
    pub(crate) fn sees_all(&self, sequence: usize, keys: Range<usize>) -> bool {
        if self.visible.hides_keys() && self.options.own_positions().is_some() {
            return false;
        }
        let Sequence { q_len, kv_len, offset, .. } = self.sequence(sequence);
        let last = offset.saturating_add_unsigned(q_len.saturating_sub(1));
        q_len == 0 || self.visible.shows_all(offset, last, kv_len, keys)
    }

    /// Returns true if sequences may have keys in the same memory.
    pub(crate) fn may_share_keys(&self) -> bool {
        let cumulative = self.options.ragged.is_some_and(|ragged| ragged.k.is_some());
        self.sequence_count() > 1 && !cumulative && self.kv.may_share_memory()
    }
}
