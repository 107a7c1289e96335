//! Attention in `f64`, one row at a time, each number with how far off `f32` may be: every rounding on the way counted,
//! whichever way it goes.

use super::array::Array;
use super::case::Case;
use core::ops::Range;
use sdpa::{Dtype, Int4, Precision};

/// What a number is, and how far off it may be; ∞ if anything will do, where `f32` may overflow and `f64` does not.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Num {
    pub(crate) x: f64,
    pub(crate) e: f64,
}

/// Half a unit in the last place of 1.
const U: f64 = 1.0 / 16_777_216.0;
/// What is lost where numbers become subnormal, or 0.
const TINY: f64 = 1e-44;
const TINY_WEIGHT: f64 = 2e-37;
/// Largest error of a sum of weights that are rounded to bfloat16, relative.
const ROUNDED_SUM: f64 = 0.0041;
const HIDDEN: Num = Num::exactly(f64::NEG_INFINITY);
const NAN: Num = Num::exactly(f64::NAN);
const ANY: Num = Num { x: 0.0, e: f64::INFINITY };

impl Num {
    const fn exactly(x: f64) -> Self {
        Self { x, e: 0.0 }
    }

    /// A result that rounds once, of operands that were off so that it is off by `e`.
    fn rounded(x: f64, e: f64) -> Self {
        if x.is_nan() || x.is_infinite() && e.is_finite() {
            Self::exactly(x)
        } else if x.abs() + e > f32::MAX.into() {
            ANY
        } else {
            Self { x, e: e + U * x.abs() + TINY }
        }
    }

    fn is_any(self) -> bool {
        self.e == f64::INFINITY
    }
}

/// What a call gives, in the shapes of its outputs.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) out: Array<Num>,
    pub(crate) lse: Array<Num>,
    pub(crate) points: [Array<Num>; 4],
    pub(crate) mass: Array<Num>,
}

/// The numbers of a case, as its source holds them.
#[derive(Debug)]
pub(crate) struct Oracle<'a> {
    pub(crate) case: &'a Case,
    pub(crate) q: Array<f64>,
    pub(crate) k: Array<f64>,
    pub(crate) v: Array<f64>,
    /// Code of the numbers, if they are integers times scales.
    pub(crate) code: Option<Code>,
}

/// Code of numbers that are integers times scales.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Code {
    Bytes,
    Bits(Int4),
}

impl Code {
    /// The columns that share a scale with this one.
    fn columns(self, column: usize, all: usize) -> Range<usize> {
        match self {
            Self::Bytes => 0..all,
            Self::Bits(_) => column / 32 * 32..all.min((column / 32 + 1) * 32),
        }
    }

    /// The largest that the scale of an element of a row can be.
    pub(crate) fn scale<T: Copy + Into<f64>>(self, row: &[T], column: usize) -> f32 {
        let (columns, zero) = (self.columns(column, row.len()), [f64::INFINITY, f64::NEG_INFINITY]);
        let [low, high] = row[columns].iter().fold(zero, |[low, high], &x| [low.min(x.into()), high.max(x.into())]);
        let half = match self {
            Self::Bits(Int4::Centred) => (high - low) / 2.0 + 2e-3 * high.max(-low),
            _ => high.max(-low),
        };
        match self {
            Self::Bytes => (half / 127.0) as f32,
            // As `f16` a scale is rounded up, next to 0 to a multiple of 2⁻²⁴.
            Self::Bits(_) => (half / 6.99) as f32 + 2f32.powi(-24),
        }
    }

    /// Error of the smallest numbers, where scales are next to 0.
    pub(crate) fn least(self) -> f64 {
        if let Self::Bytes = self { 1e-38 } else { 1.2e-7 }
    }

    /// The largest integer.
    fn most(self) -> f64 {
        if let Self::Bytes = self { 127.0 } else { 7.0 }
    }
}

impl<'a> Oracle<'a> {
    pub(crate) fn of(case: &'a Case) -> Self {
        let [q, k, v] = [&case.q, &case.k, &case.v]
            .map(|x| Array { shape: x.shape, data: x.data.iter().map(|&x| x.into()).collect() });
        Self { case, q, k, v, code: None }
    }

    /// True if elements of this type, the keys' or the values', may be multiplied with less precision.
    fn is_native(&self, of: usize) -> bool {
        self.case.settings.precision == Precision::Native && self.case.dtypes[of] == Dtype::Bf16
    }

