//! One call over all ranks: agreement, then keys and values in order.

use crate::description::{Description, agree};
use crate::error::Error;
use crate::exchange::{blaming, exchange};
use crate::functions::{from_row, given};
use crate::group::Group;
use crate::layout::{KEYS, Parcel, ROWS, Stretch, Tree, in_order, parcels};
use crate::memory::Memory;
use crate::parcel::Sizes;
use crate::report::Report;
use crate::share::{Rows, Share};
use crate::stream::{Step, Stream};
use core::cell::{Cell, RefCell};
use core::ops::Range;
use sdpa::{Alignment, Attention, AttnState, Dtype, Inputs, MaskMod, Mods, Outputs, ScoreMod, StateMemory, WeightMod};

/// A call that begins.
pub(crate) struct Call<'r, 'c> {
    pub(crate) group: &'r Group<'c>,
    pub(crate) attention: Attention,
    /// Number of calls before this one.
    pub(crate) number: u64,
    /// True while keys and values are on their way.
    pub(crate) streams: &'r Cell<bool>,
    /// Memory that earlier calls have left, and that this one leaves.
    pub(crate) memory: &'r RefCell<Memory>,
}

/// Rows, keys and sizes that all ranks have together.
pub(crate) struct Agreed {
    pub(crate) rows: usize,
    /// Of rows, in order.
    pub(crate) stretches: Vec<Stretch>,
    pub(crate) keys: Vec<Stretch>,
    /// `None` if no rank has keys.
    pub(crate) sizes: Option<Sizes>,
    /// Query heads; `None` if no rank has rows.
    pub(crate) heads: Option<usize>,
}

