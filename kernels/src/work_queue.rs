//! Work handed out.

use core::sync::atomic::{AtomicUsize, Ordering};

/// Floats below `len`, each handed out once.
pub(crate) struct Queue {
    len: usize,
    next: AtomicUsize,
}

impl Queue {
    pub(crate) fn new(len: usize) -> Self {
        Self { len, next: AtomicUsize::new(0) }
    }

    /// The next number, the last one first: under a causal mask the last rows see the most keys, and what is left for
    /// the end is short.
    #[inline]
    pub(crate) fn take(&self) -> Option<usize> {
        // Relaxed: the counter orders nothing but itself; results are published by whatever joins the workers.
        let taken = self.next.fetch_add(1, Ordering::Relaxed);
        if taken < self.len {
            return Some(self.len - 1 - taken);
        }
        // Step back, so that no number of calls can wrap the counter round.
        self.next.store(self.len, Ordering::Relaxed);
        None
    }

    /// What the next caller of [`Self::take`] would get now. Somebody may take it first.
    #[inline]
    pub(crate) fn peek(&self) -> Option<usize> {
        self.len.checked_sub(1 + self.next.load(Ordering::Relaxed))
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }
}
