//! Threads that calls run on: good ones, and ones that leave out or repeat what they are asked for.

use super::rng::Rng;
use sdpa::{Executor, ThreadPool};
use std::sync::LazyLock;
use std::thread;

/// What is done with the indices of the workers.
#[derive(Debug, Clone, Copy)]
enum Manner {
    /// A thread each.
    Threads,
    /// The library's pool; many cases share its threads at once.
    Pool,
    /// One after the other, the last first.
    Backwards,
    /// One in n, the rest not at all.
    Some(usize),
    /// Each on two threads at once, and some that there are not.
    Twice,
}

/// Fewer threads than calls may have workers.
static POOL: LazyLock<ThreadPool> = LazyLock::new(|| ThreadPool::new(3).expect("three threads"));

/// Threads in a random manner.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Hosts {
    threads: usize,
    manner: Manner,
}

impl Hosts {
    pub(crate) fn draw(rng: &mut Rng) -> Self {
        let every = 1 + rng.below(4);
        let manner = rng.pick(&[Manner::Threads, Manner::Pool, Manner::Backwards, Manner::Some(every), Manner::Twice]);
        Self { threads: rng.pick(&[0, 1, 2, 3, 5, 8]), manner }
    }
}

impl Executor for Hosts {
    fn threads(&self) -> usize {
        self.threads
    }

    fn run(&self, tasks: usize, task: &(dyn Fn(usize) + Sync)) {
        match self.manner {
            Manner::Threads => {
                thread::scope(|scope| (0..tasks).for_each(|index| drop(scope.spawn(move || task(index)))));
            }
            Manner::Pool => POOL.run(tasks, task),
            Manner::Backwards => (0..tasks).rev().for_each(task),
            Manner::Some(every) => (0..tasks).filter(|index| index % every == every - 1).for_each(task),
            Manner::Twice => thread::scope(|scope| {
                for index in (0..=tasks).chain(0..=tasks).chain([usize::MAX]) {
                    scope.spawn(move || task(index));
                }
            }),
        }
    }
}
