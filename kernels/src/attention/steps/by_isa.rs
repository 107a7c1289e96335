//! Kernel steps, each compiled once per instruction set, in this crate.
//!
//! The fused loop is generic over [`Steps`]. Every method below is an ordinary function whose body is a kernel inlined
//! into a `#[target_feature]` function.

use crate::attention::options::{Dropout, Mask};
use crate::attention::steps::bf16::{PairPanels, Round, SoftmaxPairs};
use crate::attention::steps::dropout::{self, CounterRow, Kept, KeptWeights};
use crate::attention::steps::epilogue::{self, Finish};
use crate::attention::steps::key_sums::{self, KeySums};
use crate::attention::steps::pv::{self, Values};
use crate::attention::steps::pv_int4::Int4Tile;
use crate::attention::steps::pv_int8;
use crate::attention::steps::pv_many;
use crate::attention::steps::qk::{self, Scores};
use crate::attention::steps::qk_int8;
use crate::attention::steps::qk_many;
use crate::attention::steps::score_passes::{self, AnyColumns, Columns, ScoreBlock};
use crate::attention::steps::softmax;
use crate::attention::steps::softmax_backward::{self, RowDot, SavedRow};
use crate::attention::steps::span::{RowKeys, Span};
use crate::matmul::int8::ValueQuad;
use crate::matmul::key_code::KeyCode;
use crate::matmul::pack_steps::PackSteps;
use crate::matmul::prefetch::READING_ROWS;
use crate::matmul::value_operand::RowPairs;
use crate::simd::Simd;
use crate::tensor::any::{AnyRowsMut, Typed};
use crate::tensor::rows::Rows;

