//! One call cut by heads: each rank gets all rows and keys of some heads, computes them as one machine does, and sends the
//! results to the ranks that have their rows (DeepSpeed-Ulysses, arXiv:2309.14509).

mod options;

use crate::agreement::agreement;
use crate::all_to_all::{Messages, all_to_all};
use crate::cut::{Cut, LSE_COLUMNS};
use crate::description::Description;
use crate::error::Error;
use crate::forms::describe;
use crate::functions::{FromHead, given};
use crate::group::Group;
use crate::heads::options::Options;
use crate::layout::{KEYS, ROWS, in_order};
use crate::prompt::{check_dropout, check_outputs};
use crate::report::Report;
use crate::share::{Keys, Rows, Share};
use crate::whole::{Whole, of_heads, pack, write};
use core::cell::Cell;
use core::ops::Range;
use sdpa::{Attention, Dtype, Inputs, MaskMod, Mods, Outputs, Run, ScoreMod, ViewMut, WeightMod};
use std::time::Instant;

/// Queries, keys and values on their way to the ranks that compute their heads.
struct There<'m, 'a> {
    cut: &'m Cut,
    rank: usize,
    rows: &'m [Rows<'a>],
    keys: &'m [Keys<'a>],
    /// Those of this rank's heads.
    whole: [Whole; 3],
    options: Options,
}

impl Messages for There<'_, '_> {
    const TAG: u16 = 8020;
    const WHAT: &'static str = "its queries, keys and values";

    fn pack(&self, to: usize) -> Result<Vec<u8>, Error> {
        let mut bytes = Vec::new();
        let [heads, kv_heads, _] = self.cut.heads_of(to);
        for rows in self.rows {
            pack(&mut bytes, rows.inputs.queries(), heads.clone())?;
            options::pack(&mut bytes, self.cut, &rows.inputs, heads.clone())?;
        }
        for keys in self.keys {
            pack(&mut bytes, keys.k, kv_heads.clone())?;
            pack(&mut bytes, keys.v, kv_heads.clone())?;
        }
        Ok(bytes)
    }

    fn len(&self, from: usize) -> usize {
        let Description { rows, keys, .. } = &self.cut.ranks[from];
        let of = |which: usize, n: usize| self.cut.elements(which, n, self.rank) * self.cut.dtypes[which].bytes();
        let heads = self.cut.heads_of(self.rank)[0].len();
        let options = |n: usize| self.cut.forms.iter().flatten().map(|form| form.bytes(n, heads)).sum::<usize>();
        let rows = rows.iter().map(|rows| of(0, rows.len()) + options(rows.len()));
        rows.chain(keys.iter().map(|keys| of(1, keys.len()) + of(2, keys.len()))).sum()
    }

    fn take(&mut self, from: usize, mut bytes: &[u8]) {
        let Description { rows, keys, .. } = &self.cut.ranks[from];
        let [q, k, v] = &mut self.whole;
        for rows in rows {
            bytes = q.place(rows.clone(), bytes);
            bytes = self.options.place(rows.clone(), bytes);
        }
        for keys in keys {
            bytes = k.place(keys.clone(), bytes);
            bytes = v.place(keys.clone(), bytes);
        }
    }
}

/// Results on their way to the ranks that have their rows: outputs, then log-sum-exps.
struct Back<'m> {
    cut: &'m Cut,
    rank: usize,
    /// Those of this rank's heads.
    results: [Whole; 2],
    /// Those of this rank's rows, as they came from each rank.
    came: Vec<Vec<u8>>,
}

impl Messages for Back<'_> {
    const TAG: u16 = 8021;
    const WHAT: &'static str = "the results of its heads";

    fn pack(&self, to: usize) -> Result<Vec<u8>, Error> {
        let mut bytes = Vec::new();
        for rows in &self.cut.ranks[to].rows {
            for result in &self.results {
                let result = result.tensor()?;
                let heads = 0..result.shape()[1];
                pack(&mut bytes, result.rows_in(rows.clone()).unwrap_or(result), heads)?;
            }
        }
        Ok(bytes)
    }

    fn len(&self, from: usize) -> usize {
        let rows: usize = self.cut.ranks[self.rank].rows.iter().map(Range::len).sum();
        self.cut.batch
            * self.cut.heads_of(from)[0].len()
            * rows
            * (self.cut.dims[2] + self.cut.lse_columns)
            * size_of::<f32>()
    }

    fn take(&mut self, from: usize, bytes: &[u8]) {
        self.came[from] = bytes.to_vec();
    }
}

