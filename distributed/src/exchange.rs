//! Exchange of texts: each rank tells all others something, before anything large travels.

use crate::error::Error;
use crate::message::{Comm, Transfer, Way};
use crate::patience::{Advance, Awaited, Patience};

/// First tag of an exchange: lengths, then texts.
const TAG: u16 = 8000;

/// Exchange of texts between all ranks.
#[derive(Debug)]
struct Exchange {
    comm: Comm,
    /// This rank's length and text, on their way to all others.
    lengths_out: Transfer<u16>,
    texts_out: Transfer<u8>,
    /// For each other rank.
    others: Vec<Other>,
    what: &'static str,
}

/// What another rank says.
#[derive(Debug)]
struct Other {
    rank: usize,
    length: Transfer<u16>,
    text: Option<Transfer<u8>>,
}

/// Returns a length in four parts of 16 bits.
fn coded(length: usize) -> Vec<u16> {
    (0..4).map(|part| (length as u64 >> (16 * part)) as u16).collect()
}

/// Returns the length that [`coded`] took apart.
fn decoded(parts: &[u16]) -> usize {
    parts.iter().rev().fold(0, |length, &part| length << 16 | usize::from(part))
}

impl Exchange {
    fn begin(comm: Comm, text: &str, what: &'static str) -> Self {
        let others: Vec<usize> = (0..comm.size).filter(|&rank| rank != comm.rank).collect();
        let to_all = |tag| Way { from: None, to: others.clone(), tag };
        let length = |&rank: &usize| Other {
            rank,
            length: Transfer::begin(comm, vec![0; 4], Way { from: Some(rank), to: Vec::new(), tag: TAG }),
            text: None,
        };
        Self {
            comm,
            others: others.iter().map(length).collect(),
            lengths_out: Transfer::begin(comm, coded(text.len()), to_all(TAG)),
            texts_out: Transfer::begin(comm, text.as_bytes().to_vec(), to_all(TAG + 1)),
            what,
        }
    }

    /// Returns the texts of all ranks, this one's own among them.
    fn texts(self, own: String) -> Vec<String> {
        let of = |other: Other| {
            let bytes = other.text.as_ref().and_then(Transfer::elements).unwrap_or_default();
            String::from_utf8_lossy(bytes).into_owned()
        };
        let mut texts: Vec<_> = self.others.into_iter().map(of).collect();
        texts.insert(self.comm.rank, own);
        texts
    }
}

impl Advance for Exchange {
    fn poll(&mut self) -> bool {
        let mut progress = self.lengths_out.poll() | self.texts_out.poll();
        for other in self.others.iter_mut() {
            progress |= other.length.poll();
            if let Some(text) = &mut other.text {
                progress |= text.poll();
            } else if let Some(length) = other.length.elements() {
                let way = Way { from: Some(other.rank), to: Vec::new(), tag: TAG + 1 };
                other.text = Some(Transfer::begin(self.comm, vec![0; decoded(length)], way));
                progress = true;
            }
        }
        progress
    }

    fn is_done(&self) -> bool {
        let came = |other: &Other| other.text.as_ref().is_some_and(Transfer::is_done);
        self.others.iter().all(came) && self.lengths_out.is_done() && self.texts_out.is_done()
    }

    fn awaited(&self) -> Awaited {
        let missing = |other: &&Other| !other.text.as_ref().is_some_and(Transfer::is_done);
        let silent: Vec<_> = self.others.iter().filter(missing).map(|other| other.rank).collect();
        let deaf = [self.lengths_out.peers(), self.texts_out.peers()].concat();
        (if silent.is_empty() { deaf } else { silent }, self.what)
    }
}

/// Tells all other ranks a text, and returns the texts of all. `what` names it in the error of a time-out.
///
/// # Errors
/// [`Error::TimedOut`], with the ranks that said nothing.
pub(crate) fn exchange(comm: Comm, text: String, what: &'static str, patience: Patience) -> Result<Vec<String>, Error> {
    let mut exchange = Exchange::begin(comm, &text, what);
    patience.wait(&mut exchange)?;
    Ok(exchange.texts(text))
}
