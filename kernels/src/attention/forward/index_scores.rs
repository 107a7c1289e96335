//! Index scores of some query rows: for each key the sum, over the heads that share its head, of weight · max(score, 0).
//!
//! Rows are computed a few together with all their heads, so that a key block is packed once for all. Their sums lie where other
//! passes pack values.

use crate::attention::blocks::key_block::{BlockMemory, KeyBlock};
use crate::attention::blocks::queries::Queries;
use crate::attention::blocks::task::{AttentionTask, BoundCall, Next};
use crate::attention::call::RowSet;
use crate::attention::call::selection::SelectedKeys;
use crate::attention::scratch::{MAX_TASK, QueryMemory, Scratch};
use crate::attention::steps::choose::keep_larger;
use crate::attention::steps::index_sums::{IndexRow, add_index_sums, finish_index_sums};
use crate::simd::Simd;
use crate::tensor::rows::KEY_BLOCK;
use crate::tensor::view::View;
use crate::tensor::view_mut::ViewMut;
use core::ops::Range;

/// Largest number of query rows that are computed together: scratch has room for the sums of these.
pub(crate) const MOST_TOGETHER: usize = 16;

/// Tensors of an indexer beside its call: weights `[batch, heads, q_len, 1]`, and factors `[batch, kv_heads, kv_len, 1]` of keys.
#[derive(Debug, Clone, Copy)]
pub(crate) struct IndexTensors<'a> {
    pub(crate) weights: View<'a>,
    pub(crate) factors: Option<View<'a>>,
}

/// Memory that scores are written to.
pub(crate) enum IndexOutput<'a> {
    /// A row of keys for each query row, `[batch, kv_heads, q_len, kv_len]`.
    Rows(ViewMut<'a>),
    /// A row for each list of a selection, from list `first` on, `[1, 1, lists, kv_len]`: the largest scores of its rows.
    Lists { scores: ViewMut<'a>, of: &'a SelectedKeys, first: usize },
}

impl IndexOutput<'_> {
    /// Returns the view, the row that has a query row's scores, and whether it begins with this row.
    fn row(&self, sequence: usize, kv_head: usize, i: usize) -> (&ViewMut<'_>, [usize; 3], bool) {
        match self {
            Self::Rows(scores) => (scores, [sequence, kv_head, i], true),
            Self::Lists { scores, of, first } => {
                let list = of.list_index(sequence, kv_head, i / of.rows());
                (scores, [0, 0, list - first], i.is_multiple_of(of.rows()))
            }
        }
    }

    /// Number of keys of a row.
    pub(crate) fn keys(&self) -> usize {
        let (Self::Rows(scores) | Self::Lists { scores, .. }) = self;
        scores.shape()[3]
    }

    /// Hides some keys from a query row, if a row begins with it.
    ///
    /// # Safety
    /// As [`Self::write`].
    pub(crate) unsafe fn hide(&self, [sequence, kv_head, i]: [usize; 3], keys: Range<usize>) {
        let (view, [b, h, l], begins) = self.row(sequence, kv_head, i);
        let [batch, heads, rows, len] = view.shape();
        assert!(
            b < batch && h < heads && l < rows && keys.start <= keys.end && keys.end <= len,
            "a row outside the output"
        );
        // A view without keys may have strides that lead out of it.
        if !begins || keys.is_empty() {
            return;
        }
        // SAFETY: row and keys are inside the view; the caller guarantees that they are this worker's.
        unsafe {
            let (scores, element) = view.row(b, h, l);
            if element == 1 {
                core::slice::from_raw_parts_mut(scores.add(keys.start), keys.len()).fill(f32::NEG_INFINITY);
            } else {
                keys.for_each(|key| *scores.offset(key as isize * element) = f32::NEG_INFINITY);
            }
        }
    }

    /// Writes the scores of a query row and the keys from `first` on; of rows that share a list, the largest remain.
    ///
    /// # Safety
    /// These keys of the row are this worker's alone.
    unsafe fn write(&self, [sequence, kv_head, i]: [usize; 3], first: usize, sums: &[f32]) {
        let (view, [b, h, l], begins) = self.row(sequence, kv_head, i);
        let [batch, heads, rows, len] = view.shape();
        assert!(b < batch && h < heads && l < rows && first + sums.len() <= len, "a row outside the output");
        // SAFETY: the row and these keys are inside the view; the caller guarantees that they are this worker's.
        let (to, element) = unsafe {
            let (scores, element) = view.row(b, h, l);
            (scores.offset(first as isize * element), element)
        };
        if begins && element == 1 {
            // SAFETY: the keys lie side by side; sums are the worker's own.
            return unsafe { core::ptr::copy_nonoverlapping(sums.as_ptr(), to, sums.len()) };
        }
        for (j, &sum) in sums.iter().enumerate() {
            // SAFETY: one of these keys.
            let to = unsafe { &mut *to.offset(j as isize * element) };
            if begins {
                *to = sum;
            } else {
                keep_larger(to, sum);
            }
        }
    }
}

/// Rows and keys that one worker computes alone: rows of one sequence and key/value head.
pub(crate) struct IndexItem {
    pub(crate) sequence: usize,
    pub(crate) kv_head: usize,
    /// Query rows, from a multiple of those that are together.
    pub(crate) rows: Range<usize>,
    /// Keys, from a multiple of a key block.
    pub(crate) keys: Range<usize>,
}

