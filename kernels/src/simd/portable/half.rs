//! Half a vector of the portable backend.

use crate::simd::{F16_BIAS, F16_UNIT, Vector};
use wide::{f32x4, i32x4};

/// Token of the portable backend's vectors of eight lanes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PortableHalf;

/// Eight lanes as two times four.
type Pair = [f32x4; 2];

#[inline(always)]
pub(super) fn bits(x: f32x4) -> i32x4 {
    // SAFETY: both are 16 bytes, and every bit pattern is a valid i32.
    unsafe { core::mem::transmute::<f32x4, i32x4>(x) }
}

#[inline(always)]
pub(super) fn from_bits(x: i32x4) -> f32x4 {
    // SAFETY: both are 16 bytes, and every bit pattern is a valid f32.
    unsafe { core::mem::transmute::<i32x4, f32x4>(x) }
}

/// Returns a vector with the bits `x` in every lane. Unsigned, as most constants are.
#[inline(always)]
pub(super) fn ints(x: u32) -> i32x4 {
    i32x4::splat(x.cast_signed())
}

/// Widens binary16 in the lower halves of 32 bits. Comparisons leave out the sign, so that signed ones suffice.
#[inline(always)]
fn widen_f16(half: i32x4) -> f32x4 {
    let unsigned = half & ints(0x7FFF);
    let sign = (half ^ unsigned) << 16;
    let placed = unsigned << 13;
    // Infinity and NaN move from the last exponent of one format to that of the other.
    let last = unsigned.simd_gt(ints(0x7BFF)) & ints(F16_BIAS);
    let quiet = unsigned.simd_gt(ints(0x7C00)) & ints(0x0040_0000);
    let normal = (placed + ints(F16_BIAS) + last) | quiet;
    let subnormal = bits(unsigned.round_float() * f32x4::splat(F16_UNIT));
    from_bits(ints(0x0400).simd_gt(unsigned).bitselect(subnormal, normal) | sign)
}

/// Loads eight 16-bit numbers, zero-extended.
///
/// # Safety
/// `p..p + 8` is readable.
#[inline(always)]
unsafe fn load_16(p: *const u16) -> [i32x4; 2] {
    // SAFETY: the caller guarantees `p..p + 8`.
    let p = unsafe { p.cast::<[[u16; 4]; 2]>().read_unaligned() };
    let widened = |x: [u16; 4]| i32x4::new([x[0].into(), x[1].into(), x[2].into(), x[3].into()]);
    [widened(p[0]), widened(p[1])]
}

// SAFETY: made for every machine; loads and stores touch eight elements.
unsafe impl Vector for PortableHalf {
    type V = Pair;
    const LANES: usize = 8;

    #[inline(always)]
    fn splat(self, x: f32) -> Pair {
        [f32x4::splat(x); 2]
    }

    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> Pair {
        // SAFETY: the caller guarantees `p..p + 8`.
        let p = unsafe { p.cast::<[[f32; 4]; 2]>().read_unaligned() };
        [f32x4::new(p[0]), f32x4::new(p[1])]
    }

    #[inline(always)]
    unsafe fn load_bf16(self, p: *const u16) -> Pair {
        // SAFETY: the caller guarantees `p..p + 8`.
        let words = unsafe { load_16(p) };
        [from_bits(words[0] << 16), from_bits(words[1] << 16)]
    }

    #[inline(always)]
    unsafe fn load_f16(self, p: *const u16) -> Pair {
        // SAFETY: the caller guarantees `p..p + 8`.
        let words = unsafe { load_16(p) };
        [widen_f16(words[0]), widen_f16(words[1])]
    }

    #[inline(always)]
    unsafe fn store(self, p: *mut f32, v: Pair) {
        let lanes = [v[0].to_array(), v[1].to_array()];
        // SAFETY: the caller guarantees `p..p + 8`.
        unsafe { p.cast::<[[f32; 4]; 2]>().write_unaligned(lanes) }
    }

    #[inline(always)]
    fn add(self, a: Pair, b: Pair) -> Pair {
        [a[0] + b[0], a[1] + b[1]]
    }

    #[inline(always)]
    fn mul(self, a: Pair, b: Pair) -> Pair {
        [a[0] * b[0], a[1] * b[1]]
    }

    #[inline(always)]
    fn fma(self, a: Pair, b: Pair, c: Pair) -> Pair {
        [a[0].mul_add(b[0], c[0]), a[1].mul_add(b[1], c[1])]
    }
}
