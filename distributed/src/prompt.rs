//! One call over all ranks: agreement, then keys and values in order.

use crate::agreement::{agreed, agreement};
use crate::description::{Description, dtype, is_given, number};
use crate::error::Error;
use crate::exchange::blaming;
use crate::functions::{OneOf, given, of_sequence};
use crate::group::Group;
use crate::layout::{KEYS, Parcel, Part, ROWS, Stretch, Tree, in_order, parcels};
use crate::memory::Memory;
use crate::parcel::Sizes;
use crate::parts::{Make, Parts, RowPart};
use crate::report::Report;
use crate::sequences::{OF_KEYS, OF_ROWS, Sequences};
use crate::share::{ONE_BY_ONE, Rows, Share};
use crate::stream::{Step, Stream};
use crate::whole::Whole;
use core::cell::{Cell, RefCell};
use core::ops::Range;
use sdpa::{
    Alignment, Attention, AttnState, Bound, Exec, Inputs, KvShape, MaskMod, Mods, Outputs, ScoreMod, WeightMod,
};

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
    /// Numbers of all rows and of all keys.
    pub(crate) lens: [usize; 2],
    /// Parts of stretches, in order.
    pub(crate) rows: Vec<Part>,
    pub(crate) keys: Vec<Part>,
    pub(crate) sequences: Sequences,
    /// Descriptions of the call, one by each rank.
    pub(crate) ranks: Vec<Description>,
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
        let stretches = rows.iter().map(|rows| (rows.first, rows.inputs.queries().shape()[2]));
        let own = agreed.own_rows(self.group.comm.rank, stretches);
        let shifted: Vec<_> = own.iter().map(|part| of_sequence(mods, agreed.one_of(part))).collect();
        let parcels = agreed.sizes.map_or(Vec::new(), |sizes| parcels(&agreed.keys, sizes.bytes()));
        let (parts, steps) = self.steps(self.parts(&rows, own, &shifted, &agreed, &parcels), &parcels)?;
        let memory = &mut *self.memory.borrow_mut();
        let mut stream = Stream::new(self.group, parts, &keys, memory);
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
        let own = own.and_then(|own| {
            check_dropout(&self.attention)?;
            let argument = if weight { Some("weight function") } else { own.positions() };
            let needs = "all keys at once: a call on one machine, or a forward pass cut by heads";
            argument.map_or(Ok(own), |argument| Err(sdpa::Error::Needs { argument, needs }))
        });
        let own = own.map(|mut own| {
            own.facts.insert(0, ("call".to_owned(), kind.into()));
            own.fact("split", "by rows");
            own.fact("score function", score);
            own.fact("mask function", mask);
            own
        });
        let all = agreement(self.group, self.number, own, WHAT)?;
        let rows = in_order(ROWS, all.iter().map(|description| &*description.rows))?;
        let keys = in_order(KEYS, all.iter().map(|description| &*description.keys))?;
        let lens = [&rows, &keys].map(|stretches| stretches.last().map_or(0, |last| last.range.end));
        let one_by_one = is_given(&all, ONE_BY_ONE);
        let sequences = match number(&all, "batch").filter(|_| one_by_one) {
            Some(batch) => Sequences::of_batch(batch, lens)?,
            None => Sequences::agreed(&all, lens)?,
        };
        let (rows, keys) = (sequences.parts(OF_ROWS, &rows), sequences.parts(OF_KEYS, &keys));
        let of_one = |sizes: Sizes| if one_by_one { Sizes { batch: 1, ..sizes } } else { sizes };
        let (sizes, heads) = (sizes(&all).map(of_one), number(&all, "query heads"));
        Ok(Agreed { lens, rows, keys, sequences, ranks: all, sizes, heads })
    }

    /// Makes the parts of this rank's rows, and finds which parcels some of them may see.
    fn parts<'a, S: ScoreMod, M: MaskMod>(
        &self,
        rows: &[Rows<'a>],
        own: Vec<Part>,
        mods: &'a [Mods<S, M>],
        agreed: &Agreed,
        parcels: &[Parcel],
    ) -> Result<(Parts<'a>, Vec<bool>), sdpa::Error>
    where
        'c: 'a,
    {
        let mut left = std::mem::take(&mut self.memory.borrow_mut().states);
        rows.iter().try_for_each(|rows| agreed.check_lens(&rows.inputs))?;
        let (apart, mut needed) = (agreed.sequences.are_apart(), vec![false; parcels.len()]);
        let results =
            if apart { Some(rows.iter().map(|rows| self.results(rows)).collect::<Result<_, _>>()?) } else { None };
        let mut parts = Vec::new();
        for (part, mods) in own.iter().zip(mods) {
            let Rows { inputs, outputs, .. } = &rows[part.number];
            let (make, keys) =
                (self.make(part, *inputs, agreed, mods)?, agreed.sequences.range(OF_KEYS, part.sequence));
            let state = make(left.pop().unwrap_or_default())?;
            for (parcel, needed) in
                parcels.iter().zip(&mut needed).filter(|(parcel, _)| keys.contains(&parcel.keys.start))
            {
                *needed |= state.sees(parcel.keys.start - keys.start..parcel.keys.end - keys.start);
            }
            if !apart {
                state.check(outputs)?;
            }
            parts.push(RowPart::new(part, keys, make, Some(state).filter(|_| !apart)));
        }
        Ok((Parts::new(parts, results, left), needed))
    }

    /// Returns a function that makes the state of a part of a stretch.
    fn make<'a, S: ScoreMod, M: MaskMod>(
        &self,
        part: &Part,
        inputs: Inputs<'a>,
        agreed: &Agreed,
        mods: &'a Mods<S, M>,
    ) -> Result<Make<'a>, sdpa::Error>
    where
        'c: 'a,
    {
        let inputs = part.inputs(inputs)?;
        let (attention, exec, first) = (self.aligned(part, &inputs, agreed)?, self.group.exec, part.first_row());
        Ok(Box::new(move |memory| {
            let state = AttnState::from_inputs_in(attention, inputs, exec, memory)?.rows_from(first)?;
            if mods.score.is_given() || mods.mask.is_given() { state.mods(mods) } else { Ok(state) }
        }))
    }

    /// Makes room for the results of a stretch of rows of several sequences, if its settings and outputs fit.
    fn results(&self, rows: &Rows<'_>) -> Result<[Whole; 2], sdpa::Error> {
        check_outputs(self.attention, rows)?;
        let [batch, heads, n, _] = rows.inputs.queries().shape();
        let [.., value_dim] = rows.inputs.key_values()?.v_shape();
        let room = |dim| Ok::<_, sdpa::Error>(Whole::of([batch, heads, n, dim], Whole::room([batch, heads, n, dim])?));
        Ok([room(value_dim)?, room(rows.lse_columns().unwrap_or(1))?])
    }

    /// Returns the settings for a part of a stretch of rows, which has these inputs: with their place among the keys.
    pub(crate) fn aligned(&self, part: &Part, inputs: &Inputs<'_>, agreed: &Agreed) -> Result<Attention, sdpa::Error> {
        let [rows, keys] = match part.sequence {
            None => agreed.lens,
            Some(_) => [OF_ROWS, OF_KEYS].map(|of| agreed.sequences.range(of, part.sequence).len()),
        };
        // Lengths are all the same where an alignment depends on them. Without one, all must be that of the rows.
        let lens = inputs.key_lens().unwrap_or_default();
        let other = lens.iter().position(|&len| len != rows);
        let keys = lens.get(other.unwrap_or(0)).copied().unwrap_or(keys);
        let first_row = match self.attention.alignment() {
            Some(alignment) => alignment.offset(rows, keys),
            None if rows == keys => 0,
            // Only if no rule needs an alignment.
            None => {
                AttnState::from_inputs(self.attention, *inputs, self.group.exec).map(|_| 0).map_err(
                    |error| match error {
                        sdpa::Error::Needs { argument: rule, needs } if needs.starts_with("an alignment") => {
                            sdpa::Error::Unaligned {
                                rule,
                                sequence: part.sequence.or(other),
                                q_len: rows,
                                kv_len: keys,
                            }
                        }
                        error => error,
                    },
                )?
            }
        };
        Ok(self.attention.align(Alignment::Offset(first_row.saturating_add_unsigned(part.first_row()))))
    }

    /// Tells all ranks which parcels this one needs, or why it refuses the call, and returns its steps.
    fn steps<'a>(
        &self,
        parts: Result<(Parts<'a>, Vec<bool>), sdpa::Error>,
        parcels: &[Parcel],
    ) -> Result<(Parts<'a>, Vec<Step>), Error> {
        const WHAT: &str = "which keys it needs";
        let (parts, own) = match parts {
            Ok((parts, needed)) => {
                (Some(parts), Ok(Description { keys: ranges(needed.into_iter()), ..Description::default() }))
            }
            Err(error) => (None, Err(error)),
        };
        let all = agreed(self.group, own, WHAT)?;
        let Some(parts) = parts else { unreachable!("who has no parts has said why") };
        let steps = parcels.iter().enumerate().map(|(n, parcel)| {
            let needs: Vec<_> =
                all.iter().map(|description| description.keys.iter().any(|range| range.contains(&n))).collect();
            let tree = Tree::new(parcel.owner, &needs);
            let way = tree.at(self.group.comm.rank).filter(|(from, to)| from.is_some() || !to.is_empty());
            Step { parcel: parcel.clone(), number: n, needed: needs[self.group.comm.rank], way }
        });
        let steps = steps.collect();
        Ok((parts, steps))
    }
}

