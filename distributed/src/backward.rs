//! Backward pass over all ranks: agreement, then parcels of keys and the sums of their gradients, stretch by stretch of the rows.

pub(crate) mod chains;
mod flight;
mod parts;
mod pass;
pub(crate) mod share;

use crate::agreement::agreed;
use crate::backward::chains::{Blocks, Chains, blocks};
use crate::backward::parts::{Make, Parts, RowPart};
use crate::backward::pass::{Pass, Plan};
use crate::backward::share::{BackwardShare, ONE_ROW, Rows};
use crate::description::{Description, is_given};
use crate::error::Error;
use crate::exchange::blaming;
use crate::functions::{given, of_sequence};
use crate::layout::{Part, rows_of};
use crate::parcel::Sizes;
use crate::prompt::{Agreed, Call, ranges};
use crate::report::Report;
use crate::sequences::OF_KEYS;
use crate::whole::Whole;
use core::ops::Range;
use sdpa::parts::BackwardState;
use sdpa::{Alignment, Gradients, Inputs, MaskMod, Mods, Saved, ScoreMod, View, WeightMod};
use std::collections::BTreeMap;

/// Runs the backward pass of a call.
pub(crate) fn run<S: ScoreMod, M: MaskMod, P: WeightMod>(
    call: &Call<'_, '_>,
    share: BackwardShare<'_>,
    mods: &Mods<S, M, P>,
) -> Result<Report, Error> {
    let agreed = call.agreed("backward pass", share.description(&call.attention), given(mods))?;
    let BackwardShare { rows, keys } = share;
    let (rank, stretches) =
        (call.group.comm.rank, rows.iter().map(|rows| (rows.first, rows.inputs.queries().shape()[2])));
    let own_rows = agreed.own_rows(rank, stretches);
    let shifted: Vec<_> = own_rows.iter().map(|part| of_sequence(mods, agreed.one_of(part))).collect();
    let (own, dkv): (Vec<_>, Vec<_>) = keys.into_iter().map(|keys| (keys.kv, keys.gradients)).unzip();
    let bytes = agreed.sizes.map_or(0, |sizes| bytes(&sizes, agreed.heads.unwrap_or(0)));
    let parcels = blocks(&agreed.keys, &agreed.rows, bytes);
    let parts = parts(call, &rows, &own_rows, &agreed, &shifted).and_then(|mut parts| {
        let seen = Parts::seen(&mut parts, &own_rows, &parcels)?;
        Ok((parts, seen))
    });
    let (parts, chains) = seen(call, parts, &agreed.rows, &own_rows, &parcels)?;
    let (results, biases) = (results(&rows, &agreed)?, biases(&rows)?);
    let mut all = Parts { numbered: BTreeMap::new(), empty: Vec::new(), results, biases };
    for (part, own) in parts.into_iter().zip(&own_rows) {
        match agreed.rows.iter().position(|of_all| of_all == own) {
            Some(number) => drop(all.numbered.insert(number, part)),
            None => all.empty.push(part),
        }
    }
    let of_rows =
        rows.into_iter().map(|Rows { gradients, dbias, .. }| Gradients { bias: dbias, ..gradients }).collect();
    let Some(sizes) = agreed.sizes else {
        // No keys: gradients of queries are zeros.
        all.write(of_rows, 0)?;
        return Ok(Report::default());
    };
    let plan = Plan { parcels, chains, sizes, heads: agreed.heads.unwrap_or(sizes.heads) };
    let mut pass = Pass::new(call, &plan, own, all)?;
    call.streams.set(true);
    pass.run().map_err(|error| blaming(call.group.comm, error, call.group.timeout))?;
    call.streams.set(false);
    pass.write(of_rows, dkv)
}

/// Bytes of a key and its value, and of the sums of their gradients (there may be two).
fn bytes(sizes: &Sizes, heads: usize) -> usize {
    let dims = sizes.dims[0].saturating_add(sizes.dims[1]);
    let sums = [sizes.batch, heads, dims, 2 * size_of::<f32>()].into_iter().fold(1, usize::saturating_mul);
    sizes.bytes().saturating_add(sums)
}

