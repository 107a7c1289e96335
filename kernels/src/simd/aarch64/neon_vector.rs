//! Vectors of NEON, of four registers or two.

use crate::simd::terms::{Columns, TermRows};
use crate::simd::{FOUR, Vector};
use core::arch::aarch64::*;
use core::arch::asm;
use core::sync::atomic::{Ordering, compiler_fence};

/// Proof that this machine has NEON and the extension that `EXTRA` names, for vectors of `REGISTERS` registers.
/// [`Neon::detect`](super::neon::Neon::detect) makes it for whole vectors, and these that of their half.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NeonToken<const REGISTERS: usize, const EXTRA: u8>(());

pub(super) const NOTHING: u8 = 0;
pub(super) const DOT: u8 = 1;
pub(super) const BF16: u8 = 2;

/// Number of rows with elements and sums in registers at once.
pub(super) const ROWS: usize = 6;

/// Number of lanes of a register.
pub(super) const QUAD: usize = 4;

impl<const REGISTERS: usize, const EXTRA: u8> NeonToken<REGISTERS, EXTRA> {
    /// Makes the proof.
    ///
    /// # Safety
    /// The machine has NEON and the extension.
    #[inline(always)]
    pub(super) const unsafe fn new() -> Self {
        Self(())
    }

    /// Makes a vector of its registers. It is a new value, never a changed argument: with rustc 1.95, where `fma(p, x, x)`
    /// wrote to its last argument, the softcap went on with a changed `x`.
    #[inline(always)]
    pub(super) fn each(self, mut f: impl FnMut(usize) -> float32x4_t) -> [float32x4_t; REGISTERS] {
        let mut v = self.splat(0.0);
        for i in 0..REGISTERS {
            v[i] = f(i);
        }
        v
    }
}

/// Widens binary16, in the four lower lanes or in the upper ones.
///
/// # Safety
/// The machine has NEON.
#[inline(always)]
unsafe fn widen_f16<const UPPER: bool>(half: uint16x8_t) -> float32x4_t {
    let wide: float32x4_t;
    // By assembly: the intrinsic is younger than the oldest compiler that this crate is for.
    // SAFETY: the caller guarantees NEON; the instruction touches its operands alone.
    unsafe {
        if UPPER {
            asm!("fcvtl2 {0:v}.4s, {1:v}.8h", out(vreg) wide, in(vreg) half, options(pure, nomem, nostack, preserves_flags));
        } else {
            asm!("fcvtl {0:v}.4s, {1:v}.4h", out(vreg) wide, in(vreg) half, options(pure, nomem, nostack, preserves_flags));
        }
    }
    wide
}

/// Adds the products of element `E` of four of each row, and the columns of a term, to the sums of the rows from `first` on: a
/// register of columns after the other, so that one of them is enough.
///
/// # Safety
/// The machine has NEON; the columns are readable.
#[inline(always)]
unsafe fn add_element<const E: i32, const MR: usize, const NV: usize, const REGISTERS: usize>(
    fours: &[float32x4_t; ROWS],
    columns: Columns,
    first: usize,
    sums: &mut [[[float32x4_t; REGISTERS]; NV]; MR],
) {
    let at = columns.from(E as usize);
    for n in 0..NV {
        for i in 0..REGISTERS {
            // SAFETY: the caller guarantees NEON, and the columns.
            unsafe {
                let column = vld1q_f32(at.first.add(n * at.apart + i * QUAD));
                for r in first..MR.min(first + ROWS) {
                    sums[r][n][i] = vfmaq_laneq_f32::<E>(sums[r][n][i], column, fours[r - first]);
                }
            }
        }
    }
}

// SAFETY: made by `Isa`, and by `Self`, where NEON is detected; loads and stores touch four elements for each of the `REGISTERS`
// (four or two).
unsafe impl<const REGISTERS: usize, const EXTRA: u8> Vector for NeonToken<REGISTERS, EXTRA> {
    type V = [float32x4_t; REGISTERS];
    const LANES: usize = {
        assert!(REGISTERS == 4 || REGISTERS == 2);
        REGISTERS * QUAD
    };