impl Agreed {
    /// Returns the parts of a rank's own stretches of rows, each given by its first row and its number of rows.
    pub(crate) fn own_rows(&self, rank: usize, stretches: impl Iterator<Item = (usize, usize)>) -> Vec<Part> {
        let stretch = |(number, (first, n))| Stretch { rank, number, range: first..first + n };
        self.sequences.parts(OF_ROWS, &stretches.enumerate().map(stretch).collect::<Vec<_>>())
    }

    /// Refuses a sequence of a batch that is longer than the keys of all ranks.
    pub(crate) fn check_lens(&self, inputs: &Inputs<'_>) -> Result<(), sdpa::Error> {
        let (lens, limit) = (inputs.key_lens().filter(|_| inputs.ragged_ends().is_none()), self.lens[1]);
        let mut lens = lens.unwrap_or_default().iter().enumerate();
        lens.find(|(_, len)| **len > limit).map_or(Ok(()), |(index, &got)| {
            let (argument, bound, of) = ("kv_lens", Bound::AtMost, "the keys of that sequence");
            Err(sdpa::Error::Entry { argument, index, got, bound, limit, of })
        })
    }

    /// Returns which sequence the functions see in the rows of a part.
    pub(crate) fn one_of(&self, part: &Part) -> OneOf {
        part.sequence.map(|sequence| (sequence, self.sequences.count()))
    }
}

