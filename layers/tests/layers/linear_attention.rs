//! Linear attention against the recurrence in `f64`, one number at a time.

use crate::linear_attention_support::{Case, FORMS, Outcome, RULES, Rule, Sizes, execs, oracle};
use crate::support::{Tensor, distance, largest, worst};
use sdpa::{Exec, View};
use sdpa_layers::{FeatureMap, Form, LinearAttention, Normaliser, Reach};

/// Around blocks of four, vectors of sixteen and the chunks tried; grouped heads; dims that are whole vectors and not.
const SIZES: [Sizes; 12] = [
    [1, 1, 1, 1, 1, 1, 1],
    [1, 1, 1, 0, 0, 4, 4],
    [2, 1, 2, 2, 2, 3, 5],
    [1, 2, 3, 3, 3, 16, 16],
    [1, 1, 1, 4, 4, 5, 20],
    [1, 2, 1, 5, 5, 64, 64],
    [1, 1, 5, 15, 15, 8, 17],
    [2, 2, 1, 16, 16, 20, 33],
    [1, 1, 2, 17, 17, 33, 4],
    [1, 1, 1, 39, 39, 16, 81],
    [1, 1, 1, 41, 41, 7, 65],
    [1, 2, 2, 130, 130, 24, 40],
];

/// The largest error of either result, over the largest number of the oracle's.
fn errors(out: &[f32], state: &[f32], (true_out, true_state): &(Vec<f64>, Vec<f64>)) -> [f64; 2] {
    [(out, true_out), (state, true_state)].map(|(got, truth)| {
        let scale = truth.iter().fold(0.0f64, |m, x| m.max(x.abs()));
        if scale == 0.0 { worst(got, truth).0 } else { worst(got, truth).0 / scale }
    })
}

/// Holds a call against the oracle: no worse than four times the plain `f32` recurrence, with eight roundings to spare.
#[track_caller]
fn check(what: &str, case: &Case, got: &Outcome, map: FeatureMap, scale: Option<f32>) {
    let truth = oracle::<f64>(case, map, scale);
    let (out, state) = oracle::<f32>(case, map, scale);
    let plain = errors(&out, &state, &truth);
    let ours = errors(&got.out.data, got.state.as_slice(), &truth);
    for ((name, ours), plain) in ["out", "state"].into_iter().zip(ours).zip(plain) {
        let bound = 4.0 * plain + 8.0 * f32::EPSILON as f64;
        assert!(ours <= bound, "{what}: {name} is off by {ours:e} of the largest, bound {bound:e}");
    }
}

#[test]
fn every_rule_and_form_is_the_recurrence() {
    for (seed, sizes) in SIZES.into_iter().enumerate() {
        for rule in RULES {
            let case = Case::new(rule, Normaliser::None, sizes, seed as u64);
            for (isa, exec) in execs() {
                for form in FORMS {
                    let got = case.run(LinearAttention::new().form(form), exec);
                    check(&format!("{rule:?} {form:?} {sizes:?} {isa}"), &case, &got, FeatureMap::Identity, None);
                }
            }
        }
    }
}

#[test]
fn features_normalisers_and_scales() {
    for (seed, sizes) in SIZES.into_iter().enumerate() {
        for (rule, normaliser, map, scale) in [
            (Rule::Linear, Normaliser::KeySum, FeatureMap::EluPlusOne, None),
            (Rule::Gated, Normaliser::KeySum, FeatureMap::EluPlusOne, Some(3.0)),
            (Rule::GatedDelta, Normaliser::None, FeatureMap::EluPlusOne, Some(-0.5)),
            (Rule::Delta, Normaliser::None, FeatureMap::Identity, Some(0.0)),
        ] {
            let mut case = Case::new(rule, normaliser, sizes, 100 + seed as u64);
            if rule == Rule::GatedDelta {
                // Mapped keys are longer than 1.
                case.beta.as_mut().unwrap().data.iter_mut().for_each(|x| *x /= 2.0 * sizes[5] as f32);
            }
            let mut layer = LinearAttention::new().feature_map(map).normaliser(normaliser);
            if let Some(scale) = scale {
                layer = layer.scale(scale);
            }
            for (isa, exec) in execs() {
                for form in FORMS {
                    let got = case.run(layer.form(form), exec);
                    let what = format!("{rule:?} {normaliser:?} {map:?} {form:?} {sizes:?} {isa}");
                    check(&what, &case, &got, map, scale);
                }
            }
        }
    }
}

