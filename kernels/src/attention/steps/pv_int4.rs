//! P·V of int4 values: for each block of columns, which has scales of its own, a tile's weights are rounded to bytes and multiplied
//! by halves of bytes, in fours of keys.
//!
//! ```text
//! for each block of 32 columns:
//!     bytes[MR][256] = weights[MR] · scales, in units of a 255th of the row's largest     byte_weights.rs
//!     out[MR][32] += bytes · values, times the unit                                       pv_tile.rs
//! ```

use crate::attention::call::tiling::SCORE_STRIDE;
use crate::attention::steps::pv_tile::{RunningRows, Terms, prefetch_distance, tile};
use crate::attention::steps::span::Span;
use crate::kv::key_block::Int4Numbers;
use crate::kv::value_panels::ValuePanels;
use crate::matmul::byte_weights::{self, CENTRES, Panel, ROW_FLOATS, UNIT};
use crate::matmul::int4::{BLOCK, Int4, NibbleQuad};
use crate::matmul::operands::{Int4Fours, MulAdd};
use crate::matmul::prefetch::{PrefetchQueue, tile_prefetches};
use crate::matmul::tile_rows::TileRows;
use crate::matmul::tile_shape::next_part;
use crate::matmul::value_terms::ValueTerms;
use crate::simd::{Half, Int8Dot, Int8DotWork, LANES, Lower, Simd, Upper, lanes};
use crate::tensor::rows::{KEY_BLOCK, Rows};

/// Operands of P·V of a tile of rows and a block of int4 values.
///
/// To run them requires that for every key of the span, in whole fours, the values of every block of columns are readable, and for
/// every panel of the span the numbers.
pub(crate) struct Int4Tile<'a> {
    /// Weights, none below 0, zero where hidden, `[row][SCORE_STRIDE]`.
    pub(crate) weights: &'a [f32],
    /// Keys that the rows need, at least one.
    pub(crate) span: Span,
    pub(crate) rows: usize,
    /// Values, a panel for each block of columns.
    pub(crate) values: ValuePanels<NibbleQuad<Lower>>,
    /// Scales of the values, and centres if they have such.
    pub(crate) numbers: Int4Numbers,
    /// As in [`Values`](super::pv::Values). `out` holds all columns, `out_stride` of them in a row.
    pub(crate) rescale_prev: &'a [f32],
    pub(crate) rescale_block: &'a [f32],
    pub(crate) fresh: bool,
    pub(crate) out: &'a mut [f32],
    pub(crate) out_stride: usize,
    pub(crate) prefetch: &'a mut PrefetchQueue,
}

/// Weights of a row, rounded to bytes, and what belongs to them.
pub(crate) type ByteRow = [f32; ROW_FLOATS];

impl Int8DotWork for Int4Tile<'_> {
    type Output = ();
    #[inline(always)]
    unsafe fn run<S: Int8Dot>(mut self, s: S) {
        assert!(self.weights.len() >= self.rows * SCORE_STRIDE);
        self.check();
        s.vectorize(
            #[inline(always)]
            || {
                let mut row = 0;
                while row < self.rows {
                    let here = next_part(self.rows - row, <Int4Fours as MulAdd<S>>::TILE_ROWS);
                    // SAFETY: as many rows are left; their weights were asserted, the tile was checked, and the caller
                    // guarantees values and numbers.
                    unsafe { by_tile_rows!(here, most <Int4Fours as MulAdd<S>>::TILE_ROWS, |MR| self.accumulate::<S, MR>(s, row)) }
                    row += here;
                }
            },
        );
    }
}

