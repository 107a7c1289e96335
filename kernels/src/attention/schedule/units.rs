//! Units of split-KV: key blocks of a call, numbered in the order in which their memory lies, and the runs in which they are
//! handed out. Blocks that several sequences share, a common prefix, are numbered once.

use crate::attention::call::{Call, RowSet, SplitSequence};
use crate::attention::schedule::accumulation::Accumulation;
use crate::attention::schedule::split_sequences::{
    MERGED_ROWS, Runs, SplitRows, SplitSequences, merges_of, part_floats,
};
use crate::tensor::rows::KEY_BLOCK;
use core::ops::Range;

/// Key blocks of all entries and heads, in the order in which their memory lies.
#[derive(Clone, Copy)]
pub(crate) struct Units<'a> {
    /// Number of key/value heads.
    pub(crate) heads: usize,
    /// Runs that the units are handed out in.
    pub(crate) runs: Runs,
    /// Largest number of rows of an entry.
    pub(crate) most_rows: usize,
    entries: &'a [SplitSequence],
    order: Order,
}

/// Order of units within an entry.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Order {
    /// All blocks of a head, then the next head.
    Heads,
    /// A block of every head, then the next block.
    Blocks,
}

/// Unit: a key block of an entry of the [list](SplitSequences) and a head, by its place among the blocks of the entry.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Unit {
    pub(crate) entry: usize,
    pub(crate) head: usize,
    pub(crate) block: usize,
}

impl<'a> Units<'a> {
    /// Returns the units of the sequences of a call that are split. They are listed in `entries`, which grows as needed and is
    /// kept. `None` if there is no memory for that, or if partial results are not few.
    pub(crate) fn of(call: &Call<'_>, split: SplitRows, entries: &'a mut SplitSequences) -> Option<Self> {
        entries.try_fill(call, split)?;
        let order = if call.kv.has_heads_inside() { Order::Blocks } else { Order::Heads };
        let (heads, runs) = (call.kv.kv_heads(), entries.runs());
        let units = Self { heads, runs, most_rows: split.most_rows, entries: entries.list(), order };
        let work = Accumulation::of(call, (0..units.entries()).map(|entry| *units.entry(entry)));
        split.few_bytes.is_none_or(|few| work.is_few(few)).then_some(units)
    }

    /// Number of floats of all parts.
    pub(crate) fn floats(&self) -> usize {
        self.entries.last().map_or(0, |end| end.first_float)
    }

    /// Number of key blocks that are units of another sequence, all sequences together.
    pub(crate) fn shared_blocks(&self) -> usize {
        self.entries.iter().map(|entry| entry.shared).sum()
    }

    pub(crate) fn len(&self) -> usize {
        self.entries.last().map_or(0, |end| end.first_unit)
    }

    /// Number of entries.
    pub(crate) fn entries(&self) -> usize {
        self.entries.len().saturating_sub(1)
    }

    /// Returns an entry.
    #[inline]
    pub(crate) fn entry(&self, entry: usize) -> &SplitSequence {
        &self.entries[..self.entries()][entry]
    }

    /// Returns all rows of some entries, at least one, that share a key/value head, and the blocks of the
    /// first. Rows of several entries meet blocks that all of them see wholly.
    pub(crate) fn rows_of(&self, entries: Range<usize>, kv_head: usize) -> RowSet<'a> {
        let rows = 0..entries.clone().map(|entry| self.entry(entry).rows).sum();
        let SplitSequence { sequence, blocks, .. } = &self.entries[entries.start];
        RowSet { sequence: *sequence, others: &self.entries[entries][1..], kv_head, rows, blocks: Some(blocks) }
    }

    /// Returns the first key of a unit's block.
    #[inline]
    pub(crate) fn first_key(&self, unit: Unit) -> usize {
        self.entry(unit.entry).blocks.at(unit.block) * KEY_BLOCK
    }

    /// Returns the unit with this number, which is below [`Self::len`].
    pub(crate) fn at(&self, unit: usize) -> Unit {
        debug_assert!(unit < self.len(), "unit {unit} of {}", self.len());
        let entry = self.entries.partition_point(|entry| entry.first_unit <= unit) - 1;
        let SplitSequence { first_unit, shared, .. } = self.entries[entry];
        let unit = unit - first_unit;
        let (head, block) = match self.order {
            Order::Heads => {
                let blocks = (self.entries[entry + 1].first_unit - first_unit) / self.heads;
                (unit / blocks, unit % blocks)
            }
            Order::Blocks => (unit % self.heads, unit / self.heads),
        };
        Unit { entry, head, block: shared + block }
    }

    /// Returns the entries that a unit's block belongs to: its own, and those after it that share the block.
    pub(crate) fn sharers(&self, Unit { entry, block, .. }: Unit) -> Range<usize> {
        let others = self.entries[entry + 1..].iter().take_while(|other| block < other.shared);
        entry..entry + 1 + others.count()
    }

    /// Returns the offset of the part that a unit is accumulated into among all parts; their outputs are `width` floats a row.
    ///
    /// # Panics
    /// If the unit is none of the entries'.
    #[inline]
    pub(crate) fn offset(&self, unit: Unit, width: usize) -> usize {
        let entry = self.entry(unit.entry);
        let &SplitSequence { first_float, blocks, rows, in_order, .. } = entry;
        assert!(unit.block < blocks.len() && unit.head < self.heads, "{unit:?} is none of the entries'");
        let part = if in_order { 0 } else { unit.block };
        first_float + (unit.head * entry.parts() + part) * part_floats(rows, width)
    }
}

impl<'a> Units<'a> {
    /// Number of merges; some may have no rows.
    pub(crate) fn merges(&self) -> usize {
        // `SplitSequences::try_fill` has checked that this does not overflow.
        self.entries() * self.heads * merges_of(self.most_rows)
    }

    /// Returns the merge with this number, which is below [`Self::merges`], if it has rows.
    pub(crate) fn merge(&self, number: usize) -> Option<Merge<'a>> {
        let chunks = merges_of(self.most_rows);
        let (number, chunk) = (number / chunks, number % chunks);
        let (entry, head) = (number / self.heads, number % self.heads);
        let first = chunk * MERGED_ROWS;
        let rows = first..self.entry(entry).rows.min(first + MERGED_ROWS);
        let rows = RowSet { rows, ..self.rows_of(entry..entry + 1, head) };
        (!rows.rows.is_empty()).then_some(Merge { entry, rows })
    }
}

/// Rows of an entry and key/value head with parts that are merged together, and the entry.
pub(crate) struct Merge<'a> {
    pub(crate) entry: usize,
    pub(crate) rows: RowSet<'a>,
}
