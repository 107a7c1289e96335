//! Decode step over keys that are cut over ranks: each computes the states of its own blocks, and the states of the rows go
//! from rank to rank in the order of the keys.

use crate::description::{Description, agree};
use crate::error::Error;
use crate::exchange::exchange;
use crate::group::Group;
use crate::layout::{KEYS, in_order};
use crate::message::{Transfer, Way};
use crate::report::Report;
use crate::timeout::{Advance, Awaited};
use sdpa::{Attention, BlockStates, Inputs, Outputs, RowStates};
use std::time::{Duration, Instant};

/// Tags of states on their way along the keys, and of the result.
const ALONG: u16 = 8010;
const RESULT: u16 = 8011;

/// Decode step: rows that all ranks have, and the keys that this one has, in blocks of 256.
///
/// ```no_run
/// use mpi::traits::*;
/// use sdpa::{Attention, Inputs, KvCache, KvShape, Outputs, View, ViewMut};
/// use sdpa_mpi::{Ranks, Step};
/// use std::time::Duration;
///
/// let universe = mpi::initialize().expect("MPI");
/// let world = universe.world();
/// let ranks = Ranks::new(&world, Duration::from_secs(60));
/// // Each rank has 4096 keys; the last one also those of the new tokens.
/// let cache = KvCache::new(1, KvShape { kv_heads: 8, head_dim: 128, value_dim: 128 })?; // … filled
/// let (q, mut out) = (vec![0.5f32; 32 * 128], vec![0.0f32; 32 * 128]);
/// let q = View::bhld(&q, [1, 32, 1, 128])?;
/// let outputs = Outputs::new(ViewMut::bhld(&mut out, [1, 32, 1, 128])?);
/// let first = 4096 * world.rank() as usize;
/// ranks.step(&Attention::new(), Step::new(Inputs::cached(q, &cache), first, outputs))?;
/// # Ok::<(), sdpa_mpi::Error>(())
/// ```
#[derive(Debug)]
pub struct Step<'a> {
    inputs: Inputs<'a>,
    first: usize,
    sinks: Option<&'a [f32]>,
    outputs: Outputs<'a>,
}

impl<'a> Step<'a> {
    /// Takes the queries, the same on every rank, this rank's keys, which follow `first` keys on other ranks (a multiple of
    /// 256), and the outputs, which every rank gets. A cache grows on the rank that has the last keys; when its share is full,
    /// the next rank begins one.
    pub fn new(inputs: Inputs<'a>, first: usize, outputs: Outputs<'a>) -> Self {
        Self { inputs, first, sinks: None, outputs }
    }

    /// Sets attention sinks, `[heads]`, the same on every rank.
    #[must_use]
    pub fn sinks(self, logits: &'a [f32]) -> Self {
        Self { sinks: Some(logits), ..self }
    }

    /// Says what this rank has, and what of the step it knows.
    fn description(&self, attention: &Attention) -> Result<Description, sdpa::Error> {
        let (shape, [batch, heads, rows, dim]) = (self.inputs.shape()?, self.inputs.queries().shape());
        let end = self.first.checked_add(shape.kv_len).filter(|&end| end <= isize::MAX as usize);
        let too_large = sdpa::Error::TooLarge { what: "positions of keys", sizes: [self.first, shape.kv_len, 1, 1] };
        let mut description = Description { keys: vec![self.first..end.ok_or(too_large)?], ..Description::default() };
        let sizes = [("batch", batch), ("query heads", heads), ("rows", rows), ("head_dim", dim)];
        let of_keys = [("key/value heads", shape.kv_heads), ("value_dim", shape.value_dim)];
        for (what, size) in sizes.into_iter().chain(of_keys) {
            description.fact(what, size.to_string());
        }
        description.fact("element type of q", self.inputs.queries().dtype().to_string());
        for (what, words) in self.inputs.options_in_words() {
            if !["sequences", "ragged", "kv_lens"].contains(&what) {
                description.fact(what, words);
            }
        }
        description.fact("sinks of the step", format!("{:?}", self.sinks));
        description.fact("settings", format!("{attention:?}"));
        Ok(description)
    }
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

/// Runs a step, the `number`th call.
pub(crate) fn run(group: &Group<'_>, number: u64, attention: &Attention, step: Step<'_>) -> Result<Report, Error> {
    let (comm, begin) = (group.comm, Instant::now());
    let mut blocks = BlockStates::new();
    let description = step.description(attention).and_then(|description| {
        let (exec, inputs, first, blocks) = (group.exec, step.inputs, step.first, &mut blocks);
        let mut compute = || blocks.compute(attention, inputs, first, exec);
        match group.pool {
            Some(pool) => pool.install(compute),
            None => compute(),
        }?;
        Ok(description)
    });
    let mut report = Report { computing: begin.elapsed(), ..Report::default() };
    let order = agreed(group, number, description)?;
    let [batch, heads, rows, _] = step.inputs.queries().shape();
    let mut states = RowStates::new([batch, heads, rows, step.inputs.shape()?.value_dim])?;
    let mut along = Along { group, report: &mut report };
    if let Some(turn) = order.iter().position(|&rank| rank == comm.rank) {
        if turn > 0 {
            along.receive(&mut states, order[turn - 1], ALONG)?;
        }
        states.fold(&blocks)?;
        if let Some(&next) = order.get(turn + 1) {
            along.send(&states, vec![next], ALONG)?;
        }
    }
    match order.last() {
        Some(&last) if last == comm.rank => {
            along.send(&states, (0..comm.size).filter(|&rank| rank != last).collect(), RESULT)?;
        }
        Some(&last) => along.receive(&mut states, last, RESULT)?,
        // Nobody has keys.
        None => {}
    }
    states.write(step.sinks, step.outputs, group.exec)?;
    Ok(report)
}

/// Tells all ranks what this one has, compares, and returns the ranks that have keys, in the order of these.
fn agreed(group: &Group<'_>, number: u64, own: Result<Description, sdpa::Error>) -> Result<Vec<usize>, Error> {
    let mut description = match &own {
        Ok(description) => description.clone(),
        Err(error) => Description { refused: Some(error.to_string()), ..Description::default() },
    };
    description.facts.insert(0, ("number of calls before".to_owned(), number.to_string()));
    let texts = exchange(group.comm, description.text(), "what it has of the step", group.timeout)?;
    let all: Vec<Description> = texts.iter().map(|text| Description::read(text)).collect();
    match (agree(&all), own) {
        (Err(Error::Refused { rank, .. }), Err(error)) if rank == group.comm.rank => return Err(Error::Call(error)),
        (result, _) => result?,
    }
    Ok(in_order(KEYS, all.iter().map(|description| &*description.keys))?.iter().map(|stretch| stretch.rank).collect())
}

/// States on their way along the keys.
struct Along<'g, 'c> {
    group: &'g Group<'c>,
    report: &'g mut Report,
}

impl Along<'_, '_> {
    fn send(&mut self, states: &RowStates, to: Vec<usize>, tag: u16) -> Result<(), Error> {
        let transfer = Transfer::begin(self.group.comm, states.as_slice().to_vec(), Way { from: None, to, tag });
        self.wait(&transfer, "that it takes the states")
    }

    fn receive(&mut self, states: &mut RowStates, from: usize, tag: u16) -> Result<(), Error> {
        let way = Way { from: Some(from), to: Vec::new(), tag };
        let transfer = Transfer::begin(self.group.comm, vec![0.0; states.as_slice().len()], way);
        self.wait(&transfer, "the states over the keys before")?;
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
