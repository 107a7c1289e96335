//! NEON of AArch64: four registers are one vector, two of them its half. Dot products of bytes, and of bfloat16 pairs, take
//! special instructions where the machine has these.

use super::neon_vector::{BF16, DOT, NOTHING, NeonToken, QUAD, ROWS};
use crate::simd::numbers::Constant;
use crate::simd::{Bf16DotWork, Bf16x2, Int8DotWork, LANES, Simd, TWO_TO_MINUS_64};
use core::arch::aarch64::*;
use core::arch::asm;
use std::arch::is_aarch64_feature_detected;

/// Proof that this machine has NEON.
pub(crate) type Neon = NeonToken<4, NOTHING>;

/// Proof that this machine has dot products of bytes, too (FEAT_DotProd). It is not an instruction set to choose:
/// [`Simd::with_int8_dot`] hands it out.
pub(crate) type NeonDot = NeonToken<4, DOT>;

/// Proof that this machine has products of bfloat16 pairs, too (FEAT_BF16): [`Simd::with_bf16_dot`] hands it out.
pub(crate) type NeonBf16 = NeonToken<4, BF16>;

impl<const EXTRA: u8> NeonToken<4, EXTRA> {
    /// Returns the proof if the machine has the features.
    pub(crate) fn detect() -> Option<Self> {
        let extra = match EXTRA {
            DOT => is_aarch64_feature_detected!("dotprod"),
            BF16 => is_aarch64_feature_detected!("bf16"),
            _ => true,
        };
        // Lanes are counted from the lowest address on.
        let present = cfg!(target_endian = "little") && is_aarch64_feature_detected!("neon") && extra;
        // SAFETY: detected.
        present.then(|| unsafe { Self::new() })
    }
}

/// Four registers: lanes in order.
pub(crate) type F32x16 = [float32x4_t; 4];

/// Returns `a > b ? a : b`, NaN included.
///
/// # Safety
/// The machine has NEON.
#[inline(always)]
unsafe fn greater(a: float32x4_t, b: float32x4_t) -> float32x4_t {
    // SAFETY: the caller guarantees NEON.
    unsafe { vbslq_f32(vcgtq_f32(a, b), a, b) }
}

/// Returns `a·b + c`, with `c` loaded into the register that becomes the sum: the compiler would load it once and copy it for each
/// sum, and the softmax has no time for copies.
///
/// # Safety
/// The machine has NEON.
#[inline(always)]
unsafe fn fma_loaded(a: float32x4_t, b: float32x4_t, c: &'static Constant) -> float32x4_t {
    let sum: float32x4_t;
    // SAFETY: the caller guarantees NEON; the array is readable, and nothing else is touched.
    unsafe {
        asm!(
            "ld1 {{{0:v}.4s}}, [{3}]",
            "fmla {0:v}.4s, {1:v}.4s, {2:v}.4s",
            out(vreg) sum,
            in(vreg) a,
            in(vreg) b,
            in(reg) c.0.as_ptr(),
            options(pure, readonly, nostack, preserves_flags)
        );
    }
    sum
}

/// Rounds to binary16, to nearest even.
///
/// # Safety
/// The machine has NEON.
#[inline(always)]
unsafe fn narrow_f16(wide: float32x4_t) -> uint16x4_t {
    let half: uint16x4_t;
    // SAFETY: the caller guarantees NEON; the instruction touches its operands alone.
    unsafe {
        asm!("fcvtn {0:v}.4h, {1:v}.4s", out(vreg) half, in(vreg) wide, options(pure, nomem, nostack, preserves_flags));
    }
    half
}

/// Rounds to bfloat16, by the algorithm of the AVX2 backend.
///
/// # Safety
/// The machine has NEON.
#[inline(always)]
unsafe fn narrow_bf16(wide: float32x4_t) -> uint16x4_t {
    // SAFETY: the caller guarantees NEON.
    unsafe {
        let bits = vreinterpretq_u32_f32(wide);
        let odd = vandq_u32(vshrq_n_u32::<16>(bits), vdupq_n_u32(1));
        let number = vceqq_f32(wide, wide);
        let half = vandq_u32(vaddq_u32(odd, vdupq_n_u32(0x7FFF)), number);
        let quiet = vbicq_u32(vdupq_n_u32(0x0040_0000), number);
        vaddhn_u32(vorrq_u32(bits, quiet), half)
    }
}

