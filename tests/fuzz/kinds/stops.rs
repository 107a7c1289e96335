//! Calls that are stopped after any number of questions: rows are whole or untouched, and whatever was lent to the call
//! serves others.

use crate::fuzzer::array::indices;
use crate::fuzzer::case::Case;
use crate::fuzzer::compare::{Results, Written};
use crate::fuzzer::draw::{DTYPES, Home, draw_at, draw_of};
use crate::fuzzer::hosts::Hosts;
use crate::fuzzer::kinds::executors::shared;
use crate::fuzzer::outs::{Outs, Wanted};
use crate::fuzzer::rng::Rng;
use crate::fuzzer::stage::{How, Stage, Unfinished};
use core::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use sdpa::{Exec, Executor, Workspace};

pub(super) fn check(rng: &mut Rng) {
    let cache = Home::Cache(rng.pick(&DTYPES));
    let home = rng.pick(&[Home::Tensors, Home::Pages, cache]);
    let case = if rng.one_in(2) {
        draw_at(rng, home)
    } else {
        let sizes = shared(rng);
        draw_of(rng, home, sizes)
    };
    let (stage, hosts) = (Stage::new(rng, &case, home), Hosts::draw(rng));
    let expected = stage.run("to the end", &mut Outs::blank(rng, &case, Wanted::ALL), Exec::serial());
    let wanted = if rng.one_in(2) { Wanted { mass: true, ..Wanted::LEAST } } else { Wanted::LEAST };
    let (mut outs, mut workspace) = (Outs::blank(rng, &case, wanted), Workspace::new());
    let executor: Option<&(dyn Executor + Sync)> = if rng.one_in(2) { Some(&hosts) } else { None };
    let exec = Exec::serial().threads(if executor.is_some() { 8 } else { 1 });
    let what = format!("{hosts:?} {}: {}", executor.is_some(), case.describe());
    for _ in 0..2 {
        let (asked, after) = (AtomicUsize::new(0), rng.pick(&[0, 1, 2, 5, 20, usize::MAX]));
        let stop = || asked.fetch_add(1, SeqCst) >= after;
        let how = How { executor, stop: Some(&stop), ..exec.into() };
        let done = stage.run_into(outs.outputs(), how, &mut workspace);
        match done {
            Ok(()) => outs.take(&what).same(&what, &expected),
            Err(Unfinished::Stopped) => {
                assert!(asked.into_inner() > after, "{what}: nobody stopped it");
                whole_or_untouched(&what, &case, [&outs.clear(&what), &expected]);
            }
            Err(Unfinished::Thrown) => unreachable!("nothing throws"),
        }
    }
    let how = How { executor, ..exec.into() };
    assert_eq!(stage.run_into(outs.outputs(), how, &mut workspace), Ok(()), "{what}");
    outs.take("the next call").same("the next call", &expected);
}

/// Panics unless each row is as it always is or was never written, in all outputs alike; sums of weights by sequence and head.
fn whole_or_untouched(what: &str, case: &Case, [got, expected]: [&Results; 2]) {
    let lse = |of: &Results| of.lse.clone().expect("it was asked for");
    let [b, h, l, _] = got.out.bits.shape;
    let (got_lse, expected_lse) = (lse(got), lse(expected));
    for [b, h, l, _] in indices([b, h, l, 1]) {
        let out = is_written(what, &got.out, &expected.out, [b, h, l]);
        assert_eq!(is_written(what, &got_lse, &expected_lse, [b, h, l]), out, "{what}: row {l} of head {h} of {b}");
    }
    let Some((got, expected)) = got.mass.as_ref().zip(expected.mass.as_ref()) else { return };
    let [b, h, l, _] = got.bits.shape;
    let ends = case.ragged.as_ref().map_or_else(|| vec![0, l], |[_, keys]| keys.clone());
    for [b, h, ..] in indices([b, h, 1, 1]) {
        for keys in ends.windows(2).map(|ends| ends[0]..ends[1]) {
            let written: Vec<bool> = keys.clone().map(|l| is_written(what, got, expected, [b, h, l])).collect();
            let alike = written.windows(2).all(|w| w[0] == w[1]);
            assert!(alike, "{what}: sums of keys {keys:?} of head {h} of {b} are written in part");
        }
    }
}

/// True if a row is as it always is, false if it was never written.
fn is_written(what: &str, got: &Written, expected: &Written, [b, h, l]: [usize; 3]) -> bool {
    let (row, whole) = (got.bits.row(b, h, l), expected.bits.row(b, h, l));
    let written = row.iter().any(|&bits| bits != u32::MAX);
    assert!(!written || row == whole, "{what}: row {l} of head {h} of {b} is written in part");
    written
}
