//! Keys that rows select: for each group of rows and heads a list of key numbers, which the fused loop computes as if the listed
//! keys, in order, were the sequence.

pub(crate) mod build;
mod fault;
mod key_list;
mod part;
pub(crate) mod top_k;

use crate::tensor::misfit::{Bound, Fault, Misfit};
pub use build::Rectangle;
use core::ops::Range;
pub use fault::{ListPlace, SelectionError};
pub(crate) use key_list::KeyList;

/// Rows and heads that have a list of keys each, and what the numbers of a list count.
///
/// Lists are in the order `[sequence][head][group of rows]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SelectionShape<'a> {
    /// Number of query rows of each sequence.
    pub q_lens: &'a [usize],
    /// Number of lists of each group of rows: 1 for all heads together, or one for each key/value head, or for each query head.
    pub heads: usize,
    /// Number of neighbouring rows of a sequence that share a list; its last group may have fewer.
    pub rows: usize,
    /// Number of keys that a number stands for: number `n` names the keys from `n · unit` on, up to the next unit's first or the
    /// end of the sequence.
    pub unit: usize,
}

/// Lists of the keys that rows select, ascending, each key once.
///
/// The lists are checked when they are made. A call asks only whether they have its rows and heads, and whether no number is
/// beyond a sequence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SelectedKeys {
    unit: usize,
    rows: usize,
    heads: usize,
    q_lens: Vec<usize>,
    /// Number of groups of rows of the sequences before each one; then of all.
    groups: Vec<usize>,
    /// Index in `units` where each list starts; then their number.
    starts: Vec<usize>,
    /// Units of all lists: twice the number, plus 1 if the mask function is asked about the unit.
    units: Vec<u32>,
    /// One past the greatest number of each sequence.
    ends: Vec<usize>,
    /// Largest number of units of a list.
    longest: usize,
    /// True if the mask function is not asked about some unit.
    partly_asked: bool,
}

/// Name of the ends of lists in messages.
const END_OF_SELECTED: &str = "selected keys, one past the greatest number of each sequence";

/// Numbers of units, and of keys up to the end of a unit, end here: positions are `i32`, and units have a bit beside them.
pub(crate) const MAX_KEYS: usize = i32::MAX as usize;

impl Default for SelectedKeys {
    fn default() -> Self {
        Self::new()
    }
}

impl SelectedKeys {
    /// Creates an empty selection, of no sequence, to be filled.
    pub const fn new() -> Self {
        Self {
            unit: 1,
            rows: 1,
            heads: 1,
            q_lens: Vec::new(),
            groups: Vec::new(),
            starts: Vec::new(),
            units: Vec::new(),
            ends: Vec::new(),
            longest: 0,
            partly_asked: false,
        }
    }

    /// Number of sequences.
    pub fn sequences(&self) -> usize {
        self.q_lens.len()
    }

    /// Number of lists of each group of rows.
    pub fn heads(&self) -> usize {
        self.heads
    }

    /// Number of neighbouring rows that share a list.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Number of keys of a unit.
    pub fn unit(&self) -> usize {
        self.unit
    }

    /// Number of query rows of each sequence.
    pub fn q_lens(&self) -> &[usize] {
        &self.q_lens
    }

    /// Number of bytes held.
    pub fn bytes(&self) -> usize {
        let Self { q_lens, groups, starts, units, ends, .. } = self;
        let indices = q_lens.capacity() + groups.capacity() + starts.capacity() + ends.capacity();
        indices * size_of::<usize>() + units.capacity() * size_of::<u32>()
    }

