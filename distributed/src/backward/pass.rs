//! Rounds of a backward pass: parcels of keys and the sums of their gradients go from stretch to stretch of the rows.

use crate::backward::chains::{Blocks, Chains, ROW_BLOCK, Task};
use crate::backward::flight::{Flight, Until, Wait};
use crate::backward::parts::{Parts, copy, skip_to};
use crate::error::Error;
use crate::group::Group;
use crate::layout::{Parcel, rows_of};
use crate::memory::{Memory, zeros};
use crate::message::{Transfer, Way};
use crate::parcel::{Sizes, Travelling};
use crate::prompt::Call;
use crate::report::Report;
use crate::stream::beside;
use sdpa::parts::{KeyGradientShape, KeyGradientSums};
use sdpa::{Attention, Gradients, Tensor, TensorMut, ViewMut};
use std::collections::BTreeMap;
use std::time::Instant;

/// First tag; each parcel takes four, which come again after `PARCELS` parcels.
const TAG: u16 = 8192;
const PARCELS: usize = 4096;

/// Kind of message, which tells those of a parcel apart.
#[derive(Clone, Copy)]
#[repr(u16)]
enum Kind {
    Keys,
    Values,
    Sums,
    Back,
}

/// Plan of a pass, which all ranks know.
pub(crate) struct Plan {
    pub(crate) parcels: Vec<Blocks>,
    pub(crate) chains: Chains,
    pub(crate) sizes: Sizes,
    /// Query heads.
    pub(crate) heads: usize,
}

/// A rank's part of a pass.
pub(crate) struct Pass<'r, 'c, 'a> {
    group: &'r Group<'c>,
    attention: Attention,
    plan: &'r Plan,
    /// Keys and values of this rank, stretch by stretch.
    own: Vec<[Tensor<'a>; 2]>,
    parts: Parts<'a>,
    /// Gradients of own keys and values, stretch by stretch, as far as they are known.
    gradients: Vec<[Vec<f32>; 2]>,
    flight: Flight,
    memory: Memory,
    /// Sums that go from one stretch of this rank to the next.
    here: BTreeMap<Task, KeyGradientSums>,
    report: Report,
}

impl<'r, 'c, 'a> Pass<'r, 'c, 'a> {
    pub(crate) fn new(
        call: &'r Call<'_, 'c>,
        plan: &'r Plan,
        own: Vec<[Tensor<'a>; 2]>,
        parts: Parts<'a>,
    ) -> Result<Self, Error> {
        let of = |kv: &[Tensor<'_>; 2]| -> Result<_, Error> {
            let [k, v] = kv.map(|tensor| zeros(tensor.shape().iter().product()));
            Ok([k?, v?])
        };
        let gradients = own.iter().map(of).collect::<Result<_, _>>()?;
        let (flight, memory, here, report) = Default::default();
        let (group, attention) = (call.group, call.attention);
        Ok(Self { group, attention, plan, own, parts, gradients, flight, memory, here, report })
    }

    /// Runs all rounds.
    pub(crate) fn run(&mut self) -> Result<(), Error> {
        let (rank, Plan { chains, parcels: all, .. }) = (self.group.comm.rank, self.plan);
        for round in 0..chains.rounds() {
            chains.tasks(rank, round + 1).into_iter().try_for_each(|task| self.receive(task))?;
            self.receive_back(round + 1)?;
            chains.leaving(round).try_for_each(|parcel| self.send_own(parcel))?;
            self.report.held = self.report.held.max(self.flight.bytes());
            for task in chains.tasks(rank, round) {
                self.compute(task)?;
                if let Some(progress) = self.group.progress {
                    progress(all[task.parcel].keys.end, all.last().map_or(0, |last| last.keys.end));
                }
            }
            chains.returning(round).try_for_each(|parcel| self.take_back(parcel))?;
            self.report.held = self.report.held.max(self.flight.bytes());
            self.wait(Until::Taken)?;
            self.flight.keys_out.drain(..).for_each(|keys| keys.leave(&mut self.memory));
            self.flight.sums_out.clear();
        }
        for (parcel, blocks) in all.iter().enumerate() {
            let (n, of) = (blocks.keys.len(), &chains.stretches()[chains.through(parcel).clone()]);
            if of.iter().any(|part| part.rank == rank) { self.report.computed += n } else { self.report.hidden += n }
        }
        Ok(())
    }

    /// Writes the gradients, of each stretch of rows and of keys.
    pub(crate) fn write(self, of_rows: Vec<Gradients<'_>>, dkv: Vec<[TensorMut<'_>; 2]>) -> Result<Report, Error> {
        let (mut report, begin) = (self.report, Instant::now());
        let keys = self.plan.parcels.last().map_or(0, |last| last.keys.end);
        self.parts.write(of_rows, keys)?;
        for (gradients, to) in self.gradients.iter().flatten().zip(dkv.into_iter().flatten()) {
            copy(gradients, to);
        }
        report.computing += begin.elapsed();
        Ok(report)
    }

