//! Products of the backward pass: floats, or bfloat16 by the arithmetic of the call.
//!
//! bfloat16 has the loops of the forward pass. dP are scores, of output gradients and values. dQ are sums of keys, whose weights are the
//! gradients of scores. dV and dK are sums of query rows: weights, or gradients of scores, are transposed, so that a row of them is a
//! key's.

use crate::attention::backward::column::{Column, ColumnKeys, ColumnOperands};
use crate::attention::backward::memory::{Own, PackedOperands, RowMemory};
use crate::attention::backward::row_block::rows_of;
use crate::attention::backward::rows::BlockRows;
use crate::attention::backward::tile::{Of, TileScores};
use crate::attention::blocks::task::AttentionTask;
use crate::attention::products::by_arithmetic;
use crate::attention::products::multiply::{Arithmetic, Multiply};
use crate::attention::products::operands::{
    KeySource, KeysToPack, Packing, QueryRow, QueryRows, RunKeys, ValuesToPack,
};
use crate::attention::products::pv::{ValueSums, WeightSigns};
use crate::attention::products::score_run::ScoreRun;
use crate::attention::scratch::{MAX_ROW_BLOCK, SCORE_STRIDE};
use crate::attention::steps::key_sums::{self, KeySums};
use crate::attention::steps::score_passes::ScoreBlock;
use crate::attention::steps::span::{Span, Spans};
use crate::kv::key_block::{BlockValues, ColumnValues, Keys};
use crate::matmul::hadamard::Basis;
use crate::matmul::operands::Floats;
use crate::matmul::pack::NonFinite;
use crate::matmul::prefetch::PrefetchQueue;
use crate::simd::{LANES, Simd};
use crate::tensor::any::{AnyRows, Typed};
use crate::tensor::element::Dtype;
use crate::tensor::rows::Rows;
use core::ops::Range;

/// Factors of sums that are not rescaled.
const ONES: [f32; MAX_ROW_BLOCK] = [1.0; MAX_ROW_BLOCK];

