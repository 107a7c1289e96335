//! Queue of task numbers that workers take from.

use core::sync::atomic::{AtomicUsize, Ordering};

/// Queue of the numbers below `len`, each taken once.
pub(crate) struct Queue {
    len: usize,
    next: AtomicUsize,
}

impl Queue {
    pub(crate) fn new(len: usize) -> Self {
        Self { len, next: AtomicUsize::new(0) }
    }

    /// Takes the next number, the largest first: under a causal mask the last rows see the most keys, so the tasks left
    /// for the end are short.
    #[inline]
    pub(crate) fn take(&self) -> Option<usize> {
        // Relaxed: the counter orders nothing but itself; joining the workers publishes the results.
        let taken = self.next.fetch_add(1, Ordering::Relaxed);
        if taken < self.len {
            return Some(self.len - 1 - taken);
        }
        // Reset, so that no number of calls can wrap the counter round.
        self.next.store(self.len, Ordering::Relaxed);
        None
    }

    /// Returns the number that the next call of [`Self::take`] would return. Another worker may take it first.
    #[inline]
    pub(crate) fn peek(&self) -> Option<usize> {
        self.len.checked_sub(1 + self.next.load(Ordering::Relaxed))
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }
}
