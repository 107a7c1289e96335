//! A random call: on every instruction set against the oracle, and then the same in other ways.

use crate::fuzzer::bits::{Recorder, settle, sizes};
use crate::fuzzer::case::Case;
use crate::fuzzer::compare::Results;
use crate::fuzzer::draw::{Home, SHARED, draw, draw_of, own_positions};
use crate::fuzzer::kinds::selected;
use crate::fuzzer::oracle::Oracle;
use crate::fuzzer::outs::{Outs, Wanted};
use crate::fuzzer::rng::Rng;
use crate::fuzzer::sources::{Source, in_integers};
use crate::fuzzer::stage::{How, Stage};
use crate::fuzzer::{parts, poison, unruly};
use sdpa::{CacheFormat, Exec, Isa, Precision, Workspace};
use std::sync::OnceLock;

/// One random call.
pub(crate) fn check(rng: &mut Rng) {
    let (mut case, home) = draw(rng);
    if rng.one_in(4) {
        own_positions(rng, &mut case);
    }
    check_case(rng, &case, home);
}

/// A call with keys from anywhere.
pub(super) fn bits(rng: &mut Rng, recorder: &mut Recorder) {
    let (home, sizes) = (Home::draw(rng), sizes(rng));
    let case = draw_of(rng, home, sizes);
    bits_of_case(rng, recorder, case, home);
}

pub(super) fn bits_of_tensors(rng: &mut Rng, recorder: &mut Recorder) {
    let sizes = sizes(rng);
    let case = draw_of(rng, Home::Tensors, sizes);
    bits_of_case(rng, recorder, case, Home::Tensors);
}

/// A call with keys that are there, and any outputs.
pub(super) fn bits_of_case(rng: &mut Rng, recorder: &mut Recorder, mut case: Case, home: Home) {
    settle(rng, &mut case);
    record_case(rng, recorder, &case, home);
}

/// A call with keys that are there, as it is, and any outputs.
pub(crate) fn record_case(rng: &mut Rng, recorder: &mut Recorder, case: &Case, home: Home) {
    recorder.describe(case, home);
    let (stage, wanted) = (Stage::new(rng, case, home), Wanted::draw(rng));
    recorder.say(wanted);
    recorder.each(rng, |rng, exec| stage.run("bits", &mut Outs::blank(rng, case, wanted), exec).all());
}

/// A call with keys that are there.
pub(crate) fn check_case(rng: &mut Rng, case: &Case, home: Home) {
    let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| check_all(rng, case, home)));
    if let Err(panic) = result {
        eprintln!("{home:?}: {}", case.describe());
        std::panic::resume_unwind(panic);
    }
}

fn check_all(rng: &mut Rng, case: &Case, home: Home) {
    let stage = Stage::new(rng, case, home);
    let oracle = match (home, &stage.source) {
        (_, Source::Cache(cache)) if home.is_integers() => in_integers(case, cache, home),
        _ => Oracle::of(case),
    };
    let answer = oracle.answer();
    let wanted = Wanted::draw(rng);
    // What one call leaves in a workspace is nothing to the next.
    let (mut first, mut workspace): (Option<Results>, _) = (None, Workspace::new());
    for isa in Isa::available() {
        let what = format!("{isa}, {wanted:?}");
        let mut outs = Outs::blank(rng, case, wanted);
        let results = stage.run_in(&what, &mut outs, Exec::serial().isa(isa), &mut workspace);
        results.check(&what, &answer);
        let exact = match case.settings.precision {
            Precision::Native => !isa.has_native_bf16(),
            Precision::Accurate => isa.matrix_unit().is_err(),
            _ => true,
        };
        if isa.has_fma() && exact {
            first.get_or_insert_with(|| results.clone()).same(&format!("{what}, beside another"), &results);
        }
    }
    let isas: Vec<Isa> = Isa::available().collect();
    let exec = Exec::serial().isa(rng.pick(&isas));
    let whole = Whole { case, home, exec };
    if case.products() >= SHARED || rng.one_in(if case.selected.is_some() { 20 } else { 200 }) {
        threads(rng, &stage, exec);
    }
    match rng.below(8) {
        0 | 1 => parts::rows(rng, &whole),
        2 if case.selected.is_some() => selected::lists_alone(rng, &whole),
        2 => parts::pieces_of_keys(rng, &whole),
        3 | 4 => poison::behind_masks(rng, &whole),
        5 => elsewhere(rng, &whole),
        6 => unruly::check(rng, &whole),
        _ => {}
    }
}

/// A case that was right as a whole.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Whole<'a> {
    pub(crate) case: &'a Case,
    pub(crate) home: Home,
    pub(crate) exec: Exec<'a>,
}

impl Whole<'_> {
    /// Everything that another case gives on the same instruction set.
    pub(crate) fn run(&self, rng: &mut Rng, what: &str, case: &Case, wanted: Wanted) -> Results {
        let stage = Stage::new(rng, case, self.home);
        stage.run(what, &mut Outs::blank(rng, case, wanted), self.exec)
    }
}

/// Two threads.
pub(crate) fn pool() -> &'static rayon::ThreadPool {
    static POOL: OnceLock<rayon::ThreadPool> = OnceLock::new();
    POOL.get_or_init(|| rayon::ThreadPoolBuilder::new().num_threads(2).build().expect("two threads"))
}

/// Two threads, in a workspace that other calls have used, change nothing; nor does what else is asked for.
fn threads(rng: &mut Rng, stage: &Stage<'_>, exec: Exec) {
    let wanted = if rng.one_in(2) { Wanted { mass: true, ..Wanted::LEAST } } else { Wanted::LEAST };
    let expected = stage.run("one thread", &mut Outs::blank(rng, stage.case, Wanted::ALL), exec);
    let (mut outs, mut workspace) = (Outs::blank(rng, stage.case, wanted), Workspace::new());
    for run in ["two threads", "two threads again"] {
        let how = How::from(exec.threads(2));
        let done = pool().install(|| stage.run_into(outs.outputs(), how, &mut workspace));
        assert!(done.is_ok(), "{run}: nothing was to be thrown");
        outs.take(run).same(run, &expected);
    }
}

/// The same numbers from elsewhere, laid out in another way, and with other outputs asked for.
fn elsewhere(rng: &mut Rng, whole: &Whole<'_>) {
    let Whole { case, home, exec, .. } = *whole;
    let expected = whole.run(rng, "once more", case, Wanted::ALL);
    let [_, k, v] = case.dtypes;
    let other = match home {
        Home::Bytes { channels: None } if rng.one_in(2) => Home::IntegerPool(CacheFormat::Int8PerToken),
        Home::Bits(kind) if rng.one_in(2) => Home::IntegerPool(CacheFormat::Int4(kind)),
        _ if home.is_integers() => home,
        // Sequences end to end are not to be had elsewhere; nor are two types in a cache.
        _ if case.ragged.is_some() || case.kv_lens.is_none() || shorter(case) => Home::Tensors,
        _ if k != v => rng.pick(&[Home::Tensors, Home::Pages]),
        _ => rng.pick(&[Home::Tensors, Home::Pages, Home::Pool(k), Home::Cache(k)]),
    };
    let what = format!("from {other:?}");
    let stage = Stage::new(rng, case, other);
    let wanted = Wanted { out: expected.out.dtype, ..Wanted::draw(rng) };
    stage.run(&what, &mut Outs::blank(rng, case, wanted), exec).same(&what, &expected);
}

/// True if no sequence has all the keys that the tensors have.
fn shorter(case: &Case) -> bool {
    (0..case.batch()).all(|b| case.kv_len(b) < case.keys(b))
}