    /// Returns the numbers of the list of a row, ascending: those of keys if units have one key. `None` outside the selection.
    pub fn numbers(
        &self,
        sequence: usize,
        head: usize,
        row: usize,
    ) -> Option<impl ExactSizeIterator<Item = usize> + '_> {
        Some(self.units_at(sequence, head, row)?.iter().map(|&unit| (unit >> 1) as usize))
    }

    /// Returns the number of keys below `kv_len` that the list of a row names; 0 outside the selection.
    pub fn key_count(&self, sequence: usize, head: usize, row: usize, kv_len: usize) -> usize {
        let units = self.units_at(sequence, head, row).unwrap_or_default();
        let first = |unit: &u32| (unit >> 1) as usize * self.unit;
        let whole = units.partition_point(|unit| first(unit) + self.unit <= kv_len);
        whole * self.unit + units.get(whole).map_or(0, |unit| kv_len.saturating_sub(first(unit)))
    }

    /// Returns true if the list of a row names a key. False outside the selection.
    pub fn names(&self, sequence: usize, head: usize, row: usize, key: usize) -> bool {
        self.find(sequence, head, row, key).is_some()
    }

    /// Returns true if the mask function is asked about a key that the list of a row names.
    pub fn asks(&self, sequence: usize, head: usize, row: usize, key: usize) -> bool {
        self.find(sequence, head, row, key).is_some_and(|unit| unit & 1 == 1)
    }

    /// Returns the unit of a key in the list of a row.
    fn find(&self, sequence: usize, head: usize, row: usize, key: usize) -> Option<u32> {
        let units = self.units_at(sequence, head, row)?;
        units.binary_search_by_key(&(key / self.unit), |&unit| (unit >> 1) as usize).ok().map(|at| units[at])
    }

    /// Returns the first row of a sequence with a list that names one of some keys, and the first of these that it names. `None`
    /// outside the selection.
    #[doc(hidden)] // for `sdpa`
    pub fn first_in(&self, sequence: usize, keys: Range<usize>) -> Option<(usize, usize)> {
        let groups = if sequence < self.sequences() { self.groups_of(sequence) } else { 0 };
        let mut lists = (0..groups).flat_map(|group| (0..self.heads).map(move |head| (group, head)));
        lists.find_map(|(group, head)| {
            let units = self.units_of(sequence, head, group);
            let first = units.partition_point(|&unit| ((unit >> 1) as usize + 1) * self.unit <= keys.start);
            let key = ((*units.get(first)? >> 1) as usize * self.unit).max(keys.start);
            (key < keys.end).then_some((group * self.rows, key))
        })
    }

    /// Returns the units of the list of a row. `None` outside the selection.
    fn units_at(&self, sequence: usize, head: usize, row: usize) -> Option<&[u32]> {
        let inside = sequence < self.sequences() && head < self.heads && row < self.q_lens[sequence];
        inside.then(|| self.units_of(sequence, head, row / self.rows))
    }

    /// Returns the units of a list.
    fn units_of(&self, sequence: usize, head: usize, group: usize) -> &[u32] {
        let list = self.list_index(sequence, head, group);
        &self.units[self.starts[list]..self.starts[list + 1]]
    }

    /// Returns the place of a list among all.
    pub(crate) fn list_index(&self, sequence: usize, head: usize, group: usize) -> usize {
        let [first, end] = [0, 1].map(|next| self.groups[sequence + next]);
        debug_assert!(head < self.heads && group < end - first, "list of head {head}, group {group}");
        first * self.heads + head * (end - first) + group
    }

    /// Returns a list of a sequence of `kv_len` keys, which no number exceeds.
    pub(crate) fn list(&self, sequence: usize, head: usize, group: usize, kv_len: usize) -> KeyList<'_> {
        KeyList::new(self.units_of(sequence, head, group), self.unit, kv_len, self.partly_asked)
    }

    /// Number of groups of rows of a sequence.
    pub(crate) fn groups_of(&self, sequence: usize) -> usize {
        self.groups[sequence + 1] - self.groups[sequence]
    }

    /// Number of groups of rows of the sequences before one.
    #[inline]
    pub(crate) fn groups_before(&self, sequence: usize) -> usize {
        self.groups[sequence]
    }

    /// Number of groups of rows of all sequences.
    pub(crate) fn all_groups(&self) -> usize {
        self.groups.last().copied().unwrap_or(0)
    }

    /// Refuses lists of a sequence that name a unit beyond its keys.
    #[doc(hidden)] // for `sdpa`
    pub fn ends_within(&self, sequence: usize, kv_len: usize) -> Result<(), Misfit> {
        let (got, limit) = (self.ends.get(sequence).copied().unwrap_or(0), kv_len.div_ceil(self.unit));
        if got > limit {
            let (index, bound, of) = (sequence, Bound::AtMost, "the units of keys that the sequence has");
            return Fault::Entry { index, got, bound, limit, of }.of(END_OF_SELECTED);
        }
        Ok(())
    }

    /// Returns true if the mask function is asked about every key that a list names.
    #[doc(hidden)] // for `sdpa`
    pub fn asks_all(&self) -> bool {
        !self.partly_asked
    }

    /// Largest number of keys of a list, at most.
    pub(crate) fn most_keys(&self) -> usize {
        self.longest.saturating_mul(self.unit)
    }

    /// Number of keys of all lists of a sequence, whole units.
    pub(crate) fn keys_of(&self, sequence: usize) -> usize {
        let lists = [0, 1].map(|next| self.groups[sequence + next] * self.heads);
        (self.starts[lists[1]] - self.starts[lists[0]]).saturating_mul(self.unit)
    }
}