/// A call that begins.
pub(crate) struct Call<'r, 'c> {
    pub(crate) group: &'r Group<'c>,
    pub(crate) attention: Attention,
    /// Number of calls before this one.
    pub(crate) number: u64,
    /// True while messages are on their way.
    pub(crate) streams: &'r Cell<bool>,
}

impl Call<'_, '_> {
    /// Runs the call.
    pub(crate) fn run<S: ScoreMod, M: MaskMod, P: WeightMod>(
        &self,
        share: Share<'_>,
        mods: &Mods<S, M, P>,
    ) -> Result<Report, Error> {
        let (group, rank) = (self.group, self.group.comm.rank);
        let all = agreement(group, self.number, self.description(&share, given(mods)), "what it has of the call")?;
        let rows = in_order(ROWS, all.iter().map(|description| &*description.rows))?;
        let keys = in_order(KEYS, all.iter().map(|description| &*description.keys))?;
        let [rows, keys] = [rows, keys].map(|stretches| stretches.last().map_or(0, |last| last.range.end));
        let cut = Cut::new(all);
        let options = Options::new(&cut, rank, [rows, keys])?;
        let mut report = Report { computed: keys, ..Report::default() };
        self.streams.set(true);
        let whole = self.gather(&cut, &share, [rows, keys, keys], options, &mut report)?;
        self.streams.set(false);
        let begin = Instant::now();
        let results = self.compute(&cut, &share, &whole, mods);
        report.computing = begin.elapsed();
        if let (Some(progress), Ok(_)) = (group.progress, &results) {
            progress(keys, keys);
        }
        let (own, results) = match results {
            Ok(results) => (Ok(Description::default()), Some(results)),
            Err(error) => (Err(error), None),
        };
        agreement(group, self.number, own, "whether it has computed its heads")?;
        let Some(results) = results else { unreachable!("who has no results has said why") };
        self.streams.set(true);
        let mut back = Back { cut: &cut, rank, results, came: vec![Vec::new(); group.comm.size] };
        all_to_all(group, &mut back, &mut report, [keys; 2])?;
        self.streams.set(false);
        let mut came: Vec<&[u8]> = back.came.iter().map(Vec::as_slice).collect();
        for rows in share.rows {
            scatter(&cut, &mut came, rows)?;
        }
        Ok(report)
    }

    /// Says what this rank has of the call, or why a call cut by heads cannot be.
    fn description(&self, share: &Share<'_>, given: [bool; 3]) -> Result<Description, sdpa::Error> {
        let mut description = share.described(&self.attention, |rows, description| {
            let columns = rows.lse_columns();
            columns.into_iter().for_each(|columns| description.fact(LSE_COLUMNS, columns));
            describe(rows, description)
        })?;
        description.fact("split", "by heads");
        for (what, given) in ["score function", "mask function", "weight function"].into_iter().zip(given) {
            description.fact(what, given);
        }
        if share.rows.is_empty() {
            let needs = "a stretch of rows, if only an empty one, which names the options of the call";
            return Err(sdpa::Error::Needs { argument: "share", needs });
        }
        check_dropout(&self.attention)?;
        for rows in &share.rows {
            check_outputs(self.attention, rows)?;
        }
        Ok(description)
    }

