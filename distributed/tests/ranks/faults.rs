//! Faults: ranks that disagree, die, or come late. Every other rank says so in time, and writes nothing.

use crate::backward_faults;
use crate::launch::{FINE, Launch};
use crate::step_faults;
use mpi::topology::SimpleCommunicator;
use mpi::traits::*;
use sdpa::{Attention, Bf16, Exec, Inputs, Mask, Mods, Outputs, Position, View, ViewMut};
use sdpa_mpi::{Costs, Error, Ranks, Share, Split};
use std::cell::Cell;
use std::time::{Duration, Instant};

/// Time that ranks allow each other here, and what they may take beyond it.
const TIMEOUT: Duration = Duration::from_secs(3);
const BEYOND: Duration = Duration::from_secs(5);
/// The rank that is at fault.
pub(crate) const GUILTY: usize = 1;
/// Rows and keys of each rank, and the length of a head.
const N: usize = 40;
pub(crate) const DIM: usize = 8;

/// A fault of one rank.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Fault {
    pub(crate) name: &'static str,
    /// Words of the error on every rank but perhaps the guilty one.
    words: &'static str,
    kind: Kind,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Kind {
    /// Every rank gets the same error.
    Said,
    /// The rank itself gets its own error.
    Own,
    /// The rank is late, and finds nobody.
    Late,
    Dies,
}

pub(crate) const fn fault(name: &'static str, words: &'static str, kind: Kind) -> Fault {
    Fault { name, words, kind }
}

const FAULTS: [Fault; 16] = [
    fault("causal", "causal rule: rank 1 has causal, but rank 0 has none", Kind::Said),
    fault("softcap", "softcap: rank 1 has 3, but rank 0 has none", Kind::Said),
    fault("scale", "scale: rank 1 has 2, but rank 0 has 1/√head_dim", Kind::Said),
    fault("slopes", "alibi slopes: rank 1 has [0.5], but rank 0 has [0.25]", Kind::Said),
    fault("mask", "mask: rank 1 has keys to keep, but rank 0 has none", Kind::Said),
    fault("function", "score function: rank 1 has given, but rank 0 has none", Kind::Said),
    fault("element", "element type of k: rank 1 has bf16, but rank 0 has f32", Kind::Said),
    fault("shape", "value_dim: rank 1 has 7, but rank 0 has 8", Kind::Said),
    fault("gap", "keys 40..41: no rank has them", Kind::Said),
    fault("overlap", "row 39: rank 0 has it, and so has rank 1", Kind::Said),
    fault("output", "rank 1 refused its part of the call: out: rows is 39, but q has 40", Kind::Own),
    fault("positions", "rank 1 refused its part of the call: row positions: needs all keys at once", Kind::Own),
    fault("length", "rank 1 refused its part of the call: kv_lens: entry 0 is 1000, but must be at most", Kind::Own),
    fault("late", "waited 3s in vain for rank 1: what it has of the call", Kind::Late),
    fault("dead", "waited 3s in vain for rank 1: what it has of the call", Kind::Dies),
    fault("dying", "waited 3s in vain for rank 1:", Kind::Dies),
];

impl Fault {
    pub(crate) fn launch(&self, ranks: usize) -> Launch {
        let launch = Launch::of(self.name, ranks);
        match self.kind {
            // After the wait a roll call, and mpirun's own beginning and end; ranks themselves measure how long they took.
            Kind::Dies => launch.one_dies().within(3 * TIMEOUT + BEYOND),
            // The late rank waits as long once more.
            Kind::Late => launch.within(4 * TIMEOUT + BEYOND),
            Kind::Said | Kind::Own => launch.within(TIMEOUT + BEYOND),
        }
    }
}

/// Faults of calls that are cut by heads.
const OF_HEADS: [Fault; 11] = [
    fault("heads split", "split: rank 1 has by rows, but rank 0 has by heads", Kind::Said),
    fault("heads costs", "costs: bytes: rank 1 has 2, but rank 0 has 1", Kind::Said),
    fault("heads slopes", "alibi slopes: rank 1 has [0.5], but rank 0 has [0.25]", Kind::Said),
    fault("heads shape", "value_dim: rank 1 has 7, but rank 0 has 8", Kind::Said),
    fault("heads gap", "keys 40..41: no rank has them", Kind::Said),
    fault("heads output", "rank 1 refused its part of the call: out: rows is 39, but q has 40", Kind::Own),
    fault("heads mask", "mask: rank 1 has keys to keep, but rank 0 has none", Kind::Said),
    fault("heads late", "waited 3s in vain for rank 1: what it has of the call", Kind::Late),
    fault("heads dead", "waited 3s in vain for rank 1: what it has of the call", Kind::Dies),
    fault("heads torn", "waited 3s in vain for rank 1:", Kind::Dies),
    fault("heads computed", "waited 3s in vain for rank 1: whether it has computed its heads", Kind::Dies),
];

/// All faults, of prompts, of steps and of backward passes.
pub(crate) fn all() -> impl Iterator<Item = Fault> {
    FAULTS.into_iter().chain(OF_HEADS).chain(step_faults::FAULTS).chain(backward_faults::FAULTS)
}

/// The same call on every rank, but for the guilty one.
fn call(ranks: &Ranks<'_>, name: &str, rank: usize, guilty: bool) -> Result<(), Error> {
    match name.split(' ').next() {
        Some("step") => step_faults::call(ranks, name, rank, guilty),
        Some("backward") => backward_faults::call(ranks, name, rank, guilty),
        _ => prompt(ranks, name.trim_start_matches("heads "), rank, guilty),
    }
}

