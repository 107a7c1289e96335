//! Threads that calls run on: by default those of rayon's current pool, which no other file names. Without the feature
//! `rayon`, and without a pool of your own, everything runs in order.

pub(crate) mod exec;
pub(crate) mod executor;
pub(crate) mod run;
pub(crate) mod workers;

use crate::threads::executor::Executor;
#[cfg(feature = "unfused")]
use std::sync::{Mutex, PoisonError};

/// Rayon's current pool: the one the calling thread belongs to, else the global one. Without the feature `rayon`, the
/// calling thread alone.
///
/// Calls use this executor if you set none.
///
/// ```
/// use sdpa::{CurrentPool, Executor};
/// use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
/// let sum = AtomicUsize::new(0);
/// CurrentPool.run(5, &|index| drop(sum.fetch_add(index, Relaxed)));
/// assert_eq!(sum.into_inner(), 10);
/// ```
#[derive(Debug, Clone, Copy, Default)]
pub struct CurrentPool;

impl Executor for CurrentPool {
    fn threads(&self) -> usize {
        current_threads()
    }

    /// Runs tasks on the pool. They must dispatch on the instruction set inside: a closure handed to rayon does not
    /// inherit the caller's target features.
    fn run(&self, tasks: usize, task: &(dyn Fn(usize) + Sync)) {
        #[cfg(feature = "rayon")]
        if tasks > 1 {
            use rayon::prelude::*;
            return (0..tasks).into_par_iter().with_max_len(1).for_each(task);
        }
        (0..tasks).for_each(task);
    }
}

/// Calls `work` on every part, on an executor. There are as many workers as `scratch` has pieces of `each` floats, one
/// piece per worker; workers take the next part until none is left.
#[cfg(feature = "unfused")]
pub(crate) fn parts<P: Send>(
    executor: &dyn Executor,
    scratch: &mut [f32],
    each: usize,
    parts: impl Iterator<Item = P> + Send,
    work: impl Fn(&mut [f32], P) + Sync,
) {
    let (workers, queue) = (scratch.len() / each, Mutex::new(parts));
    let pieces = Mutex::new(scratch.chunks_exact_mut(each));
    let worker = |_| {
        let piece = pieces.lock().unwrap_or_else(PoisonError::into_inner).next();
        let Some(scratch) = piece else { return };
        loop {
            let part = queue.lock().unwrap_or_else(PoisonError::into_inner).next();
            let Some(part) = part else { return };
            work(scratch, part);
        }
    };
    if workers > 1 {
        executor.run(workers, &worker);
    }
    // The calling thread alone, or what an executor that broke its promise left undone.
    worker(0);
}

/// Returns the number of threads of the pool a call would run in.
pub(crate) fn current_threads() -> usize {
    #[cfg(feature = "rayon")]
    return rayon::current_num_threads();
    #[cfg(not(feature = "rayon"))]
    1
}
