//! The kernel steps, each compiled once per instruction set, in this crate.
//!
//! The fused loop is generic over [`Steps`] and may be instantiated elsewhere (user closures make it so), under
//! whatever optimisation level that crate has. The steps are not: every method below is an ordinary function of this
//! crate whose body is a kernel inlined into a `#[target_feature]` function.

use crate::activation::{self, Activation};
use crate::element::{self, Bf16, Dtype};
use crate::finish::{self, Finish};
use crate::int8;
use crate::norm::{self, Norm};
use crate::options::Mask;
use crate::pack;
use crate::pairs::{self, PairPanels};
use crate::passes::{self, Columns, Group};
use crate::poison::Care;
use crate::product::{self, Strip};
use crate::rows::Rows;
use crate::scores::{self, Scores};
use crate::simd::{Pair, Query4, Simd};
use crate::softmax;
use crate::tensor::{AnyRows, AnyRowsMut, Typed};
use crate::terms::RowPairs;
use crate::values::{self, Values};
use crate::{block::Hull, block::Span, exp};

/// What the fused loop is made of. A call covers a group of rows times a key block.
pub(crate) trait Steps: Copy + Send + Sync {
    /// Rows of a register tile: how the loop cuts groups into spans.
    const TILE_ROWS: usize;
    /// As [`Simd::ENDS_ROWS`].
    const ENDS_ROWS: bool;

