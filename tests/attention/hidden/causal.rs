//! Keys behind the causal rule, wherever the diagonal cuts tiles and blocks; what an earlier call left in scratch; gaps
//! between elements.

use super::{CASES, POISONS, causal_at};
use crate::support::{Tensors, assert_same, execs, offset_of, run, run_with};
use sdpa::{Alignment, Attention, Window, Workspace};

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
            let expected = run(&causal_at(alignment), &tensors, exec);
            for x in POISONS {
                for (name, k, v) in WHERE {
                    let got = run(&causal_at(alignment), &poisoned(&tensors, first..keys, x, k, v), exec);
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
            let clean = run(&causal_at(alignment), &tensors, exec);
            for cut in [0, 1, 2, 6, 15, 16, 17, 63, 200, 255, 256, 257, 299].into_iter().filter(|&j| j < keys) {
                // Rows before this one see none of `cut..`.
                let blind = (cut as isize - offset).clamp(0, rows as isize) as usize;
                for x in POISONS {
                    for (name, k, v) in WHERE {
                        let got = run(&causal_at(alignment), &poisoned(&tensors, cut..keys, x, k, v), exec);
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
        let unseen = causal_at(Alignment::Offset(-(rows.max(keys) as isize) - 1));
        for attention in [Attention::new(), causal_at(alignment), window(5), window(90), unseen] {
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