    /// True if weights are divided by the sum of rounded ones, and so off by at most [`ROUNDED_SUM`]. Dropout of
    /// nothing, not even of one weight in 2³², is none.
    fn is_sum_rounded(&self) -> bool {
        self.is_native(2)
            && self.case.settings.dropout.is_none_or(|dropout| (f64::from(dropout.p) * 2f64.powi(32)).round() == 0.0)
            && self.case.functions.prob.is_none()
    }

    pub(crate) fn answer(&self) -> Answer {
        let case = self.case;
        let ([b, h, l, _], [kb, g, n, dv], (rows, keys)) = (case.q.shape, case.v.shape, case.longest());
        let point = |x: f64| Array::from_fn([case.batch(), h, rows, keys], |_| Num::exactly(x));
        let hidden = || point(f64::NEG_INFINITY);
        let mut all = Answer {
            out: Array::from_fn([b, h, l, dv], |_| ANY),
            lse: Array::from_fn([b, h, l, 1], |_| ANY),
            points: [hidden(), hidden(), hidden(), point(0.0)],
            mass: Array::from_fn([kb, g, n, 1], |_| Num::exactly(0.0)),
        };
        for row in case.every_row() {
            self.row(row, &mut all);
        }
        // One running sum over all rows that share a key.
        let added = (case.sharing() * rows) as f64;
        let finite = all.mass.data.iter_mut().filter(|mass| mass.x.is_finite());
        finite.for_each(|mass| mass.e += U * added * (mass.x + mass.e));
        all
    }

    fn row(&self, row: [usize; 3], all: &mut Answer) {
        let (case, [b, h, i]) = (self.case, row);
        let scores: Vec<[Num; 3]> = (0..case.kv_len(b)).map(|j| self.score(row, j)).collect();
        for (j, scores) in scores.iter().enumerate() {
            (0..3).for_each(|point| all.points[point].set([b, h, i, j], scores[point]));
        }
        let sink = case.sinks.as_ref().map_or(f64::NEG_INFINITY, |sinks| sinks[h].into());
        let masked: Vec<Num> = scores.iter().map(|scores| scores[2]).collect();
        let (weights, lse) = softmax(&masked, sink);
        let (at, l) = case.row_at(b, i);
        let sum = if self.is_sum_rounded() { ROUNDED_SUM } else { 0.0 };
        all.lse.set([at, h, l, 0], Num { e: lse.e + if lse.x.is_finite() { sum } else { 0.0 }, ..lse });
        for (j, &weight) in weights.iter().enumerate() {
            let Num { x, e } = weight;
            let written = if sum * (x + e) > 0.0 { Num { x, e: e + sum * (x + e) } } else { weight };
            all.points[3].set([b, h, i, j], written);
            let ((at, n), g) = (case.key_at(b, j), h / case.sharing());
            let Num { x, e } = all.mass.get([at, g, n, 0]);
            all.mass.set([at, g, n, 0], Num { x: x + weight.x, e: e + weight.e });
        }
        let seen: Vec<(usize, Num)> = (0..weights.len())
            .filter(|&j| masked[j].x != f64::NEG_INFINITY || masked[j].is_any())
            .map(|j| {
                let factor: f64 = case.functions.prob.map_or(1.0, |prob| prob.factor(case.pair(row, j)).into());
                let factor = factor * f64::from(case.kept(row, j));
                let Num { x, e } = weights[j];
                (j, Num { x: x * factor, e: if weights[j].is_any() { e } else { e * factor } })
            })
            .collect();
        for c in 0..case.value_dim() {
            all.out.set([at, h, l, c], self.column(row, &seen, c));
        }
    }

    /// A score raw, softcapped and masked.
    fn score(&self, row: [usize; 3], j: usize) -> [Num; 3] {
        if self.case.asked(row, j).is_none() {
            return [HIDDEN; 3];
        }
        let raw = self.raw(row, j);
        let capped = match self.case.settings.softcap.map(f64::from) {
            Some(c) if !raw.x.is_nan() && !raw.is_any() => {
                let x = c * (raw.x / c).tanh();
                // What is too small to be divided by c is 0.
                Num { x, e: raw.e.min(2.0 * c) + 10.0 * U * x.abs() + TINY * c.max(1.0) }
            }
            _ => raw,
        };
        let masked = if self.case.sees(row, j, None) { self.change(row, j, capped) } else { HIDDEN };
        [raw, capped, masked]
    }

