//! Costs of computing and of moving, measured where a program runs.

use crate::all_to_all::{Messages, all_to_all};
use crate::error::Error;
use crate::exchange::exchange;
use crate::group::Group;
use crate::report::Report;
use crate::whole::{Whole, pack};
use core::fmt;
use sdpa::{Attention, Dtype, Inputs, Outputs, View, ViewMut};
use std::time::Instant;

/// Costs of computing and moving: the figures by which [`Forecast`](crate::Forecast) compares ways to cut a call.
///
/// [`Ranks::measure`](crate::Ranks::measure) measures them; or take those of your network.
///
/// ```
/// // 25 Gbit/s, 20 µs for a message, a rank of 16 cores.
/// let costs = sdpa_mpi::Costs { bytes: 25e9 / 8.0, latency: 20e-6, flops: 1.2e12 };
/// assert!(costs.to_string().starts_with("3.12 GB/s"));
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Costs {
    /// Bytes per second that a rank sends while it receives the same.
    pub bytes: f64,
    /// Seconds that a message takes, however short.
    pub latency: f64,
    /// Floating-point operations per second of a rank, in attention over many rows.
    pub flops: f64,
}

impl fmt::Display for Costs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { bytes, latency, flops } = self;
        write!(f, "{:.2} GB/s, {:.0} µs a message, {:.0} GFLOP/s a rank", bytes / 1e9, latency * 1e6, flops / 1e9)
    }
}

/// Floats of a long message; number of messages, the fastest counts.
const LONG: usize = 2 << 20;
const LONGS: usize = 5;
/// Number of short messages; their mean counts.
const SHORTS: usize = 50;
/// Rows and keys, heads and their length in a call that is timed; number of calls, the fastest counts.
const TOKENS: usize = 1024;
const HEADS: usize = 8;
const DIM: usize = 64;
const CALLS: usize = 3;

/// A message from each rank to the next.
struct Ring {
    rank: usize,
    size: usize,
    whole: Whole,
}

impl Messages for Ring {
    const TAG: u16 = 8022;
    const WHAT: &'static str = "a message to measure the network";

    fn pack(&self, to: usize) -> Result<Vec<u8>, Error> {
        let mut bytes = Vec::new();
        if to != self.rank && to == (self.rank + 1) % self.size {
            pack(&mut bytes, self.whole.tensor()?, 0..1)?;
        }
        Ok(bytes)
    }

    fn len(&self, from: usize) -> usize {
        if self.rank == (from + 1) % self.size { self.whole.bytes() } else { 0 }
    }

    fn take(&mut self, from: usize, bytes: &[u8]) {
        if from != self.rank && !bytes.is_empty() {
            let rows = self.whole.bytes() / size_of::<f32>();
            self.whole.place(0..rows, bytes);
        }
    }
}

/// Returns the seconds of each of `times` messages of `floats` floats from each rank to the next.
fn seconds(group: &Group<'_>, floats: usize, times: usize) -> Result<Vec<f64>, Error> {
    let whole = Whole::new([1, 1, floats, 1], Dtype::F32)?;
    let mut ring = Ring { rank: group.comm.rank, size: group.comm.size, whole };
    let one = |_| {
        let begin = Instant::now();
        all_to_all(&Group { progress: None, ..*group }, &mut ring, &mut Report::default(), [0; 2])?;
        Ok(begin.elapsed().as_secs_f64())
    };
    (0..times).map(one).collect()
}

/// Returns the floating-point operations per second of a call.
fn flops(group: &Group<'_>) -> Result<f64, Error> {
    let (shape, len) = ([1, HEADS, TOKENS, DIM], HEADS * TOKENS * DIM);
    let (x, mut out) = (vec![0.5f32; len], vec![0.0f32; len]);
    let x = View::bhld(&x, shape)?;
    let mut fastest = f64::INFINITY;
    for _ in 0..CALLS {
        // All at once, since they may share cores.
        exchange(group.comm, Vec::new(), "that it begins to measure", group.timeout)?;
        let outputs = Outputs::new(ViewMut::bhld(&mut out, shape)?);
        let problem = Attention::new().problem(Inputs::new(x, x, x), outputs)?;
        let (exec, begin) = (group.exec, Instant::now());
        match group.pool {
            Some(pool) => pool.install(|| problem.run_once(exec)),
            None => problem.run_once(exec),
        }
        fastest = fastest.min(begin.elapsed().as_secs_f64());
    }
    Ok(4.0 * (HEADS * TOKENS * TOKENS * DIM) as f64 / fastest)
}

/// Measures on all ranks at once, and returns the worst of each figure.
pub(crate) fn measure(group: &Group<'_>) -> Result<Costs, Error> {
    let flops = flops(group)?;
    let short = seconds(group, 1, SHORTS)?.iter().sum::<f64>() / SHORTS as f64;
    let long = seconds(group, LONG, LONGS)?.into_iter().fold(f64::INFINITY, f64::min);
    let own = [short, long, flops].map(f64::to_bits).to_vec();
    let all = exchange(group.comm, own, "the figures that it measured", group.timeout)?;
    let worst = all.iter().fold([0.0f64, 0.0, f64::INFINITY], |worst, figures| match figures[..] {
        [short, long, flops] => {
            let [short, long, flops] = [short, long, flops].map(f64::from_bits);
            [worst[0].max(short), worst[1].max(long), worst[2].min(flops)]
        }
        _ => worst,
    });
    let [latency, long, flops] = worst;
    Ok(Costs { bytes: (LONG * size_of::<f32>()) as f64 / long, latency, flops })
}
