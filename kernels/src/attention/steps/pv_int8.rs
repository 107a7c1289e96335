//! P·V of int8 and int4 values: weights are rounded, to 16 bits or to bytes, and multiplied by bytes, or halves of them, in fours
//! of keys.

use crate::attention::steps::pv::{Values, values};
use crate::attention::steps::score_passes::ScoreBlock;
use crate::attention::steps::span::Span;
use crate::attention::tiling::SCORE_STRIDE;
use crate::kv::key_block::Int4Numbers;
use crate::matmul::byte_weights::{self, CENTRES, ROW_FLOATS, UNIT, Unit};
use crate::matmul::int4::{Int4, NibbleQuad};
use crate::matmul::int8::{LARGEST_WEIGHT, QUAD, ValueQuad, WeightFactors, scale_weights};
use crate::matmul::operands::{Int4Fours, MulAdd};
use crate::matmul::tile_shape::MAX_TILE_ROWS;
use crate::simd::aligned::elements_mut;
use crate::simd::{Int8Dot, Int8DotWork, LANES, Lower, Simd, Upper, Words4};
use crate::tensor::rows::{KEY_BLOCK, Rows};
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

/// Scales and centres of a block of int4 values, widened: a block of columns has its own.
pub(crate) struct ValueNumbers {
    scales: [f32; KEY_BLOCK],
    centres: [f32; KEY_BLOCK],
    has_centres: bool,
}

impl ValueNumbers {
    pub(crate) const fn new() -> Self {
        Self { scales: [0.0; KEY_BLOCK], centres: [0.0; KEY_BLOCK], has_centres: false }
    }

    /// Replaces them by those of a block of columns, for so many panels of sixteen keys, widened.
    ///
    /// # Safety
    /// The numbers of these panels and of the block are readable; there are at most a block's panels.
    #[inline(always)]
    pub(crate) unsafe fn widen<S: Simd>(&mut self, s: S, stored: Int4Numbers, block: usize, panels: usize) {
        let Int4Numbers { kind, first, step } = stored;
        self.has_centres = kind == Int4::Centred;
        let scales = self.scales.as_chunks_mut::<LANES>().0.iter_mut();
        for (panel, (scales, centres)) in scales.zip(self.centres.as_chunks_mut::<LANES>().0).take(panels).enumerate() {
            // SAFETY: the caller guarantees sixteen scales of the panel, and as many centres if there are any.
            unsafe {
                let from = first.at(panel).cast::<u16>().add(block * kind.numbers() * step);
                s.store(scales.as_mut_ptr(), s.load_f16(from));
                if self.has_centres {
                    s.store(centres.as_mut_ptr(), s.load_f16(from.add(step)));
                }
            }
        }
    }
}

/// Weights of a tile of rows for one block of columns of int4 values.
pub(crate) struct TileWeights<'a> {
    /// Weights of the rows, which other blocks of columns read too.
    pub(crate) from: &'a [f32],
    pub(crate) span: Span,
    pub(crate) rows: usize,
    pub(crate) numbers: &'a ValueNumbers,
    /// Room for the rows' rounded weights.
    pub(crate) to: &'a mut [f32],
}

/// Rounds the weights of a tile to bytes, with their [unit](UNIT) and the [weighted sum](CENTRES) of the centres behind them.
#[inline(always)]
pub(crate) fn round_tile<S: Simd>(s: S, tile: TileWeights<'_>) {
    let TileWeights { from, span, rows, numbers, to } = tile;
    let panels = span.first_panel()..span.end_panel();
    assert!(from.len() >= rows * SCORE_STRIDE && to.len() >= rows * ROW_FLOATS);
    let keys = panels.start * LANES..panels.end * LANES;
    let scales = &numbers.scales[keys.clone()];
    // Row after row would wait for each row's largest.
    let mut units = [Unit::new(0.0); MAX_TILE_ROWS];
    for (unit, from) in units[..rows].iter_mut().zip(from.chunks_exact(SCORE_STRIDE)) {
        *unit = Unit::new(byte_weights::largest(&from[keys.clone()], scales));
    }
    let weights = from.chunks_exact(SCORE_STRIDE).zip(to.chunks_exact_mut(ROW_FLOATS));
    for ((from, to), unit) in weights.zip(&units[..rows]) {
        to[UNIT] = unit.size;
        unit.round(&from[keys.clone()], scales, keys.start, &mut elements_mut(to)[keys.clone()]);
        let mut sum = s.splat(0.0);
        for panel in panels.clone().take_while(|_| numbers.has_centres) {
            // SAFETY: spans end inside a block, and so inside rows and centres.
            sum = unsafe {
                let (weights, centres) =
                    (from.as_ptr().add(panel * LANES), numbers.centres.as_ptr().add(panel * LANES));
                s.fma(s.load(weights), s.load(centres), sum)
            };
        }
        to[CENTRES] = s.reduce_sum(sum);
    }
}
