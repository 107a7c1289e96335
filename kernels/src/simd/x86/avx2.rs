//! AVX2 with FMA and F16C: two registers are one vector. Dot products of bytes take special instructions where the machine has
//! these, and AVX2's where not.

use super::avx2_half::{Avx2Half, max8, sum8};
use crate::simd::numbers::Constant;
use crate::simd::{Bf16x2, Int8DotWork, LANES, Simd, TWO_TO_MINUS_64, Vector};
use core::arch::asm;
use core::arch::x86_64::*;

/// Proof that this machine has AVX2, FMA and F16C, and the extension that `EXTRA` names.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Avx2Token<const EXTRA: u8>(());

const NOTHING: u8 = 0;
pub(super) const VNNI: u8 = 1;

/// Proof that this machine has AVX2, FMA and F16C.
pub(crate) type Avx2 = Avx2Token<NOTHING>;

/// Proof that this machine has AVX-VNNI, too. It is not an instruction set to choose: [`Simd::with_int8_dot`] hands it out.
pub(crate) type Avx2Vnni = Avx2Token<VNNI>;

impl<const EXTRA: u8> Avx2Token<EXTRA> {
    /// Returns the proof if the machine has the features. There is no other constructor.
    pub(crate) fn detect() -> Option<Self> {
        let extra = EXTRA != VNNI || is_x86_feature_detected!("avxvnni");
        let present =
            is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c");
        (present && extra).then_some(Self(()))
    }

    /// Returns the token of vectors of eight lanes.
    #[inline(always)]
    fn eight(self) -> Avx2Half {
        // SAFETY: `self` proves the features.
        unsafe { Avx2Half::new() }
    }
}

/// Pair of registers: the low eight lanes, then the high eight.
pub(crate) type F32x16 = [__m256; 2];

/// Returns `a·b + c`, with `c` as an operand in memory: the compiler would load it into a register, but registers are scarce, and
/// the number of instructions bounds softmax.
#[target_feature(enable = "fma")]
#[inline]
fn fma_in_memory(mut a: __m256, b: __m256, c: &'static Constant) -> __m256 {
    // SAFETY: one instruction of FMA, which reads the constant's 32 bytes.
    unsafe {
        asm!(
            "vfmadd213ps {0}, {1}, ymmword ptr [{2}]",
            inout(ymm_reg) a,
            in(ymm_reg) b,
            in(reg) c,
            options(pure, readonly, nostack, preserves_flags)
        );
    }
    a
}

/// Rounds eight lanes to bfloat16, in the lower halves of 32 bits.
///
/// # Safety
/// The machine has AVX2.
#[inline(always)]
unsafe fn bf16_in_32(v: __m256) -> __m256i {
    // SAFETY: the caller guarantees AVX2.
    unsafe {
        let bits = _mm256_castps_si256(v);
        // Adds half a unit less one, and one more if the last bit that stays is odd: ties go to even. Carries into the
        // exponent are right, up to infinity. A NaN could carry into the sign, so it is made quiet instead.
        let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
        let rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF)));
        let quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x0040_0000));
        let is_nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(v, v));
        _mm256_srli_epi32::<16>(_mm256_blendv_epi8(rounded, quiet, is_nan))
    }
}

