//! Workers on the threads of an executor: each with its own memory, locked while in use.

use crate::threads::executor::Executor;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Mutex, PoisonError};

/// Returns the memory of a worker that nobody else holds.
fn own<T>(worker: &mut Mutex<T>) -> &mut T {
    worker.get_mut().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the workers for a plan of `planned` workers, each with the memory that `reserve` takes; fewer if threads or
/// memory are short.
pub(crate) fn reserved<'w, T: Default>(
    workers: &'w mut Vec<Mutex<T>>,
    planned: usize,
    executor: &dyn Executor,
    reserve: impl Fn(&mut T) -> bool,
) -> &'w mut [Mutex<T>] {
    // No more workers than threads, whatever the plan says. One thread needs no pool, and asking for the
    // size of rayon's would start it.
    let wanted = if planned > 1 { planned.min(executor.threads()).max(1) } else { 1 };
    if workers.len() < wanted {
        workers.resize_with(wanted, Mutex::default);
    }
    // Reserve here, not in the workers: which of them find tasks differs from run to run.
    let ready = workers[..wanted].iter_mut().map_while(|worker| reserve(own(worker)).then_some(())).count();
    &mut workers[..ready]
}

/// Returns the sum of what `bytes` says of each worker's memory.
pub(crate) fn bytes<T>(workers: &[Mutex<T>], bytes: impl Fn(&T) -> usize) -> usize {
    workers.iter().map(|worker| bytes(&worker.lock().unwrap_or_else(PoisonError::into_inner))).sum()
}

/// Calls `work` on each worker, at least one, on the threads of an executor, and at last on the calling thread alone: for one
/// worker, or what an executor that broke its promise left undone. After a panic in `work` on a thread of the executor, calls
/// `stop`, so that workers begin no further task; passes on the first panic.
pub(crate) fn work_through<T: Send>(
    workers: &mut [Mutex<T>],
    executor: &dyn Executor,
    stop: &(dyn Fn() + Sync),
    work: &(dyn Fn(&mut T) + Sync),
) {
    if workers.len() > 1 {
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
    work(own(&mut workers[0]));
}
