//! Merges: how the states of a step's rows, over the keys of each rank, become those over all keys.

use crate::error::Error;
use crate::group::Group;
use crate::layout::{Stretch, Tree};
use crate::message::{Transfer, Way};
use crate::report::Report;
use crate::timeout::{Advance, Awaited};
use sdpa::parts::{BlockStates, RowStates};
use std::time::Duration;

/// Tags of states on their way to be merged, and of the result.
const STATES: u16 = 8010;
const RESULT: u16 = 8011;

/// Order in which the states of a step's rows, over the keys of each rank, are merged.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Merges {
    /// Block by block in the order of the keys, from rank to rank: the bits of one machine, in one step for each rank with keys.
    #[default]
    InOrder,
    /// Each rank its own blocks, then neighbours, then pairs of neighbours, and so on: in log₂ ranks steps. Sums are taken in
    /// another order, so bits depend on the number of ranks and on who has which keys; results are those of one machine up to
    /// rounding. (Tree Attention, arXiv:2408.04093.)
    Tree,
}

/// States on their way to become those over all keys.
pub(crate) struct Gathering<'g, 'c> {
    pub(crate) group: &'g Group<'c>,
    /// Keys of all ranks, in order.
    pub(crate) stretches: &'g [Stretch],
    pub(crate) report: &'g mut Report,
}

/// Wait for a transfer.
struct Passing<'t>(&'t Transfer<f32>, &'static str);

impl Advance for Passing<'_> {
    fn poll(&mut self) -> bool {
        self.0.poll()
    }

    fn is_done(&self) -> bool {
        self.0.is_done()
    }

    fn awaited(&self) -> Awaited {
        (self.0.peers(), self.1)
    }
}

impl Gathering<'_, '_> {
    /// Takes in this rank's blocks. The states, which have seen no keys, become those over all keys, on every rank.
    pub(crate) fn run(&mut self, merges: Merges, states: &mut RowStates, blocks: &BlockStates) -> Result<(), Error> {
        let turn = self.stretches.iter().position(|stretch| stretch.rank == self.group.comm.rank);
        let last = self.stretches.len().saturating_sub(1);
        let owner = match merges {
            Merges::InOrder => {
                turn.map_or(Ok(()), |turn| self.in_order(turn, states, blocks))?;
                last
            }
            Merges::Tree => {
                turn.map_or(Ok(()), |turn| self.in_tree(turn, states, blocks))?;
                0
            }
        };
        // Otherwise nobody has keys.
        let Some(owner) = self.stretches.get(owner) else { return Ok(()) };
        self.spread(states, owner.rank)
    }

    /// Takes this rank's blocks into the states over all keys before, and passes them on.
    fn in_order(&mut self, turn: usize, states: &mut RowStates, blocks: &BlockStates) -> Result<(), Error> {
        if turn > 0 {
            self.receive(states, self.stretches[turn - 1].rank)?;
        }
        self.take_in(turn, states, blocks)?;
        self.stretches.get(turn + 1).map_or(Ok(()), |next| self.send(states, next.rank))
    }

    /// Takes this rank's blocks in, merges the states of those behind it, and passes them on to the one before it that does so.
    fn in_tree(&mut self, turn: usize, states: &mut RowStates, blocks: &BlockStates) -> Result<(), Error> {
        self.take_in(turn, states, blocks)?;
        let mut later = RowStates::new(states.shape())?;
        let mut apart = 1;
        while apart < self.stretches.len() {
            if turn % (2 * apart) == apart {
                return self.send(states, self.stretches[turn - apart].rank);
            }
            if let Some(next) = self.stretches.get(turn + apart) {
                self.receive(&mut later, next.rank)?;
                states.merge(&later, self.group.exec)?;
            }
            apart *= 2;
        }
        Ok(())
    }

    fn take_in(&self, turn: usize, states: &mut RowStates, blocks: &BlockStates) -> Result<(), Error> {
        states.fold(blocks)?;
        if let (Some(progress), Some(last)) = (self.group.progress, self.stretches.last()) {
            progress(self.stretches[turn].range.end, last.range.end);
        }
        Ok(())
    }

    fn send(&mut self, states: &RowStates, to: usize) -> Result<(), Error> {
        let way = Way { from: None, to: vec![to], tag: STATES };
        let transfer = Transfer::begin(self.group.comm, states.as_slice().to_vec(), way);
        self.wait(&transfer, "that it takes the states")
    }

    fn receive(&mut self, states: &mut RowStates, from: usize) -> Result<(), Error> {
        let way = Way { from: Some(from), to: Vec::new(), tag: STATES };
        let transfer = Transfer::begin(self.group.comm, vec![0.0; states.as_slice().len()], way);
        self.wait(&transfer, "the states over its keys")?;
        if let Some(floats) = transfer.elements() {
            states.as_mut_slice().copy_from_slice(floats);
        }
        Ok(())
    }

    /// Sends the states of one rank to all, down a tree.
    fn spread(&mut self, states: &mut RowStates, owner: usize) -> Result<(), Error> {
        let comm = self.group.comm;
        let Some((from, to)) = Tree::new(owner, &vec![true; comm.size]).at(comm.rank) else { return Ok(()) };
        let transfer = Transfer::begin(comm, states.as_slice().to_vec(), Way { from, to, tag: RESULT });
        self.wait(&transfer, "the states over all keys")?;
        if let Some(floats) = transfer.elements() {
            states.as_mut_slice().copy_from_slice(floats);
        }
        Ok(())
    }

    fn wait(&mut self, transfer: &Transfer<f32>, what: &'static str) -> Result<(), Error> {
        let waited: Duration = self.group.timeout.wait(&mut Passing(transfer, what))?;
        let [_, sent, received] = transfer.bytes();
        let report = &mut *self.report;
        report.waiting += waited;
        (report.sent, report.received) = (report.sent + sent, report.received + received);
        Ok(())
    }
}
