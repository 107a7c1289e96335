//! The floor that every machine has, on [`wide`]: SSE2 on x86-64, NEON on AArch64, simd128 on wasm, plain code
//! elsewhere. `wide` selects instructions when the crate is compiled, so with default flags on x86-64 this is
//! 128-bit and has no FMA; the wider x86 backends are ours and chosen at run time.

use super::{Dot4, Dot4Work, LANES, Query4, Simd, TWO_TO_MINUS_64};
use wide::{f32x4, i16x8, i32x4};

/// Needs no proof: every machine can run it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Portable;

/// Four lanes after four lanes.
type Quad = [f32x4; 4];

#[inline(always)]
fn each(f: impl Fn(usize) -> f32x4) -> Quad {
    [f(0), f(1), f(2), f(3)]
}

/// `a > b ? a : b`, NaN included.
#[inline(always)]
fn greater(a: f32x4, b: f32x4) -> f32x4 {
    if cfg!(target_feature = "sse") {
        // The machine's own rule for NaN is the one wanted.
        a.fast_max(b)
    } else {
        a.simd_gt(b).bitselect(a, b)
    }
}

impl Simd for Portable {
    type V = Quad;

    // In SSE2 terms: 3 × 4 accumulators, 3 broadcasts, 1 product on its way to a sum: 16 of 16 registers, the keys being
    // read as memory operands.
    const TILE_ROWS: usize = 2;
    const TILE_VECS: usize = 1;
    const DOT_VECS: usize = 1;
    const CHAINS: usize = 1;

    const FUSED: bool = cfg!(any(target_feature = "fma", all(target_arch = "aarch64", target_feature = "neon")));

    #[inline(always)]
    fn vectorize<R>(self, f: impl FnOnce() -> R) -> R {
        f()
    }

    #[inline(always)]
    fn with_dot4<W: Dot4Work>(self, work: W) -> W::Output {
        self.vectorize(
            #[inline(always)]
            || work.run(self),
        )
    }

    #[inline(always)]
    fn splat(self, x: f32) -> Quad {
        [f32x4::splat(x); 4]
    }

    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> Quad {
        // SAFETY: the caller vouches for `p..p + 16`.
        each(|i| f32x4::new(unsafe { p.cast::<[f32; 4]>().add(i).read_unaligned() }))
    }

    #[inline(always)]
    unsafe fn load_i8(self, p: *const i8) -> Quad {
        // SAFETY: the caller vouches for `p..p + 16`.
        let bytes = unsafe { p.cast::<[[i8; 4]; 4]>().read_unaligned() };
        each(|i| f32x4::new(bytes[i].map(f32::from)))
    }

    #[inline(always)]
    unsafe fn store(self, p: *mut f32, v: Quad) {
        for (i, part) in v.into_iter().enumerate() {
            // SAFETY: the caller vouches for `p..p + 16`.
            unsafe { p.cast::<[f32; 4]>().add(i).write_unaligned(part.to_array()) }
        }
    }

    #[inline(always)]
    unsafe fn select_bytes(self, p: *const u8, zero: Quad, other: Quad) -> Quad {
        // SAFETY: the caller vouches for `p..p + 16`.
        let bytes = unsafe { p.cast::<[u8; LANES]>().read_unaligned() };
        each(|i| {
            let lanes = i32x4::new(core::array::from_fn(|lane| -i32::from(bytes[4 * i + lane] == 0)));
            // SAFETY: both are 16 bytes, and every bit pattern is a valid f32.
            let is_zero = unsafe { core::mem::transmute::<i32x4, f32x4>(lanes) };
            is_zero.bitselect(zero[i], other[i])
        })
    }

    #[inline(always)]
    fn prefetch(self, _: *const f32) {}

    #[inline(always)]
    fn prefetch_far(self, _: *const f32) {}

    #[inline(always)]
    fn add(self, a: Quad, b: Quad) -> Quad {
        each(|i| a[i] + b[i])
    }

    #[inline(always)]
    fn sub(self, a: Quad, b: Quad) -> Quad {
        each(|i| a[i] - b[i])
    }

    #[inline(always)]
    fn mul(self, a: Quad, b: Quad) -> Quad {
        each(|i| a[i] * b[i])
    }

    #[inline(always)]
    fn div(self, a: Quad, b: Quad) -> Quad {
        each(|i| a[i] / b[i])
    }

