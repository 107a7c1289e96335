//! Comparisons: with the oracle, and of outputs with each other.

use super::{Case, Full};
use crate::support::{Tensor, distance, same_bits};
use core::ops::Range;
use sdpa::naive::Answer;

/// Errors in units of `f32::EPSILON` times what the number is made of: see [`check_against_oracle`].
const UNITS: f64 = 8.0;
/// Or this multiple of the error of the naive `f32` path, where that is larger.
const TIMES_NAIVE: f64 = 3.0;
const NAMES: [&str; 4] = ["raw", "softcapped", "masked", "weights"];

/// Calls `f(what, place, value in the call's outputs, index in the oracle's)` for each element there is of one output:
/// 0 is `out`, 1 the LSE, 2 to 5 the points, 6 the key weight sums.
fn each(case: &Case, full: &Full, output: usize, mut f: impl FnMut([usize; 4], f32, usize)) {
    let (heads, kv_heads, (rows, keys), dv) = (case.heads(), case.kv_heads(), case.longest(), case.v.shape[3]);
    if output == 6 {
        let Some(mass) = &full.mass else { return };
        for b in 0..case.batch() {
            for g in 0..kv_heads {
                for j in 0..case.keys(b) {
                    let (at, key) = case.key_at(b, j);
                    f([b, g, j, 0], mass.get([at, g, key, 0]), (b * kv_heads + g) * keys + j);
                }
            }
        }
        return;
    }
    for [b, h, i] in case.every_row() {
        let (at, row) = case.row_at(b, i);
        let index = (b * heads + h) * rows + i;
        match output {
            0 => (0..dv).for_each(|c| f([b, h, i, c], full.out.get([at, h, row, c]), index * dv + c)),
            1 => f([b, h, i, 0], full.lse.get([at, h, row, 0]), index),
            n => {
                let Some(point) = &full.points[n - 2] else { return };
                (0..keys).for_each(|j| f([b, h, i, j], point.get([b, h, i, j]), index * keys + j));
            }
        }
    }
}

fn part<T>(answer: &Answer<T>, output: usize) -> &[T] {
    match output {
        0 => &answer.out,
        1 => &answer.lse,
        6 => &answer.key_weight_sums,
        n => &answer.points[n - 2],
    }
}

