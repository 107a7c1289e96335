//! Index scores of a row block: for each query row and key the sum, over heads, of weight · max(score, 0).

use crate::attention::steps::score_passes::ScoreBlock;
use crate::simd::{LANES, Simd, lanes, quiet};
use crate::tensor::rows::KEY_BLOCK;

/// Row of a row block: its query row, counted from the first that has sums, and the weight of its head.
#[derive(Clone, Copy)]
pub(crate) struct IndexRow {
    pub(crate) query: usize,
    pub(crate) weight: f32,
}

impl IndexRow {
    pub(crate) const NONE: Self = Self { query: 0, weight: 0.0 };
}

/// Adds weight · max(score, 0) of each row to the sums of its query row, `[query row][KEY_BLOCK]`, rows in order. A sum is −∞ from the
/// first score of −∞ on; max(NaN, 0) is NaN.
pub(crate) fn add_index_sums<S: Simd>(s: S, mut row_block: ScoreBlock<'_>, rows: &[IndexRow], sums: &mut [f32]) {
    s.vectorize(
        #[inline(always)]
        move || {
            let (zero, hidden) = (s.splat(0.0), s.splat(f32::NEG_INFINITY));
            let (sums, _) = sums.as_chunks_mut::<KEY_BLOCK>();
            row_block.for_each_row(
                #[inline(always)]
                |row, panels, scores| {
                    let IndexRow { query, weight } = rows[row];
                    let (weight, (sums, _)) = (s.splat(weight), sums[query].as_chunks_mut::<LANES>());
                    // Panels outside the span are hidden, and have no scores.
                    sums[..panels.start].as_flattened_mut().fill(f32::NEG_INFINITY);
                    sums[panels.end..].as_flattened_mut().fill(f32::NEG_INFINITY);
                    for panel in panels {
                        // SAFETY: a panel of the row's scores.
                        let score = unsafe { s.load(scores.add(panel * LANES)) };
                        let before = lanes::load(s, &sums[panel]);
                        let sum = s.fma(weight, s.max(zero, score), before);
                        let sum = s.select_eq(before, hidden, hidden, sum);
                        lanes::store(s, &mut sums[panel], s.select_eq(score, hidden, hidden, sum));
                    }
                },
            );
        },
    )
}

/// Turns sums into scores: multiplies each by its key's factor, if there are any, hidden keys apart. NaN becomes the quiet one.
pub(crate) fn finish_index_sums<S: Simd>(s: S, sums: &mut [f32], factors: Option<&[f32]>) {
    s.vectorize(
        #[inline(always)]
        move || {
            if let Some(factors) = factors {
                for (sum, &factor) in sums.iter_mut().zip(factors) {
                    *sum = if *sum == f32::NEG_INFINITY { *sum } else { *sum * factor };
                }
            }
            sums.iter_mut().for_each(|sum| *sum = quiet(*sum));
        },
    )
}
