//! Functions of the caller in backward calls: score functions with their derivatives, mask functions, refusals, panics.

use super::support::{Back, Full};
use crate::executors::pools::Scoped;
use crate::options::Case;
use crate::options::mods::{Functions, Keep, Place, Score, ScoreFn};
use crate::support::{Rng, Tensor, UNWRITTEN, execs};
use core::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use sdpa::{
    Alignment, Attention, BackwardPlan, CurrentPool, Error, Exec, Executor, Gradients, Inputs, MaskMod, Mods, Outputs,
    Position, Run, Saved, ScoreMod, View, ViewMut, WeightMod, WithDerivative, Workspace, naive,
};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

/// Several key blocks and row blocks, and every option that comes before or after the function.
fn back(functions: Functions) -> Back {
    let mut rng = Rng::new(7);
    let case = Case::plain(&mut rng, [2, 4, 2, 130, 300, 24, 32]);
    let case = Case {
        functions,
        softcap: Some(3.0),
        causal: true,
        alignment: Some(Alignment::BottomRight),
        alibi: Some(vec![0.1, -0.05, 0.2, 0.02]),
        sinks: Some(vec![0.5, -1.0, 0.0, 2.0]),
        bias: Some(Tensor::normal([1, 4, 130, 300], &mut rng).into()),
        ..case
    };
    Back::of(&mut rng, case)
}

/// Gradients in q, k and v with any functions.
fn gradients<S: ScoreMod, M: MaskMod, P: WeightMod>(
    back: &Back,
    exec: Exec,
    mods: &Mods<S, M, P>,
    saved: [&Tensor; 2],
) -> Full {
    let mut full = back.unwritten();
    back.run_as_mods(exec, saved, &mut full, &mut Workspace::new(), mods).expect("a good call");
    full
}

#[test]
fn pointers_and_closures_have_the_same_bits() {
    let back = back(Functions { score: Some(Score::Bent), mask: Some((Keep::Bands(9), true)), prob: None });
    let bent = ScoreFn(Score::Bent, Place::WHOLE);
    let pair =
        WithDerivative::new(move |s, at| bent.score(s, at), move |s, at| bent.derivative(s, at).expect("it has one"));
    let keep = |at: Position| !((at.row + 2 * at.key) / 9 + at.head + at.batch).is_multiple_of(3);
    for (isa, exec) in execs() {
        let expected = back.run(exec);
        let [out, lse] = back.forward(exec);
        let saved = [&out, &lse];
        let same = |what: &str, full: Full| expected.same(&format!("{isa}, {what}"), &full);
        let closures = Mods::new().score(pair).mask(keep);
        // Closures have no parameters.
        let of_closures = gradients(&back, exec, &closures, saved);
        same("closures", Full { parameters: expected.parameters.clone(), ..of_closures });
        let mods = Mods::new().score(&bent as &dyn ScoreMod).mask(&keep as &dyn MaskMod);
        same("references", gradients(&back, exec, &mods.weight(&() as &dyn WeightMod), saved));
        let score: Box<dyn ScoreMod> = Box::new(bent);
        same(
            "boxes",
            gradients(&back, exec, &Mods::new().score(score).mask(Box::new(keep) as Box<dyn MaskMod>), saved),
        );
        let score: Arc<dyn ScoreMod> = Arc::new(bent);
        same("shared", gradients(&back, exec, &Mods::new().score(score).mask(keep), saved));
    }
}

/// A softcap is a score function, where nothing comes between the two.
#[test]
fn a_softcap_written_out_has_its_gradients() {
    let mut rng = Rng::new(9);
    let case = Case::plain(&mut rng, [1, 2, 1, 100, 270, 16, 16]);
    let plain = Back::of(&mut rng, case);
    for (isa, exec) in execs() {
        let capped = Back { case: Case { softcap: Some(2.0), ..plain.case.clone() }, ..plain.clone() };
        let (expected, [out, lse]) = (capped.run(exec), capped.forward(exec));
        let cap = |s: f32, _: Position| 2.0 * (s / 2.0).tanh();
        let slope = |s: f32, _: Position| 1.0 - (s / 2.0).tanh().powi(2);
        let got = gradients(&plain, exec, &Mods::new().score(WithDerivative::new(cap, slope)), [&out, &lse]);
        for ((name, got), (_, expected)) in got.named().into_iter().zip(expected.named()) {
            let (largest, error) =
                got.data.iter().zip(&expected.data).fold((1.0f32, 0.0f32), |(largest, error), (x, y)| {
                    (largest.max(y.abs()), error.max((x - y).abs()))
                });
            assert!(error < 2e-5 * largest, "{isa}: gradient in {name} is off by {error:e}");
        }
    }
}

