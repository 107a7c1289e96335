//! Threads that calls run on: by default those of rayon's current pool, which no other file names. Without the feature
//! `rayon`, and without a pool of your own, everything runs in order.

pub(crate) mod exec;
pub(crate) mod executor;
pub(crate) mod run;
pub(crate) mod workers;
pub(crate) mod workspace;

use crate::threads::executor::Executor;

/// Rayon's current pool: the one the calling thread belongs to, otherwise the global one. Without the feature `rayon`, the
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

/// Returns the number of threads of the pool a call would run in.
pub(crate) fn current_threads() -> usize {
    #[cfg(feature = "rayon")]
    return rayon::current_num_threads();
    #[cfg(not(feature = "rayon"))]
    1
}
