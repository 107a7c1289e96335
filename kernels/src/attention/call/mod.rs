//! Attention call: its tensors and options, its sequences, and sets of its query rows.

pub(crate) mod blocks;
pub(crate) mod checked;
pub(crate) mod dropout;
pub(crate) mod fit;
pub(crate) mod masks;
pub(crate) mod mods;
pub(crate) mod options;
pub(crate) mod outputs;
pub(crate) mod row_mods;
pub(crate) mod row_order;
pub(crate) mod selection;
pub(crate) mod visibility;

use crate::attention::call::blocks::Blocks;
use crate::attention::call::mods::{BlockPosition, CallFacts, MaskError, MaskMod};
use crate::attention::call::options::{Options, Ragged};
use crate::attention::call::row_order::RowOrder;
use crate::attention::call::selection::KeyList;
use crate::attention::call::visibility::{Alignment, Visible, VisibleKeys, least_and_most};
use crate::kv::source::KeyValues;
use crate::tensor::any::Tensor;
use crate::tensor::element::Precision;
use core::ops::Range;

/// Inputs and options of one attention call: shapes q `[B, H, Lq, D]`, k `[B, Hkv, Lk, D]`, v `[B, Hkv, Lk, Dv]`;
/// with ragged sequences the `B` of q, and of k and v if they are tensors, is 1.
#[derive(Debug, Clone, Copy)]
pub struct Call<'a> {
    /// Queries.
    pub q: Tensor<'a>,
    /// Keys and values.
    pub kv: KeyValues<'a>,
    /// Factor of the dot products q·k.
    pub scale: f32,
    /// Visibility rules that are key ranges: causal and window.
    pub visible: Visible,
    /// Position of the query rows among the keys.
    pub alignment: Alignment,
    /// Other settings and tensors that change scores, and the sequences' lengths.
    pub options: Options<'a>,
    /// Precision shortcuts the kernels may take.
    pub precision: Precision,
}

/// Position of one sequence in the call's tensors, and its lengths.
#[derive(Debug, Clone, Copy)]
pub struct Sequence {
    /// Batch index of its queries and outputs.
    pub(crate) q_batch: usize,
    /// Index of its keys and values: the batch index of tensors, or a sequence of the cache or pages.
    pub source: usize,
    /// First query row in the tensors.
    pub(crate) first_row: usize,
    /// First key in the tensors.
    pub(crate) first_key: usize,
    /// Number of query rows.
    pub q_len: usize,
    /// Number of keys.
    pub kv_len: usize,
    /// Position of row 0 among the keys.
    pub offset: isize,
}

impl<'a> Call<'a> {
    /// Given positions of the rows of a sequence.
    #[inline(always)]
    pub(crate) fn row_positions(&self, sequence: usize) -> Option<&'a [i32]> {
        self.options.row_positions.map(|all| all[sequence])
    }

    /// Given positions of the keys of a sequence, without those of padding.
    #[inline(always)]
    pub(crate) fn key_positions(&self, sequence: usize) -> Option<&'a [i32]> {
        let positions = self.options.key_positions?[sequence];
        Some(self.options.kv_lens.map_or(positions, |lens| &positions[..lens[sequence]]))
    }

    /// Returns the keys that some rows of a sequence, counted as in a [`RowSet`], select, if the call has lists. The rows have one
    /// list; those of none have no list.
    #[inline]
    pub(crate) fn key_list(
        &self,
        sequence: usize,
        kv_head: usize,
        rows: &Range<usize>,
        seq: &Sequence,
    ) -> Option<KeyList<'a>> {
        // Work without rows may begin after the last one.
        let selected = self.options.selected.filter(|_| rows.start < self.group_size() * seq.q_len)?;
        let [in_group, group] = self.row_order(seq.q_len).list_of(rows.start);
        let head = match selected.heads() {
            1 => 0,
            _ if self.lists_are_of_query_heads() => kv_head * self.group_size() + in_group,
            _ => kv_head,
        };
        Some(selected.list(sequence, head, group, seq.kv_len))
    }
}