/// Steps of the fused loop. Each call covers a row block and a key block.
pub(crate) trait Steps: PackSteps {
    /// Computes scores: see [`qk::scores`].
    ///
    /// # Safety
    /// Same contract as [`qk::scores`].
    unsafe fn scores(self, a: Scores<'_>);
    /// Softcap: replaces each score by `c·tanh(score / c)`.
    fn softcap(self, row_block: ScoreBlock<'_>, cap: f32);
    /// Adds a bias: see [`score_passes::bias`].
    ///
    /// # Safety
    /// Same contract as [`score_passes::bias`].
    unsafe fn bias(self, row_block: ScoreBlock<'_>, rows: AnyColumns<'_>);
    /// Adds ALiBi, −slope·|p − j|: see [`score_passes::alibi`].
    fn alibi(self, row_block: ScoreBlock<'_>, rows: &[(f32, f32)]);
    /// Hides the keys that a mask hides: see [`score_passes::mask`].
    ///
    /// # Safety
    /// Same contract as [`score_passes::mask`].
    unsafe fn mask(self, row_block: ScoreBlock<'_>, rows: &[Columns<u8>], polarity: Mask<'_>);
    /// Hides padding keys: see [`score_passes::mask_padding`].
    fn mask_padding(self, row_block: ScoreBlock<'_>);
    /// Narrows key ranges by a mask: see [`score_passes::narrow_by_mask`].
    ///
    /// # Safety
    /// Same contract as [`score_passes::narrow_by_mask`].
    unsafe fn narrow_by_mask(self, rows: &[Columns<u8>], polarity: Mask<'_>, key_ranges: &mut [RowKeys]);
    /// Turns scores into finished weights: see [`score_passes::weights`].
    fn weights(self, row_block: ScoreBlock<'_>, rows: &[(f32, f32)]);
    /// Adds weights to the sum of each key: see [`score_passes::add_weight_sums`].
    fn add_weight_sums(self, row_block: ScoreBlock<'_>, sums: &mut [f32]);
    /// Turns scores into weights and merges the block into the rows' running maxima and sums: see [`softmax::softmax`].
    fn softmax(self, row_block: ScoreBlock<'_>, state: softmax::SoftmaxState<'_>);
    /// Turns scores into weights of bfloat16 pairs, and merges the block as [`Self::softmax`] does: see [`SoftmaxPairs`].
    fn softmax_pairs(self, row_block: ScoreBlock<'_>, state: softmax::SoftmaxState<'_>);
    /// Merges rows accumulated over later keys into rows accumulated over earlier ones: see [`softmax::merge`].
    fn merge(self, state: softmax::SoftmaxState<'_>, out: &mut [f32], later: &[f32], dim: usize);
    /// Merges outputs accumulated with non-finite values handled, by known factors: see [`softmax::merge_marked`].
    fn merge_marked(self, factors: [&[f32]; 2], out: &mut [f32], later: &[f32], dim: usize);
    /// Accumulates P·V: see [`pv::values`].
    ///
    /// # Safety
    /// Same contract as [`pv::values`].
    unsafe fn values(self, a: Values<'_>);
    /// Computes scores of int8 queries and int8 or int4 keys: see [`qk_int8::Scores`].
    ///
    /// # Safety
    /// Same contract as [`qk_int8::Scores`].
    unsafe fn scores_int8<C: KeyCode>(self, a: qk_int8::Scores<'_, C>);
    /// Scales weights of int8 values and rounds them to 16 bits: see [`pv_int8::round_weights`].
    fn round_weights_int8(self, row_block: ScoreBlock<'_>, scales: &[f32]);
    /// Accumulates P·V of int8 values: see [`pv::values`].
    ///
    /// # Safety
    /// Same contract as [`pv::values`], with rounded weights.
    unsafe fn values_int8(self, a: Values<'_, Rows<ValueQuad>>);
    /// Accumulates P·V of a tile of rows and int4 values: see [`Int4Tile`].
    ///
    /// # Safety
    /// Same contract as [`Int4Tile`].
    unsafe fn values_int4(self, tile: Int4Tile<'_>);
    /// Computes scores of bfloat16 pairs: see [`qk::scores`].
    ///
    /// # Safety
    /// Same contract as [`qk::scores`], with queries of pairs.
    unsafe fn scores_pairs(self, a: Scores<'_, PairPanels>);
    /// Rounds finished weights to bfloat16 pairs: see [`Round`].
    fn round_weights(self, row_block: ScoreBlock<'_>);
    /// Accumulates P·V of bfloat16 pairs: see [`pv::values`].
    ///
    /// # Safety
    /// Same contract as [`pv::values`], with rounded weights.
    unsafe fn values_pairs(self, a: Values<'_, RowPairs>);
    /// Draws which weights are kept: see [`dropout::draw`].
    fn draw(self, spans: &[Span], first: usize, rows: &[CounterRow], dropout: Dropout, kept: &mut [KeptWeights]);
    /// Drops weights: see [`dropout::drop_weights`].
    fn drop_weights(self, row_block: ScoreBlock<'_>, kept: &Kept);
    /// Turns scores into weights, and gradients of weights into those of scores: see
    /// [`softmax_backward::softmax_backward`].
    fn softmax_backward(self, row_block: ScoreBlock<'_>, gradients: &mut [f32], saved: &[SavedRow]);
    /// Takes gradients back through the softcap: see [`softmax_backward::softcap_backward`].
    fn softcap_backward(self, gradients: ScoreBlock<'_>, capped: &[f32], cap: f32);
    /// Computes dot products of rows: see [`softmax_backward::row_dots`].
    ///
    /// # Safety
    /// Same contract as [`softmax_backward::row_dots`].
    unsafe fn row_dots(self, rows: [&[*const f32]; 2], vecs: usize, dots: &mut [RowDot]);
    /// Adds Pᵀ·X to sums of keys: see [`key_sums::key_sums`].
    ///
    /// # Safety
    /// Same contract as [`key_sums::key_sums`].
    unsafe fn key_sums(self, a: KeySums<'_>);
    /// Normalises and writes rows: see [`epilogue::finish`].
    ///
    /// # Safety
    /// Same contract as [`epilogue::finish`].
    unsafe fn finish(self, a: Finish<'_>, out: AnyRowsMut<'_>) -> bool;
}

/// Returns true if the time of `rows` rows is that of arithmetic, for which there are loops of their own over columns that
/// are evenly spaced.
#[inline(always)]
fn are_many(rows: usize, columns: Rows<f32>) -> bool {
    rows > READING_ROWS && !columns.are_scattered()
}

macro_rules! steps {
    ($token:ty) => {
        impl Steps for $token {
            unsafe fn scores(self, mut a: Scores<'_>) {
                if let Typed::F32(keys) = a.keys
                    && are_many(a.queries.len(), keys)
                {
                    // SAFETY: the caller guarantees the contract of `qk::scores`; many rows read panels side by side.
                    return unsafe { qk_many::scores(self, &mut a.of(keys)) };
                }
                // SAFETY: the caller guarantees the contract of `qk::scores`.
                by_type!(Typed, a.keys, |keys| unsafe { qk::scores(self, &mut a.of(keys)) })
            }

            fn softcap(self, row_block: ScoreBlock<'_>, cap: f32) {
                self.vectorize(
                    #[inline(always)]
                    || score_passes::softcap(self, row_block, cap),
                )
            }

            unsafe fn bias(self, row_block: ScoreBlock<'_>, rows: AnyColumns<'_>) {
                self.vectorize(
                    #[inline(always)]
                    // SAFETY: the caller guarantees the contract of `score_passes::bias`.
                    || by_type!(Typed, rows, |rows| unsafe { score_passes::bias(self, row_block, rows) }),
                )
            }

            fn mask_padding(self, row_block: ScoreBlock<'_>) {
                self.vectorize(
                    #[inline(always)]
                    || score_passes::mask_padding(self, row_block),
                )
            }

            fn alibi(self, row_block: ScoreBlock<'_>, rows: &[(f32, f32)]) {
                self.vectorize(
                    #[inline(always)]
                    || score_passes::alibi(self, row_block, rows),
                )
            }

            unsafe fn mask(self, row_block: ScoreBlock<'_>, rows: &[Columns<u8>], polarity: Mask<'_>) {
                self.vectorize(
                    #[inline(always)]
                    // SAFETY: the caller guarantees the contract of `score_passes::mask`.
                    || unsafe { score_passes::mask(self, row_block, rows, polarity) },
                )
            }

            unsafe fn narrow_by_mask(self, rows: &[Columns<u8>], polarity: Mask<'_>, key_ranges: &mut [RowKeys]) {
                self.vectorize(
                    #[inline(always)]
                    // SAFETY: the caller guarantees the contract of `score_passes::narrow_by_mask`.
                    || unsafe { score_passes::narrow_by_mask(rows, polarity, key_ranges) },
                )
            }

            fn weights(self, row_block: ScoreBlock<'_>, rows: &[(f32, f32)]) {
                self.vectorize(
                    #[inline(always)]
                    || score_passes::weights(self, row_block, rows),
                )
            }

            fn add_weight_sums(self, row_block: ScoreBlock<'_>, sums: &mut [f32]) {
                self.vectorize(
                    #[inline(always)]
                    || score_passes::add_weight_sums(self, row_block, sums),
                )
            }

            #[inline(always)]
            fn softmax(self, row_block: ScoreBlock<'_>, state: softmax::SoftmaxState<'_>) {
                self.vectorize(
                    #[inline(always)]
                    || softmax::softmax::<_, softmax::Floats>(self, row_block, state),
                )
            }

            fn softmax_pairs(self, row_block: ScoreBlock<'_>, state: softmax::SoftmaxState<'_>) {
                // SAFETY: `SoftmaxPairs` has no contract.
                unsafe { self.with_bf16_dot(SoftmaxPairs { row_block, state }) }
            }

            fn merge(self, state: softmax::SoftmaxState<'_>, out: &mut [f32], later: &[f32], dim: usize) {
                self.vectorize(
                    #[inline(always)]
                    || softmax::merge(self, state, out, later, dim),
                )
            }

            fn merge_marked(self, factors: [&[f32]; 2], out: &mut [f32], later: &[f32], dim: usize) {
                self.vectorize(
                    #[inline(always)]
                    || softmax::merge_marked(self, factors, out, later, dim),
                )
            }

            unsafe fn values(self, mut a: Values<'_>) {
                // SAFETY: the caller guarantees the contract of `pv::values`.
                unsafe {
                    match a.values {
                        Typed::F32(rows) if are_many(a.rows, rows) => pv_many::values(self, &mut a.of(rows)),
                        // Few rows: more have them side by side, as floats.
                        Typed::F32(rows) => pv::values(self, &mut a.of(rows)),
                        Typed::Bf16(rows) => pv::values(self, &mut a.of(rows)),
                        Typed::F16(rows) => pv::values(self, &mut a.of(rows)),
                    }
                }
            }

            unsafe fn scores_int8<C: KeyCode>(self, a: qk_int8::Scores<'_, C>) {
                // SAFETY: the caller guarantees the contract of `qk_int8::Scores`.
                unsafe { self.with_int8_dot(a) }
            }

            fn round_weights_int8(self, row_block: ScoreBlock<'_>, scales: &[f32]) {
                self.vectorize(
                    #[inline(always)]
                    || pv_int8::round_weights(self, row_block, scales),
                )
            }

            unsafe fn values_int8(self, mut a: Values<'_, Rows<ValueQuad>>) {
                // SAFETY: the caller guarantees the contract of `pv::values`, for fours.
                unsafe { self.with_int8_dot(&mut a) }
            }

            unsafe fn values_int4(self, tile: Int4Tile<'_>) {
                // SAFETY: the caller guarantees the contract of `Int4Tile`.
                unsafe { self.with_int8_dot(tile) }
            }

            unsafe fn scores_pairs(self, a: Scores<'_, PairPanels>) {
                // SAFETY: the caller guarantees the contract of `qk::scores`, for pairs.
                unsafe { self.with_bf16_dot(a) }
            }

            fn round_weights(self, row_block: ScoreBlock<'_>) {
                // SAFETY: `Round` has no contract.
                unsafe { self.with_bf16_dot(Round(row_block)) }
            }

            unsafe fn values_pairs(self, a: Values<'_, RowPairs>) {
                // SAFETY: the caller guarantees the contract of `pv::values`, for pairs.
                unsafe { self.with_bf16_dot(a) }
            }

            fn draw(
                self,
                spans: &[Span],
                first: usize,
                rows: &[CounterRow],
                dropout: Dropout,
                kept: &mut [KeptWeights],
            ) {
                self.vectorize(
                    #[inline(always)]
                    || dropout::draw(self, spans, first, rows, dropout, kept),
                )
            }

            fn drop_weights(self, row_block: ScoreBlock<'_>, kept: &Kept) {
                self.vectorize(
                    #[inline(always)]
                    || dropout::drop_weights(self, row_block, kept),
                )
            }

            fn softmax_backward(self, row_block: ScoreBlock<'_>, gradients: &mut [f32], saved: &[SavedRow]) {
                self.vectorize(
                    #[inline(always)]
                    || softmax_backward::softmax_backward(self, row_block, gradients, saved),
                )
            }

            fn softcap_backward(self, gradients: ScoreBlock<'_>, capped: &[f32], cap: f32) {
                self.vectorize(
                    #[inline(always)]
                    || softmax_backward::softcap_backward(self, gradients, capped, cap),
                )
            }

            unsafe fn row_dots(self, rows: [&[*const f32]; 2], vecs: usize, dots: &mut [RowDot]) {
                self.vectorize(
                    #[inline(always)]
                    // SAFETY: the caller guarantees the contract of `softmax_backward::row_dots`.
                    || unsafe { softmax_backward::row_dots(self, rows, vecs, dots) },
                )
            }

            unsafe fn key_sums(self, a: KeySums<'_>) {
                self.vectorize(
                    #[inline(always)]
                    // SAFETY: the caller guarantees the contract of `key_sums::key_sums`.
                    || unsafe { key_sums::key_sums(self, a) },
                )
            }

            unsafe fn finish(self, a: Finish<'_>, out: AnyRowsMut<'_>) -> bool {
                self.vectorize(
                    #[inline(always)]
                    // SAFETY: the caller guarantees the contract of `epilogue::finish`.
                    || by_type!(Typed, out, |out| unsafe { epilogue::finish(self, a, out) }),
                )
            }
        }
    };
}

for_each_token!(steps);
