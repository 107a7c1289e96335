//! Half a vector: one register of AVX. Two of them make a vector of AVX2; with AVX-512 they are half a register.

use crate::simd::Vector;
use core::arch::x86_64::*;

/// Proof that this machine has AVX2, FMA and F16C, for vectors of eight lanes. Only the token of AVX2
/// makes one.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Avx2Half(());

impl Avx2Half {
    /// Makes the proof.
    ///
    /// # Safety
    /// The machine has AVX2, FMA and F16C.
    #[inline(always)]
    pub(super) const unsafe fn new() -> Self {
        Self(())
    }
}

/// Returns the largest of eight lanes; [`Simd::max`](crate::simd::Simd::max)'s rule for NaN.
///
/// # Safety
/// The machine has AVX.
#[inline(always)]
pub(crate) unsafe fn max8(v: __m256) -> f32 {
    // SAFETY: the caller guarantees AVX, which includes SSE.
    unsafe {
        let v = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
        let v = _mm_max_ps(v, _mm_movehl_ps(v, v));
        _mm_cvtss_f32(_mm_max_ss(v, _mm_shuffle_ps::<1>(v, v)))
    }
}

/// Returns the sum of eight lanes: lanes 4 apart first, then 2, then 1.
///
/// # Safety
/// The machine has AVX.
#[inline(always)]
pub(crate) unsafe fn sum8(v: __m256) -> f32 {
    // SAFETY: the caller guarantees AVX, which includes SSE.
    unsafe {
        let v = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
        let v = _mm_add_ps(v, _mm_movehl_ps(v, v));
        _mm_cvtss_f32(_mm_add_ss(v, _mm_shuffle_ps::<1>(v, v)))
    }
}

// SAFETY: made by `Avx2`, which proves AVX2, FMA and F16C; loads and stores touch eight elements.
unsafe impl Vector for Avx2Half {
    type V = __m256;
    const LANES: usize = 8;

    #[inline(always)]
    fn splat(self, x: f32) -> __m256 {
        // SAFETY: `self` proves the features.
        unsafe { _mm256_set1_ps(x) }
    }

    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> __m256 {
        // SAFETY: `self` proves the features; the caller guarantees the range at `p`.
        unsafe { _mm256_loadu_ps(p) }
    }

    #[inline(always)]
    unsafe fn load_bf16(self, p: *const u16) -> __m256 {
        // SAFETY: `self` proves the features; the caller guarantees the range at `p`.
        unsafe {
            let low = _mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(low))
        }
    }

    #[inline(always)]
    unsafe fn load_f16(self, p: *const u16) -> __m256 {
        // SAFETY: `self` proves the features; the caller guarantees the range at `p`.
        unsafe { _mm256_cvtph_ps(_mm_loadu_si128(p.cast())) }
    }

    #[inline(always)]
    unsafe fn store(self, p: *mut f32, v: __m256) {
        // SAFETY: `self` proves the features; the caller guarantees the range at `p`.
        unsafe { _mm256_storeu_ps(p, v) }
    }

    #[inline(always)]
    fn add(self, a: __m256, b: __m256) -> __m256 {
        // SAFETY: `self` proves the features.
        unsafe { _mm256_add_ps(a, b) }
    }

    #[inline(always)]
    fn mul(self, a: __m256, b: __m256) -> __m256 {
        // SAFETY: `self` proves the features.
        unsafe { _mm256_mul_ps(a, b) }
    }

    #[inline(always)]
    fn fma(self, a: __m256, b: __m256, c: __m256) -> __m256 {
        // SAFETY: `self` proves the features.
        unsafe { _mm256_fmadd_ps(a, b, c) }
    }
}
