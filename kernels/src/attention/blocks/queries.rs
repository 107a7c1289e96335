//! Query rows of a task: where they lie, or in scratch in the form that their products take.

use crate::attention::blocks::task::AttentionTask;
use crate::attention::products::by_arithmetic;
use crate::attention::products::multiply::Multiply;
use crate::attention::products::operands::QueryRow;
use crate::attention::scratch::{QueryMemory, Regions};
use crate::simd::Simd;
use crate::tensor::any::Tensor;
use crate::tensor::view::View;

/// Location of the task's queries.
#[derive(Clone, Copy)]
pub(crate) enum Queries<'a> {
    /// In the caller's memory, contiguous floats.
    InPlace,
    /// In scratch, one after the other, in the form of the [arithmetic](Multiply) that multiplies them by keys.
    Stored(&'a [f32]),
}

/// Returns true if each query is contiguous.
#[inline(always)]
pub(crate) fn are_readable_in_place(q: &View<'_>) -> bool {
    q.strides()[3] == 1 || q.shape()[3] == 1
}

impl<'r> Queries<'r> {
    /// Returns where the rows are. Those that cannot be read where they lie are stored in the regions' memory for queries,
    /// unless they are there already.
    pub(crate) fn of<S: Simd>(task: &AttentionTask<'_, S>, regions: &mut Regions<'r>) -> Self {
        if by_arithmetic!(S: task.products.keys, |A| A::READS_QUERIES)
            && let Tensor::F32(q) = &task.call.q
            && are_readable_in_place(q)
        {
            return Queries::InPlace;
        }
        let stored = core::mem::take(&mut regions.queries);
        if regions.query_memory == QueryMemory::Free {
            by_arithmetic!(S: task.products.keys, |A| store::<S, A>(task, regions.scores, stored));
        }
        Queries::Stored(stored)
    }
}

/// Stores the task's queries. `room` is the scratch of scores: none are computed yet, and it holds at least one query.
fn store<S: Simd, A: Multiply>(task: &AttentionTask<'_, S>, room: &mut [f32], stored: &mut [f32]) {
    let head_dim = task.tiling.head_dim;
    let (scale, channels) = (task.call.scale, task.call.kv.key_channels(task.set.kv_head));
    let ([basis, _], mut stored) = (task.call.kv.bases(), stored.chunks_exact_mut(A::query_floats(head_dim)));
    for (first, n) in task.stretches(0..task.set.rows.len()) {
        for (k, to) in (0..n).zip(&mut stored) {
            let row = first.after(k);
            // SAFETY: the task's rows are inside the call's queries, which have `head_dim` elements.
            unsafe {
                let row = task.call.q.rows(row.q_batch, row.head, row.at);
                A::store_query(task.s, QueryRow { row, head_dim, scale, channels, basis }, room, to);
            }
        }
    }
}
