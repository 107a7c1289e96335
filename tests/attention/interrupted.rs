//! Calls that do not end: stopped, or by a panic of the caller's functions. Rows are whole or untouched, and whatever was
//! lent to the call serves others.

use crate::executors::pools::{Pool, Scoped};
use crate::support::{Tensor, Tensors, UNWRITTEN, assert_same_bits, execs};
use core::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use sdpa::{
    Attention, BlockClass, BlockPosition, CurrentPool, Error, Exec, Executor, Inputs, KvCache, KvShape, MaskMod, Mods,
    Outputs, Plan, Position, Run, ScoreMod, ViewMut, WeightMod, Workspace,
};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

const THREADS: usize = 3;

/// Rows of whole tasks, and few rows against many keys: their blocks are shared out.
const ROWS: [usize; 7] = [1, 4, 2, 210, 500, 20, 33];
const BLOCKS: [usize; 7] = [1, 8, 2, 1, 6000, 64, 64];

/// All that a call writes.
struct Written {
    out: Tensor,
    lse: Tensor,
    /// Wanted only where keys are not shared out: they need every row whole.
    weights: Option<Tensor>,
    sums: Option<Tensor>,
}

impl Written {
    fn blank([b, h, kv, rows, keys, _, width]: [usize; 7]) -> Self {
        let blank = |shape| Tensor::filled(shape, f32::from_bits(UNWRITTEN));
        let whole = rows > 16;
        Self {
            out: blank([b, h, rows, width]),
            lse: blank([b, h, rows, 1]),
            weights: whole.then(|| blank([b, h, rows, keys])),
            sums: whole.then(|| blank([b, kv, keys, 1])),
        }
    }

    fn outputs(&mut self) -> Outputs<'_> {
        fn view(tensor: &mut Tensor) -> ViewMut<'_> {
            ViewMut::bhld(&mut tensor.data, tensor.shape).unwrap()
        }
        let mut outputs = Outputs::new(view(&mut self.out)).lse(view(&mut self.lse));
        if let Some(weights) = &mut self.weights {
            outputs = outputs.weights(view(weights));
        }
        match &mut self.sums {
            Some(sums) => outputs.key_weight_sums(view(sums)),
            None => outputs,
        }
    }

    fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        [&self.out, &self.lse].into_iter().chain(&self.weights).chain(&self.sums)
    }

    /// Returns how many rows of heads from `first_head` on are written. All must be as `expected` or untouched, in all
    /// outputs alike; key weight sums by head.
    fn rows_written(&self, expected: &Self, first_head: usize) -> usize {
        let untouched = |row: &[f32]| row.iter().all(|x| x.to_bits() == UNWRITTEN);
        let same = |a: &[f32], b: &[f32]| a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits());
        let [_, heads, rows, _] = self.out.shape;
        let written = (first_head * rows..heads * rows).filter(|&n| {
            let by_row = self.tensors().zip(expected.tensors()).take(2 + self.weights.iter().len());
            let states = by_row.map(|(got, expected)| {
                let row = |of: &'_ Tensor| n * of.shape[3]..(n + 1) * of.shape[3];
                let (got, expected) = (&got.data[row(got)], &expected.data[row(expected)]);
                assert!(untouched(got) || same(got, expected), "row {n} is neither untouched nor right: {got:?}");
                !untouched(got)
            });
            let states: Vec<_> = states.collect();
            assert!(states.iter().all(|&state| state == states[0]), "row {n} is written in part: {states:?}");
            states[0]
        });
        let written = written.count();
        let sums = self.sums.iter().zip(&expected.sums).flat_map(|(got, expected)| {
            let (keys, first) = (got.shape[2], first_head * got.shape[1] / heads);
            got.data.chunks(keys).zip(expected.data.chunks(keys)).skip(first)
        });
        for (got, expected) in sums {
            assert!(untouched(got) || same(got, expected), "sums of a head are neither untouched nor right");
        }
        written
    }
}

#[track_caller]
fn assert_whole(what: &str, got: &Written, expected: &Written) {
    for (got, expected) in got.tensors().zip(expected.tensors()) {
        assert_same_bits(what, got, expected);
    }
}

/// A call, its memory, and what it writes if nothing stops it.
struct Call {
    tensors: Tensors,
    sizes: [usize; 7],
    exec: Exec<'static>,
    workspace: Workspace,
    expected: Written,
}

type Stop<'s> = &'s (dyn Fn() -> bool + Sync);

impl Call {
    fn new(sizes: [usize; 7], exec: Exec<'static>) -> Self {
        let mut expected = Written::blank(sizes);
        let tensors = Tensors::normal(sizes, 21);
        let problem = Attention::new().problem(tensors.inputs(), expected.outputs()).unwrap();
        problem.run_once(exec.threads(1));
        Self { tensors, sizes, exec, workspace: Workspace::new(), expected }
    }

