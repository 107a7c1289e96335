//! Executors: threads started for each call, a pool that waits on a channel, the calling thread, and some that break their
//! promise.

use sdpa::Executor;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread;

/// Threads of the standard library, started for each call.
pub(crate) struct Scoped(pub(crate) usize);

impl Executor for Scoped {
    fn threads(&self) -> usize {
        self.0
    }

    fn run(&self, tasks: usize, task: &(dyn Fn(usize) + Sync)) {
        thread::scope(|scope| (0..tasks).for_each(|index| drop(scope.spawn(move || task(index)))));
    }
}

type Job = Box<dyn FnOnce() + Send>;

/// Threads that live as long as the pool and take jobs from a channel.
pub(crate) struct Pool {
    threads: usize,
    jobs: Sender<Job>,
}

impl Pool {
    pub(crate) fn new(threads: usize) -> Self {
        let (jobs, next) = channel::<Job>();
        let next = Arc::new(Mutex::new(next));
        let wait = |next: &Mutex<Receiver<Job>>| next.lock().unwrap().recv();
        for _ in 0..threads {
            let next = Arc::clone(&next);
            thread::spawn(move || {
                while let Ok(job) = wait(&next) {
                    job();
                }
            });
        }
        Self { threads, jobs }
    }
}

impl Executor for Pool {
    fn threads(&self) -> usize {
        self.threads
    }

    fn run(&self, tasks: usize, task: &(dyn Fn(usize) + Sync)) {
        // SAFETY: a lifetime alone is extended. Jobs use the task before they drop their sender, and this function
        // returns, or unwinds, only when all senders are dropped.
        let task: &'static (dyn Fn(usize) + Sync) = unsafe { core::mem::transmute(task) };
        let (done, all_done) = channel::<()>();
        for index in 0..tasks {
            let done = done.clone();
            let job = Box::new(move || {
                task(index);
                drop(done);
            });
            self.jobs.send(job).expect("threads live as long as the pool");
        }
        drop(done);
        assert!(all_done.recv().is_err(), "nothing is ever sent");
    }
}

/// The calling thread, last index first.
pub(crate) struct Backwards(pub(crate) usize);

impl Executor for Backwards {
    fn threads(&self) -> usize {
        self.0
    }

    fn run(&self, tasks: usize, task: &(dyn Fn(usize) + Sync)) {
        (0..tasks).rev().for_each(task);
    }
}

/// The calling thread, which remembers with how many tasks it was called.
pub(crate) struct Recorded {
    threads: usize,
    calls: Mutex<Vec<usize>>,
}

impl Recorded {
    pub(crate) fn new(threads: usize) -> Self {
        Self { threads, calls: Mutex::new(Vec::new()) }
    }

    pub(crate) fn calls(&self) -> Vec<usize> {
        self.calls.lock().unwrap().clone()
    }
}

impl Executor for Recorded {
    fn threads(&self) -> usize {
        self.threads
    }

    fn run(&self, tasks: usize, task: &(dyn Fn(usize) + Sync)) {
        self.calls.lock().unwrap().push(tasks);
        (0..tasks).for_each(task);
    }
}

/// Calls one index in `every` and leaves the rest out, the first always.
pub(crate) struct Lazy {
    pub(crate) threads: usize,
    pub(crate) every: usize,
}

impl Executor for Lazy {
    fn threads(&self) -> usize {
        self.threads
    }

    fn run(&self, tasks: usize, task: &(dyn Fn(usize) + Sync)) {
        (1..tasks).filter(|index| (index + 1).is_multiple_of(self.every)).for_each(task);
    }
}

/// Calls every index on two threads at once, and indices beyond the last.
pub(crate) struct Twice(pub(crate) usize);

impl Executor for Twice {
    fn threads(&self) -> usize {
        self.0
    }

    fn run(&self, tasks: usize, task: &(dyn Fn(usize) + Sync)) {
        thread::scope(|scope| {
            for index in [0..=tasks, 0..=tasks].into_iter().flatten().chain([usize::MAX]) {
                scope.spawn(move || task(index));
            }
        });
    }
}