    /// scale·(q·k).
    fn raw(&self, [b, h, i]: [usize; 3], j: usize) -> Num {
        let case = self.case;
        let ((qb, l), (kb, n)) = (case.row_at(b, i), case.key_at(b, j));
        let (query, key) = (self.q.row(qb, h, l), self.k.row(kb, h / case.sharing(), n));
        let (mut dot, mut size, mut units, mut beyond) = (0.0f64, 0.0f64, [0.0f64; 2], false);
        for (&q, &k) in query.iter().zip(key) {
            dot += q * k;
            size += if (q * k).is_finite() { (q * k).abs() } else { 0.0 };
            for (unit, x) in units.iter_mut().zip([q, k]) {
                *unit += if x.is_finite() { x.abs() } else { 0.0 };
            }
            // As bfloat16 the largest numbers are infinite, and subnormal ones are 0.
            beyond |= q.is_finite() && q.abs() > 3.38e38 || (q * k).is_infinite() && q.abs().min(k.abs()) < 1.2e-38;
        }
        let (scale, d, [queries, keys]) = (f64::from(case.scale()), query.len(), units);
        // Chains of at most 32, added up first to last; twice the roundings without FMA.
        let roundings = (d.min(32) + d / 16 + 6) as f64;
        let mut e = roundings * U * size * scale.abs() + 2.0 * TINY * d as f64 * scale.abs().max(1.0);
        let mut overflows = size.max(size * scale.abs()) > 1e38;
        if self.code.is_some() {
            // Sums of bytes are multiplied by the scales of the query, the softmax and the key; their product may be
            // subnormal or overflow by itself.
            e += 200.0 * TINY * (queries + keys) + 4e3 * TINY * d as f64;
            overflows |= (queries * keys).max(127.0 * queries) * scale.abs() > 1e38;
        }
        if self.is_native(1) {
            e += scale.abs() * (size / 256.0 + 1.2e-38 * (queries + keys + 2.0 * d as f64));
            overflows |= beyond;
        }
        Num::rounded(scale * dot, if overflows { f64::INFINITY } else { e })
    }

    /// A visible score with all that is added to it.
    fn change(&self, row: [usize; 3], j: usize, score: Num) -> Num {
        let (case, [b, h, i], mut s) = (self.case, row, score);
        if let Some((bias, _)) = &case.bias {
            let bias = bias.get([b, h, i, j]).expect("a key without a column is hidden");
            s = Num::rounded(s.x + f64::from(bias), s.e);
        }
        if let Some(slopes) = &case.alibi {
            let (slope, behind) = (f64::from(slopes[h]), case.behind(row, j) as f64);
            // The distance is rounded, and what it is a difference of.
            let e = s.e + 4.0 * U * slope.abs() * (behind.abs() + 2.0 * j as f64);
            s = Num::rounded(s.x - slope * behind.abs(), e);
        }
        // A score of −∞ hides, however it came about: the function is not asked.
        if let Some(score) = case.functions.score
            && s.x != f64::NEG_INFINITY
        {
            let Some((factor, shift)) = score.line(case.pair(row, j)) else { return HIDDEN };
            let (x, shift) = (s.x * f64::from(factor), f64::from(shift));
            s = Num::rounded(x + shift, s.e * f64::from(factor) + 2.0 * U * (s.x.abs() + shift.abs()).min(1e300));
        }
        s
    }

    /// An output: Σ weight·value over the keys that are seen.
    fn column(&self, row: [usize; 3], seen: &[(usize, Num)], c: usize) -> Num {
        let (case, [b, h, _]) = (self.case, row);
        // One score that is NaN is enough, whatever others may be.
        if seen.iter().any(|(_, w)| w.x.is_nan()) {
            return NAN;
        }
        if seen.iter().any(|(_, w)| w.is_any()) {
            return ANY;
        }
        let (mut sum, mut e, mut size, mut values) = (0.0f64, 0.0f64, 0.0f64, 0.0f64);
        let (mut infinite, mut vanishing) = (0.0f64, false);
        for &(j, w) in seen {
            let (kb, n) = case.key_at(b, j);
            let v = self.v.get([kb, h / case.sharing(), n, c]);
            if v.is_infinite() {
                // 0·∞; of a weight that may or may not vanish, either.
                let nothing = w.x + w.e == 0.0;
                vanishing |= !nothing && w.x - w.e < 1e-30;
                infinite += if nothing { f64::NAN } else { v };
                continue;
            }
            sum += w.x * v;
            e += w.e * v.abs();
            size += (w.x + w.e) * v.abs();
            values += v.abs();
        }
        if sum.is_nan() {
            return NAN;
        }
        if infinite != 0.0 && !vanishing {
            return Num::exactly(infinite);
        }
        if vanishing || values > 1e38 {
            return ANY;
        }
        // One chain a block, then the blocks; weights may be subnormal on the way.
        let (n, blocks) = (seen.len().min(256) as f64, case.kv_len(b).div_ceil(256) as f64);
        let mut e = e + U * (2.0 * n + 8.0 * blocks + 16.0) * size + TINY_WEIGHT * values;
        if self.is_native(2) {
            e += if self.is_sum_rounded() { ROUNDED_SUM * (size + sum.abs()) } else { size / 256.0 };
            e += 1.2e-38 * (values + seen.len() as f64);
        }
        if let Some(code) = self.code {
            // Weights times scales may be subnormal.
            e += self.rounded_weights(code, row, seen, c) + 200.0 * TINY * n;
        }
        Num::rounded(sum, e + TINY * n)
    }