impl Call<'_> {
    /// Returns keys among which are all that the range rules make visible to a row of a sequence: all its keys, if positions of
    /// rows or keys are given.
    #[inline]
    pub fn keys_of_row(&self, sequence: &Sequence, row: usize) -> VisibleKeys {
        let Sequence { offset, kv_len, .. } = *sequence;
        match self.options.own_positions() {
            Some(_) => VisibleKeys { prefix: 0, start: 0, end: kv_len },
            None => self.visible.keys(offset.saturating_add_unsigned(row), kv_len),
        }
    }

    /// Number of query heads that share one key/value head.
    #[inline]
    pub fn group_size(&self) -> usize {
        self.q.shape()[1] / self.kv.kv_heads().max(1)
    }

    /// Returns true if the query heads that share a key/value head have lists of keys of their own.
    #[inline]
    pub(crate) fn lists_are_of_query_heads(&self) -> bool {
        self.options.selected.is_some_and(|selected| selected.heads() != 1 && selected.heads() != self.kv.kv_heads())
    }

    /// Returns the order of the rows of a sequence that has some, `q_len` of each head.
    #[inline]
    pub(crate) fn row_order(&self, q_len: usize) -> RowOrder {
        let group_size = self.group_size();
        match self.options.selected {
            None => RowOrder::whole(group_size, q_len),
            Some(lists) if self.lists_are_of_query_heads() => {
                RowOrder::of_lists_of_heads(group_size, q_len, lists.rows())
            }
            Some(lists) => RowOrder::of_shared_lists(group_size, q_len, lists.rows()),
        }
    }

    /// Number of floats of a block that selected keys are gathered in; 0 if none are.
    pub fn gathered_floats(&self) -> usize {
        // Blocks of a cache have more heads, and their bytes were counted when it was made.
        self.options.selected.map_or(0, |_| self.kv.gathered_floats().unwrap_or(usize::MAX))
    }

    /// Returns the number of tasks, of at most `task_rows` rows, of a call whose rows select keys.
    pub fn tasks_of_lists(&self, task_rows: usize) -> Option<usize> {
        let (selected, rows) = (self.options.selected?, self.list_rows());
        let lists = selected.all_groups().saturating_mul(self.lists_of_kv_head()).saturating_mul(self.kv.kv_heads());
        Some(lists.saturating_mul(rows.div_ceil(task_rows).max(1)))
    }

    /// Number of lists of a group of rows in the heads that share a key/value head.
    pub(crate) fn lists_of_kv_head(&self) -> usize {
        if self.lists_are_of_query_heads() { self.group_size() } else { 1 }
    }

    /// Largest number of rows that share a list and a key/value head.
    pub(crate) fn list_rows(&self) -> usize {
        let heads = if self.lists_are_of_query_heads() { 1 } else { self.group_size() };
        self.options.selected.map_or(0, |selected| selected.rows().min(self.longest().0).saturating_mul(heads))
    }

    /// Returns the facts that a mask function learns about the call.
    pub fn facts(&self) -> CallFacts {
        let facts = CallFacts::new(self.sequence_count());
        let alibi = self.options.alibi.map(|_| "alibi");
        // Distances are by order only where both are.
        if self.options.row_positions.is_some() && self.options.key_positions.is_some() {
            return facts;
        }
        self.visible.window.map(|_| "window").or(alibi).map_or(facts, |option| facts.distance(option))
    }

    /// Asks a mask function whether it fits the call and the rows of each sequence.
    ///
    /// # Errors
    /// Those of [`MaskMod::fits`] and [`MaskMod::fits_rows`].
    pub fn check_mask<M: MaskMod>(&self, mask: &M) -> Result<(), MaskError> {
        if !mask.is_given() {
            return Ok(());
        }
        mask.fits(&self.facts())?;
        let rows_fit = |batch| {
            let Sequence { q_len, kv_len, offset, .. } = self.sequence(batch);
            let rows = BlockPosition { batch, head: 0, rows: 0..q_len, keys: 0..kv_len, position: offset };
            if q_len == 0 { Ok(()) } else { mask.fits_rows(&rows) }
        };
        (0..self.sequence_count()).try_for_each(rows_fit)
    }

    /// Number of sequences in the call.
    pub fn sequence_count(&self) -> usize {
        match self.options.ragged {
            Some(ragged) => ragged.q.len().saturating_sub(1),
            None => self.q.shape()[0],
        }
    }

    /// Largest query length and largest key length of any sequence: the size of bias, masks and score outputs.
    pub fn longest(&self) -> (usize, usize) {
        match self.options.ragged {
            Some(ragged) => {
                let longest = |ends: &[usize]| ends.windows(2).map(|w| w[1] - w[0]).max().unwrap_or(0);
                (longest(ragged.q), ragged.k.map_or_else(|| self.most_keys(), longest))
            }
            None => (self.q.shape()[2], self.most_keys()),
        }
    }

    /// Returns the largest key length among the sequences of the call, if their keys are not laid end to end.
    fn most_keys(&self) -> usize {
        match (self.options.sources, self.kv.lens()) {
            (Some(sources), Some(lens)) => sources.iter().map(|&source| lens[source]).max().unwrap_or(0),
            _ => self.kv.k_shape()[2],
        }
    }

    /// Mean number of keys of the lists of a sequence's rows, if they have lists: whole units.
    pub fn keys_of_list(&self, sequence: usize) -> Option<f64> {
        let selected = self.options.selected?;
        let lists = selected.groups_of(sequence) * selected.heads();
        Some(if lists == 0 { 0.0 } else { selected.keys_of(sequence) as f64 / lists as f64 })
    }

    /// Largest number of keys of a row: those of a list, or of a sequence.
    pub fn most_keys_of_row(&self) -> usize {
        let all = self.longest().1;
        self.options.selected.map_or(all, |selected| selected.most_keys().min(all))
    }

    /// Returns the shape of the key weight sums, which have an element for each key of each key/value head.
    pub(crate) fn key_weight_sums_shape(&self) -> [usize; 4] {
        let (batch, keys) = match self.options.ragged {
            Some(Ragged { k: Some(_), .. }) => (1, self.kv.k_shape()[2]),
            _ => (self.sequence_count(), self.longest().1),
        };
        [batch, self.kv.kv_heads(), keys, 1]
    }

    /// Returns the batch index and the rows of the key weight sums, of `rows` rows, that belong to a sequence.
    pub(crate) fn key_weight_sums_of(&self, sequence: usize, rows: usize) -> (usize, Range<usize>) {
        match self.options.ragged {
            Some(Ragged { k: Some(k), .. }) => (0, k[sequence]..k[sequence + 1]),
            _ => (sequence, 0..rows),
        }
    }

    /// Returns the rows of k and v, as tensors, that belong to a sequence, including those beyond its key length.
    #[inline]
    pub(crate) fn keys_of(&self, sequence: usize) -> Range<usize> {
        match self.options.ragged {
            Some(Ragged { k: Some(k), .. }) => k[sequence]..k[sequence + 1],
            _ => 0..self.kv.k_shape()[2],
        }
    }

    /// Returns the position and the lengths of a sequence.
    #[inline]
    pub fn sequence(&self, sequence: usize) -> Sequence {
        let (q_batch, rows) = match self.options.ragged {
            Some(ragged) => (0, ragged.q[sequence]..ragged.q[sequence + 1]),
            None => (sequence, 0..self.q.shape()[2]),
        };
        let (source, first_key) = match (self.options.sources, self.options.ragged) {
            (Some(sources), _) => (sources[sequence], 0),
            (None, Some(Ragged { k: Some(k), .. })) => (0, k[sequence]),
            (None, _) => (sequence, 0),
        };
        // With lengths given, the longest is not computed: this function runs for every task.
        let kv_len = match (self.options.kv_lens, self.kv.lens()) {
            (Some(lens), _) => lens[sequence],
            (None, Some(lens)) => lens[source],
            (None, None) => self.keys_of(sequence).len(),
        };
        let offset = self.alignment.offset(rows.len(), kv_len);
        Sequence { q_batch, source, first_row: rows.start, first_key, q_len: rows.len(), kv_len, offset }
    }

    /// Returns the key blocks that some rows of a sequence, counted as in a [`RowSet`], compute: those that hold keys which its
    /// length and the range rules show to some row. If positions of keys are given, all its blocks.
    #[inline]
    pub(crate) fn blocks(&self, sequence: usize, seq: &Sequence, rows: Range<usize>) -> Blocks {
        // Without rows keys are only prefetched.
        if rows.is_empty() || !self.visible.hides_keys() || self.options.key_positions.is_some() {
            return Blocks::all(seq.kv_len);
        }
        let [first, last] = self.positions(sequence, seq, rows);
        Blocks(self.visible.keys_of_rows(first, last, seq.kv_len))
    }

    /// Returns the first and the last position of some rows of a sequence, one at least, counted as in a [`RowSet`]; of more of
    /// its rows, if they belong to several heads.
    pub(crate) fn positions(&self, sequence: usize, seq: &Sequence, rows: Range<usize>) -> [isize; 2] {
        let [first, last] = self.row_order(seq.q_len).ends(&rows);
        match self.row_positions(sequence) {
            Some(positions) => least_and_most(&positions[first..=last]).map(|position| position as isize),
            None => [first, last].map(|row| seq.offset.saturating_add_unsigned(row)),
        }
    }

    /// Number of query rows of a sequence that share a key/value head.
    #[inline]
    pub(crate) fn rows_of(&self, sequence: usize) -> usize {
        let q_len = self.options.ragged.map_or(self.q.shape()[2], |Ragged { q, .. }| q[sequence + 1] - q[sequence]);
        // Saturating: without heads the rows may be any number. Of many sequences most may have none.
        if q_len > 0 { self.group_size().saturating_mul(q_len) } else { 0 }
    }
}

