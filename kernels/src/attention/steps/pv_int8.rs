//! P·V of int8 and int4 values: weights are rounded, to 16 bits or to bytes, and multiplied by bytes, or halves of them, in fours
//! of keys.

use crate::attention::steps::pv::{Values, values};
use crate::attention::steps::score_passes::ScoreBlock;
use crate::attention::steps::span::Span;
use crate::attention::tiling::SCORE_STRIDE;
use crate::kv::key_block::Int4Numbers;
use crate::kv::value_panels::ValuePanels;
use crate::matmul::byte_weights::{self, CENTRES, Panel, ROW_FLOATS, UNIT};
use crate::matmul::int4::{BLOCK, Int4, NibbleQuad};
use crate::matmul::int8::{LARGEST_WEIGHT, QUAD, ValueQuad, WeightFactors, scale_weights};
use crate::matmul::operands::{Int4Fours, MulAdd};
use crate::matmul::prefetch::PrefetchQueue;
use crate::matmul::tile_shape::MAX_TILE_ROWS;
use crate::simd::aligned::elements_mut;
use crate::simd::{Int8Dot, Int8DotWork, LANES, Lower, Simd, Upper, Words4, lanes};
use crate::tensor::rows::Rows;
use core::ops::Range;

/// Same contract as [`values`], with rounded weights.
impl Int8DotWork for &mut Values<'_, Rows<ValueQuad>> {
    type Output = ();
    #[inline(always)]
    unsafe fn run<S: Int8Dot>(self, s: S) {
        // SAFETY: the caller guarantees the contract of `values`.
        unsafe { values(s, self) }
    }
}

/// Same contract as [`values`], with weights as bytes and what belongs to them; the columns are one block's.
impl Int8DotWork for &mut Values<'_, Rows<NibbleQuad<Lower>>> {
    type Output = ();
    #[inline(always)]
    unsafe fn run<S: Int8Dot>(self, s: S) {
        debug_assert!(self.cols <= 2 * LANES, "{} columns of one block", self.cols);
        let upper = self.cols.saturating_sub(LANES);
        // SAFETY: the caller guarantees the contract of `values`; the upper half of a block's columns lies in the same bytes
        // as the lower, and the outputs are those of both.
        unsafe {
            if const { <Int4Fours as MulAdd<S>>::TILE_VECS > 1 } || upper == 0 {
                return values(s, self);
            }
            self.cols = LANES;
            values(s, self);
            let fours = self.values.cast::<NibbleQuad<Upper>>();
            let mut half = self.of(fours);
            (half.cols, half.out) = (upper, &mut core::mem::take(&mut half.out)[LANES..]);
            values(s, &mut half);
        }
    }
}

/// Multiplies weights by the scales of their values and rounds them to 16 bits, in place: four weights become a [`Words4`],
/// which is written to the first half of the row, and the largest [behind them](LARGEST_WEIGHT); it is NaN if a weight is
/// not finite.
#[inline(always)]
pub(crate) fn round_weights<S: Simd>(s: S, mut row_block: ScoreBlock<'_>, scales: &[f32]) {
    assert!(row_block.spans.iter().all(|span| span.is_empty() || span.end_panel() * LANES <= scales.len()));
    row_block.for_each_row(
        s,
        #[inline(always)]
        // SAFETY: panels lie inside the row, and inside `scales`.
        |_, panels, weights| unsafe { round_row(weights, panels, scales) },
    );
}

/// Rounds the weights of some panels of a row.
///
/// # Safety
/// The panels lie inside the row, of [`SCORE_STRIDE`] floats, and inside `scales`.
#[inline(always)]
unsafe fn round_row(row: *mut f32, panels: Range<usize>, scales: &[f32]) {
    const { assert!(LARGEST_WEIGHT < SCORE_STRIDE) }
    if panels.is_empty() {
        return;
    }
    let keys = panels.start * LANES..panels.end * LANES;
    // SAFETY: the caller guarantees the panels; a row is longer than a block has keys. Words are written to the first half of
    // the row, over weights that have been read already or belong to no key of the span.
    unsafe {
        let weights = core::slice::from_raw_parts_mut(row.add(keys.start), keys.len());
        let largest = scale_weights(weights, &scales[keys]);
        let round = WeightFactors::new(largest);
        *row.add(LARGEST_WEIGHT) = if largest < f32::INFINITY { largest } else { f32::NAN };
        for panel in panels {
            let weights = *row.add(panel * LANES).cast::<[f32; LANES]>();
            let words = row.cast::<Words4>().add(panel * (LANES / QUAD));
            *words.cast::<[Words4; LANES / QUAD]>() = round.round(&weights);
        }
    }
}

