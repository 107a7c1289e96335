//! Task of a pass: a set of query rows that share a key/value head, and the call, outputs and tiling they need.

use crate::attention::blocks::block_positions::{BlockPositions, PositionRule};
use crate::attention::call::blocks::Blocks;
use crate::attention::call::checked::CheckedCall;
use crate::attention::call::mods::Position;
use crate::attention::call::options::Options;
use crate::attention::call::outputs::Outputs;
use crate::attention::call::row_mods::{Given, RowMods, RowRun};
use crate::attention::call::row_order::RowAt;
use crate::attention::call::selection::KeyList;
use crate::attention::call::visibility::VisiblePositions;
use crate::attention::call::{Call, RowSet, Sequence};
use crate::attention::products::Products;
use crate::attention::scratch::{MAX_ROW_BLOCK, Tiling};
use crate::attention::steps::dropout::{self, Kept};
use crate::attention::steps::span::Spans;
use crate::simd::{LANES, Simd};
use crate::tensor::rows::KEY_BLOCK;
use core::ops::Range;

/// Checked call, and the kernel steps and functions of the caller that compute it: what a worker's tasks share.
#[derive(Clone, Copy)]
pub(crate) struct BoundCall<'t, S> {
    pub(crate) s: S,
    pub(crate) mods: &'t dyn RowMods<S>,
    pub(crate) checked: &'t CheckedCall<'t>,
    /// Tiling that holds the call's rows and key blocks.
    pub(crate) tiling: &'t Tiling,
    pub(crate) products: Products,
}

impl<'t, S: Simd> BoundCall<'t, S> {
    /// Binds a call to steps and functions, and decides how matrices are multiplied.
    ///
    /// # Panics
    /// If the tiling has no scratch for the [parts](Products::parts) of operands.
    pub(crate) fn new(s: S, mods: &'t dyn RowMods<S>, checked: &'t CheckedCall<'t>, tiling: &'t Tiling) -> Self {
        Self::with(Products::of(s, checked.call(), mods.given()), s, mods, checked, tiling)
    }

    /// Binds a call, as [`Self::new`] does, for its backward pass.
    ///
    /// # Panics
    /// As [`Self::new`].
    pub(crate) fn backward(s: S, mods: &'t dyn RowMods<S>, checked: &'t CheckedCall<'t>, tiling: &'t Tiling) -> Self {
        Self::with(Products::of_backward(s, checked.call()), s, mods, checked, tiling)
    }

    fn with(
        products: Products,
        s: S,
        mods: &'t dyn RowMods<S>,
        checked: &'t CheckedCall<'t>,
        tiling: &'t Tiling,
    ) -> Self {
        assert!(tiling.has_parts(products.parts()), "scratch for operands of fewer parts");
        Self { s, mods, checked, tiling, products }
    }
}

/// Set of query rows together with its call, outputs, tiling and kernel steps.
///
/// It stands for three facts, which the unsafe code of its methods relies on: call, outputs and tiling [fit
/// together](BoundCall); the rows lie inside the call and are no more than there is scratch for; and the rows of the
/// outputs are this worker's alone. Its fields are set here alone; elsewhere they are read.
pub(crate) struct AttentionTask<'t, S> {
    pub(crate) s: S,
    pub(crate) mods: &'t dyn RowMods<S>,
    /// Functions that `mods` has.
    pub(crate) given: Given,
    pub(crate) call: &'t Call<'t>,
    pub(crate) products: Products,
    pub(crate) outputs: &'t Outputs<'t>,
    pub(crate) tiling: &'t Tiling,
    pub(crate) set: RowSet<'t>,
    /// First sequence of the set.
    pub(crate) seq: Sequence,
    /// Keys that the rows select, if they do: these, in order, are the keys that the task computes.
    pub(crate) list: Option<KeyList<'t>>,
    /// Key blocks that the rows compute, but for those that are not held or that the positions of their keys hide.
    pub(crate) blocks: Blocks,
    /// Number of query heads that share a key/value head.
    group_size: usize,
    /// Prediction of the work after this task, for prefetching.
    pub(crate) next: Next<'t>,
}

