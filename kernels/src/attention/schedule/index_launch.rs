//! Launch of an indexer: groups of rows by chunks of keys, which workers take from a queue.

use crate::attention::blocks::task::BoundCall;
use crate::attention::call::Call;
use crate::attention::call::checked::CheckedCall;
use crate::attention::call::mods::Mods;
use crate::attention::call::row_mods::{AnyMods, RowMods};
use crate::attention::call::selection::SelectedKeys;
use crate::attention::forward::index_scores::{IndexItem, IndexOutput, IndexTensors, MOST_TOGETHER, index_scores};
use crate::attention::scratch::{MAX_TASK, Scratch, Tiling};
use crate::simd::Simd;
use crate::simd::isa::Isa;
use crate::simd::tiles::BLOCK;
use crate::tensor::misfit::{Fault, Misfit, one_a_row, same, same_rows};
use crate::tensor::rows::KEY_BLOCK;
use crate::tensor::view::View;
use crate::tensor::view_mut::ViewMut;
use crate::work_queue::Queue;
use core::ops::Range;

/// Checked call of an indexer, with the weights of its heads: they fit together.
#[derive(Debug)]
pub struct IndexCall<'a> {
    checked: CheckedCall<'a>,
    tensors: IndexTensors<'a>,
    /// Number of query rows that are computed together.
    together: usize,
}

impl<'a> IndexCall<'a> {
    /// Takes a call and weights `[batch, heads, q_len, 1]`.
    ///
    /// # Errors
    /// The first misfit.
    pub fn new(checked: CheckedCall<'a>, weights: View<'a>) -> Result<Self, Misfit> {
        let call = checked.call();
        same_rows("weights", weights.shape(), call.q.shape(), "q")?;
        one_a_row("weights", weights.shape()[3])?;
        if call.options.selected.is_some() {
            return Fault::Needs("all keys, not lists of them").of("index scores");
        }
        // On every instruction set a task holds the heads of so many rows.
        let [head_dim, value_dim] = call.kv.dims();
        let task = Tiling::new(head_dim, value_dim, MAX_TASK, BLOCK).task_rows();
        let together = (task / call.group_size().max(1)).clamp(1, MOST_TOGETHER);
        let checked = checked.with_rows_together(together);
        Ok(Self { checked, tensors: IndexTensors { weights, factors: None }, together })
    }

    /// Sets factors `[batch, kv_heads, kv_len, 1]` of the keys' scores.
    ///
    /// # Errors
    /// If the shape is not that of the keys.
    pub fn factors(mut self, factors: View<'a>) -> Result<Self, Misfit> {
        let (shape, expected) = (factors.shape(), self.call().kv.k_shape());
        same_rows("key factors", shape, expected, self.call().kv.names()[0])?;
        one_a_row("key factors", shape[3])?;
        self.tensors.factors = Some(factors);
        Ok(self)
    }

    /// Inputs and options.
    pub fn call(&self) -> &Call<'a> {
        self.checked.call()
    }

    /// Returns the checked call.
    pub fn checked(&self) -> &CheckedCall<'a> {
        &self.checked
    }

    /// Returns the tiling for an instruction set.
    pub fn tiling(&self, isa: Isa) -> Tiling {
        let ([head_dim, value_dim], rates) = (self.call().kv.dims(), self.call().rates(isa));
        Tiling::new(head_dim, value_dim, MAX_TASK, rates.tile.0).with_parts(rates.parts)
    }

    /// Returns the number of rows of groups that cut neither the rows computed together nor lists that `rows` rows share.
    pub fn group_rows(&self, rows: usize) -> usize {
        let longest = self.call().longest().0.max(1);
        if rows >= longest {
            return longest.next_multiple_of(self.together);
        }
        (1..=self.together)
            .map(|n| rows.saturating_mul(n))
            .find(|all| all.is_multiple_of(self.together))
            .unwrap_or(rows)
    }

    /// Checks that an output has a row for each query row and key/value head, `[batch, kv_heads, q_len, kv_len]`.
    ///
    /// # Errors
    /// The first misfit.
    pub fn fits(&self, scores: &ViewMut<'_>) -> Result<(), Misfit> {
        let (call, (rows, keys)) = (self.call(), self.call().longest());
        let expected = [call.sequence_count(), call.kv.kv_heads(), rows, keys];
        let mut sizes = ["batch", "heads", "rows", "columns"].into_iter().zip(scores.shape()).zip(expected);
        sizes.try_for_each(|((what, got), expected)| same("index scores", what, got, expected, "the call"))
    }
}

/// Call of an indexer, and memory for the scores of some groups of rows.
pub struct IndexLaunch<'a> {
    call: &'a IndexCall<'a>,
    tiling: Tiling,
    /// Groups of rows, without lists, and those of the launch.
    groups: &'a SelectedKeys,
    range: Range<usize>,
    /// Number of keys of a chunk.
    chunk: usize,
    output: IndexOutput<'a>,
    queue: Queue,
}

