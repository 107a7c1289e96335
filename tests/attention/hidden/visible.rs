//! Visible NaN and ∞: the outputs they reach, and those they do not.

use super::{CASES, causal_at};
use crate::options::{Case, Wanted};
use crate::support::{Answer, Rng, Sizes, Tensor, Tensors, assert_same, execs, run};
use sdpa::{Alignment, Attention, naive};

/// Each element NaN, infinite as, or finite as the oracle's.
#[track_caller]
fn assert_same_class(what: &str, attention: &Attention, tensors: &Tensors, got: &Answer) {
    let class = |x: f64| {
        if x.is_nan() {
            'N'
        } else if x.is_finite() {
            'f'
        } else if x > 0.0 {
            '+'
        } else {
            '-'
        }
    };
    let expected = naive::oracle(attention, &tensors.inputs()).unwrap();
    let pairs = [("out", &got.out, &expected.out), ("lse", &got.lse, &expected.lse)];
    for (name, got, expected) in pairs {
        for (index, &e) in crate::support::indices(got.shape).zip(expected) {
            let g = got.get(index);
            assert_eq!(class(g as f64), class(e), "{what}: {name} {index:?} is {g}, oracle {e}");
        }
    }
}

/// Sizes for visible poison: (sizes, rule).
fn visible_cases() -> Vec<(Sizes, Attention)> {
    let mut cases: Vec<_> = CASES.into_iter().map(|(sizes, alignment)| (sizes, causal_at(alignment))).collect();
    cases.push(([2, 2, 1, 8, 33, 20, 33], Attention::new()));
    cases.push(([1, 1, 1, 7, 300, 16, 16], Attention::new()));
    cases
}

#[test]
fn nan_in_a_query_stays_in_its_row() {
    for (sizes @ [_, heads, _, rows, keys, d, _], attention) in visible_cases() {
        let tensors = Tensors::normal(sizes, 4);
        for (isa, exec) in execs() {
            let clean = run(&attention, &tensors, exec);
            for (i, n) in [(0, 0), (rows / 2, d / 2), (rows - 1, d - 1)] {
                let mut poisoned = tensors.clone();
                poisoned.q.set([0, heads - 1, i, n], f32::NAN);
                let got = run(&attention, &poisoned, exec);
                let what = format!("{sizes:?} {isa}: NaN in row {i}");
                let mut rest = got.clone();
                for c in 0..clean.out.shape[3] {
                    rest.out.set([0, heads - 1, i, c], clean.out.get([0, heads - 1, i, c]));
                }
                rest.lse.set([0, heads - 1, i, 0], clean.lse.get([0, heads - 1, i, 0]));
                assert_same(&what, &rest, &clean);
                if rows * keys * d < 50_000 {
                    assert_same_class(&what, &attention, &poisoned, &got);
                }
            }
        }
    }
}

/// Poisons one element of `v` or `k` at a time and holds the class of every output, and the bits of those that cannot
/// be reached, against what they should be.
fn visible_in(pick: fn(&mut Tensors) -> &mut Tensor, whole_row: bool, poisons: &[f32]) {
    for (sizes @ [_, _, _, rows, keys, ..], attention) in visible_cases() {
        let tensors = Tensors::normal(sizes, 5);
        for (isa, exec) in execs() {
            let clean = run(&attention, &tensors, exec);
            for &x in poisons {
                for j in [0, 5, 17, 255, 256, keys - 1].into_iter().filter(|&j| j < keys) {
                    let mut poisoned = tensors.clone();
                    let tensor = pick(&mut poisoned);
                    let [b, h, _, d] = tensor.shape;
                    let column = j % d;
                    tensor.set([b - 1, h - 1, j, column], x);
                    let got = run(&attention, &poisoned, exec);
                    let what = format!("{sizes:?} {isa}: {x} in key {j}, column {column}");
                    // The oracle is slow: ask it where there is little to do, and about one instruction set else.
                    if rows * keys * (sizes[5] + sizes[6]) < 100_000 {
                        assert_same_class(&what, &attention, &poisoned, &got);
                    }
                    for index in crate::support::indices(got.out.shape) {
                        let (g, c) = (got.out.get(index), clean.out.get(index));
                        let group = index[1] / (sizes[1] / sizes[2]);
                        let reachable = index[0] == b - 1 && group == h - 1 && (whole_row || index[3] == column);
                        if !reachable || (!g.is_nan() && !g.is_infinite()) {
                            assert_eq!(g.to_bits(), c.to_bits(), "{what}: {index:?} is {g}, clean {c}");
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn nan_in_a_key_reaches_the_rows_that_see_it() {
    visible_in(|t| &mut t.k, true, &[f32::NAN]);
}

#[test]
fn nan_and_infinity_in_a_value_reach_its_column() {
    visible_in(|t| &mut t.v, false, &[f32::NAN, f32::INFINITY, f32::NEG_INFINITY]);
}

#[test]
fn infinities_of_both_signs_meet_as_nan() {
    for (isa, exec) in execs() {
        for (rows, keys, other) in [(3, 9, 4), (8, 300, 299)] {
            let mut tensors = Tensors::normal([1, 1, 1, rows, keys, 8, 20], 6);
            tensors.v.set([0, 0, 0, 7], f32::INFINITY);
            tensors.v.set([0, 0, other, 7], f32::NEG_INFINITY);
            let attention = causal_at(Alignment::BottomRight);
            let got = run(&attention, &tensors, exec);
            assert_same_class(&format!("{isa} {keys} keys"), &attention, &tensors, &got);
        }
    }
}

#[test]
fn a_score_of_plus_infinity_makes_its_row_nan() {
    for (isa, exec) in execs() {
        for keys in [1, 5, 300] {
            let mut tensors = Tensors::normal([1, 1, 1, 4, keys, 1, 20], 7);
            for i in 0..4 {
                tensors.q.set([0, 0, i, 0], 1.0);
            }
            tensors.k.set([0, 0, keys / 2, 0], f32::INFINITY);
            let got = run(&Attention::new(), &tensors, exec);
            assert_same_class(&format!("{isa} {keys} keys"), &Attention::new(), &tensors, &got);
        }
    }
}

/// NaNs of any payload and sign become the one quiet NaN, in everything that is written.
#[test]
fn every_output_has_one_nan() {
    for keys in [5, 300] {
        let mut case = Case::plain(&mut Rng::new(9), [1, 2, 1, 3, keys, 8, 5]);
        for (at, bits) in [(0, 0x7fc1_2345), (1, 0xffc5_4321_u32)] {
            case.q.set([0, at, 1, 0], f32::from_bits(bits));
            case.v.set([0, 0, at, at], f32::from_bits(bits));
        }
        case.k.set([0, 0, keys - 1, 2], f32::from_bits(0xffc0_0007));
        case.causal = true;
        case.alignment = Some(Alignment::BottomRight);
        for (isa, exec) in execs() {
            let full = case.run(exec, Wanted::ALL);
            let points = full.points.iter().flatten().flat_map(|x| &x.data);
            let mass = full.mass.iter().flat_map(|x| &x.data);
            let (mut nans, all) = (0, full.out.data.iter().chain(&full.lse.data).chain(points).chain(mass));
            for x in all.filter(|x| x.is_nan()) {
                assert_eq!(x.to_bits(), 0x7fc0_0000, "{isa}, {keys} keys");
                nans += 1;
            }
            assert!(nans > 4 * keys, "{isa}: {nans} NaNs");
        }
    }
}