/// Work after a task; its memory is prefetched.
#[derive(Clone)]
pub(crate) enum Next<'t> {
    /// No next work, or unknown.
    Nothing,
    /// Any work: all the call's memory is in cache, so nothing is prefetched, not even what this task has yet to read.
    Near,
    /// Probably these rows, with all their keys.
    Rows(RowSet<'t>),
    /// This task computes one key block alone: the address that it accumulates into, and the number of bytes there that are
    /// not in cache; and the rows and the first key of the next key block, if any.
    Block { accumulated: (*const u8, usize), next: Option<(RowSet<'t>, usize)> },
}

/// Query row.
#[derive(Clone, Copy)]
pub(crate) struct Row {
    /// Number in the row block.
    pub(crate) n: usize,
    pub(crate) head: usize,
    /// Row in the sequence.
    pub(crate) i: usize,
    /// Batch index and row in q and the outputs.
    pub(crate) q_batch: usize,
    pub(crate) at: usize,
}

impl Row {
    /// Returns the `k`th row after this one, of the same head.
    #[inline(always)]
    pub(crate) fn after(self, k: usize) -> Self {
        Self { n: self.n + k, i: self.i + k, at: self.at + k, ..self }
    }

    /// Returns the index of the row in q: batch, head, row.
    pub(crate) fn index(self) -> [usize; 3] {
        [self.q_batch, self.head, self.at]
    }
}

impl<'t, S: Simd> AttentionTask<'t, S> {
    /// Binds rows of one sequence to their call. `next` is the predicted next work, prefetched while the task is computed.
    ///
    /// # Panics
    /// If the rows do not lie inside the call, or are more than there is scratch for.
    ///
    /// # Safety
    /// While it exists, no other worker reads or writes the outputs of its rows. A task that starts at row 0 also owns
    /// the rows of score outputs beyond its sequence, for its heads.
    // Inlined, here and where a step's operands change type: otherwise the whole struct is copied, a few per cent of a
    // tiny call.
    #[inline(always)]
    pub(crate) unsafe fn new(bound: BoundCall<'t, S>, set: RowSet<'t>, next: Next<'t>) -> Self {
        let (outputs, task) = (bound.checked.outputs(), Self::reading(bound, set, next));
        let blocks = if outputs.wants_all_keys() { Blocks::all(task.key_count()) } else { task.blocks };
        Self { outputs, blocks, ..task }
    }

    /// Binds rows to their call, to read inputs alone: the task has no outputs.
    ///
    /// # Panics
    /// As [`Self::new`].
    #[inline(always)]
    pub(crate) fn reading(bound: BoundCall<'t, S>, set: RowSet<'t>, next: Next<'t>) -> Self {
        let BoundCall { s, mods, checked, tiling, products } = bound;
        let (call, outputs) = (checked.call(), &Outputs::NONE);
        let (seq, group_size) = (first_sequence(&set, call, tiling), call.group_size());
        let (given, list) = (mods.given(), list_of(&set, &seq, call));
        let blocks = blocks_of(&set, &seq, call, list);
        Self { s, mods, given, call, products, outputs, tiling, set, seq, list, blocks, group_size, next }
    }

    /// Returns a task of other rows of this call, to prefetch their inputs: it has no outputs.
    ///
    /// # Panics
    /// As [`Self::new`].
    pub(crate) fn peek(&self, set: &RowSet<'t>) -> Self {
        let (set, seq) = (set.clone(), first_sequence(set, self.call, self.tiling));
        let list = list_of(&set, &seq, self.call);
        let blocks = blocks_of(&set, &seq, self.call, list);
        Self { set, seq, list, blocks, outputs: &Outputs::NONE, next: Next::Nothing, ..*self }
    }

    /// Returns the row blocks of the task, as ranges of its rows.
    pub(crate) fn row_blocks(&self) -> impl Iterator<Item = Range<usize>> + use<S> {
        let (rows, most) = (self.set.rows.len(), self.products.row_block());
        (0..rows).step_by(most).map(move |first| first..rows.min(first + most))
    }

    /// Returns the rows of a row block.
    ///
    /// # Panics
    /// As [`Self::stretches`].
    pub(crate) fn rows(&self, row_block: Range<usize>) -> impl Iterator<Item = Row> + use<'t, S> {
        self.stretches(row_block).flat_map(|(row, len)| (0..len).map(move |k| row.after(k)))
    }

    /// Returns the rows of a row block by sequence and head: the first row of each head, and the number of rows of that head.
    ///
    /// # Panics
    /// If the row block does not lie inside the task: every row returned is one of the task's.
    pub(crate) fn stretches(&self, row_block: Range<usize>) -> impl Iterator<Item = (Row, usize)> + use<'t, S> {
        self.stretches_inlined(row_block)
    }

    /// Returns what [`Self::stretches`] does, compiled into its caller: for tasks so short that a call of a function shows.
    #[inline(always)]
    pub(crate) fn stretches_inlined(&self, row_block: Range<usize>) -> impl Iterator<Item = (Row, usize)> + use<'t, S> {
        assert!(row_block.end <= self.set.rows.len(), "a row block outside its task");
        let (call, group_size, first_head) = (self.call, self.group_size, self.set.kv_head * self.group_size);
        let (mut seq, mut others) = (self.seq, self.set.others.iter());
        let mut order = call.row_order(seq.q_len);
        let (mut first, mut n) = (self.set.rows.start + row_block.start, 0);
        core::iter::from_fn(move || {
            if n == row_block.len() {
                return None;
            }
            while first >= group_size * seq.q_len {
                first -= group_size * seq.q_len;
                seq = call.sequence(others.next()?.sequence);
                order = call.row_order(seq.q_len);
            }
            let RowAt { head, i, left } = order.at(first);
            let len = left.min(row_block.len() - n);
            let row = Row { n, head: first_head + head, i, q_batch: seq.q_batch, at: seq.first_row + i };
            (first, n) = (first + len, n + len);
            Some((row, len))
        })
    }

    /// Returns the keys of a row from key `key` of the sequence on.
    pub(crate) fn keys_from(&self, row: Row, key: usize) -> RowRun<'t> {
        let (position, from) = (self.seq.offset.saturating_add_unsigned(row.i), self.row_position(row.i));
        let key_positions = self.key_positions().map_or(&[][..], |positions| &positions[key..]);
        let distance =
            key_positions.first().map_or(from.saturating_sub_unsigned(key), |&key| from.saturating_sub(key as isize));
        let first = Position { batch: self.set.sequence, head: row.head, row: row.i, key, position, distance };
        RowRun { first, from, place: key % KEY_BLOCK, key_positions, listed: None }
    }

    /// Returns the position of a row of the task's first sequence, from which distances are counted.
    #[inline(always)]
    pub(crate) fn row_position(&self, i: usize) -> isize {
        match self.call.row_positions(self.set.sequence) {
            Some(positions) => positions[i] as isize,
            None => self.seq.offset.saturating_add_unsigned(i),
        }
    }

    /// Returns the given positions of the task's keys.
    #[inline(always)]
    pub(crate) fn key_positions(&self) -> Option<&'t [i32]> {
        self.call.key_positions(self.set.sequence)
    }

    /// Returns the first key of each of the task's blocks that is held and may be seen by the positions of its keys.
    pub(crate) fn blocks(&self) -> impl DoubleEndedIterator<Item = usize> + use<'t, S> {
        self.blocks_in(0..usize::MAX)
    }

    /// Returns those of [`Self::blocks`] that begin in a range of keys.
    pub(crate) fn blocks_in(&self, keys: Range<usize>) -> impl DoubleEndedIterator<Item = usize> + use<'t, S> {
        let (kv, source, rule, list) = (&self.call.kv, self.seq.source, self.rule_of_positions(), self.list);
        let numbers = self.blocks.within(keys.start.div_ceil(KEY_BLOCK)..keys.end.div_ceil(KEY_BLOCK));
        let firsts = numbers.map(|number| number * KEY_BLOCK);
        let held = move |first| list.is_some() || kv.holds(source, first);
        firsts.filter(move |&first| held(first) && rule.is_none_or(|rule| rule.may_show(first)))
    }

    /// Number of keys that the task computes, hidden ones too: those that the rows select, or all of the sequence.
    #[inline]
    pub(crate) fn key_count(&self) -> usize {
        self.list.map_or(self.seq.kv_len, KeyList::len)
    }

    /// Returns true if the range rules are by positions of single keys: given ones, or those of selected keys.
    #[inline]
    pub(crate) fn sees_by_positions(&self) -> bool {
        self.has_positions() && self.call.visible.hides_keys()
    }

    /// Returns true if keys have positions of their own: given ones, or those of selected keys.
    #[inline]
    pub(crate) fn has_positions(&self) -> bool {
        self.list.is_some() || self.call.options.key_positions.is_some()
    }

    /// Returns true if some option depends on the numbers or positions of single keys.
    pub(crate) fn asks_for_numbers(&self) -> bool {
        let Options { bias, mask, alibi, dropout, .. } = &self.call.options;
        let options = bias.is_some() || mask.is_some() || alibi.is_some() || dropout.is_some();
        options || self.call.visible.hides_keys() || self.given.score || self.given.mask || self.given.weight
    }

    /// Returns the positions that a row sees, if the range rules are by positions of single keys.
    #[inline]
    pub(crate) fn seen_positions(&self, i: usize) -> Option<VisiblePositions> {
        if !self.sees_by_positions() {
            return None;
        }
        let position = self.row_position(i);
        let [seen, _] = self.call.visible.positions(position, position);
        Some(seen)
    }

    /// Returns the positions that some row and that every row sees, if the range rules are by positions of single keys and hidden
    /// keys need not be computed.
    fn rule_of_positions(&self) -> Option<PositionRule<'t>> {
        if !self.sees_by_positions() || self.outputs.wants_all_keys() {
            return None;
        }
        let [first, last] = self.positions();
        let keys = BlockPositions { given: self.key_positions(), list: self.list, len: self.key_count() };
        Some(PositionRule { keys, seen: self.call.visible.positions(first, last) })
    }

    /// Returns true if every row sees all of some keys of a block by the range rules.
    pub(crate) fn shows_all(&self, keys: Range<usize>) -> bool {
        if let Some(rule) = self.rule_of_positions() {
            return rule.shows_all(keys.start);
        }
        let [first, last] = self.positions();
        self.call.visible.shows_all(first, last, self.seq.kv_len, keys)
    }

    /// Returns true if a block of the task's keys starts at key `first` and is held. Selected keys are.
    pub(crate) fn holds(&self, first: usize) -> bool {
        let there = first < self.key_count() && first.is_multiple_of(KEY_BLOCK);
        there && (self.list.is_some() || self.call.kv.holds(self.seq.source, first))
    }

    /// Returns the first and the last position of a row of the task; of a row of its sequences, if the task has rows of several
    /// heads.
    pub(crate) fn positions(&self) -> [isize; 2] {
        let own = self.call.positions(self.set.sequence, &self.seq, self.set.rows.clone());
        self.set.others.iter().fold(own, |[first, last], other| {
            let Sequence { offset, q_len, .. } = self.call.sequence(other.sequence);
            [first.min(offset), last.max(offset.saturating_add_unsigned(q_len.saturating_sub(1)))]
        })
    }

    /// Draws which weights of a row block are kept, against the key block at `first` or the keys of a list with these numbers, if
    /// the call drops any.
    pub(crate) fn draw_kept(
        &self,
        row_block: Range<usize>,
        spans: &Spans,
        first: usize,
        numbers: Option<&[u32]>,
    ) -> Option<Kept> {
        let (dropout, [first_row, first_key]) = (self.call.options.dropout?, self.call.options.dropout_from);
        let (mut rows, heads) = ([[0; 2]; MAX_ROW_BLOCK], self.call.q.shape()[1]);
        for row in self.rows(row_block.clone()) {
            rows[row.n] = [(self.set.sequence * heads + row.head) as u32, (first_row + row.i) as u32];
        }
        let mut kept = Kept { weights: [[0; KEY_BLOCK / LANES]; MAX_ROW_BLOCK], factor: dropout.factor() };
        let rows = &rows[..row_block.len()];
        match numbers {
            None => dropout::draw(self.s, spans, first_key + first, rows, dropout, &mut kept.weights),
            Some(numbers) => dropout::draw_each(spans, numbers, rows, dropout, &mut kept.weights),
        }
        Some(kept)
    }

    /// Returns the position of key `first` of the sequence in its source: sequence or batch index, head, key.
    pub(crate) fn index_of_key(&self, first: usize) -> [usize; 3] {
        [self.seq.source, self.set.kv_head, self.seq.first_key + first]
    }
}

