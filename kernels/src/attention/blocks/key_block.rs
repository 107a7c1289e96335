//! Key block that the fused loop is computing.

use crate::attention::blocks::key_numbers::{KeyNumbers, NumberMemory};
use crate::attention::blocks::prefetch;
use crate::attention::blocks::queries::Queries;
use crate::attention::blocks::task::AttentionTask;
use crate::attention::call::row_mods::PanelClasses;
use crate::attention::call::selection::KeyList;
use crate::attention::scratch::{MAX_ROW_BLOCK, Regions};
use crate::attention::steps::exact_rows::ExactKeys;
use crate::attention::steps::span::Spans;
use crate::kv::gathered::{self, Gathering};
use crate::kv::key_block::{BlockValues, Keys};
use crate::matmul::pack::NonFinite;
use crate::matmul::prefetch::PrefetchQueue;
use crate::simd::{LANES, Simd};
use crate::tensor::rows::{KEY_BLOCK, Table};
use core::marker::PhantomData;
use core::ops::Range;

/// Key block that the fused loop is computing: its keys, its values, what of it is packed, and what to prefetch.
///
/// Made only by [`Self::of`], so its keys and values exist in the task's sequence, and their tables live as
/// long as it does: its methods rely on that. `task`, `first`, `len`, `keys` and `values` are set here alone; elsewhere
/// they are read.
pub(crate) struct KeyBlock<'b, 'r, S> {
    pub(crate) task: &'b AttentionTask<'b, S>,
    /// First key, counted among those that the task computes: in the sequence, or in the list of its rows.
    pub(crate) first: usize,
    /// Number of keys.
    pub(crate) len: usize,
    pub(crate) keys: Keys,
    pub(crate) values: BlockValues,
    /// Numbers of the keys in their sequence, and their positions.
    pub(crate) numbers: KeyNumbers<'b>,
    /// Exact tokens among the keys.
    pub(crate) exact: Option<ExactKeys<'b>>,
    pub(crate) queries: Queries<'b>,
    /// Keys that each tile of the current row block needs.
    pub(crate) spans: &'b mut Spans,
    /// Classes that a mask function, if there is one, gives the rows of the current row block.
    pub(crate) classes: &'b mut [PanelClasses; MAX_ROW_BLOCK],
    pub(crate) regions: &'b mut Regions<'r>,
    /// Keys that are packed if the block's are not: those that some row of the task computes, counted from the block's first.
    /// They begin with a panel.
    pub(crate) needed: Range<usize>,
    /// First key of the packed run in scratch, if any.
    pub(crate) packed_keys: Option<usize>,
    /// First column of the packed values in scratch, if any, and how they were packed.
    pub(crate) packed_values: Option<(usize, NonFinite)>,
    /// True if this is the first block that the current row block accumulates, and every tile's span of it is nonempty:
    /// running outputs are written, not read.
    pub(crate) fresh: bool,
    /// Step that multiplies scores by the scale.
    pub(crate) scaling: Scaling,
    /// Copies of the scores that the backward pass asks for.
    pub(crate) copies: ScoreCopies<'b>,
    /// Memory to prefetch while this block is computed.
    pub(crate) prefetch: &'b mut PrefetchQueue,
    /// Tables of addresses that `keys` and `values` may point at.
    tables: PhantomData<&'b mut [Table; 2]>,
}

/// Step that multiplies scores by the scale.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Scaling {
    /// QKᵀ, as every step after it expects.
    First,
    /// The softmax, where nothing before it asks for the numbers.
    InSoftmax,
}

impl Scaling {
    /// Returns the factors by which QKᵀ, and then the softmax, multiply scores.
    pub(crate) fn factors(self, scale: f32) -> [f32; 2] {
        match self {
            Self::First => [scale, 1.0],
            Self::InSoftmax => [1.0, scale],
        }
    }
}

/// Memory for what the backward pass needs of scores before they are final, each `[row][SCORE_STRIDE]`.
#[derive(Default)]
pub(crate) struct ScoreCopies<'b> {
    /// Derivatives of the softcap.
    pub(crate) derivatives: Option<&'b mut [f32]>,
    /// Scores after bias and ALiBi, before the caller's score function.
    pub(crate) biased: Option<&'b mut [f32]>,
}