// SAFETY: made by `Isa`, and by `Self` with more features, where those are detected; loads and stores touch sixteen
// elements.
unsafe impl<const EXTRA: u8> Simd for NeonToken<4, EXTRA> {
    type Half = NeonToken<2, NOTHING>;

    // 6 × 4 accumulators, four elements of 6 rows, 1 load: 31 of 32 registers, and 24 chains against the 16 that four FMA
    // units of latency 4 need.
    const TILE_ROWS: usize = ROWS;
    const TWO_TERM_ROWS: usize = ROWS - 1;
    const TILE_VECS: usize = 1;
    const DOT_VECS: usize = 1;

    const FUSED: bool = true;
    const MAY_HAVE_BF16_DOT: bool = true;
    // Exponents and sums of one panel, constants, running sums and maxima: 31 of 32 registers.
    const BEGINS_AHEAD: bool = false;
    const FACTOR_UNIT: f32 = TWO_TO_MINUS_64;

    #[inline(always)]
    fn vectorize<R>(self, f: impl FnOnce() -> R) -> R {
        #[target_feature(enable = "neon")]
        fn basic<R>(f: impl FnOnce() -> R) -> R {
            f()
        }
        #[target_feature(enable = "neon,dotprod")]
        fn dot<R>(f: impl FnOnce() -> R) -> R {
            f()
        }
        #[target_feature(enable = "neon,bf16")]
        fn bf16<R>(f: impl FnOnce() -> R) -> R {
            f()
        }
        // SAFETY: `self` proves NEON and the extension that `EXTRA` names.
        unsafe {
            match EXTRA {
                DOT => dot(f),
                BF16 => bf16(f),
                _ => basic(f),
            }
        }
    }

    #[inline(always)]
    fn half(self) -> Option<Self::Half> {
        // SAFETY: `self` proves the feature.
        Some(unsafe { NeonToken::new() })
    }

    #[inline(always)]
    unsafe fn with_int8_dot<W: Int8DotWork>(self, work: W) -> W::Output {
        // SAFETY: the caller guarantees what the work requires; `self` proves NEON.
        unsafe {
            match NeonDot::detect() {
                Some(dot) => work.run(dot),
                None => work.run(Neon::new()),
            }
        }
    }

    #[inline(always)]
    fn has_bf16_dot(self) -> bool {
        NeonBf16::detect().is_some()
    }

    #[inline(always)]
    unsafe fn with_bf16_dot<W: Bf16DotWork>(self, work: W) -> W::Output {
        let s = NeonBf16::detect().expect("bf16 pairs are made only where FEAT_BF16 is detected");
        // SAFETY: the caller guarantees what the work requires.
        unsafe { work.run(s) }
    }

    #[inline(always)]
    unsafe fn store_bf16(self, p: *mut u16, v: F32x16) {
        for i in 0..2 {
            // SAFETY: `self` proves the feature; the caller guarantees the range at `p`.
            unsafe { vst1q_u16(p.add(8 * i), vcombine_u16(narrow_bf16(v[2 * i]), narrow_bf16(v[2 * i + 1]))) };
        }
    }

    #[inline(always)]
    unsafe fn store_f16(self, p: *mut u16, v: F32x16) {
        for i in 0..2 {
            // SAFETY: `self` proves the feature; the caller guarantees the range at `p`.
            unsafe { vst1q_u16(p.add(8 * i), vcombine_u16(narrow_f16(v[2 * i]), narrow_f16(v[2 * i + 1]))) };
        }
    }

    #[inline(always)]
    unsafe fn load_of_pairs(self, p: *const Bf16x2, i: usize) -> Self::V {
        // SAFETY: `self` proves the feature; the caller guarantees the range at `p`.
        self.each(|n| unsafe {
            let lower = vshlq_u32(vld1q_u32(p.add(n * QUAD).cast()), vdupq_n_s32(-16 * i as i32));
            vreinterpretq_f32_u32(vshlq_n_u32::<16>(lower))
        })
    }