/// Katharopoulos et al.: what is normalised is attention with φ(q)·φ(k) in place of exp(q·k).
#[test]
fn normalised_linear_attention_is_a_weighted_mean() {
    let (n, d, dv) = (37, 8, 20);
    let mut case = Case::new(Rule::Linear, Normaliser::KeySum, [1, 1, 1, n, n, d, dv], 7);
    case.state.as_mut_slice().fill(0.0);
    let phi = |x: f32| if x > 0.0 { x as f64 + 1.0 } else { (x as f64).exp() };
    let weight =
        |i: usize, j: usize| (0..d).map(|e| phi(case.q.get([0, 0, i, e])) * phi(case.k.get([0, 0, j, e]))).sum::<f64>();
    for reach in [Reach::Causal, Reach::Whole] {
        let mut expected = Vec::new();
        for i in 0..n {
            let keys = if reach == Reach::Causal { i + 1 } else { n };
            let sum: f64 = (0..keys).map(|j| weight(i, j)).sum();
            expected.extend(
                (0..dv).map(|m| (0..keys).map(|j| weight(i, j) * case.v.get([0, 0, j, m]) as f64).sum::<f64>() / sum),
            );
        }
        for form in FORMS {
            let layer = LinearAttention::new().form(form).reach(reach);
            let layer = layer.feature_map(FeatureMap::EluPlusOne).normaliser(Normaliser::KeySum);
            let got = case.run(layer, Exec::serial());
            let (error, at) = worst(&got.out.data, &expected);
            assert!(error < 2e-6, "{reach:?} {form:?}: element {at} is off by {error:e}");
        }
    }
}

/// Every row reads the state after the last key, whatever the numbers of both.
#[test]
fn whole_reach_is_a_sum_over_all_keys() {
    for (seed, [rows, keys]) in
        [[0, 0], [0, 5], [5, 0], [1, 1], [3, 40], [40, 3], [17, 16], [33, 65]].into_iter().enumerate()
    {
        let (group, d, dv) = (3, 12, 21);
        let case = Case::new(Rule::Linear, Normaliser::None, [2, 2, group, rows, keys, d, dv], seed as u64);
        let mut state: Vec<f64> = case.state.as_slice().iter().map(|&s| s as f64).collect();
        for (index, state) in state.chunks_exact_mut(d * dv).enumerate() {
            for (t, i, m) in (0..keys).flat_map(|t| (0..d * dv).map(move |at| (t, at / dv, at % dv))) {
                let row = [index / 2, index % 2, t];
                state[i * dv + m] +=
                    case.k.get([row[0], row[1], t, i]) as f64 * case.v.get([row[0], row[1], t, m]) as f64;
            }
        }
        let expected = crate::support::indices(case.out_shape()).map(|[b, h, t, m]| {
            let sum = |i: usize| state[((b * 2 + h / group) * d + i) * dv + m] * case.q.get([b, h, t, i]) as f64;
            (0..d).map(sum).sum::<f64>() * 0.75
        });
        let expected = (expected.collect::<Vec<_>>(), state.clone());
        for (isa, exec) in execs() {
            for form in FORMS {
                let got = case.run(LinearAttention::new().scale(0.75).reach(Reach::Whole).form(form), exec);
                let bound = 1e-6 * (1.0 + (keys as f64).sqrt());
                for error in errors(&got.out.data, got.state.as_slice(), &expected) {
                    assert!(error <= bound, "{rows} × {keys} {form:?} {isa}: off by {error:e} of the largest");
                }
            }
        }
    }
}

/// Decays that forget all, next to nothing, and ones that grow: multiplied up, never divided by.
#[test]
fn strong_decays_cost_no_accuracy() {
    let hard = [f32::NEG_INFINITY, -1e4, -200.0, -88.0, -30.0, -3.0, -1e-3, 0.0, -0.0, 0.5];
    for (seed, rule) in [Rule::Gated, Rule::GatedDelta].into_iter().enumerate() {
        for last in [1, 12] {
            let mut case = Case::new(rule, Normaliser::None, [1, 2, 2, 70, 70, 12, 18], seed as u64);
            let mut rng = crate::support::Rng::new(3);
            case.log_decay = Some(Tensor::from_fn([1, 2, 70, last], |_| rng.pick(&hard)));
            let mut full = case.clone();
            full.log_decay = Some(Tensor::from_fn([1, 2, 70, 12], |[b, h, t, i]| {
                case.log_decay.as_ref().unwrap().get([b, h, t, i.min(last - 1)])
            }));
            for (isa, exec) in execs() {
                for form in FORMS {
                    let got = case.run(LinearAttention::new().form(form), exec);
                    check(&format!("{rule:?} {form:?} {last} {isa}"), &full, &got, FeatureMap::Identity, None);
                }
            }
        }
    }
}