impl Int4Tile<'_> {
    /// Panics unless factors and outputs hold every row and column.
    pub(crate) fn check(&self) {
        assert!(self.rescale_prev.len() >= self.rows && self.rescale_block.len() >= self.rows);
        assert!(self.out.len() >= self.rows * self.out_stride && self.out_stride.is_multiple_of(LANES));
        assert!(self.values.layout.width.div_ceil(LANES) == self.out_stride.div_ceil(BLOCK), "blocks of columns");
    }

    /// Rounds the weights of `MR` rows from `row` on and multiplies them, a block of columns after the other.
    ///
    /// # Safety
    /// There are these rows and their weights, and the values and numbers of the span; the tile was [checked](Self::check).
    #[inline(always)]
    unsafe fn accumulate<S: Int8Dot, const MR: usize>(&mut self, s: S, row: usize) {
        let mut bytes = [[0.0; ROW_FLOATS]; MR];
        for block in 0..self.out_stride.div_ceil(BLOCK) {
            // SAFETY: the caller guarantees the rows, the block's values and numbers, and a checked tile.
            unsafe {
                self.round::<S, MR>(s, row, block, &mut bytes);
                self.multiply::<S, MR>(s, row, block, &bytes);
            }
        }
    }

    /// Rounds the weights of `MR` rows from `row` on to bytes for a block of columns, with their [unit](UNIT) and the
    /// [weighted sum](CENTRES) of the centres behind them.
    ///
    /// # Safety
    /// There are these rows and their weights, and the block's numbers for every panel of the span.
    #[inline(always)]
    unsafe fn round<S: Int8Dot, const MR: usize>(&self, s: S, row: usize, block: usize, to: &mut [ByteRow; MR]) {
        let (first, end, kind) = (self.span.first_panel(), self.span.end_panel(), self.numbers.kind);
        let mut room = [[0.0; LANES]; KEY_BLOCK / LANES];
        let numbers = &mut room[..end - first];
        // SAFETY: the caller guarantees the rows and the numbers; spans end inside a block, so the span's panels are inside a
        // row.
        unsafe {
            let weights = self.weights.as_ptr().add(row * SCORE_STRIDE + first * LANES);
            self.widen(s, block * kind.numbers(), numbers);
            let units = byte_weights::units::<S, MR, SCORE_STRIDE>(s, weights, numbers);
            let bytes = to.as_mut_ptr().cast::<[u8; LANES]>().add(first);
            byte_weights::round::<S, MR, SCORE_STRIDE>(s, weights, numbers, units, first, bytes);
            let mut sums = [0.0; MR];
            if kind == Int4::Centred {
                self.widen(s, block * kind.numbers() + 1, numbers);
                sums = byte_weights::weighted_sums::<S, MR, SCORE_STRIDE>(s, weights, numbers);
            }
            for r in 0..MR {
                (to[r][UNIT], to[r][CENTRES]) = (units[r].size, sums[r]);
            }
        }
    }

    /// Widens the `n`th numbers of the span's values.
    ///
    /// # Safety
    /// They are readable.
    #[inline(always)]
    unsafe fn widen<S: Simd>(&self, s: S, n: usize, to: &mut [Panel]) {
        let (first, numbers) = (self.span.first_panel(), self.numbers);
        for (panel, to) in to.iter_mut().enumerate() {
            // SAFETY: the caller guarantees sixteen numbers of each panel.
            let number = unsafe { s.load_f16(numbers.first.at(first + panel).cast::<u16>().add(n * numbers.step)) };
            lanes::store(s, to, number);
        }
    }

    /// Accumulates the P·V of `MR` rows from `row` on and a block of columns. `weights` are theirs, of the span's keys.
    ///
    /// # Safety
    /// There are these rows, and the block's values for every key of the span; the tile was [checked](Self::check).
    #[inline(always)]
    pub(crate) unsafe fn multiply<S: Int8Dot, const MR: usize>(
        &mut self,
        s: S,
        row: usize,
        block: usize,
        weights: &[ByteRow; MR],
    ) {
        let two = self.out_stride - block * BLOCK > LANES;
        // SAFETY: the caller guarantees the values, and the check the outputs; the upper half of a block's columns lies in the same
        // bytes as the lower.
        unsafe {
            let fours = self.values.vector(block);
            if const { <Int4Fours as MulAdd<S>>::TILE_VECS > 1 } && two {
                return self.multiply_half::<S, Lower, MR, 2>(s, [row, block * BLOCK], fours, weights);
            }
            self.multiply_half::<S, Lower, MR, 1>(s, [row, block * BLOCK], fours, weights);
            if two {
                self.multiply_half::<S, Upper, MR, 1>(s, [row, block * BLOCK + LANES], fours.cast(), weights);
            }
        }
    }

    /// Accumulates the P·V of `MR` rows and `NV` vectors of columns, from these on: half a block, or both.
    ///
    /// # Safety
    /// Same contract as [`Self::multiply`].
    #[inline(always)]
    unsafe fn multiply_half<S: Int8Dot, H: Half, const MR: usize, const NV: usize>(
        &mut self,
        s: S,
        [row, column]: [usize; 2],
        fours: Rows<NibbleQuad<H>>,
        weights: &[ByteRow; MR],
    ) {
        let far = tile_prefetches::<S>(row, MR, self.rows)
            .then(|| prefetch_distance(s, fours, self.rows, size_of::<[NibbleQuad<H>; LANES]>()));
        // SAFETY: the caller guarantees the rows, the values, and that factors and outputs hold them.
        unsafe {
            let running = RunningRows {
                rescale_prev: self.rescale_prev.as_ptr().add(row),
                rescale_block: self.rescale_block.as_ptr().add(row),
                rows: TileRows {
                    out: self.out.as_mut_ptr().add(row * self.out_stride + column),
                    stride: self.out_stride,
                },
                fresh: self.fresh,
                ends: None,
            };
            self.prefetch.beside(
                s,
                0,
                #[inline(always)]
                |stream| {
                    let values = ValueTerms::new(s, fours, &self.span.keys(), &(0..KEY_BLOCK));
                    let terms = Terms { values, weights: weights.as_ptr().cast(), far, next: None, stream };
                    tile::<S, _, MR, NV>(s, terms, running);
                },
            );
        }
    }
}
