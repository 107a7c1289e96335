//! P·V of a row block and a key block whose values are int4.

use crate::attention::blocks::key_block::KeyBlock;
use crate::attention::blocks::prefetch;
use crate::attention::scratch::SCORE_STRIDE;
use crate::attention::steps::pv::Values;
use crate::attention::steps::pv_int4::Int4Values;
use crate::matmul::tile_shape::MAX_TILE_ROWS;
use crate::simd::Simd;
use crate::tensor::rows::KEY_BLOCK;
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

impl<S: Simd> KeyBlock<'_, '_, S> {
    /// Accumulates the P·V of int4 values, with weights rounded to bytes: those of a weight function in two passes, first those
    /// above 0.
    ///
    /// # Safety
    /// The values and numbers are the block's.
    pub(crate) unsafe fn accumulate_pv_int4(&mut self, values: Int4Values, row_block: Range<usize>) {
        if !values.panels.first.are_scattered() {
            // SAFETY: the block has a panel of values.
            let first = unsafe { values.numbers.first.at(0) }.cast();
            let bytes = values.numbers.kind.number_bytes(KEY_BLOCK, self.task.tiling.value_dim);
            prefetch::behind_scales(self.task, first, bytes);
        }
        if !self.task.given.weight {
            // SAFETY: the caller guarantees the values and numbers.
            return unsafe { self.accumulate_bytes(values, row_block, Signs::NonNegative) };
        }
        let rows = row_block.len();
        // Weights of a function are final: nothing is rescaled.
        debug_assert!(!self.fresh && self.regions.rescale_prev[..rows].iter().all(|&factor| factor == 1.0));
        // SAFETY: as above.
        unsafe { self.accumulate_bytes(values, row_block.clone(), Signs::Above) };
        self.regions.rescale_block[..rows].fill(-1.0);
        // SAFETY: as above.
        unsafe { self.accumulate_bytes(values, row_block, Signs::Below) };
        self.regions.rescale_block[..rows].fill(1.0);
    }

    /// Accumulates the P·V of int4 values and some weights, a tile of rows after the other.
    ///
    /// # Safety
    /// The values and numbers are the block's.
    unsafe fn accumulate_bytes(&mut self, values: Int4Values, row_block: Range<usize>, signs: Signs) {
        let (task, width, rows) = (self.task, self.task.tiling.width(), row_block.len());
        for tile in 0..self.spans.len() {
            let first = tile * S::TILE_ROWS;
            let here = S::TILE_ROWS.min(rows - first);
            let mut sums = self.value_sums(row_block.start, first..first + here, 0..width);
            let part;
            if !matches!(signs, Signs::NonNegative) {
                part = signs.part(&sums.weights[..here * SCORE_STRIDE]);
                sums.weights = &part;
            }
            // SAFETY: the caller guarantees the block's values, whole vectors of fours for every key, and its numbers, in whole
            // panels.
            unsafe { task.s.with_int8_dot(Values { values, sums: &mut sums }) }
        }
    }
}
