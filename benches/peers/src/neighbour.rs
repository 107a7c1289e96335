//! Neighbour: work that the machine does beside the peers that are timed.

use crate::support;
use sdpa::probe;
use serde::{Deserialize, Serialize};
use std::hint::black_box;
use std::sync::atomic::{AtomicBool, Ordering};

/// Floats that a reader reads before it looks whether it is to end: 1 MiB, tens of microseconds.
const PIECE: usize = 1 << 18;

/// Work on the cores that a peer leaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Neighbour {
    Nothing,
    /// A thread for each of these cores reads more memory than caches hold, over and over.
    Memory,
}

impl Neighbour {
    pub(crate) const ALL: [Self; 2] = [Self::Nothing, Self::Memory];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Nothing => "nothing",
            Self::Memory => "memory",
        }
    }

    /// Threads of its own beside a peer on that many.
    fn readers(self, threads: usize) -> usize {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        match self {
            Self::Nothing => 0,
            Self::Memory => cores.saturating_sub(threads),
        }
    }

    /// False if a peer on that many threads leaves no core to it.
    pub(crate) fn has_room(self, threads: usize) -> bool {
        self == Self::Nothing || self.readers(threads) > 0
    }

    /// Does some work, beside a peer on `threads` threads, with the neighbour at it from beginning to end.
    pub(crate) fn during<R>(self, threads: usize, work: impl FnOnce() -> R) -> R {
        let readers = self.readers(threads);
        let memory = if readers > 0 { support::flush() } else { Vec::new() };
        let ended = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let _end = End(&ended);
            for reader in 0..readers {
                // Each begins elsewhere, so that none reads what another has just brought to a shared cache.
                let (second, first) = memory.split_at(reader * memory.len() / readers);
                let pieces = first.chunks(PIECE).chain(second.chunks(PIECE)).cycle();
                let ended = &ended;
                scope.spawn(move || {
                    for piece in pieces.take_while(|_| !ended.load(Ordering::Relaxed)) {
                        black_box(probe::read(piece));
                    }
                });
            }
            work()
        })
    }
}

/// Ends the readers, even if the work panics: the scope waits for them.
struct End<'a>(&'a AtomicBool);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_neighbour_ends_with_the_work_and_needs_a_core_of_its_own() {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        for neighbour in Neighbour::ALL {
            assert_eq!(neighbour.during(1, || 7), 7);
            assert_eq!(neighbour.has_room(cores), neighbour == Neighbour::Nothing);
        }
    }
}
