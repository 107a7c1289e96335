//! A task's query rows, as the keys want them: where they lie, copied, in pairs, or as bytes.

use crate::attention::forward::task::AttentionTask;
use crate::attention::mods::{MaskMod, Mods, ProbMod, ScoreMod};
use crate::attention::steps::by_isa::Steps;
use crate::attention::tiling::Regions;
use crate::kv::key_block::QueryForm;
use crate::matmul::bf16_pairs::as_halves;
use crate::matmul::int8;
use crate::matmul::pack::NonFinite;
use crate::simd::{Bf16x2, LANES, Query4};
use crate::tensor::any::Tensor;
use crate::tensor::view::View;

/// Where the task's queries are.
#[derive(Clone, Copy)]
pub(crate) enum Queries<'a> {
    /// In the caller's memory, contiguous.
    InPlace(&'a View<'a>),
    /// Copied to scratch, `[row of the task][head_dim]`.
    Copied(*const f32),
    /// In pairs in scratch, `[row of the task][pairs]`.
    Bf16Dot(*const Bf16x2),
    /// As bytes in scratch, `[row of the task][quads]`, and what each row needs besides.
    Bytes(*const Query4, *const int8::Row),
}

impl<'t, S: Steps, A: ScoreMod, B: MaskMod, C: ProbMod> AttentionTask<'t, '_, S, Mods<A, B, C>> {
    /// Copies the task's queries if they are not contiguous, or makes pairs or bytes of them, and says where the rows are.
    ///
    /// # Safety
    /// As for [`Self::run`].
    pub(crate) unsafe fn queries(&self, regions: &mut Regions<'_>) -> Queries<'t> {
        let d = self.tiling.head_dim;
        if let QueryForm::Bytes { channels } = self.call.kv.query_form(self.task.kv_head) {
            // SAFETY: passed on.
            return unsafe { self.query_bytes(channels, regions) };
        }
        if self.native()[0] {
            // SAFETY: passed on.
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

    /// Makes pairs of the task's queries.
    ///
    /// # Safety
    /// As for [`Self::run`].
    unsafe fn query_pairs(&self, regions: &mut Regions<'_>) -> Queries<'t> {
        let (d, n) = (self.tiling.head_dim, self.task.rows.len());
        // Nobody has packed keys yet: their scratch is free, sixteen rows or more.
        let whole = &mut as_halves(regions.keys)[..d.next_multiple_of(LANES)];
        let pairs = as_halves(regions.queries).chunks_exact_mut(d.next_multiple_of(2));
        for (row, pairs) in self.rows(0..n).zip(pairs) {
            // SAFETY: the row is inside the call's queries and has `d` elements.
            unsafe {
                let rows = self.call.q.rows(self.seq.batch, row.head, self.seq.first_row + row.i);
                self.s.round_rows(rows, [1, d], NonFinite::Ignored, whole);
            }
            // What it was filled up with stands beside an odd element.
            pairs.copy_from_slice(&whole[..pairs.len()]);
        }
        Queries::Bf16Dot(regions.queries.as_ptr().cast())
    }

    /// Makes bytes of the task's queries. The scales of the keys' channels come first: then all that is left of the keys
    /// are bytes.
    ///
    /// # Safety
    /// As for [`Self::run`].
    unsafe fn query_bytes(&self, channels: Option<&[f32]>, regions: &mut Regions<'_>) -> Queries<'t> {
        let (d, n) = (self.tiling.head_dim, self.task.rows.len());
        let (bytes, besides) = int8::cut_queries(regions.queries, n, d);
        // Nobody packs keys here, so their scratch is free: sixteen rows or more.
        let wide = &mut regions.keys[..d.next_multiple_of(LANES)];
        for ((row, bytes), besides) in self.rows(0..n).zip(bytes.chunks_exact_mut(int8::quads(d))).zip(&mut *besides) {
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
            *besides = self.s.quantise_query(row, self.call.scale, bytes);
        }
        Queries::Bytes(bytes.as_ptr(), besides.as_ptr())
    }
}
