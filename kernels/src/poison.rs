//! Values that are not finite behind a mask: weight 0 times ∞ or NaN is NaN, and must be nothing.

use crate::block::{KEY_BLOCK, SCORE_STRIDE, Span};
use crate::geometry::{MAX_GROUP, Regions};
use crate::infinite;
use crate::options::{MaskMod, Mods, ProbMod, ScoreMod};
use crate::pairs;
use crate::steps::Steps;
use crate::tile::{Block, Fused};

/// Whether values are taken as they are, or blocks of them looked at first.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Care {
    /// As they are.
    Fast,
    /// What is not finite is replaced by 0, and added to the rows that see it afterwards.
    Careful,
}

/// Which keys of a block each row of a group sees, noted before the scores become weights. A score of −∞ hides its
/// key, however it came about.
pub(crate) struct Seen([[u64; KEY_BLOCK / 64]; MAX_GROUP]);

impl Seen {
    pub(crate) fn new(tile_rows: usize, spans: &[Span], rows: usize, scores: &[f32]) -> Self {
        let mut bits = [[0; KEY_BLOCK / 64]; MAX_GROUP];
        for (r, bits) in bits[..rows].iter_mut().enumerate() {
            for j in spans[r / tile_rows].keys() {
                if scores[r * SCORE_STRIDE + j] != f32::NEG_INFINITY {
                    bits[j / 64] |= 1 << (j % 64);
                }
            }
        }
        Self(bits)
    }

    pub(crate) fn sees(&self, row: usize, key: usize) -> bool {
        self.0[row][key / 64] >> (key % 64) & 1 == 1
    }
}

impl<S: Steps, A: ScoreMod, B: MaskMod, C: ProbMod> Fused<'_, '_, S, Mods<A, B, C>> {
    /// Notes who sees what, if care is to be taken and the block needs it.
    ///
    /// # Safety
    /// As for [`Fused::run`].
    pub(crate) unsafe fn seen(
        &self,
        block: &Block,
        care: Care,
        rows: usize,
        spans: &[Span],
        scores: &[f32],
    ) -> Option<Seen> {
        // SAFETY: the block's values exist.
        (care == Care::Careful && unsafe { !block.values.all_finite(self.s, block.len, self.geometry.value_dim) })
            .then(|| Seen::new(S::TILE_ROWS, spans, rows, scores))
    }

    /// Marks in `regions.part` what [`Care::Careful`] left out: the values that are not finite, in the rows that see their keys.
    ///
    /// # Safety
    /// As for [`Fused::run`]; `group` lies inside the task.
    pub(crate) unsafe fn mark_infinite(&self, block: &Block, seen: &Seen, rows: usize, regions: &mut Regions<'_>) {
        let (width, [_, native]) = (self.geometry.width(), self.native());
        // SAFETY: the values have these columns.
        for run in unsafe { block.values.runs(0..self.geometry.value_dim) } {
            for (j, c) in (0..block.len).flat_map(|j| (0..run.cols).map(move |c| (j, c))) {
                // SAFETY: key `j` of the block, a column of the run.
                let x = unsafe { run.rows.get(j, c) };
                if x.is_finite() {
                    continue;
                }
                for r in (0..rows).filter(|&r| seen.sees(r, j)) {
                    let weights = &regions.scores[r * SCORE_STRIDE..][..SCORE_STRIDE];
                    let weight = if native { pairs::rounded(weights, j) } else { weights[j] };
                    let output = &mut regions.part[r * width + run.first + c];
                    *output = infinite::see(*output, weight * x);
                }
            }
        }
    }
}