impl<'c> Call<'_, 'c> {
    /// Runs the call.
    pub(crate) fn run<S: ScoreMod, M: MaskMod, P: WeightMod>(
        &self,
        share: Share<'_>,
        mods: &Mods<S, M, P>,
    ) -> Result<Report, Error> {
        let agreed = self.agreed("forward pass", share.description(&self.attention), given(mods))?;
        let Share { rows, keys } = share;
        let shifted: Vec<_> = rows.iter().map(|rows| from_row(mods, rows.first)).collect();
        let memory = &mut *self.memory.borrow_mut();
        let mut left = memory.states.drain(..);
        let states = rows.iter().zip(&shifted).map(|(rows, mods)| self.state(rows, left.next(), &agreed, mods));
        let states: Result<Vec<_>, _> = states.collect();
        drop(left);
        let parcels = agreed.sizes.map_or(Vec::new(), |sizes| parcels(&agreed.keys, sizes.bytes()));
        let (states, steps) = self.steps(states, &parcels)?;
        let mut stream = Stream::new(self.group, states, &keys, memory);
        if let Some(sizes) = agreed.sizes {
            self.streams.set(true);
            stream.run(&steps, &sizes).map_err(|error| blaming(self.group.comm, error, self.group.timeout))?;
        }
        self.streams.set(false);
        let outputs: Vec<Outputs<'_>> = rows.into_iter().map(|rows| rows.outputs).collect();
        stream.finish(outputs)
    }

    /// Tells all ranks what this one has of a call of some kind, and compares what they have.
    pub(crate) fn agreed(
        &self,
        kind: &str,
        own: Result<Description, sdpa::Error>,
        [score, mask, weight]: [bool; 3],
    ) -> Result<Agreed, Error> {
        const WHAT: &str = "what it has of the call";
        let whole = sdpa::Error::Needs { argument: "weight function", needs: "a call over all keys, on one machine" };
        let own = if weight { Err(whole) } else { own };
        let mut description = match &own {
            Ok(description) => description.clone(),
            Err(error) => Description { refused: Some(error.to_string()), ..Description::default() },
        };
        let word = |given| if given { "given" } else { "none" };
        description.facts.insert(0, ("number of calls before".to_owned(), self.number.to_string()));
        description.facts.insert(1, ("call".to_owned(), kind.to_owned()));
        description.fact("split", "by rows");
        description.fact("score function", word(score));
        description.fact("mask function", word(mask));
        let texts = exchange(self.group.comm, description.text(), WHAT, self.group.timeout)?;
        let all: Vec<Description> = texts.iter().map(|text| Description::read(text)).collect();
        agree(&all).map_err(|error| self.own(error, own.err()))?;
        let end = |stretches: &[Stretch]| stretches.last().map_or(0, |last| last.range.end);
        let rows = in_order(ROWS, all.iter().map(|description| &*description.rows))?;
        let keys = in_order(KEYS, all.iter().map(|description| &*description.keys))?;
        Ok(Agreed { rows: end(&rows), stretches: rows, keys, sizes: sizes(&all), heads: said(&all, "query heads") })
    }

    /// Replaces this rank's own refusal by its reason.
    pub(crate) fn own(&self, error: Error, reason: Option<sdpa::Error>) -> Error {
        match (error, reason) {
            (Error::Refused { rank, .. }, Some(reason)) if rank == self.group.comm.rank => Error::Call(reason),
            (error, _) => error,
        }
    }

    /// Makes the state of a stretch of rows.
    fn state<'a, S: ScoreMod, M: MaskMod>(
        &self,
        Rows { first, inputs, outputs }: &Rows<'a>,
        left: Option<StateMemory>,
        agreed: &Agreed,
        mods: &'a Mods<S, M>,
    ) -> Result<AttnState<'a>, sdpa::Error>
    where
        'c: 'a,
    {
        let attention = self.aligned(*first, inputs, agreed)?;
        let state = AttnState::from_inputs_in(attention, *inputs, self.group.exec, left.unwrap_or_default())?;
        let state = if mods.score.is_given() || mods.mask.is_given() { state.mods(mods)? } else { state };
        state.check(outputs)?;
        Ok(state)
    }

    /// Returns the settings for a stretch of rows: with their place among the keys.
    pub(crate) fn aligned(&self, first: usize, inputs: &Inputs<'_>, agreed: &Agreed) -> Result<Attention, sdpa::Error> {
        let keys = agreed.keys.last().map_or(0, |last| last.range.end);
        let lens = inputs.options_in_words().iter().any(|(what, words)| *what == "kv_lens" && words != "none");
        let first_row = match self.attention.alignment() {
            Some(Alignment::BottomRight) if lens => {
                let needs = "sequences of one length, where rows are on several ranks";
                return Err(sdpa::Error::Needs { argument: "bottom-right", needs });
            }
            Some(alignment) => alignment.offset(agreed.rows, keys),
            None if agreed.rows == keys => 0,
            // Only if no rule needs an alignment.
            None => {
                AttnState::from_inputs(self.attention, *inputs, self.group.exec).map(|_| 0).map_err(
                    |error| match error {
                        sdpa::Error::Needs { argument: rule, needs } if needs.starts_with("an alignment") => {
                            sdpa::Error::Unaligned { rule, sequence: None, q_len: agreed.rows, kv_len: keys }
                        }
                        error => error,
                    },
                )?
            }
        };
        Ok(self.attention.align(Alignment::Offset(first_row.saturating_add_unsigned(first))))
    }

    /// Tells all ranks which parcels this one needs, or why it refuses the call, and returns its steps.
    fn steps<'a>(
        &self,
        states: Result<Vec<AttnState<'a>>, sdpa::Error>,
        parcels: &[Parcel],
    ) -> Result<(Vec<AttnState<'a>>, Vec<Step>), Error> {
        const WHAT: &str = "which keys it needs";
        let mut description = Description::default();
        match &states {
            Ok(states) => {
                let needs = |parcel: &Parcel| states.iter().any(|state| state.sees(parcel.keys.clone()));
                // As ranges of parcels, which are few under all rules but odd ones.
                let mut ranges: Vec<Range<usize>> = Vec::new();
                for (n, _) in parcels.iter().enumerate().filter(|(_, parcel)| needs(parcel)) {
                    match ranges.last_mut() {
                        Some(last) if last.end == n => last.end += 1,
                        _ => ranges.push(n..n + 1),
                    }
                }
                description.keys = ranges;
            }
            Err(error) => description.refused = Some(error.to_string()),
        }
        let texts = exchange(self.group.comm, description.text(), WHAT, self.group.timeout)?;
        let all: Vec<Description> = texts.iter().map(|text| Description::read(text)).collect();
        let states = match (agree(&all), states) {
            (Ok(()), Ok(states)) => states,
            (Ok(()), Err(error)) => return Err(error.into()),
            (Err(error), states) => return Err(self.own(error, states.err())),
        };
        let steps = parcels.iter().enumerate().map(|(n, parcel)| {
            let needs: Vec<_> =
                all.iter().map(|description| description.keys.iter().any(|range| range.contains(&n))).collect();
            let tree = Tree::new(parcel.owner, &needs);
            let way = tree.at(self.group.comm.rank).filter(|(from, to)| from.is_some() || !to.is_empty());
            Step { parcel: parcel.clone(), number: n, needed: needs[self.group.comm.rank], way }
        });
        let steps = steps.collect();
        Ok((states, steps))
    }
}

/// Returns what the first rank that says something of a thing says, as a number.
fn said(all: &[Description], name: &str) -> Option<usize> {
    let mut facts = all.iter().flat_map(|description| &description.facts);
    facts.find(|(what, _)| what == name)?.1.parse().ok()
}

/// Returns sizes and element types of the keys, as the ranks that have some say.
fn sizes(all: &[Description]) -> Option<Sizes> {
    let with_keys =
        all.iter().find(|description| description.facts.iter().any(|(what, _)| what == "element type of k"))?;
    let said = |name: &str| with_keys.facts.iter().find(|(what, _)| what == name).map(|(_, value)| value.as_str());
    let number = |name| said(name)?.parse().ok();
    let dtype =
        |name| [Dtype::F32, Dtype::Bf16, Dtype::F16].into_iter().find(|dtype| said(name) == Some(&dtype.to_string()));
    Some(Sizes {
        batch: number("batch")?,
        heads: number("key/value heads")?,
        dims: [number("head_dim")?, number("value_dim")?],
        dtypes: [dtype("element type of k")?, dtype("element type of v")?],
    })
}
