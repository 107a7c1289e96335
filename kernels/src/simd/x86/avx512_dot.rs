//! Dot products of AVX-512, with AVX-512BW: of bytes, with AVX-512 VNNI, and of bfloat16 pairs, with AVX512_BF16.

use super::avx512_token::{Avx512Bf16, Avx512Vnni};
use crate::simd::{Bf16Dot, Bf16x2, Half, Int8Dot, LANES, Query4, Words4};
use core::arch::x86_64::*;

// SAFETY: made where the feature is detected; loads and stores touch sixteen elements, or 64 bytes.
unsafe impl Int8Dot for Avx512Vnni {
    // 6 × 4 sums, 4 keys, 1 broadcast, the constant that flips signs: 30 of 32 registers.
    const INT8_DOT_ROWS: usize = 6;
    // 4 × 4 sums, 8 columns, 2 broadcasts: 26 of 32 registers.
    const WEIGHT_ROWS: usize = 4;
    type Sums = __m512i;
    /// Elements plus 128: `vpdpbusd` takes one operand unsigned.
    type Keys = __m512i;
    /// Elements plus 8: lower halves, then upper ones.
    type Nibbles = [__m512i; 2];
    /// Sixteen-bit elements 0 and 2 of each column, then 1 and 3.
    type Words = [__m512i; 2];
    /// Sixteen times the elements, which need no shift to get their sign.
    type NibbleColumns = __m512i;

    #[inline(always)]
    fn start(self, total: i32) -> __m512i {
        // SAFETY: `self` proves the features.
        unsafe { _mm512_set1_epi32(total.wrapping_mul(-128)) }
    }

    #[inline(always)]
    fn start_nibbles(self, total: i32) -> __m512i {
        // SAFETY: `self` proves the features.
        unsafe { _mm512_set1_epi32(total.wrapping_mul(-8)) }
    }

    #[inline(always)]
    unsafe fn nibbles(self, p: *const i8) -> [__m512i; 2] {
        // SAFETY: `self` proves the features; the caller guarantees the range at `p`.
        unsafe {
            let (mask, sign) = (_mm512_set1_epi32(0x0F0F_0F0F), _mm512_set1_epi32(0x0808_0808));
            let bytes = _mm512_loadu_si512(p.cast());
            let elements = |bytes| _mm512_xor_si512(_mm512_and_si512(bytes, mask), sign);
            [elements(bytes), elements(_mm512_srli_epi16::<4>(bytes))]
        }
    }

    #[inline(always)]
    fn dot8(self, sums: __m512i, lower: &Query4, upper: &Query4, keys: [__m512i; 2]) -> __m512i {
        // SAFETY: `self` proves the features.
        unsafe {
            let sums = _mm512_dpbusd_epi32(sums, keys[0], _mm512_set1_epi32(lower.bytes));
            _mm512_dpbusd_epi32(sums, keys[1], _mm512_set1_epi32(upper.bytes))
        }
    }

    #[inline(always)]
    unsafe fn nibble_columns<H: Half>(self, p: *const i8) -> __m512i {
        // SAFETY: `self` proves the features; the caller guarantees the range at `p`.
        unsafe {
            let bytes = _mm512_loadu_si512(p.cast());
            let raised = if H::IS_UPPER { bytes } else { _mm512_slli_epi16::<4>(bytes) };
            _mm512_and_si512(raised, _mm512_set1_epi32(0xF0F0_F0F0_u32.cast_signed()))
        }
    }

    #[inline(always)]
    fn dot4_bytes(self, sums: __m512i, x: u32, columns: __m512i) -> __m512i {
        // SAFETY: `self` proves the features.
        unsafe { _mm512_dpbusd_epi32(sums, _mm512_set1_epi32(x.cast_signed()), columns) }
    }

    #[inline(always)]
    fn nibble_sums(self, sums: __m512i) -> __m512 {
        // SAFETY: `self` proves the features. Below 2²⁴, so the conversion is exact, and so is the product.
        unsafe { _mm512_mul_ps(_mm512_cvtepi32_ps(sums), _mm512_set1_ps(1.0 / 16.0)) }
    }

    #[inline(always)]
    unsafe fn keys(self, p: *const i8) -> __m512i {
        // SAFETY: `self` proves the features; the caller guarantees the range at `p`.
        unsafe { _mm512_xor_si512(_mm512_loadu_si512(p.cast()), _mm512_set1_epi32(0x8080_8080_u32.cast_signed())) }
    }