    /// Runs with functions that change nothing, to the end or until they or `stop` end it.
    fn run<S: ScoreMod, M: MaskMod, P: WeightMod>(
        &mut self,
        mods: &Mods<S, M, P>,
        executor: &dyn Executor,
        stop: Stop<'_>,
    ) -> (Written, std::thread::Result<Result<(), Error>>) {
        let mut written = Written::blank(self.sizes);
        let problem = Attention::new().problem(self.tensors.inputs(), written.outputs()).unwrap();
        let plan = Plan::new(&problem, self.exec);
        assert_eq!(plan.partials_bytes() > 0, self.sizes == BLOCKS);
        let how = Run::new().mods(mods).executor(executor).until(stop);
        let done = catch_unwind(AssertUnwindSafe(|| problem.run_with(&plan, &mut self.workspace, how)));
        (written, done)
    }

    /// Runs to the end in the workspace that is there.
    fn check(&mut self, what: &str, executor: &dyn Executor) {
        let (written, done) = self.run(&Mods::new(), executor, &|| false);
        assert!(matches!(done, Ok(Ok(()))), "{what}");
        assert_whole(what, &written, &self.expected);
    }
}

/// Every kind of call, on one thread and on several.
fn calls() -> impl Iterator<Item = (String, Call, &'static dyn Executor)> {
    let threads: [(usize, &dyn Executor); 2] = [(1, &CurrentPool), (THREADS, &Scoped(THREADS))];
    let kinds = [ROWS, BLOCKS].into_iter().flat_map(move |sizes| threads.map(|of| (sizes, of)));
    kinds.flat_map(|(sizes, (threads, executor))| {
        execs().map(move |(isa, exec)| {
            (format!("{sizes:?}, {isa}, {threads} threads"), Call::new(sizes, exec.threads(threads)), executor)
        })
    })
}

#[test]
fn a_call_that_is_stopped_at_once_writes_nothing() {
    assert_eq!(Error::Stopped.to_string(), "stopped before all was computed");
    for (what, mut call, executor) in calls() {
        let (written, done) = call.run(&Mods::new(), executor, &|| true);
        assert!(matches!(done, Ok(Err(Error::Stopped))), "{what}");
        assert_eq!(written.rows_written(&call.expected, 0), 0, "{what}");
        call.check(&what, executor);
    }
}

/// Wherever a call may be stopped, one thread: more and more rows are written, until all are.
#[test]
fn a_stopped_call_leaves_rows_whole_or_untouched() {
    for sizes in [ROWS, BLOCKS] {
        let mut call = Call::new(sizes, Exec::serial());
        let (mut before, mut some) = (0, false);
        for asked in 0.. {
            let left = AtomicUsize::new(asked);
            let stop = || left.fetch_update(Relaxed, Relaxed, |left| left.checked_sub(1)).is_err();
            let (written, done) = call.run(&Mods::new(), &CurrentPool, &stop);
            let rows = written.rows_written(&call.expected, 0);
            assert!(rows >= before, "{sizes:?}, asked {asked} times: {rows} rows, {before} before");
            let all = sizes[1] * sizes[3];
            some |= (1..all).contains(&rows);
            before = rows;
            if matches!(done, Ok(Ok(()))) {
                assert_eq!(rows, all);
                assert_whole("not stopped", &written, &call.expected);
                // Two heads with their tasks; or every block of 256 keys, and a merge for each head.
                assert!(asked > if sizes == ROWS { 5 } else { 2 * 6000 / 256 + 2 }, "{sizes:?}: asked {asked} times");
                break;
            }
        }
        assert!(some, "{sizes:?}: never stopped between tasks");
        call.check("after all", &CurrentPool);
    }
}

/// A flag that a mask function sets as soon as it is called: tasks that were begun are done, no other begins.
#[test]
fn a_flag_set_during_a_call_stops_it() {
    for (what, mut call, executor) in calls() {
        let calls = AtomicUsize::new(0);
        let mods = Mods::new().mask(|_: Position| calls.fetch_add(1, Relaxed) < usize::MAX);
        let (written, done) = call.run(&mods, executor, &|| calls.load(Relaxed) > 0);
        assert!(matches!(done, Ok(Err(Error::Stopped))), "{what}");
        let (rows, all) = (written.rows_written(&call.expected, 0), call.sizes[1] * call.sizes[3]);
        // A call by key blocks has not come to merging them.
        let fits = if call.sizes == BLOCKS { rows == 0 } else { (1..all).contains(&rows) };
        assert!(fits, "{what}: {rows} of {all} rows");
        call.check(&what, executor);
    }
}

/// What the functions below panic with; thrown past the hook, which would print it.
struct Thrown(usize);

