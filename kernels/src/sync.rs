//! Atomics, locks and threads, and what a waiting thread does. In `models/`, a file of this name has those of model checkers.

pub(crate) use core::hint::spin_loop;
pub(crate) use core::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
pub(crate) use std::thread::yield_now;

/// Same, and time, for the thread pool, which has another model.
pub(crate) mod pool {
    pub(crate) use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize};
    pub(crate) use std::sync::{Arc, Condvar, Mutex, MutexGuard};
    pub(crate) use std::thread;
    pub(crate) use std::time::Instant;
}
