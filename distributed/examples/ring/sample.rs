//! Some rows of each rank, compared with those of a state that takes keys part by part: for prompts whose keys exceed the
//! memory of one rank.

use crate::Asked;
use crate::numbers::{Numbers, Stripe};
use mpi::topology::SimpleCommunicator;
use mpi::traits::*;
use sdpa::{Alignment, AttnState, Exec, KvShape, Outputs, ViewMut};
use std::error::Error;
use std::ops::Range;

/// Rows of each stripe that are compared, its last.
const ROWS: usize = 8;
/// Keys that are made at once.
const PART: usize = 4096;

/// Returns how many numbers differ, and fails if this rank took more memory than `limit`.
pub(crate) fn within(
    world: &SimpleCommunicator,
    asked: &Asked,
    stripes: &[Stripe; 2],
    limit: usize,
) -> Result<usize, Box<dyn Error>> {
    let mib = |bytes: usize| bytes >> 20;
    let (peak, [batch, heads, tokens, dim]) = (peak(), asked.of_keys());
    let all = 2 * batch * heads * tokens * dim * asked.dtype.bytes();
    println!(
        "rank {}: took {} MiB, of {} MiB allowed; all keys and values take {} MiB",
        world.rank(),
        mib(peak),
        mib(limit),
        mib(all)
    );
    if peak > limit {
        return Err(format!("--memory {}: but it took {} MiB", mib(limit), mib(peak)).into());
    }
    let mut differ = 0;
    for stripe in stripes.iter().filter(|stripe| !stripe.rows.is_empty()) {
        differ += compare(asked, stripe)?;
    }
    Ok(differ)
}

/// Most bytes that this process has had in memory so far; 0 where the system does not say.
fn peak() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<usize>().ok());
    kib.unwrap_or(0) << 10
}

/// Compares the last rows of a stripe.
fn compare(asked: &Asked, stripe: &Stripe) -> Result<usize, Box<dyn Error>> {
    let [batch, heads, tokens, dim] = asked.shape;
    let n = stripe.rows.len();
    let rows: Range<usize> = n.saturating_sub(ROWS)..n;
    let first = stripe.rows.start + rows.start;
    let attention = asked.attention().align(Alignment::Offset(first as isize));
    let q = stripe.qkv[0].tensor()?.rows_in(rows.clone()).ok_or("rows of the stripe")?;
    let keys = KvShape { kv_heads: asked.of_keys()[1], head_dim: dim, value_dim: dim };
    let mut state = AttnState::new(attention, q, keys, Exec::default())?;
    let end = if asked.causal { stripe.rows.end } else { tokens };
    for start in (0..end).step_by(PART) {
        let part = start..end.min(start + PART);
        let [k, v] = [2, 3].map(|seed| Numbers::new(asked.of_keys(), part.clone(), seed, asked.dtype));
        state.push(k.tensor()?, v.tensor()?)?;
    }
    let mut expected = vec![0.0f32; batch * heads * rows.len() * dim];
    state.read(Outputs::new(ViewMut::bhld(&mut expected, [batch, heads, rows.len(), dim])?))?;
    let got = stripe.out.chunks_exact(n * dim).flat_map(|head| &head[rows.start * dim..]);
    Ok(got.zip(&expected).filter(|(a, b)| a.to_bits() != b.to_bits()).count())
}
