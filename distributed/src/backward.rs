//! Backward pass over all ranks: agreement, then parcels of keys and the sums of their gradients, stretch by stretch of the rows.

pub(crate) mod chains;
mod flight;
mod pass;
pub(crate) mod share;

use crate::backward::chains::{Blocks, Chains, blocks};
use crate::backward::pass::{Pass, Plan};
use crate::backward::share::{BackwardShare, Rows};
use crate::description::{Description, agree};
use crate::error::Error;
use crate::exchange::{blaming, exchange};
use crate::functions::{from_row, given};
use crate::layout::Stretch;
use crate::parcel::Sizes;
use crate::prompt::{Agreed, Call};
use crate::report::Report;
use core::ops::Range;
use sdpa::{BackwardState, Gradients, MaskMod, Mods, ScoreMod, WeightMod};
use std::collections::BTreeMap;

/// Runs the backward pass of a call.
pub(crate) fn run<S: ScoreMod, M: MaskMod, P: WeightMod>(
    call: &Call<'_, '_>,
    share: BackwardShare<'_>,
    mods: &Mods<S, M, P>,
) -> Result<Report, Error> {
    let agreed = call.agreed("backward pass", share.description(&call.attention), given(mods))?;
    let BackwardShare { rows, keys } = share;
    let shifted: Vec<_> = rows.iter().map(|rows| from_row(mods, rows.first)).collect();
    let (own, dkv): (Vec<_>, Vec<_>) = keys.into_iter().map(|keys| (keys.kv, keys.gradients)).unzip();
    let states = rows.into_iter().zip(&shifted).map(|(rows, mods)| state(call, rows, &agreed, mods));
    let states: Result<Vec<_>, _> = states.collect();
    let bytes = agreed.sizes.map_or(0, |sizes| bytes(&sizes, agreed.heads.unwrap_or(0)));
    let parcels = blocks(&agreed.keys, &agreed.stretches, bytes);
    let (states, chains) = seen(call, states, &agreed.stretches, &parcels)?;
    let (mut numbered, mut empty) = ((BTreeMap::new(), BTreeMap::new()), Vec::new());
    for (number, (state, dq)) in states.into_iter().enumerate() {
        let is_this = |of: &Stretch| (of.rank, of.number) == (call.group.comm.rank, number);
        match agreed.stretches.iter().position(is_this) {
            Some(stretch) => {
                numbered.0.insert(stretch, state);
                numbered.1.insert(stretch, dq);
            }
            None => empty.push((state, dq)),
        }
    }
    let (states, dq) = numbered;
    let Some(sizes) = agreed.sizes else {
        // No keys: gradients of queries are zeros.
        states.into_values().zip(dq.into_values()).chain(empty).try_for_each(|(state, dq)| state.write(dq))?;
        return Ok(Report::default());
    };
    let plan = Plan { parcels, chains, sizes, heads: agreed.heads.unwrap_or(sizes.heads) };
    let mut pass = Pass::new(call, &plan, own, states)?;
    call.streams.set(true);
    pass.run().map_err(|error| blaming(call.group.comm, error, call.group.timeout))?;
    call.streams.set(false);
    // Without rows, sums over all of them are zeros.
    empty.into_iter().try_for_each(|(state, dq)| state.write(dq))?;
    pass.write(dq, dkv)
}

/// Bytes of a key and its value, and of the sums of their gradients, of which there may be two.
fn bytes(sizes: &Sizes, heads: usize) -> usize {
    let dims = sizes.dims[0].saturating_add(sizes.dims[1]);
    let sums = [sizes.batch, heads, dims, 2 * size_of::<f32>()].into_iter().fold(1, usize::saturating_mul);
    sizes.bytes().saturating_add(sums)
}

/// Makes the state of a stretch of rows, and says where its gradients go.
fn state<'a, S: ScoreMod, M: MaskMod>(
    call: &Call<'_, 'a>,
    Rows { first, inputs, saved, gradients }: Rows<'a>,
    agreed: &Agreed,
    mods: &'a Mods<S, M>,
) -> Result<(BackwardState<'a>, Gradients<'a>), sdpa::Error> {
    let attention = call.aligned(first, &inputs, agreed)?;
    let state = BackwardState::new(attention, inputs, saved, call.group.exec)?.starting_at(first)?;
    let state = if mods.score.is_given() || mods.mask.is_given() { state.mods(mods)? } else { state };
    state.check(&gradients)?;
    if inputs.queries().shape()[2] < agreed.rows {
        let Gradients { sinks, slopes, scale, .. } = &gradients;
        let sums = [("dsinks", sinks.is_some()), ("dslopes", slopes.is_some()), ("dscale", scale.is_some())];
        if let Some((argument, _)) = sums.into_iter().find(|(_, given)| *given) {
            return Err(sdpa::Error::Needs { argument, needs: "one stretch with all rows, over which it is a sum" });
        }
    }
    Ok((state, gradients))
}

/// States of a rank's stretches of rows, and where their gradients go.
type States<'a> = Vec<(BackwardState<'a>, Gradients<'a>)>;

/// Tells all ranks which stretches of this one see which parcels, or why it refuses the call, and returns the way of all parcels.
fn seen<'a>(
    call: &Call<'_, '_>,
    states: Result<States<'a>, sdpa::Error>,
    stretches: &[Stretch],
    parcels: &[Blocks],
) -> Result<(States<'a>, Chains), Error> {
    const WHAT: &str = "which keys it needs";
    let mut description = Description::default();
    match &states {
        Ok(states) => description.keys = ranges(states, parcels),
        Err(error) => description.refused = Some(error.to_string()),
    }
    let texts = exchange(call.group.comm, description.text(), WHAT, call.group.timeout)?;
    let all: Vec<Description> = texts.iter().map(|text| Description::read(text)).collect();
    let states = match (agree(&all), states) {
        (Ok(()), Ok(states)) => states,
        (Ok(()), Err(error)) => return Err(error.into()),
        (Err(error), states) => return Err(call.own(error, states.err())),
    };
    let sees = |stretch: &Stretch, parcel: usize| {
        let number = stretch.number * parcels.len() + parcel;
        all[stretch.rank].keys.iter().any(|range| range.contains(&number))
    };
    let of_parcel = |parcel| stretches.iter().map(|stretch| sees(stretch, parcel)).collect();
    Ok((states, Chains::new(stretches.to_vec(), (0..parcels.len()).map(of_parcel))))
}

/// Returns which stretches see which parcels, as ranges of numbers: those of the parcels for the first stretch, then for the second,
/// and so on.
fn ranges(states: &States<'_>, parcels: &[Blocks]) -> Vec<Range<usize>> {
    let pairs = states.iter().flat_map(|(state, _)| parcels.iter().map(move |parcel| state.sees(parcel.keys.clone())));
    let mut ranges: Vec<Range<usize>> = Vec::new();
    for (n, _) in pairs.enumerate().filter(|(_, sees)| *sees) {
        match ranges.last_mut() {
            Some(last) if last.end == n => last.end += 1,
            _ => ranges.push(n..n + 1),
        }
    }
    ranges
}
