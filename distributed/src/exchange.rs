//! Exchange of texts: each rank tells all others something, before anything large travels.

use crate::error::Error;
use crate::message::{Comm, Transfer, Way};
use crate::timeout::{Advance, Awaited, Timeout};
use std::time::Duration;

/// First tag of an exchange: lengths, then texts.
const TAG: u16 = 8000;
/// First tag of a roll call, likewise.
const ROLL_CALL: u16 = 8002;
/// Longest time that ranks are given to answer a roll call: they give up at about the same time.
const ANSWER: Duration = Duration::from_secs(3);

/// Exchange of texts between all ranks.
#[derive(Debug)]
struct Exchange {
    comm: Comm,
    /// This rank's length and text, on their way to all others.
    lengths_out: Transfer<u16>,
    texts_out: Transfer<u8>,
    /// For each other rank.
    others: Vec<Other>,
    tag: u16,
    what: &'static str,
}

/// Text of another rank, as it comes.
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
    fn begin(comm: Comm, text: &str, tag: u16, what: &'static str) -> Self {
        let others: Vec<usize> = (0..comm.size).filter(|&rank| rank != comm.rank).collect();
        let to_all = |tag| Way { from: None, to: others.clone(), tag };
        let length = |&rank: &usize| Other {
            rank,
            length: Transfer::begin(comm, vec![0; 4], Way { from: Some(rank), to: Vec::new(), tag }),
            text: None,
        };
        Self {
            comm,
            others: others.iter().map(length).collect(),
            lengths_out: Transfer::begin(comm, coded(text.len()), to_all(tag)),
            texts_out: Transfer::begin(comm, text.as_bytes().to_vec(), to_all(tag + 1)),
            tag,
            what,
        }
    }

    /// Returns the texts of all ranks, this one's own among them; `None` where nothing came.
    fn texts(self, own: String) -> Vec<Option<String>> {
        let of = |other: Other| {
            let bytes = other.text.as_ref().and_then(Transfer::elements);
            bytes.map(|bytes| String::from_utf8_lossy(bytes).into_owned())
        };
        let mut texts: Vec<_> = self.others.into_iter().map(of).collect();
        texts.insert(self.comm.rank, Some(own));
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
                let way = Way { from: Some(other.rank), to: Vec::new(), tag: self.tag + 1 };
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
/// [`Error::TimedOut`], with the ranks for whom all wait in the end.
pub(crate) fn exchange(comm: Comm, text: String, what: &'static str, timeout: Timeout) -> Result<Vec<String>, Error> {
    let mut exchange = Exchange::begin(comm, &text, TAG, what);
    timeout.wait(&mut exchange).map_err(|error| blaming(comm, error, timeout))?;
    Ok(exchange.texts(text).into_iter().flatten().collect())
}

/// Names those for whom all wait in the end, where a rank waits for others that wait.
pub(crate) fn blaming(comm: Comm, error: Error, timeout: Timeout) -> Error {
    match error {
        Error::TimedOut { ranks, what, after } => Error::TimedOut { ranks: blamed(comm, ranks, timeout), what, after },
        error => error,
    }
}

/// Finds who is to blame that this rank waited in vain for `ranks`: all that waited tell each other for whom, and those
/// that say nothing are alone named.
fn blamed(comm: Comm, ranks: Vec<usize>, timeout: Timeout) -> Vec<usize> {
    let text: Vec<_> = ranks.iter().map(usize::to_string).collect();
    let text = text.join(" ");
    let mut exchange = Exchange::begin(comm, &text, ROLL_CALL, "an answer");
    // Who does not answer is found below.
    let _ = Timeout(timeout.0.min(ANSWER)).wait(&mut exchange);
    let waits: Vec<_> = exchange.texts(text).into_iter().map(|text| text.map(|text| read(&text))).collect();
    let silent = silent(&waits, &ranks);
    if silent.is_empty() { ranks } else { silent }
}

/// Reads the numbers of ranks.
fn read(text: &str) -> Vec<usize> {
    text.split(' ').filter_map(|rank| rank.parse().ok()).collect()
}

/// Follows from rank to rank who waits for whom, to those that say nothing.
fn silent(waits: &[Option<Vec<usize>>], from: &[usize]) -> Vec<usize> {
    let (mut seen, mut next) = (vec![false; waits.len()], from.to_vec());
    let mut silent = Vec::new();
    while let Some(rank) = next.pop() {
        if seen.get(rank) != Some(&false) {
            continue;
        }
        seen[rank] = true;
        match &waits[rank] {
            Some(others) => next.extend(others),
            None => silent.push(rank),
        }
    }
    silent.sort_unstable();
    silent
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whoever_says_nothing_is_found_behind_those_that_wait() {
        // 0 waits for 1, 1 for 2 and 3, 3 for 4, 4 for 3; 2 and 5 say nothing, and nobody waits for 5.
        let waits = [Some(vec![1]), Some(vec![2, 3]), None, Some(vec![4]), Some(vec![3, 9]), None];
        assert_eq!(silent(&waits, &[1]), [2]);
        assert_eq!(silent(&waits, &[3]), []);
        assert_eq!(read("0 12 x "), [0, 12]);
    }

    #[test]
    fn lengths_are_read_as_they_were_written() {
        for length in [0, 1, 65_536, 1 << 33, usize::MAX] {
            assert_eq!(decoded(&coded(length)), length);
        }
    }
}
