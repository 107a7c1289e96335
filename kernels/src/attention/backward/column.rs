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
use crate::attention::backward::written::write_rows;
use crate::attention::blocks::task::{AttentionTask, BoundCall, Next};
use crate::attention::call::RowSet;
use crate::attention::scratch::MAX_ROW_BLOCK;
use crate::attention::steps::key_sums::Chain;
use crate::kv::key_block::{BlockValues, ColumnValues, Keys};
use crate::matmul::pack;
use crate::simd::{LANES, Simd};
use crate::tensor::any::{AnyRows, Typed};
use crate::tensor::rows::{KEY_BLOCK, Rows, Table};
use core::ops::Range;

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
    pub(crate) operands: ColumnOperands,
    /// First key of the packed run in scratch, if any.
    pub(crate) packed: Option<usize>,
}

/// Keys and values of a column, in the form that its products take.
pub(crate) enum ColumnOperands {
    /// Keys as rows of finite floats in whole vectors.
    Floats(AnyRows),
    /// Values packed as keys are, and finite keys as values are.
    Packed { values: Keys, keys: ColumnValues },
}

impl<'t, S: Simd> Column<'t, S> {
    /// Computes the gradients of the column's keys and values, and adds to those of its queries.
    ///
    /// # Safety
    /// The column exists, and its gradients are this worker's alone.
    pub(crate) unsafe fn run(&self, scratch: &mut BackwardScratch) {
        let (call, tiling) = (self.bound.checked.call(), self.bound.tiling);
        let (mut scores, mut own) = scratch.parts(tiling, self.pass.parameters());
        if !self.wait_for_shared_bias() {
            return;
        }
        let mut keys = self.prepare_keys(&mut own);
        let (q_len, group_size) = (call.sequence(self.at.sequence).q_len, call.group_size());
        own.total.clear(self.keys().len());
        own.parameters.fill(0.0);
        let mut done = 0;
        for g in 0..group_size {
            // SAFETY: the caller guarantees that the column's sums are this worker's alone.
            let mut parts = unsafe { self.sums_in_parts(g) };
            if let Some([blocks, _]) = &mut parts {
                core::mem::swap(&mut own.head, blocks);
            } else if group_size > 1 {
                own.head.clear(self.keys().len());
            }
            for task in self.row_blocks(g) {
                let mut rest = parts.as_mut().map(|[_, rest]| rest).filter(|_| task.set.rows.len() < MAX_ROW_BLOCK);
                if let Some(rest) = &mut rest {
                    core::mem::swap(&mut own.head, rest);
                    own.chain = Chain::Continued;
                }
                // SAFETY: the row block is the `done`th of the column; it is the column's turn when the tile has waited.
                if !unsafe { self.tile(&task, done, &mut keys, &mut scores, &mut own) } {
                    return;
                }
                if let Some(rest) = rest {
                    core::mem::swap(&mut own.head, rest);
                    own.chain = Chain::OfBlock;
                    if (self.pass.part.first_row + task.set.rows.end - g * q_len).is_multiple_of(MAX_ROW_BLOCK) {
                        own.head.take(rest);
                    }
                }
                done += 1;
                self.pass.progress(self.at).set(done);
            }
            match parts {
                Some([scratch, _]) => own.head = scratch,
                None if group_size > 1 => own.total.add(&own.head),
                None => {}
            }
        }
        if !own.parameters.is_empty() && !self.add_parameters(own.parameters) {
            return;
        }
        // SAFETY: the caller guarantees that the column's gradients are this worker's alone.
        unsafe { self.write_keys(&own.total) }
    }

    /// Returns the sums of a query head that are kept between parts of a pass, if this is such a part.
    ///
    /// # Safety
    /// They are this worker's alone.
    unsafe fn sums_in_parts(&self, g: usize) -> Option<[KeyGradients<'t>; 2]> {
        let call = self.bound.checked.call();
        let head = (self.at.sequence * call.kv.kv_heads() + self.at.kv_head) * call.group_size() + g;
        // SAFETY: the caller guarantees that they are this worker's alone.
        self.pass.part.sums.as_ref().map(|sums| sums.each_ref().map(|sums| unsafe { sums.of_keys(head, self.keys()) }))
    }

    /// Writes the gradients of the queries of a head at the end of a pass in parts; this is the first column of the head.
    ///
    /// # Safety
    /// The column exists, and its head's gradients of queries are this worker's alone.
    pub(crate) unsafe fn end(&self, scratch: &mut BackwardScratch) {
        let (_, mut own) = scratch.parts(self.bound.tiling, 0);
        let heads = if self.at.number == 0 { self.bound.checked.call().group_size() } else { 0 };
        for task in (0..heads).flat_map(|g| self.row_blocks(g)) {
            // SAFETY: one worker has the first column; the saved tensors fit the call, as the launch has asserted.
            unsafe { self.end_parts(&task, &mut own) }
        }
    }

