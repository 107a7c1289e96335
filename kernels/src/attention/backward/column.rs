//! Column of the backward pass: one key block of one key/value head, and all the query rows that share the head.
//!
//! ```text
//! for each query head of the group, in order:
//!     (dK, dV) ← 0
//!     for each row block of up to 96 rows, in order:      tile.rs
//!         S ← final scores of the row block                Q Kᵀ again, and the options
//!         P ← exp(S − lse);  dP ← dO Vᵀ;  dS ← P · (dP − δ)
//!         dV ← dV + Pᵀ dO;  dK ← dK + dSᵀ Q;  dQ ← dQ + dS K
//!     total ← total + (dK, dV)
//! ```
//! (Dao 2023, arXiv:2307.08691, algorithm 2.) A query head's sums are taken by themselves, so grouped heads give the sums
//! of repeated ones.

use crate::attention::backward::call::BiasSharing;
use crate::attention::backward::memory::{BackwardScratch, KeyGradients, Own};
use crate::attention::backward::pass::{BackwardPass, BlockAt};
use crate::attention::backward::rows::finite_rows;
use crate::attention::blocks::task::{AttentionTask, BoundCall, Next};
use crate::attention::call::RowSet;
use crate::attention::call::tiling::MAX_ROW_BLOCK;
use crate::kv::key_block::{BlockValues, Keys};
use crate::matmul::pack;
use crate::simd::{LANES, Simd, quiet};
use crate::tensor::any::{AnyRows, AnyShared, Typed};
use crate::tensor::element::Element;
use crate::tensor::rows::{KEY_BLOCK, Rows, Table};
use crate::tensor::view_mut::SharedMut;
use core::ops::Range;
use core::sync::atomic::Ordering;

/// Key block of a key/value head.
pub(crate) struct Column<'t, S> {
    pub(crate) bound: BoundCall<'t, S>,
    pub(crate) pass: &'t BackwardPass<'t>,
    pub(crate) at: BlockAt,
    /// Column that this worker is expected to take next.
    pub(crate) next: Option<BlockAt>,
}

/// Keys of a column as tiles read them; its values are packed in scratch.
pub(crate) struct ColumnKeys {
    /// Rows of finite floats in whole vectors.
    pub(crate) rows: AnyRows,
    /// First key of the packed run in scratch, if any.
    pub(crate) packed: Option<usize>,
}

