//! Non-finite values and masks: for a hidden key, weight 0 times ∞ or NaN is NaN, and must add nothing.

use crate::attention::blocks::key_block::KeyBlock;
use crate::attention::call::row_mods::{KeyBits, is_visible};
use crate::attention::products::multiply::Multiply;
use crate::attention::scratch::{MAX_ROW_BLOCK, SCORE_STRIDE};
use crate::attention::steps::infinite;
use crate::attention::steps::span::Spans;
use crate::kv::key_block::Columns;
use crate::matmul::pack::NonFinite;
use crate::simd::{LANES, Simd};
use crate::tensor::rows::KEY_BLOCK;
use core::ops::Range;

/// Bits of the keys of a block that are visible to each row of a row block, recorded before the scores become weights.
/// A score of −∞ hides its key, whatever the cause.
pub(crate) struct VisibleBits([KeyBits; MAX_ROW_BLOCK]);

impl VisibleBits {
    pub(crate) fn new(spans: &Spans, rows: usize, scores: &[f32]) -> Self {
        let mut bits = [[0; KEY_BLOCK / 64]; MAX_ROW_BLOCK];
        for (r, bits) in bits[..rows].iter_mut().enumerate() {
            for j in spans.of_row(r).keys() {
                if scores[r * SCORE_STRIDE + j] != f32::NEG_INFINITY {
                    bits[j / 64] |= 1 << (j % 64);
                }
            }
        }
        Self(bits)
    }

    pub(crate) fn of_row(&self, row: usize) -> &KeyBits {
        &self.0[row]
    }
}

/// Sums over one key block for a tile of rows.
pub(crate) struct TileSums<'a> {
    /// Rows of the tile, counted in the row block.
    pub(crate) rows: Range<usize>,
    /// Weights of the row block, `[row][SCORE_STRIDE]`.
    pub(crate) weights: &'a [f32],
    /// Sums, `[row of the tile][columns, in whole vectors]`.
    pub(crate) sums: &'a mut [f32],
}

impl<S: Simd> KeyBlock<'_, '_, S> {
    /// Returns the visible keys of each row of a row block of `rows` rows, if non-finite values are handled and the
    /// block has some.
    pub(crate) fn visible_keys(&self, nonfinite: NonFinite, rows: usize) -> Option<VisibleBits> {
        let (s, dim) = (self.task.s, self.task.tiling.value_dim);
        // SAFETY: the block has a value of `value_dim` columns for every key.
        (nonfinite == NonFinite::Handled && unsafe { !self.values.all_finite(s, self.len, dim) })
            .then(|| VisibleBits::new(self.spans, rows, self.regions.scores))
    }

    /// Marks the sums of `width` columns that are NaN because a weight of their row is not finite. Other NaNs come of
    /// products that overflow: values times weights above 1, which dropout's factor makes.
    pub(crate) fn mark_nan_weights<A: Multiply>(&self, width: usize, tile: &mut TileSums<'_>) {
        for (r, sums) in tile.rows.clone().zip(tile.sums.chunks_exact_mut(width)) {
            if !sums.iter().any(|x| x.is_nan()) {
                continue;
            }
            let mut keys = self.spans.of_row(r).keys();
            if keys.any(|j| !weight::<A>(tile.weights, r, j).is_finite()) {
                sums.iter_mut().filter(|x| x.is_nan()).for_each(|x| *x = infinite::mark(*x));
            }
        }
    }

    /// Marks in `tile` the values that [`NonFinite::Handled`] replaced by 0: the non-finite values of some columns,
    /// in the rows that their keys are visible to.
    ///
    /// # Safety
    /// The columns are the block's.
    pub(crate) unsafe fn mark_infinite<A: Multiply>(
        &self,
        columns: &Columns,
        visible: &VisibleBits,
        tile: TileSums<'_>,
    ) {
        let width = columns.cols.next_multiple_of(LANES);
        let (s, seen) = (self.task.s, |j| tile.rows.clone().any(|r| is_visible(visible.of_row(r), j)));
        // SAFETY: `j < len` is a key of the block, which has the columns.
        let marked = |&j: &usize| seen(j) && unsafe { !columns.values.key_is_finite(s, j, columns.cols) };
        for (j, c) in (0..self.len).filter(marked).flat_map(|j| (0..columns.cols).map(move |c| (j, c))) {
            // SAFETY: `j < len` is a key of the block, and `c` one of the columns.
            let x = unsafe { columns.values.get(j, c) };
            if x.is_finite() {
                continue;
            }
            for r in tile.rows.clone().filter(|&r| is_visible(visible.of_row(r), j)) {
                let weight = weight::<A>(tile.weights, r, j);
                let output = &mut tile.sums[(r - tile.rows.start) * width + c];
                *output = infinite::add_nonfinite(*output, weight * x);
            }
        }
    }
}

/// Returns the weight of key `j` in row `row` of a row block's prepared weights.
fn weight<A: Multiply>(weights: &[f32], row: usize, j: usize) -> f32 {
    A::weight(&weights[row * SCORE_STRIDE..], j)
}
