//! What split-KV of a call would accumulate and read, for plans; and which sequences may share key blocks.

use crate::attention::call::{Call, Sequence, SplitSequence};
use crate::attention::schedule::split_sequences::{SplitSequences, part_floats};
use crate::simd::LANES;
use crate::simd::aligned::AlignedBuf;
use core::ops::Range;

/// Partial results are few if they take at most 1/`SHARE` of the bytes of the keys and values that are read, counted as `f32`, and
/// never if they take more than [`MOST`] bytes.
const SHARE: usize = 16;
const MOST: usize = 1 << 30;

/// Amount of data that the units of a call accumulate under split-KV, and of keys that they read for it. Each number is
/// `usize::MAX` if it overflows.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Accumulation {
    /// Number of units.
    pub units: usize,
    /// Number of floats accumulated by all units together, if each has a separate part.
    pub floats: usize,
    /// Number of floats accumulated if one worker does all of it: the blocks of a head that have value panels then have one
    /// part together.
    pub floats_of_one: usize,
    /// Number of floats of the keys and values that are read, counted once for each key/value head.
    read: usize,
    /// Number of sequences.
    pub sequences: usize,
}

impl Accumulation {
    /// Returns what the sequences that are split accumulate.
    pub(crate) fn of(call: &Call<'_>, entries: impl Iterator<Item = SplitSequence>) -> Self {
        entries.map(|entry| Self::of_sequence(call, &entry)).fold(Self::default(), Self::plus)
    }

    /// Returns what a sequence that has rows accumulates.
    fn of_sequence(call: &Call<'_>, entry: &SplitSequence) -> Self {
        let (heads, [head_dim, value_dim]) = (call.kv.kv_heads(), call.kv.dims());
        let (units, keys) = (heads.saturating_mul(entry.blocks.len()), entry.blocks.keys());
        let part = part_floats(entry.rows, value_dim.next_multiple_of(LANES));
        let parts_of_one = if call.kv.has_value_panels() { units.min(heads) } else { units };
        Self {
            units,
            floats: units.saturating_mul(part),
            floats_of_one: parts_of_one.saturating_mul(part),
            read: heads.saturating_mul(keys).saturating_mul(head_dim + value_dim),
            sequences: 1,
        }
    }

    /// Returns true if there are units, and the parts of all, one for each, take few bytes: at most `few`, or a small share of what
    /// is read.
    pub fn is_few(&self, few: usize) -> bool {
        let [parts, read] = [self.floats, self.read].map(|floats| floats.saturating_mul(size_of::<f32>()));
        self.units > 0 && parts <= few.max(read / SHARE).min(MOST)
    }

    /// Returns what is accumulated if blocks are not merged: each has a part.
    #[must_use]
    pub fn apart(self) -> Self {
        Self { floats_of_one: self.floats, ..self }
    }

    /// Returns the sum of two amounts.
    fn plus(self, more: Self) -> Self {
        Self {
            units: self.units.saturating_add(more.units),
            floats: self.floats.saturating_add(more.floats),
            floats_of_one: self.floats_of_one.saturating_add(more.floats_of_one),
            read: self.read.saturating_add(more.read),
            sequences: self.sequences + more.sequences,
        }
    }

    /// Bytes that new partial results hold for it, if it is handed out in `runs` runs to be merged: an upper bound if values lie in
    /// panels and there are several runs and sequences, otherwise exact. `usize::MAX` if the number overflows.
    pub fn bytes(&self, runs: usize) -> usize {
        let floats = if runs > 1 { self.floats } else { self.floats_of_one };
        AlignedBuf::bytes_for(with_room(floats)).saturating_add(SplitSequences::bytes_for(self.sequences))
    }
}

/// Number of floats to reserve for `floats`: half of that again, if there is memory, because sequences grow.
pub(crate) const fn with_room(floats: usize) -> usize {
    floats.saturating_add(floats / 2)
}

impl Call<'_> {
    /// Returns how much the key blocks of the sequences with at most `most_rows` rows a key/value head would accumulate under
    /// split-KV, at most: maxima, sums and outputs of all the rows that share a head, for each block with a key that may be
    /// visible to some row of its sequence.
    pub fn accumulation(&self, most_rows: usize) -> Accumulation {
        let sequences = self.split_sequences(most_rows);
        Accumulation::of(self, sequences.map(|sequence| SplitSequence::new(self, sequence)))
    }

    /// Returns the sequences with 1 to `most_rows` rows for a key/value head.
    pub(crate) fn split_sequences(&self, most_rows: usize) -> impl Iterator<Item = usize> {
        let few = move |&sequence: &usize| (1..=most_rows).contains(&self.rows_of(sequence));
        (0..self.sequence_count()).filter(few).filter(|&sequence| self.shares_keys(sequence))
    }

    /// Returns true if at most `most_rows` rows of a sequence share a key/value head, and they share their keys.
    pub(crate) fn is_split(&self, sequence: usize, most_rows: usize) -> bool {
        self.rows_of(sequence) <= most_rows && self.shares_keys(sequence)
    }

    /// Returns true if all rows of a sequence that share a key/value head select the same keys, or none selects any.
    fn shares_keys(&self, sequence: usize) -> bool {
        self.options.selected.is_none() || self.row_order(self.sequence(sequence).q_len).lists() <= 1
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
        let own = self.options.selected.is_some();
        let cumulative = self.options.ragged.is_some_and(|ragged| ragged.k.is_some());
        self.sequence_count() > 1 && !cumulative && !own && self.kv.may_share_memory()
    }
}
