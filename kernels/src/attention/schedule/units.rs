//! Units of split-KV: key blocks of a call, numbered in the order in which their memory lies. Blocks that several
//! sequences share, a common prefix, are numbered once.

use crate::attention::call::tiling::MAX_ROW_BLOCK;
use crate::attention::call::{Call, Sequence};
use crate::attention::schedule::runs::{FewRows, Runs};
use crate::kv::source::KeyValues;
use crate::simd::LANES;
use crate::tensor::rows::KEY_BLOCK;
use core::cmp::Ordering;
use core::ops::Range;

/// Sequence whose key blocks are units, or parts of other sequences' units.
#[derive(Debug, Clone, Copy)]
struct Place {
    /// Index of the sequence in the call.
    sequence: usize,
    /// Number of its rows that share a key/value head.
    rows: usize,
    /// First key block that may be visible to it, and the number of those that may be.
    first_block: usize,
    blocks: usize,
    /// Number of its first key blocks that lie in the same memory as those of the place before this one.
    shared: usize,
    /// True if all blocks of a head are accumulated into one part, in order; false if each has a part, or there are none.
    in_order: bool,
    /// Number of units of the places before this one, and of floats of their parts.
    first_unit: usize,
    first_float: usize,
}

impl Place {
    /// End of the last place: no sequence.
    const END: Self = Self {
        sequence: usize::MAX,
        rows: 0,
        first_block: 0,
        blocks: 0,
        shared: 0,
        in_order: false,
        first_unit: 0,
        first_float: 0,
    };

    /// Creates the place of a sequence that comes first and shares nothing.
    fn new(call: &Call<'_>, sequence: usize) -> Self {
        let (rows, visible) = (call.rows_of(sequence), call.visible_blocks(sequence));
        Self { sequence, rows, first_block: visible.start, blocks: visible.len(), ..Self::END }
    }

    /// Returns the number of parts of each head.
    fn parts(&self) -> usize {
        if self.in_order { 1 } else { self.blocks }
    }
}

/// Factor of the number of runs where sequences share key blocks: the work of a unit then depends on how many they are.
const SHARED_RUNS: usize = 4;

/// Sequences with few rows, in an order in which those with a common prefix are neighbours, and the runs of their units.
#[derive(Debug)]
pub(crate) struct Places {
    /// The places in order, then the end of the last.
    list: Vec<Place>,
    runs: Runs,
}

impl Places {
    /// Creates an empty list; the first use allocates.
    pub(crate) const fn new() -> Self {
        Self { list: Vec::new(), runs: Runs::new(0, 0) }
    }

    /// Number of bytes held.
    pub(crate) fn bytes(&self) -> usize {
        self.list.capacity() * size_of::<Place>()
    }

    /// Fills the list with the sequences of at most `few` rows a key/value head, and cuts their units into about `runs` runs.
    /// Returns the number of floats of all parts; `None` if a number overflows or there is no memory.
    ///
    /// Complexity: n log n comparisons of sequences, each as long as their common prefix in key blocks.
    pub(crate) fn try_fill(&mut self, call: &Call<'_>, FewRows { few, runs }: FewRows) -> Option<usize> {
        self.list.clear();
        self.list.try_reserve(call.sequences().checked_add(1)?).ok()?;
        let sequences = (0..call.sequences()).filter(|&sequence| call.has_few_rows(sequence, few));
        self.list.extend(sequences.map(|sequence| Place::new(call, sequence)));
        if call.may_share_keys() {
            // First all blocks that might be shared, then those that are.
            self.list.iter_mut().for_each(|place| place.shared = call.whole_blocks(place.sequence));
            self.list.sort_unstable_by(|a, b| common_blocks(call, a, b).1.then(a.sequence.cmp(&b.sequence)));
            for i in (1..self.list.len()).rev() {
                self.list[i].shared = common_blocks(call, &self.list[i - 1], &self.list[i]).0;
            }
            if let Some(first) = self.list.first_mut() {
                first.shared = 0;
            }
            self.limit_rows();
        }
        let finer = if runs > 1 && self.shared_blocks() > 0 { SHARED_RUNS } else { 1 };
        let units = self.number_units(call.kv.kv_heads())?;
        self.runs = Runs::new(units, runs.saturating_mul(finer));
        let floats = self.place_parts(call, units)?;
        self.list.push(Place { first_unit: units, first_float: floats, ..Place::END });
        Some(floats)
    }

