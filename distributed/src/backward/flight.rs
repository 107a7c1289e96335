//! Messages of a backward pass that are on their way to or from a rank.

use crate::backward::chains::Task;
use crate::message::Transfer;
use crate::parcel::Travelling;
use crate::stream::InFlight;
use crate::timeout::{Advance, Awaited};
use std::collections::BTreeMap;

/// Messages on their way.
#[derive(Default)]
pub(crate) struct Flight {
    /// Keys and values for tasks: all of a parcel, or its pieces that lie on other ranks.
    pub(crate) keys: BTreeMap<Task, Vec<Travelling>>,
    /// Sums for tasks.
    pub(crate) sums: BTreeMap<Task, Transfer<f32>>,
    /// Sums that come back to their keys, by parcel and piece.
    pub(crate) back: BTreeMap<(usize, usize), Transfer<f32>>,
    /// Messages that this rank sends: keys and values, and sums.
    pub(crate) keys_out: Vec<Travelling>,
    pub(crate) sums_out: Vec<Transfer<f32>>,
}

impl Flight {
    fn travelling(&self) -> impl Iterator<Item = &Travelling> {
        self.keys.values().flatten().chain(&self.keys_out)
    }

    fn transfers(&self) -> impl Iterator<Item = &Transfer<f32>> {
        self.sums.values().chain(self.back.values()).chain(&self.sums_out)
    }

    /// Returns the bytes of all messages.
    pub(crate) fn bytes(&self) -> usize {
        self.travelling().map(|x| x.bytes()[0]).sum::<usize>() + self.transfers().map(|x| x.bytes()[0]).sum::<usize>()
    }
}

impl InFlight for Flight {
    fn poll(&self) -> bool {
        let keys = self.travelling().fold(false, |progress, x| progress | x.poll());
        self.transfers().fold(keys, |progress, x| progress | x.poll())
    }

    fn is_done(&self) -> bool {
        self.travelling().all(Travelling::is_done) && self.transfers().all(Transfer::is_done)
    }
}

/// Event that a rank waits for.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Until {
    /// Keys, values and sums of a task are here.
    Here(Task),
    /// Sums of a piece of a parcel are back.
    Back(usize, usize),
    /// All that was sent is taken.
    Taken,
}

/// Wait for some messages, while all advance.
pub(crate) struct Wait<'f>(pub(crate) &'f Flight, pub(crate) Until);

impl Advance for Wait<'_> {
    fn poll(&mut self) -> bool {
        self.0.poll()
    }

    fn is_done(&self) -> bool {
        let Self(flight, until) = self;
        match until {
            Until::Here(task) => {
                flight.keys.get(task).is_none_or(|keys| keys.iter().all(|keys| keys.tensors().is_some()))
                    && flight.sums.get(task).is_none_or(Transfer::has_arrived)
            }
            Until::Back(parcel, piece) => flight.back.get(&(*parcel, *piece)).is_none_or(Transfer::has_arrived),
            Until::Taken => {
                flight.keys_out.iter().all(Travelling::is_done) && flight.sums_out.iter().all(Transfer::is_done)
            }
        }
    }

    fn awaited(&self) -> Awaited {
        let Self(flight, until) = self;
        match until {
            Until::Here(task) => {
                let keys = flight.keys.get(task).into_iter().flatten().flat_map(Travelling::peers);
                let sums = flight.sums.get(task).into_iter().flat_map(Transfer::peers);
                (keys.chain(sums).collect(), "its keys and values, or sums of their gradients")
            }
            Until::Back(parcel, piece) => {
                let back = flight.back.get(&(*parcel, *piece));
                (back.map(Transfer::peers).unwrap_or_default(), "gradients of keys and values")
            }
            Until::Taken => {
                let keys = flight.keys_out.iter().flat_map(Travelling::peers);
                (keys.chain(flight.sums_out.iter().flat_map(Transfer::peers)).collect(), "that it takes keys and sums")
            }
        }
    }
}
