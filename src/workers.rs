//! Workers on the threads of an executor: each with memory of its own, locked while in use.

use crate::executor::Executor;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Mutex, PoisonError};

/// Returns the memory of a worker that nobody else holds.
pub(crate) fn own<T>(worker: &mut Mutex<T>) -> &mut T {
    worker.get_mut().unwrap_or_else(PoisonError::into_inner)
}

/// Calls `work` on each worker, on the threads of an executor. Passes on the first panic in it; `stop` is called before,
/// so that workers begin no further task.
pub(crate) fn share<T: Send>(
    workers: &[Mutex<T>],
    executor: &dyn Executor,
    stop: &(dyn Fn() + Sync),
    work: &(dyn Fn(&mut T) + Sync),
) {
    let panic = Mutex::new(None);
    executor.run(workers.len(), &|index| {
        let Some(Ok(mut memory)) = workers.get(index).map(Mutex::try_lock) else { return };
        // Unwind safe: tasks overwrite whatever their memory holds.
        if let Err(payload) = catch_unwind(AssertUnwindSafe(|| work(&mut memory))) {
            stop();
            panic.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(payload);
        }
    });
    if let Some(payload) = panic.into_inner().unwrap_or_else(PoisonError::into_inner) {
        resume_unwind(payload);
    }
}
