//! All-to-all: every rank has a message for every other. In each turn a rank sends one and receives one, so that few are held
//! at once.

use crate::error::Error;
use crate::exchange::blaming;
use crate::group::Group;
use crate::memory::zeros;
use crate::message::{Transfer, Way};
use crate::report::Report;
use crate::timeout::{Advance, Awaited};

/// Messages of a rank to and from all ranks, itself among them.
pub(crate) trait Messages {
    /// Tag that they travel under.
    const TAG: u16;
    /// Name of the messages, for the error of a rank that waits in vain.
    const WHAT: &'static str;
    /// Makes the message to a rank.
    fn pack(&self, to: usize) -> Result<Vec<u8>, Error>;
    /// Returns the length of the message from a rank.
    fn len(&self, from: usize) -> usize;
    /// Takes the message from a rank.
    fn take(&mut self, from: usize, bytes: &[u8]);
}

/// Wait for a message to one rank and one from another.
struct Turn {
    going: Transfer<u8>,
    coming: Transfer<u8>,
    what: &'static str,
}

impl Advance for Turn {
    fn poll(&mut self) -> bool {
        self.going.poll() | self.coming.poll()
    }

    fn is_done(&self) -> bool {
        self.going.is_done() && self.coming.is_done()
    }

    fn awaited(&self) -> Awaited {
        ([self.coming.peers(), self.going.peers()].concat(), self.what)
    }
}

/// Sends and receives all messages. Before each turn, says how many of how many keys are `done`.
pub(crate) fn all_to_all<M: Messages>(
    group: &Group<'_>,
    messages: &mut M,
    report: &mut Report,
    done: [usize; 2],
) -> Result<(), Error> {
    let (comm, held) = (group.comm, report.held);
    for turn in 0..comm.size {
        let (to, from) = ((comm.rank + turn) % comm.size, (comm.rank + comm.size - turn) % comm.size);
        let bytes = messages.pack(to)?;
        if turn == 0 {
            messages.take(from, &bytes);
            continue;
        }
        if let Some(progress) = group.progress {
            progress(done[0], done[1]);
        }
        let way = |from, to| Way { from, to, tag: M::TAG };
        let coming = Transfer::begin(comm, zeros(messages.len(from))?, way(Some(from), Vec::new()));
        let going = Transfer::begin(comm, bytes, way(None, vec![to]));
        let mut turn = Turn { going, coming, what: M::WHAT };
        let waited = group.timeout.wait(&mut turn);
        report.waiting += waited.map_err(|error| blaming(comm, error, group.timeout))?;
        let ([out, sent, _], [into, _, received]) = (turn.going.bytes(), turn.coming.bytes());
        (report.sent, report.received) = (report.sent + sent, report.received + received);
        report.held = report.held.max(held + out + into);
        if let Some(bytes) = turn.coming.elements() {
            messages.take(from, bytes);
        }
    }
    Ok(())
}