    #[inline(always)]
    fn dot4(self, sums: __m512i, q: &Query4, keys: __m512i) -> __m512i {
        // SAFETY: `self` proves the features.
        unsafe { _mm512_dpbusd_epi32(sums, keys, _mm512_set1_epi32(q.bytes)) }
    }

    #[inline(always)]
    unsafe fn words(self, p: *const i8) -> [__m512i; 2] {
        // SAFETY: `self` proves the features; the caller guarantees the range at `p`.
        unsafe {
            let bytes = _mm512_loadu_si512(p.cast());
            [_mm512_srai_epi16::<8>(_mm512_slli_epi16::<8>(bytes)), _mm512_srai_epi16::<8>(bytes)]
        }
    }

    #[inline(always)]
    fn dot4_words(self, sums: __m512i, x: Words4, columns: [__m512i; 2]) -> __m512i {
        // SAFETY: `self` proves the features.
        unsafe {
            let sums = _mm512_dpwssd_epi32(sums, columns[0], _mm512_set1_epi32(x.even));
            _mm512_dpwssd_epi32(sums, columns[1], _mm512_set1_epi32(x.odd))
        }
    }

    #[inline(always)]
    fn to_f32(self, sums: __m512i) -> __m512 {
        // SAFETY: `self` proves the features.
        unsafe { _mm512_cvtepi32_ps(sums) }
    }

    #[inline(always)]
    fn max_magnitude(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: `self` proves the features.
        unsafe {
            let a = _mm512_and_si512(_mm512_castps_si512(a), _mm512_set1_epi32(0x7FFF_FFFF));
            _mm512_castsi512_ps(_mm512_max_epu32(a, _mm512_castps_si512(b)))
        }
    }

    #[inline(always)]
    fn bytes<const SHIFT: u32>(self, v: __m512) -> [u8; LANES] {
        // SAFETY: `self` proves the features; a vector of sixteen bytes is an array of them.
        unsafe { core::mem::transmute(_mm512_cvtepi32_epi8(_mm512_srli_epi32::<SHIFT>(_mm512_castps_si512(v)))) }
    }
}

/// Word indices that interleave two registers into pairs; words of the second register count from 32.
const ZIP: [u16; 32] = {
    let mut at = [0; 32];
    let mut i = 0;
    while i < 32 {
        at[i] = (i / 2 + i % 2 * 32) as u16;
        i += 1;
    }
    at
};

// SAFETY: made where the feature is detected; loads and stores touch sixteen elements, or 64 bytes.
unsafe impl Bf16Dot for Avx512Bf16 {
    type P = __m512bh;
    type Pair = __m512bh;

    #[inline(always)]
    fn splat_bf16x2(self, x: Bf16x2) -> __m512bh {
        // SAFETY: `self` proves the features; every bit pattern is a vector of pairs.
        unsafe { core::mem::transmute(_mm512_set1_epi32(x.0.cast_signed())) }
    }

    #[inline(always)]
    unsafe fn load_bf16x2(self, p: *const Bf16x2) -> __m512bh {
        // SAFETY: `self` proves the features; the caller guarantees the range at `p`; every bit pattern is a vector of
        // pairs.
        unsafe { core::mem::transmute(_mm512_loadu_si512(p.cast())) }
    }

    #[inline(always)]
    unsafe fn zip(self, a: *const u16, b: *const u16) -> __m512bh {
        // SAFETY: `self` proves the features; the caller guarantees the ranges at `a` and `b`; every bit pattern is a
        // vector of pairs.
        unsafe {
            let a = _mm512_castsi256_si512(_mm256_loadu_si256(a.cast()));
            let b = _mm512_castsi256_si512(_mm256_loadu_si256(b.cast()));
            core::mem::transmute(_mm512_permutex2var_epi16(a, _mm512_loadu_si512(ZIP.as_ptr().cast()), b))
        }
    }

    #[inline(always)]
    fn dot2(self, sum: __m512, x: __m512bh, y: __m512bh) -> __m512 {
        // SAFETY: `self` proves the features.
        unsafe { _mm512_dpbf16_ps(sum, x, y) }
    }

    #[inline(always)]
    unsafe fn store_bf16x2(self, p: *mut Bf16x2, v: __m512) -> __m512 {
        // SAFETY: `self` proves the features; the caller guarantees the range at `p`; every bit pattern is a vector of
        // pairs.
        unsafe {
            let rounded = core::mem::transmute::<__m256bh, __m256i>(_mm512_cvtneps_pbh(v));
            _mm256_storeu_si256(p.cast(), rounded);
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(rounded)))
        }
    }
}