/// What is refused, and that nothing is written.
#[test]
fn functions_without_derivatives_are_refused() {
    let x = [0.5f32; 2 * 3 * 4];
    let (shape, lse, mut dq) = ([1, 2, 3, 4], [0.0f32; 6], [f32::from_bits(UNWRITTEN); 2 * 3 * 4]);
    let view = View::bhld(&x, shape).unwrap();
    let (inputs, saved) = (Inputs::new(view, view, view), Saved::new(view, View::bhl(&lse, [1, 2, 3]).unwrap(), view));
    let same = |s: f32, _: Position| s;
    let no_derivative =
        "score function: needs a derivative in a backward call: ScoreMod::derivative, or WithDerivative";
    let no_weights = "weight function: needs a forward call: it has no derivative";
    macro_rules! refused {
        ($mods:expr, $expected:expr) => {
            let (mods, expected) = ($mods, $expected);
            let gradients = Gradients::new().q(ViewMut::bhld(&mut dq, shape).unwrap());
            let error =
                sdpa::attention_backward_with(&Attention::new(), inputs, saved, gradients, Run::new().mods(&mods))
                    .unwrap_err();
            assert_eq!(error.to_string(), expected);
            assert!(dq.iter().all(|x| x.to_bits() == UNWRITTEN), "{expected}");
            let oracle = naive::gradients::<f64, _, _, _>(&Attention::new(), &inputs, view, None, &mods);
            assert_eq!(oracle.unwrap_err(), error);
        };
    }
    refused!(Mods::new().score(same), no_derivative);
    refused!(Mods::new().score(&same as &dyn ScoreMod).mask(|_: Position| true), no_derivative);
    refused!(Mods::new().weight(same), no_weights);
    refused!(Mods::new().score(WithDerivative::new(same, |_, _| 1.0)).weight(same), no_weights);
    // The first pair is asked about, and where there is none, nobody is.
    let none = View::bhld(&x[..0], [1, 2, 0, 4]).unwrap();
    let saved = Saved::new(none, View::bhl(&lse[..0], [1, 2, 0]).unwrap(), none);
    let empty = Inputs::new(none, view, view);
    sdpa::attention_backward_with(
        &Attention::new(),
        empty,
        saved,
        Gradients::new(),
        Run::new().mods(&Mods::new().score(same)),
    )
    .unwrap();
}

/// A function that panics stops the call, and whatever was lent to it serves others.
#[test]
fn a_panic_leaves_the_workspace_in_order() {
    let back = back(Functions { score: Some(Score::Bent), mask: None, prob: None });
    let bent = ScoreFn(Score::Bent, Place::WHOLE);
    let pool = rayon::ThreadPoolBuilder::new().num_threads(2).build().unwrap();
    for (isa, exec) in execs() {
        let (expected, [out, lse]) = (back.run(exec), back.forward(exec));
        for threads in [1, 2] {
            let (mut workspace, exec) = (Workspace::new(), exec.threads(threads));
            for late in [false, true] {
                let derivative = move |s: f32, at: Position| {
                    if at.key == 299 && at.row == 129 || !late && at.row == 100 {
                        std::panic::resume_unwind(Box::new("thrown"));
                    }
                    bent.derivative(s, at).expect("it has one")
                };
                let mods = Mods::new().score(WithDerivative::new(move |s, at| bent.score(s, at), derivative));
                let mut full = back.unwritten();
                let run = || back.run_as_mods(exec, [&out, &lse], &mut full, &mut workspace, &mods);
                let thrown = pool.install(|| catch_unwind(AssertUnwindSafe(run))).expect_err("it panics");
                assert_eq!(thrown.downcast_ref(), Some(&"thrown"), "{isa}");
            }
            expected.same(&format!("{isa}, {threads} threads"), &pool.install(|| back.run_in(exec, &mut workspace)));
        }
    }
}

/// Names as in the forward pass: a plan with a workspace, an executor, and all at once give the same.
#[test]
fn every_way_to_run_has_the_same_bits() {
    let x: Vec<f32> = (0..2 * 40 * 8).map(|i| (i as f32).sin()).collect();
    let (shape, rows) = ([1, 2, 40, 8], [1, 2, 40, 1]);
    let view = View::bhld(&x, shape).unwrap();
    let (inputs, attention) = (Inputs::new(view, view, view), Attention::new().causal());
    let mods = Mods::new()
        .score(WithDerivative::new(|s: f32, _: Position| s * s, |s: f32, _: Position| 2.0 * s))
        .mask(|at: Position| at.key % 3 != 1);
    let (mut out, mut lse) = (vec![0.0f32; 640], vec![0.0f32; 80]);
    let outputs = Outputs::new(ViewMut::bhld(&mut out, shape).unwrap()).lse(ViewMut::bhld(&mut lse, rows).unwrap());
    sdpa::attention_with(&attention, inputs, outputs, Run::new().mods(&mods)).unwrap();
    let saved = Saved::new(View::bhld(&out, shape).unwrap(), View::bhld(&lse, rows).unwrap(), view);
    let mut all = [(); 4].map(|()| vec![f32::NAN; 640]);
    for (way, dq) in all.iter_mut().enumerate() {
        let gradients = Gradients::new().q(ViewMut::bhld(dq, shape).unwrap());
        if way == 0 {
            sdpa::attention_backward_with(&attention, inputs, saved, gradients, Run::new().mods(&mods)).unwrap();
            continue;
        }
        let problem = attention.backward(inputs, saved, gradients).unwrap();
        let (plan, mut workspace) = (BackwardPlan::new(&problem, Exec::default()), Workspace::new());
        match way {
            1 => problem.run_with(&plan, &mut workspace, Run::new().mods(&mods)),
            2 => problem.run_with(&plan, &mut workspace, Run::new().mods(&mods).executor(&CurrentPool)),
            _ => problem.run_once_with(Exec::default(), Run::new().mods(&mods)),
        }
        .unwrap();
    }
    let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    assert!(all.iter().all(|dq| bits(dq) == bits(&all[0]) && dq.iter().all(|x| x.is_finite())));
}

