//! Software prefetch of a task: the memory that tiles prefetch while they compute the current key block.

use crate::attention::blocks::task::{AttentionTask, Next, Row};
use crate::attention::call::outputs::Seen;
use crate::kv::cache::TokenPart;
use crate::kv::gathered::{self, AHEAD};
use crate::kv::key_block::{BlockValues, Keys};
use crate::kv::value_panels::ValueLayout;
use crate::matmul::int4;
use crate::matmul::int8::{self, QUAD};
use crate::matmul::prefetch::{MEMORY_BOUND_ROWS, PrefetchQueue};
use crate::simd::{Bf16x2, LANES, Simd};
use crate::tensor::any::AnyRows;
use crate::tensor::rows::{KEY_BLOCK, Rows, Table};

/// Number of first rows of a unit to prefetch, a panel's: later keys are prefetched by packing, later values by tiles.
const FIRST: usize = LANES;

/// Adds the memory to prefetch while a block is computed: the next block; with the last block the task's outputs
/// and the first block and queries of the next task. For a unit it is the memory the unit accumulates into, if that
/// is not in cache, the first rows of its values, and the first keys of the next unit: the rest is prefetched while the
/// unit is read. Values that lie one after the other, in a cache, are wholly prefetched that way.
#[inline]
pub(crate) fn of_block<S: Simd>(
    task: &AttentionTask<'_, S>,
    [first, len]: [usize; 2],
    values: BlockValues,
    prefetch: &mut PrefetchQueue,
) {
    if let Next::Near = task.next {
        return;
    }
    if let Next::Block { accumulated: (at, bytes), next } = &task.next {
        if task.set.rows.len() > MEMORY_BOUND_ROWS {
            if let Some((rows, first)) = next {
                push_block(&task.peek(rows), *first, prefetch);
            }
            return;
        }
        prefetch.push(*at, 0, 1, *bytes);
        let rows = match values {
            BlockValues::Rows { rows, .. } => Some((rows, len.min(FIRST), task.tiling.value_dim)),
            BlockValues::ValuePanels(panels) if panels.first().are_scattered() => {
                Some((panels.first(), len.min(FIRST), panels.layout().panel(0).len()))
            }
            BlockValues::Pairs(panels) if panels.first.are_scattered() => {
                Some((as_floats(panels.first), len.min(FIRST).div_ceil(2), panels.layout.panel(0).len()))
            }
            _ => None,
        };
        if let Some((rows, n, columns)) = rows {
            prefetch.push_rows(rows, n, columns);
            if let Some((rows, first)) = next {
                push_first_keys(&task.peek(rows), *first, prefetch);
            }
        }
        return;
    }
    if let Some(next) = task.blocks_in(first + 1..usize::MAX).next() {
        push_block(task, next, prefetch);
        return;
    }
    if let Some(out) = &task.outputs.out {
        push_rows(task, prefetch, task.tiling.value_dim, |row| {
            // SAFETY: the task's rows are inside the output.
            unsafe { out.rows(row.q_batch, row.head, row.at) }
        });
    }
    if task.outputs.out.is_none() {
        push_state(task, prefetch);
    }
    if let Next::Rows(rows) = &task.next {
        let next = task.peek(rows);
        push_opening(&next, prefetch);
        if next.outputs.state.as_ref().is_some_and(|state| state.seen == Seen::Keys) {
            push_state(&next, prefetch);
        }
    }
}

/// Prefetches the first keys and values after the block of a task's list that starts at key `first`: those of its next block, or of
/// the work after it.
pub(crate) fn next_listed<S: Simd>(task: &AttentionTask<'_, S>, first: usize) {
    match &task.next {
        Next::Near | Next::Block { next: None, .. } => {}
        Next::Block { next: Some((rows, first)), .. } => fetch_listed(&task.peek(rows), *first),
        _ if first + KEY_BLOCK < task.key_count() => fetch_listed(task, first + KEY_BLOCK),
        Next::Rows(rows) => fetch_listed(&task.peek(rows), 0),
        Next::Nothing => {}
    }
}