    /// Iterates over the row blocks of one of the query heads that share the column's head.
    pub(crate) fn row_blocks(&self, g: usize) -> impl Iterator<Item = AttentionTask<'t, S>> + use<'t, S> {
        let (bound, BlockAt { sequence, kv_head, .. }) = (self.bound, self.at);
        let (q_len, before) = (bound.checked.call().sequence(sequence).q_len, self.pass.part.first_row);
        let blocks = if q_len == 0 { 0 } else { (before + q_len).div_ceil(MAX_ROW_BLOCK) };
        (0..blocks).map(move |block| {
            let (first, end) = (block * MAX_ROW_BLOCK, (block + 1) * MAX_ROW_BLOCK);
            let rows = g * q_len + first.saturating_sub(before)..g * q_len + q_len.min(end - before);
            AttentionTask::reading(bound, RowSet::of(sequence, kv_head, rows), Next::Near)
        })
    }

    /// Returns the keys of the column, counted in the sequence.
    pub(crate) fn keys(&self) -> Range<usize> {
        let kv_len = self.bound.checked.call().sequence(self.at.sequence).kv_len;
        let first = self.at.number * KEY_BLOCK;
        first.min(kv_len)..kv_len.min(first + KEY_BLOCK)
    }

    /// Returns the index of a key of the sequence in k and v, and in their gradients: batch, head, row.
    pub(crate) fn index_of_key(&self, key: usize) -> [usize; 3] {
        let seq = self.bound.checked.call().sequence(self.at.sequence);
        [seq.source, self.at.kv_head, seq.first_key + key]
    }

    /// Waits for the key block before that may share elements of a bias, if there is one. Returns false if the work was
    /// stopped.
    fn wait_for_shared_bias(&self) -> bool {
        let sharing = self.pass.gradients.bias.as_ref().map_or(BiasSharing::None, |bias| bias.sharing);
        let call = self.bound.checked.call();
        let (kv_heads, BlockAt { sequence, kv_head, number }) = (call.kv.kv_heads(), self.at);
        let (heads, head) = (call.sequence_count() * kv_heads, sequence * kv_heads + kv_head);
        let first = match sharing {
            BiasSharing::None => return true,
            BiasSharing::Heads => number * heads,
            BiasSharing::Blocks => 0,
        };
        let at = |n: usize| BlockAt { sequence: n % heads / kv_heads, kv_head: n % kv_heads, number: n / heads };
        // Without rows it would be no wait for those before it.
        let adds =
            |at: &BlockAt| at.number < self.pass.columns_of(at.sequence) && self.pass.row_blocks(at.sequence) > 0;
        let before = (first..number * heads + head).rev().map(at).find(adds);
        before.is_none_or(|at| self.pass.wait(at, self.pass.row_blocks(at.sequence)))
    }

    /// Packs the column's values, and finds its keys as rows, or packs them too.
    fn prepare_keys(&self, own: &mut Own<'_>) -> ColumnKeys {
        let (call, tiling, s) = (self.bound.checked.call(), self.bound.tiling, self.bound.s);
        let (keys, seq) = (self.keys(), call.sequence(self.at.sequence));
        let none = Rows::strided(own.keys.as_ptr(), 0, 1);
        let none = ColumnKeys { operands: ColumnOperands::Floats(Typed::F32(none)), packed: None };
        if keys.is_empty() {
            return none;
        }
        let (at, len) = ([seq.source, self.at.kv_head, seq.first_key + keys.start], keys.len());
        let (table, other) = (&mut Table::new(), &mut Table::new());
        // SAFETY: the keys exist, in tensors: their rows need no table.
        let operands = unsafe {
            let Keys::Rows(rows) = call.kv.keys(at, len, table) else { return none };
            let BlockValues::Rows { rows: values, .. } = call.kv.values(at, len, other) else { return none };
            let (of_keys, of_values) = ([len, tiling.head_dim], [len, tiling.value_dim]);
            if self.bound.products.parts() > 0 {
                self.pack_operands([(rows, of_keys), (values, of_values)], &mut own.packed)
            } else {
                pack::pack_keys(s, values, [len, len], tiling.value_dim, own.values);
                ColumnOperands::Floats(finite_rows(s, rows, of_keys, own.keys))
            }
        };
        ColumnKeys { operands, packed: None }
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
            let width = gradient.shape()[3].next_multiple_of(LANES);
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
