//! P·V of a row block and a key block. Values are read where they lie, or packed here.

use crate::attention::blocks::key_block::KeyBlock;
use crate::attention::blocks::prefetch;
use crate::attention::forward::nonfinite::{TileSums, VisibleBits};
use crate::attention::products::multiply::Multiply;
use crate::attention::products::operands::{Packing, ValuesToPack};
use crate::attention::products::pv::{ValueSums, WeightSigns};
use crate::attention::scratch::{Regions, SCORE_STRIDE};
use crate::attention::steps::epilogue::RowBlockEnds;
use crate::attention::steps::span::MAX_SPAN_ROWS;
use crate::attention::steps::{score_passes, softmax_merge};
use crate::kv::key_block::{BlockValues, ColumnValues, Columns};
use crate::kv::value_panels::VALUE_COLS;
use crate::matmul::e4m3;
use crate::matmul::pack::NonFinite;
use crate::simd::{LANES, Simd};
use crate::tensor::rows::KEY_BLOCK;
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

impl<S: Simd> KeyBlock<'_, '_, S> {
    /// Computes `out ← rescale_prev · out + rescale_block · P V` for a row block, by the arithmetic of the task's weights and values,
    /// contiguous columns after the other.
    ///
    /// # Safety
    /// The ends of [`PvMode::Ending`], if it is that, were prepared for this row block.
    pub(crate) unsafe fn accumulate_pv<A: Multiply>(&mut self, mode: PvMode<'_>, row_block: Range<usize>) {
        let (task, values, rows) = (self.task, self.values, row_block.len());
        let mode = if A::FINITE { PvMode::Plain } else { mode };
        let nonfinite = if matches!(mode, PvMode::Handled(Some(_))) { NonFinite::Handled } else { NonFinite::Ignored };
        if let BlockValues::E4m3 { scales, .. } = values {
            // In the first pass, NaN shows that there must be another.
            let nonfinite = if let PvMode::Handled(_) = mode { NonFinite::Handled } else { NonFinite::Ignored };
            // SAFETY: the scales are the block's.
            let scales = unsafe { &*scales };
            score_passes::scale_columns(task.s, self.scores(rows), scales, e4m3::FROM_HALF, nonfinite);
        }
        // SAFETY: the values' scales are the block's.
        unsafe { A::prepare_weights(task.s, self.scores(rows), values, task.products.weights) };
        // Columns that are computed alone first are no more than are packed as floats.
        let times =
            if matches!(mode, PvMode::Handled(_)) { 1 } else { (KEY_BLOCK / A::value_floats(KEY_BLOCK)).max(1) };
        let (stride, step) = (task.tiling.width(), task.tiling.pack_cols * times);
        if self.fresh && matches!(mode, PvMode::Handled(_)) {
            self.regions.out[row_block.start * stride..row_block.end * stride].fill(0.0);
        }
        if task.list.is_some() {
            prefetch::next_listed(task, self.first);
        }
        for first in (0..stride).step_by(step) {
            let end = task.tiling.value_dim.min(first + step);
            let whole = end.next_multiple_of(LANES) <= values.readable();
            // SAFETY: the values have these columns.
            for columns in unsafe { values.columns_together(first..end) } {
                // Beside the last key of an odd number, pairs may hold anything.
                let paired = matches!((columns.values, mode), (ColumnValues::Pairs(_), PvMode::Handled(_)));
                let in_place = !paired
                    && nonfinite == NonFinite::Ignored
                    && columns.are_contiguous()
                    && whole
                    && A::reads_values(&columns, rows);
                // SAFETY: the columns are the block's, among those packed together; in place, their rows are readable to the
                // end of a vector. The caller guarantees the ends.
                unsafe {
                    let ready =
                        if in_place { columns.values } else { self.packed::<A>(&columns, first..end, nonfinite) };
                    let row_block = row_block.clone();
                    match mode {
                        PvMode::Plain => self.accumulate_columns::<A>(&columns, ready, None, row_block),
                        PvMode::Ending(ends) => self.accumulate_columns::<A>(&columns, ready, Some(ends), row_block),
                        PvMode::Handled(visible) => {
                            self.accumulate_columns_alone::<A>(&columns, ready, visible, row_block);
                        }
                    }
                }
            }
        }
    }