    #[inline(always)]
    unsafe fn select_bytes(self, p: *const u8, zero: F32x16, other: F32x16) -> F32x16 {
        // SAFETY: `self` proves the feature; the caller guarantees the range at `p`.
        unsafe {
            let is_zero = vreinterpretq_s8_u8(vceqzq_u8(vld1q_u8(p)));
            let (low, high) = (vmovl_s8(vget_low_s8(is_zero)), vmovl_high_s8(is_zero));
            let lanes = [
                vmovl_s16(vget_low_s16(low)),
                vmovl_high_s16(low),
                vmovl_s16(vget_low_s16(high)),
                vmovl_high_s16(high),
            ];
            self.each(|i| vbslq_f32(vreinterpretq_u32_s32(lanes[i]), zero[i], other[i]))
        }
    }

    #[inline(always)]
    fn select_bits(self, bits: u16, zero: F32x16, other: F32x16) -> F32x16 {
        // SAFETY: `self` proves the feature; an array of four lanes is a register.
        unsafe {
            let bits = vdupq_n_u32(u32::from(bits));
            self.each(|i| {
                let lanes = vld1q_u32([1, 2, 4, 8].map(|bit| bit << (QUAD * i)).as_ptr());
                vbslq_f32(vtstq_u32(bits, lanes), other[i], zero[i])
            })
        }
    }

    #[inline(always)]
    fn bits_at_least(self, words: [&[u64; LANES / 2]; 4], least: u32) -> [u16; 2] {
        // SAFETY: `self` proves the feature; a word is sixteen halves; every fourth is the lower one of an even lane.
        unsafe {
            let (least, mut even, mut odd) = (vdupq_n_u32(least), vdupq_n_u32(0), vdupq_n_u32(0));
            for (t, word) in words.into_iter().enumerate() {
                let lanes = vld4q_u32(word.as_ptr().cast());
                let bits = vld1q_u32([1, 1 << 4, 1 << 8, 1 << 12].map(|bit| bit << t).as_ptr());
                even = vorrq_u32(even, vandq_u32(vcgeq_u32(lanes.0, least), bits));
                odd = vorrq_u32(odd, vandq_u32(vcgeq_u32(lanes.2, least), bits));
            }
            [vaddvq_u32(even) as u16, vaddvq_u32(odd) as u16]
        }
    }

    #[inline(always)]
    fn prefetch(self, p: *const f32) {
        // SAFETY: a prefetch reads nothing that could fault.
        unsafe { asm!("prfm pldl1keep, [{0}]", in(reg) p.addr(), options(nomem, nostack, preserves_flags)) }
    }

    #[inline(always)]
    fn prefetch_second(self, p: *const f32) {
        // SAFETY: a prefetch reads nothing that could fault.
        unsafe { asm!("prfm pldl2keep, [{0}]", in(reg) p.addr(), options(nomem, nostack, preserves_flags)) }
    }

    #[inline(always)]
    fn sub(self, a: F32x16, b: F32x16) -> F32x16 {
        // SAFETY: `self` proves the feature.
        self.each(|i| unsafe { vsubq_f32(a[i], b[i]) })
    }

    #[inline(always)]
    fn div(self, a: F32x16, b: F32x16) -> F32x16 {
        // SAFETY: `self` proves the feature.
        self.each(|i| unsafe { vdivq_f32(a[i], b[i]) })
    }

    #[inline(always)]
    fn max(self, a: F32x16, b: F32x16) -> F32x16 {
        // SAFETY: `self` proves the feature.
        self.each(|i| unsafe { greater(a[i], b[i]) })
    }

    #[inline(always)]
    fn at_least(self, least: f32, x: F32x16) -> F32x16 {
        // SAFETY: `self` proves the feature.
        self.each(|i| unsafe { vmaxq_f32(x[i], vdupq_n_f32(least)) })
    }

