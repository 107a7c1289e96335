//! Forecast: how long a call would take, cut by rows and cut by heads.

use crate::costs::Costs;
use crate::layout::PARCEL;
use crate::split::Split;
use crate::workload::Workload;
use core::fmt;

/// Forecast of how long a call takes over `ranks` ranks, cut by rows and cut by heads. `Display` explains it.
///
/// - **By rows**, keys and values travel in key order while earlier ones are computed; up to two of the largest parcels (32 MiB)
///   are on their way at once. Their owner sends them to two ranks (one, of two), which pass them on. So all keys and values
///   leave some rank twice, and the ranks that own a part of those 32 MiB send at once; and each rank receives those of all
///   others. Time: the longer of moving and computing, and the first parcel, for which all wait.
/// - **By heads**, each rank sends (r − 1)/r of its rows' queries, keys, values, biases, masks and results, all ranks at once, before and
///   after it computes. Time: the sum. Ranks beyond the key/value heads have nothing to compute.
///
/// ```
/// use sdpa_mpi::{Costs, Forecast, Split, Workload};
/// let costs = Costs { bytes: 1.25e9, latency: 20e-6, flops: 1e12 };
/// let prompt = |heads, rows| Workload {
///     batch: 1, heads, dims: [128, 128], rows, keys: rows, visible: 0.5, bytes: [2, 2, 2], options: [0, 0],
/// };
/// // By rows each rank receives all keys and values; by heads an eighth, and as much of queries and results.
/// let eight = Forecast::new(prompt([32, 32], 1024), 8, costs);
/// assert_eq!(eight.choice(), Split::Heads);
/// // One head for all queries cannot be cut; and where computing takes longest, moving is hidden behind it.
/// assert_eq!(Forecast::new(prompt([32, 1], 1024), 8, costs).choice(), Split::Rows);
/// assert_eq!(Forecast::new(prompt([32, 8], 1 << 20), 8, costs).choice(), Split::Rows);
/// println!("{eight}");
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct Forecast {
    /// Call.
    pub workload: Workload,
    /// Ranks.
    pub ranks: usize,
    /// Costs.
    pub costs: Costs,
    /// Times if it is cut by rows.
    pub rows: Times,
    /// Times if it is cut by heads.
    pub heads: Times,
}

/// Times of a call that is cut in one way, in seconds.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct Times {
    /// Bytes that a rank receives.
    pub received: f64,
    /// Time in which something moves.
    pub moving: f64,
    /// Time in which the rank with most to do computes.
    pub computing: f64,
    /// Time of the call.
    pub total: f64,
}

impl Forecast {
    /// Computes the forecast. Pure: the same arguments, the same forecast.
    pub fn new(workload: Workload, ranks: usize, costs: Costs) -> Self {
        let ranks = ranks.max(1);
        Self {
            workload,
            ranks,
            costs,
            rows: by_rows(&workload, ranks as f64, &costs),
            heads: by_heads(&workload, ranks, &costs),
        }
    }

    /// Way that takes less time; by rows if both take the same.
    pub fn choice(&self) -> Split {
        if self.heads.total < self.rows.total { Split::Heads } else { Split::Rows }
    }
}

fn by_rows(workload: &Workload, ranks: f64, costs: &Costs) -> Times {
    let computing = workload.flops() / ranks / costs.flops;
    let all = workload.key_value_bytes() as f64;
    let parcels = (all / PARCEL as f64).ceil().max(ranks);
    let (copies, depth) = ((ranks - 1.0).min(2.0), ranks.log2().ceil());
    // Ranks with keys and values that are on their way at once.
    let owners = (2.0 * PARCEL as f64 * ranks / all.max(1.0)).clamp(1.0, ranks);
    let received = all * (ranks - 1.0) / ranks;
    let moving = received.max(copies * all / owners) / costs.bytes + parcels * depth * costs.latency;
    Times { received, moving, computing, total: computing.max(moving) + moving / parcels }
}

