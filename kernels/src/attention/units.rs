//! Units of split-KV: key blocks of a call, numbered in the order in which their memory lies.

use crate::kv::source::KeyValues;

/// Key blocks of all sequences and heads, in the order in which their memory lies.
pub(crate) struct Units<'a> {
    /// Number of key/value heads.
    pub(crate) heads: usize,
    /// Start of each sequence, then the end of the last.
    starts: &'a [Start],
    order: Order,
}

/// Start of a sequence: what the sequences before it take.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Start {
    /// Number of units.
    pub(crate) units: usize,
    /// Number of floats that these accumulate.
    pub(crate) floats: usize,
}

impl Start {
    /// Returns the start of what follows `more`; `None` if a number overflows.
    pub(crate) fn plus(self, more: Self) -> Option<Self> {
        let (units, floats) = (self.units.checked_add(more.units)?, self.floats.checked_add(more.floats)?);
        Some(Self { units, floats })
    }
}

/// Order of units within a sequence.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Order {
    /// All blocks of a head, then the next head.
    Heads,
    /// A block of every head, then the next block.
    Blocks,
}

/// Unit: a key block of a sequence and head, counted from the first block that the sequence has units for.
#[derive(Clone, Copy)]
pub(crate) struct Unit {
    pub(crate) sequence: usize,
    pub(crate) head: usize,
    pub(crate) block: usize,
}

impl<'a> Units<'a> {
    pub(crate) fn new(kv: &KeyValues<'_>, starts: &'a [Start]) -> Self {
        let order = if kv.has_heads_inside() { Order::Blocks } else { Order::Heads };
        Self { heads: kv.kv_heads(), starts, order }
    }

    pub(crate) fn len(&self) -> usize {
        self.starts.last().map_or(0, |end| end.units)
    }

    /// Number of key blocks that a sequence has units for.
    pub(crate) fn blocks(&self, sequence: usize) -> usize {
        (self.starts[sequence + 1].units - self.starts[sequence].units) / self.heads.max(1)
    }

    /// Returns the unit with this number, which is below [`Self::len`].
    pub(crate) fn at(&self, unit: usize) -> Unit {
        debug_assert!(unit < self.len(), "unit {unit} of {}", self.len());
        let sequence = self.starts.partition_point(|start| start.units <= unit) - 1;
        let (unit, blocks) = (unit - self.starts[sequence].units, self.blocks(sequence));
        let (head, block) = match self.order {
            Order::Heads => (unit / blocks, unit % blocks),
            Order::Blocks => (unit % self.heads, unit / self.heads),
        };
        Unit { sequence, head, block }
    }

    /// Returns the offset of a unit's part among all parts, if each part of its sequence is `part` floats.
    pub(crate) fn offset(&self, Unit { sequence, head, block }: Unit, part: usize) -> usize {
        self.starts[sequence].floats + (head * self.blocks(sequence) + block) * part
    }
}