    fn wait(&mut self, until: Until) -> Result<(), Error> {
        self.report.waiting += self.group.timeout.wait(&mut Wait(&self.flight, until))?;
        Ok(())
    }

    fn way(&self, parcel: usize, kind: Kind, from: Option<usize>, to: Option<usize>) -> Way {
        Way { from, to: to.into_iter().collect(), tag: TAG + (4 * (parcel % PARCELS)) as u16 + kind as u16 }
    }

    /// Begins to send keys and values from some tensors, or without any to receive them.
    fn travel(
        &mut self,
        parcel: usize,
        own: &[[Tensor<'_>; 2]],
        n: usize,
        [from, to]: [Option<usize>; 2],
    ) -> Result<Travelling, Error> {
        let ways = [Kind::Keys, Kind::Values].map(|kind| self.way(parcel, kind, from, to));
        let travelling = Travelling::begin(self.group.comm, &mut self.memory, &self.plan.sizes, own, n, ways)?;
        self.count(travelling.bytes());
        Ok(travelling)
    }

    fn count(&mut self, [_, sent, received]: [usize; 3]) {
        (self.report.sent, self.report.received) = (self.report.sent + sent, self.report.received + received);
    }

    /// Returns the rank to which a task's keys and sums go next, unless it is this one.
    fn next(&self, task: Task) -> Option<usize> {
        self.plan.chains.after(task).filter(|&rank| rank != self.group.comm.rank)
    }

    /// Returns keys and values of a piece, if they are this rank's own.
    fn own(&self, piece: &Parcel) -> Option<[Tensor<'a>; 2]> {
        let [k, v] = self.own.get(piece.stretch).filter(|_| piece.owner == self.group.comm.rank)?;
        let rows = |tensor| rows_of(tensor, piece.batch, piece.rows.clone());
        Some([rows(*k)?, rows(*v)?])
    }

    /// Returns the number of floats of the sums of `n` keys that are sent when `rows` rows are done: the second half has those of
    /// a row block that is not complete.
    fn floats(&self, n: usize, rows: usize) -> usize {
        let Plan { sizes, heads, .. } = self.plan;
        let dims: usize = sizes.dims.iter().map(|dim| dim.next_multiple_of(16)).sum();
        let half = sizes.batch * heads * n.next_multiple_of(16) * dims;
        if rows.is_multiple_of(ROW_BLOCK) { half } else { 2 * half }
    }

    /// Makes sums over no rows, or those that came.
    fn sums(&self, n: usize, came: &[f32]) -> Result<KeyGradientSums, Error> {
        let Plan { sizes: Sizes { batch, dims: [head_dim, value_dim], .. }, heads, .. } = *self.plan;
        let mut sums = KeyGradientSums::new(KeyGradientShape { batch, heads, keys: n, head_dim, value_dim })?;
        sums.as_mut_slice()[..came.len()].copy_from_slice(came);
        Ok(sums)
    }

    /// Begins to send sums over `rows` rows.
    fn send(&mut self, sums: &KeyGradientSums, rows: usize, way: Way) {
        let floats = &sums.as_slice()[..self.floats(sums.shape().keys, rows)];
        let transfer = Transfer::begin(self.group.comm, floats.to_vec(), way);
        self.count(transfer.bytes());
        self.flight.sums_out.push(transfer);
    }

    /// Begins to receive sums over `rows` rows.
    fn receive_sums(&mut self, n: usize, rows: usize, way: Way) -> Result<Transfer<f32>, Error> {
        let transfer = Transfer::begin(self.group.comm, zeros(self.floats(n, rows))?, way);
        self.count(transfer.bytes());
        Ok(transfer)
    }

    /// Begins to receive what a task of the next round needs from other ranks.
    fn receive(&mut self, task: Task) -> Result<(), Error> {
        let (plan, rank, Task { parcel, stretch }) = (self.plan, self.group.comm.rank, task);
        let Blocks { keys, pieces, .. } = &plan.parcels[parcel];
        match plan.chains.before(task) {
            // The task before hands them on.
            Some(before) if before == rank => Ok(()),
            Some(before) => {
                let travelling = self.travel(parcel, &[], keys.len(), [Some(before), self.next(task)])?;
                self.flight.keys.insert(task, vec![travelling]);
                let of = &plan.chains.stretches()[stretch];
                let rows = of.range.start - of.first;
                let sums = self.receive_sums(keys.len(), rows, self.way(parcel, Kind::Sums, Some(before), None))?;
                self.flight.sums.insert(task, sums);
                Ok(())
            }
            None => {
                // A parcel in one piece goes on as it comes.
                let next = self.next(task).filter(|_| pieces.len() == 1);
                let foreign = pieces.iter().filter(|piece| piece.owner != rank);
                let travel = |piece: &Parcel| self.travel(parcel, &[], piece.keys.len(), [Some(piece.owner), next]);
                let travelling = foreign.map(travel).collect::<Result<_, _>>()?;
                self.flight.keys.insert(task, travelling);
                Ok(())
            }
        }
    }

    /// Begins to receive the sums that come back in the next round.
    fn receive_back(&mut self, round: usize) -> Result<(), Error> {
        let (plan, rank) = (self.plan, self.group.comm.rank);
        for parcel in plan.chains.returning(round) {
            let last = plan.chains.last(parcel);
            let own = plan.parcels[parcel].pieces.iter().enumerate().filter(|(_, piece)| piece.owner == rank);
            for (n, piece) in own.filter(|_| last.rank != rank) {
                let way = self.way(parcel, Kind::Back, Some(last.rank), None);
                let sums = self.receive_sums(piece.keys.len(), last.range.end - last.first, way)?;
                self.flight.back.insert((parcel, n), sums);
            }
        }
        Ok(())
    }

    /// Begins to send this rank's pieces of a parcel to its first stretch of rows.
    fn send_own(&mut self, parcel: usize) -> Result<(), Error> {
        let (plan, rank) = (self.plan, self.group.comm.rank);
        let first = plan.chains.stretches()[plan.chains.through(parcel).start].rank;
        for piece in plan.parcels[parcel].pieces.iter().filter(|_| first != rank) {
            let Some(own) = self.own(piece) else { continue };
            let travelling = self.travel(parcel, &[own], piece.keys.len(), [None, Some(first)])?;
            self.flight.keys_out.push(travelling);
        }
        Ok(())
    }

    /// Returns the keys and values of a task after all of them have come: on their way to the next stretch, if that is on another
    /// rank.
    fn keys_of(&mut self, task: Task) -> Result<Travelling, Error> {
        let (plan, mut here) = (self.plan, self.flight.keys.remove(&task).unwrap_or_default());
        let Blocks { keys, pieces, .. } = &plan.parcels[task.parcel];
        let whole = here.len() == 1 && (plan.chains.before(task).is_some() || pieces.len() == 1);
        if let Some(whole) = here.pop_if(|_| whole) {
            return Ok(whole);
        }
        let mut foreign = here.iter().filter_map(Travelling::tensors);
        let tensors: Vec<_> = pieces.iter().filter_map(|piece| self.own(piece).or_else(|| foreign.next())).collect();
        self.travel(task.parcel, &tensors, keys.len(), [None, self.next(task)])
    }

    /// Computes a task, while messages advance, and hands its keys and sums on.
    fn compute(&mut self, task: Task) -> Result<(), Error> {
        self.wait(Until::Here(task))?;
        let (plan, Task { stretch, parcel }) = (self.plan, task);
        let n = plan.parcels[parcel].keys.len();
        let keys = self.keys_of(task)?;
        self.flight.keys_out.push(keys);
        let mut sums = match (self.here.remove(&task), self.flight.sums.remove(&task)) {
            (Some(sums), _) => sums,
            (_, Some(came)) => self.sums(n, came.elements().unwrap_or_default())?,
            _ => self.sums(n, &[])?,
        };
        let begin = Instant::now();
        let tensors = self.flight.keys_out.last().and_then(Travelling::tensors);
        let (Some([k, v]), Some(part)) = (tensors, self.parts.numbered.get_mut(&stretch)) else {
            unreachable!("the keys were waited for")
        };
        let Blocks { keys, first, .. } = &plan.parcels[parcel];
        let keys = keys.start - first..keys.end - first;
        let whole = self.parts.biases[part.stretch].as_mut();
        let dbias = whole.map(|whole| part.dbias(whole, keys.clone())).transpose()?;
        let state = part.state()?;
        beside(self.group.pool, &self.flight, || {
            skip_to(state, keys.start)?;
            match dbias {
                Some(dbias) => state.push_biased(k, v, &mut sums, dbias),
                None => state.push(k, v, &mut sums),
            }
        })?;
        if plan.chains.ends(task) {
            self.parts.complete(stretch)?;
        }
        self.report.computing += begin.elapsed();
        self.hand_on(task, sums)
    }

    /// Hands the keys and sums of a task on: to the next stretch, here or elsewhere, or the sums to the owners of the keys.
    fn hand_on(&mut self, task: Task, sums: KeyGradientSums) -> Result<(), Error> {
        let (plan, rank, Task { stretch, parcel }) = (self.plan, self.group.comm.rank, task);
        let (Blocks { keys, pieces, .. }, of) = (&plan.parcels[parcel], &plan.chains.stretches()[stretch]);
        let rows = of.range.end - of.first;
        match plan.chains.after(task) {
            Some(next) if next == rank => {
                let next = Task { stretch: stretch + 1, parcel };
                let here = self.flight.keys_out.pop();
                let goes_on = self.next(next).zip(here.as_ref().and_then(Travelling::tensors));
                let copy = goes_on.map(|(to, kv)| self.travel(parcel, &[kv], keys.len(), [None, Some(to)]));
                let travelling = copy.transpose()?.or(here);
                self.flight.keys.insert(next, travelling.into_iter().collect());
                self.here.insert(next, sums);
            }
            Some(next) => self.send(&sums, rows, self.way(parcel, Kind::Sums, None, Some(next))),
            None => {
                for piece in pieces {
                    let some = piece.keys.start - keys.start..piece.keys.end - keys.start;
                    let some = if some.len() == keys.len() { sums.clone() } else { sums.keys(some)? };
                    if piece.owner == rank {
                        self.keep(piece, some)?;
                    } else {
                        self.send(&some, rows, self.way(parcel, Kind::Back, None, Some(piece.owner)));
                    }
                }
            }
        }
        Ok(())
    }

    /// Waits for the sums of a parcel that come back in this round.
    fn take_back(&mut self, parcel: usize) -> Result<(), Error> {
        let plan = self.plan;
        for (n, piece) in plan.parcels[parcel].pieces.iter().enumerate() {
            if self.flight.back.contains_key(&(parcel, n)) {
                self.wait(Until::Back(parcel, n))?;
                let came = self.flight.back.remove(&(parcel, n));
                let came = came.as_ref().and_then(Transfer::elements).unwrap_or_default();
                self.keep(piece, self.sums(piece.keys.len(), came)?)?;
            }
        }
        Ok(())
    }

    /// Keeps the gradients of a piece until all are known.
    fn keep(&mut self, piece: &Parcel, sums: KeyGradientSums) -> Result<(), Error> {
        let of = self.own[piece.stretch].map(|tensor| tensor.shape());
        let [dk, dv] = self.gradients[piece.stretch].each_mut().map(Vec::as_mut_slice);
        let view = |gradient, [batch, heads, rows, dim]: [usize; 4]| {
            let (head, (sequence, batch)) = (rows * dim, piece.batch.map_or((0, batch), |sequence| (sequence, 1)));
            let strides = [heads * head, head, dim, 1].map(|stride| stride as isize);
            let (begin, shape) = (sequence * heads * head, [batch, heads, piece.rows.len(), dim]);
            ViewMut::from_strides(gradient, begin + piece.rows.start * dim, shape, strides)
        };
        let gradients = Gradients::new().k(view(dk, of[0])?).v(view(dv, of[1])?);
        Ok(sums.write(&self.attention, gradients, self.group.exec)?)
    }
}
