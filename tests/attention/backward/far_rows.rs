//! Rows with scores that are all far from 0, as those that a finite mask hides wholly: their log-sum-exp, rounded to `f32`, does
//! not say how many keys there are, and weights must be right nevertheless.

use super::oracle::error;
use super::support::Back;
use crate::options::mods::{Functions, Score};
use crate::options::{Case, elements::Rounded};
use crate::support::{Rng, Tensor, assert_same_bits, execs};
use sdpa::parts::BackwardState;
use sdpa::{Alignment, Attention, Dropout, Dtype, Error, Exec, Gradients, Inputs, Saved, View, Window, Workspace};

/// Numbers that a row shares, at which scores of a multiple of ½ are exact.
const EXACT: [f32; 9] = [0.0, 255.0, 257.0, -256.0, 1e4, -1e4, 1e5, 1e6, -1e6];
/// Numbers beside which scores of a few units are lost.
const LARGE: [f32; 10] = [2.0, 1e7, -1e7, 1e9, -1e9, -1e20, -1e30, -3e38, f32::MIN, -5.0];

/// A case with scores that are exact in `f32`: q·k is the same number for all keys of a row, a multiple of 1. The bias adds what the
/// row shares, and with `steps` half a unit from key to key; it hides every seventh key of every fifth row, and all of row 3.
fn far(rng: &mut Rng, shared: &[f32], steps: bool, [rows, keys]: [usize; 2]) -> Back {
    let (batch, heads) = rng.pick(&[(1, [2, 2]), (2, [2, 2]), (1, [4, 2])]);
    let mut case = Case::plain(rng, [batch, heads[0], heads[1], rows, keys, 16, 16]);
    case.q = Tensor::from_fn(
        case.q.shape,
        |[b, h, l, d]| {
            if d < 4 { 4.0 * ((b + 3 * h + l + d) % 5) as f32 - 8.0 } else { 0.0 }
        },
    );
    let k = case.k.clone();
    case.k = Tensor::from_fn(k.shape, |[b, h, l, d]| if d < 4 { 1.0 } else { k.get([b, h, l, d]) });
    let bias = Tensor::from_fn([1, heads[0], rows, keys], |[_, h, l, j]| {
        let hidden = l == 3 || l.is_multiple_of(5) && j % 7 == 6;
        let step = if steps { 0.5 * ((j + h) % 5) as f32 } else { 0.0 };
        if hidden { f32::NEG_INFINITY } else { shared[(l + h) % shared.len()] + step }
    });
    case.bias = Some(Rounded::new(&bias, Dtype::F32));
    Back { d_lse: None, ..Back::of(rng, case) }
}

/// The largest number that a row shares, at least 100.
fn largest(back: &Back) -> f64 {
    let shared = back.case.bias.iter().flat_map(|bias| &bias.wide.data).filter(|x| x.is_finite());
    shared.fold(100.0, |largest, &x| f64::from(x).abs().max(largest))
}

#[track_caller]
fn check(what: &str, back: &Back) {
    let (expected, plain) = (back.oracle::<f64>(), back.oracle::<f32>());
    for (isa, exec) in execs() {
        for (((name, got), (_, expected)), (_, plain)) in back.run(exec).named().into_iter().zip(&expected).zip(&plain)
        {
            // Sums over all rows and keys, of terms as large as distances and products are, that cancel: as in `oracle.rs`.
            // A parameter's are as large as scores.
            let bound = match name {
                "slopes" | "scale" => 1e-4f64.max(2.0 * error(plain, expected)),
                "parameters" => 1e-6 * largest(back),
                _ => 2e-5,
            };
            let error = error(&got.data, expected);
            assert!(error < bound, "{what}, {isa}: gradient in {name} is off by {error:e}");
        }
    }
}

