//! Plans and a workspace kept for other calls than they were made for: the bits of each call's own.

use crate::fuzzer::case::Case;
use crate::fuzzer::draw::{Home, SHARED, draw_of, sizes_of};
use crate::fuzzer::kinds::attention::pool;
use crate::fuzzer::kinds::balance::check_rules;
use crate::fuzzer::kinds::gradients::Back;
use crate::fuzzer::outs::{Outs, Wanted};
use crate::fuzzer::pieces::any_isa;
use crate::fuzzer::rng::Rng;
use crate::fuzzer::stage::{How, Stage};
use sdpa::{Exec, Isa, Plan, Precision, Workspace};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

pub(super) fn check(rng: &mut Rng) {
    let isa = any_isa(rng);
    if rng.one_in(4) {
        return backward(rng, isa);
    }
    let calls = calls(rng);
    let what: Vec<String> = calls.iter().map(|(case, home)| format!("{home:?}: {}", case.describe())).collect();
    let all = AssertUnwindSafe(|| pool().install(|| forward(rng, isa, &calls)));
    if let Err(panic) = catch_unwind(all) {
        eprintln!("{}", what.join("\n"));
        resume_unwind(panic);
    }
}

/// A few calls, of any sizes or of the same.
fn calls(rng: &mut Rng) -> Vec<(Case, Home)> {
    let products = if rng.one_in(30) { SHARED..=SHARED * 5 / 4 } else { 0..=100_000 };
    let mut sizes = sizes_of(rng, products.clone());
    (0..2 + rng.below(3))
        .map(|_| {
            if rng.one_in(3) {
                sizes = sizes_of(rng, products.clone());
            }
            if rng.one_in(3) {
                // Few rows and several blocks: split by keys, unless an option forbids it.
                (sizes[3], sizes[4]) = (rng.pick(&[1, 2, 16]), rng.pick(&[257, 512, 700]));
            }
            let home = if rng.one_in(2) { Home::Tensors } else { Home::draw(rng) };
            let mut case = draw_of(rng, home, sizes);
            // A plan's instruction set is all of it that may change bits.
            case.settings.precision = Precision::Exact;
            (case, home)
        })
        .collect()
}

fn forward(rng: &mut Rng, isa: Isa, calls: &[(Case, Home)]) {
    let execs: Vec<Exec> = calls.iter().map(|_| Exec::serial().isa(isa).threads(rng.pick(&[1, 2, 8, 100]))).collect();
    let stages: Vec<Stage<'_>> = calls.iter().map(|(case, home)| Stage::new(rng, case, *home)).collect();
    let plans: Vec<Plan> = stages
        .iter()
        .zip(&execs)
        .map(|(stage, exec)| stage.plan(Outs::blank(rng, stage.case, Wanted::LEAST).outputs(), *exec))
        .collect();
    let wanted: Vec<Wanted> = calls.iter().map(|_| Wanted::draw(rng)).collect();
    let expected: Vec<_> = stages
        .iter()
        .zip(&wanted)
        .map(|(stage, wanted)| {
            stage.run("its own", &mut Outs::blank(rng, stage.case, *wanted), Exec::serial().isa(isa))
        })
        .collect();
    let mut workspace = Workspace::new();
    for _ in 0..2 * calls.len() {
        let (of, n) = (rng.below(plans.len()), rng.below(calls.len()));
        let (what, mut outs) = (format!("call {n} by the plan of {of}"), Outs::blank(rng, stages[n].case, wanted[n]));
        let how = How { plan: Some(&plans[of]), ..execs[of].into() };
        assert_eq!(stages[n].run_into(outs.outputs(), how, &mut workspace), Ok(()), "{what}");
        outs.take(&what).same(&what, &expected[n]);
        stages[n].told_of(outs.outputs(), |problem| {
            let workers = rng.pick(&[1, 2, 7]);
            check_rules(&what, &plans[of].balance(problem, workers), workers);
            assert!(!plans[of].explain(problem, None).to_string().is_empty(), "{what}");
        });
    }
}

/// The same of gradients.
fn backward(rng: &mut Rng, isa: Isa) {
    let backs: Vec<Back> = calls(rng)
        .into_iter()
        .map(|(case, home)| match home {
            Home::Tensors => Back::draw(rng, case),
            // Those of a cache have no gradients.
            _ => {
                let sizes = sizes_of(rng, 0..=100_000);
                let case = draw_of(rng, Home::Tensors, sizes);
                Back::draw(rng, case)
            }
        })
        .collect();
    let mut workspace = Workspace::new();
    let mut plan = |back: &Back| {
        let threads = rng.pick(&[1, 2]);
        back.plan(rng, Exec::serial().isa(isa).threads(threads))
    };
    let plans: Vec<_> = backs.iter().map(&mut plan).collect();
    for (n, back) in backs.iter().enumerate() {
        let of = rng.below(plans.len());
        back.describing(|| {
            let rng = &mut rng.clone();
            pool().install(|| back.by(rng, &format!("gradients {n} by the plan of {of}"), plans[of], &mut workspace));
        });
    }
}