    #[inline(always)]
    fn fma(self, a: Quad, b: Quad, c: Quad) -> Quad {
        each(|i| a[i].mul_add(b[i], c[i]))
    }

    #[inline(always)]
    fn max(self, a: Quad, b: Quad) -> Quad {
        each(|i| greater(a[i], b[i]))
    }

    #[inline(always)]
    fn select_eq(self, a: Quad, b: Quad, then: Quad, otherwise: Quad) -> Quad {
        each(|i| a[i].simd_eq(b[i]).bitselect(then[i], otherwise[i]))
    }

    #[inline(always)]
    fn one_plus_scaled(self, (a, b): (Quad, Quad), _: Quad, shifted: Quad) -> Quad {
        // As in the AVX2 backend.
        let small = f32x4::splat(TWO_TO_MINUS_64);
        each(|i| {
            // SAFETY: both are 16 bytes, and every bit pattern is a valid i32.
            let bits = unsafe { core::mem::transmute::<f32x4, i32x4>(shifted[i]) };
            // SAFETY: both are 16 bytes, and every bit pattern is a valid f32.
            let power = unsafe { core::mem::transmute::<i32x4, f32x4>(bits << 23) };
            (a[i] * small).mul_add(b[i], small) * power
        })
    }

    #[inline(always)]
    fn reduce_max(self, v: Quad) -> f32 {
        let four = greater(greater(v[0], v[2]), greater(v[1], v[3])).to_array();
        let two: [f32; 2] = core::array::from_fn(|i| if four[i] > four[i + 2] { four[i] } else { four[i + 2] });
        if two[0] > two[1] { two[0] } else { two[1] }
    }

    #[inline(always)]
    fn reduce_sum(self, v: Quad) -> f32 {
        // Lanes 8 apart, then 4, 2, 1.
        let four = ((v[0] + v[2]) + (v[1] + v[3])).to_array();
        (four[0] + four[2]) + (four[1] + four[3])
    }

    #[inline(always)]
    unsafe fn transpose(self, rows: [*const f32; LANES], out: *mut f32) {
        for top in (0..LANES).step_by(4) {
            for left in (0..LANES).step_by(4) {
                // SAFETY: four floats of a row, and four of `out`, both inside the sixteen times sixteen.
                unsafe {
                    let part = |r: usize| f32x4::new(rows[top + r].add(left).cast::<[f32; 4]>().read_unaligned());
                    let block = f32x4::transpose([part(0), part(1), part(2), part(3)]);
                    for (i, row) in block.into_iter().enumerate() {
                        out.add((left + i) * LANES + top).cast::<[f32; 4]>().write_unaligned(row.to_array());
                    }
                }
            }
        }
    }
}

impl Dot4 for Portable {
    // In SSE2 terms: 2 × 4 sums, 2 keys at a time, 2 × 2 broadcasts, 1 product: 15 of 16 registers.
    const DOT4_ROWS: usize = 2;
    type Sums = [i32x4; 4];
    /// Elements 0 and 2 of each key in sixteen bits, then 1 and 3; four keys after four keys.
    type Keys = [[i16x8; 2]; 4];

    #[inline(always)]
    fn start(self, _: i32) -> Self::Sums {
        [i32x4::splat(0); 4]
    }

    #[inline(always)]
    unsafe fn keys(self, p: *const i8) -> Self::Keys {
        // SAFETY: the caller vouches for `p..p + 64`.
        let bytes = unsafe { p.cast::<[[[u8; 2]; 8]; 4]>().read_unaligned() };
        bytes.map(|bytes| {
            let pairs = i16x8::new(bytes.map(i16::from_le_bytes));
            [(pairs << 8) >> 8, pairs >> 8]
        })
    }

    #[inline(always)]
    fn dot4(self, mut sums: Self::Sums, q: &Query4, keys: Self::Keys) -> Self::Sums {
        let (even, odd) = (pairs(q.even), pairs(q.odd));
        for (sum, keys) in sums.iter_mut().zip(keys) {
            *sum = *sum + keys[0].dot(even) + keys[1].dot(odd);
        }
        sums
    }

    #[inline(always)]
    fn to_f32(self, sums: Self::Sums) -> Quad {
        each(|i| sums[i].round_float())
    }
}

/// The lower half of `word` in even lanes, the upper in odd ones.
#[inline(always)]
fn pairs(word: i32) -> i16x8 {
    let (low, high) = (word as i16, (word >> 16) as i16);
    i16x8::new([low, high, low, high, low, high, low, high])
}