/// Computes the scores of some rows and keys, −∞ where a key is hidden or beyond the sequence.
///
/// # Safety
/// These keys of the output's rows are this worker's alone; a row of the output belongs to rows of this item alone.
pub(crate) unsafe fn index_scores<S: Simd>(
    bound: BoundCall<'_, S>,
    tensors: &IndexTensors<'_>,
    item: &IndexItem,
    output: &IndexOutput<'_>,
    scratch: &mut Scratch,
) {
    let &IndexItem { sequence, kv_head, ref rows, ref keys } = item;
    for i in rows.clone() {
        // SAFETY: the caller guarantees that the keys of these rows are this worker's alone.
        unsafe { output.hide([sequence, kv_head, i], keys.start..keys.end.min(output.keys())) }
    }
    let call = bound.checked.call();
    let order = call.row_order(call.sequence(sequence).q_len);
    if call.group_size() == 0 || rows.is_empty() {
        return;
    }
    let together = order.rows_of_list(0).len() / call.group_size();
    for first in rows.clone().step_by(together) {
        let (of_group, most) = (order.rows_of_list(first / together), bound.tiling.most_rows);
        let sets = of_group.clone().step_by(most);
        let sets = sets.map(|row| RowSet::of(sequence, kv_head, row..of_group.end.min(row + most)));
        let group = Group { bound, tensors, first, rows: rows.end.min(first + together) - first, sets };
        // SAFETY: same contract.
        unsafe { group.compute(keys.clone(), output, scratch) }
    }
}

/// Query rows that are computed together.
struct Group<'a, S, I> {
    bound: BoundCall<'a, S>,
    tensors: &'a IndexTensors<'a>,
    /// First query row, and their number.
    first: usize,
    rows: usize,
    /// Their rows of all heads, in order: one set, unless these are more than a task's.
    sets: I,
}

impl<S: Simd, I: Iterator<Item = RowSet<'static>> + Clone> Group<'_, S, I> {
    /// Computes and writes the scores of some keys.
    ///
    /// # Safety
    /// As [`index_scores`].
    unsafe fn compute(&self, keys: Range<usize>, output: &IndexOutput<'_>, scratch: &mut Scratch) {
        let bound = self.bound;
        let task = |set: RowSet<'static>| AttentionTask::reading(bound, set, Next::Nothing);
        let Some(whole) = self.sets.clone().next().map(task) else { return };
        let (one, mut memory, mut query_memory) =
            (self.sets.clone().count() == 1, BlockMemory::new(), QueryMemory::Free);
        let mut rows = [IndexRow::NONE; MAX_TASK];
        for first in whole.blocks_in(keys) {
            scratch.regions(bound.tiling).values[..self.rows * KEY_BLOCK].fill(0.0);
            for set in self.sets.clone() {
                let (task, regions) = (task(set), &mut scratch.regions(bound.tiling));
                regions.query_memory = query_memory;
                if query_memory == QueryMemory::Free {
                    self.find_rows(&task, &mut rows);
                }
                let (queries, sums) = (Queries::of(&task, regions), core::mem::take(&mut regions.values));
                self.add(&mut KeyBlock::of(&task, first, queries, &mut memory, regions), &rows, sums);
            }
            if one {
                query_memory = QueryMemory::Filled;
            }
            let (len, [source, kv_head, key]) = (KEY_BLOCK.min(whole.key_count() - first), whole.index_of_key(first));
            let mut factors = [0.0; KEY_BLOCK];
            let given = self.tensors.factors.map(|of_keys| {
                for (j, factor) in factors[..len].iter_mut().enumerate() {
                    *factor = of_keys.get([source, kv_head, key + j, 0]).copied().unwrap_or(f32::NAN);
                }
                &factors[..len]
            });
            let sums = scratch.regions(bound.tiling).values;
            for (n, sums) in sums.chunks_mut(KEY_BLOCK).take(self.rows).enumerate() {
                finish_index_sums(bound.s, &mut sums[..len], given);
                // SAFETY: the caller guarantees that the keys of these rows are this worker's alone.
                unsafe { output.write([whole.set.sequence, kv_head, self.first + n], first, &sums[..len]) }
            }
        }
    }

    /// Finds the query row and the weight of each row of a task.
    fn find_rows(&self, task: &AttentionTask<'_, S>, rows: &mut [IndexRow; MAX_TASK]) {
        for row in task.rows(0..task.set.rows.len()) {
            let weight = self.tensors.weights.get([row.q_batch, row.head, row.at, 0]);
            rows[row.n] = IndexRow { query: row.i - self.first, weight: weight.copied().unwrap_or(f32::NAN) };
        }
    }

    /// Adds the scores of the task's rows to the sums of their query rows, row block by row block.
    fn add(&self, block: &mut KeyBlock<'_, '_, S>, rows: &[IndexRow], sums: &mut [f32]) {
        for row_block in block.task.row_blocks() {
            let rows = &rows[row_block.clone()];
            if block.compute_scores(row_block) {
                add_index_sums(self.bound.s, block.scores(rows.len()), rows, sums);
            } else {
                let hidden = rows.iter().map(|row| row.query * KEY_BLOCK);
                hidden.for_each(|first| sums[first..first + KEY_BLOCK].fill(f32::NEG_INFINITY));
            }
        }
    }
}
