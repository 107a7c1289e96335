//! AVX-512F: one register is one vector. Dot products of bytes need AVX-512 VNNI; without it they run on AVX2. Dot
//! products of bfloat16 pairs need AVX512_BF16 and AVX-512BW.

use super::avx2::Avx2;
use super::avx2_half::{Avx2Half, max8, sum8};
use super::avx512_token::{Avx512, Avx512Token, BF16, VNNI};
use crate::simd::numbers::LOWEST_EXPONENT;
use crate::simd::{Bf16DotWork, Bf16x2, Int8DotWork, LANES, Simd, Vector};
use core::arch::x86_64::*;

// Row blocks are cut into tiles before it is known which instruction set computes them.
const _: () = assert!(Avx2::TILE_ROWS == Avx512::TILE_ROWS);

/// Closure compiled for AVX-512.
///
/// Methods of the closure, not functions of this file: the compiler generates code in units that follow the module of the
/// method's type, and works on several units at once.
trait Compiled<R>: FnOnce() -> R + Sized {
    /// # Safety
    /// The machine has AVX-512F.
    #[target_feature(enable = "avx512f")]
    unsafe fn foundation(self) -> R {
        self()
    }
    /// # Safety
    /// The machine has AVX-512F, BW and VNNI.
    #[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
    unsafe fn vnni(self) -> R {
        self()
    }
    /// # Safety
    /// The machine has AVX-512F, BW and BF16.
    #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
    unsafe fn bf16(self) -> R {
        self()
    }
}

impl<R, F: FnOnce() -> R> Compiled<R> for F {}

// SAFETY: made by `Isa`, and by `Self` with more features, where those are detected; loads and stores touch sixteen
// elements.
unsafe impl<const EXTRA: u8> Vector for Avx512Token<EXTRA> {
    type V = __m512;
    const LANES: usize = LANES;

    #[inline(always)]
    fn splat(self, x: f32) -> __m512 {
        // SAFETY: `self` proves the feature.
        unsafe { _mm512_set1_ps(x) }
    }

    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> __m512 {
        // SAFETY: `self` proves the feature; the caller guarantees the range at `p`.
        unsafe { _mm512_loadu_ps(p) }
    }

    #[inline(always)]
    unsafe fn load_bf16(self, p: *const u16) -> __m512 {
        // SAFETY: `self` proves the feature, and AVX with it; the caller guarantees the range at `p`.
        unsafe {
            let low = _mm512_cvtepu16_epi32(_mm256_loadu_si256(p.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(low))
        }
    }

    #[inline(always)]
    unsafe fn load_f16(self, p: *const u16) -> __m512 {
        // SAFETY: `self` proves the feature, and AVX with it; the caller guarantees the range at `p`.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(p.cast())) }
    }

    #[inline(always)]
    unsafe fn store(self, p: *mut f32, v: __m512) {
        // SAFETY: `self` proves the feature; the caller guarantees the range at `p`.
        unsafe { _mm512_storeu_ps(p, v) }
    }

    #[inline(always)]
    unsafe fn store_first(self, p: *mut f32, v: __m512, n: usize) {
        // SAFETY: `self` proves the feature; the caller guarantees the range at `p`.
        unsafe { _mm512_mask_storeu_ps(p, ((1u32 << n) - 1) as __mmask16, v) }
    }

    #[inline(always)]
    fn add(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: `self` proves the feature.
        unsafe { _mm512_add_ps(a, b) }
    }

    #[inline(always)]
    fn mul(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: `self` proves the feature.
        unsafe { _mm512_mul_ps(a, b) }
    }

    #[inline(always)]
    fn fma(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        // SAFETY: `self` proves the feature.
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }

    #[inline(always)]
    fn exchange<const APART: usize>(self, v: __m512) -> __m512 {
        // SAFETY: `self` proves the feature.
        unsafe {
            match APART {
                1 => _mm512_permute_ps::<0b10_11_00_01>(v),
                2 => _mm512_permute_ps::<0b01_00_11_10>(v),
                4 => _mm512_shuffle_f32x4::<0b10_11_00_01>(v, v),
                _ => _mm512_shuffle_f32x4::<0b01_00_11_10>(v, v),
            }
        }
    }
}

// SAFETY: made by `Isa`, and by `Self` with more features, where those are detected; loads and stores touch sixteen
// elements.
unsafe impl<const EXTRA: u8> Simd for Avx512Token<EXTRA> {
    type Half = Avx2Half;

