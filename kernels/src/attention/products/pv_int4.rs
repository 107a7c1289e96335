//! P·V of int4 values: for each block of columns, which has its scales, a tile's weights are rounded to bytes and multiplied
//! by halves of bytes, in fours of keys.
//!
//! ```text
//! for each block of 32 columns:
//!     bytes[MR][256] = weights[MR] · scales, in units of a 255th of the row's largest     byte_weights.rs
//!     out[MR][32] += bytes · values, times the unit                                       pv_tile.rs
//! ```

use crate::attention::products::pv::Values;
use crate::attention::products::pv_tile::{Terms, prefetch_distance, tile};
use crate::attention::scratch::SCORE_STRIDE;
use crate::attention::steps::span::{Span, for_each_register_tile};
use crate::kv::key_block::Int4Numbers;
use crate::kv::value_panels::ValuePanels;
use crate::matmul::byte_weights::{self, CENTRES, Panel, ROW_FLOATS, UNIT};
use crate::matmul::int4::{BLOCK, Int4, NibbleQuad};
use crate::matmul::operands::{Int4Fours, MulAdd};
use crate::matmul::prefetch::tile_prefetches;
use crate::matmul::value_terms::ValueTerms;
use crate::simd::{Half, Int8Dot, Int8DotWork, LANES, Lower, Simd, Upper, lanes};
use crate::tensor::rows::{KEY_BLOCK, Rows};

/// Int4 values of a block. `out` of the sums that they are added to holds all columns, `out_stride` of them in a row; no weight is
/// below 0.
///
/// To run that requires that for every key of the spans, in whole fours, the values of every block of columns are readable, and for
/// every panel of the spans the numbers.
#[derive(Clone, Copy)]
pub(crate) struct Int4Values {
    /// Values, a panel for each block of columns.
    pub(crate) panels: ValuePanels<NibbleQuad<Lower>>,
    /// Scales of the values, and centres if they have such.
    pub(crate) numbers: Int4Numbers,
}

/// Weights of a row, rounded to bytes, and what belongs to them.
pub(crate) type ByteRow = [f32; ROW_FLOATS];

/// First row of a register tile, and the keys that it needs, at least one.
#[derive(Clone, Copy)]
pub(crate) struct RowTile {
    pub(crate) row: usize,
    pub(crate) span: Span,
}

impl Int8DotWork for Values<'_, '_, Int4Values> {
    type Output = ();
    #[inline(always)]
    unsafe fn run<S: Int8Dot>(mut self, s: S) {
        self.check::<S>(SCORE_STRIDE);
        s.vectorize(
            #[inline(always)]
            || {
                for_each_register_tile::<S>(
                    self.sums.spans,
                    self.sums.rows,
                    <Int4Fours as MulAdd<S>>::TILE_ROWS,
                    #[inline(always)]
                    |rows, span| {
                        let row = rows.start;
                        // SAFETY: these rows are left; the operands were checked, and the caller guarantees values and numbers.
                        by_tile_rows!(rows.len(), most <Int4Fours as MulAdd<S>>::TILE_ROWS, |MR| unsafe {
                            self.accumulate::<S, MR>(s, RowTile { row, span });
                        });
                    },
                );
            },
        );
    }
}

impl Values<'_, '_, Int4Values> {
    /// Panics unless weights (`row_floats` a row), factors and outputs cover all rows and columns.
    pub(crate) fn check<S: Simd>(&self, row_floats: usize) {
        self.sums.check::<S>(S::TILE_ROWS, row_floats);
        let blocks = self.values.panels.layout.width.div_ceil(LANES);
        assert!(blocks == self.sums.cols.div_ceil(BLOCK) && self.sums.ends.is_none(), "blocks of columns");
    }

    /// Rounds the weights of `MR` rows and multiplies them, a block of columns after the other.
    ///
    /// # Safety
    /// There are these rows, and the values and numbers of the span; the operands were [checked](Self::check).
    #[inline(always)]
    unsafe fn accumulate<S: Int8Dot, const MR: usize>(&mut self, s: S, tile: RowTile) {
        let mut bytes = [[0.0; ROW_FLOATS]; MR];
        for block in 0..self.sums.cols.div_ceil(BLOCK) {
            // SAFETY: the caller guarantees the rows, the block's values and numbers, and checked operands.
            unsafe {
                self.round::<S, MR>(s, tile, block, &mut bytes);
                self.multiply::<S, MR>(s, tile, block, &bytes);
            }
        }
    }

