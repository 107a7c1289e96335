//! Activation functions: the elementwise functions between the two projections of a feed-forward layer.
//!
//! Each of them but ReLU is x·w(x) with a weight w that goes from 0 to 1, w(x) + w(−x) = 1. So f(x) = max(x, 0) −
//! |x|·w(−|x|), where the tail w(−|x|) comes from an exponential of something non-positive: [`exp`] is the only one
//! needed, nothing overflows, nothing cancels, and the limits at ±∞ are right, x and 0. NaN stays NaN.
//!
//! - GELU: w is the normal distribution's Φ. With a = |x|, Φ(−a) = exp(−a²/2)·P(q)/(a + k), q = (a − k)/(a + k), where
//!   P is a polynomial of degree 8: a Remez exchange for the relative error on a in 0 ..= 15 in 40-digit arithmetic,
//!   and the k that made the error least (the substitution is that of Shepherd and Laframboise 1981 for erfc).
//! - SiLU: w is the sigmoid, and w(−a) = e/(1 + e) with e = exp(−a).
//! - The tanh form of GELU, ½x(1 + tanh u), is x·σ(2u): computed as SiLU is, without a hyperbolic tangent.
//!
//! Errors beyond the rounding of the result: below 7e-8, absolute, for all of f32 (`layers/tests/layers/activations.rs`).

use crate::simd::exp::exp;
use crate::simd::isa::Isa;
use crate::simd::lanes::{load, load_part, store, store_part};
use crate::simd::{LANES, Simd};

/// Function applied to each number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum Activation {
    /// x.
    #[default]
    Identity,
    /// max(x, 0).
    Relu,
    /// x·Φ(x), Φ the distribution function of the normal distribution (Hendrycks and Gimpel 2016, arXiv:1606.08415):
    /// `gelu` in BERT, PyTorch's default.
    Gelu,
    /// ½x·(1 + tanh(√(2/π)·(x + 0.044715·x³))), the approximation of GELU from the same paper: `gelu_new` in GPT-2.
    GeluTanh,
    /// x·σ(x) = x / (1 + e⁻ˣ), also called swish (Elfwing, Uchibe, Doya 2017, arXiv:1702.03118): Llama.
    Silu,
}

impl Activation {
    /// Applies the function to every number of `xs`, in place, with the steps of `isa`.
    pub fn apply(self, isa: Isa, xs: &mut [f32]) {
        dispatch!(isa, |s| s.vectorize(
            #[inline(always)]
            || activate_slice(s, self, xs),
        ))
    }

    /// Computes `gate ← f(gate)·up`, number by number: gated units (Shazeer 2020, arXiv:2002.05202), SwiGLU with
    /// [`Self::Silu`].
    ///
    /// # Panics
    /// If the slices differ in length.
    pub fn gate(self, isa: Isa, gate: &mut [f32], up: &[f32]) {
        assert_eq!(gate.len(), up.len(), "a gate for each number");
        dispatch!(isa, |s| s.vectorize(
            #[inline(always)]
            || self::gate(s, self, gate, up),
        ))
    }
}

