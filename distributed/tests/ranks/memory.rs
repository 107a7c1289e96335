//! Memory of a rank: its share, two shards on their way or put together, and little more.

use crate::PATIENT;
use crate::launch::FINE;
use mpi::topology::SimpleCommunicator;
use mpi::traits::*;
use sdpa::{Attention, Exec, Inputs, Outputs, View, ViewMut};
use sdpa_mpi::{Ranks, Share, Split};

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
