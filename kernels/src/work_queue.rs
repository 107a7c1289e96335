//! What workers share to divide the work and to wait for each other: a queue of numbers that they take from until it is empty
//! or they are asked to stop, and counts of what is done. `models/` compiles this file with other atomics.

use crate::sync::{AtomicBool, AtomicUsize, Ordering, spin_loop, yield_now};
use core::ops::Range;

/// Request to leave the rest of the work undone, from the caller or from a worker that cannot go on.
pub(crate) struct Stop<'a> {
    /// The caller's function that says whether to stop, if there is one.
    when: Option<&'a (dyn Fn() -> bool + Sync)>,
    /// True once work was left undone, for all workers and for good: then `when` is not asked again.
    stopped: AtomicBool,
}

impl<'a> Stop<'a> {
    pub(crate) fn when(when: Option<&'a (dyn Fn() -> bool + Sync)>) -> Self {
        Self { when, stopped: AtomicBool::new(false) }
    }

    /// Returns true if the work that comes next is to be left undone. Asked only if there is some.
    #[inline]
    pub(crate) fn leaves(&self) -> bool {
        // Relaxed: the flag orders nothing but itself; joining the workers publishes the results.
        if self.is_stopped() {
            return true;
        }
        let stop = self.when.is_some_and(|when| when());
        if stop {
            self.now();
        }
        stop
    }

    /// Leaves all work undone from now on.
    pub(crate) fn now(&self) {
        self.stopped.store(true, Ordering::Relaxed);
    }

    #[inline]
    pub(crate) fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Relaxed)
    }
}

/// Queue of the numbers below `len`, each taken once, in ascending order.
pub(crate) struct Queue {
    len: usize,
    next: AtomicUsize,
}

impl Queue {
    pub(crate) fn new(len: usize) -> Self {
        Self { len, next: AtomicUsize::new(0) }
    }

    /// Takes the next number.
    #[inline]
    pub(crate) fn take(&self) -> Option<usize> {
        self.take_run(1).next()
    }

    /// Takes the next `most` numbers, at least one, or what is left of them.
    #[inline]
    pub(crate) fn take_run(&self, most: usize) -> Range<usize> {
        // Relaxed: the counter orders nothing but itself; joining the workers publishes the results.
        let taken = self.next.fetch_add(most, Ordering::Relaxed);
        if taken < self.len {
            return self.run(taken, most);
        }
        // Reset, so that no number of calls can wrap the counter round.
        self.next.store(self.len, Ordering::Relaxed);
        0..0
    }

    /// Returns the numbers that are taken next, at most `most`, where `taken` were before.
    fn run(&self, taken: usize, most: usize) -> Range<usize> {
        taken..self.len.min(taken.saturating_add(most))
    }

    /// Takes the next number, unless it is to be left undone.
    #[inline]
    pub(crate) fn take_unless(&self, stop: &Stop<'_>) -> Option<usize> {
        self.take().filter(|_| !stop.leaves())
    }

    /// Returns what the next call of [`Self::take_run`] would return. Another worker may take it first.
    #[inline]
    pub(crate) fn peek_run(&self, most: usize) -> Range<usize> {
        let taken = self.next.load(Ordering::Relaxed);
        if taken < self.len { self.run(taken, most) } else { 0..0 }
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }
}

/// Number of times a waiting worker looks again before it lets other threads run: some microseconds.
const PATIENCE: usize = 1 << 10;

/// Count of what is done, for workers that wait for it: with the count they see what was written before.
#[derive(Debug, Default)]
pub(crate) struct Progress(AtomicUsize);

impl Progress {
    /// Says how much is done. One worker counts.
    pub(crate) fn set(&self, done: usize) {
        // Release: publishes what this worker has written.
        self.0.store(done, Ordering::Release);
    }

    /// Says that one more is done. Any worker counts.
    pub(crate) fn add_one(&self) {
        // Release: publishes what this worker has written; with the count of a later worker, too.
        self.0.fetch_add(1, Ordering::Release);
    }

    /// Returns true if at least so much is done: then what was written before is visible.
    #[inline]
    pub(crate) fn reaches(&self, done: usize) -> bool {
        self.0.load(Ordering::Acquire) >= done
    }

    /// Waits until at least so much is done. Returns false if the work was stopped.
    pub(crate) fn wait(&self, done: usize, stop: &Stop<'_>) -> bool {
        let mut looks = 0;
        while !self.reaches(done) {
            if stop.is_stopped() {
                return false;
            }
            looks += 1;
            if looks < PATIENCE { spin_loop() } else { yield_now() }
        }
        true
    }

    /// Polls up to `looks` times until `done` is reached. Returns false if it is not, or if the work was stopped before.
    pub(crate) fn wait_briefly(&self, done: usize, looks: usize, stop: &Stop<'_>) -> bool {
        for _ in 0..looks {
            let reached = self.reaches(done);
            if reached || stop.is_stopped() {
                return reached;
            }
            spin_loop();
        }
        false
    }
}