/// Chunks of keys, in key blocks: few enough that storing queries takes no time beside a chunk, and as many as keep workers busy.
const CHUNKS: [usize; 2] = [4, 32];

impl<'a> IndexLaunch<'a> {
    /// Computes the scores of every row, for `workers` workers, by [groups](IndexCall::group_rows) of rows.
    ///
    /// # Panics
    /// If the output or the groups do not fit the call.
    pub fn of_rows(
        call: &'a IndexCall<'a>,
        isa: Isa,
        groups: &'a SelectedKeys,
        workers: usize,
        scores: ViewMut<'a>,
    ) -> Self {
        assert!(call.fits(&scores).is_ok(), "an output of another call");
        let [batch, heads, rows, keys] = scores.shape();
        let output = IndexOutput::Rows(scores);
        for (sequence, kv_head) in (0..batch).flat_map(|sequence| (0..heads).map(move |head| (sequence, head))) {
            for i in call.call().sequence(sequence).q_len..rows {
                // SAFETY: no worker has begun.
                unsafe { output.hide([sequence, kv_head, i], 0..keys) }
            }
        }
        Self::new(call, isa, (groups, 0..groups.lists()), workers, output)
    }

    /// Computes the largest scores of each list of a selection, from the first list of a range of groups on, whose rows have the
    /// lists whole.
    ///
    /// # Panics
    /// If groups or lists are of other rows.
    pub fn of_lists(
        call: &'a IndexCall<'a>,
        isa: Isa,
        (groups, range): (&'a SelectedKeys, Range<usize>),
        workers: usize,
        (of, scores): (&'a SelectedKeys, ViewMut<'a>),
    ) -> Self {
        let first = first_list(groups, of, range.start);
        assert!(scores.shape()[..3] == [1, 1, first_list(groups, of, range.end) - first], "an output of other lists");
        assert!(scores.shape()[3] == call.call().longest().1, "an output of other keys");
        Self::new(call, isa, (groups, range), workers, IndexOutput::Lists { scores, of, first })
    }

    fn new(
        call: &'a IndexCall<'a>,
        isa: Isa,
        (groups, range): (&'a SelectedKeys, Range<usize>),
        workers: usize,
        output: IndexOutput<'a>,
    ) -> Self {
        let kv_heads = call.call().kv.kv_heads();
        let rows_fit = |sequence: usize| call.call().sequence(sequence).q_len == groups.q_lens()[sequence];
        let fits = groups.sequences() == call.call().sequence_count() && (0..groups.sequences()).all(rows_fit);
        let whole = groups.rows().is_multiple_of(call.together) && range.end <= groups.lists();
        let of = if let IndexOutput::Lists { of, .. } = &output { of } else { groups };
        let lists_fit = of.q_lens() == groups.q_lens() && of.heads() == kv_heads;
        assert!(fits && whole && groups.heads() == kv_heads && lists_fit, "groups of other rows");
        let blocks = output.keys().div_ceil(KEY_BLOCK);
        let each = range.len().saturating_mul(blocks) / (4 * workers.max(1));
        let chunk = each.clamp(CHUNKS[0], CHUNKS[1]);
        let queue = Queue::new(range.len() * blocks.div_ceil(chunk));
        Self { call, tiling: call.tiling(isa), groups, range, chunk: chunk * KEY_BLOCK, output, queue }
    }

    /// Takes pieces of work and computes them until none is left. Any number of workers may call this at once, each with its own
    /// scratch, on the instruction set that the launch was made for.
    pub fn work(&self, isa: Isa, scratch: &mut Scratch) {
        const NONE: Mods = Mods::new();
        dispatch!(isa, |s| self.work_on(s, AnyMods::of(&NONE).0, scratch));
    }

    fn work_on<S: Simd>(&self, s: S, mods: &dyn RowMods<S>, scratch: &mut Scratch) {
        let bound = BoundCall::new(s, mods, &self.call.checked, &self.tiling);
        while let Some(number) = self.queue.take() {
            let (group, first) = (self.range.start + number % self.range.len(), number / self.range.len() * self.chunk);
            let place = self.groups.place(group).0;
            let rows = place.row..self.groups.q_lens()[place.sequence].min(place.row + self.groups.rows());
            let keys = first..first + self.chunk;
            let item = IndexItem { sequence: place.sequence, kv_head: place.head, rows, keys };
            // SAFETY: every number is taken once, and no two have keys of a row in common; a list's rows are in one group.
            unsafe { index_scores(bound, &self.call.tensors, &item, &self.output, scratch) }
        }
    }
}

/// Returns the number of the first list of a group, or of all lists.
#[doc(hidden)] // for `sdpa`
pub fn first_list(groups: &SelectedKeys, lists: &SelectedKeys, group: usize) -> usize {
    if group == groups.lists() {
        return lists.lists();
    }
    let place = groups.place(group).0;
    lists.list_index(place.sequence, place.head, place.row / lists.rows())
}

impl core::fmt::Debug for IndexLaunch<'_> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("IndexLaunch").field("call", &self.call).field("range", &self.range).finish_non_exhaustive()
    }
}