/// With orthonormal keys and β = 1, a delta rule is a dictionary: writing a key again replaces its value.
#[test]
fn a_delta_rule_replaces() {
    let identity: Vec<f32> = (0..16).map(|i| if i / 4 == i % 4 { 1.0 } else { 0.0 }).collect();
    let keys = [&identity[..], &identity[..8]].concat();
    let values: Vec<f32> = (0..6 * 3).map(|x| x as f32).collect();
    let inputs = |update| {
        sdpa_layers::LinearInputs::new(
            View::bhld(&keys, [1, 1, 6, 4]).unwrap(),
            View::bhld(&keys, [1, 1, 6, 4]).unwrap(),
            View::bhld(&values, [1, 1, 6, 3]).unwrap(),
            update,
        )
    };
    let one = [1.0];
    let beta = View::bhld(&one, [1, 1, 1, 1]).unwrap();
    for form in FORMS {
        let mut state = sdpa_layers::LinearState::new([1, 1, 4, 3]).unwrap();
        let mut out = vec![0.0; 18];
        let view = sdpa::ViewMut::bhld(&mut out, [1, 1, 6, 3]).unwrap();
        let layer = LinearAttention::new().scale(1.0).form(form);
        let mut compute = sdpa_layers::Compute::new(Exec::serial());
        layer.forward(inputs(sdpa_layers::Update::Delta { beta }), &mut state, view, &mut compute).unwrap();
        assert_eq!(out, values, "{form:?}: each row reads what it wrote");
        let expected: Vec<f32> = (12..18).chain(6..12).map(|x| x as f32).collect();
        assert_eq!(state.as_slice(), expected, "{form:?}: the first two keys hold their later values");
    }
}

/// What cannot be divided by is not: rows with weights that add up to 0 give 0, not NaN.
#[test]
fn a_row_without_weight_gives_zero() {
    let mut case = Case::new(Rule::Linear, Normaliser::KeySum, [1, 1, 2, 6, 6, 4, 5], 1);
    case.state.as_mut_slice().fill(0.0);
    case.k.fill_row(0, 0.0);
    case.k.fill_row(1, 0.0);
    for form in FORMS {
        let got = case.run(LinearAttention::new().normaliser(Normaliser::KeySum).form(form), Exec::serial());
        for [b, h, t, m] in crate::support::indices([1, 2, 6, 5]) {
            assert_eq!(got.out.get([b, h, t, m]) == 0.0, t < 2, "{form:?}: row {t}");
        }
    }
    // No keys at all.
    let mut none = Case::new(Rule::Linear, Normaliser::KeySum, [1, 1, 2, 6, 0, 4, 5], 1);
    none.state.as_mut_slice().fill(0.0);
    let layer = LinearAttention::new().normaliser(Normaliser::KeySum).reach(Reach::Whole);
    assert!(none.run(layer, Exec::serial()).out.data.iter().all(|&x| x == 0.0));
}

/// A token sees none that come later, not even the NaNs among them.
#[test]
fn what_comes_later_is_not_seen() {
    for rule in RULES {
        let case = Case::new(rule, Normaliser::None, [1, 1, 2, 23, 23, 9, 20], 5);
        for form in FORMS {
            let layer = LinearAttention::new().form(form);
            let clean = case.run(layer, Exec::serial()).out;
            for t in [1, 2, 3, 4, 7, 15, 16, 22] {
                for (tensor, poison) in [(0, f32::NAN), (1, f32::INFINITY), (2, f32::NAN), (2, f32::NEG_INFINITY)] {
                    let mut hurt = case.clone();
                    [&mut hurt.q, &mut hurt.k, &mut hurt.v][tensor].fill_row(t, poison);
                    let got = hurt.run(layer, Exec::serial()).out;
                    crate::support::assert_same_bits(
                        &format!("{rule:?} {form:?} {t}"),
                        &got.rows(0..t),
                        &clean.rows(0..t),
                    );
                    let struck = got.rows(t..t + 1);
                    assert!(struck.data.iter().any(|x| !x.is_finite()), "{rule:?} {form:?}: row {t} does not show it");
                }
            }
        }
    }
}

/// The yardstick itself, so that a bound of infinity does not pass.
#[test]
fn the_oracle_is_finite_and_not_nothing() {
    for rule in RULES {
        let case = Case::new(rule, Normaliser::None, SIZES[11], 11);
        let (out, state) = oracle::<f32>(&case, FeatureMap::Identity, None);
        for xs in [out, state] {
            assert!(xs.iter().all(|x| x.is_finite()) && largest(&xs) > 0.5 && largest(&xs) < 1e3, "{rule:?}");
        }
        let truth = oracle::<f64>(&case, FeatureMap::Identity, None);
        assert!(distance(truth.0[0], 0.0) > 0.0);
    }
    assert!(FORMS.contains(&Form::Recurrent));
}