/// Prefetches the first keys and values of a block of a task's list: reading the block prefetches the others.
fn fetch_listed<S: Simd>(task: &AttentionTask<'_, S>, first: usize) {
    let Some(list) = task.list.filter(|list| list.len() > 0) else { return };
    let (at @ [source, head, first_key], keys) =
        (task.index_of_key(0), first.min(list.len())..list.len().min(first + AHEAD));
    // SAFETY: a sequence with listed keys has a first one. Addresses alone.
    if let Some((Keys::Rows(k), BlockValues::Rows { rows: v, .. })) = unsafe { task.call.kv.head_rows(at) } {
        let dims = [task.tiling.head_dim, task.tiling.value_dim];
        for number in keys.map(|key| list.key(key)) {
            [k, v].into_iter().zip(dims).for_each(|(rows, dim)| gathered::prefetch_row(task.s, rows, number, dim));
        }
        return;
    }
    for (key, len) in list.runs(keys) {
        let run = first_key + key..first_key + key + len;
        for part in [TokenPart::Key, TokenPart::Value] {
            let prefetch = &mut |at: *const u8, bytes| gathered::prefetch(task.s, at, bytes);
            task.call.kv.memory_of(part, [source, head], run.clone(), prefetch);
        }
    }
}

/// Adds the first keys of a block, if there are any.
fn push_first_keys<S: Simd>(task: &AttentionTask<'_, S>, first: usize, prefetch: &mut PrefetchQueue) {
    if !task.holds(first) || task.list.is_some() {
        return;
    }
    let len = FIRST.min(task.seq.kv_len - first);
    let (at, table) = (task.index_of_key(first), &mut Table::new());
    // SAFETY: `len` keys from `first` on exist, and their block is held.
    match unsafe { task.call.kv.keys(at, len, table) } {
        Keys::Rows(rows) => prefetch.push_rows(rows, len, task.tiling.head_dim),
        Keys::Packed(panels) if panels.are_scattered() => {
            prefetch.push_rows(panels, 1, LANES * task.tiling.head_dim);
        }
        Keys::Pairs(panels) if panels.are_scattered() => {
            prefetch.push_rows(as_floats(panels), 1, LANES * task.tiling.head_dim.div_ceil(2));
        }
        _ => {}
    }
}

/// Adds a block's keys and values.
fn push_block<S: Simd>(task: &AttentionTask<'_, S>, first: usize, prefetch: &mut PrefetchQueue) {
    let (d, kv) = (task.tiling.head_dim, &task.call.kv);
    // Pages are not prefetched: their rows are many short stretches.
    if !task.holds(first) || kv.is_paged() || task.list.is_some() {
        return;
    }
    let (at, len, table) = (task.index_of_key(first), KEY_BLOCK.min(task.seq.kv_len - first), &mut Table::new());
    // SAFETY: key `first` exists, and its block is held.
    let (keys, values) = unsafe { (kv.keys(at, len, table), kv.values(at, len, table)) };
    let needed = task.blocks.keys_in(first, len);
    // SAFETY: the block has these rows.
    let part = |rows: AnyRows| unsafe { rows.rows_from(needed.start.min(len - 1)) };
    match keys {
        Keys::Rows(rows) => prefetch.push_rows(part(rows), needed.len(), d),
        Keys::Packed(panels) => prefetch.push_rows(panels, len.div_ceil(LANES), LANES * d),
        Keys::Pairs(panels) => {
            prefetch.push_rows(as_floats(panels), len.div_ceil(LANES), LANES * d.div_ceil(2));
        }
        // Scales are not prefetched: they are a thirtieth of the memory, or of int4 an eighth.
        Keys::Int8 { panels, .. } => push_panels(prefetch, panels, len, int8::panel_bytes(d)),
        Keys::Int4 { panels, .. } => push_panels(prefetch, panels, len, int4::blocks(d) * int4::BLOCK_BYTES),
        Keys::E4m3 { panels, .. } => push_panels(prefetch, panels, len, LANES * d),
        // With the values.
        Keys::Latent | Keys::Parts(_) => {}
    }
    match values {
        BlockValues::Rows { rows, .. } => prefetch.push_rows(part(rows), needed.len(), task.tiling.value_dim),
        // The rows of latent keys hold the values.
        BlockValues::ValuePanels(_) if matches!(keys, Keys::Rows(_)) => {}
        BlockValues::ValuePanels(panels) => {
            // SAFETY: the block has at least one row.
            let first = unsafe { panels.first().first() };
            push_value_panels(prefetch, panels.layout(), first.at, first.element, len);
        }
        BlockValues::Pairs(panels) => {
            // SAFETY: the block has at least one row.
            let first = unsafe { panels.first.at(0) }.cast();
            push_value_panels(prefetch, panels.layout, first, size_of::<Bf16x2>(), len.div_ceil(2));
        }
        BlockValues::E4m3 { values, .. } => {
            // SAFETY: the block has at least one row.
            let first = unsafe { values.first.at(0) }.cast();
            push_value_panels(prefetch, values.layout, first, 1, len);
        }
        BlockValues::Int8 { values, .. } => push_fours(prefetch, values.layout, values.first, len),
        BlockValues::Int4 { values, .. } => push_fours(prefetch, values.layout, values.first, len),
    }
}