    /// Numbers the units of the places, for each of `heads` heads. Returns their number; `None` if it overflows.
    fn number_units(&mut self, heads: usize) -> Option<usize> {
        let mut units = 0usize;
        for place in &mut self.list {
            place.first_unit = units;
            units = (place.blocks - place.shared).checked_mul(heads)?.checked_add(units)?;
        }
        Some(units)
    }

    /// Places the parts of the places' `units` units one after the other. Returns the number of their floats; `None` if it
    /// overflows.
    fn place_parts(&mut self, call: &Call<'_>, units: usize) -> Option<usize> {
        let (heads, [.., value_dim]) = (call.kv.kv_heads(), call.kv.v_shape());
        let (mut first, mut floats) = (0, 0usize);
        while first < self.list.len() {
            // Places that share blocks. All units of these blocks lie between the first place's and the end of the last's.
            let sharing = self.list[first + 1..].iter().take_while(|place| place.shared > 0).count();
            let past = first + 1 + sharing;
            let end = self.list.get(past).map_or(units, |next| next.first_unit);
            // One part may be written by one worker only, and in order: by that of the run that has all the units; `Split`
            // relies on it. Values in rows are read in runs of keys, which a block alone can be (`pv.rs`).
            let in_order = call.kv.has_value_panels() && self.runs.together(self.list[first].first_unit..end);
            for place in &mut self.list[first..past] {
                (place.in_order, place.first_float) = (in_order && place.blocks > 0, floats);
                let part = unit_floats(place.rows, value_dim.next_multiple_of(LANES));
                floats = place.parts().checked_mul(heads)?.checked_mul(part)?.checked_add(floats)?;
            }
            first = past;
        }
        Some(floats)
    }

    /// Lets at most [`MAX_ROW_BLOCK`] rows share a block: where more would, a later place reads it again.
    fn limit_rows(&mut self) {
        let mut rows = 0usize;
        for place in &mut self.list {
            rows = if place.shared == 0 { place.rows } else { rows.saturating_add(place.rows) };
            if rows > MAX_ROW_BLOCK {
                (place.shared, rows) = (0, place.rows);
            }
        }
    }

    /// Number of key blocks that are units of another sequence, all sequences together.
    pub(crate) fn shared_blocks(&self) -> usize {
        self.list.iter().map(|place| place.shared).sum()
    }
}

/// Returns the number of first key blocks that two places have in the same memory, of those that `shared` says might be,
/// and the order of the places by the memory of their blocks.
fn common_blocks(call: &Call<'_>, a: &Place, b: &Place) -> (usize, Ordering) {
    let most = (a.shared.min(b.shared), a.shared.cmp(&b.shared));
    // Tensors that may share memory share all of it.
    if call.kv.tensors().is_some() {
        return most;
    }
    let sources = [a, b].map(|place| call.sequence(place.sequence).source);
    let orders = (0..a.shared.min(b.shared)).map(|block| call.kv.compare_memory(sources, block));
    orders.enumerate().find(|(_, order)| order.is_ne()).unwrap_or(most)
}

/// Key blocks of all places and heads, in the order in which their memory lies.
pub(crate) struct Units<'a> {
    /// Number of key/value heads.
    pub(crate) heads: usize,
    /// Runs that the units are handed out in.
    pub(crate) runs: Runs,
    places: &'a [Place],
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
    pub(crate) fn new(kv: &KeyValues<'_>, places: &'a Places) -> Self {
        let order = if kv.has_heads_inside() { Order::Blocks } else { Order::Heads };
        Self { heads: kv.kv_heads(), runs: places.runs, places: &places.list, order }
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
        first_float + (unit.head * place.parts() + part) * unit_floats(rows, width)
    }
}

/// Number of floats of a part: maxima and sums in whole vectors, then rows of outputs.
pub(crate) fn unit_floats(rows: usize, width: usize) -> usize {
    let padded = rows.checked_next_multiple_of(LANES).unwrap_or(usize::MAX);
    padded.saturating_mul(2).saturating_add(rows.saturating_mul(width))
}

