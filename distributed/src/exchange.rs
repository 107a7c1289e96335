//! Exchange of numbers: each rank tells all others something, before anything large travels.

use crate::error::Error;
use crate::message::{Comm, Transfer, Way};
use crate::timeout::{Advance, Awaited, Timeout};
use std::time::Duration;

/// First tag of an exchange: lengths, then numbers.
const TAG: u16 = 8000;
/// First tag of a roll call, likewise.
const ROLL_CALL: u16 = 8002;
/// Longest time that ranks are given to answer a roll call: they give up at about the same time.
const ANSWER: Duration = Duration::from_secs(3);

/// Exchange of lists of numbers between all ranks.
#[derive(Debug)]
struct Exchange {
    comm: Comm,
    /// Length of this rank's list, and the list, on their way to all others.
    length_out: Transfer<u64>,
    list_out: Transfer<u64>,
    /// For each other rank.
    others: Vec<Other>,
    tag: u16,
    what: &'static str,
}

/// List of another rank, as it comes.
#[derive(Debug)]
struct Other {
    rank: usize,
    length: Transfer<u64>,
    list: Option<Transfer<u64>>,
}

impl Exchange {
    fn begin(comm: Comm, own: &[u64], tag: u16, what: &'static str) -> Self {
        let others: Vec<usize> = (0..comm.size).filter(|&rank| rank != comm.rank).collect();
        let to_all = |tag| Way { from: None, to: others.clone(), tag };
        let length = |&rank: &usize| Other {
            rank,
            length: Transfer::begin(comm, vec![0], Way { from: Some(rank), to: Vec::new(), tag }),
            list: None,
        };
        Self {
            comm,
            others: others.iter().map(length).collect(),
            length_out: Transfer::begin(comm, vec![own.len() as u64], to_all(tag)),
            list_out: Transfer::begin(comm, own.to_vec(), to_all(tag + 1)),
            tag,
            what,
        }
    }

    /// Returns the lists of all ranks, this one's own among them; `None` where nothing came.
    fn lists(self, own: Vec<u64>) -> Vec<Option<Vec<u64>>> {
        let of = |other: Other| other.list.as_ref().and_then(Transfer::elements).map(<[_]>::to_vec);
        let mut lists: Vec<_> = self.others.into_iter().map(of).collect();
        lists.insert(self.comm.rank, Some(own));
        lists
    }
}

impl Advance for Exchange {
    fn poll(&mut self) -> bool {
        let mut progress = self.length_out.poll() | self.list_out.poll();
        for other in self.others.iter_mut() {
            progress |= other.length.poll();
            if let Some(list) = &other.list {
                progress |= list.poll();
            } else if let Some(&[length]) = other.length.elements() {
                let way = Way { from: Some(other.rank), to: Vec::new(), tag: self.tag + 1 };
                other.list = Some(Transfer::begin(self.comm, vec![0; length as usize], way));
                progress = true;
            }
        }
        progress
    }

    fn is_done(&self) -> bool {
        let came = |other: &Other| other.list.as_ref().is_some_and(Transfer::is_done);
        self.others.iter().all(came) && self.length_out.is_done() && self.list_out.is_done()
    }

    fn awaited(&self) -> Awaited {
        let missing = |other: &&Other| !other.list.as_ref().is_some_and(Transfer::is_done);
        let silent: Vec<_> = self.others.iter().filter(missing).map(|other| other.rank).collect();
        let deaf = [self.length_out.peers(), self.list_out.peers()].concat();
        (if silent.is_empty() { deaf } else { silent }, self.what)
    }
}

/// Tells all other ranks a list of numbers, and returns the lists of all. `what` names it in the error of a time-out.
///
/// # Errors
/// [`Error::TimedOut`], with the ranks for whom all wait in the end.
pub(crate) fn exchange(
    comm: Comm,
    own: Vec<u64>,
    what: &'static str,
    timeout: Timeout,
) -> Result<Vec<Vec<u64>>, Error> {
    let mut exchange = Exchange::begin(comm, &own, TAG, what);
    timeout.wait(&mut exchange).map_err(|error| blaming(comm, error, timeout))?;
    Ok(exchange.lists(own).into_iter().flatten().collect())
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
    let own: Vec<u64> = ranks.iter().map(|&rank| rank as u64).collect();
    let mut exchange = Exchange::begin(comm, &own, ROLL_CALL, "an answer");
    // Who does not answer is found below.
    let _ = Timeout(timeout.0.min(ANSWER)).wait(&mut exchange);
    let waits = exchange.lists(own);
    let silent = silent(&waits, &ranks);
    if silent.is_empty() { ranks } else { silent }
}

/// Follows from rank to rank who waits for whom, to those that say nothing.
fn silent(waits: &[Option<Vec<u64>>], from: &[usize]) -> Vec<usize> {
    let (mut seen, mut next) = (vec![false; waits.len()], from.to_vec());
    let mut silent = Vec::new();
    while let Some(rank) = next.pop() {
        if seen.get(rank) != Some(&false) {
            continue;
        }
        seen[rank] = true;
        match &waits[rank] {
            Some(others) => next.extend(others.iter().map(|&other| other as usize)),
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
    }
}
