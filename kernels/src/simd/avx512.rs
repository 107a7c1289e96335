//! AVX-512F: one register is one vector.

use super::{LANES, Simd};
use core::arch::x86_64::*;

/// Proof that this machine has AVX-512F. Made by [`Avx512::detect`] alone.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Avx512(());

impl Avx512 {
    pub(crate) fn detect() -> Option<Self> {
        is_x86_feature_detected!("avx512f").then_some(Self(()))
    }
}

impl Simd for Avx512 {
    type V = __m512;

    // 6 × 4 accumulators, 4 loads, 1 broadcast: 29 of 32 registers, and 24 independent chains, which covers the
    // 4-cycle FMA latency six times over. In dot products, 6 × 2 of two chains each: as many.
    const TILE_ROWS: usize = 6;
    const TILE_VECS: usize = 4;
    const DOT_VECS: usize = 2;
    const CHAINS: usize = 2;

    const FUSED: bool = true;

    #[inline(always)]
    fn vectorize<R>(self, f: impl FnOnce() -> R) -> R {
        #[target_feature(enable = "avx512f")]
        fn inner<R>(f: impl FnOnce() -> R) -> R {
            f()
        }
        // SAFETY: `self` proves the feature.
        unsafe { inner(f) }
    }

    #[inline(always)]
    fn splat(self, x: f32) -> __m512 {
        // SAFETY: `self` proves the feature.
        unsafe { _mm512_set1_ps(x) }
    }

    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> __m512 {
        // SAFETY: `self` proves the feature; the caller vouches for `p`.
        unsafe { _mm512_loadu_ps(p) }
    }

    #[inline(always)]
    unsafe fn store(self, p: *mut f32, v: __m512) {
        // SAFETY: `self` proves the feature; the caller vouches for `p`.
        unsafe { _mm512_storeu_ps(p, v) }
    }

    #[inline(always)]
    unsafe fn load_bf16(self, p: *const u16) -> __m512 {
        // SAFETY: `self` proves the feature, and AVX with it; the caller vouches for `p`.
        unsafe {
            let low = _mm512_cvtepu16_epi32(_mm256_loadu_si256(p.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(low))
        }
    }

    #[inline(always)]
    unsafe fn load_f16(self, p: *const u16) -> __m512 {
        // SAFETY: as above.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(p.cast())) }
    }

    #[inline(always)]
    unsafe fn store_bf16(self, p: *mut u16, v: __m512) {
        // Rounded as in the AVX2 backend. The instruction of AVX512_BF16 takes subnormal numbers for 0.
        // SAFETY: as above.
        unsafe {
            let bits = _mm512_castps_si512(v);
            let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
            let rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
            let is_nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(v, v);
            let result = _mm512_mask_or_epi32(rounded, is_nan, bits, _mm512_set1_epi32(0x0040_0000));
            _mm256_storeu_si256(p.cast(), _mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(result)));
        }
    }

    #[inline(always)]
    unsafe fn store_f16(self, p: *mut u16, v: __m512) {
        // SAFETY: as above.
        unsafe { _mm256_storeu_si256(p.cast(), _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(v)) }
    }

