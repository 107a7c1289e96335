//! Choice of how a call is cut, by its options and a forecast.

use crate::agreement::agreement;
use crate::costs::Costs;
use crate::cut::Cut;
use crate::error::Error;
use crate::forecast::Forecast;
use crate::forms::describe;
use crate::group::Group;
use crate::layout::{KEYS, ROWS, in_order};
use crate::share::Share;
use crate::split::Split;
use sdpa::Attention;

/// Returns [`Split::Rows`] or [`Split::Heads`].
pub(crate) fn chosen(
    group: &Group<'_>,
    number: u64,
    (split, attention): (Split, &Attention),
    share: &Share<'_>,
    weight: bool,
) -> Result<Split, Error> {
    let Split::Chosen(costs) = split else { return Ok(split) };
    let (cut, forecast) = forecast(group, number, attention, share, costs)?;
    Ok(match cut.only() {
        Some(only) => only,
        None if weight => Split::Heads,
        None => forecast.choice(),
    })
}

/// Learns the sizes of a call from all ranks, and forecasts how long it takes.
pub(crate) fn forecast(
    group: &Group<'_>,
    number: u64,
    attention: &Attention,
    share: &Share<'_>,
    costs: Costs,
) -> Result<(Cut, Forecast), Error> {
    let own = share.described(attention, describe).map(|mut description| {
        description.fact("split", "chosen");
        let Costs { bytes, latency, flops } = costs;
        let costs = [("costs: bytes", bytes), ("costs: latency", latency), ("costs: flops", flops)];
        costs.into_iter().for_each(|(what, cost)| description.fact(what, cost));
        description
    });
    let all = agreement(group, number, own, "what it has of the call")?;
    let rows = in_order(ROWS, all.iter().map(|description| &*description.rows))?;
    let keys = in_order(KEYS, all.iter().map(|description| &*description.keys))?;
    let [rows, keys] = [rows, keys].map(|stretches| stretches.last().map_or(0, |last| last.range.end));
    let cut = Cut::new(all);
    let workload = cut.workload(rows, keys);
    Ok((cut, Forecast::new(workload, group.comm.size, costs)))
}