/// Makes the parts of a rank's rows, with their states.
fn parts<'a, S: ScoreMod, M: MaskMod>(
    call: &Call<'_, 'a>,
    rows: &[Rows<'a>],
    own: &[Part],
    agreed: &Agreed,
    mods: &'a [Mods<S, M>],
) -> Result<Vec<RowPart<'a>>, sdpa::Error> {
    for rows in rows {
        agreed.check_lens(&rows.inputs)?;
        check_sums(&rows.gradients, rows.inputs.queries().shape()[2] < agreed.lens[0] || agreed.sequences.are_apart())?;
        check_bias(rows, agreed)?;
        if agreed.sequences.are_apart() {
            check_apart(call, rows)?;
        }
    }
    let part = |(part, mods): (&Part, &'a Mods<S, M>)| {
        let Rows { inputs, saved, gradients, .. } = &rows[part.number];
        let make = make(call, part, *inputs, *saved, agreed, mods)?;
        let state = make()?;
        if part.sequence.is_none() {
            state.check(gradients)?;
        }
        Ok(RowPart::new(part, agreed.sequences.range(OF_KEYS, part.sequence), make, Some(state)))
    };
    own.iter().zip(mods).map(part).collect()
}

/// Returns a function that makes the state of a part of a stretch of rows.
fn make<'a, S: ScoreMod, M: MaskMod>(
    call: &Call<'_, 'a>,
    part: &Part,
    inputs: Inputs<'a>,
    saved: Saved<'a>,
    agreed: &Agreed,
    mods: &'a Mods<S, M>,
) -> Result<Make<'a>, sdpa::Error> {
    let inputs = part.inputs(inputs)?;
    let (attention, exec, first) = (call.aligned(part, &inputs, agreed)?, call.group.exec, part.first_row());
    let saved = match part.sequence {
        None => saved,
        Some(_) => saved_of(saved, part.batch, part.range.start - part.begin..part.range.end - part.begin),
    };
    Ok(Box::new(move || {
        let state = BackwardState::new(attention, inputs, saved, exec)?.starting_at(first)?;
        if mods.score.is_given() || mods.mask.is_given() { state.mods(mods) } else { Ok(state) }
    }))
}

/// Returns what was saved of some rows that are there, of one sequence of the batch or of all.
fn saved_of<'a>(saved: Saved<'a>, batch: Option<usize>, rows: Range<usize>) -> Saved<'a> {
    let Saved { out, lse, d_out, d_lse } = saved;
    let [out, d_out] = [out, d_out].map(|tensor| rows_of(tensor, batch, rows.clone()).unwrap_or(tensor));
    let of_view = |view: View<'a>| {
        let some = batch.map_or(Some(view), |batch| view.batch(batch..batch + 1));
        some.and_then(|some| some.rows(rows.clone())).unwrap_or(view)
    };
    let some = Saved::new(out, of_view(lse), d_out);
    d_lse.map_or(some, |d_lse| some.d_lse(of_view(d_lse)))
}

/// Checks what was saved of a stretch of rows of several sequences that are computed one by one, and its gradients.
fn check_apart(call: &Call<'_, '_>, Rows { inputs, saved, gradients, .. }: &Rows<'_>) -> Result<(), sdpa::Error> {
    let (q, kv) = (inputs.queries(), inputs.key_values()?);
    let none = |shape: [usize; 4]| View::<f32>::bhld(&[], [shape[0], shape[1], 0, shape[3]]);
    let inputs = Inputs::new(q, none(kv.k_shape())?, none(kv.v_shape())?);
    BackwardState::new(call.attention.align(Alignment::Offset(0)), inputs, *saved, call.group.exec)?.check(gradients)
}

/// Refuses gradients that are sums over all rows, if these are but some, or sequences are computed one by one.
fn check_sums(Gradients { sinks, slopes, scale, .. }: &Gradients<'_>, some: bool) -> Result<(), sdpa::Error> {
    let sums = [("dsinks", sinks.is_some()), ("dslopes", slopes.is_some()), ("dscale", scale.is_some())];
    match sums.into_iter().find(|(_, given)| *given && some) {
        None => Ok(()),
        Some((argument, _)) => {
            let needs = "one stretch with all rows, over which it is a sum, of sequences that are computed together";
            Err(sdpa::Error::Needs { argument, needs })
        }
    }
}

