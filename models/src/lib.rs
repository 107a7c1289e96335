//! Models of what workers share: `kernels/src/work_queue.rs` itself, compiled with the atomics of loom, which runs each model
//! once for every order of the threads' steps, and every older value that an atomic may still have, that make a difference. Two
//! accesses to a cell that nothing orders are an error, and so is a worker that waits for ever.
//!
//! The loops around it are written down again, without arithmetic: the queue (`attention/schedule/launch.rs`), split-KV
//! (`key_blocks.rs` and `split_kv.rs` beside it) and the backward pass (`attention/backward/launch.rs`, `column.rs`). The thread
//! pool is modelled by shuttle: see `pool.rs`.

#![cfg(test)]

mod backward;
mod pool;
mod queue;
mod split_kv;
mod sync;
#[path = "../../kernels/src/thread_pool.rs"]
mod thread_pool;
#[path = "../../kernels/src/work_queue.rs"]
#[allow(dead_code, reason = "what looks ahead is not modelled: it changes nothing")]
mod work_queue;

use loom::cell::UnsafeCell;
use loom::sync::Arc;

/// Memory that is written without a lock. The checker reports two accesses that nothing orders, if one of them writes.
#[derive(Debug, Default)]
struct Memory(UnsafeCell<Vec<usize>>);

// SAFETY: loom reports accesses at once, which is what the models are for.
unsafe impl Sync for Memory {}

impl Memory {
    fn push(&self, number: usize) {
        // SAFETY: loom has checked that nobody else accesses the cell.
        self.0.with_mut(|cell| unsafe { (*cell).push(number) });
    }

    fn read(&self) -> Vec<usize> {
        // SAFETY: loom has checked that nobody writes the cell.
        self.0.with(|cell| unsafe { (*cell).clone() })
    }
}

/// Runs a model in every order; for more than two workers, of which these are too many, in those in which workers that could
/// go on are interrupted twice at most.
fn in_every_order(workers: usize, model: impl Fn() + Sync + Send + 'static) {
    let mut checker = loom::model::Builder::new();
    checker.preemption_bound = (workers > 2).then_some(2);
    checker.check(model);
}

/// Returns so many pieces of memory.
fn memories(n: usize) -> Vec<Memory> {
    (0..n).map(|_| Memory::default()).collect()
}

/// Calls `work` on so many workers, of which the calling thread is one, and returns when all have.
fn on_workers<T: Send + Sync + 'static>(workers: usize, shared: T, work: fn(&T)) -> Arc<T> {
    let shared = Arc::new(shared);
    let others: Vec<_> = (1..workers)
        .map(|_| {
            let shared = Arc::clone(&shared);
            loom::thread::spawn(move || work(&shared))
        })
        .collect();
    work(&shared);
    others.into_iter().for_each(|worker| worker.join().expect("the worker has not panicked"));
    shared
}