    // 6 × 4 accumulators, 4 loads, 1 broadcast: 29 of 32 registers, and 24 independent chains, which covers the
    // 4-cycle FMA latency six times over. In dot products, 6 × 2 of two chains each: 24, too.
    const TILE_ROWS: usize = 6;
    const TILE_VECS: usize = 4;
    const DOT_VECS: usize = 2;
    // Scores and exponents of two panels, references, running sums and maxima: 21 registers, and constants.
    const SIDE_ROWS: usize = 3;

    const FUSED: bool = true;
    const MAY_HAVE_LARGE_L1: bool = true;
    const MAY_HAVE_BF16_DOT: bool = true;
    const MAY_HAVE_UNIT: bool = true;

    #[inline(always)]
    fn vectorize<R>(self, f: impl FnOnce() -> R) -> R {
        // SAFETY: `self` proves AVX-512F and the extension that `EXTRA` names.
        unsafe {
            match EXTRA {
                VNNI => f.vnni(),
                BF16 => f.bf16(),
                _ => f.foundation(),
            }
        }
    }

    #[inline(always)]
    fn half(self) -> Option<Avx2Half> {
        // Where a whole register is computed in two passes (Zen 4) halves may pay, but that has not been measured.
        None
    }

    #[inline(always)]
    fn has_matrix_unit(self) -> bool {
        self.unit
    }

    #[inline(always)]
    fn has_bf16_dot(self) -> bool {
        // AMD's cores multiply pairs at twice the rate of FMAs, Intel's (Sapphire Rapids) at a third. SSE4a is AMD's alone;
        // the vendor is not queried: a virtual machine takes microseconds to answer.
        is_x86_feature_detected!("sse4a") && self.with::<BF16>().is_some()
    }

    #[inline(always)]
    unsafe fn with_bf16_dot<W: Bf16DotWork>(self, work: W) -> W::Output {
        let s = self.with::<BF16>().expect("bf16 pairs are made only where AVX512_BF16 is detected");
        // SAFETY: the caller guarantees what the work requires.
        unsafe { work.run(s) }
    }

    #[inline(always)]
    unsafe fn with_int8_dot<W: Int8DotWork>(self, work: W) -> W::Output {
        // SAFETY: the caller guarantees what the work requires.
        unsafe {
            match self.with::<VNNI>() {
                Some(vnni) => work.run(vnni),
                None => work.run(Avx2::detect().expect("AVX-512F includes AVX2 and FMA")),
            }
        }
    }

    #[inline(always)]
    unsafe fn store_bf16(self, p: *mut u16, v: __m512) {
        // Rounded as in the AVX2 backend: the instruction of AVX512_BF16 treats subnormal numbers as 0.
        // SAFETY: `self` proves the feature, and AVX with it; the caller guarantees the range at `p`.
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
        // SAFETY: `self` proves the feature, and AVX with it; the caller guarantees the range at `p`.
        unsafe { _mm256_storeu_si256(p.cast(), _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(v)) }
    }

    #[inline(always)]
    unsafe fn load_of_pairs(self, p: *const Bf16x2, i: usize) -> __m512 {
        // SAFETY: `self` proves the feature; the caller guarantees the range at `p`.
        unsafe {
            let lower = _mm512_srl_epi32(_mm512_loadu_si512(p.cast()), _mm_cvtsi32_si128(16 * i as i32));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(lower))
        }
    }