impl<S: Simd> Column<'_, S> {
    /// Packs the column's keys and values, of these sizes, as bfloat16.
    ///
    /// # Safety
    /// The rows are readable; the result is used while the operands hold it.
    pub(crate) unsafe fn pack_operands(
        &self,
        [(keys, of_keys), (values, [len, value_dim])]: [(AnyRows, [usize; 2]); 2],
        packed: &mut PackedOperands<'_>,
    ) -> ColumnOperands {
        let (s, rows, of_values) = (self.bound.s, Keys::Rows(values), BlockValues::Rows { rows: values, readable: 0 });
        let source = KeySource { keys: &rows, values: &of_values };
        let as_keys = KeysToPack { source, keys: 0..len, all: len, head_dim: value_dim, packing: Packing::Needed };
        let as_values = to_pack(keys, of_keys, NonFinite::Handled);
        by_arithmetic!(S: self.bound.products.keys, |A| {
            // SAFETY: the caller guarantees the rows.
            let (values, keys) =
                unsafe { (A::pack_keys(s, as_keys, packed.values), A::pack_values(s, as_values, packed.keys)) };
            ColumnOperands::Packed { values, keys }
        })
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
        let (s, head_dim, rows) = (task.s, task.tiling.value_dim, rows_of(task));
        let (dtype, mut at) = (self.pass.saved.d_out.dtype(), [core::ptr::null(); MAX_ROW_BLOCK]);
        if let ColumnOperands::Packed { .. } = keys.operands {
            by_arithmetic!(S: task.products.keys, |A| {
                let floats = A::query_floats(head_dim);
                for (n, to) in own.packed.d_out.chunks_exact_mut(floats).take(rows).enumerate() {
                    let (row, basis) = (tile.d_out.row(n), Basis::Channels);
                    let query = QueryRow { row, head_dim, scale: 1.0, channels: None, basis };
                    // SAFETY: a row of the output gradients. The gradients of weights are not computed yet: room for a row.
                    unsafe { A::store_query(s, query, own.gradients, to) }
                    at[n] = to.as_ptr();
                }
            });
        }
        let run = &mut ScoreRun {
            rows,
            panels: 0..self.keys().len().div_ceil(LANES),
            spans: tile.spans,
            next_bias: None,
            prefetch: tile.prefetch,
            out: own.gradients,
        };
        match keys.operands {
            ColumnOperands::Floats(_) => {
                let queries = QueryRows { rows: tile.d_out.addresses(), head_dim, dtype: Dtype::F32, scale: 1.0 };
                let panels = Rows::strided(own.values.as_ptr(), (head_dim * LANES) as isize, 1);
                let keys = RunKeys { keys: Keys::Packed(Typed::F32(panels)), later: None };
                // SAFETY: output gradients are rows of `value_dim` floats; the column's values are packed in whole panels.
                unsafe { Floats::scores(s, run, queries, keys) };
            }
            ColumnOperands::Packed { values, .. } => {
                let (queries, keys) = (
                    QueryRows { rows: &at[..rows], head_dim, dtype, scale: 1.0 },
                    RunKeys { keys: values, later: None },
                );
                // SAFETY: rows are stored; the caller guarantees the column's values, which are packed, one panel after the other.
                by_arithmetic!(S: task.products.keys, |A| unsafe { A::scores(s, run, queries, keys) });
            }
        }
    }

    /// Adds the products of weights and output gradients to the gradients of values, or those of the gradients of scores and queries
    /// to the gradients of keys.
    ///
    /// # Safety
    /// The rows of `tile` are the task's.
    pub(crate) unsafe fn add_key_sums(
        &self,
        task: &AttentionTask<'_, S>,
        tile: &mut TileScores<'_>,
        of: Of,
        own: &mut Own<'_>,
    ) {
        let Own { gradients, head, total, chain, packed, .. } = own;
        let sums = if self.pass.sums_by_head() { head } else { total };
        let (weights, x, cols, sums): (&[f32], _, _, &mut [f32]) = match of {
            Of::Values => (tile.scores, &tile.d_out, task.tiling.value_dim, sums.v),
            Of::Keys => (gradients, &tile.q, task.tiling.head_dim, sums.k),
        };
        let (s, spans, prefetch) = (task.s, tile.spans, &mut *tile.prefetch);
        if task.products.parts() == 0 {
            let (rows, vecs) = (x.evenly(), cols.div_ceil(LANES));
            let sums = KeySums { weights, spans, rows, vecs, sums, chain: *chain, prefetch };
            // SAFETY: rows are whole vectors.
            return unsafe { key_sums::key_sums(s, sums) };
        }
        let keys = key_sums::all_keys(spans);
        let keys = keys.start / LANES * LANES..keys.end.next_multiple_of(LANES);
        let block = Transposed { weights, rows: rows_of(task), keys, x, cols };
        // SAFETY: the rows are the task's.
        by_arithmetic!(S: task.products.keys, |A| unsafe { add_transposed::<S, A>(s, block, packed, sums, prefetch) });
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
        let (s, all, cols) = (task.s, rows_of(task), task.tiling.head_dim);
        // SAFETY: the caller guarantees the row block's memory, and nothing of it is borrowed.
        let (memory, stride) = (unsafe { self.memory_of(task) }, RowMemory::floats(cols));
        let keys = match keys.operands {
            ColumnOperands::Packed { keys, .. } => keys,
            ColumnOperands::Floats(rows) => {
                let (weights, spans, fresh) = (&*own.gradients, &**tile.spans, tile.fresh);
                let of_rows = sums_of(cols, tile.prefetch);
                let mut sums =
                    ValueSums { weights, spans, rows: all, fresh, out: memory, out_stride: stride, ..of_rows };
                // SAFETY: the caller guarantees the column's keys, rows of whole vectors.
                return unsafe { Floats::sums(s, &mut sums, ColumnValues::Elements(rows)) };
            }
        };
        by_arithmetic!(S: task.products.keys, |A| {
            let tile_rows = tile.spans.tile_rows();
            for (n, spans) in tile.spans.chunks(A::ROW_BLOCK / tile_rows).enumerate() {
                let (first, spans) = (n * A::ROW_BLOCK, Spans::of(spans, tile_rows));
                let rows = A::ROW_BLOCK.min(all - first);
                let weights = &mut *own.packed.weights;
                weights[..rows * SCORE_STRIDE]
                    .copy_from_slice(&own.gradients[first * SCORE_STRIDE..][..rows * SCORE_STRIDE]);
                prepare::<S, A>(s, weights, &spans, rows);
                let (out, of_rows) = (&mut memory[first * stride..], sums_of(cols, tile.prefetch));
                let (spans, fresh) = (&*spans, tile.fresh);
                let mut sums = ValueSums { weights, spans, rows, fresh, out, out_stride: stride, ..of_rows };
                // SAFETY: the caller guarantees the column's keys, packed in whole vectors; gradients beside spans are 0.
                unsafe { A::sums(s, &mut sums, keys) }
            }
        });
    }
}