/// Refuses a gradient in the bias that does not fit, or is a sum over rows that are elsewhere or over all keys.
fn check_bias(rows: &Rows<'_>, agreed: &Agreed) -> Result<(), sdpa::Error> {
    let (Some(gradient), (bias, _)) = (&rows.dbias, rows.inputs.bias_and_mask()) else { return Ok(()) };
    let (argument, refused) = ("dbias", |needs| Err(sdpa::Error::Needs { argument: "dbias", needs }));
    let Some(shape) = bias.map(|bias| bias.shape()) else {
        return refused("a bias, which the call does not have");
    };
    let sizes = gradient.shape().into_iter().zip(shape);
    let mut named = ["batch", "heads", "rows", "columns"].into_iter().zip(sizes);
    if let Some((what, (got, expected))) = named.find(|(_, (got, expected))| got != expected) {
        return Err(sdpa::Error::Mismatch { argument, what, got, expected, of: "bias" });
    }
    let ([batch, _, of_bias, columns], n) = (shape, rows.inputs.queries().shape()[2]);
    if columns == 1 {
        return refused("a bias with more columns than one, which is of all keys");
    }
    // What a single row has may be one for all.
    let of_all = is_given(&agreed.ranks, ONE_ROW);
    let (is_one, apart) = (of_bias == 1 && (n != 1 || of_all), agreed.sequences.are_apart());
    if is_one && (apart || n < agreed.lens[0]) {
        return refused(
            "a bias with a row for each row, or one stretch with all rows, over which it is a sum, of sequences that are computed together",
        );
    }
    // A stretch of ragged sequences has a row of the bias for each row, in a batch of one.
    let of_each = if agreed.sequences.are_of_batch() { agreed.sequences.count() } else { 1 };
    if apart && batch != of_each {
        return refused("a separate bias for each sequence, since sequences are computed one by one");
    }
    Ok(())
}

/// Makes room for the gradients in the bias that are wanted, of each stretch of rows.
fn biases(rows: &[Rows<'_>]) -> Result<Vec<Option<Whole>>, Error> {
    let room = |rows: &Rows<'_>| {
        let shape = rows.dbias.as_ref().map(|dbias| dbias.shape());
        shape.map(|shape| Ok(Whole::of(shape, Whole::room(shape)?))).transpose()
    };
    rows.iter().map(room).collect()
}

/// Makes room for the gradients in the queries of each stretch, if sequences are computed one by one.
fn results(rows: &[Rows<'_>], agreed: &Agreed) -> Result<Option<Vec<Whole>>, Error> {
    let room = |rows: &Rows<'_>| {
        let shape = rows.inputs.queries().shape();
        Ok(Whole::of(shape, Whole::room(shape)?))
    };
    agreed.sequences.are_apart().then(|| rows.iter().map(room).collect()).transpose()
}

/// Tells all ranks which parts of this one see which parcels, or why it refuses the call, and returns the way of all parcels.
fn seen<'a>(
    call: &Call<'_, '_>,
    parts: Result<(Vec<RowPart<'a>>, Vec<bool>), sdpa::Error>,
    rows: &[Part],
    own: &[Part],
    parcels: &[Blocks],
) -> Result<(Vec<RowPart<'a>>, Chains), Error> {
    const WHAT: &str = "which keys it needs";
    let (parts, description) = match parts {
        Ok((parts, seen)) => {
            let keys = ranges(of_all(&seen, own, rows, parcels.len()));
            (Some(parts), Ok(Description { keys, ..Description::default() }))
        }
        Err(error) => (None, Err(error)),
    };
    let all = agreed(call.group, description, WHAT)?;
    let Some(parts) = parts else { unreachable!("who has no parts has said why") };
    let sees = |(n, part): (usize, &Part), parcel: usize| {
        let number = n * parcels.len() + parcel;
        part.sequence == parcels[parcel].sequence && all[part.rank].keys.iter().any(|range| range.contains(&number))
    };
    let of_parcel = |parcel| rows.iter().enumerate().map(|part| sees(part, parcel)).collect();
    Ok((parts, Chains::new(rows.to_vec(), (0..parcels.len()).map(of_parcel))))
}

/// Returns for each part of the rows of all ranks, and each parcel, whether it is this rank's and sees it.
fn of_all(seen: &[bool], own: &[Part], rows: &[Part], parcels: usize) -> impl Iterator<Item = bool> {
    let place = |part: &Part| own.iter().position(|own| own == part);
    rows.iter().map(place).flat_map(move |place| {
        (0..parcels).map(move |parcel| place.is_some_and(|place| seen[place * parcels + parcel]))
    })
}