/// Every output against the oracle's. Panics, naming the worst element, unless errors are within bounds.
///
/// Scores (raw, softcapped, masked) and the LSE may be off by 8 ε·M, where M is the largest finite score at any point, at
/// least 1; weights by as much, since an error of a score is a relative error of its weight; `out` and key weight sums by that
/// times the largest value, or the largest mass; the mass of n rows by n/32 units more. Or by three times what the naive
/// `f32` path is off by, where that is more.
///
/// Returns the worst error in units of ε·M, key weight sums apart, and in units of naive's where it had to be asked, each with
/// its output.
pub fn check_against_oracle(what: &str, case: &Case, full: &Full, oracle: &Answer<f64>) -> [(f64, &'static str); 2] {
    let most = |xs: &[f64]| xs.iter().filter(|x| x.is_finite()).fold(0.0f64, |m, x| m.max(x.abs()));
    let largest = oracle.points[..3].iter().map(|x| most(x)).fold(1.0, f64::max);
    let unit = f32::EPSILON as f64 * largest;
    let value = case.v.data.iter().filter(|x| x.is_finite()).fold(1.0f64, |m, x| m.max(x.abs() as f64));
    let mut naive = None;
    let mut overall = [(0.0f64, "none"); 2];
    for output in 0..7 {
        let unit = match output {
            0 => unit * value,
            6 => unit * most(&oracle.key_weight_sums).max(1.0),
            _ => unit,
        };
        let expected = part(oracle, output);
        let name = ["out", "lse", "raw", "softcapped", "masked", "weights", "key weight sums"][output];
        let (mut worst, mut at) = (0.0, None);
        each(case, full, output, |place, got, index| {
            let error = distance(got as f64, expected[index]);
            if error > worst {
                (worst, at) = (error, Some((place, got, expected[index])));
            }
        });
        // One running sum in f32 over all rows that share a key: roundings may all go one way where weights are equal.
        let added = if output == 6 { case.longest().0 * case.heads() / case.kv_heads() } else { 0 };
        let mut bound = (UNITS + added as f64 / 32.0) * unit;
        if worst > bound && worst.is_finite() {
            let naive = part(naive.get_or_insert_with(|| case.oracle::<f32>()), output);
            let errors = naive.iter().zip(expected).map(|(&x, &e)| distance(x as f64, e));
            let error = errors.fold(0.0, f64::max);
            bound = bound.max(TIMES_NAIVE * error);
            overall[1] = larger(overall[1], (worst / error, name));
        }
        if output != 6 {
            overall[0] = larger(overall[0], (worst / unit, name));
        }
        if worst > bound {
            let (place, got, expected) = at.expect("something was worst");
            panic!(
                "{what}: {name} {place:?} is {got:e}, expected {expected:e}: off by {worst:e}, bound {bound:e}\n{}",
                describe(case)
            );
        }
    }
    overall
}

pub fn larger(a: (f64, &'static str), b: (f64, &'static str)) -> (f64, &'static str) {
    if b.0 > a.0 { b } else { a }
}

/// Which options a case has.
pub fn options_of(case: &Case) -> [(&'static str, bool); 14] {
    [
        ("scale", case.scale.is_some()),
        ("softcap", case.softcap.is_some()),
        ("causal", case.causal),
        ("window", case.window.is_some()),
        ("bias", case.bias.is_some()),
        ("mask", case.mask.is_some()),
        ("alibi", case.alibi.is_some()),
        ("sinks", case.sinks.is_some()),
        ("kv_lens", case.kv_lens.is_some()),
        ("ragged", case.ragged.is_some()),
        ("score function", case.functions.score.is_some()),
        ("mask function", case.functions.mask.is_some()),
        ("weight function", case.functions.prob.is_some()),
        ("several heads a key head", case.heads() > case.kv_heads()),
    ]
}

/// The case without its numbers.
pub fn describe(case: &Case) -> String {
    let Case { scale, softcap, causal, window, alignment, alibi, sinks, kv_lens, ragged, functions, .. } = case;
    let bias = case.bias.as_ref().map(|x| (x.dtype(), x.wide.shape, x.wide.strides));
    let mask = case.mask.as_ref().map(|x| (x.keep, x.bools.is_some(), x.tensor.shape, x.tensor.strides));
    let layouts = [&case.q, &case.k, &case.v].map(|x| (x.shape, x.strides));
    format!(
        "q, k, v {layouts:?} scale {scale:?} softcap {softcap:?} causal {causal} window {window:?} {alignment:?} bias \
         {bias:?} mask {mask:?} alibi {alibi:?} sinks {sinks:?} kv_lens {kv_lens:?} ragged {ragged:?} {functions:?}"
    )
}

/// Columns of two rows, of the first `n`, in which a difference is to be looked for: none if all have the same bits.
fn unlike((x, at): (&Tensor, [usize; 3]), (y, other): (&Tensor, [usize; 3]), n: usize) -> Range<usize> {
    match (x.row(at), y.row(other)) {
        (Some(x), Some(y)) if same_bits(&x[..n], &y[..n]) => 0..0,
        _ => 0..n,
    }
}

/// Bits of `out`, LSE and the points that both have, for each row of `part` that `place` finds in `whole`: as sequence,
/// head and row. Keys are those that both have.
#[track_caller]
pub fn same_rows(
    what: &str,
    (case, part): (&Case, &Full),
    (whole_case, whole): (&Case, &Full),
    place: impl Fn([usize; 3]) -> Option<[usize; 3]>,
) {
    let differ = |name: &str, row: [usize; 3], column: usize, got: f32, expected: f32| {
        if got.to_bits() != expected.to_bits() {
            panic!(
                "{what}: {name} of {row:?}, column {column}, is {got:e}, expected {expected:e}\n{}\n{}",
                describe(case),
                describe(whole_case)
            );
        }
    };
    for row in case.every_row() {
        let Some(other) = place(row) else { continue };
        let ([b, h, i], [b2, h2, i2]) = (row, other);
        let ((at, l), (at2, l2)) = (case.row_at(b, i), whole_case.row_at(b2, i2));
        for c in unlike((&part.out, [at, h, l]), (&whole.out, [at2, h2, l2]), case.v.shape[3]) {
            differ("out", row, c, part.out.get([at, h, l, c]), whole.out.get([at2, h2, l2, c]));
        }
        differ("lse", row, 0, part.lse.get([at, h, l, 0]), whole.lse.get([at2, h2, l2, 0]));
        for (name, (mine, others)) in NAMES.into_iter().zip(part.points.iter().zip(&whole.points)) {
            let (Some(mine), Some(others)) = (mine, others) else { continue };
            for j in unlike((mine, row), (others, other), case.keys(b).min(whole_case.keys(b2))) {
                differ(name, row, j, mine.get([b, h, i, j]), others.get([b2, h2, i2, j]));
            }
        }
    }
}
