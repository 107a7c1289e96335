//! Products of the backward pass, by the arithmetic of the call: floats, or parts by a matrix unit.

use crate::attention::backward::column::{Column, ColumnKeys, ColumnOperands};
use crate::attention::backward::memory::{Own, RowMemory, UnitOperands};
use crate::attention::backward::row_block::rows_of;
use crate::attention::backward::rows::BlockRows;
use crate::attention::backward::tile::TileScores;
use crate::attention::blocks::task::AttentionTask;
use crate::attention::products::by_arithmetic;
use crate::attention::products::gradient_tiles::{self, Added, Block, Sums};
use crate::attention::products::multiply::Multiply;
use crate::attention::products::operands::{KeySource, KeysToPack, Packing, QueryRows, RunKeys};
use crate::attention::products::pv::{ValueSums, WeightSigns};
use crate::attention::products::score_run::ScoreRun;
use crate::attention::scratch::MAX_ROW_BLOCK;
use crate::attention::steps::key_sums::{self, KeySums};
use crate::attention::steps::span::Spans;
use crate::kv::key_block::{BlockValues, ColumnValues, Keys};
use crate::matmul::bf16_parts::{self, key_floats};
use crate::matmul::operands::Floats;
use crate::matmul::pack::NonFinite;
use crate::simd::aligned::elements_mut;
use crate::simd::{LANES, Simd};
use crate::tensor::any::{AnyRows, Typed};
use crate::tensor::element::Dtype;
use crate::tensor::rows::Rows;
use core::ops::Range;

/// Factors of sums that are not rescaled.
const ONES: [f32; MAX_ROW_BLOCK] = [1.0; MAX_ROW_BLOCK];

/// Gradients that are sums over query rows.
#[derive(Clone, Copy)]
enum Of {
    Keys,
    Values,
}

/// Returns the panels of the keys that some row sees.
fn seen_panels(spans: &Spans) -> Range<usize> {
    let keys = key_sums::all_keys(spans);
    keys.start / LANES..keys.end.div_ceil(LANES)
}