    #[inline(always)]
    unsafe fn select_bytes(self, p: *const u8, zero: __m512, other: __m512) -> __m512 {
        // SAFETY: `self` proves the feature; the caller vouches for `p`.
        unsafe {
            let bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(p.cast()));
            _mm512_mask_blend_ps(_mm512_test_epi32_mask(bytes, bytes), zero, other)
        }
    }

    #[inline(always)]
    fn prefetch(self, p: *const f32) {
        // SAFETY: `self` proves the feature; a prefetch reads nothing that could fault.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(p.cast()) }
    }

    #[inline(always)]
    fn prefetch_far(self, p: *const f32) {
        // SAFETY: as above.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(p.cast()) }
    }

    #[inline(always)]
    fn add(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: `self` proves the feature.
        unsafe { _mm512_add_ps(a, b) }
    }

    #[inline(always)]
    fn sub(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: `self` proves the feature.
        unsafe { _mm512_sub_ps(a, b) }
    }

    #[inline(always)]
    fn mul(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: `self` proves the feature.
        unsafe { _mm512_mul_ps(a, b) }
    }

    #[inline(always)]
    fn div(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: `self` proves the feature.
        unsafe { _mm512_div_ps(a, b) }
    }

    #[inline(always)]
    fn fma(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        // SAFETY: `self` proves the feature.
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }

    #[inline(always)]
    fn max(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: `self` proves the feature.
        unsafe { _mm512_max_ps(a, b) }
    }

    #[inline(always)]
    fn select_eq(self, a: __m512, b: __m512, then: __m512, otherwise: __m512) -> __m512 {
        // SAFETY: `self` proves the feature.
        unsafe { _mm512_mask_blend_ps(_mm512_cmp_ps_mask::<_CMP_EQ_OQ>(a, b), otherwise, then) }
    }

    #[inline(always)]
    fn one_plus_scaled(self, (a, b): (__m512, __m512), n: __m512, _: __m512) -> __m512 {
        // SAFETY: `self` proves the feature.
        unsafe { _mm512_scalef_ps(_mm512_fmadd_ps(a, b, _mm512_set1_ps(1.0)), n) }
    }

    #[inline(always)]
    fn reduce_max(self, v: __m512) -> f32 {
        // SAFETY: `self` proves the feature, and AVX with it.
        unsafe {
            let low = _mm512_castps512_ps256(v);
            let high = _mm256_castpd_ps(_mm512_extractf64x4_pd::<1>(_mm512_castps_pd(v)));
            super::avx2::max8(_mm256_max_ps(low, high))
        }
    }

    #[inline(always)]
    fn reduce_sum(self, v: __m512) -> f32 {
        // SAFETY: `self` proves the feature, and AVX with it.
        unsafe {
            let low = _mm512_castps512_ps256(v);
            let high = _mm256_castpd_ps(_mm512_extractf64x4_pd::<1>(_mm512_castps_pd(v)));
            super::avx2::sum8(_mm256_add_ps(low, high))
        }
    }

    #[inline(always)]
    unsafe fn transpose(self, rows: [*const f32; LANES], out: *mut f32) {
        // Four rounds of the butterfly: pairs of rows within 64 bits, fours within 128 bits, then whole 128-bit
        // quarters among eight and sixteen rows. 64 shuffles for 256 elements.
        // SAFETY: `self` proves the feature; the caller vouches for the pointers.
        unsafe {
            let zero = _mm512_setzero_ps();
            let mut r = [zero; LANES];
            for i in 0..LANES {
                r[i] = _mm512_loadu_ps(rows[i]);
            }
            let mut a = [zero; LANES];
            for i in 0..8 {
                a[2 * i] = _mm512_unpacklo_ps(r[2 * i], r[2 * i + 1]);
                a[2 * i + 1] = _mm512_unpackhi_ps(r[2 * i], r[2 * i + 1]);
            }
            let mut b = [zero; LANES];
            for i in 0..4 {
                for half in 0..2 {
                    let x = _mm512_castps_pd(a[4 * i + half]);
                    let y = _mm512_castps_pd(a[4 * i + 2 + half]);
                    b[4 * i + 2 * half] = _mm512_castpd_ps(_mm512_unpacklo_pd(x, y));
                    b[4 * i + 2 * half + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(x, y));
                }
            }
            // b[4i + c] holds, in quarter q, column 4q + c of rows 4i .. 4i + 4.
            let mut t = [zero; LANES];
            for c in 0..4 {
                let even = _mm512_shuffle_f32x4::<0x88>(b[c], b[4 + c]);
                let odd = _mm512_shuffle_f32x4::<0xDD>(b[c], b[4 + c]);
                let even_high = _mm512_shuffle_f32x4::<0x88>(b[8 + c], b[12 + c]);
                let odd_high = _mm512_shuffle_f32x4::<0xDD>(b[8 + c], b[12 + c]);
                t[c] = _mm512_shuffle_f32x4::<0x88>(even, even_high);
                t[8 + c] = _mm512_shuffle_f32x4::<0xDD>(even, even_high);
                t[4 + c] = _mm512_shuffle_f32x4::<0x88>(odd, odd_high);
                t[12 + c] = _mm512_shuffle_f32x4::<0xDD>(odd, odd_high);
            }
            for (i, row) in t.into_iter().enumerate() {
                _mm512_storeu_ps(out.add(i * LANES), row);
            }
        }
    }
}
