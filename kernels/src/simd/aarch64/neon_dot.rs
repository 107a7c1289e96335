//! Dot products of NEON: of bytes by `sdot` where the machine has it, otherwise by widening products, and of bfloat16 pairs by
//! `bfdot`.

use super::neon::{F32x16, NeonBf16};
use super::neon_vector::{DOT, NeonToken, QUAD};
use crate::simd::{Bf16Dot, Bf16x2, Half, Int8Dot, LANES, Lower, Query4, Upper, Words4};
use core::arch::aarch64::*;
use core::arch::asm;

/// Four bytes of each of four keys or columns.
type Fours = int8x16_t;

impl<const EXTRA: u8> NeonToken<4, EXTRA> {
    /// Returns `sum[l] + Σ x[4·l + e]·y[4·l + e]` in lane `l`.
    #[inline(always)]
    fn dot(self, sum: int32x4_t, x: Fours, y: Fours) -> int32x4_t {
        // SAFETY: `self` proves the features.
        unsafe {
            if EXTRA == DOT {
                let total;
                // By assembly: the intrinsic is not stable.
                asm!(
                    ".arch_extension dotprod",
                    "sdot {0:v}.4s, {1:v}.16b, {2:v}.16b",
                    inout(vreg) sum => total,
                    in(vreg) x,
                    in(vreg) y,
                    options(pure, nomem, nostack, preserves_flags)
                );
                return total;
            }
            let low = vpaddlq_s16(vmull_s8(vget_low_s8(x), vget_low_s8(y)));
            let high = vpaddlq_s16(vmull_high_s8(x, y));
            vaddq_s32(sum, vpaddq_s32(low, high))
        }
    }

    /// Loads four registers of bytes.
    ///
    /// # Safety
    /// `p..p + 64` is readable.
    #[inline(always)]
    unsafe fn fours(self, p: *const i8) -> [Fours; 4] {
        // SAFETY: `self` proves the feature; the caller guarantees the range at `p`.
        unsafe { [vld1q_s8(p), vld1q_s8(p.add(16)), vld1q_s8(p.add(32)), vld1q_s8(p.add(48))] }
    }

    /// Returns the elements of one half of bytes, with their signs.
    #[inline(always)]
    fn half_bytes<H: Half>(self, bytes: [Fours; 4]) -> [Fours; 4] {
        let mut elements = bytes;
        for i in 0..4 {
            // SAFETY: `self` proves the feature.
            elements[i] = unsafe { vshrq_n_s8::<4>(if H::IS_UPPER { bytes[i] } else { vshlq_n_s8::<4>(bytes[i]) }) };
        }
        elements
    }

    /// Makes sums, each of its register.
    #[inline(always)]
    fn each_sum(self, f: impl Fn(usize) -> int32x4_t) -> [int32x4_t; 4] {
        [f(0), f(1), f(2), f(3)]
    }

    /// Returns four bytes in every lane.
    #[inline(always)]
    fn repeated(self, bytes: i32) -> Fours {
        // SAFETY: `self` proves the feature.
        unsafe { vreinterpretq_s8_s32(vdupq_n_s32(bytes)) }
    }
}

/// Elements of columns, and what their sums with weights from −128 on lack.
#[derive(Clone, Copy)]
pub(crate) struct NibbleColumns {
    elements: [Fours; 4],
    /// 128 times the sum of each column's elements.
    offsets: [int32x4_t; 4],
}

// SAFETY: made where the features are detected; loads and stores touch sixteen elements, or 64 bytes.
unsafe impl<const EXTRA: u8> Int8Dot for NeonToken<4, EXTRA> {
    // 4 × 4 sums, 8 keys of four bits, 2 queries: 26 of 32 registers.
    const INT8_DOT_ROWS: usize = 4;
    // 4 × 4 sums, 8 columns, 1 of weights: 25 of 32 registers.
    const WEIGHT_ROWS: usize = 4;
    type Sums = [int32x4_t; 4];
    type Keys = [Fours; 4];
    /// Lower halves, then upper ones.
    type Nibbles = [[Fours; 4]; 2];
    /// Sixteen-bit element `e` of the first eight columns, then of the others, for each `e`.
    type Words = [[int16x8_t; 2]; 4];
    type NibbleColumns = NibbleColumns;

    #[inline(always)]
    fn start(self, _: i32) -> Self::Sums {
        // SAFETY: `self` proves the feature.
        unsafe { [vdupq_n_s32(0); 4] }
    }

    #[inline(always)]
    unsafe fn keys(self, p: *const i8) -> Self::Keys {
        // SAFETY: same contract: the caller guarantees the range at `p`.
        unsafe { self.fours(p) }
    }

