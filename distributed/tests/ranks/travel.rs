//! What travels: keys to the ranks whose rows see them, each once, and nothing else.

use crate::PATIENT;
use crate::launch::FINE;
use core::ops::Range;
use mpi::topology::SimpleCommunicator;
use mpi::traits::*;
use sdpa::{Alignment, Attention, Exec, Inputs, Mods, Outputs, View, ViewMut, Window, masks::Documents};
use sdpa_mpi::{Ranks, Report, Share, zigzag};

/// Tokens of each rank, and the length of the only head.
const N: usize = 1024;
const DIM: usize = 8;
/// Bytes of a rank's keys and values.
const SHARD: usize = 2 * N * DIM * size_of::<f32>();

/// One call, in which a rank has the rows and keys of these stretches.
fn call(ranks: &Ranks<'_>, attention: Attention, lens: Option<&[usize]>, stretches: &[Range<usize>]) -> Report {
    of_sequences(ranks, attention, lens, None, stretches)
}

/// One call, perhaps with lengths or with ends of ragged sequences.
fn of_sequences(
    ranks: &Ranks<'_>,
    attention: Attention,
    lens: Option<&[usize]>,
    ends: Option<&[usize]>,
    stretches: &[Range<usize>],
) -> Report {
    let of = |rows: &Range<usize>| vec![0.5f32; rows.len() * DIM];
    let numbers: Vec<_> = stretches.iter().map(of).collect();
    let mut outs: Vec<_> = stretches.iter().map(of).collect();
    let mut share = Share::new();
    for ((rows, x), out) in stretches.iter().zip(&numbers).zip(&mut outs) {
        let shape = [1, 1, rows.len(), DIM];
        let x = View::bhld(x, shape).expect("it fits");
        let inputs = Inputs::new(x, x, x);
        let inputs = lens.map_or(inputs, |lens| inputs.kv_lens(lens));
        let inputs = ends.map_or(inputs, |ends| inputs.ragged(ends, ends));
        let outputs = Outputs::new(ViewMut::bhld(out, shape).expect("it fits"));
        share = share.rows(rows.start, inputs, outputs).keys(rows.start, x, x);
    }
    ranks.attention(&attention, share).expect("a good call")
}

pub(crate) fn run(world: &SimpleCommunicator) {
    let (rank, size) = (world.rank() as usize, world.size() as usize);
    let ranks = Ranks::new(world, PATIENT).exec(Exec::serial());
    let (plain, own) = (Attention::new(), rank * N..(rank + 1) * N);
    let own = core::slice::from_ref(&own);
    let received = |attention, lens, stretches: &[_]| call(&ranks, attention, lens, stretches).received;
    assert_eq!(received(plain, None, own), (size - 1) * SHARD, "all keys");
    assert_eq!(received(plain.causal(), None, own), rank * SHARD, "earlier keys");
    // A window into the rank before, and the first rank's keys for all.
    let window = plain.causal().window(Window::inclusive(Some(3), None));
    assert_eq!(received(window, None, own), rank.min(1) * SHARD, "the keys just before");
    let kept = plain.causal().window(Window::inclusive(Some(0), None).keep_first(3));
    assert_eq!(received(kept, None, own), rank.min(1) * SHARD, "the first keys");
    let short = received(plain, Some(&[N]), own);
    assert_eq!(short, rank.min(1) * SHARD, "keys that exist");
    let below = plain.causal().align(Alignment::Offset(-((size * N) as isize)));
    assert_eq!(received(below, None, own), 0, "no row sees a key");
    // Ragged sequences of a rank each: nothing travels. From half to half: halves of neighbours.
    let ragged = |attention, ends: &[usize]| of_sequences(&ranks, attention, None, Some(ends), own);
    let ends: Vec<_> = (0..=size).map(|rank| rank * N).collect();
    let Report { sent, received, computed, hidden, .. } = ragged(plain, &ends);
    assert_eq!([sent, received, computed, hidden], [0, 0, N, (size - 1) * N], "ragged sequences");
    let ends: Vec<_> = (0..size).map(|rank| rank * N + N / 2).collect();
    let ends = [&[0], &ends[..], &[size * N]].concat();
    let neighbours = rank.min(1) + (size - 1 - rank).min(1);
    assert_eq!(ragged(plain, &ends).received, neighbours * SHARD / 2, "ragged sequences of two ranks");
    assert_eq!(ragged(plain.causal(), &ends).received, rank.min(1) * SHARD / 2, "ragged sequences, causal");
    // Documents of a rank each: nothing travels.
    let ends: Vec<_> = (1..=size).map(|rank| rank * N).collect();
    let documents = Mods::new().mask(Documents::by_ends(&ends).expect("in order"));
    let x = vec![0.5f32; N * DIM];
    let (x, mut out) = (View::bhld(&x, [1, 1, N, DIM]).expect("it fits"), vec![0.0; N * DIM]);
    let outputs = Outputs::new(ViewMut::bhld(&mut out, [1, 1, N, DIM]).expect("it fits"));
    let share = Share::new().rows(rank * N, Inputs::new(x, x, x), outputs).keys(rank * N, x, x);
    let report = ranks.attention_with(&plain, share, &documents).expect("a good call");
    assert_eq!([report.sent, report.received, report.computed, report.hidden], [0, 0, N, (size - 1) * N], "documents");
    assert!(out.iter().all(|&x| x == 0.5), "documents");
    // Stripes: early and late keys of all others, but for late ones behind this rank's own.
    let [early, late] = zigzag(size * N, rank, size);
    let report = call(&ranks, plain.causal(), None, &[early.clone(), late.clone()]);
    assert_eq!(report.received, (late.end - early.len() - late.len()) * 2 * DIM * 4, "stripes");
    assert_eq!(report.computed, late.end, "stripes");
    println!("{rank}: {FINE}");
}