    /// Rounds the weights of `MR` rows to bytes for a block of columns, with their [unit](UNIT) and the
    /// [weighted sum](CENTRES) of the centres behind them.
    ///
    /// # Safety
    /// There are these rows and their weights, and the block's numbers for every panel of the span.
    #[inline(always)]
    unsafe fn round<S: Int8Dot, const MR: usize>(&self, s: S, tile: RowTile, block: usize, to: &mut [ByteRow; MR]) {
        let RowTile { row, span } = tile;
        let (first, end, kind) = (span.first_panel(), span.end_panel(), self.values.numbers.kind);
        let mut room = [[0.0; LANES]; KEY_BLOCK / LANES];
        let numbers = &mut room[..end - first];
        // SAFETY: the caller guarantees the rows and the numbers; spans end inside a block, so the span's panels are inside a
        // row.
        unsafe {
            let weights = self.sums.weights.as_ptr().add(row * SCORE_STRIDE + first * LANES);
            self.values.widen(s, first, block * kind.numbers(), numbers);
            let units = byte_weights::units::<S, MR, SCORE_STRIDE>(s, weights, numbers);
            let bytes = to.as_mut_ptr().cast::<[u8; LANES]>().add(first);
            byte_weights::round::<S, MR, SCORE_STRIDE>(s, weights, numbers, units, first, bytes);
            let mut sums = [0.0; MR];
            if kind == Int4::Centred {
                self.values.widen(s, first, block * kind.numbers() + 1, numbers);
                sums = byte_weights::weighted_sums::<S, MR, SCORE_STRIDE>(s, weights, numbers);
            }
            for r in 0..MR {
                (to[r][UNIT], to[r][CENTRES]) = (units[r].size, sums[r]);
            }
        }
    }

    /// Accumulates the P·V of `MR` rows and a block of columns. `weights` are theirs, of the span's keys.
    ///
    /// # Safety
    /// There are these rows, and the block's values for every key of the span; the operands were [checked](Self::check).
    #[inline(always)]
    pub(crate) unsafe fn multiply<S: Int8Dot, const MR: usize>(
        &mut self,
        s: S,
        tile: RowTile,
        block: usize,
        weights: &[ByteRow; MR],
    ) {
        let (vec, two) = (block * (BLOCK / LANES), self.sums.cols - block * BLOCK > LANES);
        // SAFETY: the caller guarantees the values, and the check the outputs; the upper half of a block's columns lies in the same
        // bytes as the lower.
        unsafe {
            let fours = self.values.panels.vector(block);
            if const { <Int4Fours as MulAdd<S>>::TILE_VECS > 1 } && two {
                return self.multiply_half::<S, Lower, MR, 2>(s, tile, vec, fours, weights);
            }
            self.multiply_half::<S, Lower, MR, 1>(s, tile, vec, fours, weights);
            if two {
                self.multiply_half::<S, Upper, MR, 1>(s, tile, vec + 1, fours.cast(), weights);
            }
        }
    }

    /// Accumulates the P·V of `MR` rows and `NV` vectors of columns, from vector `vec` on: half a block, or both.
    ///
    /// # Safety
    /// Same contract as [`Self::multiply`].
    #[inline(always)]
    unsafe fn multiply_half<S: Int8Dot, H: Half, const MR: usize, const NV: usize>(
        &mut self,
        s: S,
        RowTile { row, span }: RowTile,
        vec: usize,
        fours: Rows<NibbleQuad<H>>,
        weights: &[ByteRow; MR],
    ) {
        let rows = self.sums.rows;
        let far = tile_prefetches::<S>(row, MR, rows)
            .then(|| prefetch_distance(s, fours, rows, size_of::<[NibbleQuad<H>; LANES]>()));
        // SAFETY: the caller guarantees the rows, the values, and that factors and outputs hold them.
        unsafe {
            let running = self.sums.running(row, vec);
            let values = ValueTerms::new(s, fours, &span.keys(), &(0..KEY_BLOCK));
            let terms = Terms { values, weights: weights.as_ptr().cast(), far, next: None };
            tile::<S, _, MR, NV>(s, terms, running);
        }
        self.sums.prefetch.fetch(s);
    }
}

impl Int4Values {
    /// Widens the `n`th numbers of the values from panel `first` on.
    ///
    /// # Safety
    /// They are readable.
    #[inline(always)]
    unsafe fn widen<S: Simd>(&self, s: S, first: usize, n: usize, to: &mut [Panel]) {
        for (panel, to) in to.iter_mut().enumerate() {
            // SAFETY: the caller guarantees sixteen numbers of each panel.
            let number =
                unsafe { s.load_f16(self.numbers.first.at(first + panel).cast::<u16>().add(n * self.numbers.step)) };
            lanes::store(s, to, number);
        }
    }
}
