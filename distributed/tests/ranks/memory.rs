//! Memory of a rank: its share, two shards on their way or put together, and little more.

use crate::PATIENT;
use crate::launch::FINE;
use mpi::topology::SimpleCommunicator;
use mpi::traits::*;
use sdpa::{Attention, Exec, Inputs, Outputs, Saved, View, ViewMut};
use sdpa_mpi::{BackwardShare, Ranks, Share, Split};

/// Keys of a rank, and the sizes of heads: 64 MiB of keys and values a rank.
const KEYS: usize = 32 << 10;
const HEADS: usize = 4;
const DIM: usize = 64;
const ROWS: usize = 16;

/// Most bytes that this process has had in memory so far.
fn peak() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<usize>().ok());
    kib.unwrap_or(0) << 10
}

pub(crate) fn run(world: &SimpleCommunicator, split: Split) {
    let (rank, size) = (world.rank() as usize, world.size() as usize);
    let shard = 2 * HEADS * KEYS * DIM * size_of::<f32>();
    let (k, v) = (vec![0.25f32; HEADS * KEYS * DIM], vec![rank as f32; HEADS * KEYS * DIM]);
    let (q, mut out) = (vec![0.5f32; HEADS * ROWS * DIM], vec![0.0f32; HEADS * ROWS * DIM]);
    let before = peak();
    let ranks = Ranks::new(world, PATIENT).exec(Exec::serial()).split(split);
    let (rows, keys) = ([1, HEADS, ROWS, DIM], [1, HEADS, KEYS, DIM]);
    let [k, v] = [&k, &v].map(|x| View::bhld(x, keys).expect("it fits"));
    let inputs = Inputs::new(View::bhld(&q, rows).expect("it fits"), k, v);
    let outputs = Outputs::new(ViewMut::bhld(&mut out, rows).expect("it fits"));
    let share = Share::new().rows(rank * ROWS, inputs, outputs).keys(rank * KEYS, k, v);
    let report = ranks.attention(&Attention::new(), share).expect("a good call");
    let mean = (size - 1) as f32 / 2.0;
    assert!(out.iter().all(|x| (x - mean).abs() < 1e-3), "rank {rank}: {} is not {mean}", out[0]);
    assert!(report.held <= 2 * shard, "rank {rank} held {} bytes", report.held);
    let more = peak() - before;
    assert!(more <= 2 * shard + (64 << 20), "rank {rank} took {more} bytes more, with {shard} bytes of its own");
    // By heads, a rank has one of the four: of the keys and values of all, of their rows, and of the results of its own.
    let needed = match split {
        Split::Heads => (size - 1) * (shard + HEADS * ROWS * (2 * DIM + 1) * size_of::<f32>()) / size,
        _ => (size - 1) * shard,
    };
    assert_eq!((report.received, report.computed), (needed, size * KEYS), "rank {rank}");
    println!("{rank}: {FINE}; {} MiB more, {report}", more >> 20);
}

/// A backward pass: two shards more, of which one is the gradients as they come.
pub(crate) fn backward(world: &SimpleCommunicator) {
    let (rank, size) = (world.rank() as usize, world.size() as usize);
    let shard = 2 * HEADS * KEYS * DIM * size_of::<f32>();
    let (kv, q) = (vec![0.25f32; HEADS * KEYS * DIM], vec![0.5f32; HEADS * ROWS * DIM]);
    let (out, d_out) = (vec![0.25f32; HEADS * ROWS * DIM], vec![1.0f32; HEADS * ROWS * DIM]);
    // All scores are 1.
    let lse = vec![1.0 + ((size * KEYS) as f32).ln(); HEADS * ROWS];
    let (mut dq, mut dk, mut dv) = (q.clone(), kv.clone(), kv.clone());
    let before = peak();
    let ranks = Ranks::new(world, PATIENT).exec(Exec::serial());
    let (rows, keys) = ([1, HEADS, ROWS, DIM], [1, HEADS, KEYS, DIM]);
    let [q, out, d_out] = [&q, &out, &d_out].map(|x| View::bhld(x, rows).expect("it fits"));
    let (kv, lse) = (View::bhld(&kv, keys).expect("it fits"), View::bhl(&lse, [1, HEADS, ROWS]).expect("it fits"));
    let [to_dk, to_dv] = [&mut dk, &mut dv].map(|x| ViewMut::bhld(x, keys).expect("it fits"));
    let to_dq = ViewMut::bhld(&mut dq, rows).expect("it fits");
    let saved = Saved::new(out, lse, d_out);
    let share = BackwardShare::new().rows(rank * ROWS, Inputs::new(q, kv, kv), saved, to_dq);
    let share = share.keys(rank * KEYS, kv, kv, to_dk, to_dv);
    let report = ranks.attention_backward(&Attention::new(), share).expect("a good call");
    let expected = ROWS as f32 / KEYS as f32;
    assert!(dv.iter().all(|x| (x / expected - 1.0).abs() < 1e-3), "rank {rank}: {} is not {expected}", dv[0]);
    assert!(dq.iter().chain(&dk).all(|x| x.abs() < 1e-4), "rank {rank}: gradients of equal keys");
    let more = peak() - before;
    assert!(more <= 2 * shard + (64 << 20), "rank {rank} took {more} bytes more, with {shard} bytes of its own");
    println!("{rank}: {FINE}; {} MiB more, {report}", more >> 20);
}

