//! A thread pool under several callers at once, with tasks that call it again or panic: each index once; the bits of one
//! thread.

use crate::fuzzer::case::Case;
use crate::fuzzer::compare::Results;
use crate::fuzzer::draw::{Home, draw_of};
use crate::fuzzer::functions::{Functions, Fuse, Part, Thrown};
use crate::fuzzer::kinds::executors::shared;
use crate::fuzzer::kinds::gradients;
use crate::fuzzer::outs::{Outs, Wanted};
use crate::fuzzer::rng::Rng;
use crate::fuzzer::stage::{How, Stage, Unfinished};
use core::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use sdpa::{Exec, ThreadPool, Workspace};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::thread;

pub(super) fn check(rng: &mut Rng) {
    let pool = ThreadPool::new(rng.pick(&[0, 1, 2, 3, 5])).expect("a few threads");
    let callers = rng.pick(&[1, 2, 3, 10]);
    let seeds: Vec<u64> = (0..callers).map(|_| rng.bits()).collect();
    let calls = rng.one_in(2);
    let of_caller = |seed: u64| {
        let rng = &mut Rng::of_call(seed, 0);
        if calls { call(rng, &pool) } else { count(rng, &pool) }
    };
    thread::scope(|scope| {
        let callers: Vec<_> = seeds.iter().map(|&seed| scope.spawn(move || of_caller(seed))).collect();
        for caller in callers {
            if let Err(panic) = caller.join() {
                resume_unwind(panic);
            }
        }
    });
}

/// Tasks that count their calls, some of them by tasks of their own, and one that may panic.
fn count(rng: &mut Rng, pool: &ThreadPool) {
    for _ in 0..1 + rng.below(20) {
        let (tasks, inner) = (rng.pick(&[0, 1, 2, 3, 8, 100]), rng.pick(&[0, 0, 1, 2, 5]));
        let (every, panics) = (1 + rng.below(4), rng.one_in(4).then(|| rng.below(2 * tasks + 1)));
        let counts: Vec<AtomicUsize> = (0..tasks).map(|_| AtomicUsize::new(0)).collect();
        let inside = AtomicUsize::new(0);
        let task = |index: usize| {
            counts[index].fetch_add(1, Relaxed);
            if index.is_multiple_of(every) {
                pool.run(inner, &|_| _ = inside.fetch_add(1, Relaxed));
            }
            if Some(index) == panics {
                resume_unwind(Box::new(Thrown));
            }
        };
        let done = catch_unwind(AssertUnwindSafe(|| pool.run(tasks, &task)));
        let counts: Vec<usize> = counts.into_iter().map(AtomicUsize::into_inner).collect();
        match done {
            Ok(()) => {
                assert!(panics.is_none_or(|index| index >= tasks), "task {panics:?} of {tasks} panicked unheard");
                assert!(counts.iter().all(|&n| n == 1), "{counts:?}");
                assert_eq!(inside.into_inner(), tasks.div_ceil(every) * inner, "calls of tasks");
            }
            Err(thrown) if thrown.is::<Thrown>() => {
                let index = panics.expect("nothing else throws");
                assert!(counts[index] == 1 && counts.iter().all(|&n| n <= 1), "{counts:?}");
            }
            Err(other) => resume_unwind(other),
        }
    }
}

/// A call on the pool a few times, at times inside one of the pool's own tasks.
fn call(rng: &mut Rng, pool: &ThreadPool) {
    let sizes = shared(rng);
    if rng.one_in(4) {
        let case = draw_of(rng, Home::Tensors, sizes);
        return gradients::check_on(rng, case, pool);
    }
    let case = Case { functions: functions(rng), ..draw_of(rng, Home::Tensors, sizes) };
    let (stage, wanted) = (Stage::new(rng, &case, Home::Tensors), Wanted::LEAST);
    let expected = stage.run("one thread", &mut Outs::blank(rng, &case, wanted), Exec::serial());
    let mut workspace = Workspace::new();
    for _ in 0..1 + rng.below(3) {
        if rng.one_in(2) {
            run(rng, &stage, pool, &mut workspace, &expected);
            continue;
        }
        // Each task makes the call, while the others do.
        let seeds: Vec<u64> = (0..rng.pick(&[1, 2, 3])).map(|_| rng.bits()).collect();
        let task = |n: usize| run(&mut Rng::of_call(seeds[n], 1), &stage, pool, &mut Workspace::new(), &expected);
        pool.run(seeds.len(), &task);
    }
}

fn functions(rng: &mut Rng) -> Functions {
    use crate::fuzzer::functions::{Origin, Score};
    let score = rng.one_in(3).then_some(Score::Relative(0.02));
    Functions { score, mask: None, prob: None, origin: Origin::default() }
}

/// The call on the pool; a function of it may panic, and the next one is right.
fn run(rng: &mut Rng, stage: &Stage<'_>, pool: &ThreadPool, workspace: &mut Workspace, expected: &Results) {
    let (mut outs, exec) = (Outs::blank(rng, stage.case, Wanted::LEAST), Exec::on(pool).threads(rng.pick(&[2, 8])));
    let fuse = (stage.case.functions.score.is_some() && rng.one_in(3)).then(|| Fuse::new(Part::Score, rng.below(5000)));
    let how = How { executor: Some(pool), fuse: fuse.as_ref(), ..exec.into() };
    match stage.run_into(outs.outputs(), how, workspace) {
        Ok(()) => outs.take("on the pool").same("on the pool", expected),
        Err(unfinished) => {
            assert!(unfinished == Unfinished::Thrown && fuse.is_some(), "{unfinished:?}");
            outs.clear("a function that panicked");
            let how = How { executor: Some(pool), ..exec.into() };
            assert_eq!(stage.run_into(outs.outputs(), how, workspace), Ok(()), "the next call");
            outs.take("the next call").same("the next call", expected);
        }
    }
}