/// Transposes an 8 × 8 square.
///
/// # Safety
/// The machine has AVX.
#[inline(always)]
unsafe fn transpose8(r: [__m256; 8]) -> [__m256; 8] {
    // SAFETY: the caller guarantees AVX.
    unsafe {
        let zero = _mm256_setzero_ps();
        let mut a = [zero; 8];
        for i in 0..4 {
            a[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
            a[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
        }
        let mut t = [zero; 8];
        for c in 0..4 {
            // Column c (low half) and c + 4 (high half) of rows 0..4, then of rows 4..8.
            let (x, y) = (_mm256_castps_pd(a[c / 2]), _mm256_castps_pd(a[2 + c / 2]));
            let (z, w) = (_mm256_castps_pd(a[4 + c / 2]), _mm256_castps_pd(a[6 + c / 2]));
            let (top, bottom) = if c % 2 == 0 {
                (_mm256_unpacklo_pd(x, y), _mm256_unpacklo_pd(z, w))
            } else {
                (_mm256_unpackhi_pd(x, y), _mm256_unpackhi_pd(z, w))
            };
            let (top, bottom) = (_mm256_castpd_ps(top), _mm256_castpd_ps(bottom));
            t[c] = _mm256_permute2f128_ps::<0x20>(top, bottom);
            t[4 + c] = _mm256_permute2f128_ps::<0x31>(top, bottom);
        }
        t
    }
}

// SAFETY: a token exists only where its features were detected; loads and stores touch sixteen elements.
unsafe impl<const EXTRA: u8> Vector for Avx2Token<EXTRA> {
    type V = F32x16;
    const LANES: usize = LANES;

    #[inline(always)]
    fn splat(self, x: f32) -> F32x16 {
        // SAFETY: `self` proves the features.
        unsafe { [_mm256_set1_ps(x); 2] }
    }

    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> F32x16 {
        // SAFETY: `self` proves the features; the caller guarantees the range at `p`.
        unsafe { [_mm256_loadu_ps(p), _mm256_loadu_ps(p.add(8))] }
    }

    #[inline(always)]
    unsafe fn load_bf16(self, p: *const u16) -> F32x16 {
        let half = self.eight();
        // SAFETY: the caller guarantees sixteen readable elements at `p`; each half loads eight.
        unsafe { [half.load_bf16(p), half.load_bf16(p.add(8))] }
    }

    #[inline(always)]
    unsafe fn load_f16(self, p: *const u16) -> F32x16 {
        let half = self.eight();
        // SAFETY: the caller guarantees sixteen readable elements at `p`; each half loads eight.
        unsafe { [half.load_f16(p), half.load_f16(p.add(8))] }
    }

    #[inline(always)]
    unsafe fn store(self, p: *mut f32, v: F32x16) {
        // SAFETY: `self` proves the features; the caller guarantees the range at `p`.
        unsafe {
            _mm256_storeu_ps(p, v[0]);
            _mm256_storeu_ps(p.add(8), v[1]);
        }
    }

    #[inline(always)]
    fn add(self, a: F32x16, b: F32x16) -> F32x16 {
        // SAFETY: `self` proves the features.
        unsafe { [_mm256_add_ps(a[0], b[0]), _mm256_add_ps(a[1], b[1])] }
    }

    #[inline(always)]
    fn mul(self, a: F32x16, b: F32x16) -> F32x16 {
        // SAFETY: `self` proves the features.
        unsafe { [_mm256_mul_ps(a[0], b[0]), _mm256_mul_ps(a[1], b[1])] }
    }

    #[inline(always)]
    fn fma(self, a: F32x16, b: F32x16, c: F32x16) -> F32x16 {
        // SAFETY: `self` proves the features.
        unsafe { [_mm256_fmadd_ps(a[0], b[0], c[0]), _mm256_fmadd_ps(a[1], b[1], c[1])] }
    }
}

// SAFETY: a token exists only where its features were detected; loads and stores touch sixteen elements.
unsafe impl<const EXTRA: u8> Simd for Avx2Token<EXTRA> {
    type Half = Avx2Half;

    // 6 × 2 accumulators, 2 loads, 1 broadcast: 15 of 16 registers, 12 chains against the 8 to 10 that two FMA units
    // of latency 4 or 5 need.
    const TILE_ROWS: usize = 6;
    const TWO_TERM_ROWS: usize = 5;
    const TILE_VECS: usize = 1;
    const DOT_VECS: usize = 1;

    const FUSED: bool = true;
    const FACTOR_UNIT: f32 = TWO_TO_MINUS_64;

    #[inline(always)]
    fn vectorize<R>(self, f: impl FnOnce() -> R) -> R {
        #[target_feature(enable = "avx2,fma,f16c")]
        fn inner<R>(f: impl FnOnce() -> R) -> R {
            f()
        }
        #[target_feature(enable = "avx2,fma,f16c,avxvnni")]
        fn vnni<R>(f: impl FnOnce() -> R) -> R {
            f()
        }
        // SAFETY: `self` proves the features.
        unsafe {
            // A `match`, not a comparison: only what this `EXTRA` takes is compiled.
            match EXTRA {
                VNNI => vnni(f),
                _ => inner(f),
            }
        }
    }

    #[inline(always)]
    fn half(self) -> Option<Avx2Half> {
        Some(self.eight())
    }

    #[inline(always)]
    unsafe fn with_int8_dot<W: Int8DotWork>(self, work: W) -> W::Output {
        // SAFETY: the caller guarantees what the work requires.
        unsafe {
            match Avx2Vnni::detect() {
                Some(vnni) => work.run(vnni),
                None => work.run(self),
            }
        }
    }

    #[inline(always)]
    unsafe fn store_bf16(self, p: *mut u16, v: F32x16) {
        // SAFETY: `self` proves the features; the caller guarantees the range at `p`.
        unsafe {
            // Packing works within 128 bits: the quarters come as 0, 2, 1, 3.
            let packed = _mm256_packus_epi32(bf16_in_32(v[0]), bf16_in_32(v[1]));
            _mm256_storeu_si256(p.cast(), _mm256_permute4x64_epi64::<0b11_01_10_00>(packed));
        }
    }

    #[inline(always)]
    unsafe fn store_f16(self, p: *mut u16, v: F32x16) {
        // SAFETY: `self` proves the features; the caller guarantees the range at `p`.
        unsafe {
            _mm_storeu_si128(p.cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(v[0]));
            _mm_storeu_si128(p.add(8).cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(v[1]));
        }
    }

    #[inline(always)]
    unsafe fn load_of_pairs(self, p: *const Bf16x2, i: usize) -> F32x16 {
        // SAFETY: `self` proves the features; the caller guarantees sixteen pairs at `p`.
        let eight = |p: *const Bf16x2| unsafe {
            let lower = _mm256_srl_epi32(_mm256_loadu_si256(p.cast()), _mm_cvtsi32_si128(16 * i as i32));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(lower))
        };
        [eight(p), eight(p.wrapping_add(LANES / 2))]
    }

    #[inline(always)]
    unsafe fn select_bytes(self, p: *const u8, zero: F32x16, other: F32x16) -> F32x16 {
        // SAFETY: `self` proves the features; the caller guarantees the range at `p`.
        unsafe {
            let is_zero = _mm_cmpeq_epi8(_mm_loadu_si128(p.cast()), _mm_setzero_si128());
            let low = _mm256_castsi256_ps(_mm256_cvtepi8_epi32(is_zero));
            let high = _mm256_castsi256_ps(_mm256_cvtepi8_epi32(_mm_srli_si128::<8>(is_zero)));
            [_mm256_blendv_ps(other[0], zero[0], low), _mm256_blendv_ps(other[1], zero[1], high)]
        }
    }

    #[inline(always)]
    fn select_bits(self, bits: u16, zero: F32x16, other: F32x16) -> F32x16 {
        // SAFETY: `self` proves the features.
        unsafe {
            let (low, high) = (_mm256_set1_epi32(i32::from(bits)), _mm256_set1_epi32(i32::from(bits >> 8)));
            let lanes = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
            let low = _mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_and_si256(low, lanes), lanes));
            let high = _mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_and_si256(high, lanes), lanes));
            [_mm256_blendv_ps(zero[0], other[0], low), _mm256_blendv_ps(zero[1], other[1], high)]
        }
    }

    #[inline(always)]
    fn bits_at_least(self, words: [&[u64; LANES / 2]; 4], least: u32) -> [u16; 2] {
        /// Compares four lanes of each word.
        ///
        /// # Safety
        /// The machine has AVX2; the lanes from `first` on are at least four.
        #[target_feature(enable = "avx2")]
        #[inline]
        unsafe fn four_lanes([a, b, c, d]: [&[u64; LANES / 2]; 4], first: usize, least: __m256i) -> [u16; 2] {
            // SAFETY: the caller guarantees four lanes at `first`.
            unsafe {
                let (a, b) = (a.as_ptr().add(first).cast(), b.as_ptr().add(first).cast());
                let (c, d) = (c.as_ptr().add(first).cast(), d.as_ptr().add(first).cast());
                let ab = _mm256_shuffle_ps::<0x88>(_mm256_loadu_ps(a), _mm256_loadu_ps(b));
                let cd = _mm256_shuffle_ps::<0x88>(_mm256_loadu_ps(c), _mm256_loadu_ps(d));
                let even = _mm256_castps_si256(_mm256_shuffle_ps::<0x88>(ab, cd));
                let odd = _mm256_castps_si256(_mm256_shuffle_ps::<0xDD>(ab, cd));
                let even = _mm256_cmpeq_epi32(_mm256_max_epu32(even, least), even);
                let odd = _mm256_cmpeq_epi32(_mm256_max_epu32(odd, least), odd);
                [
                    _mm256_movemask_ps(_mm256_castsi256_ps(even)) as u16,
                    _mm256_movemask_ps(_mm256_castsi256_ps(odd)) as u16,
                ]
            }
        }
        // SAFETY: `self` proves the feature; a word has eight lanes.
        let ([even, odd], [even_high, odd_high]) = unsafe {
            let least = _mm256_set1_epi32(least as i32);
            (four_lanes(words, 0, least), four_lanes(words, 4, least))
        };
        [even | (even_high << 8), odd | (odd_high << 8)]
    }

    #[inline(always)]
    fn prefetch(self, p: *const f32) {
        // SAFETY: `self` proves the features; a prefetch reads nothing that could fault.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(p.cast()) }
    }

    #[inline(always)]
    fn prefetch_second(self, p: *const f32) {
        // SAFETY: `self` proves the features; a prefetch reads nothing that could fault.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(p.cast()) }
    }

    #[inline(always)]
    fn sub(self, a: F32x16, b: F32x16) -> F32x16 {
        // SAFETY: `self` proves the features.
        unsafe { [_mm256_sub_ps(a[0], b[0]), _mm256_sub_ps(a[1], b[1])] }
    }

    #[inline(always)]
    fn div(self, a: F32x16, b: F32x16) -> F32x16 {
        // SAFETY: `self` proves the features.
        unsafe { [_mm256_div_ps(a[0], b[0]), _mm256_div_ps(a[1], b[1])] }
    }

    #[inline(always)]
    fn max(self, a: F32x16, b: F32x16) -> F32x16 {
        // SAFETY: `self` proves the features.
        unsafe { [_mm256_max_ps(a[0], b[0]), _mm256_max_ps(a[1], b[1])] }
    }

    #[inline(always)]
    fn select_eq(self, a: F32x16, b: F32x16, then: F32x16, otherwise: F32x16) -> F32x16 {
        let mut halves = otherwise;
        for i in 0..2 {
            // SAFETY: `self` proves the features.
            halves[i] = unsafe { _mm256_blendv_ps(otherwise[i], then[i], _mm256_cmp_ps::<_CMP_EQ_OQ>(a[i], b[i])) };
        }
        halves
    }

    #[inline(always)]
    fn fma_constant(self, a: F32x16, b: F32x16, c: &'static Constant) -> F32x16 {
        // SAFETY: `self` proves the features.
        unsafe { [fma_in_memory(a[0], b[0], c), fma_in_memory(a[1], b[1], c)] }
    }

    #[inline(always)]
    fn one_plus_scaled(self, (a, b): (F32x16, F32x16), _: F32x16, shifted: F32x16) -> F32x16 {
        // (1 + a·b)·2⁻⁶⁴ is rounded as 1 + a·b is; multiplying by 2^(n + 64), which is normal, or 0 at the lowest n, rounds
        // again only where the result is subnormal. Multiplying keeps a NaN a NaN.
        let mut halves = a;
        for i in 0..2 {
            // SAFETY: `self` proves the features.
            halves[i] = unsafe {
                let power = _mm256_castsi256_ps(_mm256_slli_epi32::<23>(_mm256_castps_si256(shifted[i])));
                _mm256_mul_ps(fma_in_memory(b[i], a[i], const { &Constant::new(TWO_TO_MINUS_64) }), power)
            };
        }
        halves
    }

    #[inline(always)]
    fn reduce_max(self, v: F32x16) -> f32 {
        // SAFETY: `self` proves the features.
        unsafe { max8(_mm256_max_ps(v[0], v[1])) }
    }

    #[inline(always)]
    fn reduce_sum(self, v: F32x16) -> f32 {
        // SAFETY: `self` proves the features.
        unsafe { sum8(_mm256_add_ps(v[0], v[1])) }
    }

    #[inline(always)]
    unsafe fn transpose(self, first: *const f32, step: isize, out: *mut f32) {
        for top in [0, 8] {
            for left in [0, 8] {
                // SAFETY: `self` proves the features; the access covers eight floats of a row, and eight of `out`, both
                // inside the 16 × 16 square that the caller guarantees.
                unsafe {
                    let mut block = [_mm256_setzero_ps(); 8];
                    let mut row = first.add(left).wrapping_byte_offset(top * step);
                    for block in &mut block {
                        *block = _mm256_loadu_ps(row);
                        row = row.wrapping_byte_offset(step);
                    }
                    let block = transpose8(block);
                    for (i, row) in block.into_iter().enumerate() {
                        _mm256_storeu_ps(out.add((left + i) * LANES + top as usize), row);
                    }
                }
            }
        }
    }
}
