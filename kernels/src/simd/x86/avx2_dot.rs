//! Dot products of AVX2, and of AVX-VNNI, which adds four products of bytes, or two of words, to 32 bits at once.

use super::avx2::{Avx2Token, F32x16, VNNI};
use crate::simd::{Half, Int8Dot, LANES, Query4, Words4};
use core::arch::x86_64::*;

impl<const EXTRA: u8> Avx2Token<EXTRA> {
    /// Returns `sums[l] + Σ x[e]·signed[4·l + e]`, with `x` taken as bytes without a sign. Without AVX-VNNI, two neighbouring
    /// products must fit 16 bits.
    #[inline(always)]
    fn add_bytes(self, sums: __m256i, x: __m256i, signed: __m256i) -> __m256i {
        // SAFETY: `self` proves the features.
        unsafe {
            if EXTRA == VNNI {
                return _mm256_dpbusd_avx_epi32(sums, x, signed);
            }
            let pairs = _mm256_maddubs_epi16(x, signed);
            _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))
        }
    }

    /// Returns `sums[l] + x[0]·y[2·l] + x[1]·y[2·l + 1]`, of 16-bit numbers.
    #[inline(always)]
    fn add_words(self, sums: __m256i, x: i32, y: __m256i) -> __m256i {
        // SAFETY: `self` proves the features.
        unsafe {
            let x = _mm256_set1_epi32(x);
            match EXTRA {
                VNNI => _mm256_dpwssd_avx_epi32(sums, y, x),
                _ => _mm256_add_epi32(sums, _mm256_madd_epi16(y, x)),
            }
        }
    }
}

// SAFETY: a token exists only where its features were detected; loads and stores touch sixteen elements.
unsafe impl<const EXTRA: u8> Int8Dot for Avx2Token<EXTRA> {
    // 4 × 2 sums, 4 keys, 2 broadcasts, 1 product: 15 of 16 registers. Of four bits, 1 of ones too: 16.
    const INT8_DOT_ROWS: usize = 4;
    const WEIGHT_ROWS: usize = 4;
    type Sums = [__m256i; 2];
    /// With AVX-VNNI elements plus 128, because `vpdpbusd` takes one operand unsigned, the second of each two unused; without,
    /// words.
    type Keys = Self::Words;
    /// Elements plus 8, because `vpmaddubsw` takes one operand unsigned: lower halves, then upper ones; the first eight keys,
    /// then the others.
    type Nibbles = [[__m256i; 2]; 2];
    /// Sixteen-bit elements 0 and 2 of each key or column, then 1 and 3; the first eight, then the others.
    type Words = [[__m256i; 2]; 2];
    /// Elements as bytes: the first eight columns, then the others.
    type NibbleColumns = [__m256i; 2];

    #[inline(always)]
    fn start(self, total: i32) -> Self::Sums {
        let start = if EXTRA == VNNI { total.wrapping_mul(-128) } else { 0 };
        // SAFETY: `self` proves the features.
        unsafe { [_mm256_set1_epi32(start); 2] }
    }

    #[inline(always)]
    fn start_nibbles(self, total: i32) -> Self::Sums {
        // SAFETY: `self` proves the features.
        unsafe { [_mm256_set1_epi32(total.wrapping_mul(-8)); 2] }
    }

    #[inline(always)]
    unsafe fn nibbles(self, p: *const i8) -> Self::Nibbles {
        // SAFETY: `self` proves the features; the caller guarantees the range at `p`.
        unsafe {
            let (mask, sign) = (_mm256_set1_epi8(0x0F), _mm256_set1_epi8(0x08));
            let elements = |bytes| _mm256_xor_si256(_mm256_and_si256(bytes, mask), sign);
            let half = |p: *const i8| {
                let bytes = _mm256_loadu_si256(p.cast());
                [elements(bytes), elements(_mm256_srli_epi16::<4>(bytes))]
            };
            [half(p), half(p.add(32))]
        }
    }

