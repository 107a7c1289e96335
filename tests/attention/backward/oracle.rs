//! Gradients against the oracle's, on every instruction set; and the oracle's against central differences.

use super::support::Back;
use crate::options::Case;
use crate::support::{Rng, Tensor, execs};
use sdpa::naive;

/// Largest error, as a share of the largest gradient.
pub(super) fn error(got: &[f32], expected: &[f64]) -> f64 {
    assert_eq!(got.len(), expected.len());
    let largest = expected.iter().fold(1.0f64, |largest, x| largest.max(x.abs()));
    got.iter().zip(expected).map(|(&got, expected)| (f64::from(got) - expected).abs() / largest).fold(0.0, f64::max)
}

/// Panics unless the gradients are the oracle's, about, on every instruction set.
pub(super) fn check(what: &str, back: &Back) {
    let (expected, plain) = (back.oracle::<f64>(), back.oracle::<f32>());
    for (isa, exec) in execs() {
        let got = back.run(exec);
        for (((name, got), (_, expected)), (_, plain)) in got.named().into_iter().zip(&expected).zip(&plain) {
            // Sums of terms of either sign may be small beside their terms: there the plain passes err as much. Those of
            // slopes, scale and parameters are over all rows and keys.
            let usual = if ["slopes", "scale", "parameters"].contains(&name) { 1e-4f64 } else { 5e-5 };
            let bound = usual.max(2.0 * error(plain, expected));
            let error = error(&got.data, expected);
            let shape = back.case.q.shape;
            assert!(error < bound, "{what}, {isa}: gradient in {name} is off by {error:e}: {shape:?}");
        }
    }
}

#[test]
fn random_options_have_the_gradients_of_the_oracle() {
    for seed in 0..150 {
        check(&format!("seed {seed}"), &Back::random(&mut Rng::new(seed), 400_000));
    }
}

/// On larger calls the fused pass is no worse than the plain passes in `f32`.
#[test]
fn errors_are_no_larger_than_those_of_plain_passes() {
    for (seed, sizes) in [(1, [1, 2, 2, 300, 300, 64, 64]), (2, [1, 2, 1, 200, 520, 128, 64])] {
        let mut rng = Rng::new(seed);
        let case = Case::plain(&mut rng, sizes);
        let back = Back { d_lse: None, ..Back::of(&mut rng, case) };
        let (expected, plain) = (back.oracle::<f64>(), back.oracle::<f32>());
        for (isa, exec) in execs() {
            let got = back.run(exec);
            for (((name, got), (_, expected)), (_, plain)) in got.named().into_iter().zip(&expected).zip(&plain).take(3)
            {
                let (fused, plain) = (error(&got.data, expected), error(plain, expected));
                assert!(fused <= plain, "{isa}, {name}: {fused:e} fused, {plain:e} in plain passes");
            }
        }
    }
}

/// Loss with gradients that the oracle computes: Σ out·d_out + Σ lse·d_lse.
fn loss(back: &Back) -> f64 {
    let answer: naive::Answer<f64> = back.case.oracle();
    let dv = back.case.v.shape[3];
    let (rows, h) = (back.case.longest().0, back.case.heads());
    back.case.every_row().into_iter().fold(0.0, |sum, [b, head, i]| {
        let (qb, ql) = back.case.row_at(b, i);
        let number = (b * h + head) * rows + i;
        let out = (0..dv).map(|d| answer.out[number * dv + d] * f64::from(back.d_out.get([qb, head, ql, d])));
        // A row that sees nothing has no log-sum-exp to change.
        let lse = back.d_lse.as_ref().filter(|_| answer.lse[number].is_finite());
        sum + out.sum::<f64>() + lse.map_or(0.0, |d| answer.lse[number] * f64::from(d.get([qb, head, ql, 0])))
    })
}

/// The derivative of the loss in one element, by differences.
fn difference(back: &Back, change: impl Fn(&mut Back, f32)) -> f64 {
    let at = |step: f32| {
        let mut moved = back.clone();
        change(&mut moved, step);
        loss(&moved)
    };
    // A score function rounds to `f32`, which shows less in larger steps.
    let step = if back.case.functions.score.is_some() { 1.0 / 64.0 } else { 1.0f32 / 512.0 };
    // Fourth order: the steps are exact in `f32`.
    (8.0 * (at(step) - at(-step)) - (at(2.0 * step) - at(-2.0 * step))) / (12.0 * f64::from(step))
}

#[test]
fn the_oracle_agrees_with_central_differences() {
    for seed in 0..500 {
        let mut rng = Rng::new(seed);
        let sizes = [1 + rng.below(2), 2, [1, 2][rng.below(2)], 1 + rng.below(3), 1 + rng.below(4), 3, 2];
        let case = Case::of_sizes(&mut rng, sizes);
        // Numbers that differences can be taken of without rounding.
        let coarse =
            |x: &Tensor| Tensor { data: x.data.iter().map(|x| (x * 64.0).round() / 64.0).collect(), ..x.clone() };
        let case = Case { q: coarse(&case.q), k: coarse(&case.k), v: coarse(&case.v), ..case };
        let back = Back::of(&mut rng, case);
        let rounding = if back.case.functions.score.is_some() { 100.0 } else { 1.0 };
        let expected = back.oracle::<f64>();
        for (which, (name, gradient)) in expected.iter().enumerate().take(3) {
            for _ in 0..if gradient.is_empty() { 0 } else { 2 } {
                let element = rng.below(gradient.len());
                let shape = [&back.case.q, &back.case.k, &back.case.v][which].shape;
                let index = crate::support::indices(shape).nth(element).unwrap();
                let got = difference(&back, |back, step| {
                    let tensor = match which {
                        0 => &mut back.case.q,
                        1 => &mut back.case.k,
                        _ => &mut back.case.v,
                    };
                    let x = tensor.get(index);
                    tensor.set(index, x + step);
                });
                let bound = rounding * 1e-6 * (1.0 + gradient[element].abs());
                let off = (got - gradient[element]).abs();
                assert!(off < bound, "seed {seed}, {name} {index:?}: {got} by differences, {}", gradient[element]);
            }
        }
        for (list, name) in [(4, "sinks"), (5, "slopes")] {
            for element in 0..expected[list].1.len() {
                let got = difference(&back, |back, step| {
                    let of = if list == 4 { &mut back.case.sinks } else { &mut back.case.alibi };
                    of.as_mut().unwrap()[element] += step;
                });
                let off = (got - expected[list].1[element]).abs();
                assert!(off < 1e-4 * (1.0 + got.abs()), "seed {seed}, {name}: {got} by differences, off by {off:e}");
            }
        }
    }
}
