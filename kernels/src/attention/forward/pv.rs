//! P·V of a row block and a key block. Values are read in place or packed, as elements, pairs or bytes; `pv_int4.rs` has those of
//! four bits.

use crate::attention::blocks::key_block::KeyBlock;
use crate::attention::blocks::prefetch;
use crate::attention::blocks::task::AttentionTask;
use crate::attention::forward::nonfinite::{TileSums, VisibleBits};
use crate::attention::scratch::{Regions, SCORE_STRIDE};
use crate::attention::steps::epilogue::RowBlockEnds;
use crate::attention::steps::pv::{ValueSums, Values};
use crate::attention::steps::pv_int4::Int4Values;
use crate::attention::steps::{bf16, float_loops, pv_int8, softmax};
use crate::kv::key_block::{BlockValues, Columns};
use crate::kv::value_panels::{VALUE_COLS, ValuePanels};
use crate::matmul::int8::ValueQuad;
use crate::matmul::operands::HalfPair;
use crate::matmul::pack::{self, NonFinite};
use crate::matmul::prefetch::MEMORY_BOUND_ROWS;
use crate::matmul::tile_shape::MAX_TILE_ROWS;
use crate::simd::aligned::elements_mut;
use crate::simd::{LANES, Simd};
use crate::tensor::any::{AnyRows, Typed};
use crate::tensor::rows::Rows;
use core::ops::Range;

/// Way in which the P·V of a row block and a key block is accumulated.
#[derive(Clone, Copy)]
pub(crate) enum PvMode<'a> {
    /// Values as they are.
    Plain,
    /// Values as they are, and the rows are normalised and written: nothing is accumulated into them afterwards.
    Ending(&'a RowBlockEnds),
    /// Non-finite values handled: the block is computed alone, its non-finite values are marked in the rows they
    /// are visible to, and then it is merged. `None`: all the block's values are finite.
    Handled(Option<&'a VisibleBits>),
}

impl<'a> PvMode<'a> {
    fn ends(self) -> Option<&'a RowBlockEnds> {
        if let Self::Ending(ends) = self { Some(ends) } else { None }
    }
}

/// Contiguous columns, and their rows as P·V reads them: in place or packed.
struct ReadyColumns<'a> {
    columns: &'a Columns,
    rows: AnyRows,
}

impl<S: Simd> KeyBlock<'_, '_, S> {
    /// Computes `out ← rescale_prev · out + rescale_block · P V` for a row block.
    ///
    /// # Safety
    /// The ends of [`PvMode::Ending`], if it is that, were prepared for this row block.
    pub(crate) unsafe fn accumulate_pv(&mut self, mode: PvMode<'_>, row_block: Range<usize>) {
        match self.values {
            // SAFETY: the values and what belongs to them are the block's.
            BlockValues::Int8 { values, scales } => unsafe {
                return self.accumulate_pv_int8(values, scales, row_block);
            },
            // SAFETY: as above.
            BlockValues::Int4 { values, numbers } => unsafe {
                return self.accumulate_pv_int4(Int4Values { panels: values, numbers }, row_block);
            },
            _ => {}
        }
        let task = self.task;
        let nonfinite = if matches!(mode, PvMode::Handled(Some(_))) { NonFinite::Handled } else { NonFinite::Ignored };
        let (values, stride) = (self.values, task.tiling.width());
        let native = task.native_values();
        if native && !task.softmax_rounds() {
            bf16::round_weights(task.s, self.scores(row_block.len()));
        }
        if self.fresh && matches!(mode, PvMode::Handled(_)) {
            self.regions.out[row_block.start * stride..row_block.end * stride].fill(0.0);
        }
        for first in (0..stride).step_by(task.tiling.pack_cols) {
            let end = task.tiling.value_dim.min(first + task.tiling.pack_cols);
            let in_place = |columns: &Columns| {
                let whole = end.next_multiple_of(LANES) <= values.readable();
                // Larger row blocks share one copy, as floats that lie evenly and near.
                let (even, far) =
                    (matches!(columns.rows, Typed::F32(rows) if !rows.are_scattered()), columns.are_far());
                let ready = row_block.len() <= MEMORY_BOUND_ROWS || (native || even) && !far;
                nonfinite == NonFinite::Ignored && columns.rows.element() == 1 && whole && ready
            };
            // SAFETY: the values have these columns.
            for columns in unsafe { values.columns_together(first..end) } {
                // SAFETY: the columns are the block's, among those packed together; in place, their rows are readable to the
                // end of a vector. The caller guarantees the ends.
                unsafe {
                    let rows = if in_place(&columns) {
                        columns.rows
                    } else {
                        self.packed_values(&columns, first..end, nonfinite)
                    };
                    let (columns, row_block) = (ReadyColumns { columns: &columns, rows }, row_block.clone());
                    match mode {
                        PvMode::Handled(visible) => self.accumulate_columns_alone(columns, visible, row_block),
                        _ => self.accumulate_columns(columns, mode.ends(), row_block),
                    }
                }
            }
        }
    }

