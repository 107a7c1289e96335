//! P·V of int8 values: weights are rounded to 16 bits and multiplied by bytes, in fours of keys.

use crate::attention::scratch::SCORE_STRIDE;
use crate::attention::steps::pv::{Values, values};
use crate::attention::steps::score_passes::ScoreBlock;
use crate::matmul::int8::{LARGEST_WEIGHT, QUAD, ValueQuad, WeightFactors, scale_weights};
use crate::simd::{Int8Dot, Int8DotWork, LANES, Simd, Words4};
use crate::tensor::rows::Rows;
use core::ops::Range;

/// Same contract as [`values`], with rounded weights.
impl Int8DotWork for Values<'_, '_, Rows<ValueQuad>> {
    type Output = ();
    #[inline(always)]
    unsafe fn run<S: Int8Dot>(self, s: S) {
        // SAFETY: the caller guarantees the contract of `values`.
        unsafe { values(s, self.sums, self.values) }
    }
}

/// Multiplies weights by the scales of their values and rounds them to 16 bits, in place: four weights become a [`Words4`],
/// which is written to the first half of the row, and the largest [behind them](LARGEST_WEIGHT); it is NaN if a weight is
/// not finite.
pub(crate) fn round_weights<S: Simd>(s: S, mut row_block: ScoreBlock<'_>, scales: &[f32]) {
    s.vectorize(
        #[inline(always)]
        move || {
            assert!(row_block.spans.iter().all(|span| span.is_empty() || span.end_panel() * LANES <= scales.len()));
            row_block.for_each_row(
                s,
                #[inline(always)]
                // SAFETY: panels lie inside the row, and inside `scales`.
                |_, panels, weights| unsafe { round_row(weights, panels, scales) },
            );
        },
    )
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