    /// Accumulates the P·V of contiguous columns, which are `ready` to be read.
    ///
    /// # Safety
    /// The columns are the block's; `ready` are they, in whole vectors. The rows of `ends` are this row block's.
    #[inline(always)]
    unsafe fn accumulate_columns<A: Multiply>(
        &mut self,
        columns: &Columns,
        ready: ColumnValues,
        ends: Option<&RowBlockEnds>,
        row_block: Range<usize>,
    ) {
        let (s, columns) = (self.task.s, columns.first..columns.first + columns.cols);
        let ends = ends.map(|ends| ends.of(columns.clone()));
        let mut sums = ValueSums { ends, ..self.value_sums(row_block, columns) };
        // SAFETY: spans end inside the block; rows that end are this row block's.
        unsafe { A::sums(s, &mut sums, ready) }
    }

    /// Returns the operands of P·V for some columns of a row block.
    #[inline(always)]
    fn value_sums(&mut self, row_block: Range<usize>, columns: Range<usize>) -> ValueSums<'_> {
        let stride = self.task.tiling.width();
        let Regions { scores, out, rescale_prev, rescale_block, .. } = &mut *self.regions;
        ValueSums {
            weights: scores,
            cols: columns.len(),
            spans: self.spans,
            rows: row_block.len(),
            rescale_prev,
            rescale_block,
            fresh: self.fresh,
            out: &mut out[row_block.start * stride + columns.start..],
            out_stride: stride,
            ends: None,
            signs: if self.task.given.weight { WeightSigns::Any } else { WeightSigns::NonNegative },
            prefetch: self.prefetch,
        }
    }

    /// Packs contiguous columns into scratch, unless an earlier row block has: one after the other for `all` columns that scratch
    /// holds together.
    ///
    /// # Safety
    /// The columns are the block's, and begin inside `all`.
    unsafe fn packed<A: Multiply>(
        &mut self,
        columns: &Columns,
        all: Range<usize>,
        nonfinite: NonFinite,
    ) -> ColumnValues {
        let size = [self.len, columns.cols];
        let room = &mut self.regions.values[(columns.first - all.start) * A::value_floats(self.len)..];
        let done = self.packed_values == Some((all.start, nonfinite));
        if columns.first + columns.cols == all.end {
            self.packed_values = Some((all.start, nonfinite));
        }
        let packing = if done { Packing::Done } else { Packing::Needed };
        let values = ValuesToPack { values: columns.values, size, nonfinite, packing };
        // SAFETY: the caller guarantees columns of the block, which has them for every key.
        unsafe { A::pack_values(self.task.s, values, room) }
    }

    /// Accumulates the P·V of contiguous columns with non-finite values handled, a tile of rows at a time: computes the
    /// block alone, marks its non-finite values, then merges it.
    ///
    /// # Safety
    /// The columns are the block's; `ready` are they, in whole vectors.
    unsafe fn accumulate_columns_alone<A: Multiply>(
        &mut self,
        columns: &Columns,
        ready: ColumnValues,
        visible: Option<&VisibleBits>,
        row_block: Range<usize>,
    ) {
        let task = self.task;
        let (stride, width) = (task.tiling.width(), columns.cols.next_multiple_of(LANES));
        let (tile_rows, ones, mut part) =
            (self.spans.tile_rows(), [1.0; MAX_SPAN_ROWS], [0.0; MAX_SPAN_ROWS * VALUE_COLS]);
        for tile in 0..self.spans.len() {
            let here = tile * tile_rows..row_block.len().min((tile + 1) * tile_rows);
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
                signs: WeightSigns::Any,
                prefetch: self.prefetch,
            };
            // SAFETY: the caller guarantees whole vectors for the rows of the block; the span ends inside the block,
            // and no row ends here.
            unsafe { A::sums(task.s, &mut sums, ready) }
            let mut sums = TileSums { rows: here.clone(), weights: self.regions.scores, sums: part };
            self.mark_nan_weights::<A>(width, &mut sums);
            if let Some(visible) = visible {
                // SAFETY: the caller guarantees columns of the block.
                unsafe { self.mark_infinite::<A>(columns, visible, sums) };
            }
            let Regions { out, rescale_prev, rescale_block, .. } = &mut *self.regions;
            for (r, part) in here.zip(part.chunks_exact(width)) {
                let factors = [&rescale_prev[r..=r], &rescale_block[r..=r]];
                let out = &mut out[(row_block.start + r) * stride + columns.first..][..width];
                softmax_merge::merge_outputs(task.s, factors, out, part, width, NonFinite::Handled);
            }
        }
    }
}
