//! The steps over pairs of bfloat16, on machines that multiply those: see `matmul/bf16_pairs.rs`.

use crate::attention::steps::pv::{Values, values};
use crate::attention::steps::qk::{Scores, scores};
use crate::attention::steps::score_passes::ScoreBlock;
use crate::matmul::dot_tile::{APART, BESIDE, PairColumns};
use crate::matmul::value_operand::RowPairs;
use crate::simd::{Bf16Dot, Bf16DotWork, LANES};

/// Packed keys.
#[derive(Clone, Copy)]
pub(crate) enum PairPanels {
    /// `[panel][pair][16]`.
    Packed(*const PairColumns<BESIDE>),
    /// `[panel][head_dim][16]` elements, an even number of dimensions.
    Apart(*const PairColumns<APART>),
}

/// Asks for what [`scores`] asks for, with queries in pairs.
impl Bf16DotWork for Scores<'_, PairPanels> {
    type Output = ();
    #[inline(always)]
    unsafe fn run<S: Bf16Dot>(mut self, s: S) {
        // SAFETY: passed on.
        unsafe {
            match self.keys {
                PairPanels::Packed(keys) => scores(s, self.of(keys)),
                PairPanels::Apart(keys) => scores(s, self.of(keys)),
            }
        }
    }
}

/// Asks for what [`values`] asks for, with rounded weights.
impl Bf16DotWork for Values<'_, RowPairs> {
    type Output = ();
    #[inline(always)]
    unsafe fn run<S: Bf16Dot>(self, s: S) {
        // SAFETY: passed on.
        unsafe { values(s, self) }
    }
}

/// Weights to be rounded where they are: the pair of keys 2i and 2i + 1 goes where the weight of key i was.
pub(crate) struct Round<'a>(pub(crate) ScoreBlock<'a>);

/// Asks for nothing.
impl Bf16DotWork for Round<'_> {
    type Output = ();
    #[inline(always)]
    unsafe fn run<S: Bf16Dot>(self, s: S) {
        let mut row_block = self.0;
        row_block.for_each_row(
            s,
            #[inline(always)]
            |_, panels, weights| {
                for panel in panels {
                    // SAFETY: a panel of the row, written to its first half: what lies there was read before, or belongs to
                    // no key of the span.
                    unsafe {
                        let v = s.load(weights.add(panel * LANES));
                        s.store_bf16x2(weights.add(panel * LANES / 2).cast(), v);
                    }
                }
            },
        );
    }
}
