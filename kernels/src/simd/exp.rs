//! `eˣ` for x ≤ 0, the only exponential a softmax needs.
//!
//! x = n·ln 2 + r with n = round(x / ln 2), so |r| ≤ ½ ln 2 and eˣ = 2ⁿ·eʳ.
//! - The reduction subtracts n·ln 2 in two parts (Cody and Waite): the first constant has nine significant bits, so
//!   its product with |n| ≤ 191 is exact even without FMA.
//! - eʳ is a polynomial of degree 6 with 1 + r fixed: a Remez exchange for the relative error in 50-digit arithmetic,
//!   then a search among the neighbouring `f32`s for the smallest error of the whole computation. It is summed as 1 +
//!   r·(1 + r·(…)), which takes the fewest operations that keep it below 1 ULP where a product is not rounded.
//! - 2ⁿ multiplies last and rounds once, so results below 2⁻¹²⁶ underflow gradually.
//!
//! Largest error over every non-positive f32: below 1 ULP on every backend (`tests/exhaustive/exp.rs` tries them all).
//! exp(−∞) is exactly 0, exp(0) exactly 1, NaN stays NaN. [`ForBf16`] is a shorter form, less exact, of
//! which the same file tests a sample.

use crate::simd::numbers::Constant;
#[cfg(doc)]
use crate::simd::numbers::LOWEST_EXPONENT;
use crate::simd::{LANES, SHIFT, Simd};

/// Lower limit of x, which keeps n at least [`LOWEST_EXPONENT`]. There 2ⁿ is the exact 0 that every result below e^−104 <
/// 2⁻¹⁵⁰ is rounded to: hidden keys do not underflow, for which some cores (Intel's) stop for 160 cycles.
const LOWEST: f32 = -132.4;
/// High part of ln 2 = `LN2_HIGH` + `LN2_LOW`: 355/512.
const LN2_HIGH: f32 = 355.0 / 512.0;
const LN2_LOW: f32 = -2.121_944_4e-4;

/// Coefficients of r² … r⁶; those of 1 and r are 1.
const C: [f32; 5] = [0.499_999_97, 0.166_665_32, 0.041_668_184, 0.008_368_527_5, 0.001_383_048];

/// Coefficients of r, r² and r³ in [`ForBf16`]; that of 1 is 1. Its largest relative error, 1.013·10⁻⁴, is the smallest
/// that such a polynomial can have.
const SHORT: [f32; 3] = [1.000_195_9, 0.504_130_4, 0.165_179_61];

/// Accuracy of an exponential.
pub(crate) trait Accuracy {
    /// Returns eˣ·2⁻ⁿ − 1 as a pair of factors, the second times [`Simd::FACTOR_UNIT`], for x that [`begin`] has limited and its n.
    fn factors<S: Simd, const N: usize>(s: S, x: [S::V; N], n: [S::V; N]) -> [(S::V, S::V); N];
}

/// Accuracy to less than 1 ULP.
pub(crate) struct Full;

/// Accuracy to less than 2⁻¹³ of a normal result, for weights that are rounded to the eight bits of bfloat16. Four operations
/// shorter: r is found in one step, and a polynomial of degree 3 is enough.
pub(crate) struct ForBf16;

/// Returns a constant in units of [`Simd::FACTOR_UNIT`].
const fn in_units<S: Simd>(x: f32) -> Constant {
    Constant::new(x * S::FACTOR_UNIT)
}

/// Exponentials of `N` vectors that are [begun](begin): n is known, r is not.
#[derive(Clone, Copy)]
pub(crate) struct Begun<V, const N: usize> {
    x: [V; N],
    /// n + SHIFT.
    shifted: [V; N],
}

/// Computes the first part of `eˣ`, x ≤ 0 or NaN in every lane: n. [`end`] computes the rest.
///
/// Both advance all vectors by one step at a time: a core with a small reorder buffer finds independent work in the next
/// vector. (Loops, not `map`: closures of the standard library's are not inlined into the vector code.)
#[inline(always)]
pub(crate) fn begin<S: Simd, const N: usize>(s: S, mut x: [S::V; N]) -> Begun<S::V, N> {
    let mut shifted = x;
    for i in 0..N {
        x[i] = s.at_least(LOWEST, x[i]);
        shifted[i] = s.fma_constant(x[i], s.splat(core::f32::consts::LOG2_E), const { &Constant::new(SHIFT) });
    }
    Begun { x, shifted: pin_order(s, shifted) }
}

/// Computes the rest of `eˣ`, after [`begin`].
#[inline(always)]
pub(crate) fn end<S: Simd, A: Accuracy, const N: usize>(s: S, begun: Begun<S::V, N>) -> [S::V; N] {
    let mut n = begun.shifted;
    for n in &mut n {
        *n = s.sub(*n, s.splat(SHIFT));
    }
    n = pin_order(s, n);
    let factors = A::factors(s, begun.x, n);
    let mut y = n;
    for i in 0..N {
        y[i] = s.one_plus_scaled(factors[i], n[i], begun.shifted[i]);
    }
    y
}