/// Adds the task's first key block and its queries.
fn push_opening<S: Simd>(task: &AttentionTask<'_, S>, prefetch: &mut PrefetchQueue) {
    if task.set.rows.is_empty() {
        return;
    }
    if let Some(first) = task.blocks().next() {
        push_block(task, first, prefetch);
    }
    push_rows(task, prefetch, task.tiling.head_dim, |row| {
        // SAFETY: the task's rows are inside the call's queries.
        unsafe { task.call.q.rows(row.q_batch, row.head, row.at) }
    });
}

/// Adds the outputs of the state that the task's rows are loaded from, or saved to, if there is one.
fn push_state<S: Simd>(task: &AttentionTask<'_, S>, prefetch: &mut PrefetchQueue) {
    if let Some(state) = &task.outputs.state {
        push_rows(task, prefetch, task.tiling.value_dim, |row| {
            // SAFETY: the task's rows are inside the state.
            let (first, element) = unsafe { state.out.row(row.q_batch, row.head, row.at) };
            AnyRows::F32(Rows::strided(first.cast_const(), state.out.strides()[2], element))
        });
    }
}

/// Adds the task's rows of q or of the output, as far as they belong to the first row's head.
#[inline]
fn push_rows<S: Simd>(
    task: &AttentionTask<'_, S>,
    prefetch: &mut PrefetchQueue,
    dim: usize,
    at: impl Fn(Row) -> AnyRows,
) {
    if let Some(row) = task.rows(0..1).next() {
        prefetch.push_rows(at(row), task.set.rows.len().min(task.seq.q_len - row.i), dim);
    }
}

/// Returns rows of pairs as rows of floats, which are as large.
fn as_floats(pairs: Rows<Bf16x2>) -> AnyRows {
    AnyRows::F32(pairs.cast())
}

/// Adds the panels of `len` keys, at least one, of `bytes` each.
fn push_panels<T>(prefetch: &mut PrefetchQueue, panels: Rows<T>, len: usize, bytes: usize) {
    // SAFETY: there is a panel.
    let first = unsafe { panels.at(0) };
    prefetch.push(first.cast(), 0, 1, len.div_ceil(LANES) * bytes);
}

/// Adds the values of `len` keys, at least one, in fours.
fn push_fours<T>(prefetch: &mut PrefetchQueue, layout: ValueLayout, fours: Rows<T>, len: usize) {
    // SAFETY: there is a row.
    let first = unsafe { fours.at(0) };
    push_value_panels(prefetch, layout, first.cast(), size_of::<T>(), len.div_ceil(QUAD));
}

/// Adds `n` rows of value panels that start at an address; elements are `bytes` each. Where the panels differ in width, the
/// memory added is only approximately those rows.
fn push_value_panels(prefetch: &mut PrefetchQueue, layout: ValueLayout, first: *const u8, bytes: usize, n: usize) {
    let cols = layout.panel(0).len() * bytes;
    prefetch.push(first, (layout.rows * cols) as isize, (layout.width * bytes).div_ceil(cols), n * cols);
}