fn by_heads(workload: &Workload, ranks: usize, costs: &Costs) -> Times {
    let kv_heads = workload.heads[1].max(1);
    let most = kv_heads.div_ceil(ranks) as f64 / kv_heads as f64;
    let computing = workload.flops() * most / costs.flops;
    let others = (ranks - 1) as f64;
    let [of_heads, shared] = workload.options.map(|bytes| bytes as f64);
    let all = (workload.key_value_bytes() + workload.row_bytes()) as f64 + of_heads;
    // The rank with most heads receives the most, and sends back the most.
    let received = (all * most + shared) * others / ranks as f64;
    let moving = received / costs.bytes + 2.0 * others * costs.latency;
    Times { received, moving, computing, total: computing + moving }
}

impl fmt::Display for Forecast {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Workload { batch, heads: [heads, kv_heads], dims: [dim, value_dim], rows, keys, .. } = self.workload;
        let ranks = self.ranks;
        writeln!(
            f,
            "{batch} × {heads} heads ({kv_heads} of keys) of {dim} and {value_dim}, {rows} rows, {keys} keys, on {ranks} ranks"
        )?;
        writeln!(f, "costs: {}", self.costs)?;
        let ms = |seconds: f64| 1e3 * seconds;
        for (name, Times { received, moving, computing, total }, how) in
            [("rows", self.rows, "at once"), ("heads", self.heads, "one after the other")]
        {
            let mib = received / f64::from(1 << 20);
            writeln!(
                f,
                "by {name}: {:.2} ms; moving {:.2} ms ({mib:.1} MiB received) and computing {:.2} ms, {how}",
                ms(total),
                ms(moving),
                ms(computing)
            )?;
        }
        let why = match self.choice() {
            Split::Heads => "by heads: less to move, which takes longer than computing would hide",
            _ if kv_heads < ranks => "by rows: there are fewer key/value heads than ranks",
            _ => "by rows: moving is hidden behind computing",
        };
        write!(f, "chosen {why}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const COSTS: Costs = Costs { bytes: 1e9, latency: 1e-5, flops: 1e11 };

    fn prompt(rows: usize) -> Workload {
        Workload {
            batch: 1,
            heads: [8, 8],
            dims: [64, 64],
            rows,
            keys: rows,
            visible: 1.0,
            bytes: [4; 3],
            options: [0; 2],
        }
    }

    #[test]
    fn one_rank_only_computes() {
        let Forecast { rows, heads, .. } = Forecast::new(prompt(4096), 1, COSTS);
        let computing = prompt(4096).flops() / COSTS.flops;
        for times in [rows, heads] {
            assert_eq!(times, Times { received: 0.0, moving: 0.0, computing, total: computing });
        }
    }

    #[test]
    fn more_ranks_compute_less_and_a_rank_without_heads_nothing() {
        let of = |ranks| Forecast::new(prompt(4096), ranks, COSTS);
        assert!(of(8).rows.computing < of(4).rows.computing);
        assert_eq!(of(8).heads.computing, of(16).heads.computing);
        // 8 heads on 3 ranks: three on one.
        assert_eq!(of(3).heads.computing, 3.0 * of(8).heads.computing);
    }

    #[test]
    fn long_prompts_hide_what_moves_and_short_ones_move_less_by_heads() {
        assert_eq!(Forecast::new(prompt(512), 8, COSTS).choice(), Split::Heads);
        assert_eq!(Forecast::new(prompt(1 << 20), 8, COSTS).choice(), Split::Rows);
        let one_head = Workload { heads: [8, 1], ..prompt(4096) };
        assert_eq!(Forecast::new(one_head, 8, COSTS).choice(), Split::Rows);
    }

    #[test]
    fn biases_travel_by_heads_and_those_that_heads_share_to_every_rank() {
        let of = |options| Forecast::new(Workload { options, ..prompt(512) }, 4, COSTS);
        let [none, of_heads, shared] = [[0, 0], [1000, 0], [0, 1000]].map(of);
        assert_eq!([of_heads.heads.received, shared.heads.received].map(|x| x - none.heads.received), [187.5, 750.0]);
        assert_eq!(of([1000, 1000]).rows, none.rows);
    }

    #[test]
    fn both_ways_and_the_reason_are_explained() {
        let text = Forecast::new(prompt(512), 8, COSTS).to_string();
        for words in ["by rows: ", "by heads: ", "costs: 1.00 GB/s", "chosen by heads"] {
            assert!(text.contains(words), "{text}");
        }
    }
}
