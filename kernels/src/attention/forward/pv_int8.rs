//! P·V of a row block and a key block whose values are int8 or int4.

use crate::attention::blocks::key_block::KeyBlock;
use crate::attention::steps::by_isa::Steps;
use crate::attention::steps::pv::Values;
use crate::attention::steps::pv_int8::{TileWeights, ValueNumbers};
use crate::attention::tiling::{Regions, SCORE_STRIDE};
use crate::kv::key_block::Int4Numbers;
use crate::kv::value_panels::ValuePanels;
use crate::matmul::byte_weights::ROW_FLOATS;
use crate::matmul::int4::{BLOCK, NibbleQuad};
use crate::matmul::int8::ValueQuad;
use crate::matmul::tile_shape::MAX_TILE_ROWS;
use crate::simd::{LANES, Lower};
use core::ops::Range;

/// Choice of weights by their sign: bytes have none.
#[derive(Clone, Copy)]
enum Signs {
    /// All: none is below 0.
    NonNegative,
    /// Those above 0, of a weight function that may give others.
    Above,
    /// Those below 0, with the sign changed.
    Below,
}

impl Signs {
    /// Returns these of the weights of a tile; the others become 0, and NaN stays.
    fn part(self, weights: &[f32]) -> [f32; MAX_TILE_ROWS * SCORE_STRIDE] {
        let mut part = [0.0; MAX_TILE_ROWS * SCORE_STRIDE];
        let sign = if let Self::Below = self { -1.0 } else { 1.0 };
        for (part, weight) in part.iter_mut().zip(weights) {
            let weight = sign * weight;
            *part = if weight <= 0.0 { 0.0 } else { weight };
        }
        part
    }
}

impl<S: Steps> KeyBlock<'_, '_, S> {
    /// Accumulates the P·V of int8 values: their scales are multiplied into the weights, which are rounded and not read
    /// afterwards.
    ///
    /// # Safety
    /// The values and scales are the block's.
    pub(crate) unsafe fn accumulate_pv_int8(
        &mut self,
        values: ValuePanels<ValueQuad>,
        scales: *const [f32],
        row_block: Range<usize>,
    ) {
        let (task, stride, rows) = (self.task, self.task.tiling.width(), row_block.len());
        let value_dim = task.tiling.value_dim;
        // SAFETY: the caller guarantees the block's scales: the cache outlives the call, and the block's table the block.
        task.s.round_weights_int8(self.scores(rows), unsafe { &*scales });
        let Regions { scores, out, rescale_prev, rescale_block, .. } = &mut *self.regions;
        for (columns, values) in values.panels() {
            // SAFETY: value panels are whole vectors, for every key of the block; weights were rounded just now.
            unsafe {
                task.s.values_int8(Values {
                    weights: scores,
                    values,
                    cols: columns.end.min(value_dim) - columns.start,
                    spans: self.spans,
                    rows,
                    rescale_prev,
                    rescale_block,
                    fresh: self.fresh,
                    out: &mut out[row_block.start * stride + columns.start..],
                    out_stride: stride,
                    ends: None,
                    prefetch: &mut self.prefetch,
                });
            }
        }
    }

    /// Accumulates the P·V of int4 values, with weights rounded to bytes: those of a weight function in two passes, first those
    /// above 0.
    ///
    /// # Safety
    /// The values and numbers are the block's.
    pub(crate) unsafe fn accumulate_pv_int4(
        &mut self,
        values: ValuePanels<NibbleQuad<Lower>>,
        stored: Int4Numbers,
        row_block: Range<usize>,
    ) {
        if !self.task.given.prob {
            // SAFETY: the caller guarantees the values and numbers.
            return unsafe { self.accumulate_bytes(values, stored, row_block, Signs::NonNegative) };
        }
        let rows = row_block.len();
        // Weights of a function are final: nothing is rescaled.
        debug_assert!(!self.fresh && self.regions.rescale_prev[..rows].iter().all(|&factor| factor == 1.0));
        // SAFETY: as above.
        unsafe { self.accumulate_bytes(values, stored, row_block.clone(), Signs::Above) };
        self.regions.rescale_block[..rows].fill(-1.0);
        // SAFETY: as above.
        unsafe { self.accumulate_bytes(values, stored, row_block, Signs::Below) };
        self.regions.rescale_block[..rows].fill(1.0);
    }

    /// Accumulates the P·V of int4 values and some weights, a block of columns after the other. Each has its own scales, so the
    /// weights are rounded for each, a tile of rows at a time.
    ///
    /// # Safety
    /// The values and numbers are the block's.
    unsafe fn accumulate_bytes(
        &mut self,
        values: ValuePanels<NibbleQuad<Lower>>,
        stored: Int4Numbers,
        row_block: Range<usize>,
        signs: Signs,
    ) {
        let (task, stride, rows) = (self.task, self.task.tiling.width(), row_block.len());
        let panels = self.len.div_ceil(LANES);
        let (mut room, mut numbers) = ([0.0; MAX_TILE_ROWS * ROW_FLOATS], ValueNumbers::new());
        for (block, (_, first)) in values.panels().enumerate() {
            // SAFETY: the caller guarantees the block's numbers, in whole panels.
            unsafe { task.s.widen_numbers(&mut numbers, stored, block, panels) };
            for (tile, &span) in self.spans.iter().enumerate().filter(|(_, span)| !span.is_empty()) {
                let first_row = tile * S::TILE_ROWS;
                let here = S::TILE_ROWS.min(rows - first_row);
                let Regions { scores, out, rescale_prev, rescale_block, .. } = &mut *self.regions;
                let weights = &scores[first_row * SCORE_STRIDE..][..here * SCORE_STRIDE];
                let part;
                let from = match signs {
                    Signs::NonNegative => weights,
                    Signs::Above | Signs::Below => {
                        part = signs.part(weights);
                        &part
                    }
                };
                task.s.round_tile_int4(TileWeights { from, span, rows: here, numbers: &numbers, to: &mut room });
                let columns = block * BLOCK..stride.min((block + 1) * BLOCK);
                // SAFETY: value panels are whole vectors of fours, for every key of the block; weights were rounded just now.
                unsafe {
                    task.s.values_int4(Values {
                        weights: &room,
                        values: first,
                        cols: columns.len(),
                        spans: &[span],
                        rows: here,
                        rescale_prev: &rescale_prev[first_row..],
                        rescale_block: &rescale_block[first_row..],
                        fresh: self.fresh,
                        out: &mut out[(row_block.start + first_row) * stride + columns.start..],
                        out_stride: stride,
                        ends: None,
                        prefetch: &mut self.prefetch,
                    });
                }
            }
        }
    }
}