    /// Accumulates the P·V of int8 values: their scales are multiplied into the weights, which are rounded and not read
    /// afterwards.
    ///
    /// # Safety
    /// The values and scales are the block's.
    unsafe fn accumulate_pv_int8(
        &mut self,
        values: ValuePanels<ValueQuad>,
        scales: *const [f32],
        row_block: Range<usize>,
    ) {
        let (task, rows, value_dim) = (self.task, row_block.len(), self.task.tiling.value_dim);
        // SAFETY: the caller guarantees the block's scales: the cache outlives the call, and the block's table the block.
        let scales = unsafe { &*scales };
        if !values.first.are_scattered() {
            prefetch::behind_scales(task, scales.as_ptr().cast(), size_of_val(scales));
        }
        pv_int8::round_weights(task.s, self.scores(rows), scales);
        for (columns, values) in values.panels() {
            let columns = columns.start..columns.end.min(value_dim);
            let sums = &mut self.value_sums(row_block.start, 0..rows, columns);
            // SAFETY: value panels are whole vectors, for every key of the block; weights were rounded just now.
            unsafe { task.s.with_int8_dot(Values { values, sums }) }
        }
    }

    /// Accumulates the P·V of contiguous columns, whose rows are in place or packed.
    ///
    /// # Safety
    /// The columns are the block's; their rows are whole vectors wide. The rows of `ends` are this row block's.
    #[inline(always)]
    unsafe fn accumulate_columns(
        &mut self,
        ReadyColumns { columns, rows }: ReadyColumns<'_>,
        ends: Option<&RowBlockEnds>,
        row_block: Range<usize>,
    ) {
        let (task, columns) = (self.task, columns.first..columns.first + columns.cols);
        let ends = ends.map(|ends| ends.of(columns.clone()));
        let mut sums = ValueSums { ends, ..self.value_sums(row_block.start, 0..row_block.len(), columns) };
        // SAFETY: spans end inside the block; rows that end are this row block's.
        unsafe { add_values(task, &mut sums, rows) }
    }