/// Operands of P·V of a tile of rows and a block of int4 values. Each block of columns has its own scales, so the weights are
/// rounded for each.
///
/// The contract is that of [`values`], for every block of columns; the numbers of every panel of the span are readable.
pub(crate) struct Int4Tile<'a> {
    /// Weights, none below 0, `[row][SCORE_STRIDE]`.
    pub(crate) weights: &'a [f32],
    pub(crate) span: Span,
    pub(crate) rows: usize,
    pub(crate) values: ValuePanels<NibbleQuad<Lower>>,
    pub(crate) numbers: Int4Numbers,
    /// As in [`Values`]. `out` holds all columns, `out_stride` of them in a row.
    pub(crate) rescale_prev: &'a [f32],
    pub(crate) rescale_block: &'a [f32],
    pub(crate) fresh: bool,
    pub(crate) out: &'a mut [f32],
    pub(crate) out_stride: usize,
    pub(crate) prefetch: &'a mut PrefetchQueue,
}

impl Int8DotWork for Int4Tile<'_> {
    type Output = ();
    #[inline(always)]
    unsafe fn run<S: Int8Dot>(self, s: S) {
        let mut room = [0.0; MAX_TILE_ROWS * ROW_FLOATS];
        for (block, (_, fours)) in self.values.panels().enumerate() {
            let columns = block * BLOCK..self.out_stride.min((block + 1) * BLOCK);
            // SAFETY: the caller guarantees numbers, values and outputs; the weights were rounded just now.
            unsafe {
                s.vectorize(
                    #[inline(always)]
                    || self.round(s, block, &mut room),
                );
                let mut values = Values {
                    weights: &room,
                    values: fours,
                    cols: columns.len(),
                    spans: &[self.span],
                    rows: self.rows,
                    rescale_prev: self.rescale_prev,
                    rescale_block: self.rescale_block,
                    fresh: self.fresh,
                    out: &mut self.out[columns.start..],
                    out_stride: self.out_stride,
                    ends: None,
                    prefetch: self.prefetch,
                };
                (&mut values).run(s);
            }
        }
    }
}

/// Number of rows whose weights are rounded together: their scales and thresholds are read once.
const TOGETHER: usize = 4;

impl Int4Tile<'_> {
    /// Rounds the weights to bytes for a block of columns, with their [unit](UNIT) and the [weighted sum](CENTRES) of the centres
    /// behind them.
    ///
    /// # Safety
    /// The block's numbers are readable for every panel of the span.
    #[inline(always)]
    unsafe fn round<S: Int8Dot>(&self, s: S, block: usize, to: &mut [f32]) {
        assert!(self.weights.len() >= self.rows * SCORE_STRIDE && to.len() >= self.rows * ROW_FLOATS);
        let panels = self.span.first_panel()..self.span.end_panel();
        let weights = self.weights.chunks_exact(SCORE_STRIDE).map(|row| &row.as_chunks::<LANES>().0[panels.clone()]);
        let mut rows = weights.zip(to.chunks_exact_mut(ROW_FLOATS)).take(self.rows);
        // SAFETY: the caller guarantees the numbers.
        unsafe {
            while rows.len() >= TOGETHER {
                self.round_rows::<S, TOGETHER>(s, block, core::array::from_fn(|_| rows.next().expect("a row")));
            }
            for row in rows {
                self.round_rows::<S, 1>(s, block, [row]);
            }
        }
    }

    /// Returns the `n`th numbers of a panel's values, widened.
    ///
    /// # Safety
    /// They are readable.
    #[inline(always)]
    unsafe fn number<S: Simd>(&self, s: S, panel: usize, n: usize) -> S::V {
        // SAFETY: the caller guarantees sixteen numbers.
        unsafe { s.load_f16(self.numbers.first.at(panel).cast::<u16>().add(n * self.numbers.step)) }
    }

    /// Rounds the weights of the span, of some rows, as [`Self::round`] does.
    ///
    /// # Safety
    /// Same contract as [`Self::round`].
    #[inline(always)]
    unsafe fn round_rows<S: Int8Dot, const R: usize>(&self, s: S, block: usize, mut rows: [(&[Panel], &mut [f32]); R]) {
        let (first_panel, kind) = (self.span.first_panel(), self.numbers.kind);
        let (scale, centre) = (block * kind.numbers(), block * kind.numbers() + 1);
        let weights = rows.each_ref().map(|(weights, _)| *weights);
        let units = byte_weights::units(
            s,
            weights,
            #[inline(always)]
            // SAFETY: the caller guarantees the block's scales, and its centres if there are any.
            |panel| unsafe { self.number(s, first_panel + panel, scale) },
        );
        let mut sums = [s.splat(0.0); R];
        for panel in 0..self.span.end_panel() - first_panel {
            // SAFETY: as above.
            let scales = unsafe { self.number(s, first_panel + panel, scale) };
            for (((row, to), unit), sum) in rows.iter_mut().zip(units).zip(&mut sums) {
                let weights = lanes::load(s, &row[panel]);
                let bytes = &mut elements_mut(to).as_chunks_mut().0[first_panel + panel];
                *bytes = byte_weights::round(s, weights, scales, unit, first_panel + panel);
                if kind == Int4::Centred {
                    // SAFETY: as above.
                    *sum = s.fma(weights, unsafe { self.number(s, first_panel + panel, centre) }, *sum);
                }
            }
        }
        for (((_, to), unit), sum) in rows.iter_mut().zip(units).zip(sums) {
            (to[UNIT], to[CENTRES]) = (unit.size, s.reduce_sum(sum));
        }
    }
}
