//! Thread pool: every index once, panics, callers at once and within each other, threads that sleep and end.

use sdpa_kernels::ThreadPool;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, panic_any};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Barrier, Mutex};
use std::thread;
use std::time::Duration;

/// Longer than threads without work stay awake.
const LONG: Duration = Duration::from_millis(20);

fn pool(threads: usize) -> ThreadPool {
    ThreadPool::new(threads).expect("the system has threads")
}

/// Runs `tasks` tasks and asserts that each index was called once.
fn each_once(pool: &ThreadPool, tasks: usize) {
    let calls: Vec<_> = (0..tasks).map(|_| AtomicUsize::new(0)).collect();
    pool.run(tasks, &|index| _ = calls[index].fetch_add(1, Relaxed));
    assert!(calls.iter().all(|calls| calls.load(Relaxed) == 1), "{tasks} tasks on {pool:?}: {calls:?}");
}

/// Runs a task on every thread of the pool at once.
fn on_all(pool: &ThreadPool, task: impl Fn() + Sync) {
    let all = Barrier::new(pool.threads());
    pool.run(pool.threads(), &|_| {
        all.wait();
        task();
    });
}

/// Numbers that are the same on every run.
fn numbers(seed: u64) -> impl FnMut(usize) -> usize {
    let mut state = seed;
    move |below| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % below
    }
}

#[test]
fn every_index_is_called_once_with_any_number_of_threads_and_tasks() {
    for threads in 0..=9 {
        let pool = pool(threads);
        assert_eq!(pool.threads(), threads.max(1));
        (0..=20).chain([1000]).for_each(|tasks| each_once(&pool, tasks));
    }
}

#[test]
fn a_pool_of_one_is_the_calling_thread() {
    let (pool, caller, order) = (pool(1), thread::current().id(), Mutex::new(Vec::new()));
    pool.run(5, &|index| {
        assert_eq!(thread::current().id(), caller);
        order.lock().unwrap().push(index);
    });
    assert_eq!(order.into_inner().unwrap(), [0, 1, 2, 3, 4]);
}

#[test]
fn all_threads_work_at_once_awake_or_asleep() {
    for threads in [2, 3, 8] {
        let pool = pool(threads);
        for pause in [Duration::ZERO, LONG, Duration::ZERO] {
            thread::sleep(pause);
            let ids = Mutex::new(Vec::new());
            // Nobody passes the barrier of `on_all` before all are there.
            on_all(&pool, || ids.lock().unwrap().push(thread::current().id()));
            let ids = ids.into_inner().unwrap();
            assert!((1..threads).all(|i| !ids[..i].contains(&ids[i])), "{ids:?}");
            assert!(ids.contains(&thread::current().id()), "the caller works too");
        }
    }
}

#[test]
fn a_call_returns_only_when_all_tasks_have() {
    let pool = pool(4);
    let mut slow = [const { AtomicUsize::new(0) }; 4];
    for round in 1..=20 {
        pool.run(4, &|index| {
            thread::sleep(Duration::from_micros(100 * index as u64));
            slow[index].store(round, Relaxed);
        });
        // No thread borrows them any more.
        assert!(slow.iter_mut().all(|last| *last.get_mut() == round), "{slow:?}");
    }
}

#[test]
fn a_panic_reaches_the_caller_and_the_pool_goes_on() {
    let pool = pool(3);
    for round in 0..50 {
        // In one task, which any thread may have, in all, and in those of the pool's threads or the caller's alone.
        let caller = thread::current().id();
        let tasks: [&(dyn Fn(usize) + Sync); 4] = [
            &|index| assert!(index != round % 6, "a task"),
            &|_| panic!("a task"),
            &|_| assert!(thread::current().id() == caller, "a task"),
            &|_| assert!(thread::current().id() != caller, "a task"),
        ];
        for (which, task) in tasks.into_iter().enumerate() {
            let both = Barrier::new(2);
            let result = catch_unwind(AssertUnwindSafe(|| {
                pool.run(2 + 4 * (which % 2), &|index| {
                    // So that another thread has one of two tasks.
                    if which == 2 {
                        both.wait();
                    }
                    task(index);
                });
            }));
            if which == 0 && round % 6 > 1 {
                assert!(result.is_ok(), "there are two tasks");
                continue;
            }
            assert_eq!(*result.expect_err("a panic").downcast::<&str>().expect("its message"), "a task");
            each_once(&pool, 7);
        }
    }
}

#[test]
fn panics_whose_payload_panics_when_dropped_leave_the_pool_in_order() {
    struct Dropped;
    struct Payload;
    impl Drop for Payload {
        fn drop(&mut self) {
            if !thread::panicking() {
                panic_any(Dropped);
            }
        }
    }
    let pool = pool(4);
    for _ in 0..20 {
        let panic = catch_unwind(AssertUnwindSafe(|| pool.run(8, &|_| panic_any(Payload)))).expect_err("a panic");
        assert!(panic.is::<Payload>());
        std::mem::forget(panic);
        each_once(&pool, 9);
    }
}

#[test]
fn callers_at_once_all_get_their_tasks_done() {
    // More callers than the pool helps at a time.
    let pool = pool(4);
    thread::scope(|scope| {
        for caller in 0..20 {
            let pool = &pool;
            scope.spawn(move || (0..300).for_each(|round| each_once(pool, (caller + round) % 7)));
        }
    });
}