    /// As [`Simd::is_roomy`].
    fn is_roomy(self) -> bool;
    /// # Safety
    /// As for [`pack::pack_keys`].
    unsafe fn pack_keys(self, keys: AnyRows, n: [usize; 2], d: usize, out: &mut [f32]);
    /// # Safety
    /// As for [`pack::pack_rows`].
    unsafe fn pack_rows(self, values: AnyRows, size: [usize; 2], care: Care, out: &mut [f32]);
    /// The same rounded.
    ///
    /// # Safety
    /// As for [`pack::pack_rows`].
    unsafe fn round_rows(self, values: AnyRows, size: [usize; 2], care: Care, out: &mut [Bf16]);
    /// # Safety
    /// As for [`pack::all_finite`].
    unsafe fn all_finite(self, values: AnyRows, n: usize, cols: usize) -> bool;
    /// # Safety
    /// As for [`scores::scores`].
    unsafe fn scores(self, a: Scores<'_>);
    /// # Safety
    /// As for [`product::product`].
    unsafe fn product(self, a: Strip<'_>);
    /// `c·tanh(score / c)`.
    fn softcap(self, group: Group<'_>, cap: f32);
    /// # Safety
    /// As for [`passes::bias`].
    unsafe fn bias(self, group: Group<'_>, rows: &[Columns<f32>]);
    /// Adds −slope·|p − j|.
    fn alibi(self, group: Group<'_>, rows: &[(f32, f32)]);
    /// # Safety
    /// As for [`passes::mask`].
    unsafe fn mask(self, group: Group<'_>, rows: &[Columns<u8>], polarity: Mask<'_>);
    /// As [`passes::hide_ends`].
    fn hide_ends(self, group: Group<'_>);
    /// # Safety
    /// As for [`passes::kept`].
    unsafe fn kept(self, rows: &[Columns<u8>], polarity: Mask<'_>, hulls: &mut [Hull]);
    /// Scores to finished weights.
    fn weights(self, group: Group<'_>, rows: &[(f32, f32)]);
    /// Weights into the sum of each key.
    fn add_up(self, group: Group<'_>, mass: &mut [f32]);
    /// Runs a caller's function compiled for this instruction set, as far as it inlines.
    fn vectorized<R>(self, f: impl FnOnce() -> R) -> R;
    /// Scores to weights, and the block into the rows' running maximum and sum.
    fn softmax(self, scores: &mut [f32], spans: &[Span], rows: usize, state: softmax::Rows<'_>);
    /// Rows gathered over later keys into rows gathered over earlier ones.
    fn fold(self, state: softmax::Rows<'_>, out: &mut [f32], later: &[f32], dim: usize);
    /// The same for outputs gathered with care, by factors that are known.
    fn fold_marked(self, factors: [&[f32]; 2], out: &mut [f32], later: &[f32], dim: usize);
    /// # Safety
    /// As for [`values::values`].
    unsafe fn values(self, a: Values<'_>);
    /// A row to bytes: see [`int8::quantise`].
    fn quantise(self, xs: &[f32], out: &mut [i8]) -> f32;
    /// A row to bytes, each channel by its own scale: see [`int8::quantise_by_channel`].
    fn quantise_by_channel(self, xs: &[f32], scales: &[f32], out: &mut [i8]) -> bool;
    /// A query row to bytes: see [`int8::quantise_query`].
    fn quantise_query(self, xs: &[f32], scale: f32, out: &mut [Query4]) -> int8::Row;
    /// Scores of rows of bytes.
    fn scores_int8(self, a: int8::Scores<'_>);
    /// Each key's weights by its factor.
    fn scale_columns(self, group: Group<'_>, factors: &[f32]);
    /// # Safety
    /// As for [`values::values`].
    unsafe fn values_int8(self, a: Values<'_, Rows<i8>>);
    /// # Safety
    /// As for [`pairs::pack`].
    unsafe fn pack_pairs(self, keys: Rows<Bf16>, n: [usize; 2], d: usize, out: &mut [Pair]);
    /// True if the machine multiplies pairs of bfloat16. The next three panic if it does not.
    fn multiplies_pairs(self) -> bool;
    /// # Safety
    /// As for [`scores::scores`], with queries of pairs.
    unsafe fn scores_pairs(self, a: Scores<'_, PairPanels>);
    /// Weights to pairs: see [`pairs::Round`].
    fn round_weights(self, group: Group<'_>);
    /// # Safety
    /// As for [`values::values`], with rounded weights.
    unsafe fn values_pairs(self, a: Values<'_, RowPairs>);
    /// # Safety
    /// As for [`finish::finish`].
    unsafe fn finish(self, a: Finish<'_>, out: AnyRowsMut<'_>) -> bool;
    /// The function of every element.
    fn activate(self, activation: Activation, xs: &mut [f32]);
    /// `gate ← f(gate)·up`.
    fn gate(self, activation: Activation, gate: &mut [f32], up: &[f32]);
    /// Rows brought to one size.
    fn norm(self, norm: &Norm<'_>, rows: norm::Rows<'_>, out: &mut [f32]);
    /// Elements of a 16-bit type to `f32`.
    fn widen(self, dtype: Dtype, from: &[u16], to: &mut [f32]);
    /// And back, rounded.
    fn narrow(self, dtype: Dtype, from: &[f32], to: &mut [u16]);
    /// `eˣ` of every element, all non-positive.
    fn exp(self, xs: &mut [f32]);
    /// Keeps the arithmetic units busy with FMAs and nothing else. Returns the operations done, and a value that depends
    /// on all of them.
    fn fma_burst(self, rounds: usize) -> (u64, f32);
    /// The same with separate products and sums.
    fn mul_add_burst(self, rounds: usize) -> (u64, f32);
}

macro_rules! steps {
    ($token:ty) => {
        impl Steps for $token {
            const TILE_ROWS: usize = <Self as Simd>::TILE_ROWS;
            const ENDS_ROWS: bool = <Self as Simd>::ENDS_ROWS;

            fn is_roomy(self) -> bool {
                Simd::is_roomy(self)
            }

            unsafe fn pack_keys(self, keys: AnyRows, n: [usize; 2], d: usize, out: &mut [f32]) {
                self.vectorize(
                    #[inline(always)]
                    // SAFETY: the caller's promise.
                    || by_type!(Typed, keys, |keys| unsafe { pack::pack_keys(self, keys, n, d, out) }),
                )
            }

            unsafe fn pack_rows(self, values: AnyRows, size: [usize; 2], care: Care, out: &mut [f32]) {
                self.vectorize(
                    #[inline(always)]
                    // SAFETY: the caller's promise.
                    || by_type!(Typed, values, |values| unsafe { pack::pack_rows(self, values, size, care, out) }),
                )
            }

            unsafe fn round_rows(self, values: AnyRows, size: [usize; 2], care: Care, out: &mut [Bf16]) {
                self.vectorize(
                    #[inline(always)]
                    // SAFETY: the caller's promise.
                    || by_type!(Typed, values, |values| unsafe { pack::pack_rows(self, values, size, care, out) }),
                )
            }

            unsafe fn all_finite(self, values: AnyRows, n: usize, cols: usize) -> bool {
                self.vectorize(
                    #[inline(always)]
                    // SAFETY: the caller's promise.
                    || by_type!(Typed, values, |values| unsafe { pack::all_finite(self, values, n, cols) }),
                )
            }

            unsafe fn scores(self, mut a: Scores<'_>) {
                self.vectorize(
                    #[inline(always)]
                    // SAFETY: the caller's promise.
                    || by_type!(Typed, a.keys, |keys| unsafe { scores::scores(self, a.of(keys)) }),
                )
            }

            unsafe fn product(self, a: Strip<'_>) {
                self.vectorize(
                    #[inline(always)]
                    // SAFETY: the caller's promise.
                    || unsafe { product::product(self, a) },
                )
            }

            fn softcap(self, group: Group<'_>, cap: f32) {
                self.vectorize(
                    #[inline(always)]
                    || passes::softcap(self, group, cap),
                )
            }

            unsafe fn bias(self, group: Group<'_>, rows: &[Columns<f32>]) {
                self.vectorize(
                    #[inline(always)]
                    // SAFETY: the caller's promise.
                    || unsafe { passes::bias(self, group, rows) },
                )
            }

            fn hide_ends(self, group: Group<'_>) {
                self.vectorize(
                    #[inline(always)]
                    || passes::hide_ends(self, group),
                )
            }

            fn alibi(self, group: Group<'_>, rows: &[(f32, f32)]) {
                self.vectorize(
                    #[inline(always)]
                    || passes::alibi(self, group, rows),
                )
            }

            unsafe fn mask(self, group: Group<'_>, rows: &[Columns<u8>], polarity: Mask<'_>) {
                self.vectorize(
                    #[inline(always)]
                    // SAFETY: the caller's promise.
                    || unsafe { passes::mask(self, group, rows, polarity) },
                )
            }

            unsafe fn kept(self, rows: &[Columns<u8>], polarity: Mask<'_>, hulls: &mut [Hull]) {
                self.vectorize(
                    #[inline(always)]
                    // SAFETY: the caller's promise.
                    || unsafe { passes::kept(rows, polarity, hulls) },
                )
            }

            fn weights(self, group: Group<'_>, rows: &[(f32, f32)]) {
                self.vectorize(
                    #[inline(always)]
                    || passes::weights(self, group, rows),
                )
            }

            fn add_up(self, group: Group<'_>, mass: &mut [f32]) {
                self.vectorize(
                    #[inline(always)]
                    || passes::add_up(self, group, mass),
                )
            }

            #[inline(always)]
            fn vectorized<R>(self, f: impl FnOnce() -> R) -> R {
                self.vectorize(f)
            }

            fn softmax(self, scores: &mut [f32], spans: &[Span], rows: usize, state: softmax::Rows<'_>) {
                self.vectorize(
                    #[inline(always)]
                    || softmax::softmax(self, scores, spans, rows, state),
                )
            }

            fn fold(self, state: softmax::Rows<'_>, out: &mut [f32], later: &[f32], dim: usize) {
                self.vectorize(
                    #[inline(always)]
                    || softmax::fold(self, state, out, later, dim),
                )
            }

            fn fold_marked(self, factors: [&[f32]; 2], out: &mut [f32], later: &[f32], dim: usize) {
                self.vectorize(
                    #[inline(always)]
                    || softmax::fold_marked(self, factors, out, later, dim),
                )
            }

            unsafe fn values(self, mut a: Values<'_>) {
                self.vectorize(
                    #[inline(always)]
                    // SAFETY: the caller's promise.
                    || by_type!(Typed, a.values, |rows| unsafe { values::values(self, a.of(rows)) }),
                )
            }

            fn quantise(self, xs: &[f32], out: &mut [i8]) -> f32 {
                self.vectorize(
                    #[inline(always)]
                    || int8::quantise(xs, out),
                )
            }

            fn quantise_by_channel(self, xs: &[f32], scales: &[f32], out: &mut [i8]) -> bool {
                self.vectorize(
                    #[inline(always)]
                    || int8::quantise_by_channel(xs, scales, out),
                )
            }

            fn quantise_query(self, xs: &[f32], scale: f32, out: &mut [Query4]) -> int8::Row {
                self.vectorize(
                    #[inline(always)]
                    || int8::quantise_query(xs, scale, out),
                )
            }

            fn scores_int8(self, a: int8::Scores<'_>) {
                self.with_dot4(a)
            }

            fn scale_columns(self, group: Group<'_>, factors: &[f32]) {
                self.vectorize(
                    #[inline(always)]
                    || passes::scale_columns(self, group, factors),
                )
            }

            unsafe fn values_int8(self, a: Values<'_, Rows<i8>>) {
                self.vectorize(
                    #[inline(always)]
                    // SAFETY: the caller's promise.
                    || unsafe { values::values(self, a) },
                )
            }

            fn multiplies_pairs(self) -> bool {
                self.has_pairs()
            }

            unsafe fn pack_pairs(self, keys: Rows<Bf16>, n: [usize; 2], d: usize, out: &mut [Pair]) {
                self.vectorize(
                    #[inline(always)]
                    // SAFETY: the caller's promise.
                    || unsafe { pairs::pack(self, keys, n, d, out) },
                )
            }

            unsafe fn scores_pairs(self, a: Scores<'_, PairPanels>) {
                // SAFETY: the caller's promise.
                unsafe { self.with_pairs(a) }
            }

            fn round_weights(self, group: Group<'_>) {
                // SAFETY: it asks for nothing.
                unsafe { self.with_pairs(pairs::Round(group)) }
            }

            unsafe fn values_pairs(self, a: Values<'_, RowPairs>) {
                // SAFETY: the caller's promise.
                unsafe { self.with_pairs(a) }
            }

            unsafe fn finish(self, a: Finish<'_>, out: AnyRowsMut<'_>) -> bool {
                self.vectorize(
                    #[inline(always)]
                    // SAFETY: the caller's promise.
                    || by_type!(Typed, out, |out| unsafe { finish::finish(self, a, out) }),
                )
            }

            fn activate(self, activation: Activation, xs: &mut [f32]) {
                self.vectorize(
                    #[inline(always)]
                    || activation::activate_slice(self, activation, xs),
                )
            }

            fn gate(self, activation: Activation, gate: &mut [f32], up: &[f32]) {
                self.vectorize(
                    #[inline(always)]
                    || activation::gate(self, activation, gate, up),
                )
            }

            fn norm(self, norm: &Norm<'_>, rows: norm::Rows<'_>, out: &mut [f32]) {
                self.vectorize(
                    #[inline(always)]
                    || norm::norm(self, norm, rows, out),
                )
            }

            fn widen(self, dtype: Dtype, from: &[u16], to: &mut [f32]) {
                self.vectorize(
                    #[inline(always)]
                    || element::widen_slice(self, dtype, from, to),
                )
            }

            fn narrow(self, dtype: Dtype, from: &[f32], to: &mut [u16]) {
                self.vectorize(
                    #[inline(always)]
                    || element::narrow_slice(self, dtype, from, to),
                )
            }

            fn exp(self, xs: &mut [f32]) {
                self.vectorize(
                    #[inline(always)]
                    || exp::exp_slice(self, xs),
                )
            }

            fn fma_burst(self, rounds: usize) -> (u64, f32) {
                self.vectorize(
                    #[inline(always)]
                    || exp::fma_burst(self, rounds),
                )
            }

            fn mul_add_burst(self, rounds: usize) -> (u64, f32) {
                self.vectorize(
                    #[inline(always)]
                    || exp::mul_add_burst(self, rounds),
                )
            }
        }
    };
}

steps!(crate::simd::portable::Portable);
#[cfg(target_arch = "x86_64")]
steps!(crate::simd::avx2::Avx2);
#[cfg(target_arch = "x86_64")]
steps!(crate::simd::avx512::Avx512);
