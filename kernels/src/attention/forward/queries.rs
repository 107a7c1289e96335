//! Query rows of a task in the form that the keys need: in place, copied, as pairs, or as bytes.

use crate::attention::forward::task::AttentionTask;
use crate::attention::steps::by_isa::Steps;
use crate::attention::tiling::Regions;
use crate::kv::key_block::QueryForm;
use crate::matmul::bf16_pairs::as_halves;
use crate::matmul::int8;
use crate::matmul::pack::NonFinite;
use crate::simd::{Bf16x2, LANES, Query4};
use crate::tensor::any::Tensor;
use crate::tensor::view::View;

/// Location and form of the task's queries.
#[derive(Clone, Copy)]
pub(crate) enum Queries<'a> {
    /// Contiguous in the caller's memory.
    InPlace(&'a View<'a>),
    /// Copied to scratch, `[row of the task][head_dim]`.
    Copied(*const f32),
    /// As bfloat16 pairs in scratch, `[row of the task][pairs]`.
    Pairs(*const Bf16x2),
    /// As bytes in scratch.
    Int8(Int8Queries),
}

/// Queries quantised to bytes.
#[derive(Clone, Copy)]
pub(crate) struct Int8Queries {
    /// Bytes, `[row of the task][quads]`.
    pub(crate) quads: *const Query4,
    /// Sum and factor of each row.
    pub(crate) rows: *const int8::Row,
}

impl<'t, S: Steps> AttentionTask<'t, '_, S> {
    /// Copies the task's queries if they are not contiguous, or turns them into pairs or bytes. Returns where the rows
    /// are.
    ///
    /// # Safety
    /// Same contract as [`Self::run`].
    pub(crate) unsafe fn queries(&self, regions: &mut Regions<'_>) -> Queries<'t> {
        let d = self.tiling.head_dim;
        if let QueryForm::Bytes { channels } = self.call.kv.query_form(self.task.kv_head) {
            // SAFETY: the caller guarantees the contract of `run`.
            return unsafe { self.query_bytes(channels, regions) };
        }
        if self.native()[0] {
            // SAFETY: the caller guarantees the contract of `run`.
            return unsafe { self.query_pairs(regions) };
        }
        if let Tensor::F32(q) = &self.call.q
            && (q.strides()[3] == 1 || d == 1)
        {
            return Queries::InPlace(q);
        }
        for (row, copy) in self.rows(0..self.task.rows.len()).zip(regions.queries.chunks_exact_mut(d)) {
            // SAFETY: the row is inside the call's queries and has `d` elements.
            unsafe {
                let rows = self.call.q.rows(self.seq.batch, row.head, self.seq.first_row + row.i);
                if d.is_multiple_of(LANES) {
                    self.s.pack_rows(rows, [1, d], NonFinite::Ignored, copy);
                } else {
                    copy.iter_mut().enumerate().for_each(|(i, x)| *x = rows.get(0, i));
                }
            }
        }
        Queries::Copied(regions.queries.as_ptr())
    }

    /// Rounds the task's queries to pairs.
    ///
    /// # Safety
    /// Same contract as [`Self::run`].
    unsafe fn query_pairs(&self, regions: &mut Regions<'_>) -> Queries<'t> {
        let (d, n) = (self.tiling.head_dim, self.task.rows.len());
        // No keys are packed yet, so their scratch is free: sixteen rows or more.
        let whole = &mut as_halves(regions.keys)[..d.next_multiple_of(LANES)];
        let pairs = as_halves(regions.queries).chunks_exact_mut(d.next_multiple_of(2));
        for (row, pairs) in self.rows(0..n).zip(pairs) {
            // SAFETY: the row is inside the call's queries and has `d` elements.
            unsafe {
                let rows = self.call.q.rows(self.seq.batch, row.head, self.seq.first_row + row.i);
                self.s.round_rows(rows, [1, d], NonFinite::Ignored, whole);
            }
            // An odd last element is paired with the padding.
            pairs.copy_from_slice(&whole[..pairs.len()]);
        }
        Queries::Pairs(regions.queries.as_ptr().cast())
    }

    /// Quantises the task's queries to bytes. They are multiplied by the scales of the keys' channels first, so that
    /// QKᵀ reads only the keys' bytes.
    ///
    /// # Safety
    /// Same contract as [`Self::run`].
    unsafe fn query_bytes(&self, channels: Option<&[f32]>, regions: &mut Regions<'_>) -> Queries<'t> {
        let (d, n) = (self.tiling.head_dim, self.task.rows.len());
        let (quads, rows) = int8::cut_queries(regions.queries, n, d);
        // Keys are not packed here, so their scratch is free: sixteen rows or more.
        let wide = &mut regions.keys[..d.next_multiple_of(LANES)];
        for ((row, quads), factors) in self.rows(0..n).zip(quads.chunks_exact_mut(int8::quads(d))).zip(&mut *rows) {
            // SAFETY: the row is inside the call's queries and has `d` elements.
            unsafe {
                let rows = self.call.q.rows(self.seq.batch, row.head, self.seq.first_row + row.i);
                self.s.pack_rows(rows, [1, d], NonFinite::Ignored, wide);
            }
            let row = &mut wide[..d];
            if let Some(channels) = channels {
                self.s.vectorize(
                    #[inline(always)]
                    || row.iter_mut().zip(channels).for_each(|(x, scale)| *x *= scale),
                );
            }
            *factors = self.s.quantise_query(row, self.call.scale, quads);
        }
        Queries::Int8(Int8Queries { quads: quads.as_ptr(), rows: rows.as_ptr() })
    }
}
