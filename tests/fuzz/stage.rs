//! A case put into guarded memory, wherever its keys and values are to be, and run.

use super::array::Array;
use super::case::{Case, Cover, Polarity};
use super::compare::Results;
use super::draw::Home;
use super::functions::{Bound, Functions, Fuse, Hint, Keep, Prob, Score, Thrown};
use super::memory::{Flush, Memory, Plain};
use super::outs::Outs;
use super::place::{AnyPlaced, Placed};
use super::rng::Rng;
use super::sources::{Source, place};
use sdpa::{
    Error, Exec, Executor, Inputs, Mask, MaskMod, Mods, Outputs, Plan, Problem, Run, ScoreMod, SelectedKeys, WeightMod,
    Workspace,
};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

#[derive(Debug)]
enum Bytes {
    Numbers(Placed<u8>),
    Bools(Placed<bool>),
}

/// Everything that a call reads.
#[derive(Debug)]
pub(crate) struct Stage<'c> {
    pub(crate) case: &'c Case,
    q: AnyPlaced,
    pub(crate) source: Source,
    bias: Option<AnyPlaced>,
    mask: Option<Bytes>,
    alibi: Option<Memory<f32>>,
    sinks: Option<Memory<f32>>,
    kv_lens: Option<Memory<usize>>,
    ragged: Option<[Memory<usize>; 2]>,
    positions: [Option<Vec<&'c [i32]>>; 2],
    /// Keys that rows select.
    pub(crate) selected: Option<SelectedKeys>,
    /// Sequences of a cache or pool that the call is about; all of them if there is no list.
    names: Option<Memory<usize>>,
}

/// How to run.
#[derive(Clone, Copy)]
pub(crate) struct How<'a> {
    pub(crate) exec: Exec<'a>,
    pub(crate) fuse: Option<&'a Fuse>,
    /// Threads to run on, if not those of the current pool, and what may stop the call.
    pub(crate) executor: Option<&'a (dyn Executor + Sync)>,
    pub(crate) stop: Option<&'a (dyn Fn() -> bool + Sync)>,
    /// A plan, of this call or another; by default one is made.
    pub(crate) plan: Option<&'a Plan>,
}

/// Reason why a call did not come to its end.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Unfinished {
    Thrown,
    Stopped,
}

impl<'a> From<Exec<'a>> for How<'a> {
    fn from(exec: Exec<'a>) -> Self {
        Self { exec, fuse: None, executor: None, stop: None, plan: None }
    }
}

pub(crate) fn list<T: Plain>(rng: &mut Rng, elements: &[T]) -> Memory<T> {
    Memory::of(elements, if rng.one_in(2) { Flush::Low } else { Flush::High })
}

impl<'c> Stage<'c> {
    pub(crate) fn new(rng: &mut Rng, case: &'c Case, home: Home) -> Self {
        let source = place(rng, case, home);
        Self::over(rng, case, source)
    }

    /// Over keys and values that are somewhere already.
    pub(crate) fn over(rng: &mut Rng, case: &'c Case, source: Source) -> Self {
        let q = AnyPlaced::of(rng, &case.q, case.dtypes[0]);
        let bias = case.bias.as_ref().map(|(x, dtype)| AnyPlaced::of(rng, &x.of, *dtype));
        let mask = case.mask.as_ref().map(|(x, _)| {
            let bools = rng.one_in(3);
            if bools { Bytes::Bools(Placed::of(rng, &x.of)) } else { Bytes::Numbers(Placed::of(rng, &x.of)) }
        });
        let alibi = case.alibi.as_ref().map(|x| list(rng, x));
        let sinks = case.sinks.as_ref().map(|x| list(rng, x));
        let kv_lens = case.kv_lens.as_ref().map(|x| list(rng, x));
        let ragged = case.ragged.as_ref().map(|[q, k]| [list(rng, q), list(rng, k)]);
        let lists = |all: &'c Option<Vec<Vec<i32>>>| all.as_ref().map(|all| all.iter().map(|list| &list[..]).collect());
        let positions = case.positions.each_ref().map(lists);
        let selected = case.selected.as_ref().map(|of| {
            let lens: Vec<usize> = (0..case.batch()).map(|b| case.kv_len(b)).collect();
            of.made(rng, &lens)
        });
        Self { case, q, source, bias, mask, alibi, sinks, kv_lens, ragged, positions, selected, names: None }
    }