    #[inline(always)]
    unsafe fn select_bytes(self, p: *const u8, zero: __m512, other: __m512) -> __m512 {
        // SAFETY: `self` proves the feature; the caller guarantees the range at `p`.
        unsafe {
            let bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(p.cast()));
            _mm512_mask_blend_ps(_mm512_test_epi32_mask(bytes, bytes), zero, other)
        }
    }

    #[inline(always)]
    fn select_bits(self, bits: u16, zero: __m512, other: __m512) -> __m512 {
        // SAFETY: `self` proves the feature.
        unsafe { _mm512_mask_blend_ps(bits, zero, other) }
    }

    #[inline(always)]
    fn bits_at_least(self, [a, b, c, d]: [&[u64; LANES / 2]; 4], least: u32) -> [u16; 2] {
        // SAFETY: `self` proves the feature; a word is eight lanes of eight bytes.
        unsafe {
            let least = _mm512_set1_epi32(least as i32);
            let (a, b) = (_mm512_loadu_ps(a.as_ptr().cast()), _mm512_loadu_ps(b.as_ptr().cast()));
            let (c, d) = (_mm512_loadu_ps(c.as_ptr().cast()), _mm512_loadu_ps(d.as_ptr().cast()));
            let (ab, cd) = (_mm512_shuffle_ps::<0x88>(a, b), _mm512_shuffle_ps::<0x88>(c, d));
            let even = _mm512_castps_si512(_mm512_shuffle_ps::<0x88>(ab, cd));
            let odd = _mm512_castps_si512(_mm512_shuffle_ps::<0xDD>(ab, cd));
            [_mm512_cmpge_epu32_mask(even, least), _mm512_cmpge_epu32_mask(odd, least)]
        }
    }

    #[inline(always)]
    fn has_large_l1(self) -> bool {
        self.large_l1
    }

    #[inline(always)]
    fn prefetch(self, p: *const f32) {
        // SAFETY: `self` proves the feature; a prefetch reads nothing that could fault.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(p.cast()) }
    }

    #[inline(always)]
    fn prefetch_second(self, p: *const f32) {
        // SAFETY: `self` proves the feature; a prefetch reads nothing that could fault.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(p.cast()) }
    }

    #[inline(always)]
    fn pin_order(self, v: __m512) -> __m512 {
        #[target_feature(enable = "avx512f")]
        #[inline]
        fn turn(mut v: __m512) -> __m512 {
            // Not `pure`: a pure block would not be ordered against the other ones.
            // SAFETY: the assembly is a comment, with no instruction.
            unsafe { core::arch::asm!("/* {0} */", inout(zmm_reg) v, options(nomem, nostack, preserves_flags)) };
            v
        }
        // SAFETY: `self` proves the feature.
        unsafe { turn(v) }
    }

    #[inline(always)]
    fn sub(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: `self` proves the feature.
        unsafe { _mm512_sub_ps(a, b) }
    }

    #[inline(always)]
    fn div(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: `self` proves the feature.
        unsafe { _mm512_div_ps(a, b) }
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
    fn reaches(self, a: __m512, b: __m512) -> u16 {
        // SAFETY: `self` proves the feature.
        unsafe { _mm512_cmp_ps_mask::<_CMP_GE_OQ>(a, b) }
    }

    #[inline(always)]
    fn one_plus_scaled(self, (a, b): (__m512, __m512), n: __m512, _: __m512) -> __m512 {
        // Lanes that are not computed do not underflow. Not "less or equal": NaN is computed.
        // SAFETY: `self` proves the feature.
        unsafe {
            let computed = _mm512_cmp_ps_mask::<_CMP_NLE_UQ>(n, _mm512_set1_ps(LOWEST_EXPONENT));
            _mm512_maskz_scalef_ps(computed, _mm512_fmadd_ps(a, b, _mm512_set1_ps(1.0)), n)
        }
    }

    #[inline(always)]
    fn reduce_max(self, v: __m512) -> f32 {
        // SAFETY: `self` proves the feature, and AVX with it.
        unsafe {
            let low = _mm512_castps512_ps256(v);
            let high = _mm256_castpd_ps(_mm512_extractf64x4_pd::<1>(_mm512_castps_pd(v)));
            max8(_mm256_max_ps(low, high))
        }
    }

    #[inline(always)]
    fn reduce_sum(self, v: __m512) -> f32 {
        // SAFETY: `self` proves the feature, and AVX with it.
        unsafe {
            let low = _mm512_castps512_ps256(v);
            let high = _mm256_castpd_ps(_mm512_extractf64x4_pd::<1>(_mm512_castps_pd(v)));
            sum8(_mm256_add_ps(low, high))
        }
    }

    #[inline(always)]
    unsafe fn transpose(self, first: *const f32, step: isize, out: *mut f32) {
        // Four rounds of a butterfly: pairs of rows within 64 bits, fours within 128 bits, then whole 128-bit quarters
        // among eight and sixteen rows. 64 shuffles for 256 elements.
        // SAFETY: `self` proves the feature; the caller guarantees sixteen floats at each row and 256 at `out`.
        unsafe {
            let zero = _mm512_setzero_ps();
            let (mut r, mut four) = ([zero; LANES], first);
            for r in r.as_chunks_mut::<4>().0 {
                let mut row = four;
                for r in r {
                    *r = _mm512_loadu_ps(row);
                    row = row.wrapping_byte_offset(step);
                }
                four = four.wrapping_byte_offset(4 * step);
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
