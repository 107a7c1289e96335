//! Layer norm and RMS norm: normalisation of rows.
//!
//! ```text
//! y = (x − mean) / √(variance + eps) · gain + bias          layer norm
//! y = x / √(mean of x² + eps) · gain                        RMS norm
//! ```
//!
//! A row is passed over three times, in first-level cache: for the mean, for the squares about it, and to be written.
//! The squares are taken about the rounded mean; the same pass measures and corrects its error (the corrected
//! two-pass algorithm: Chan, Golub, LeVeque 1983), so a mean much larger than the spread costs no accuracy.
//!
//! Sums have two chains of sixteen lanes, vectors added to them in turn, then the tree of `reduce_sum`; the few numbers
//! of a row are finished in f64. The order follows from the width alone: the bits are the same on every FMA instruction
//! set.

use crate::simd::isa::Isa;
use crate::simd::lanes::{load, load_part, store, store_part};
use crate::simd::{LANES, Simd};

/// Origin from which a row is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Center {
    /// Mean of the row: layer norm.
    Mean,
    /// Zero: RMS norm.
    Zero,
}

/// Norm of rows of one width, that of the gain.
#[derive(Debug, Clone, Copy)]
pub struct Norm<'a> {
    /// Origin from which rows are measured.
    pub center: Center,
    /// Factor for each column.
    pub gain: &'a [f32],
    /// Summand for each column.
    pub bias: Option<&'a [f32]>,
    /// Summand of the variance, or of the mean of the squares.
    pub eps: f32,
}

impl Norm<'_> {
    /// Writes the norm of each row of `x`.
    ///
    /// # Panics
    /// If rows are not whole, `out` differs in length from `x`, or the bias is not as wide as the gain.
    pub fn apply(&self, isa: Isa, x: &[f32], out: &mut [f32]) {
        self.check(x.len(), out.len());
        dispatch!(isa, |s| s.vectorize(
            #[inline(always)]
            || norm(s, self, NormInput::Plain(x), out),
        ));
    }

    /// Computes `x ← x + add`, then writes the norm of each row of `x`.
    ///
    /// # Panics
    /// As for [`Self::apply`], or if `add` differs in length from `x`.
    pub fn add_and_apply(&self, isa: Isa, x: &mut [f32], add: &[f32], out: &mut [f32]) {
        self.check(x.len(), out.len());
        assert_eq!(x.len(), add.len(), "as much is added as there is");
        dispatch!(isa, |s| s.vectorize(
            #[inline(always)]
            || norm(s, self, NormInput::Sum(x, add), out),
        ));
    }

    fn check(&self, x: usize, out: usize) {
        let width = self.gain.len();
        assert!(width > 0 && x.is_multiple_of(width) && x == out, "whole rows, inputs and outputs of one length");
        assert!(self.bias.is_none_or(|bias| bias.len() == width), "a bias for each column");
    }
}

/// Input rows of a norm.
pub(crate) enum NormInput<'a> {
    Plain(&'a [f32]),
    /// Two summands: the second is added to the first, and the sum is normed.
    Sum(&'a mut [f32], &'a [f32]),
}

/// Writes the norm of every row.
#[inline(always)]
pub(crate) fn norm<S: Simd>(s: S, norm: &Norm<'_>, rows: NormInput<'_>, out: &mut [f32]) {
    let width = norm.gain.len();
    let out = out.chunks_exact_mut(width);
    match rows {
        NormInput::Plain(x) => {
            for (x, out) in x.chunks_exact(width).zip(out) {
                norm_row(s, norm, x, out);
            }
        }
        NormInput::Sum(x, add) => {
            for ((x, add), out) in x.chunks_exact_mut(width).zip(add.chunks_exact(width)).zip(out) {
                add_row(s, x, add);
                norm_row(s, norm, x, out);
            }
        }
    }
}

