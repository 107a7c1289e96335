//! Threads: the only file that uses them, apart from the kernels' own work counters. They are rayon's, from the
//! caller's pool; without the feature `rayon`, everything runs in order.

use sdpa_kernels::Scratch;
use std::sync::{Mutex, PoisonError};

/// Calls `work` once for each scratch, in parallel where threads are available. `work` must dispatch on the instruction
/// set inside: a closure handed to rayon does not inherit the caller's target features.
pub(crate) fn each(scratch: &mut [Scratch], work: impl Fn(&mut Scratch) + Sync + Send) {
    #[cfg(feature = "rayon")]
    if scratch.len() > 1 {
        use rayon::prelude::*;
        scratch.par_iter_mut().with_max_len(1).for_each(work);
        return;
    }
    scratch.iter_mut().take(1).for_each(work);
}

/// Calls `work` `workers` times, in parallel where threads are available.
pub(crate) fn workers_do(workers: usize, work: impl Fn() + Sync) {
    #[cfg(feature = "rayon")]
    if workers > 1 {
        use rayon::prelude::*;
        (0..workers).into_par_iter().with_max_len(1).for_each(|_| work());
        return;
    }
    let _ = workers;
    work();
}

/// Calls `a` and `b`, in parallel where threads are available.
pub(crate) fn join(a: impl FnOnce() + Send, b: impl FnOnce() + Send) {
    #[cfg(feature = "rayon")]
    rayon::join(a, b);
    #[cfg(not(feature = "rayon"))]
    {
        a();
        b();
    }
}

/// Calls `work` on every part. There are as many workers as `scratch` has pieces of `each` floats, one piece per
/// worker; workers take the next part until none is left.
pub(crate) fn parts<P: Send>(
    scratch: &mut [f32],
    each: usize,
    parts: impl Iterator<Item = P> + Send,
    work: impl Fn(&mut [f32], P) + Sync,
) {
    let queue = Mutex::new(parts);
    let worker = |scratch: &mut [f32]| {
        loop {
            let part = queue.lock().unwrap_or_else(PoisonError::into_inner).next();
            let Some(part) = part else { return };
            work(scratch, part);
        }
    };
    #[cfg(feature = "rayon")]
    if scratch.len() > each {
        use rayon::prelude::*;
        return scratch.par_chunks_exact_mut(each).with_max_len(1).for_each(worker);
    }
    worker(&mut scratch[..each]);
}

/// Returns the number of threads of the pool a call would run in.
pub(crate) fn current_threads() -> usize {
    #[cfg(feature = "rayon")]
    return rayon::current_num_threads();
    #[cfg(not(feature = "rayon"))]
    1
}