    #[inline(always)]
    fn dot8(self, mut sums: Self::Sums, lower: &Query4, upper: &Query4, keys: Self::Nibbles) -> Self::Sums {
        // SAFETY: `self` proves the features.
        unsafe {
            let (lower, upper) = (_mm256_set1_epi32(lower.bytes), _mm256_set1_epi32(upper.bytes));
            for (sum, keys) in sums.iter_mut().zip(keys) {
                if EXTRA == VNNI {
                    *sum = self.add_bytes(self.add_bytes(*sum, keys[0], lower), keys[1], upper);
                    continue;
                }
                // Four products of a byte and at most 15 are exact in 16 bits.
                let pairs =
                    _mm256_add_epi16(_mm256_maddubs_epi16(keys[0], lower), _mm256_maddubs_epi16(keys[1], upper));
                *sum = _mm256_add_epi32(*sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
            }
        }
        sums
    }

    #[inline(always)]
    unsafe fn keys(self, p: *const i8) -> Self::Keys {
        // SAFETY: `self` proves the features; the caller guarantees the range at `p`.
        unsafe {
            if EXTRA != VNNI {
                return self.words(p);
            }
            let plus_128 = |p: *const i8| {
                let bytes = _mm256_loadu_si256(p.cast());
                [_mm256_xor_si256(bytes, _mm256_set1_epi8(-128)), _mm256_setzero_si256()]
            };
            [plus_128(p), plus_128(p.add(32))]
        }
    }

    #[inline(always)]
    fn dot4(self, sums: Self::Sums, q: &Query4, keys: Self::Keys) -> Self::Sums {
        if EXTRA != VNNI {
            return self.dot4_words(sums, q.words, keys);
        }
        // SAFETY: `self` proves the features.
        let q = unsafe { _mm256_set1_epi32(q.bytes) };
        [self.add_bytes(sums[0], keys[0][0], q), self.add_bytes(sums[1], keys[1][0], q)]
    }

    #[inline(always)]
    unsafe fn words(self, p: *const i8) -> Self::Words {
        // Widened by shifts, not by `vpmovsxbw`, so that each pair of products is added up in its own lane.
        // SAFETY: `self` proves the features; the caller guarantees the range at `p`.
        unsafe {
            let bytes = [_mm256_loadu_si256(p.cast()), _mm256_loadu_si256(p.add(32).cast())];
            let mut words = [bytes; 2];
            for (words, bytes) in words.iter_mut().zip(bytes) {
                *words = [_mm256_srai_epi16::<8>(_mm256_slli_epi16::<8>(bytes)), _mm256_srai_epi16::<8>(bytes)];
            }
            words
        }
    }

    #[inline(always)]
    unsafe fn nibble_columns<H: Half>(self, p: *const i8) -> Self::NibbleColumns {
        // SAFETY: `self` proves the features; the caller guarantees the range at `p`.
        unsafe {
            // The integers that four bits stand for, in the order of the bits.
            let integers = _mm256_setr_epi64x(
                0x0706_0504_0302_0100,
                0xFFFE_FDFC_FBFA_F9F8_u64.cast_signed(),
                0x0706_0504_0302_0100,
                0xFFFE_FDFC_FBFA_F9F8_u64.cast_signed(),
            );
            let half = |p: *const i8| {
                let bytes = _mm256_loadu_si256(p.cast());
                let lowered = if H::IS_UPPER { _mm256_srli_epi16::<4>(bytes) } else { bytes };
                _mm256_shuffle_epi8(integers, _mm256_and_si256(lowered, _mm256_set1_epi8(0x0F)))
            };
            [half(p), half(p.add(32))]
        }
    }

    #[inline(always)]
    fn dot4_bytes(self, sums: Self::Sums, x: u32, columns: Self::NibbleColumns) -> Self::Sums {
        // SAFETY: `self` proves the features.
        unsafe {
            let x = _mm256_set1_epi32(x.cast_signed());
            // Two products of a byte and at most 8 are exact in 16 bits.
            [self.add_bytes(sums[0], x, columns[0]), self.add_bytes(sums[1], x, columns[1])]
        }
    }

    #[inline(always)]
    fn dot4_words(self, mut sums: Self::Sums, x: Words4, columns: Self::Words) -> Self::Sums {
        // Exact: two products of a byte and 16 bits are far from the end of 32.
        for (sum, columns) in sums.iter_mut().zip(columns) {
            *sum = self.add_words(self.add_words(*sum, x.even, columns[0]), x.odd, columns[1]);
        }
        sums
    }

    #[inline(always)]
    fn to_f32(self, sums: Self::Sums) -> F32x16 {
        // SAFETY: `self` proves the features.
        unsafe { [_mm256_cvtepi32_ps(sums[0]), _mm256_cvtepi32_ps(sums[1])] }
    }

    #[inline(always)]
    fn max_magnitude(self, a: F32x16, b: F32x16) -> F32x16 {
        // SAFETY: `self` proves the features.
        let max = |a, b| unsafe {
            let a = _mm256_and_si256(_mm256_castps_si256(a), _mm256_set1_epi32(0x7FFF_FFFF));
            _mm256_castsi256_ps(_mm256_max_epu32(a, _mm256_castps_si256(b)))
        };
        [max(a[0], b[0]), max(a[1], b[1])]
    }

    #[inline(always)]
    fn bytes<const SHIFT: u32>(self, v: F32x16) -> [u8; LANES] {
        // SAFETY: `self` proves the features; a vector of sixteen bytes is an array of them.
        unsafe {
            let byte = |v| {
                let shifted = _mm256_srl_epi32(_mm256_castps_si256(v), _mm_cvtsi32_si128(SHIFT as i32));
                _mm256_and_si256(shifted, _mm256_set1_epi32(0xFF))
            };
            // Packing works within 128 bits: the quarters come as 0, 2, 1, 3.
            let words = _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packus_epi32(byte(v[0]), byte(v[1])));
            let (low, high) = (_mm256_castsi256_si128(words), _mm256_extracti128_si256::<1>(words));
            core::mem::transmute(_mm_packus_epi16(low, high))
        }
    }
}