#[test]
fn gradients_are_right_at_any_number_that_scores_share() {
    for shared in EXACT.into_iter().chain(LARGE) {
        let back = far(&mut Rng::new(1), &[shared], false, [8, 300]);
        check(&format!("{shared:e}"), &back);
    }
}

#[test]
fn gradients_are_right_with_every_option() {
    for seed in 0..24 {
        let mut rng = Rng::new(94_000 + seed);
        let exact = seed.is_multiple_of(2);
        let sizes = rng.pick(&[[9, 300], [130, 520], [100, 17], [5, 5]]);
        let mut back = far(&mut rng, if exact { &EXACT } else { &LARGE }, exact, sizes);
        if exact {
            let score = rng.pick(&[None, Some(Score::Relative(0.5)), Some(Score::Same)]);
            back.case.functions = Functions { score, ..back.case.functions };
            back.case.alibi = (rng.below(3) == 0).then(|| vec![0.5, 1.0, 2.0, 0.25][..back.case.heads()].to_vec());
        } else {
            back.case.softcap = rng.pick(&[None, Some(5.0)]);
        }
        back.case.sinks = rng
            .pick(&[None, Some(1.0f32), Some(1e4), Some(-1e20), Some(-1e30)])
            .map(|sink| (0..back.case.heads()).map(|head| sink + head as f32).collect());
        back.case.causal = rng.below(3) == 0;
        back.case.alignment = Some(rng.pick(&[Alignment::TopLeft, Alignment::Offset(4), Alignment::Offset(400)]));
        back.case.window = rng.pick(&[
            None,
            None,
            Some(Window::inclusive(Some(2), None)),
            Some(Window::inclusive(Some(299), Some(0))),
        ]);
        back.d_lse = rng.pick(&[false, true]).then(|| {
            let [b, h, l, _] = back.case.q.shape;
            Tensor::normal([b, h, l, 1], &mut rng)
        });
        back.dropout = (rng.below(3) == 0).then_some(Dropout { p: 0.5, seed, offset: 1 });
        check(&format!("seed {seed}"), &back);
    }
}

/// ALiBi that favours keys thousands of places away, and a score function that moves all scores: no bias.
#[test]
fn slopes_and_functions_may_put_scores_far_from_zero() {
    let mut back = far(&mut Rng::new(2), &[0.0], false, [20, 300]);
    back.case.bias = None;
    back.case.alibi = Some(vec![1.0, 0.5, 2.0, 0.25][..back.case.heads()].to_vec());
    back.case.alignment = Some(Alignment::Offset(5_000));
    check("slopes", &back);
    back.case.functions = Functions { score: Some(Score::Relative(-64.0)), ..back.case.functions };
    check("function", &back);
}

/// The rounding error of the log-sum-exp comes with it or is computed anew, with the same bits, on any number of threads; and the
/// gradients of rows near 0 do not depend on the rows beside them.
#[test]
fn gradients_have_the_same_bits_with_the_second_column() {
    for (isa, exec) in execs() {
        let back = far(&mut Rng::new(3), &EXACT, true, [130, 520]);
        let alone = back.run(exec);
        for threads in [1, 2, 5] {
            let exec = exec.threads(threads);
            let mut full = back.unwritten();
            let [out, lse] = back.forward_columns(exec, 2);
            back.run_into(exec, [&out, &lse], &mut full, &mut Workspace::new());
            full.same(&format!("{isa}, {threads} threads"), &alone);
            back.run(exec).same(&format!("{isa}, {threads} threads, one column"), &alone);
        }
        let near = far(&mut Rng::new(3), &[EXACT[0]], true, [130, 520]).run(exec);
        for (head, row) in (0..alone.q.shape[1]).flat_map(|h| (0..130).map(move |l| (h, l))) {
            if (row + head).is_multiple_of(EXACT.len()) {
                let of = |x: &Tensor| x.part(0..1, head..head + 1, row..row + 1);
                assert_same_bits(&format!("{isa}, head {head}, row {row}"), &of(&alone.q), &of(&near.q));
            }
        }
    }
}