/// Returns the first sequence of a set of rows.
///
/// # Panics
/// If the rows do not lie inside the call, or are more than there is scratch for.
#[inline(always)]
fn first_sequence(set: &RowSet<'_>, call: &Call<'_>, tiling: &Tiling) -> Sequence {
    let inside = set.kv_head < call.kv.kv_heads() && set.sequences().all(|sequence| sequence < call.sequence_count());
    assert!(inside, "rows of another call");
    let (seq, rows) = (call.sequence(set.sequence), &set.rows);
    let all: usize = set.sequences().map(|sequence| call.rows_of(sequence)).sum();
    assert!(rows.end <= all && rows.len() <= tiling.most_rows, "rows outside the call, or more than a task's");
    seq
}

/// Returns the keys that a set of rows selects, if it does.
#[inline(always)]
fn list_of<'t>(set: &RowSet<'_>, seq: &Sequence, call: &Call<'t>) -> Option<KeyList<'t>> {
    call.options.selected?;
    call.key_list(set.sequence, set.kv_head, &set.rows, seq)
}

/// Returns the key blocks that a set of rows computes, by the lengths of its first sequence.
#[inline(always)]
fn blocks_of(set: &RowSet<'_>, seq: &Sequence, call: &Call<'_>, list: Option<KeyList<'_>>) -> Blocks {
    if let Some(list) = list {
        return Blocks::all(list.len());
    }
    set.blocks.copied().unwrap_or_else(|| call.blocks(set.sequence, seq, set.rows.clone()))
}