/// However often the stop function is asked before it says stop: an error, or all the gradients, and then the workspace serves
/// the next call.
#[test]
fn a_backward_call_that_is_stopped_says_so() {
    let (shape, rows, len) = ([1, 2, 600, 8], [1, 2, 600, 1], 2 * 600 * 8);
    let x: Vec<f32> = (0..len).map(|i| (i as f32).sin()).collect();
    let view = View::bhld(&x, shape).unwrap();
    let (inputs, attention) = (Inputs::new(view, view, view), Attention::new());
    let (mut out, mut lse) = (vec![0.0f32; len], vec![0.0f32; 1200]);
    let outputs = Outputs::new(ViewMut::bhld(&mut out, shape).unwrap()).lse(ViewMut::bhld(&mut lse, rows).unwrap());
    sdpa::attention(&attention, inputs, outputs).unwrap();
    let saved = Saved::new(View::bhld(&out, shape).unwrap(), View::bhld(&lse, rows).unwrap(), view);
    for (threads, executor) in [(1, &CurrentPool as &dyn Executor), (2, &Scoped(2))] {
        let mut workspace = Workspace::new();
        let mut run = |run: Run<'_>| {
            let mut all = [(); 3].map(|()| vec![f32::NAN; len]);
            let [dq, dk, dv] = all.each_mut().map(|x| ViewMut::bhld(x, shape).unwrap());
            let problem = attention.backward(inputs, saved, Gradients::new().q(dq).k(dk).v(dv)).unwrap();
            let plan = BackwardPlan::new(&problem, Exec::serial().threads(threads));
            problem.run_with(&plan, &mut workspace, run).map(|()| all.map(|x| x.iter().map(|x| x.to_bits()).collect()))
        };
        let expected: [Vec<u32>; 3] = run(Run::new()).unwrap();
        // Three key blocks of each head.
        for asked in 0..=6 {
            let left = AtomicUsize::new(asked);
            let stop = || left.fetch_update(Relaxed, Relaxed, |left| left.checked_sub(1)).is_err();
            let done = run(Run::new().executor(executor).until(&stop));
            let wanted = if asked < 6 { Err(Error::Stopped) } else { Ok(expected.clone()) };
            assert!(done == wanted, "{threads} threads, asked {asked} times: {:?}", done.map(|_| ()));
        }
        assert!(run(Run::new()) == Ok(expected), "{threads} threads");
    }
}

/// Near saturation the derivative of the softcap is next to nothing, but right: 1 − tanh² would cancel.
#[test]
fn gradients_of_saturated_scores_are_right_relatively() {
    let mut rng = Rng::new(95_000);
    let n = 16;
    let mut case = Case { softcap: Some(2.0), scale: Some(1.0), ..Case::plain(&mut rng, [1, 1, 1, 1, n, n, n]) };
    // Score and value of a key are a number of its own: so is the gradient in the query's element.
    case.q.data.fill(1.0);
    case.k = Tensor::from_fn(case.k.shape, |[.., j, d]| if j == d { 1.1 * (j as f32 - 4.0) } else { 0.0 });
    case.v = Tensor::from_fn(case.v.shape, |[.., j, d]| if j == d { 1.0 } else { 0.0 });
    let mut back = Back { d_lse: None, ..Back::of(&mut rng, case) };
    back.d_out.data = (0..n).map(|j| if j % 2 == 0 { 1.0 } else { -1.0 }).collect();
    let [(_, expected), ..] = back.oracle::<f64>();
    for (isa, exec) in execs() {
        for (j, (&got, &expected)) in back.run(exec).q.data.iter().zip(&expected).enumerate() {
            let error = if expected == 0.0 { 0.0 } else { (f64::from(got) / expected - 1.0).abs() };
            assert!(error < 4e-6, "{isa}, key {j}: {got:e}, expected {expected:e}, off by {error:e} of it");
        }
    }
}