/// A call over some of the keys, with the results over all, does not take its keys for all: with two columns it is right, with one
/// as near as the rounded log-sum-exp is.
#[test]
fn calls_over_some_of_the_keys_are_no_calls_over_all() {
    for (shared, columns) in
        [(257.0, 1), (-300.0, 1), (1e4, 1), (-1e4, 2), (1e6, 2), (1e9, 2), (-1e30, 2), (f32::MIN, 2)]
    {
        let back = far(&mut Rng::new(4), &[shared], false, [8, 300]);
        let rounding = if columns == 1 { 2.0 * f64::from(shared.abs()) * f64::from(f32::EPSILON) } else { 0.0 };
        let [_, (_, dk), (_, dv), ..] = back.oracle::<f64>();
        for ((isa, exec), keys) in execs().flat_map(|exec| [(exec, 0..256), (exec, 256..300)]) {
            let [out, lse] = back.forward_columns(exec, columns);
            let some = |x: &Tensor| x.rows(keys.clone());
            let bias = back.case.bias.as_ref().map(|bias| {
                let [b, h, l, _] = bias.wide.shape;
                let part = |[b, h, l, j]: [usize; 4]| bias.wide.get([b, h, l, keys.start + j]);
                Rounded::new(&Tensor::from_fn([b, h, l, keys.len()], part), Dtype::F32)
            });
            let case = Case { k: some(&back.case.k), v: some(&back.case.v), bias, ..back.case.clone() };
            let part = Back { case, ..back.clone() };
            let mut full = part.unwritten();
            part.run_into(exec, [&out, &lse], &mut full, &mut Workspace::new());
            for (name, got, all) in [("k", &full.k, &dk), ("v", &full.v, &dv)] {
                let here = |[b, h, j, d]: [usize; 4]| ((b * got.shape[1] + h) * 300 + keys.start + j) * 16 + d;
                let expected: Vec<f64> = crate::support::indices(got.shape).map(|at| all[here(at)]).collect();
                let error = error(&got.data, &expected);
                assert!(error < 2e-5 + rounding, "{shared:e}, {isa}, {keys:?}: {name} is off by {error:e}");
            }
        }
    }
}

/// A log-sum-exp at the limit is taken as it is; beyond, a state refuses it unless its rounding error is there.
#[test]
fn a_state_refuses_rows_far_from_zero_without_the_second_column() {
    let x = [0.5f32; 2 * 8];
    let x = View::bhld(&x, [1, 1, 2, 8]).unwrap();
    let state = |lse: &[f32]| {
        let lse = View::bhld(lse, [1, 1, 2, lse.len() / 2]).unwrap();
        let saved = Saved::new(x, lse, x);
        BackwardState::new(Attention::new(), Inputs::new(x, x, x), saved, Exec::serial()).map(|_| ())
    };
    for near in [0.0, 256f32.next_down(), -256f32.next_down(), f32::NEG_INFINITY, f32::INFINITY, f32::NAN] {
        assert_eq!(state(&[1.0, near]), Ok(()), "{near}");
    }
    for far in [256.0, -256.0, 1e9, f32::MIN] {
        let error = state(&[1.0, far]).unwrap_err();
        assert!(matches!(error, Error::Needs { argument: "lse", .. }));
        let words = "lse: needs a second column (Outputs::lse) for rows beyond ±256, where one f32 is too coarse: a \
                     state cannot sum their keys first";
        assert_eq!(error.to_string(), words);
        assert_eq!(state(&[1.0, 0.0, far, 0.5]), Ok(()), "{far}");
        let saved = [1.0, far];
        let saved = Saved::new(x, View::bhl(&saved, [1, 1, 2]).unwrap(), x);
        Attention::new().backward(Inputs::new(x, x, x), saved, Gradients::new()).unwrap();
    }
}
