//! Parts of a call shared out among workers, and the memory that they need; its failures are errors: as `sdpa`'s own, which it
//! does not show.

use sdpa::{Error, Executor};
use std::sync::{Mutex, PoisonError};

/// Calls `work` on every part, on an executor. Each piece of `each` floats of `scratch` gives one worker, one
/// piece per worker; workers take the next part until none is left.
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

/// Returns the product of the sizes, or [`Error::TooLarge`] if that many floats do not fit the address space.
pub(crate) fn floats(what: &'static str, sizes: [usize; 4]) -> Result<usize, Error> {
    sdpa_kernels::floats(sizes).ok_or(Error::TooLarge { what, sizes })
}

/// Returns `len` zeros, or [`Error::Memory`] for `what`.
pub(crate) fn zeros(what: &'static str, len: usize) -> Result<Vec<f32>, Error> {
    sdpa_kernels::zeros(len).ok_or(Error::Memory { what, bytes: len.saturating_mul(size_of::<f32>()) })
}