impl<S: Simd> Column<'_, S> {
    /// Packs the column's keys and values, of these sizes, in parts.
    ///
    /// # Safety
    /// The rows are readable; the result is used while the operands hold it.
    pub(crate) unsafe fn pack_in_parts(
        &self,
        [(keys, of_keys), (values, [len, value_dim])]: [(AnyRows, [usize; 2]); 2],
        unit: &mut UnitOperands<'_>,
    ) -> ColumnOperands {
        let (s, products, rows) = (self.bound.s, self.bound.products, Keys::Rows(values));
        let of_values = BlockValues::Rows { rows: values, readable: value_dim };
        let source = KeySource { keys: &rows, values: &of_values };
        let to_pack = KeysToPack { source, keys: 0..len, all: len, head_dim: value_dim, packing: Packing::Needed };
        let (parts, out) = (products.parts_of(keys.dtype()), elements_mut(unit.keys));
        // SAFETY: the caller guarantees the rows.
        unsafe {
            let values = by_arithmetic!(products.keys, |A| A::pack_keys(s, to_pack, unit.values));
            let keys = bf16_parts::pack_values(s, keys, of_keys, parts, NonFinite::Handled, out);
            ColumnOperands::Parts { values, keys }
        }
    }

    /// Computes the gradients of the weights, the products of output gradients and values.
    ///
    /// # Safety
    /// The keys are the column's.
    pub(crate) unsafe fn weight_gradients(
        &self,
        task: &AttentionTask<'_, S>,
        tile: &mut TileScores<'_>,
        keys: &ColumnKeys,
        own: &mut Own<'_>,
    ) {
        let (s, depth, rows) = (task.s, task.tiling.value_dim, rows_of(task));
        let run = &mut ScoreRun {
            rows,
            panels: 0..self.keys().len().div_ceil(LANES),
            spans: tile.spans,
            next_bias: None,
            prefetch: &mut tile.prefetch,
            out: own.gradients,
        };
        let queries = QueryRows { rows: tile.d_out.addresses(), head_dim: depth, dtype: Dtype::F32, scale: 1.0 };
        match keys.operands {
            ColumnOperands::Floats(_) => {
                let panels = Rows::strided(own.values.as_ptr(), (depth * LANES) as isize, 1);
                let keys = RunKeys { keys: Keys::Packed(Typed::F32(panels)), later: None };
                // SAFETY: output gradients are rows of `value_dim` floats; the column's values are packed in whole panels.
                unsafe { Floats::scores(s, run, queries, keys) };
            }
            ColumnOperands::Parts { values, .. } => {
                let dtype = self.pass.saved.d_out.dtype();
                let parts = (task.products.parts(), task.products.parts_of(dtype));
                let at = store_rows(s, &tile.d_out, depth, parts, own.unit.d_out);
                let (queries, keys) =
                    (QueryRows { rows: &at[..rows], dtype, ..queries }, RunKeys { keys: values, later: None });
                // SAFETY: rows are stored in parts; the caller guarantees the column's values, which are packed so.
                unsafe { gradient_tiles::scores(s, task.products.keys, run, queries, keys) };
            }
        }
    }

    /// Adds the products of weights and output gradients to the gradients of the column's values.
    ///
    /// # Safety
    /// The rows of `tile` are the task's.
    pub(crate) unsafe fn add_value_gradients(
        &self,
        task: &AttentionTask<'_, S>,
        tile: &mut TileScores<'_>,
        own: &mut Own<'_>,
    ) {
        // SAFETY: same contract.
        unsafe { self.add_sums(task, tile, Of::Values, own) }
    }

    /// Adds the products of the gradients of scores and queries to the gradients of the column's keys.
    ///
    /// # Safety
    /// The rows of `tile` are the task's.
    pub(crate) unsafe fn add_score_gradients(
        &self,
        task: &AttentionTask<'_, S>,
        tile: &mut TileScores<'_>,
        own: &mut Own<'_>,
    ) {
        // SAFETY: same contract.
        unsafe { self.add_sums(task, tile, Of::Keys, own) }
    }

    /// Adds the products of what belongs to scores and of rows to the gradients of the column's keys or values.
    ///
    /// # Safety
    /// The rows of `tile` are the task's.
    unsafe fn add_sums(&self, task: &AttentionTask<'_, S>, tile: &mut TileScores<'_>, of: Of, own: &mut Own<'_>) {
        let Own { gradients, head, total, chain, unit, .. } = own;
        let sums = if self.pass.sums_by_head() { head } else { total };
        let (weights, rows, dim, dtype, sums): (&[f32], _, _, _, &mut [f32]) = match of {
            Of::Values => (tile.scores, &tile.d_out, task.tiling.value_dim, self.pass.saved.d_out.dtype(), sums.v),
            Of::Keys => (gradients, &tile.q, task.tiling.head_dim, task.call.q.dtype(), sums.k),
        };
        let (s, n, vecs, spans) = (task.s, rows_of(task), dim.div_ceil(LANES), tile.spans);
        let (rows, _) = rows.evenly();
        // SAFETY: rows are whole vectors, as the caller guarantees.
        unsafe {
            if task.products.parts() == 0 {
                let (rows, prefetch) = ((rows, n), &mut tile.prefetch);
                return key_sums::key_sums(s, KeySums { weights, spans, rows, vecs, sums, chain: *chain, prefetch });
            }
            let panels = seen_panels(spans);
            let block = Block { numbers: weights, rows: n, panels };
            let weights = gradient_tiles::columns(s, block, task.products.parts(), unit.weights);
            let (parts, out) = (task.products.parts_of(dtype), elements_mut(unit.rows));
            let rows = bf16_parts::pack_values(s, Typed::F32(rows), [n, vecs * LANES], parts, NonFinite::Ignored, out);
            let sums = Sums { floats: sums, stride: vecs * LANES, vecs, start: Added::ToSums };
            gradient_tiles::add_product(s, weights, rows, sums);
        }
    }

    /// Adds the gradients of the row block's queries, without the scale.
    ///
    /// # Safety
    /// The keys are the column's, and the row block's memory is this worker's.
    pub(crate) unsafe fn add_query_gradients(
        &self,
        task: &AttentionTask<'_, S>,
        tile: &mut TileScores<'_>,
        keys: &ColumnKeys,
        own: &mut Own<'_>,
    ) {
        let (s, rows, dim) = (task.s, rows_of(task), task.tiling.head_dim);
        // SAFETY: the caller guarantees the row block's memory, and nothing of it is borrowed.
        let memory = unsafe { self.memory_of(task) };
        let floats = match keys.operands {
            ColumnOperands::Floats(rows) => rows,
            ColumnOperands::Parts { keys, .. } => {
                let block = Block { numbers: own.gradients, rows, panels: seen_panels(tile.spans) };
                let left = gradient_tiles::rows(s, block, task.products.parts(), own.unit.weights);
                let start = if tile.fresh { Added::ToNothing } else { Added::ToSums };
                let sums = Sums { floats: memory, stride: RowMemory::floats(dim), vecs: dim.div_ceil(LANES), start };
                // SAFETY: the caller guarantees the column's keys, packed in whole steps and vectors.
                return unsafe { gradient_tiles::add_product(s, left, keys, sums) };
            }
        };
        let mut sums = ValueSums {
            weights: own.gradients,
            cols: dim,
            spans: tile.spans,
            rows,
            rescale_prev: &ONES,
            rescale_block: &ONES,
            fresh: tile.fresh,
            out: memory,
            out_stride: RowMemory::floats(dim),
            ends: None,
            signs: WeightSigns::Any,
            prefetch: &mut tile.prefetch,
        };
        // SAFETY: the caller guarantees the column's keys, rows of whole vectors.
        unsafe { Floats::sums(s, &mut sums, ColumnValues::Elements(floats)) };
    }
}

/// Stores rows as queries in parts, and returns their addresses: a row has room for the first number of parts, and the second.
fn store_rows<S: Simd>(
    s: S,
    rows: &BlockRows,
    dim: usize,
    (room, parts): (usize, usize),
    out: &mut [f32],
) -> [*const f32; MAX_ROW_BLOCK] {
    let mut at = [core::ptr::null(); MAX_ROW_BLOCK];
    let stored = out.chunks_exact_mut(key_floats(dim, room));
    for ((&row, to), at) in rows.addresses().iter().zip(stored).zip(&mut at) {
        // SAFETY: a row of the block, in whole vectors.
        let row = unsafe { core::slice::from_raw_parts(row, dim.next_multiple_of(LANES)) };
        bf16_parts::store_query(s, row, parts, elements_mut(&mut to[..key_floats(dim, parts)]));
        *at = to.as_ptr();
    }
    at
}
