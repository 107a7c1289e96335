//! Report: what a call moved and how long it took, on one rank.

use core::fmt;
use std::time::Duration;

/// Report of a call on one rank: bytes moved, time computing, time waiting.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Report {
    /// Bytes that this rank sent, to all others together: of keys and values; by heads also of queries, biases, masks and results;
    /// in a backward pass also of sums of gradients; in a step of states.
    pub sent: usize,
    /// Bytes of the same that it received.
    pub received: usize,
    /// Most bytes of those on their way that it held at once, beside its share; by heads with all of its heads.
    pub held: usize,
    /// Keys that some of its rows may see, and that it computed. A key counts once for all sequences of a batch; where these are
    /// computed one by one, once for each.
    pub computed: usize,
    /// Keys that rules and masks hide from all of its rows: neither received nor computed.
    pub hidden: usize,
    /// Time in which it computed.
    pub computing: Duration,
    /// Time in which it could only wait for others.
    pub waiting: Duration,
    /// Time in which it copied its keys and values to messages, and MPI took and brought what it could at once; by rows.
    pub copying: Duration,
    /// Time of the whole call: also checks.
    pub total: Duration,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mib = |bytes: usize| bytes as f64 / (1 << 20) as f64;
        let ms = |time: Duration| 1e3 * time.as_secs_f64();
        write!(
            f,
            "sent {:.2} MiB, received {:.2} MiB, held {:.2} MiB; computed {} keys, {} hidden; computing {:.1} ms, copying {:.1} ms, waiting {:.1} ms of {:.1} ms",
            mib(self.sent),
            mib(self.received),
            mib(self.held),
            self.computed,
            self.hidden,
            ms(self.computing),
            ms(self.copying),
            ms(self.waiting),
            ms(self.total)
        )
    }
}