#[test]
fn callers_at_once_are_all_helped() {
    let (pool, callers) = (pool(4), 3);
    let (calls, all) = (Barrier::new(callers), Barrier::new(2 * callers));
    thread::scope(|scope| {
        for _ in 0..callers {
            scope.spawn(|| {
                for pause in [Duration::ZERO, LONG] {
                    thread::sleep(pause);
                    calls.wait();
                    // Nobody passes before each call has two threads.
                    pool.run(2, &|_| _ = all.wait());
                }
            });
        }
    });
}

#[test]
fn tasks_may_call_again() {
    let (pool, other) = (pool(3), pool(2));
    let sum = AtomicUsize::new(0);
    for _ in 0..100 {
        pool.run(4, &|a| {
            pool.run(3, &|b| {
                other.run(3, &|c| pool.run(2, &|d| _ = sum.fetch_add(1000 * a + 100 * b + 10 * c + d, Relaxed)));
            });
        });
    }
    let expected: usize =
        (0..4 * 3 * 3 * 2).map(|n| 1000 * (n / 18) + 100 * (n / 6 % 3) + 10 * (n / 2 % 3) + n % 2).sum();
    assert_eq!(sum.into_inner(), 100 * expected);
}

#[test]
fn a_panic_in_a_call_within_a_task_reaches_the_outer_caller() {
    let pool = pool(3);
    for _ in 0..50 {
        let outer = || pool.run(3, &|a| pool.run(3, &|b| assert!((a, b) != (1, 2), "within")));
        let panic = catch_unwind(AssertUnwindSafe(outer)).expect_err("a panic");
        assert_eq!(*panic.downcast::<&str>().expect("its message"), "within");
        each_once(&pool, 5);
    }
}

thread_local! {
    /// Counts the thread when it ends.
    static ENDS: Cell<Option<Ends>> = const { Cell::new(None) };
}

struct Ends(Arc<AtomicUsize>);

impl Drop for Ends {
    fn drop(&mut self) {
        self.0.fetch_add(1, Relaxed);
    }
}

#[test]
fn dropping_a_pool_ends_its_threads() {
    for (threads, pause) in [(1, LONG), (2, Duration::ZERO), (2, LONG), (5, Duration::ZERO), (5, LONG)] {
        let (ended, caller) = (Arc::new(AtomicUsize::new(0)), thread::current().id());
        let pool = pool(threads);
        on_all(&pool, || {
            if thread::current().id() != caller {
                ENDS.set(Some(Ends(Arc::clone(&ended))));
            }
        });
        thread::sleep(pause);
        assert_eq!(ended.load(Relaxed), 0);
        drop(pool);
        assert_eq!(ended.load(Relaxed), threads - 1);
    }
    // Pools that were never used; their threads may not have begun.
    (0..50).for_each(|threads| drop(pool(threads % 5)));
}

#[test]
fn threads_are_woken_at_any_moment_of_falling_asleep() {
    // Pauses around the time that threads stay awake.
    let (pool, mut below) = (pool(3), numbers(1));
    for _ in 0..500 {
        let pause = Duration::from_nanos(50_000 + below(100_000) as u64);
        let start = std::time::Instant::now();
        while start.elapsed() < pause {
            std::hint::spin_loop();
        }
        // Nobody passes the barrier before all are awake.
        on_all(&pool, || ());
    }
}

#[test]
fn many_calls_of_all_kinds_at_once() {
    let pools = [pool(2), pool(3), pool(6)];
    thread::scope(|scope| {
        for caller in 0..6 {
            let (pools, mut below) = (&pools, numbers(caller));
            scope.spawn(move || {
                for _ in 0..400 {
                    let (pool, tasks, kind) = (&pools[below(3)], below(9), below(5));
                    match kind {
                        0 => pool.run(tasks, &|_| each_once(&pools[tasks % 3], tasks)),
                        1 => thread::sleep(Duration::from_micros(below(300) as u64)),
                        2 => {
                            let call = || {
                                pool.run(tasks, &|index| {
                                    if index == 3 {
                                        panic_any(caller)
                                    }
                                })
                            };
                            let result = catch_unwind(AssertUnwindSafe(call));
                            assert_eq!(
                                result.err().map(|panic| *panic.downcast().unwrap()),
                                (tasks > 3).then_some(caller)
                            );
                        }
                        _ => each_once(pool, tasks),
                    }
                }
            });
        }
    });
}

/// State letter and ticks of processor time of a thread.
#[cfg(target_os = "linux")]
fn state(thread: &str) -> (String, u64) {
    let stat = std::fs::read_to_string(format!("/proc/{thread}/stat")).expect("a thread that lives");
    let fields: Vec<_> = stat.rsplit_once(") ").expect("a name").1.split(' ').collect();
    (fields[0].to_owned(), fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap())
}

#[test]
#[cfg(target_os = "linux")]
fn threads_without_work_sleep() {
    let (pool, caller, names) = (pool(3), thread::current().id(), Mutex::new(Vec::new()));
    on_all(&pool, || {
        if thread::current().id() != caller {
            let name = std::fs::read_link("/proc/thread-self").expect("Linux names its threads");
            names.lock().unwrap().push(name.into_os_string().into_string().unwrap());
        }
    });
    let names = names.into_inner().unwrap();
    assert_eq!(names.len(), 2);
    // On a busy machine a thread may wait long for the core on which it would fall asleep.
    let rests = |_| {
        let before: Vec<_> = names.iter().map(|name| state(name)).collect();
        thread::sleep(Duration::from_millis(200));
        names.iter().zip(before).all(|(name, before)| before.0 == "S" && state(name) == before)
    };
    assert!((0..50).any(rests), "threads without work take processor time");
}
