//! Atomics, and what a waiting thread does. In `models/`, a file of this name has those of a model checker.

pub(crate) use core::hint::spin_loop;
pub(crate) use core::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
pub(crate) use std::thread::yield_now;