/// Returns sums of some columns that are not rescaled, but for what each has of its own.
fn sums_of(cols: usize, prefetch: &mut PrefetchQueue) -> ValueSums<'_> {
    ValueSums {
        weights: &[],
        cols,
        spans: &[],
        rows: 0,
        rescale_prev: &ONES,
        rescale_block: &ONES,
        fresh: false,
        out: &mut [],
        out_stride: 0,
        ends: None,
        signs: WeightSigns::Any,
        prefetch,
    }
}

/// Returns rows as values to be packed.
fn to_pack(rows: AnyRows, size: [usize; 2], nonfinite: NonFinite) -> ValuesToPack {
    ValuesToPack { values: ColumnValues::Elements(rows), size, nonfinite, packing: Packing::Needed }
}

/// Brings weights, floats so far, into the form of an arithmetic.
fn prepare<S: Simd, A: Multiply>(s: S, scores: &mut [f32], spans: &Spans, rows: usize) {
    let none = BlockValues::Rows { rows: Typed::F32(Rows::strided(core::ptr::null(), 0, 1)), readable: 0 };
    // SAFETY: values of elements have no scales.
    unsafe { A::prepare_weights(s, ScoreBlock { scores, spans, rows }, none, Arithmetic::Floats) }
}

/// Weights of rows and keys that are to be transposed, `[row][SCORE_STRIDE]`, keys in whole panels; and the rows' vectors.
struct Transposed<'a> {
    weights: &'a [f32],
    rows: usize,
    keys: Range<usize>,
    x: &'a BlockRows,
    /// Length of the vectors.
    cols: usize,
}

impl Transposed<'_> {
    /// Writes the weights of some keys, whole panels, a row for each key, filled up with zeros to whole panels of rows.
    #[inline(always)]
    fn write<S: Simd>(&self, s: S, keys: Range<usize>, out: &mut [f32]) {
        for (n, first_row) in (0..self.rows).step_by(LANES).enumerate() {
            let here = LANES.min(self.rows - first_row);
            for key in keys.clone().step_by(LANES) {
                let (mut rows, mut square) = ([[0.0; LANES]; LANES], [[0.0; LANES]; LANES]);
                let from = self.weights[first_row * SCORE_STRIDE..].chunks(SCORE_STRIDE);
                for (row, from) in rows.iter_mut().zip(from).take(here) {
                    row.copy_from_slice(&from[key..key + LANES]);
                }
                // SAFETY: both are sixteen rows of sixteen floats.
                unsafe {
                    s.transpose(rows.as_ptr().cast(), size_of_val(&rows[0]) as isize, square.as_mut_ptr().cast());
                }
                for (to, of_key) in out.chunks_exact_mut(SCORE_STRIDE).skip(key - keys.start).zip(&square) {
                    to[n * LANES..(n + 1) * LANES].copy_from_slice(of_key);
                }
            }
        }
    }
}

/// Adds to sums, a row for each key, the products of transposed weights and the rows' vectors.
///
/// # Safety
/// The rows are readable, as many as the block has.
unsafe fn add_transposed<S: Simd, A: Multiply>(
    s: S,
    block: Transposed<'_>,
    packed: &mut PackedOperands<'_>,
    sums: &mut [f32],
    prefetch: &mut PrefetchQueue,
) {
    let Transposed { rows, x, cols, .. } = block;
    let (width, tile_rows) = (cols.next_multiple_of(LANES), A::tile_rows::<S>());
    let nonfinite = if x.nonfinite.is_empty() { NonFinite::Ignored } else { NonFinite::Handled };
    // SAFETY: the caller guarantees the rows.
    let values = unsafe { A::pack_values(s, to_pack(x.given(), [rows, cols], nonfinite), packed.rows) };
    let whole = [Span::new(0, rows, false); MAX_ROW_BLOCK];
    for first in block.keys.clone().step_by(A::ROW_BLOCK) {
        let keys = first..block.keys.end.min(first + A::ROW_BLOCK);
        let (n, spans) = (keys.len(), Spans::of(&whole[..keys.len().div_ceil(tile_rows)], tile_rows));
        s.vectorize(
            #[inline(always)]
            || block.write(s, keys, packed.weights),
        );
        prepare::<S, A>(s, packed.weights, &spans, n);
        let (weights, out) = (&*packed.weights, &mut sums[first * width..]);
        let of_keys = sums_of(cols, prefetch);
        let mut sums = ValueSums { weights, spans: &spans, rows: n, out, out_stride: width, ..of_keys };
        // SAFETY: values are packed, a row for each of the weights of a key, which end with zeros.
        unsafe { A::sums(s, &mut sums, values) }
    }
}