/// Computes `x ← x + add`.
#[inline(always)]
fn add_row<S: Simd>(s: S, x: &mut [f32], add: &[f32]) {
    let ((xs, x), (adds, add)) = (x.as_chunks_mut::<LANES>(), add.as_chunks::<LANES>());
    for (x, add) in xs.iter_mut().zip(adds) {
        store(s, x, s.add(load(s, x), load(s, add)));
    }
    if !x.is_empty() {
        store_part(s, x, s.add(load_part(s, x, 0.0), load_part(s, add, 0.0)));
    }
}

#[inline(always)]
fn norm_row<S: Simd>(s: S, norm: &Norm<'_>, x: &[f32], out: &mut [f32]) {
    let count = x.len() as f64;
    let mean = match norm.center {
        Center::Zero => 0.0,
        Center::Mean => {
            let [sum] = totals(
                s,
                (x, 0.0),
                #[inline(always)]
                |[sum], x| [s.add(sum, x)],
            );
            (sum / count) as f32
        }
    };
    let origin = s.splat(mean);
    // The row is filled up with its mean, which adds nothing.
    let [off, squares] = totals(
        s,
        (x, mean),
        #[inline(always)]
        |[off, squares], x| {
            let d = s.sub(x, origin);
            [s.add(off, d), s.fma(d, d, squares)]
        },
    );
    // Rounding error of the mean. The squares about the true mean are smaller by its square.
    let shift = if norm.center == Center::Mean { off / count } else { 0.0 };
    let variance = squares / count - shift * shift;
    // A variance is below 0 by rounding alone. Written so that NaN stays.
    let variance = if variance < 0.0 { 0.0 } else { variance };
    let factor = s.splat((1.0 / (variance + f64::from(norm.eps)).sqrt()) as f32);
    let shift = s.splat(shift as f32);
    write_row(
        s,
        norm,
        x,
        out,
        #[inline(always)]
        |x| s.mul(s.sub(s.sub(x, origin), shift), factor),
    );
}

/// Computes `out ← f(x) · gain + bias`.
#[inline(always)]
fn write_row<S: Simd>(s: S, norm: &Norm<'_>, x: &[f32], out: &mut [f32], f: impl Fn(S::V) -> S::V) {
    let (whole, rest) = out.as_chunks_mut::<LANES>();
    let ((xs, x), (gains, gain)) = (x.as_chunks::<LANES>(), norm.gain.as_chunks::<LANES>());
    let (biases, bias) = norm.bias.unwrap_or(&[]).as_chunks::<LANES>();
    for (n, ((out, x), gain)) in whole.iter_mut().zip(xs).zip(gains).enumerate() {
        let bias = biases.get(n).unwrap_or(&[0.0; LANES]);
        store(s, out, s.fma(f(load(s, x)), load(s, gain), load(s, bias)));
    }
    if !rest.is_empty() {
        let (x, gain, bias) = (load_part(s, x, 0.0), load_part(s, gain, 0.0), load_part(s, bias, 0.0));
        store_part(s, rest, s.fma(f(x), gain, bias));
    }
}

/// Computes `K` sums over a row, which is filled up to whole vectors with `fill`: `add` adds a vector to the sums.
#[inline(always)]
fn totals<S: Simd, const K: usize>(
    s: S,
    (x, fill): (&[f32], f32),
    add: impl Fn([S::V; K], S::V) -> [S::V; K],
) -> [f64; K] {
    // Two chains: at K = 2, eight of the sixteen registers that AVX2 has.
    let (mut even, mut odd) = ([s.splat(0.0); K], [s.splat(0.0); K]);
    let (vectors, rest) = x.as_chunks::<LANES>();
    let (pairs, last) = vectors.as_chunks::<2>();
    for [a, b] in pairs {
        even = add(even, load(s, a));
        odd = add(odd, load(s, b));
    }
    for a in last {
        even = add(even, load(s, a));
    }
    if !rest.is_empty() {
        odd = add(odd, load_part(s, rest, fill));
    }
    let mut totals = [0.0; K];
    for (total, (&even, &odd)) in totals.iter_mut().zip(even.iter().zip(&odd)) {
        *total = f64::from(s.reduce_sum(s.add(even, odd)));
    }
    totals
}