    /// Returns the operands of P·V for some columns and some rows of a row block, whole tiles, counted from its first row, which is
    /// row `first_row` of the task.
    #[inline(always)]
    pub(crate) fn value_sums(&mut self, first_row: usize, rows: Range<usize>, columns: Range<usize>) -> ValueSums<'_> {
        let stride = self.task.tiling.width();
        let Regions { scores, out, rescale_prev, rescale_block, .. } = &mut *self.regions;
        ValueSums {
            weights: &scores[rows.start * SCORE_STRIDE..],
            cols: columns.len(),
            spans: &self.spans[rows.start / S::TILE_ROWS..rows.end.div_ceil(S::TILE_ROWS)],
            rows: rows.len(),
            rescale_prev: &rescale_prev[rows.start..],
            rescale_block: &rescale_block[rows.start..],
            fresh: self.fresh,
            out: &mut out[(first_row + rows.start) * stride + columns.start..],
            out_stride: stride,
            ends: None,
            prefetch: &mut self.prefetch,
        }
    }

    /// Accumulates the P·V of contiguous columns with non-finite values handled, a tile of rows at a time: computes the
    /// block alone, marks its non-finite values, then merges it.
    ///
    /// # Safety
    /// The columns are the block's; their rows are whole vectors wide.
    unsafe fn accumulate_columns_alone(
        &mut self,
        ReadyColumns { columns, rows }: ReadyColumns<'_>,
        visible: Option<&VisibleBits>,
        row_block: Range<usize>,
    ) {
        let task = self.task;
        let (stride, width) = (task.tiling.width(), columns.cols.next_multiple_of(LANES));
        const { assert!(S::TILE_ROWS <= MAX_TILE_ROWS) };
        let (ones, mut part) = ([1.0; MAX_TILE_ROWS], [0.0; MAX_TILE_ROWS * VALUE_COLS]);
        for tile in 0..self.spans.len() {
            let here = tile * S::TILE_ROWS..row_block.len().min((tile + 1) * S::TILE_ROWS);
            let part = &mut part[..here.len() * width];
            part.fill(0.0);
            let mut sums = ValueSums {
                weights: &self.regions.scores[here.start * SCORE_STRIDE..],
                cols: width,
                spans: &self.spans[tile..=tile],
                rows: here.len(),
                rescale_prev: &ones,
                rescale_block: &ones,
                fresh: false,
                out: part,
                out_stride: width,
                ends: None,
                prefetch: &mut self.prefetch,
            };
            // SAFETY: the caller guarantees whole vectors for the rows of the block; the span ends inside the block,
            // and no row ends here.
            unsafe { add_values(task, &mut sums, rows) }
            let mut sums = TileSums { rows: here.clone(), weights: self.regions.scores, sums: part };
            self.mark_nan_weights(width, &mut sums);
            if let Some(visible) = visible {
                // SAFETY: the caller guarantees columns of the block.
                unsafe { self.mark_infinite(columns, visible, sums) };
            }
            let Regions { out, rescale_prev, rescale_block, .. } = &mut *self.regions;
            for (r, part) in here.zip(part.chunks_exact(width)) {
                let factors = [&rescale_prev[r..=r], &rescale_block[r..=r]];
                let out = &mut out[(row_block.start + r) * stride + columns.first..][..width];
                softmax::merge_outputs(task.s, factors, out, part, width, NonFinite::Handled);
            }
        }
    }

    /// Returns the rows of contiguous columns in scratch, padded to whole vectors: as floats, or as bfloat16 if they are
    /// multiplied as pairs. Packs them there if an earlier row block has not, one after the other for `all` columns that scratch
    /// holds together.
    ///
    /// # Safety
    /// The columns are the block's, and begin inside `all`.
    unsafe fn packed_values(&mut self, columns: &Columns, all: Range<usize>, nonfinite: NonFinite) -> AnyRows {
        let (task, size) = (self.task, [self.len, columns.cols]);
        let native = task.native_values();
        let room = &mut self.regions.values[(columns.first - all.start) * self.len..];
        let ready = self.packed_values == Some((all.start, nonfinite));
        if columns.first + columns.cols == all.end {
            self.packed_values = Some((all.start, nonfinite));
        }
        let stride = columns.cols.next_multiple_of(LANES) as isize;
        // SAFETY: the caller guarantees columns of the block, which has them for every key.
        unsafe {
            if native {
                let room = elements_mut(room);
                if !ready {
                    pack::pack_rows(task.s, columns.rows, size, nonfinite, room);
                }
                Typed::Bf16(Rows::strided(room.as_ptr(), stride, 1))
            } else {
                if !ready {
                    pack::pack_rows(task.s, columns.rows, size, nonfinite, room);
                }
                Typed::F32(Rows::strided(room.as_ptr(), stride, 1))
            }
        }
    }
}

/// Runs the P·V step for the element type of the rows.
///
/// # Safety
/// Same contract as [`float_loops::values`], for these rows, or pairs of them.
#[inline(always)]
unsafe fn add_values<S: Simd>(task: &AttentionTask<'_, S>, sums: &mut ValueSums<'_>, rows: AnyRows) {
    let native = task.native_values();
    // SAFETY: the caller guarantees the step's contract.
    unsafe {
        match rows {
            Typed::Bf16(rows) if native => task.s.with_bf16_dot(Values { values: rows.cast::<HalfPair>(), sums }),
            rows => float_loops::values(task.s, sums, rows),
        }
    }
}
