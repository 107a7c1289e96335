//! Random calls that are cut by heads, or as a cost model chooses: each rank holds its rows against one process's.

use crate::PATIENT;
use crate::cases::Shared;
use crate::launch::FINE;
use crate::options::{Case, kept};
use crate::support::Rng;
use mpi::topology::SimpleCommunicator;
use mpi::traits::*;
use sdpa::{Attention, Exec, Inputs, Mask, Outputs, View, ViewMut};
use sdpa_mpi::{Costs, Ranks, Share, Split};

/// Products of a case, at most.
const MOST: usize = 1_500_000;

/// One case in so many has positions of rows and keys, or of either.
const PLACED: u64 = 4;

/// Positions in any order, some before the first key and some beyond all others.
fn positions(case: &Case, rng: &mut Rng) -> [Option<&'static [&'static [i32]]>; 2] {
    let mut lists = |len: &dyn Fn(usize) -> usize| {
        let mut position = |n: usize| if rng.below(20) == 0 { i32::MAX } else { rng.below(n + 4) as i32 - 2 };
        kept((0..case.batch()).map(|b| (0..len(b)).map(|_| position(case.keys(b))).collect()).collect())
    };
    let both = [lists(&|b| case.rows(b)), lists(&|b| case.kv_len(b))];
    let without = rng.below(4);
    [0, 1].map(|which| (without != which).then_some(both[which]))
}

/// Costs by which now one way and now the other is chosen.
fn costs(rng: &mut Rng) -> Costs {
    Costs { bytes: rng.pick(&[1e6, 1e9]), latency: rng.pick(&[1e-6, 1e-2]), flops: rng.pick(&[1e6, 1e12]) }
}

pub(crate) fn run(world: &SimpleCommunicator, cases: u64, seed: u64) {
    let (rank, size) = (world.rank() as usize, world.size() as usize);
    let pool = rayon::ThreadPoolBuilder::new().num_threads(2).build().expect("two threads");
    let mut moved = [0usize; 2];
    for case in 0..cases {
        let rng = &mut Rng::new(seed * 1_000_033 + case);
        let mut whole = Case::random(rng, MOST);
        if case % PLACED == PLACED - 1 {
            whole.positions = positions(&whole, rng);
        }
        let mut shared = Shared::of(whole, rng, size);
        // A rank without rows names the options of the call too.
        shared.rows.iter_mut().filter(|rows| rows.is_empty()).for_each(|rows| rows.push(0..0));
        let way = if case % 3 == 2 { Split::Chosen(costs(rng)) } else { Split::Heads };
        let ranks = match case % 2 {
            0 => Ranks::new(world, PATIENT).exec(Exec::serial()),
            _ => Ranks::new(world, PATIENT).pool(&pool),
        };
        let what = format!("seed {seed}, case {case}, rank {rank} of {size}, {way:?}");
        let (whole, mut parts) = (shared.whole(), shared.parts(rank));
        let report = shared.run(&ranks.split(way), rank, &mut parts).unwrap_or_else(|error| panic!("{what}: {error}"));
        shared.compare(&what, rank, &parts, &whole);
        moved = [moved[0] + report.sent, moved[1] + report.received];
    }
    let mut all = [0usize; 2];
    world.all_reduce_into(&moved[..], &mut all[..], mpi::collective::SystemOperation::sum());
    assert_eq!(all[0], all[1], "what is sent is received");
    let of_head = N * (4 * DIM + 1) * size_of::<f32>();
    assert_eq!(moved_by_one_call(world, None), (size - 1) * of_head, "one head for each other rank");
    // A mask that all heads share goes to every other rank, and one of each head to the rank that computes it.
    let rows = N * size * N;
    for (heads, n) in [(1, N), (size, N)] {
        assert_eq!(
            moved_by_one_call(world, Some([heads, n])),
            (size - 1) * (of_head + rows),
            "a mask of {heads} heads"
        );
    }
    assert_eq!(moved_by_one_call(world, Some([1, 1])), (size - 1) * of_head, "a row for all, which every rank has");
    println!("{rank}: {FINE}");
}

/// Rows and keys of each rank, and the length of a head.
const N: usize = 300;
const DIM: usize = 8;

/// Bytes that a rank sends in a call with as many heads as ranks: queries, keys, values and results of its rows, each head to
/// another rank. A mask has so many heads and rows.
fn moved_by_one_call(world: &SimpleCommunicator, mask: Option<[usize; 2]>) -> usize {
    let (rank, size) = (world.rank() as usize, world.size() as usize);
    let (shape, x) = ([1, size, N, DIM], vec![0.5f32; size * N * DIM]);
    let (x, mut out) = (View::bhld(&x, shape).expect("it fits"), vec![0.0f32; size * N * DIM]);
    let outputs = Outputs::new(ViewMut::bhld(&mut out, shape).expect("it fits"));
    let (inputs, [heads, rows]) = (Inputs::new(x, x, x), mask.unwrap_or([1, 1]));
    let all = vec![true; heads * rows * size * N];
    let all = View::bhld(&all, [1, heads, rows, size * N]).expect("it fits");
    let inputs = if mask.is_some() { inputs.mask(Mask::keep(all)) } else { inputs };
    let share = Share::new().rows(rank * N, inputs, outputs).keys(rank * N, x, x);
    let ranks = Ranks::new(world, PATIENT).exec(Exec::serial()).split(Split::Heads);
    let report = ranks.attention(&Attention::new(), share).expect("a good call");
    assert_eq!(report.received, report.sent);
    assert!(out.iter().all(|&x| x == 0.5));
    report.sent
}
