//! Decode step over keys that are cut over ranks: each computes the states of its blocks, and the states of the rows go
//! from rank to rank in the order of the keys.

use crate::agreement::agreement;
use crate::description::Description;
use crate::error::Error;
use crate::exchange::blaming;
use crate::group::Group;
use crate::layout::{KEYS, in_order};
use crate::merges::{Gathering, Merges};
use crate::report::Report;
use crate::share::{of_queries, positions};
use sdpa::parts::{BlockStates, Datum, RowStates};
use sdpa::{Attention, Inputs, Outputs};
use std::time::Instant;

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
    merges: Merges,
    outputs: Outputs<'a>,
}

impl<'a> Step<'a> {
    /// Takes the queries, the same on every rank, this rank's keys, which follow `first` keys on other ranks (a multiple of
    /// 256), and the outputs, which every rank gets. A cache grows on the rank that has the last keys; when its share is full,
    /// the next rank begins one.
    ///
    /// Biases and masks of the inputs have the columns of this rank's keys. Sinks go to [`Self::sinks`]. Positions of rows and keys,
    /// biases and masks over the last keys, dropout and bottom-right alignment are refused: name an [`Offset`](sdpa::Alignment::Offset).
    pub fn new(inputs: Inputs<'a>, first: usize, outputs: Outputs<'a>) -> Self {
        Self { inputs, first, sinks: None, merges: Merges::InOrder, outputs }
    }

    /// Sets attention sinks, `[heads]`, the same on every rank.
    #[must_use]
    pub fn sinks(self, logits: &'a [f32]) -> Self {
        Self { sinks: Some(logits), ..self }
    }

    /// Sets the order in which the states of ranks are merged, the same on every rank.
    #[must_use]
    pub fn merges(self, merges: Merges) -> Self {
        Self { merges, ..self }
    }

    /// Says what this rank has, and what of the step it knows.
    fn description(&self, attention: &Attention) -> Result<Description, sdpa::Error> {
        let keys = positions(self.first, self.inputs.shape()?.kv_len)?;
        let mut description = Description { keys: vec![keys], ..Description::default() };
        of_queries(&self.inputs, &mut description)?;
        description.fact("rows", self.inputs.queries().shape()[2]);
        for (what, value) in self.inputs.options() {
            match what {
                "sinks" if value != Datum::default() => {
                    let needs = "`Step::sinks`, since they take part once, not on each rank";
                    return Err(sdpa::Error::Needs { argument: "sinks", needs });
                }
                "row positions" | "key positions" if value != Datum::default() => {
                    return Err(sdpa::Error::Needs { argument: what, needs: "a call over all keys" });
                }
                "sequences" | "ragged q" | "ragged k" | "kv_lens" => {}
                // Each rank has the columns of its own keys.
                "bias columns" | "bias covers" | "mask columns" | "mask covers" => {}
                _ => description.fact(what, value),
            }
        }
        description.fact("sinks of the step", self.sinks);
        let merges = match self.merges {
            Merges::InOrder => "in order",
            Merges::Tree => "tree",
        };
        description.fact("merges", merges);
        description.options(attention.settings());
        Ok(description)
    }
}

impl Step<'_> {
    /// Computes the states of this rank's blocks, and returns states of the rows that have seen no keys.
    fn states(
        &self,
        group: &Group<'_>,
        attention: &Attention,
        blocks: &mut BlockStates,
    ) -> Result<RowStates, sdpa::Error> {
        let [batch, heads, rows, _] = self.inputs.queries().shape();
        let states = RowStates::new([batch, heads, rows, self.inputs.shape()?.value_dim])?;
        states.check(self.sinks, &self.outputs)?;
        let (inputs, first, exec) = (self.inputs, self.first, group.exec);
        let mut compute = || blocks.compute(attention, inputs, first, exec);
        match group.pool {
            Some(pool) => pool.install(compute),
            None => compute(),
        }?;
        Ok(states)
    }
}

/// Runs a step, the `number`th call.
pub(crate) fn run(group: &Group<'_>, number: u64, attention: &Attention, step: Step<'_>) -> Result<Report, Error> {
    let begin = Instant::now();
    let (mut blocks, own) = (BlockStates::new(), step.description(attention));
    let own = own.and_then(|description| Ok((description, step.states(group, attention, &mut blocks)?)));
    let mut report = Report { computing: begin.elapsed(), ..Report::default() };
    let (description, states) = match own {
        Ok((description, states)) => (Ok(description), Some(states)),
        Err(error) => (Err(error), None),
    };
    let all = agreement(group, number, description, "what it has of the step")?;
    let stretches = in_order(KEYS, all.iter().map(|description| &*description.keys))?;
    let Some(mut states) = states else { unreachable!("who has no states has said why") };
    let mut gathering = Gathering { group, stretches: &stretches, report: &mut report };
    let gathered = gathering.run(step.merges, &mut states, &blocks);
    gathered.map_err(|error| blaming(group.comm, error, group.timeout))?;
    states.write(step.sinks, step.outputs, group.exec)?;
    Ok(report)
}
