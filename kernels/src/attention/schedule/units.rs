//! Units of split-KV: key blocks of a call, numbered in the order in which their memory lies, and the runs in which they are
//! handed out. Blocks that several sequences share, a common prefix, are numbered once.

use crate::attention::call::RowSet;
use crate::attention::schedule::places::{MERGED_ROWS, Place, Places, Runs, merges_of, part_floats};
use crate::kv::source::KeyValues;
use crate::tensor::rows::KEY_BLOCK;
use core::ops::Range;

/// Key blocks of all places and heads, in the order in which their memory lies.
#[derive(Clone, Copy)]
pub(crate) struct Units<'a> {
    /// Number of key/value heads.
    pub(crate) heads: usize,
    /// Runs that the units are handed out in.
    pub(crate) runs: Runs,
    /// Largest number of rows of a place.
    pub(crate) few: usize,
    places: &'a [Place],
    sequences: &'a [usize],
    order: Order,
}

/// Order of units within a place.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Order {
    /// All blocks of a head, then the next head.
    Heads,
    /// A block of every head, then the next block.
    Blocks,
}

/// Unit: a key block of a place and head, counted from the first block that the place's sequence sees.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Unit {
    pub(crate) place: usize,
    pub(crate) head: usize,
    pub(crate) block: usize,
}

impl<'a> Units<'a> {
    /// Returns the units of places of at most `few` rows.
    pub(crate) fn new(kv: &KeyValues<'_>, places: &'a Places, few: usize) -> Self {
        let order = if kv.has_heads_inside() { Order::Blocks } else { Order::Heads };
        let (heads, runs) = (kv.kv_heads(), places.runs());
        Self { heads, runs, few, places: places.list(), sequences: places.sequences(), order }
    }

    /// Number of floats of all parts.
    pub(crate) fn floats(&self) -> usize {
        self.places.last().map_or(0, |end| end.first_float)
    }

    /// Number of key blocks that are units of another sequence, all sequences together.
    pub(crate) fn shared_blocks(&self) -> usize {
        self.places.iter().map(|place| place.shared).sum()
    }

    pub(crate) fn len(&self) -> usize {
        self.places.last().map_or(0, |end| end.first_unit)
    }

    /// Number of places.
    pub(crate) fn places(&self) -> usize {
        self.places.len().saturating_sub(1)
    }

    #[inline]
    fn place(&self, place: usize) -> &Place {
        &self.places[..self.places()][place]
    }

    /// Returns the sequence at a place.
    pub(crate) fn sequence(&self, place: usize) -> usize {
        self.place(place).sequence
    }

    /// Returns all rows of some places, of which there is one at least, that share a key/value head.
    pub(crate) fn rows_of(&self, places: Range<usize>, kv_head: usize) -> RowSet<'a> {
        let rows = 0..places.clone().map(|place| self.rows(place)).sum();
        RowSet { sequence: self.sequences[places.start], others: &self.sequences[places][1..], kv_head, rows }
    }

    /// Returns the number of rows of a place that share a key/value head.
    #[inline]
    pub(crate) fn rows(&self, place: usize) -> usize {
        self.place(place).rows
    }

    /// Returns true if all blocks of a head of a place are accumulated into one part, by one worker, in order; false if each
    /// has a part. It is the same for places that share blocks.
    #[inline]
    pub(crate) fn in_order(&self, place: usize) -> bool {
        self.place(place).in_order
    }

    /// Returns the number of parts of each head of a place.
    pub(crate) fn parts(&self, place: usize) -> usize {
        self.place(place).parts()
    }

    /// Returns the first key of a unit's block.
    #[inline]
    pub(crate) fn first_key(&self, unit: Unit) -> usize {
        (self.place(unit.place).first_block + unit.block) * KEY_BLOCK
    }

    /// Returns the unit with this number, which is below [`Self::len`].
    pub(crate) fn at(&self, unit: usize) -> Unit {
        debug_assert!(unit < self.len(), "unit {unit} of {}", self.len());
        let place = self.places.partition_point(|place| place.first_unit <= unit) - 1;
        let Place { first_unit, shared, .. } = self.places[place];
        let unit = unit - first_unit;
        let (head, block) = match self.order {
            Order::Heads => {
                let blocks = (self.places[place + 1].first_unit - first_unit) / self.heads;
                (unit / blocks, unit % blocks)
            }
            Order::Blocks => (unit % self.heads, unit / self.heads),
        };
        Unit { place, head, block: shared + block }
    }

    /// Returns the places that a unit's block belongs to: its own, and those after it that share the block.
    pub(crate) fn sharers(&self, Unit { place, block, .. }: Unit) -> Range<usize> {
        let others = self.places[place + 1..].iter().take_while(|other| block < other.shared);
        place..place + 1 + others.count()
    }

    /// Returns the offset of the part that a unit is accumulated into among all parts, whose outputs are `width` floats a row.
    ///
    /// # Panics
    /// If the unit is none of the places'.
    #[inline]
    pub(crate) fn offset(&self, unit: Unit, width: usize) -> usize {
        let place = self.place(unit.place);
        let &Place { first_float, blocks, rows, in_order, .. } = place;
        assert!(unit.block < blocks && unit.head < self.heads, "{unit:?} is none of the places'");
        let part = if in_order { 0 } else { unit.block };
        first_float + (unit.head * place.parts() + part) * part_floats(rows, width)
    }
}

impl Units<'_> {
    /// Number of merges, of which some may have no rows.
    pub(crate) fn merges(&self) -> usize {
        // `Places::try_fill` has checked that this does not overflow.
        self.places() * self.heads * merges_of(self.few)
    }

    /// Returns the merge with this number, which is below [`Self::merges`], if it has rows, or is the first of its place and
    /// head.
    pub(crate) fn merge(&self, number: usize) -> Option<Merge> {
        let chunks = merges_of(self.few);
        let (number, chunk) = (number / chunks, number % chunks);
        let (place, head) = (number / self.heads, number % self.heads);
        let first = chunk * MERGED_ROWS;
        let rows = first..self.rows(place).min(first + MERGED_ROWS);
        let rows = RowSet::of(self.sequence(place), head, rows);
        (chunk == 0 || !rows.rows.is_empty()).then_some(Merge { place, rows })
    }
}

/// Rows of a place and key/value head whose parts are merged together, and the place.
pub(crate) struct Merge {
    pub(crate) place: usize,
    pub(crate) rows: RowSet<'static>,
}