impl Part {
    /// Returns the number of its first row in its sequence; in all, if sequences are computed together.
    pub(crate) fn first_row(&self) -> usize {
        self.range.start - self.first
    }

    /// Returns the inputs of a part, of those of its stretch of rows.
    pub(crate) fn inputs<'a>(&self, inputs: Inputs<'a>) -> Result<Inputs<'a>, sdpa::Error> {
        let rows = self.range.start - self.begin..self.range.end - self.begin;
        self.sequence.map_or(Ok(inputs), |sequence| inputs.of_sequence(sequence, rows))
    }
}

/// Refuses dropout, which counts the sequences, heads, rows and keys of one call.
pub(crate) fn check_dropout(attention: &Attention) -> Result<(), sdpa::Error> {
    let needs = "a call on one machine: it counts sequences, heads, rows and keys";
    attention.dropout_settings().map_or(Ok(()), |_| Err(sdpa::Error::Needs { argument: "dropout", needs }))
}

/// Checks settings and outputs of a stretch of rows; its place is not known yet.
pub(crate) fn check_outputs(attention: Attention, rows: &Rows<'_>) -> Result<(), sdpa::Error> {
    let kv = rows.inputs.key_values()?;
    let ([_, kv_heads, _, head_dim], [.., value_dim]) = (kv.k_shape(), kv.v_shape());
    let keys = KvShape { kv_heads, head_dim, value_dim };
    let attention = attention.align(Alignment::Offset(0));
    AttnState::new(attention, rows.inputs.queries(), keys, Exec::serial())?.check(&rows.outputs)
}

/// Returns the numbers of what is needed as ranges, which are few under all rules but odd ones.
pub(crate) fn ranges(needed: impl Iterator<Item = bool>) -> Vec<Range<usize>> {
    let mut ranges: Vec<Range<usize>> = Vec::new();
    for (n, _) in needed.enumerate().filter(|(_, needed)| *needed) {
        match ranges.last_mut() {
            Some(last) if last.end == n => last.end += 1,
            _ => ranges.push(n..n + 1),
        }
    }
    ranges
}

/// Returns sizes and element types of the keys, as the ranks that have some say.
fn sizes(all: &[Description]) -> Option<Sizes> {
    let with_keys = all.chunks(1).find(|rank| dtype(rank, "element type of k").is_some())?;
    let (number, dtype) = (|name| number(with_keys, name), |name| dtype(with_keys, name));
    Some(Sizes {
        batch: number("batch")?,
        heads: number("key/value heads")?,
        dims: [number("head_dim")?, number("value_dim")?],
        dtypes: [dtype("element type of k")?, dtype("element type of v")?],
    })
}
