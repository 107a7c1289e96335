//! What is behind a mask changes no bit of anything; what is in front of it reaches the outputs that arithmetic says.

use crate::support::{Answer, Sizes, Tensor, Tensors, assert_same, execs, offset_of, run, run_with};
use sdpa::{Alignment, Attention, Window, Workspace, naive};

const POISONS: [f32; 4] = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 1e38];

/// Rows and keys of different lengths, tiles and blocks cut by the diagonal, shared heads, dims of no whole vector.
const CASES: [(Sizes, Alignment); 9] = [
    ([1, 1, 1, 1, 3, 1, 1], Alignment::TopLeft),
    ([1, 1, 1, 7, 7, 4, 5], Alignment::TopLeft),
    ([2, 2, 1, 5, 40, 16, 16], Alignment::TopLeft),
    ([1, 6, 2, 33, 65, 20, 33], Alignment::Offset(10)),
    ([1, 1, 1, 20, 600, 16, 16], Alignment::Offset(250)),
    ([1, 2, 1, 100, 300, 40, 17], Alignment::TopLeft),
    ([1, 1, 1, 300, 270, 16, 48], Alignment::BottomRight),
    ([1, 1, 1, 12, 257, 257, 8], Alignment::Offset(-4)),
    ([1, 1, 1, 9, 30, 8, 300], Alignment::Offset(3)),
];

fn causal(alignment: Alignment) -> Attention {
    Attention::new().causal().align(alignment)
}

/// What to poison.
const WHERE: [(&str, bool, bool); 3] = [("k", true, false), ("v", false, true), ("k and v", true, true)];

fn poisoned(tensors: &Tensors, keys: core::ops::Range<usize>, x: f32, k: bool, v: bool) -> Tensors {
    let mut poisoned = tensors.clone();
    for j in keys {
        if k {
            poisoned.k.fill_row(j, x);
        }
        if v {
            poisoned.v.fill_row(j, x);
        }
    }
    poisoned
}

/// Row `i` sees the keys up to `i + offset`: how many that is.
fn seen_by(i: usize, offset: isize, keys: usize) -> usize {
    (i as isize + offset + 1).clamp(0, keys as isize) as usize
}

#[test]
fn keys_that_no_row_sees_do_not_matter() {
    for (sizes @ [.., rows, keys, _, _], alignment) in CASES {
        let tensors = Tensors::normal(sizes, 1);
        let first = seen_by(rows - 1, offset_of(alignment, rows, keys), keys);
        for (isa, exec) in execs() {
            let expected = run(&causal(alignment), &tensors, exec);
            for x in POISONS {
                for (name, k, v) in WHERE {
                    let got = run(&causal(alignment), &poisoned(&tensors, first..keys, x, k, v), exec);
                    assert_same(&format!("{sizes:?} {alignment:?} {isa}: {x} in {name}"), &got, &expected);
                }
            }
        }
    }
}

#[test]
fn keys_after_a_row_do_not_matter_to_it() {
    for (sizes @ [.., rows, keys, _, _], alignment) in CASES {
        let tensors = Tensors::normal(sizes, 2);
        let offset = offset_of(alignment, rows, keys);
        for (isa, exec) in execs() {
            let clean = run(&causal(alignment), &tensors, exec);
            for cut in [0, 1, 2, 6, 15, 16, 17, 63, 200, 255, 256, 257, 299].into_iter().filter(|&j| j < keys) {
                // Rows before this one see none of `cut..`.
                let blind = (cut as isize - offset).clamp(0, rows as isize) as usize;
                for x in POISONS {
                    for (name, k, v) in WHERE {
                        let got = run(&causal(alignment), &poisoned(&tensors, cut..keys, x, k, v), exec);
                        let what = format!("{sizes:?} {alignment:?} {isa}: {x} in {name} from key {cut}");
                        assert_same(&what, &got.rows(0..blind), &clean.rows(0..blind));
                    }
                }
            }
        }
    }
}

#[test]
fn what_other_calls_left_in_the_workspace_does_not_matter() {
    let window = |left| Attention::new().align(Alignment::BottomRight).window(Window::inclusive(Some(left), Some(0)));
    for (sizes @ [.., rows, keys, _, _], alignment) in CASES {
        let tensors = Tensors::normal(sizes, 5);
        // Whole blocks; the first of several blocks seen by some tiles and groups only; nothing seen by anybody.
        let unseen = causal(Alignment::Offset(-(rows.max(keys) as isize) - 1));
        for attention in [Attention::new(), causal(alignment), window(5), window(90), unseen] {
            for (isa, exec) in execs() {
                let clean = run(&attention, &tensors, exec);
                for x in POISONS {
                    let mut workspace = Workspace::new();
                    run_with(&attention, &poisoned(&tensors, 0..keys, x, false, true), exec, None, &mut workspace);
                    run_with(
                        &Attention::new(),
                        &poisoned(&tensors, 0..keys, x, false, true),
                        exec,
                        None,
                        &mut workspace,
                    );
                    let got = run_with(&attention, &tensors, exec, None, &mut workspace);
                    assert_same(&format!("{sizes:?} {attention:?} {isa}: after {x}"), &got, &clean);
                }
            }
        }
    }
}

#[test]
fn gaps_between_elements_do_not_matter() {
    // Every layout but the dense ones leaves gaps, which `laid_out` fills with NaN: here with the rest in turn.
    let tensors = Tensors::normal([1, 4, 2, 19, 37, 20, 33], 3);
    for (isa, exec) in execs() {
        let expected = run(&Attention::new(), &tensors, exec);
        for layout in [crate::support::Layout::Padded, crate::support::Layout::Spread] {
            for x in POISONS {
                let mut spread = tensors.laid_out(layout, layout, layout);
                for tensor in [&mut spread.q, &mut spread.k, &mut spread.v] {
                    tensor.data.iter_mut().filter(|y| y.is_nan()).for_each(|y| *y = x);
                }
                assert_same(&format!("{isa} {layout:?}: {x}"), &run(&Attention::new(), &spread, exec), &expected);
            }
        }
    }
}

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
    let mut cases: Vec<_> = CASES.into_iter().map(|(sizes, alignment)| (sizes, causal(alignment))).collect();
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
            let attention = causal(Alignment::BottomRight);
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