/// Calls `each(s, arguments, function)` with the function of an [`Activation`], so that the choice is made once and not
/// in the loop.
macro_rules! with_function {
    ($s:expr, $activation:expr, $each:ident($($argument:expr),*)) => {
        match $activation {
            Activation::Identity => $each($s, $($argument),*, #[inline(always)] |x| x),
            Activation::Relu => $each($s, $($argument),*, #[inline(always)] |x| relu($s, x)),
            Activation::Gelu => $each($s, $($argument),*, #[inline(always)] |x| gelu($s, x)),
            Activation::GeluTanh => $each($s, $($argument),*, #[inline(always)] |x| gelu_tanh($s, x)),
            Activation::Silu => $each($s, $($argument),*, #[inline(always)] |x| silu($s, x)),
        }
    };
}

/// Rows of a result matrix, or of a part of its columns.
pub(crate) struct Matrix {
    pub(crate) first: *mut f32,
    /// Floats from one row to the next.
    pub(crate) stride: usize,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
}

/// Applies the function to every element of the rows.
///
/// # Safety
/// The rows, `cols` floats each, are the caller's to read and write.
#[inline(always)]
pub(crate) unsafe fn activate<S: Simd>(s: S, activation: Activation, a: Matrix) {
    if activation != Activation::Identity {
        // SAFETY: the caller guarantees exclusive access to the rows.
        unsafe { with_function!(s, activation, each(a)) }
    }
}

/// Applies `f` to every element of the rows.
///
/// # Safety
/// Same contract as [`activate`].
#[inline(always)]
unsafe fn each<S: Simd>(s: S, a: Matrix, f: impl Fn(S::V) -> S::V) {
    debug_assert!(a.rows <= 1 || a.stride >= a.cols, "rows overlap");
    for row in 0..a.rows {
        // SAFETY: one of the rows, `cols` floats that the caller guarantees exclusive access to.
        let row = unsafe { core::slice::from_raw_parts_mut(a.first.add(row * a.stride), a.cols) };
        let (whole, rest) = row.as_chunks_mut::<LANES>();
        for lanes in whole {
            store(s, lanes, f(load(s, lanes)));
        }
        if !rest.is_empty() {
            store_part(s, rest, f(load_part(s, rest, 0.0)));
        }
    }
}

/// Applies [`activate`] to a slice.
#[inline(always)]
pub(crate) fn activate_slice<S: Simd>(s: S, activation: Activation, xs: &mut [f32]) {
    let matrix = Matrix { first: xs.as_mut_ptr(), stride: xs.len(), rows: 1, cols: xs.len() };
    // SAFETY: one row, the slice, which is borrowed exclusively.
    unsafe { activate(s, activation, matrix) }
}

/// Computes `gate ← f(gate)·up`.
#[inline(always)]
pub(crate) fn gate<S: Simd>(s: S, activation: Activation, gate: &mut [f32], up: &[f32]) {
    with_function!(s, activation, gate_each(gate, up));
}

#[inline(always)]
fn gate_each<S: Simd>(s: S, gate: &mut [f32], up: &[f32], f: impl Fn(S::V) -> S::V) {
    let ((gates, gate), (ups, up)) = (gate.as_chunks_mut::<LANES>(), up.as_chunks::<LANES>());
    for (gate, up) in gates.iter_mut().zip(ups) {
        store(s, gate, s.mul(f(load(s, gate)), load(s, up)));
    }
    if !gate.is_empty() {
        store_part(s, gate, s.mul(f(load_part(s, gate, 0.0)), load_part(s, up, 0.0)));
    }
}

#[inline(always)]
fn relu<S: Simd>(s: S, x: S::V) -> S::V {
    // The constant comes first: `max` returns its second operand where that is NaN.
    s.max(s.splat(0.0), x)
}

/// Returns −|x|, but no less than `lowest`; NaN stays.
#[inline(always)]
fn minus_size<S: Simd>(s: S, x: S::V, lowest: f32) -> S::V {
    let minus = s.sub(s.splat(0.0), x);
    let size = s.max(x, minus);
    s.max(s.splat(lowest), s.sub(s.splat(0.0), size))
}

/// Parameter k of the substitution: exact in eight bits, as is 2k.
const K: f32 = 185.0 / 64.0;
/// Coefficients of P, from q⁰ on: relative error of Φ(−a) below 4.6e-8.
const P: [f32; 9] = [
    0.724_905_97,
    -0.494_670_96,
    0.209_531_58,
    -0.033_359_025,
    -0.013_803_003,
    0.005_521_871,
    0.001_793_535_4,
    -0.000_696_680_74,
    -0.000_320_337_95,
];
/// Lower limit of −|x| for GELU: Φ(−15)·15 is 5e-50, which is 0 in f32. Keeps ∞ out of products with 0.
const NO_TAIL: f32 = -15.0;

/// Returns x·Φ(x).
#[inline(always)]
fn gelu<S: Simd>(s: S, x: S::V) -> S::V {
    let one = s.splat(1.0);
    let minus = minus_size(s, x, NO_TAIL);
    let over = s.div(one, s.sub(s.splat(K), minus));
    let q = s.fma(over, s.splat(-2.0 * K), one);
    let mut p = s.splat(P[8]);
    for c in [P[7], P[6], P[5], P[4], P[3], P[2], P[1], P[0]] {
        p = s.fma(p, q, s.splat(c));
    }
    let bell = exp(s, s.mul(s.mul(minus, s.splat(-0.5)), minus));
    let tail = s.mul(s.mul(over, p), bell);
    s.fma(minus, tail, relu(s, x))
}

/// Lower limit of exponents: e^−104 is 0 in f32. Keeps ∞ out of products with 0.
const NO_EXP: f32 = -104.0;

/// Returns x·σ(z), where z has the sign of x and is no smaller in size.
#[inline(always)]
fn times_sigmoid<S: Simd>(s: S, x: S::V, z: S::V) -> S::V {
    let e = exp(s, minus_size(s, z, NO_EXP));
    let tail = s.div(e, s.add(s.splat(1.0), e));
    s.fma(minus_size(s, x, NO_EXP), tail, relu(s, x))
}

/// Returns x·σ(x).
#[inline(always)]
fn silu<S: Simd>(s: S, x: S::V) -> S::V {
    times_sigmoid(s, x, x)
}

/// Returns x·σ(2u), u = √(2/π)·(x + 0.044715·x³).
#[inline(always)]
fn gelu_tanh<S: Simd>(s: S, x: S::V) -> S::V {
    const LINEAR: f64 = 2.0 * 0.797_884_560_802_865_4;
    const CUBIC: f64 = LINEAR * 0.044_715;
    let slope = s.fma(s.mul(x, x), s.splat(CUBIC as f32), s.splat(LINEAR as f32));
    times_sigmoid(s, x, s.mul(x, slope))
}