pub(crate) fn run(world: &SimpleCommunicator, name: &str) {
    let fault = all().find(|fault| fault.name == name).expect("a fault");
    let (rank, size) = (world.rank() as usize, world.size() as usize);
    let guilty = rank == GUILTY;
    match name.split(' ').next_back() {
        Some("late") if guilty => std::thread::sleep(TIMEOUT + Duration::from_millis(500)),
        Some("dead") if guilty => std::process::abort(),
        _ => {}
    }
    let begin = Instant::now();
    let told = Cell::new(0);
    let die = |done: usize, all: usize| {
        told.set(told.get() + 1);
        match name {
            // In the all-to-all, after its first messages if there are more.
            "heads torn" if told.get() < size.min(3) - 1 => {}
            "heads computed" if done < all => {}
            _ => std::process::abort(),
        }
    };
    let mut ranks = Ranks::new(world, TIMEOUT).exec(Exec::serial());
    if name.starts_with("heads") {
        ranks = ranks.split(match name {
            "heads split" if guilty => Split::Rows,
            "heads costs" => Split::Chosen(Costs { bytes: if guilty { 2.0 } else { 1.0 }, latency: 0.0, flops: 1.0 }),
            _ => Split::Heads,
        });
    }
    if fault.kind == Kind::Dies && guilty {
        ranks = ranks.progress(&die);
    }
    let error = call(&ranks, name, rank, guilty).expect_err("a fault");
    let took = begin.elapsed();
    let words = error.to_string();
    println!("rank {rank} of {size}: {words}");
    let expected = match fault.kind {
        Kind::Own if guilty => fault.words.trim_start_matches("rank 1 refused its part of the call: "),
        Kind::Late if guilty => "waited 3s in vain for rank",
        _ => fault.words,
    };
    assert!(words.starts_with(expected), "{words}");
    assert!(took < TIMEOUT + BEYOND, "{took:?}");
    let of = ["step", "backward"].into_iter().find(|of| name.starts_with(of));
    let again = call(&ranks, of.unwrap_or_default(), rank, false);
    if matches!(error, Error::TimedOut { .. }) {
        assert_eq!(again.err(), Some(Error::Broken));
    }
    println!("{rank}: {FINE}");
    if fault.kind == Kind::Dies {
        // The end of MPI would wait for the dead.
        std::process::exit(0);
    }
}

/// A call of 40 rows and keys a rank, in which the guilty rank does something else.
fn prompt(ranks: &Ranks<'_>, name: &str, rank: usize, guilty: bool) -> Result<(), Error> {
    let is = |fault: &str| guilty && name == fault;
    let attention = Attention::new();
    let attention = if is("causal") { attention.causal() } else { attention };
    let attention = if is("softcap") { attention.softcap(3.0) } else { attention };
    let attention = if is("scale") { attention.scale(2.0) } else { attention };
    let attention = attention.align(sdpa::Alignment::TopLeft);
    // Enough keys for several parcels, where one is to die between them.
    let keys = if name == "dying" { 300_000 } else { N };
    let value_dim = if is("shape") { 7 } else { DIM };
    let (q, k, v) = (vec![0.5f32; N * DIM], vec![0.25f32; keys * DIM], vec![1.0f32; keys * value_dim]);
    let (mut out, written) = (vec![7.0f32; N * value_dim], if is("output") { N - 1 } else { N });
    let short = vec![Bf16::from_f32(0.25); keys * DIM];
    let q = View::bhld(&q, [1, 1, N, DIM])?;
    let (k, v) = (View::bhld(&k, [1, 1, keys, DIM])?, View::bhld(&v, [1, 1, keys, value_dim])?);
    let (slopes, shown) = ([if is("slopes") { 0.5 } else { 0.25 }], [true]);
    let inputs = Inputs::new(q, k, v);
    let inputs = if name == "slopes" { inputs.alibi(&slopes) } else { inputs };
    let own: [i32; N] = core::array::from_fn(|row| row as i32);
    let own = [&own[..]];
    let inputs = if is("positions") { inputs.row_positions(&own) } else { inputs };
    let inputs = if is("length") { inputs.kv_lens(&[1000]) } else { inputs };
    let inputs = if is("mask") { inputs.mask(Mask::keep(View::bhld(&shown, [1; 4])?)) } else { inputs };
    let outputs = Outputs::new(ViewMut::bhld(&mut out[..written * value_dim], [1, 1, written, value_dim])?);
    let share = match (name, guilty) {
        // All rows are the guilty rank's, since lengths must be the same on all that have some.
        ("length", true) => Share::new().rows(0, inputs, outputs),
        ("length", false) => Share::new(),
        _ => Share::new().rows(rank * N - usize::from(is("overlap")), inputs, outputs),
    };
    let first = rank * keys + usize::from(name == "gap" && rank >= GUILTY);
    let share = match is("element") {
        true => share.keys(first, View::bhld(&short, [1, 1, keys, DIM])?, v),
        false => share.keys(first, k, v),
    };
    let result = match is("function") {
        true => ranks.attention_with(&attention, share, &Mods::new().score(|score: f32, _: Position| score)),
        false => ranks.attention(&attention, share),
    };
    assert!(result.is_ok() || out.iter().all(|&x| x == 7.0), "outputs were written");
    result.map(|_| ())
}
