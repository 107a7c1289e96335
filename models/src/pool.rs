//! Thread pool: `kernels/src/thread_pool.rs` itself, with the locks and threads of shuttle, which runs each model in thousands
//! of orders of the threads' steps, drawn at random. A thread that is never woken is an error.

use crate::thread_pool::ThreadPool;
use shuttle::sync::Barrier;
use shuttle::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Orders of a model: all steps drawn alike, and as many in which few threads are interrupted.
const ORDERS: usize = 10_000;
/// Interruptions of the second kind of orders.
const INTERRUPTIONS: usize = 3;

fn in_many_orders(model: fn()) {
    shuttle::check_random(model, ORDERS);
    shuttle::check_pct(model, ORDERS, INTERRUPTIONS);
}

fn pool(threads: usize) -> ThreadPool {
    ThreadPool::new(threads).expect("shuttle has threads")
}

/// Calls two functions at once, on threads of their own: the one that waits for them wakes whenever one ends, which shuttle takes
/// for an error in a thread that waits for something else.
fn at_once(callers: [&(dyn Fn() + Sync); 2]) {
    shuttle::thread::scope(|scope| {
        for caller in callers {
            scope.spawn(caller);
        }
    });
}

/// Runs `tasks` tasks and asserts that each index was called once.
fn each_once(pool: &ThreadPool, tasks: usize) {
    let calls: Vec<_> = (0..tasks).map(|_| AtomicUsize::new(0)).collect();
    pool.run(tasks, &|index| _ = calls[index].fetch_add(1, SeqCst));
    assert!(calls.iter().all(|calls| calls.load(SeqCst) == 1));
}

/// Calls one after the other, between which threads may sleep, and the end of the pool.
#[test]
fn every_index_is_called_once() {
    in_many_orders(|| {
        let pool = pool(3);
        [2, 1, 4, 3].into_iter().for_each(|tasks| each_once(&pool, tasks));
    });
}

/// All threads of the pool, awake or asleep, help one call: nobody passes the barrier before.
fn all_help(threads: usize) {
    let (pool, all) = (pool(threads), Barrier::new(threads));
    (0..2).for_each(|_| pool.run(threads, &|_| _ = all.wait()));
}

#[test]
fn the_thread_of_a_pool_helps() {
    in_many_orders(|| all_help(2));
}

#[test]
fn all_threads_help() {
    in_many_orders(|| all_help(4));
}

/// Each of two callers has one of the pool's threads: nobody passes the barrier before.
#[test]
fn callers_at_once_are_all_helped() {
    in_many_orders(|| {
        let (pool, all) = (pool(3), Barrier::new(4));
        at_once([&|| pool.run(2, &|_| _ = all.wait()), &|| pool.run(2, &|_| _ = all.wait())]);
    });
}

#[test]
fn callers_at_once_and_tasks_that_call() {
    in_many_orders(|| {
        let pool = pool(2);
        at_once([&|| pool.run(2, &|tasks| each_once(&pool, 1 + tasks)), &|| each_once(&pool, 3)]);
    });
}

#[test]
fn a_panic_reaches_the_caller_when_all_tasks_are_done() {
    in_many_orders(|| {
        let (pool, begun, ended) = (pool(2), AtomicUsize::new(0), AtomicUsize::new(0));
        let task = |index| {
            begun.fetch_add(1, SeqCst);
            ended.fetch_add(1, SeqCst);
            assert!(index != 0, "a task");
        };
        catch_unwind(AssertUnwindSafe(|| pool.run(3, &task))).expect_err("a panic");
        assert_eq!(begun.load(SeqCst), ended.load(SeqCst));
        each_once(&pool, 2);
    });
}

/// Callers one after the other in one place have separate panics.
#[test]
fn a_panic_reaches_no_other_caller() {
    in_many_orders(|| {
        let pool = pool(2);
        let fails = || {
            catch_unwind(AssertUnwindSafe(|| pool.run(2, &|_| panic!("a task")))).expect_err("a panic");
        };
        at_once([&fails, &|| each_once(&pool, 2)]);
    });
}

/// Pools with threads that may not have begun.
#[test]
fn pools_end_that_were_never_used() {
    in_many_orders(|| drop(pool(3)));
}
