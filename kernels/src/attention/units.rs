//! Units of split-KV: key blocks of a call, numbered in the order in which their memory lies.

use crate::kv::source::KeyValues;

/// Key blocks of all sequences and heads, in the order in which their memory lies.
pub(crate) struct Units<'a> {
    /// Number of key/value heads.
    pub(crate) heads: usize,
    /// Number of each sequence's first unit, then the number of units.
    starts: &'a [usize],
    order: Order,
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
    pub(crate) fn new(kv: &KeyValues<'_>, starts: &'a [usize]) -> Self {
        let order = if kv.has_heads_inside() { Order::Blocks } else { Order::Heads };
        Self { heads: kv.kv_heads(), starts, order }
    }

    pub(crate) fn len(&self) -> usize {
        self.starts.last().copied().unwrap_or(0)
    }

    /// Number of key blocks that a sequence has units for.
    pub(crate) fn blocks(&self, sequence: usize) -> usize {
        (self.starts[sequence + 1] - self.starts[sequence]) / self.heads.max(1)
    }

    /// Returns the unit with this number, which is below [`Self::len`].
    pub(crate) fn at(&self, unit: usize) -> Unit {
        debug_assert!(unit < self.len(), "unit {unit} of {}", self.len());
        let sequence = self.starts.partition_point(|&start| start <= unit) - 1;
        let (unit, blocks) = (unit - self.starts[sequence], self.blocks(sequence));
        let (head, block) = match self.order {
            Order::Heads => (unit / blocks, unit % blocks),
            Order::Blocks => (unit % self.heads, unit / self.heads),
        };
        Unit { sequence, head, block }
    }

    /// Returns the index of a unit's part among all parts.
    pub(crate) fn number(&self, Unit { sequence, head, block }: Unit) -> usize {
        self.starts[sequence] + head * self.blocks(sequence) + block
    }
}