/// Memory that a task's key blocks use one after the other.
pub(crate) struct BlockMemory {
    spans: Spans,
    classes: [PanelClasses; MAX_ROW_BLOCK],
    /// Tables for the addresses of a block's key rows and value rows, used if the rows are scattered.
    tables: [Table; 2],
    /// Numbers and positions of a block's keys, used if they are listed.
    numbers: NumberMemory,
    /// Memory to prefetch while a block is computed.
    prefetch: PrefetchQueue,
}

impl BlockMemory {
    #[inline(always)]
    pub(crate) fn new() -> Self {
        Self {
            spans: Spans::NONE,
            classes: [PanelClasses::ALL; MAX_ROW_BLOCK],
            tables: [Table::new(), Table::new()],
            numbers: NumberMemory::new(),
            prefetch: PrefetchQueue::nothing(),
        }
    }
}

impl<'b, 'r, S: Simd> KeyBlock<'b, 'r, S> {
    /// Returns the key block of a task that starts at key `first`.
    ///
    /// # Panics
    /// If no block that is there starts at `first`.
    #[inline(always)]
    pub(crate) fn of(
        task: &'b AttentionTask<'b, S>,
        first: usize,
        queries: Queries<'b>,
        memory: &'b mut BlockMemory,
        regions: &'b mut Regions<'r>,
    ) -> Self {
        assert!(task.holds(first), "no block of the task's keys");
        let (at, len) = (task.index_of_key(first), KEY_BLOCK.min(task.key_count() - first));
        let BlockMemory { spans, classes, tables: [key_table, value_table], numbers, prefetch } = memory;
        // SAFETY: keys `first .. first + len` exist and their block is held, as asserted, or those of the list do: a checked call's
        // lists name keys that are there. The tables and the room are borrowed for as long as the block exists.
        let (keys, values) = unsafe {
            match task.list {
                None => (task.call.kv.keys(at, len, key_table), task.call.kv.values(at, len, value_table)),
                Some(list) => listed(task, list, first..first + len, [key_table, value_table], regions.gathered),
            }
        };
        let numbers = KeyNumbers::of(task, first, len, numbers);
        let exact = task.call.kv.exact_rows([task.seq.source, task.set.kv_head]);
        prefetch.clear();
        prefetch::of_block(task, [first, len], values, prefetch);
        Self {
            task,
            first,
            len,
            keys,
            values,
            numbers,
            exact: exact.and_then(|rows| ExactKeys::new(rows, (0..len).map(|j| numbers.number(j)))),
            queries,
            spans,
            classes,
            regions,
            needed: task.blocks.keys_in(first, len),
            packed_keys: None,
            packed_values: None,
            fresh: false,
            scaling: Scaling::First,
            copies: ScoreCopies::default(),
            prefetch,
            tables: PhantomData,
        }
    }
}

/// Returns keys of a task's list and their values: single keys of tensors, and others that are rows somewhere, copied to `room`.
///
/// # Safety
/// The keys exist, and their blocks are held. The tables and the room outlive the result, and do not change meanwhile.
#[inline(always)]
unsafe fn listed<S: Simd>(
    task: &AttentionTask<'_, S>,
    list: KeyList<'_>,
    keys: Range<usize>,
    tables: [&mut Table; 2],
    room: &mut [f32],
) -> (Keys, BlockValues) {
    let (kv, at) = (&task.call.kv, task.index_of_key(0));
    let together = list.key(keys.end - 1) - list.key(keys.start) == keys.len() - 1;
    let single = list.unit() < LANES && !together;
    let (dims, [source, head, first]) = (kv.dims(), at);
    // SAFETY: same contract; a sequence with listed keys has a first one.
    unsafe {
        if single && let Some(rows) = kv.head_rows(at) {
            let number = |j: usize| list.key(keys.start + j);
            return gathered::gather(task.s, rows, Gathering { len: keys.len(), dims, room }, number);
        }
        let runs = list.runs(keys.clone()).map(|(key, len)| (first + key, len));
        let listed = kv.listed([source, head], runs, tables, room);
        match single && listed.0.are_scattered_rows() {
            true => gathered::gather(task.s, listed, Gathering { len: keys.len(), dims, room }, |j| j),
            false => listed,
        }
    }
}
