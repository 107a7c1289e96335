//! Steps over pairs of bfloat16, on machines that multiply pairs: see `matmul/bf16_pairs.rs`.

use crate::attention::steps::pv::{Values, values};
use crate::attention::steps::qk::{FloatKeys, FloatQueries, scores};
use crate::attention::steps::score_passes::ScoreBlock;
use crate::attention::steps::score_run::Scores;
use crate::attention::steps::softmax::{SoftmaxState, WeightForm, softmax};
use crate::matmul::operands::HalfPair;
use crate::simd::exp::ForBf16;
use crate::simd::{Bf16Dot, Bf16DotWork, Bf16x2, LANES, Simd};
use crate::tensor::rows::Rows;

/// Packed keys, of which two neighbouring elements make a pair.
#[derive(Clone, Copy)]
pub(crate) enum PairPanels {
    /// Pairs, `[panel][pair][16]`.
    Packed(Rows<Bf16x2>),
    /// Single elements, `[panel][head_dim][16]`, with an even number of dimensions.
    Apart(Rows<HalfPair>),
}

/// Same contract as [`scores`], with queries as pairs.
impl Bf16DotWork for Scores<'_, '_, FloatQueries<'_>, FloatKeys<PairPanels>> {
    type Output = ();
    #[inline(always)]
    unsafe fn run<S: Bf16Dot>(self, s: S) {
        let Self { run, queries, keys: FloatKeys { panels, later } } = self;
        // SAFETY: the caller guarantees the contract of `scores` for these keys.
        unsafe {
            match panels {
                PairPanels::Packed(panels) => scores(s, run, queries, FloatKeys { panels, later }),
                PairPanels::Apart(panels) => scores(s, run, queries, FloatKeys { panels, later }),
            }
        }
    }
}

/// Same contract as [`values`], with rounded weights.
impl Bf16DotWork for Values<'_, '_, Rows<HalfPair>> {
    type Output = ();
    #[inline(always)]
    unsafe fn run<S: Bf16Dot>(self, s: S) {
        // SAFETY: the caller guarantees the contract of `values`.
        unsafe { values(s, self.sums, self.values) }
    }
}

/// Weights as bfloat16: the pair of keys 2i and 2i + 1 lies where the score of key i was.
struct Pairs;

impl<S: Bf16Dot> WeightForm<S> for Pairs {
    const IN_PLACE: bool = false;
    type Accuracy = ForBf16;

    #[inline(always)]
    unsafe fn store(s: S, row: *mut f32, panel: usize, weights: S::V) -> S::V {
        // SAFETY: eight pairs, floats 8·panel to 8·panel + 8 of the row: they end before the panel does, so they lie in it
        // or in those before it, which the caller guarantees are writable and have been read.
        unsafe { s.store_bf16x2(row.add(panel * LANES / 2).cast(), weights) }
    }
}

/// Turns scores into weights, rounded to pairs, as [`softmax`] does.
pub(crate) fn softmax_pairs<S: Simd>(s: S, row_block: ScoreBlock<'_>, state: SoftmaxState<'_>) {
    // SAFETY: the work has no contract.
    unsafe { s.with_bf16_dot(SoftmaxPairs { row_block, state }) }
}

/// Work of [`softmax_pairs`].
struct SoftmaxPairs<'a> {
    row_block: ScoreBlock<'a>,
    state: SoftmaxState<'a>,
}

/// Has no contract: it is safe for any score block.
impl Bf16DotWork for SoftmaxPairs<'_> {
    type Output = ();
    #[inline(always)]
    unsafe fn run<S: Bf16Dot>(self, s: S) {
        softmax::<S, Pairs>(s, self.row_block, self.state);
    }
}

/// Rounds finished weights in place, to the same pairs.
pub(crate) fn round_weights<S: Simd>(s: S, row_block: ScoreBlock<'_>) {
    // SAFETY: the work has no contract.
    unsafe { s.with_bf16_dot(Round(row_block)) }
}

/// Work of [`round_weights`].
struct Round<'a>(ScoreBlock<'a>);

/// Has no contract: it is safe for any score block.
impl Bf16DotWork for Round<'_> {
    type Output = ();
    #[inline(always)]
    unsafe fn run<S: Bf16Dot>(mut self, s: S) {
        s.vectorize(
            #[inline(always)]
            || {
                self.0.for_each_row(
                    s,
                    #[inline(always)]
                    |_, panels, weights| {
                        for panel in panels {
                            // SAFETY: a panel of the row is read, and its pairs are written to the first half of the row, over
                            // weights that have been read already or belong to no key of the span.
                            unsafe { Pairs::store(s, weights, panel, s.load(weights.add(panel * LANES))) };
                        }
                    },
                );
            },
        );
    }
}
