//! Packing steps, compiled once per instruction set: ordinary functions of this crate, however many callers there are.

use crate::matmul::bf16_pairs;
use crate::matmul::int4::{self, Int4};
use crate::matmul::int8;
use crate::matmul::pack::{self, NonFinite};
use crate::simd::isa::Isa;
use crate::simd::{Bf16x2, Query4, Simd};
use crate::tensor::any::{AnyRows, Tensor, Typed};
use crate::tensor::element::{Bf16, F16};
use crate::tensor::rows::Rows;

/// Steps that pack rows into the form that tiles read.
pub(crate) trait PackSteps: Simd {
    /// Packs keys: see [`pack::pack_keys`].
    ///
    /// # Safety
    /// Same contract as [`pack::pack_keys`].
    unsafe fn pack_keys(self, keys: AnyRows, n: [usize; 2], d: usize, out: &mut [f32]);
    /// Packs rows: see [`pack::pack_rows`].
    ///
    /// # Safety
    /// Same contract as [`pack::pack_rows`].
    unsafe fn pack_rows(self, values: AnyRows, size: [usize; 2], nonfinite: NonFinite, out: &mut [f32]);
    /// Packs rows like [`Self::pack_rows`], rounded to bfloat16.
    ///
    /// # Safety
    /// Same contract as [`pack::pack_rows`].
    unsafe fn round_rows(self, values: AnyRows, size: [usize; 2], nonfinite: NonFinite, out: &mut [Bf16]);
    /// Returns true if all values are finite: see [`pack::all_finite`].
    ///
    /// # Safety
    /// Same contract as [`pack::all_finite`].
    unsafe fn all_finite(self, values: AnyRows, n: usize, cols: usize) -> bool;
    /// Packs keys in pairs: see [`bf16_pairs::pack`].
    ///
    /// # Safety
    /// Same contract as [`bf16_pairs::pack`].
    unsafe fn pack_pairs(self, keys: Rows<Bf16>, n: [usize; 2], d: usize, out: &mut [Bf16x2]);
    /// Quantises a row: see [`int8::quantise`].
    fn quantise(self, xs: &[f32], out: &mut [i8]) -> f32;
    /// Quantises a row, each channel by its own scale: see [`int8::quantise_by_channel`].
    fn quantise_by_channel(self, xs: &[f32], scales: &[f32], out: &mut [i8]) -> bool;
    /// Quantises a block of a row to four bits: see [`int4::quantise`].
    fn quantise_int4(self, xs: &[f32], kind: Int4, out: &mut [i8; int4::BLOCK]) -> [F16; 2];
    /// Quantises a query row: see [`int8::quantise_query`].
    fn quantise_query(self, xs: &[f32], scale: f32, out: &mut [Query4]) -> int8::Row;
}

macro_rules! pack_steps {
    ($token:ty) => {
        impl PackSteps for $token {
            unsafe fn pack_keys(self, keys: AnyRows, n: [usize; 2], d: usize, out: &mut [f32]) {
                self.vectorize(
                    #[inline(always)]
                    // SAFETY: the caller guarantees the contract of `pack::pack_keys`.
                    || by_type!(Typed, keys, |keys| unsafe { pack::pack_keys(self, keys, n, d, out) }),
                )
            }

            unsafe fn pack_rows(self, values: AnyRows, size: [usize; 2], nonfinite: NonFinite, out: &mut [f32]) {
                self.vectorize(
                    #[inline(always)]
                    // SAFETY: the caller guarantees the contract of `pack::pack_rows`.
                    || by_type!(Typed, values, |values| unsafe { pack::pack_rows(self, values, size, nonfinite, out) }),
                )
            }

            unsafe fn round_rows(self, values: AnyRows, size: [usize; 2], nonfinite: NonFinite, out: &mut [Bf16]) {
                self.vectorize(
                    #[inline(always)]
                    // SAFETY: the caller guarantees the contract of `pack::pack_rows`.
                    || by_type!(Typed, values, |values| unsafe { pack::pack_rows(self, values, size, nonfinite, out) }),
                )
            }

            unsafe fn all_finite(self, values: AnyRows, n: usize, cols: usize) -> bool {
                self.vectorize(
                    #[inline(always)]
                    // SAFETY: the caller guarantees the contract of `pack::all_finite`.
                    || by_type!(Typed, values, |values| unsafe { pack::all_finite(self, values, n, cols) }),
                )
            }

            unsafe fn pack_pairs(self, keys: Rows<Bf16>, n: [usize; 2], d: usize, out: &mut [Bf16x2]) {
                self.vectorize(
                    #[inline(always)]
                    // SAFETY: the caller guarantees the contract of `bf16_pairs::pack`.
                    || unsafe { bf16_pairs::pack(self, keys, n, d, out) },
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

            fn quantise_int4(self, xs: &[f32], kind: Int4, out: &mut [i8; int4::BLOCK]) -> [F16; 2] {
                self.vectorize(
                    #[inline(always)]
                    || int4::quantise(xs, kind, out),
                )
            }

            fn quantise_query(self, xs: &[f32], scale: f32, out: &mut [Query4]) -> int8::Row {
                self.vectorize(
                    #[inline(always)]
                    || int8::quantise_query(xs, scale, out),
                )
            }
        }
    };
}

for_each_token!(pack_steps);

impl Tensor<'_> {
    /// Returns the first element that is not finite, and its index.
    pub fn not_finite(&self, isa: Isa) -> Option<([usize; 4], f32)> {
        let [batch, heads, rows, dim] = self.shape();
        if rows == 0 || dim == 0 {
            return None;
        }
        (0..batch).flat_map(|b| (0..heads).map(move |h| [b, h])).find_map(|[b, h]| {
            // SAFETY: the head is inside the shape and has a row 0; all its rows are readable.
            if dispatch!(isa, |s| unsafe { s.all_finite(self.rows(b, h, 0), rows, dim) }) {
                return None;
            }
            let mut at = (0..rows).flat_map(|l| (0..dim).map(move |d| [b, h, l, d]));
            at.find_map(|at| self.get(at).filter(|x| !x.is_finite()).map(|x| (at, x)))
        })
    }
}