/// Panics at a later key of head 1.
fn throw(at: Position) {
    if at.head == 1 && at.key >= 300 {
        resume_unwind(Box::new(Thrown(at.key)));
    }
}

/// Mask that panics when it is asked about a block.
struct Unclassed;

impl MaskMod for Unclassed {
    fn keep(&self, _: Position) -> bool {
        true
    }

    fn class(&self, block: BlockPosition) -> BlockClass {
        if block.head == 1 {
            resume_unwind(Box::new(Thrown(block.keys.start)));
        }
        BlockClass::All
    }
}

/// Checks what a panic left behind: it came through; rows of the other key/value head are whole or untouched, and all are
/// untouched if blocks were shared out.
fn check_thrown(
    what: &str,
    call: &mut Call,
    executor: &dyn Executor,
    (written, done): (Written, std::thread::Result<Result<(), Error>>),
) {
    let thrown = done.expect_err(what);
    assert!(thrown.downcast::<Thrown>().expect(what).0 < call.sizes[4], "{what}");
    if call.sizes == BLOCKS {
        assert_eq!(written.rows_written(&call.expected, 0), 0, "{what}");
    } else {
        written.rows_written(&call.expected, call.sizes[1] / call.sizes[2]);
    }
    call.check(what, executor);
}

#[test]
fn a_panic_in_a_function_reaches_the_caller_and_leaves_everything_usable() {
    for (what, mut call, executor) in calls() {
        let score = |score: f32, at: Position| {
            throw(at);
            score
        };
        let keep = |at: Position| {
            throw(at);
            true
        };
        let stop = || false;
        let thrown = call.run(&Mods::new().score(score), executor, &stop);
        check_thrown(&format!("{what}, score"), &mut call, executor, thrown);
        let thrown = call.run(&Mods::new().mask(keep), executor, &stop);
        check_thrown(&format!("{what}, mask"), &mut call, executor, thrown);
        let thrown = call.run(&Mods::new().mask(Unclassed), executor, &stop);
        check_thrown(&format!("{what}, class"), &mut call, executor, thrown);
        let thrown = call.run(&Mods::new(), executor, &|| resume_unwind(Box::new(Thrown(0))));
        check_thrown(&format!("{what}, stop"), &mut call, executor, thrown);
        // With a weight function, one that changes nothing too, the rows that are written have bits of their own.
        let (_, thrown) = call.run(&Mods::new().weight(score), executor, &stop);
        assert!(thrown.is_err_and(|thrown| thrown.is::<Thrown>()), "{what}, weight");
        call.check(&format!("{what}, after weight"), executor);
    }
}

#[test]
fn after_a_panic_pools_and_caches_serve_other_calls() {
    let Tensors { q, k, v } = Tensors::normal(ROWS, 22);
    let [b, _, kv, _, _, dim, width] = ROWS;
    let mut cache = KvCache::new(b, KvShape { kv_heads: kv, head_dim: dim, value_dim: width }).unwrap();
    cache.append(k.view(), v.view()).unwrap();
    let mods = Mods::new().mask(|at: Position| {
        throw(at);
        true
    });
    let mut workspace = Workspace::new();
    let mut run = |executor: &dyn Executor, throws: bool| {
        let mut written = Written::blank(ROWS);
        let inputs = Inputs::cached(q.view(), &cache);
        let problem = Attention::new().problem(inputs, written.outputs()).unwrap();
        let plan = Plan::new(&problem, Exec::serial().threads(THREADS));
        match throws {
            true => problem.run_with(&plan, &mut workspace, Run::new().mods(&mods).executor(executor)),
            false => problem.run_with(&plan, &mut workspace, Run::new().executor(executor)),
        }
        .expect("functions that fit");
        written
    };
    let tensors = Inputs::new(q.view(), k.view(), v.view());
    let mut expected = Written::blank(ROWS);
    Attention::new().problem(tensors, expected.outputs()).unwrap().run_once(Exec::serial());
    let rayon = rayon::ThreadPoolBuilder::new().num_threads(THREADS).build().unwrap();
    let pool = Pool::new(THREADS);
    for _ in 0..3 {
        let thrown = catch_unwind(AssertUnwindSafe(|| run(&pool, true)));
        assert!(thrown.err().is_some_and(|thrown| thrown.is::<Thrown>()));
        assert_whole("a pool on a channel", &run(&pool, false), &expected);
    }
    rayon.scope(|_| {
        for _ in 0..3 {
            let thrown = catch_unwind(AssertUnwindSafe(|| run(&CurrentPool, true)));
            assert!(thrown.err().is_some_and(|thrown| thrown.is::<Thrown>()));
            assert_whole("rayon", &run(&CurrentPool, false), &expected);
        }
    });
}
