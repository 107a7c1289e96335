//! Thread pool in a process that `fork` has made: none of its threads are there.
#![cfg(unix)]

use sdpa_kernels::ThreadPool;
use std::ffi::c_int;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::thread;
use std::time::Duration;

unsafe extern "C" {
    fn fork() -> c_int;
    fn waitpid(process: c_int, status: *mut c_int, options: c_int) -> c_int;
    fn alarm(seconds: u32) -> u32;
    fn _exit(status: c_int) -> !;
}

/// Longer than threads without work stay awake.
const LONG: Duration = Duration::from_millis(5);

/// Calls a function in a forked process, and asserts that it returns within a minute.
fn in_child(what: &str, child: impl FnOnce()) {
    // SAFETY: the child has this thread alone. It allocates, which libraries of C allow there, waits for no other thread, and
    // never returns to the harness, so nothing of the other threads is used.
    let process = unsafe { fork() };
    if process == 0 {
        // SAFETY: the signal ends this process, which has no handler for it, if the child hangs.
        unsafe { alarm(60) };
        let done = catch_unwind(AssertUnwindSafe(child));
        // SAFETY: ends the process at once.
        unsafe { _exit(c_int::from(done.is_err())) };
    }
    assert!(process > 0, "{what}: no process");
    let mut status = -1;
    // SAFETY: the status is this function's.
    let ended = unsafe { waitpid(process, &raw mut status, 0) };
    assert_eq!((ended, status), (process, 0), "{what}: a signal (14 if it hung, 6 if it aborted), or a panic");
}

fn pool(threads: usize) -> ThreadPool {
    ThreadPool::new(threads).expect("the system has threads")
}

/// Runs `tasks` tasks and asserts that each index was called once, all on this thread if `alone`.
fn each_once(pool: &ThreadPool, tasks: usize, alone: bool) {
    let (calls, caller) = ([const { AtomicUsize::new(0) }; 9], thread::current().id());
    pool.run(tasks, &|index| {
        assert!(!alone || thread::current().id() == caller, "another thread");
        calls[index].fetch_add(1, Relaxed);
    });
    let once = |(index, calls): (usize, &AtomicUsize)| calls.load(Relaxed) == usize::from(index < tasks);
    assert!(calls.iter().enumerate().all(once), "{tasks} tasks: {calls:?}");
}

#[test]
fn a_pool_is_dropped_where_its_threads_are_not() {
    for threads in [1, 2, 5] {
        for pause in [Duration::ZERO, LONG] {
            let pool = pool(threads);
            each_once(&pool, 9, false);
            thread::sleep(pause);
            // This process drops it with the function, and ends its threads.
            in_child(&format!("{threads} threads, {pause:?}"), move || drop(pool));
        }
    }
}

#[test]
fn calls_in_a_child_are_done_by_their_caller() {
    for threads in [1, 2, 5] {
        for pause in [Duration::ZERO, LONG] {
            let pool = pool(threads);
            each_once(&pool, 9, false);
            thread::sleep(pause);
            in_child(&format!("{threads} threads, {pause:?}"), || {
                (0..9).for_each(|tasks| each_once(&pool, tasks, true));
                pool.run(3, &|_| each_once(&pool, 4, true));
                let panic = catch_unwind(AssertUnwindSafe(|| pool.run(3, &|index| assert!(index != 1, "a task"))));
                assert!(panic.is_err(), "a panic reaches the caller");
                // Threads of this process.
                let own = ThreadPool::new(3).expect("the system has threads");
                each_once(&own, 9, false);
                drop(own);
                each_once(&pool, 5, true);
            });
            each_once(&pool, 9, false);
        }
    }
}

/// A child is made while threads of the pool fall asleep, are woken and work, and hold whatever lock they may.
#[test]
fn a_child_made_at_any_moment_does_not_hang() {
    let (pool, done) = (pool(4), AtomicBool::new(false));
    thread::scope(|scope| {
        for caller in 0..2 {
            let (pool, done) = (&pool, &done);
            scope.spawn(move || {
                while !done.load(Relaxed) {
                    each_once(pool, 2 + caller, false);
                    thread::sleep(Duration::from_micros(90 + 10 * caller as u64));
                }
            });
        }
        let forked = catch_unwind(AssertUnwindSafe(|| {
            for _ in 0..2000 {
                in_child("at any moment", || (0..9).for_each(|tasks| each_once(&pool, tasks, true)));
            }
        }));
        done.store(true, Relaxed);
        forked.expect("no child hangs");
    });
}