    /// How far off a sum of integers is because weights, times the scales, are rounded: in each block of 256 keys to a
    /// 32767th of the largest, of int4 to a 255th, up or down, and to no less than the smallest normal number.
    fn rounded_weights(&self, code: Code, row: [usize; 3], seen: &[(usize, Num)], c: usize) -> f64 {
        // Dropout multiplies what is rounded.
        let (case, [b, h, _]) = (self.case, row);
        let kept = case.settings.dropout.map_or(1.0, |dropout| f64::from(dropout.factor()));
        let least = f64::from(f32::MIN_POSITIVE) * kept;
        let block = |block: &[(usize, Num)]| {
            let (mut largest, mut integers) = (0.0f64, 0.0f64);
            for &(j, w) in block.iter().filter(|(_, w)| w.x.abs() + w.e > 0.0) {
                let (kb, n) = case.key_at(b, j);
                let scale = code.scale(self.v.row(kb, h / case.sharing(), n), c);
                largest = largest.max((w.x.abs() + w.e) * f64::from(scale));
                integers += code.most();
            }
            let unit = if let Code::Bytes = code { 0.501 / 32767.0 } else { 1.002 / 255.0 };
            (unit * largest).max(1.002 * least) * integers
        };
        let place = |j| case.selected.as_ref().map_or(j, |of| of.place(case.list_of(of, row), j));
        seen.chunk_by(|a, b| place(a.0) / 256 == place(b.0) / 256).map(block).sum()
    }
}

/// The weights of a row, and its log-sum-exp.
fn softmax(scores: &[Num], sink: f64) -> (Vec<Num>, Num) {
    let sees = |s: &Num| s.x != f64::NEG_INFINITY || s.is_any();
    let weights = |seen: Num| {
        let weight = |s: &Num| if s.is_any() { ANY } else { seen };
        scores.iter().map(|s| if sees(s) { weight(s) } else { Num::exactly(0.0) }).collect()
    };
    let nothing = !scores.iter().any(sees);
    let bad = |x: f64| x.is_nan() || x == f64::INFINITY;
    if nothing {
        // A sink alone is the LSE, to the bit.
        return (weights(ANY), if bad(sink) { ANY } else { Num::exactly(sink) });
    }
    if bad(sink) || scores.iter().any(|s| bad(s.x)) {
        return (weights(NAN), NAN);
    }
    if scores.iter().any(|s| s.is_any()) {
        return (weights(ANY), ANY);
    }
    let max = scores.iter().map(|s| s.x).fold(sink, f64::max);
    // The difference to the maximum is rounded, in one step or in several.
    let bounds = |s: f64, e: f64| {
        let (x, e) = (s - max, e + 2.0 * U * (s - max).abs());
        if s == f64::NEG_INFINITY { [0.0; 3] } else { [(x - e).exp(), x.exp(), (x + e).exp()] }
    };
    let each: Vec<[f64; 3]> = scores.iter().map(|s| bounds(s.x, s.e)).collect();
    let mut sums = bounds(sink, 0.0);
    each.iter().for_each(|one| sums.iter_mut().zip(one).for_each(|(sum, x)| *sum += x));
    let ([low, sum, high], blocks) = (sums, scores.len().div_ceil(256) as f64);
    // Sixteen sums of sixteen, a tree, a block at a time; exponentials, factors and the division.
    let rounding = U * (64.0 + 8.0 * blocks);
    let weight = |(s, one): (&Num, &[f64; 3])| {
        let (x, most) = (one[1] / sum, one[2] / low);
        let e = (most - x).max(x - one[0] / high) + rounding * most + TINY_WEIGHT;
        if sees(s) { Num { x, e: if e < 1.0 { e } else { 1.0 + 1e-4 } } } else { Num::exactly(0.0) }
    };
    let lse = max + sum.ln();
    let e = (high / sum).ln().max((sum / low).ln()) + rounding + 3.0 * U * (max.abs() + lse.abs() + 1.0);
    (scores.iter().zip(&each).map(weight).collect(), Num { x: lse, e: if e.is_nan() { f64::INFINITY } else { e } })
}