    /// About some sequences of a cache or pool, by name.
    pub(crate) fn about(self, rng: &mut Rng, names: &[usize]) -> Self {
        Self { names: Some(list(rng, names)), ..self }
    }

    fn with_mask<'a>(&'a self, inputs: Inputs<'a>) -> Inputs<'a> {
        let (Some(bytes), Some((entries, polarity))) = (&self.mask, &self.case.mask) else { return inputs };
        let mask = match (bytes, polarity) {
            (Bytes::Numbers(x), Polarity::NonzeroKeeps) => Mask::keep(x.view()),
            (Bytes::Numbers(x), Polarity::NonzeroHides) => Mask::drop(x.view()),
            (Bytes::Bools(x), Polarity::NonzeroKeeps) => Mask::keep(x.view()),
            (Bytes::Bools(x), Polarity::NonzeroHides) => Mask::drop(x.view()),
        };
        match entries.cover {
            Cover::All => inputs.mask(mask),
            Cover::First => inputs.mask_prefix(mask),
            Cover::Last => inputs.mask_suffix(mask),
        }
    }

    fn with_bias<'a>(&'a self, inputs: Inputs<'a>) -> Inputs<'a> {
        let (Some(bias), Some((entries, _))) = (&self.bias, &self.case.bias) else { return inputs };
        match entries.cover {
            Cover::All => inputs.bias(bias.view()),
            Cover::First => inputs.bias_prefix(bias.view()),
            Cover::Last => inputs.bias_suffix(bias.view()),
        }
    }

    pub(crate) fn inputs(&self) -> Inputs<'_> {
        let q = self.q.view();
        let mut inputs = match &self.source {
            Source::Tensors { k, v } => {
                let mut inputs = Inputs::new(q, k.view(), v.view());
                inputs = self.kv_lens.as_ref().map_or(inputs, |x| inputs.kv_lens(x.slice()));
                self.ragged.as_ref().map_or(inputs, |[q, k]| inputs.ragged(q.slice(), k.slice()))
            }
            Source::Pool(pool) => Inputs::paged(q, pool.pages().expect("a good table")),
            Source::Packed(pool) => Inputs::paged(q, pool.pages()),
            Source::Cache(cache) => Inputs::cached(q, cache),
        };
        if let Some(names) = &self.names {
            inputs = inputs.sequences(names.slice());
            inputs = self.ragged.as_ref().map_or(inputs, |[q, _]| inputs.ragged_queries(q.slice()));
        }
        inputs = self.with_mask(self.with_bias(inputs));
        let [rows, keys] = &self.positions;
        inputs = rows.as_ref().map_or(inputs, |x| inputs.row_positions(x));
        inputs = keys.as_ref().map_or(inputs, |x| inputs.key_positions(x));
        inputs = self.selected.as_ref().map_or(inputs, |x| inputs.selected(x));
        inputs = self.alibi.as_ref().map_or(inputs, |x| inputs.alibi(x.slice()));
        self.sinks.as_ref().map_or(inputs, |x| inputs.sinks(x.slice()))
    }

    /// Runs on one thread, or on those of the pool this is called in. An error if a function threw, or the call was
    /// stopped.
    pub(crate) fn run_into(
        &self,
        outputs: Outputs<'_>,
        how: How<'_>,
        workspace: &mut Workspace,
    ) -> Result<(), Unfinished> {
        let problem = self.case.attention().problem(self.inputs(), outputs).expect("a good call");
        let plan = how.plan.copied().unwrap_or_else(|| Plan::new(&problem, how.exec));
        let run = || go(problem, &plan, workspace, &self.case.functions, how);
        let done = if how.fuse.is_none() { Ok(run()) } else { catch_unwind(AssertUnwindSafe(run)) };
        match done {
            Ok(done) => done.map_err(|error| {
                assert_eq!(error, Error::Stopped);
                Unfinished::Stopped
            }),
            Err(thrown) if thrown.is::<Thrown>() => Err(Unfinished::Thrown),
            Err(other) => resume_unwind(other),
        }
    }

    /// The plan of the call.
    pub(crate) fn plan(&self, outputs: Outputs<'_>, exec: Exec) -> Plan {
        self.told_of(outputs, |problem| Plan::new(problem, exec))
    }

    /// What a function says of the call.
    pub(crate) fn told_of<T>(&self, outputs: Outputs<'_>, of: impl FnOnce(&Problem<'_>) -> T) -> T {
        of(&self.case.attention().problem(self.inputs(), outputs).expect("a good call"))
    }

    /// Everything that a good call writes.
    pub(crate) fn run(&self, what: &str, outs: &mut Outs, exec: Exec) -> Results {
        self.run_in(what, outs, exec, &mut Workspace::new())
    }

    /// The same, in a workspace that others may have used.
    pub(crate) fn run_in(&self, what: &str, outs: &mut Outs, exec: Exec, workspace: &mut Workspace) -> Results {
        let done = self.run_into(outs.outputs(), exec.into(), workspace);
        assert_eq!(done, Ok(()), "{what}");
        outs.take(what)
    }
}

