//! Waiting that ends: until something is done, or nothing has moved for as long as the caller allows.

use crate::error::Error;
use std::thread;
use std::time::{Duration, Instant};

/// Polls that yield before a wait begins to sleep.
const YIELDS: usize = 50;
/// Sleep between polls: much less than a piece takes to travel, and long enough to leave the core to others.
pub(crate) const NAP: Duration = Duration::from_micros(50);

/// Time that nothing may move while this rank waits.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Timeout(pub(crate) Duration);

/// Ranks that are waited for, and for what.
pub(crate) type Awaited = (Vec<usize>, &'static str);

/// Something that advances when it is polled.
pub(crate) trait Advance {
    /// Lets it advance. Returns true if it did.
    fn poll(&mut self) -> bool;
    /// Returns true if it is done.
    fn is_done(&self) -> bool;
    /// Returns what it waits for.
    fn awaited(&self) -> Awaited;
}

impl Timeout {
    /// Polls until it is done. Returns how long it took.
    ///
    /// # Errors
    /// [`Error::TimedOut`] if it did not advance for too long.
    pub(crate) fn wait(self, work: &mut impl Advance) -> Result<Duration, Error> {
        let begin = Instant::now();
        let (mut last, mut idle) = (begin, 0);
        while !work.is_done() {
            if work.poll() {
                (last, idle) = (Instant::now(), 0);
                continue;
            }
            if last.elapsed() > self.0 {
                let (mut ranks, what) = work.awaited();
                ranks.sort_unstable();
                ranks.dedup();
                return Err(Error::TimedOut { ranks, what, after: self.0 });
            }
            idle += 1;
            if idle > YIELDS { thread::sleep(NAP) } else { thread::yield_now() }
        }
        Ok(begin.elapsed())
    }
}