/// Amount of data that the units of a call accumulate under split-KV, and of keys that they read for it. Each number is
/// `usize::MAX` if it overflows.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Accumulation {
    /// Number of units.
    pub units: usize,
    /// Number of floats accumulated by all units together, if each has a part of its own.
    pub floats: usize,
    /// Number of keys read, counted once for each key/value head.
    pub keys: usize,
}

impl Accumulation {
    /// Returns the sum of two amounts.
    fn plus(self, more: Self) -> Self {
        Self {
            units: self.units.saturating_add(more.units),
            floats: self.floats.saturating_add(more.floats),
            keys: self.keys.saturating_add(more.keys),
        }
    }
}

impl Call<'_> {
    /// Returns how much the key blocks of the sequences with at most `few` rows a key/value head would accumulate under
    /// split-KV, at most: maxima, sums and outputs of all the rows that share a head, for each block with a key that may be
    /// visible to some row of its sequence.
    pub fn accumulation(&self, few: usize) -> Accumulation {
        let sequences = (0..self.sequences()).filter(|&sequence| self.has_few_rows(sequence, few));
        sequences.map(|sequence| self.accumulation_of(sequence)).fold(Accumulation::default(), Accumulation::plus)
    }

    /// Returns the number of keys, counted once for each key/value head, that split-KV of the sequences with at most `few`
    /// rows a key/value head does not read again, because other sequences have them in the same memory. `None` if there
    /// is no memory for the list of sequences.
    pub fn shared_keys(&self, few: usize) -> Option<usize> {
        let mut places = Places::new();
        places.try_fill(self, FewRows { few, runs: 1 })?;
        Some(places.shared_blocks().saturating_mul(KEY_BLOCK).saturating_mul(self.kv.kv_heads()))
    }

    /// Returns true if at most `few` rows of a sequence share a key/value head.
    pub(crate) fn has_few_rows(&self, sequence: usize, few: usize) -> bool {
        self.rows_of(sequence) <= few
    }

    /// Returns what a sequence accumulates if it is split: nothing if it has no rows.
    fn accumulation_of(&self, sequence: usize) -> Accumulation {
        let (rows, heads, [.., value_dim]) = (self.rows_of(sequence), self.kv.kv_heads(), self.kv.v_shape());
        if rows == 0 {
            return Accumulation::default();
        }
        let units = heads.saturating_mul(self.visible_blocks(sequence).len());
        let floats = units.saturating_mul(unit_floats(rows, value_dim.next_multiple_of(LANES)));
        Accumulation { units, floats, keys: heads.saturating_mul(self.visible_keys(sequence).len()) }
    }

    /// Returns a range that holds every key visible to some row of a sequence by its length and the range rules.
    fn visible_keys(&self, sequence: usize) -> Range<usize> {
        let Sequence { q_len, kv_len, offset, .. } = self.sequence(sequence);
        match q_len {
            0 => 0..0,
            _ if !self.visible.hides_keys() => 0..kv_len,
            n => self.visible.key_range(offset, offset.saturating_add_unsigned(n - 1), kv_len),
        }
    }

    /// Returns true if every row of a sequence sees all of these keys by its length and the range rules.
    pub(crate) fn sees_all(&self, sequence: usize, keys: Range<usize>) -> bool {
        let Sequence { q_len, kv_len, offset, .. } = self.sequence(sequence);
        let last = offset.saturating_add_unsigned(q_len.saturating_sub(1));
        q_len == 0 || self.visible.shows_all(offset, last, kv_len, keys)
    }

    /// Returns true if sequences may have keys in the same memory.
    fn may_share_keys(&self) -> bool {
        let cumulative = self.options.ragged.is_some_and(|ragged| ragged.k.is_some());
        self.sequences() > 1 && !cumulative && self.kv.may_share_memory()
    }

    /// Returns the number of first key blocks of a sequence that are whole and may be visible.
    fn whole_blocks(&self, sequence: usize) -> usize {
        let visible = self.visible_blocks(sequence);
        if visible.start == 0 && self.rows_of(sequence) > 0 {
            visible.end.min(self.sequence(sequence).kv_len / KEY_BLOCK)
        } else {
            0
        }
    }

    /// Returns the numbers of the blocks that hold [`Self::visible_keys`].
    pub(crate) fn visible_blocks(&self, sequence: usize) -> Range<usize> {
        let keys = self.visible_keys(sequence);
        keys.start / KEY_BLOCK..keys.end.div_ceil(KEY_BLOCK)
    }
}