    #[inline(always)]
    unsafe fn nibbles(self, p: *const i8) -> Self::Nibbles {
        // SAFETY: same contract: the caller guarantees the range at `p`.
        let bytes = unsafe { self.fours(p) };
        [self.half_bytes::<Lower>(bytes), self.half_bytes::<Upper>(bytes)]
    }

    #[inline(always)]
    fn dot8(self, sums: Self::Sums, lower: &Query4, upper: &Query4, keys: Self::Nibbles) -> Self::Sums {
        let (lower, upper) = (self.repeated(lower.bytes), self.repeated(upper.bytes));
        self.each_sum(|i| self.dot(self.dot(sums[i], keys[0][i], lower), keys[1][i], upper))
    }

    #[inline(always)]
    fn dot4(self, sums: Self::Sums, q: &Query4, keys: Self::Keys) -> Self::Sums {
        let query = self.repeated(q.bytes);
        self.each_sum(|i| self.dot(sums[i], keys[i], query))
    }

    #[inline(always)]
    unsafe fn words(self, p: *const i8) -> Self::Words {
        // SAFETY: `self` proves the feature; the caller guarantees the range at `p`.
        unsafe {
            let int8x16x4_t(a, b, c, d) = vld4q_s8(p);
            let wide = |bytes| [vmovl_s8(vget_low_s8(bytes)), vmovl_high_s8(bytes)];
            [wide(a), wide(b), wide(c), wide(d)]
        }
    }

    #[inline(always)]
    unsafe fn nibble_columns<H: Half>(self, p: *const i8) -> NibbleColumns {
        // SAFETY: same contract: the caller guarantees the range at `p`.
        let elements = self.half_bytes::<H>(unsafe { self.fours(p) });
        // SAFETY: `self` proves the feature.
        let offset = |i: usize| unsafe { vshlq_n_s32::<7>(self.dot(vdupq_n_s32(0), elements[i], vdupq_n_s8(1))) };
        NibbleColumns { elements, offsets: self.each_sum(offset) }
    }

    #[inline(always)]
    fn dot4_words(self, sums: Self::Sums, x: Words4, columns: Self::Words) -> Self::Sums {
        // SAFETY: `self` proves the feature.
        unsafe {
            // Weights 0, 2, 1, 3.
            let x = vcreate_s16(u64::from(x.even.cast_unsigned()) | u64::from(x.odd.cast_unsigned()) << 32);
            let low = |sum, i: usize| {
                let sum = vmlal_lane_s16::<0>(sum, vget_low_s16(columns[0][i]), x);
                let sum = vmlal_lane_s16::<2>(sum, vget_low_s16(columns[1][i]), x);
                let sum = vmlal_lane_s16::<1>(sum, vget_low_s16(columns[2][i]), x);
                vmlal_lane_s16::<3>(sum, vget_low_s16(columns[3][i]), x)
            };
            let high = |sum, i: usize| {
                let sum = vmlal_high_lane_s16::<0>(sum, columns[0][i], x);
                let sum = vmlal_high_lane_s16::<2>(sum, columns[1][i], x);
                let sum = vmlal_high_lane_s16::<1>(sum, columns[2][i], x);
                vmlal_high_lane_s16::<3>(sum, columns[3][i], x)
            };
            [low(sums[0], 0), high(sums[1], 0), low(sums[2], 1), high(sums[3], 1)]
        }
    }

    #[inline(always)]
    fn dot4_bytes(self, sums: Self::Sums, x: u32, columns: NibbleColumns) -> Self::Sums {
        // Weights less 128, which have a sign as the elements have.
        let x = self.repeated((x ^ 0x8080_8080).cast_signed());
        // SAFETY: `self` proves the feature.
        self.each_sum(|i| unsafe { vaddq_s32(self.dot(sums[i], columns.elements[i], x), columns.offsets[i]) })
    }

    #[inline(always)]
    fn to_f32(self, sums: Self::Sums) -> F32x16 {
        // SAFETY: `self` proves the feature.
        unsafe { [vcvtq_f32_s32(sums[0]), vcvtq_f32_s32(sums[1]), vcvtq_f32_s32(sums[2]), vcvtq_f32_s32(sums[3])] }
    }

    #[inline(always)]
    fn max_magnitude(self, a: F32x16, b: F32x16) -> F32x16 {
        // SAFETY: `self` proves the feature.
        self.each(|i| unsafe {
            let magnitude = vreinterpretq_u32_f32(vabsq_f32(a[i]));
            vreinterpretq_f32_u32(vmaxq_u32(magnitude, vreinterpretq_u32_f32(b[i])))
        })
    }