impl Accuracy for Full {
    #[inline(always)]
    fn factors<S: Simd, const N: usize>(s: S, x: [S::V; N], n: [S::V; N]) -> [(S::V, S::V); N] {
        let (mut near, mut rest, mut r) = (x, x, x);
        for i in 0..N {
            // Exact, and nearly all of r.
            near[i] = s.fma(n[i], s.splat(-LN2_HIGH), x[i]);
        }
        near = pin_order(s, near);
        for i in 0..N {
            rest[i] = s.mul(n[i], s.splat(-LN2_LOW));
            r[i] = if S::FUSED { s.fma(n[i], s.splat(-LN2_LOW), near[i]) } else { s.add(near[i], rest[i]) };
        }
        r = pin_order(s, r);
        let mut tail = [s.splat(const { C[4] * S::FACTOR_UNIT }); N];
        for c in [
            const { &in_units::<S>(C[3]) },
            const { &in_units::<S>(C[2]) },
            const { &in_units::<S>(C[1]) },
            const { &in_units::<S>(C[0]) },
        ] {
            for i in 0..N {
                tail[i] = s.fma_constant(tail[i], r[i], c);
            }
            tail = pin_order(s, tail);
        }
        let mut factors = [(s.splat(0.0), s.splat(S::FACTOR_UNIT)); N];
        for i in 0..N {
            factors[i] = if S::FUSED {
                (r[i], s.fma_constant(tail[i], r[i], const { &in_units::<S>(1.0) }))
            } else {
                // Where every product is rounded, keeping two parts of r apart to the end saves a quarter of an ULP.
                (s.add(near[i], s.fma(tail[i], s.mul(r[i], r[i]), rest[i])), s.splat(S::FACTOR_UNIT))
            };
        }
        factors
    }
}

impl Accuracy for ForBf16 {
    #[inline(always)]
    fn factors<S: Simd, const N: usize>(s: S, x: [S::V; N], n: [S::V; N]) -> [(S::V, S::V); N] {
        let (mut r, mut tail) = (x, x);
        for i in 0..N {
            r[i] = s.fma(n[i], s.splat(-core::f32::consts::LN_2), x[i]);
        }
        r = pin_order(s, r);
        for i in 0..N {
            let highest = s.splat(const { SHORT[2] * S::FACTOR_UNIT });
            tail[i] = s.fma_constant(r[i], highest, const { &in_units::<S>(SHORT[1]) });
        }
        tail = pin_order(s, tail);
        let mut factors = [(s.splat(0.0), s.splat(S::FACTOR_UNIT)); N];
        for i in 0..N {
            factors[i] = (r[i], s.fma_constant(tail[i], r[i], const { &in_units::<S>(SHORT[0]) }));
        }
        factors
    }
}

/// Returns the same vectors, and makes the compiler keep their interleaving: see [`Simd::pin_order`].
#[inline(always)]
fn pin_order<S: Simd, const N: usize>(s: S, mut v: [S::V; N]) -> [S::V; N] {
    if N > 1 {
        for v in &mut v {
            *v = s.pin_order(*v);
        }
    }
    v
}

/// Computes `eˣ`, x ≤ 0 or NaN in every lane.
#[inline(always)]
pub(crate) fn exp<S: Simd>(s: S, x: S::V) -> S::V {
    exp_as::<S, Full>(s, x)
}

/// Computes `eˣ` to an accuracy, x ≤ 0 or NaN in every lane.
#[inline(always)]
pub(crate) fn exp_as<S: Simd, A: Accuracy>(s: S, x: S::V) -> S::V {
    let [y] = end::<S, A, 1>(s, begin(s, [x]));
    y
}

/// Computes `eˣ − 1` without cancellation near 0, x ≤ 0 or NaN in every lane.
#[inline(always)]
pub(crate) fn exp_m1<S: Simd>(s: S, x: S::V) -> S::V {
    let Begun { x, shifted: [shifted] } = begin(s, [x]);
    let n = s.sub(shifted, s.splat(SHIFT));
    let [(a, mut b)] = Full::factors(s, x, [n]);
    if const { S::FACTOR_UNIT != 1.0 } {
        b = s.mul(b, s.splat(const { 1.0 / S::FACTOR_UNIT }));
    }
    let power = s.one_plus_scaled((s.splat(0.0), s.splat(0.0)), n, shifted);
    s.fma(s.mul(a, b), power, s.sub(power, s.splat(1.0)))
}

/// Runs `rounds` rounds of nothing but independent FMAs: the machine's peak for this instruction set, if it has them.
#[inline(always)]
pub(crate) fn fma_burst<S: Simd>(s: S, rounds: usize) -> (u64, f32) {
    // Enough chains to cover the latency of two units, few enough to stay in registers.
    const CHAINS: usize = 12;
    let chains = CHAINS.min((S::TILE_ROWS * S::TILE_VECS).max(3));
    let mut sums = [s.splat(0.0); CHAINS];
    let (a, b) = (s.splat(core::hint::black_box(0.999)), s.splat(core::hint::black_box(0.001)));
    for _ in 0..rounds {
        for sum in sums.iter_mut().take(chains) {
            *sum = s.fma(*sum, a, b);
        }
    }
    let total = sums.into_iter().fold(0.0, |t, v| t + s.reduce_sum(v));
    ((rounds * chains * LANES * 2) as u64, total)
}

/// Runs `rounds` rounds of a product and a sum, no product waiting for another: the peak of machines without FMA.
#[inline(always)]
pub(crate) fn mul_add_burst<S: Simd>(s: S, rounds: usize) -> (u64, f32) {
    // Three vectors are twelve SSE registers of running sums; factors come from the first-level cache.
    const VECS: usize = 3;
    let factors = core::hint::black_box([0.001f32; LANES * VECS]);
    let mut sums = [s.splat(0.0); VECS];
    for _ in 0..rounds {
        let factor = s.splat(core::hint::black_box(0.5));
        for (sum, chunk) in sums.iter_mut().zip(factors.as_chunks::<LANES>().0) {
            // SAFETY: a chunk is 16 floats.
            *sum = s.fma(unsafe { s.load(chunk.as_ptr()) }, factor, *sum);
        }
    }
    let total = sums.into_iter().fold(0.0, |t, v| t + s.reduce_sum(v));
    ((rounds * VECS * LANES * 2) as u64, total)
}