/// Tokens of a rank in many short sequences, of which some are on two ranks.
const TOKENS: usize = 6408;
const SHORT: usize = 16;

/// Many short sequences: as little beside the share as of one, in both passes.
pub(crate) fn ragged(world: &SimpleCommunicator) {
    let (rank, size) = (world.rank() as usize, world.size() as usize);
    let (shape, len) = ([1, HEADS, TOKENS, DIM], HEADS * TOKENS * DIM);
    let (shard, ends) = (2 * len * size_of::<f32>(), (0..=size * TOKENS).step_by(SHORT).collect::<Vec<_>>());
    assert_eq!(ends.last(), Some(&(size * TOKENS)));
    let (zeros, ones, mut out, mut lse) =
        (vec![0.0f32; len], vec![1.0f32; len], vec![7.0f32; len], vec![7.0; len / DIM]);
    let [mut dq, mut dk, mut dv] = [7.0f32; 3].map(|x| vec![x; len]);
    let before = peak();
    let ranks = Ranks::new(world, PATIENT).exec(Exec::serial());
    let [x, v] = [&zeros, &ones].map(|x| View::bhld(x, shape).expect("it fits"));
    let inputs = Inputs::new(x, x, v).ragged(&ends, &ends);
    let outputs = Outputs::new(ViewMut::bhld(&mut out, shape).expect("it fits"));
    let outputs = outputs.lse(ViewMut::bhl(&mut lse, [1, HEADS, TOKENS]).expect("it fits"));
    let share = Share::new().rows(rank * TOKENS, inputs, outputs).keys(rank * TOKENS, x, v);
    ranks.attention(&Attention::new(), share).expect("a good call");
    let forward = peak() - before;
    assert!(out.iter().all(|x| (x - 1.0).abs() < 1e-5) && lse.iter().all(|x| (x - 16f32.ln()).abs() < 1e-5));
    assert!(forward <= 2 * shard + (64 << 20), "rank {rank} took {forward} bytes more, with {shard} bytes of its own");
    let out = View::bhld(&out, shape).expect("it fits");
    let saved = Saved::new(out, View::bhl(&lse, [1, HEADS, TOKENS]).expect("it fits"), v);
    let [to_dq, to_dk, to_dv] = [&mut dq, &mut dk, &mut dv].map(|x| ViewMut::bhld(x, shape).expect("it fits"));
    let share = BackwardShare::new().rows(rank * TOKENS, inputs, saved, to_dq);
    let share = share.keys(rank * TOKENS, x, v, to_dk, to_dv);
    ranks.attention_backward(&Attention::new(), share).expect("a good call");
    let more = peak() - before;
    assert!(dv.iter().all(|x| (x - 1.0).abs() < 1e-5) && dq.iter().chain(&dk).all(|x| x.abs() < 1e-5));
    assert!(more <= 2 * shard + (64 << 20), "rank {rank} took {more} bytes more, with {shard} bytes of its own");
    println!("{rank}: {FINE}; {} MiB more, {} of them forward", more >> 20, forward >> 20);
}