    #[inline(always)]
    fn raise(self, most: F32x16, x: F32x16) -> F32x16 {
        // SAFETY: `self` proves the feature.
        self.each(|i| unsafe { vmaxnmq_f32(x[i], most[i]) })
    }

    #[inline(always)]
    fn fma_constant(self, a: F32x16, b: F32x16, c: &'static Constant) -> F32x16 {
        // SAFETY: `self` proves the feature.
        self.each(|i| unsafe { fma_loaded(a[i], b[i], c) })
    }

    #[inline(always)]
    fn select_eq(self, a: F32x16, b: F32x16, then: F32x16, otherwise: F32x16) -> F32x16 {
        // SAFETY: `self` proves the feature.
        self.each(|i| unsafe { vbslq_f32(vceqq_f32(a[i], b[i]), then[i], otherwise[i]) })
    }

    #[inline(always)]
    fn one_plus_scaled(self, (a, b): (F32x16, F32x16), _: F32x16, shifted: F32x16) -> F32x16 {
        // As in the AVX2 backend, 2⁻⁶⁴ being a factor of `b` already.
        // SAFETY: `self` proves the feature.
        self.each(|i| unsafe {
            let power = vreinterpretq_f32_u32(vshlq_n_u32::<23>(vreinterpretq_u32_f32(shifted[i])));
            vmulq_f32(fma_loaded(a[i], b[i], const { &Constant::new(TWO_TO_MINUS_64) }), power)
        })
    }

    #[inline(always)]
    fn reduce_max(self, v: F32x16) -> f32 {
        // SAFETY: `self` proves the feature.
        unsafe {
            let four = greater(greater(v[0], v[2]), greater(v[1], v[3]));
            let two = greater(four, vextq_f32::<2>(four, four));
            vgetq_lane_f32::<0>(greater(two, vdupq_laneq_f32::<1>(two)))
        }
    }

    #[inline(always)]
    fn reduce_sum(self, v: F32x16) -> f32 {
        // SAFETY: `self` proves the feature.
        unsafe {
            // Lanes 8 apart, then 4, 2, 1.
            let four = vaddq_f32(vaddq_f32(v[0], v[2]), vaddq_f32(v[1], v[3]));
            vpadds_f32(vadd_f32(vget_low_f32(four), vget_high_f32(four)))
        }
    }

    #[inline(always)]
    unsafe fn transpose(self, first: *const f32, step: isize, out: *mut f32) {
        for left in (0..LANES).step_by(QUAD) {
            let mut row = first.wrapping_add(left);
            for top in (0..LANES).step_by(QUAD) {
                // SAFETY: `self` proves the feature; the access covers four floats of four rows, and four times four of `out`,
                // all inside the squares that the caller guarantees.
                unsafe {
                    let rows = self.each(|_| {
                        let four = vld1q_f32(row);
                        row = row.wrapping_byte_offset(step);
                        four
                    });
                    transpose_four(rows, out.add(left * LANES + top));
                }
            }
        }
    }
}

/// Transposes a square of four: element `i` of row `r` becomes element `r` of row `i` of `out`. Its rows are sixteen apart.
///
/// # Safety
/// The machine has NEON; four floats of each row of `out` are writable.
#[inline(always)]
unsafe fn transpose_four([a, b, c, d]: F32x16, out: *mut f32) {
    // SAFETY: the caller guarantees NEON, and the rows.
    unsafe {
        // Two elements of two rows in each half of a register; stores put a half of each of two side by side.
        let pairs = |x, y| float64x2x2_t(vreinterpretq_f64_f32(x), vreinterpretq_f64_f32(y));
        let even = pairs(vtrn1q_f32(a, b), vtrn1q_f32(c, d));
        let odd = pairs(vtrn2q_f32(a, b), vtrn2q_f32(c, d));
        vst2q_lane_f64::<0>(out.cast(), even);
        vst2q_lane_f64::<0>(out.add(LANES).cast(), odd);
        vst2q_lane_f64::<1>(out.add(2 * LANES).cast(), even);
        vst2q_lane_f64::<1>(out.add(3 * LANES).cast(), odd);
    }
}
