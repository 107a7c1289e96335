//! Query rows of a task in the form that the keys need: in place, copied, as pairs, or as bytes.

use crate::attention::blocks::task::AttentionTask;
use crate::attention::scratch::{QueryMemory, Regions};
use crate::attention::steps::qk_int8::Int8Queries;
use crate::kv::key_block::QueryForm;
use crate::matmul::int4;
use crate::matmul::int8::{self, QuerySize};
use crate::matmul::pack::{self, NonFinite};
use crate::simd::aligned::{elements, elements_mut};
use crate::simd::{Bf16x2, LANES, Simd};
use crate::tensor::any::Tensor;
use crate::tensor::element::{Bf16, Element};
use crate::tensor::view::View;

/// Location and form of the task's queries.
#[derive(Clone, Copy)]
pub(crate) enum Queries<'a> {
    /// In the caller's memory, contiguous floats.
    InPlace,
    /// Copied, `[row of the task][head_dim]`.
    Copied(&'a [f32]),
    /// As bfloat16 pairs, `[row of the task][pairs]`.
    Pairs(&'a [Bf16x2]),
    /// As bytes, all of the task's.
    Int8(Int8Queries<'a>),
}

/// Returns true if each query is contiguous.
#[inline(always)]
pub(crate) fn are_readable_in_place(q: &View<'_>) -> bool {
    q.strides()[3] == 1 || q.shape()[3] == 1
}

impl<'r> Queries<'r> {
    /// Copies the task's queries if they are not contiguous, or turns them into pairs or bytes: they take the regions'
    /// memory for queries, where nothing is written if they are there already. Returns where the rows are.
    pub(crate) fn of<S: Simd>(task: &AttentionTask<'_, S>, regions: &mut Regions<'r>) -> Self {
        match task.call.kv.query_form(task.set.kv_head) {
            QueryForm::F32 => {}
            QueryForm::Int8 { channels } => {
                return bytes(task, QuerySize::int8(task.tiling.head_dim), channels, regions);
            }
            QueryForm::Int4 => return bytes(task, int4::query_size(task.tiling.head_dim), None, regions),
        }
        if task.native_keys() {
            return pairs(task, regions);
        }
        if let Tensor::F32(q) = &task.call.q
            && are_readable_in_place(q)
        {
            return Queries::InPlace;
        }
        let copies = core::mem::take(&mut regions.queries);
        if regions.query_memory == QueryMemory::Free {
            copy(task, copies);
        }
        Queries::Copied(copies)
    }
}

/// Copies the task's queries, widened, one after the other. Not by way of the keys' scratch, where the backward pass has packed
/// keys by then.
fn copy<S: Simd>(task: &AttentionTask<'_, S>, copies: &mut [f32]) {
    let d = task.tiling.head_dim;
    for (row, copy) in task.rows(0..task.set.rows.len()).zip(copies.chunks_exact_mut(d)) {
        // SAFETY: the task's rows are inside the call's queries, which have `d` elements.
        unsafe {
            let rows = task.call.q.rows(row.q_batch, row.head, row.at);
            if d.is_multiple_of(LANES) {
                pack::pack_rows(task.s, rows, [1, d], NonFinite::Ignored, copy);
            } else {
                copy.iter_mut().enumerate().for_each(|(i, x)| *x = rows.get(0, i));
            }
        }
    }
}

/// Calls `take(row)` for each of the task's queries, widened or rounded to `T` and filled up with zeros to whole vectors, in the
/// scratch of keys: none are packed yet, and it holds sixteen rows or more.
fn for_each_row<S: Simd, T: Element>(task: &AttentionTask<'_, S>, scratch: &mut [f32], mut take: impl FnMut(&mut [T])) {
    let d = task.tiling.head_dim;
    let wide = &mut elements_mut(scratch)[..d.next_multiple_of(LANES)];
    for row in task.rows(0..task.set.rows.len()) {
        // SAFETY: the task's rows are inside the call's queries, which have `d` elements.
        unsafe {
            let rows = task.call.q.rows(row.q_batch, row.head, row.at);
            pack::pack_rows(task.s, rows, [1, d], NonFinite::Ignored, wide);
        }
        take(wide);
    }
}

/// Rounds the task's queries to pairs.
fn pairs<'r, S: Simd>(task: &AttentionTask<'_, S>, regions: &mut Regions<'r>) -> Queries<'r> {
    let pairs = core::mem::take(&mut regions.queries);
    if regions.query_memory == QueryMemory::Free {
        let mut halves = elements_mut(pairs).chunks_exact_mut(task.tiling.head_dim.next_multiple_of(2));
        for_each_row(task, regions.keys, |row: &mut [Bf16]| {
            // An odd last element is paired with the padding.
            if let Some(halves) = halves.next() {
                halves.copy_from_slice(&row[..halves.len()]);
            }
        });
    }
    Queries::Pairs(elements(pairs))
}

/// Quantises the task's queries to bytes. They are multiplied by the scales of the keys' channels first, so that
/// QKᵀ reads only the keys' bytes.
fn bytes<'r, S: Simd>(
    task: &AttentionTask<'_, S>,
    size: QuerySize,
    channels: Option<&[f32]>,
    regions: &mut Regions<'r>,
) -> Queries<'r> {
    let (d, n) = (task.tiling.head_dim, task.set.rows.len());
    let (quads, rows) = int8::cut_queries(core::mem::take(&mut regions.queries), n, size);
    if regions.query_memory == QueryMemory::Filled {
        return Queries::Int8(Int8Queries { quads, rows, size });
    }
    let mut places = quads.chunks_exact_mut(size.quads).zip(rows.chunks_exact_mut(size.sums));
    for_each_row(task, regions.keys, |row| {
        let Some((quads, sums)) = places.next() else { return };
        let row = &mut row[..d];
        if let Some(channels) = channels {
            task.s.vectorize(
                #[inline(always)]
                || row.iter_mut().zip(channels).for_each(|(x, scale)| *x *= scale),
            );
        }
        let whole = int8::quantise_query(task.s, row, task.call.scale, quads);
        match sums {
            [sum] => *sum = whole,
            blocks => int4::block_sums(whole, quads, blocks),
        }
    });
    Queries::Int8(Int8Queries { quads, rows, size })
}