    #[inline(always)]
    fn splat(self, x: f32) -> Self::V {
        // SAFETY: `self` proves the feature.
        unsafe { [vdupq_n_f32(x); REGISTERS] }
    }

    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> Self::V {
        // SAFETY: `self` proves the feature; the caller guarantees the range at `p`.
        self.each(|i| unsafe { vld1q_f32(p.add(i * QUAD)) })
    }

    #[inline(always)]
    unsafe fn load_bf16(self, p: *const u16) -> Self::V {
        let mut v = self.splat(0.0);
        for i in 0..REGISTERS / 2 {
            // SAFETY: `self` proves the feature; the caller guarantees the range at `p`.
            unsafe {
                let eight = vld1q_u16(p.add(2 * i * QUAD));
                v[2 * i] = vreinterpretq_f32_u32(vshll_n_u16::<16>(vget_low_u16(eight)));
                v[2 * i + 1] = vreinterpretq_f32_u32(vshll_high_n_u16::<16>(eight));
            }
        }
        v
    }

    #[inline(always)]
    unsafe fn load_f16(self, p: *const u16) -> Self::V {
        let mut v = self.splat(0.0);
        for i in 0..REGISTERS / 2 {
            // SAFETY: `self` proves the feature; the caller guarantees the range at `p`.
            unsafe {
                let eight = vld1q_u16(p.add(2 * i * QUAD));
                v[2 * i] = widen_f16::<false>(eight);
                v[2 * i + 1] = widen_f16::<true>(eight);
            }
        }
        v
    }

    #[inline(always)]
    unsafe fn store(self, p: *mut f32, v: Self::V) {
        for i in 0..REGISTERS {
            // SAFETY: `self` proves the feature; the caller guarantees the range at `p`.
            unsafe { vst1q_f32(p.add(i * QUAD), v[i]) };
        }
    }

    #[inline(always)]
    fn add(self, a: Self::V, b: Self::V) -> Self::V {
        // SAFETY: `self` proves the feature.
        self.each(|i| unsafe { vaddq_f32(a[i], b[i]) })
    }

    #[inline(always)]
    fn mul(self, a: Self::V, b: Self::V) -> Self::V {
        // SAFETY: `self` proves the feature.
        self.each(|i| unsafe { vmulq_f32(a[i], b[i]) })
    }

    #[inline(always)]
    fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        // SAFETY: `self` proves the feature.
        self.each(|i| unsafe { vfmaq_f32(c[i], a[i], b[i]) })
    }

    /// As the trait says. One load has four elements of a row, and each product takes one of them: no register repeats an
    /// element.
    #[inline(always)]
    unsafe fn add_four_terms<const MR: usize, const NV: usize>(
        self,
        rows: TermRows<MR>,
        columns: Columns,
        i: usize,
        sums: &mut [[Self::V; NV]; MR],
    ) -> Columns {
        if rows.step != 1 {
            // SAFETY: same contract.
            return unsafe { self.add_one_by_one(rows, columns, i, sums) };
        }
        for first in (0..MR).step_by(ROWS) {
            // SAFETY: `self` proves the feature; the caller guarantees four terms of each row, and of the columns.
            unsafe {
                let mut fours = [vdupq_n_f32(0.0); ROWS];
                for r in first..MR.min(first + ROWS) {
                    fours[r - first] = vld1q_f32(rows.at[r].add(i));
                }
                add_element::<0, _, _, _>(&fours, columns, first, sums);
                add_element::<1, _, _, _>(&fours, columns, first, sums);
                add_element::<2, _, _, _>(&fours, columns, first, sums);
                add_element::<3, _, _, _>(&fours, columns, first, sums);
            }
            if MR > ROWS {
                // Later rows load the columns again: registers do not hold them beside the sums of more than `ROWS` rows.
                compiler_fence(Ordering::SeqCst);
            }
        }
        columns.from(FOUR)
    }
}