/// Runs with the functions there are. Each combination is compiled for every instruction set, so those of two functions
/// go by way of all three.
fn go(
    problem: Problem<'_>,
    plan: &Plan,
    workspace: &mut Workspace,
    functions: &Functions,
    how: How<'_>,
) -> Result<(), Error> {
    fn bound<'a, F>(function: F, functions: &Functions, how: How<'a>) -> Bound<'a, F> {
        Bound { function, origin: functions.origin, fuse: how.fuse }
    }
    let none = Mods::new();
    match (functions.score, functions.mask, functions.prob) {
        (None, None, None) => on(problem, plan, workspace, &none, how),
        (Some(score), None, None) => on(problem, plan, workspace, &none.score(bound(score, functions, how)), how),
        (None, Some(mask), None) => on(problem, plan, workspace, &none.mask(bound(mask, functions, how)), how),
        (None, None, Some(prob)) => on(problem, plan, workspace, &none.weight(bound(prob, functions, how)), how),
        (score, mask, prob) => {
            let score = bound(score.unwrap_or(Score::Same), functions, how);
            let mask = bound(mask.unwrap_or((Keep::All, Hint::Truth)), functions, how);
            let prob = bound(prob.unwrap_or(Prob::Same), functions, how);
            on(problem, plan, workspace, &none.score(score).mask(mask).weight(prob), how)
        }
    }
}

/// Runs with these functions, where and for how long the call is to.
fn on<S: ScoreMod, M: MaskMod, P: WeightMod>(
    problem: Problem<'_>,
    plan: &Plan,
    workspace: &mut Workspace,
    mods: &Mods<S, M, P>,
    how: How<'_>,
) -> Result<(), Error> {
    let mut run = Run::new().mods(mods);
    if let Some(executor) = how.executor {
        run = run.executor(executor);
    }
    if let Some(stop) = how.stop {
        run = run.until(stop);
    }
    problem.run_with(plan, workspace, run)
}

/// An array of rows that are there, the rest NaN: what a pool has where nobody's keys are.
pub(crate) fn nothing(shape: [usize; 4]) -> Array {
    Array::from_fn(shape, |_| f32::NAN)
}