    #[inline(always)]
    fn bytes<const SHIFT: u32>(self, v: F32x16) -> [u8; LANES] {
        let mut bytes = [0; LANES];
        // SAFETY: `self` proves the feature; the array holds sixteen bytes.
        unsafe {
            let shift = vdupq_n_s32(-(SHIFT as i32));
            let word = |v| vmovn_u32(vshlq_u32(vreinterpretq_u32_f32(v), shift));
            let low = vmovn_u16(vcombine_u16(word(v[0]), word(v[1])));
            let high = vmovn_u16(vcombine_u16(word(v[2]), word(v[3])));
            vst1q_u8(bytes.as_mut_ptr(), vcombine_u8(low, high));
        }
        bytes
    }
}

/// Rounds eight numbers to bfloat16, to nearest even; NaN stays NaN.
///
/// # Safety
/// The machine has FEAT_BF16.
#[inline(always)]
unsafe fn round_bf16(low: float32x4_t, high: float32x4_t) -> uint16x8_t {
    let eight: uint16x8_t;
    // By assembly: the intrinsics are not stable.
    // SAFETY: the caller guarantees the feature; the instructions touch their operands alone.
    unsafe {
        asm!(
            ".arch_extension bf16",
            "bfcvtn {0:v}.4h, {1:v}.4s",
            "bfcvtn2 {0:v}.8h, {2:v}.4s",
            out(vreg) eight,
            in(vreg) low,
            in(vreg) high,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    eight
}

// SAFETY: made where the feature is detected; loads and stores touch sixteen elements.
unsafe impl Bf16Dot for NeonBf16 {
    /// Four pairs in each register, in order.
    type P = [uint16x8_t; 4];
    /// Bits of the pair: products take it from the lowest lane of a register.
    type Pair = f32;

    #[inline(always)]
    fn splat_bf16x2(self, x: Bf16x2) -> f32 {
        f32::from_bits(x.0)
    }

    #[inline(always)]
    unsafe fn load_bf16x2(self, p: *const Bf16x2) -> Self::P {
        // SAFETY: `self` proves the feature; the caller guarantees the range at `p`.
        let four = |i: usize| unsafe { vreinterpretq_u16_u32(vld1q_u32(p.add(QUAD * i).cast())) };
        [four(0), four(1), four(2), four(3)]
    }

    #[inline(always)]
    unsafe fn zip(self, a: *const u16, b: *const u16) -> Self::P {
        // SAFETY: `self` proves the feature; the caller guarantees the ranges at `a` and `b`.
        unsafe {
            let [a, a_rest, b, b_rest] = [vld1q_u16(a), vld1q_u16(a.add(8)), vld1q_u16(b), vld1q_u16(b.add(8))];
            [vzip1q_u16(a, b), vzip2q_u16(a, b), vzip1q_u16(a_rest, b_rest), vzip2q_u16(a_rest, b_rest)]
        }
    }

    #[inline(always)]
    fn dot2(self, sum: F32x16, x: f32, y: Self::P) -> F32x16 {
        self.each(|i| {
            let total;
            // By assembly: the intrinsic is not stable.
            // SAFETY: `self` proves the feature; the instruction touches its operands alone.
            unsafe {
                asm!(
                    ".arch_extension bf16",
                    "bfdot {0:v}.4s, {1:v}.8h, {2:v}.2h[0]",
                    inout(vreg) sum[i] => total,
                    in(vreg) y[i],
                    in(vreg) x,
                    options(pure, nomem, nostack, preserves_flags)
                );
            }
            total
        })
    }

    #[inline(always)]
    unsafe fn store_bf16x2(self, p: *mut Bf16x2, v: F32x16) -> F32x16 {
        let mut stored = v;
        for i in 0..2 {
            // SAFETY: `self` proves the feature; the caller guarantees the range at `p`.
            unsafe {
                let normal = |v: float32x4_t| {
                    let subnormal = vcagtq_f32(vdupq_n_f32(f32::MIN_POSITIVE), v);
                    vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(v), subnormal))
                };
                let eight = round_bf16(normal(v[2 * i]), normal(v[2 * i + 1]));
                vst1q_u16(p.add(QUAD * i).cast(), eight);
                stored[2 * i] = vreinterpretq_f32_u32(vshll_n_u16::<16>(vget_low_u16(eight)));
                stored[2 * i + 1] = vreinterpretq_f32_u32(vshll_high_n_u16::<16>(eight));
            }
        }
        stored
    }
}