/// Sequence with key blocks that are units, or parts of other sequences' units: an entry of the list.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SplitSequence {
    /// Index of the sequence in the call.
    pub(crate) sequence: usize,
    /// Number of its rows that share a key/value head.
    pub(crate) rows: usize,
    /// Key blocks that may be visible to it.
    pub(crate) blocks: Blocks,
    /// Number of its first key blocks, none of them missing, that lie in the same memory as those of the entry before this one.
    pub(crate) shared: usize,
    /// True if all blocks of a head are accumulated into one part, by one worker, in order; false if each has a part, or there are
    /// none. It is the same for entries that share blocks.
    pub(crate) in_order: bool,
    /// Number of units of the entries before this one, and of floats of their parts.
    pub(crate) first_unit: usize,
    pub(crate) first_float: usize,
}

/// Query rows of one key/value head: a range of one sequence's, or all rows of sequences with keys in the same memory.
///
/// The rows of the first sequence come first. [`RowOrder`] says which query row of which head a row of a sequence is. If rows select
/// keys, all rows of the set have one list.
#[derive(Debug, Clone)]
pub(crate) struct RowSet<'t> {
    /// First sequence; its lengths say which keys are read.
    pub(crate) sequence: usize,
    /// Sequences of the rows that follow.
    pub(crate) others: &'t [SplitSequence],
    pub(crate) kv_head: usize,
    /// Rows of the set, counted over all rows of its sequences.
    pub(crate) rows: Range<usize>,
    /// Key blocks that the rows compute, if not all that [they may see](Call::blocks).
    pub(crate) blocks: Option<&'t Blocks>,
}

impl RowSet<'static> {
    /// Returns some rows of one sequence.
    #[inline(always)]
    pub(crate) fn of(sequence: usize, kv_head: usize, rows: Range<usize>) -> Self {
        Self { sequence, others: &[], kv_head, rows, blocks: None }
    }
}

impl RowSet<'_> {
    /// Returns the sequences of the set.
    pub(crate) fn sequences(&self) -> impl Iterator<Item = usize> {
        core::iter::once(self.sequence).chain(self.others.iter().map(|other| other.sequence))
    }
}