impl<S: Simd> Column<'_, S> {
    /// Computes the gradients of the column's keys and values, and adds to those of its queries.
    ///
    /// # Safety
    /// The column exists, and its gradients are this worker's alone.
    pub(crate) unsafe fn run(&self, scratch: &mut BackwardScratch) {
        let (call, tiling) = (self.bound.checked.call(), self.bound.checked.tiling());
        let (mut scores, mut own) = scratch.parts(tiling);
        if !self.wait_for_shared_bias() {
            return;
        }
        let mut keys = self.prepare_keys(&mut own);
        let (q_len, group_size) = (call.sequence(self.at.sequence).q_len, call.group_size());
        own.total.clear(self.keys().len());
        let mut done = 0;
        for g in 0..group_size {
            if group_size > 1 {
                own.head.clear(self.keys().len());
            }
            for first in (0..q_len).step_by(MAX_ROW_BLOCK) {
                let rows = g * q_len + first..g * q_len + q_len.min(first + MAX_ROW_BLOCK);
                let rows = RowSet::of(self.at.sequence, self.at.kv_head, rows);
                let task = AttentionTask::reading(self.bound, rows).followed_by(Next::Near);
                // SAFETY: the row block is the `done`th of the column, whose turn it is when the tile has waited.
                if !unsafe { self.tile(&task, done, &mut keys, &mut scores, &mut own) } {
                    return;
                }
                done += 1;
                // Release: publishes what this worker has added.
                self.pass.progress(self.at).store(done, Ordering::Release);
            }
            if group_size > 1 {
                own.total.add(&own.head);
            }
        }
        // SAFETY: the caller guarantees that the column's gradients are this worker's alone.
        unsafe { self.write_keys(&own.total) }
    }

    /// Returns the keys of the column, counted in the sequence.
    pub(crate) fn keys(&self) -> Range<usize> {
        let kv_len = self.bound.checked.call().sequence(self.at.sequence).kv_len;
        let first = self.at.number * KEY_BLOCK;
        first.min(kv_len)..kv_len.min(first + KEY_BLOCK)
    }

    /// Returns the index of a key of the sequence in k and v, and in their gradients: batch, head, row.
    pub(crate) fn index_of_key(&self, key: usize) -> [usize; 3] {
        let call = self.bound.checked.call();
        let seq = call.sequence(self.at.sequence);
        [if call.options.ragged.is_some() { 0 } else { seq.batch }, self.at.kv_head, seq.first_key + key]
    }

    /// Waits for the same key block of the sequence or head before, if elements of a bias are shared with it. Returns
    /// false if the work was stopped.
    fn wait_for_shared_bias(&self) -> bool {
        let bias = self.pass.gradients.bias.as_ref();
        if bias.is_none_or(|bias| bias.sharing == BiasSharing::None) {
            return true;
        }
        let kv_heads = self.bound.checked.call().kv.kv_heads();
        let mut before =
            (0..self.at.sequence * kv_heads + self.at.kv_head).rev().map(|head| (head / kv_heads, head % kv_heads));
        let Some((sequence, kv_head)) = before.find(|&(b, _)| self.at.number < self.pass.columns_of(b)) else {
            return true;
        };
        self.pass.wait(BlockAt { sequence, kv_head, ..self.at }, self.pass.row_blocks(sequence))
    }

    /// Packs the column's values, and finds its keys as rows.
    fn prepare_keys(&self, own: &mut Own<'_>) -> ColumnKeys {
        let (call, tiling) = (self.bound.checked.call(), self.bound.checked.tiling());
        let (keys, seq) = (self.keys(), call.sequence(self.at.sequence));
        let none = ColumnKeys { rows: Typed::F32(Rows::strided(own.keys.as_ptr(), 0, 1)), packed: None };
        if keys.is_empty() {
            return none;
        }
        let (at, len) = ([seq.source, self.at.kv_head, seq.first_key + keys.start], keys.len());
        let (table, other) = (&mut Table::new(), &mut Table::new());
        // SAFETY: the keys exist, in tensors, whose rows need no table.
        unsafe {
            let Keys::Rows(rows) = call.kv.keys(at, len, table) else { return none };
            let BlockValues::Rows { rows: values, .. } = call.kv.values(at, len, other) else { return none };
            pack::pack_keys(self.bound.s, values, [len, len], tiling.value_dim, own.values);
            ColumnKeys { rows: finite_rows(self.bound.s, rows, [len, tiling.head_dim], own.keys), packed: None }
        }
    }

    /// Writes the gradients of the column's keys and values; the first column writes zeros for the keys that are beyond
    /// the sequence's length.
    ///
    /// # Safety
    /// The gradients are this worker's alone.
    unsafe fn write_keys(&self, total: &KeyGradients<'_>) {
        let call = self.bound.checked.call();
        let (keys, seq, all) = (self.keys(), call.sequence(self.at.sequence), call.keys_of(self.at.sequence).len());
        let beyond = if self.at.number == 0 { seq.kv_len..all } else { 0..0 };
        let parts = [(&self.pass.gradients.k, &*total.k, call.scale), (&self.pass.gradients.v, &*total.v, 1.0)];
        for (gradient, sums, scale) in parts {
            let Some(gradient) = gradient else { continue };
            let width = gradient.dim().next_multiple_of(LANES);
            // SAFETY: the keys are the sequence's, so the rows are inside the gradient; the caller guarantees that they
            // are this worker's alone.
            unsafe {
                let none: &[f32] = &[];
                let rows = sums.chunks_exact(width).take(keys.len());
                write_rows(self.bound.s, gradient, self.index_of_key(keys.start), rows, scale);
                write_rows(
                    self.bound.s,
                    gradient,
                    self.index_of_key(beyond.start),
                    beyond.clone().map(|_| none),
                    scale,
                );
            }
        }
    }
}

/// Writes rows of a gradient, from one on: `scale` times each sum, or zeros where a row has no sums.
///
/// # Safety
/// The rows are inside the gradient, and this worker's alone.
pub(crate) unsafe fn write_rows<'a, S: Simd>(
    s: S,
    gradient: &AnyShared<'_>,
    [b, h, first]: [usize; 3],
    rows: impl Iterator<Item = &'a [f32]>,
    scale: f32,
) {
    by_type!(Typed, gradient, |gradient| s.vectorize(
        #[inline(always)]
        || for (i, sums) in rows.enumerate() {
            // SAFETY: the caller guarantees the contract.
            unsafe { write_row(gradient, [b, h, first + i], sums, scale) };
        }
    ));
}

/// Writes a row of a gradient, as [`write_rows`] does.
///
/// # Safety
/// Same contract as [`write_rows`].
#[inline(always)]
unsafe fn write_row<T: Element>(gradient: &SharedMut<'_, T>, [b, h, l]: [usize; 3], sums: &[f32], scale: f32) {
    // A zero is positive, and a NaN the quiet one.
    let scaled = |sum: f32| T::narrow(quiet(sum * scale + 0.0));
    let dim = gradient.shape()[3];
    // SAFETY: the caller guarantees a row inside the gradient, which has `dim` elements and is this worker's alone; they lie side
    // by side where their distance is 1.
    unsafe {
        let (first, element) = gradient.row(b, h, l);
        if element == 1 && sums.len() >= dim {
            let row = core::slice::from_raw_parts_mut(first, dim);
            row.iter_mut().zip(sums).for_each(|(x, &sum)| *x = scaled(sum));
            return;
        }
        for d in 0..dim {
            *first.offset(d as isize * element) = sums.get(d).map_or(T::narrow(0.0), |&sum| scaled(sum));
        }
    }
}
