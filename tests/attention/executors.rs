//! Threads that are not rayon's: the bits of one thread on any executor, whether it keeps its promise or not.

pub(crate) mod pools;
mod settings;

use crate::counting::counted;
use crate::support::{Answer, Tensors, assert_same, execs, outputs, unwritten};
use pools::{Backwards, Lazy, Pool, Recorded, Scoped, Twice};
use sdpa::{
    Attention, CurrentPool, Exec, Executor, Inputs, KvCache, KvShape, Mods, Plan, Position, Run, ThreadPool, Workspace,
};

const THREADS: usize = 3;

/// Rows of whole tasks, and one row against many keys: their blocks are shared out. Enough work for three threads each.
const SIZES: [[usize; 7]; 2] = [[1, 4, 2, 210, 500, 20, 33], [1, 8, 2, 1, 6000, 64, 64]];

/// Runs a call planned for three threads; returns its answer and the number of workers.
fn run(inputs: Inputs<'_>, exec: Exec, executor: &dyn Executor, workspace: &mut Workspace) -> (Answer, usize) {
    let mut answer = unwritten(&inputs);
    let problem = Attention::new().problem(inputs, outputs(&mut answer)).unwrap();
    let plan = Plan::new(&problem, exec);
    problem.run_with(&plan, workspace, Run::new().executor(executor)).expect("functions that fit");
    (answer, plan.workers())
}

/// Executors that keep their promise.
fn good() -> [(&'static str, Box<dyn Executor>); 5] {
    [
        ("the library's pool", Box::new(ThreadPool::new(THREADS).expect("threads"))),
        ("threads of the standard library", Box::new(Scoped(THREADS))),
        ("a pool on a channel", Box::new(Pool::new(THREADS))),
        ("one after the other, last first", Box::new(Backwards(THREADS))),
        ("rayon", Box::new(CurrentPool)),
    ]
}

/// Executors that do not.
fn bad() -> [(&'static str, Box<dyn Executor>); 4] {
    [
        ("nothing is called", Box::new(Lazy { threads: THREADS, every: usize::MAX })),
        ("every second index is left out", Box::new(Lazy { threads: THREADS, every: 2 })),
        ("every index twice at once, and one too many", Box::new(Twice(THREADS))),
        ("no threads", Box::new(Backwards(0))),
    ]
}

#[test]
fn any_executor_gives_the_bits_of_one_thread() {
    for (sizes, (isa, serial)) in SIZES.into_iter().flat_map(|sizes| execs().map(move |exec| (sizes, exec))) {
        let tensors = Tensors::normal(sizes, 11);
        let (expected, one) = run(tensors.inputs(), serial, &CurrentPool, &mut Workspace::new());
        assert_eq!(one, 1);
        // One workspace for all: an executor leaves nothing behind that another would see.
        let mut workspace = Workspace::new();
        for (name, executor) in good().into_iter().chain(bad()) {
            let exec = serial.threads(THREADS);
            let (answer, workers) = run(tensors.inputs(), exec, &*executor, &mut workspace);
            assert_eq!(workers, THREADS, "{name}");
            assert_same(&format!("{sizes:?}, {isa}, {name}"), &answer, &expected);
        }
    }
}

#[test]
fn an_executor_is_called_once_with_a_task_for_each_worker() {
    let tensors = Tensors::normal(SIZES[0], 12);
    for (threads, calls) in [(0, vec![]), (1, vec![]), (2, vec![2]), (THREADS, vec![THREADS]), (100, vec![THREADS])] {
        let executor = Recorded::new(threads);
        run(tensors.inputs(), Exec::serial().threads(THREADS), &executor, &mut Workspace::new());
        assert_eq!(executor.calls(), calls, "{threads} threads");
    }
    // One thread is the calling one.
    let executor = Recorded::new(THREADS);
    run(tensors.inputs(), Exec::serial(), &executor, &mut Workspace::new());
    assert!(executor.calls().is_empty());
    let on = Exec::on(&executor);
    assert_eq!((on.workers(f64::INFINITY), on.executor().threads()), (THREADS, THREADS));
}

#[test]
fn functions_and_caches_run_on_an_executor() {
    let [b, h, kv, rows, keys, dim, width] = SIZES[0];
    let tensors = Tensors::normal(SIZES[0], 13);
    let mut cache = KvCache::new(b, KvShape { kv_heads: kv, head_dim: dim, value_dim: width }).unwrap();
    cache.append(tensors.k.view(), tensors.v.view()).unwrap();
    let mods = Mods::new()
        .score(|score: f32, at: Position| score - 0.25 * at.head as f32)
        .mask(|at: Position| !(at.row + at.key).is_multiple_of(3))
        .weight(|weight: f32, at: Position| weight * (at.key % 5) as f32);
    assert!(b * h * rows * keys * (dim + width) * 2 > THREADS * 4_000_000, "too little work for three threads");
    let run = |exec: Exec, executor: &dyn Executor| {
        let mut answer = unwritten(&tensors.inputs());
        let inputs = Inputs::cached(tensors.q.view(), &cache);
        let problem = Attention::new().problem(inputs, outputs(&mut answer)).unwrap();
        let plan = Plan::new(&problem, exec);
        problem
            .run_with(&plan, &mut Workspace::new(), Run::new().mods(&mods).executor(executor))
            .expect("functions that fit");
        answer
    };
    let expected = run(Exec::serial(), &CurrentPool);
    for (name, executor) in good().into_iter().chain(bad()) {
        assert_same(name, &run(Exec::serial().threads(THREADS), &*executor), &expected);
    }
}

#[test]
fn a_warm_run_on_an_executor_allocates_nothing() {
    for sizes in SIZES {
        let tensors = Tensors::normal(sizes, 14);
        // Executors that allocate nothing themselves.
        let pool = ThreadPool::new(THREADS).expect("threads");
        for executor in [&Backwards(THREADS) as &dyn Executor, &pool] {
            let mut answer = unwritten(&tensors.inputs());
            let mut workspace = Workspace::new();
            let mut call = || {
                let problem = Attention::new().problem(tensors.inputs(), outputs(&mut answer)).unwrap();
                let plan = Plan::new(&problem, Exec::on(executor));
                problem.run_with(&plan, &mut workspace, Run::new().executor(executor)).expect("functions that fit");
            };
            call();
            assert_eq!(counted(call), (0, 0), "{sizes:?}");
        }
    }
}