    /// Gets the queries, keys and values of this rank's heads, and biases and masks.
    fn gather(
        &self,
        cut: &Cut,
        Share { rows, keys }: &Share<'_>,
        lens: [usize; 3],
        options: Options,
        report: &mut Report,
    ) -> Result<([Whole; 3], Options), Error> {
        let rank = self.group.comm.rank;
        let heads = cut.heads_of(rank);
        let whole = |i: usize| Whole::new([cut.batch, heads[i].len(), lens[i], cut.dims[i]], cut.dtypes[i]);
        let mut there = There { cut, rank, rows, keys, whole: [whole(0)?, whole(1)?, whole(2)?], options };
        report.held = there.whole.iter().map(Whole::bytes).sum::<usize>() + there.options.bytes();
        all_to_all(self.group, &mut there, report, [0, lens[1]])?;
        Ok((there.whole, there.options))
    }

    /// Computes this rank's heads: outputs and log-sum-exps.
    fn compute<S: ScoreMod, M: MaskMod, P: WeightMod>(
        &self,
        cut: &Cut,
        share: &Share<'_>,
        (whole, options): &([Whole; 3], Options),
        mods: &Mods<S, M, P>,
    ) -> Result<[Whole; 2], sdpa::Error> {
        let [heads, kv_heads, _] = cut.heads_of(self.group.comm.rank);
        let [_, _, rows, _] = whole[0].shape();
        let of_all = [cut.dims[2], cut.lse_columns].map(|dim| [cut.batch, heads.len(), rows, dim]);
        let [mut out, mut lse] = [Whole::room(of_all[0])?, Whole::room(of_all[1])?];
        // One key/value head after the other, where somebody is told how far it is.
        let (all, keys) = (kv_heads.len(), whole[1].shape()[2]);
        let step = if self.group.progress.is_some() { 1 } else { all.max(1) };
        for first in (0..all).step_by(step) {
            let (kv, group) = (first..all.min(first + step), heads.len() / all);
            let some = kv.start * group..kv.end * group;
            let qkv = [whole[0].heads(some.clone())?, whole[1].heads(kv.clone())?, whole[2].heads(kv.clone())?];
            let view = |to, of: [usize; 4]| {
                let (offset, shape, strides) = of_heads(of, some.clone());
                ViewMut::from_strides(to, offset, shape, strides)
            };
            let outputs = Outputs::new(view(&mut out[..], of_all[0])?).lse(view(&mut lse[..], of_all[1])?);
            if let Some(rows) = share.rows.first() {
                let inputs = options.inputs(rows.inputs, some.clone(), qkv)?;
                self.compute_heads(heads.start + some.start, inputs, outputs, mods)?;
            }
            if let Some(progress) = self.group.progress.filter(|_| kv.end < all) {
                progress(keys * kv.end / all, keys);
            }
        }
        Ok([Whole::of(of_all[0], out), Whole::of(of_all[1], lse)])
    }

    /// Computes some heads of the call, from a first one on.
    fn compute_heads<S: ScoreMod, M: MaskMod, P: WeightMod>(
        &self,
        first: usize,
        inputs: Inputs<'_>,
        outputs: Outputs<'_>,
        mods: &Mods<S, M, P>,
    ) -> Result<(), sdpa::Error> {
        let problem = self.attention.problem(inputs, outputs)?;
        let mods = Mods::new()
            .score(FromHead(&mods.score, first))
            .mask(FromHead(&mods.mask, first))
            .weight(FromHead(&mods.weight, first));
        let (exec, pool) = (self.group.exec, self.group.pool);
        let run = || problem.run_once_with(exec, Run::new().mods(&mods));
        match pool {
            Some(pool) => pool.install(run),
            None => run(),
        }
    }
}

/// Writes the results of a stretch of rows, the next of what came from each rank.
fn scatter(cut: &Cut, came: &mut [&[u8]], Rows { inputs, outputs, .. }: Rows<'_>) -> Result<(), Error> {
    let [batch, heads, n, _] = inputs.queries().shape();
    let room = |dim| Whole::new([batch, heads, n, dim], Dtype::F32);
    let mut results = [room(cut.dims[2])?, room(cut.lse_columns)?];
    for (rank, bytes) in came.iter_mut().enumerate() {
        let [heads, ..] = cut.heads_of(rank);
        for result in &mut results {
            *bytes = result.place_heads(heads.clone(), bytes);
        }
    }
    let [out, lse] = results;
    write(outputs, [&out, &lse]);
    Ok(())
}
