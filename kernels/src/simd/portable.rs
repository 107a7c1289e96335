//! The floor that every machine has, on [`wide`]: SSE2 on x86-64, NEON on AArch64, simd128 on wasm, plain code
//! elsewhere. `wide` selects instructions when the crate is compiled, so with default flags on x86-64 this is
//! 128-bit and has no FMA; the wider x86 backends are ours and chosen at run time.

use super::{LANES, Simd};
use wide::{f32x8, i32x8};

/// Needs no proof: every machine can run it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Portable;

/// The low eight lanes, then the high eight.
type Pair = [f32x8; 2];

/// The second factor of [`Simd::scale_pow2`]: brings 2^(n + 64), always normal, down to 2ⁿ.
pub(crate) const TWO_TO_MINUS_64: f32 = f32::from_bits((127 - 64) << 23);

#[inline(always)]
fn each(f: impl Fn(usize) -> f32x8) -> Pair {
    [f(0), f(1)]
}

/// `a > b ? a : b`, NaN included.
#[inline(always)]
fn greater(a: f32x8, b: f32x8) -> f32x8 {
    if cfg!(target_feature = "sse") {
        // The machine's own rule for NaN is the one wanted.
        a.fast_max(b)
    } else {
        a.simd_gt(b).bitselect(a, b)
    }
}

impl Simd for Portable {
    type V = Pair;

    // In SSE2 terms: 3 × 4 accumulators, 3 broadcasts, 1 product on its way to a sum: 16 of 16 registers, the keys being
    // read as memory operands.
    const TILE_ROWS: usize = 2;
    const TILE_VECS: usize = 1;

    #[inline(always)]
    fn vectorize<R>(self, f: impl FnOnce() -> R) -> R {
        f()
    }

    #[inline(always)]
    fn splat(self, x: f32) -> Pair {
        [f32x8::splat(x); 2]
    }

    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> Pair {
        // SAFETY: the caller vouches for `p..p + 16`.
        each(|i| f32x8::new(unsafe { p.cast::<[f32; 8]>().add(i).read_unaligned() }))
    }

    #[inline(always)]
    unsafe fn store(self, p: *mut f32, v: Pair) {
        for (i, half) in v.into_iter().enumerate() {
            // SAFETY: the caller vouches for `p..p + 16`.
            unsafe { p.cast::<[f32; 8]>().add(i).write_unaligned(half.to_array()) }
        }
    }

    #[inline(always)]
    unsafe fn load_u8(self, p: *const u8) -> Pair {
        // SAFETY: the caller vouches for `p..p + 16`.
        let bytes = unsafe { p.cast::<[u8; LANES]>().read_unaligned() };
        each(|i| f32x8::new(core::array::from_fn(|lane| bytes[8 * i + lane] as f32)))
    }

    #[inline(always)]
    fn add(self, a: Pair, b: Pair) -> Pair {
        each(|i| a[i] + b[i])
    }

    #[inline(always)]
    fn sub(self, a: Pair, b: Pair) -> Pair {
        each(|i| a[i] - b[i])
    }

    #[inline(always)]
    fn mul(self, a: Pair, b: Pair) -> Pair {
        each(|i| a[i] * b[i])
    }

    #[inline(always)]
    fn div(self, a: Pair, b: Pair) -> Pair {
        each(|i| a[i] / b[i])
    }

    #[inline(always)]
    fn fma(self, a: Pair, b: Pair, c: Pair) -> Pair {
        each(|i| a[i].mul_add(b[i], c[i]))
    }

    #[inline(always)]
    fn max(self, a: Pair, b: Pair) -> Pair {
        each(|i| greater(a[i], b[i]))
    }

    #[inline(always)]
    fn select_eq(self, a: Pair, b: Pair, then: Pair, otherwise: Pair) -> Pair {
        each(|i| a[i].simd_eq(b[i]).bitselect(then[i], otherwise[i]))
    }

    #[inline(always)]
    fn scale_pow2(self, p: Pair, n: Pair) -> Pair {
        // As in the AVX2 backend: a normal power of two from an exponent field, then one factor that may round.
        each(|i| {
            let field: i32x8 = (n[i] + f32x8::splat(191.0)).fast_round_int();
            // SAFETY: both are 32 bytes, and every bit pattern is a valid f32.
            let power: f32x8 = unsafe { core::mem::transmute::<i32x8, f32x8>(field << 23) };
            p[i] * power * f32x8::splat(TWO_TO_MINUS_64)
        })
    }

    #[inline(always)]
    fn reduce_max(self, v: Pair) -> f32 {
        let eight = greater(v[0], v[1]).to_array();
        let four: [f32; 4] = core::array::from_fn(|i| if eight[i] > eight[i + 4] { eight[i] } else { eight[i + 4] });
        let two: [f32; 2] = core::array::from_fn(|i| if four[i] > four[i + 2] { four[i] } else { four[i + 2] });
        if two[0] > two[1] { two[0] } else { two[1] }
    }

    #[inline(always)]
    fn reduce_sum(self, v: Pair) -> f32 {
        let eight = (v[0] + v[1]).to_array();
        let four: [f32; 4] = core::array::from_fn(|i| eight[i] + eight[i + 4]);
        (four[0] + four[2]) + (four[1] + four[3])
    }

    #[inline(always)]
    fn transpose(self, r: [Pair; LANES]) -> [Pair; LANES] {
        // Through memory: `wide`'s own transposes are scalar on SSE2, and dearer.
        let rows = r.map(|row| row.map(f32x8::to_array));
        core::array::from_fn(|i| each(|half| f32x8::new(core::array::from_fn(|j| rows[8 * half + j][i / 8][i % 8]))))
    }
}
