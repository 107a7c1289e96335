//! Atomics, locks and threads of model checkers, in place of those of `kernels/src/sync.rs`.

pub(crate) use loom::hint::spin_loop;
pub(crate) use loom::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
pub(crate) use loom::thread::yield_now;

/// Those of shuttle, which takes all orders to be sequential, as the pool's are; loom takes them to be weaker.
pub(crate) mod pool {
    use core::time::Duration;
    pub(crate) use shuttle::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize};
    pub(crate) use shuttle::sync::{Arc, Condvar, Mutex, MutexGuard};
    pub(crate) use shuttle::thread;

    /// Time that is over at once: threads look for a short time, then sleep.
    pub(crate) struct Instant;

    impl Instant {
        pub(crate) fn now() -> Self {
            Self
        }

        pub(crate) fn elapsed(&self) -> Duration {
            Duration::MAX
        }
    }
}
