//! Atomics of the model checker, in place of those of `kernels/src/sync.rs`.

pub(crate) use loom::hint::spin_loop;
pub(crate) use loom::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
pub(crate) use loom::thread::yield_now;
