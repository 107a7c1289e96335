//! Plans by number, held against `tests/golden/plans.txt`: how calls are divided, what is said of them, how busy workers are.
//! A change of plans is meant or it is a mistake: `SDPA_GOLDEN=write cargo test --test attention plans` writes the file anew.

use crate::golden::are_written;
use crate::support::Rng;
use core::fmt::{self, Write as _};
use sdpa::{
    Alignment, Attention, Exec, Inputs, Isa, KvCache, KvShape, Machine, Mask, Outputs, Plan, Problem, View, ViewMut,
    Window,
};
use std::path::Path;

/// Number of plans in the file.
const PLANS: u64 = 400;

/// Sizes of a call.
#[derive(Debug, Clone, Copy)]
struct Sizes {
    batch: usize,
    heads: usize,
    kv: KvShape,
    rows: usize,
    keys: usize,
}

impl Sizes {
    /// Few rows of few heads against many keys: blocks of keys are divided.
    fn draw_few(rng: &mut Rng) -> Self {
        let (heads, kv_heads) = rng.pick(&[(1, 1), (2, 1), (4, 2)]);
        let dim = rng.pick(&[64, 128]);
        Self {
            batch: rng.pick(&[1, 1, 2]),
            heads,
            kv: KvShape { kv_heads, head_dim: dim, value_dim: dim },
            rows: rng.pick(&[1, 3, 16, 17, 32, 40, 64, 100, 128]),
            keys: rng.pick(&[257, 300, 512, 600, 1000, 4096, 30_000]),
        }
    }

    fn draw(rng: &mut Rng) -> Self {
        let (heads, kv_heads) = rng.pick(&[(0, 0), (1, 1), (1, 1), (4, 1), (6, 2), (8, 2), (12, 12), (128, 1)]);
        let head_dim = rng.pick(&[1, 16, 64, 80, 128, 256, 576]);
        let value_dim = if rng.below(3) == 0 { rng.pick(&[1, 17, 64, 512]) } else { head_dim };
        Self {
            batch: rng.pick(&[0, 1, 1, 1, 2, 5, 16]),
            heads,
            kv: KvShape { kv_heads, head_dim, value_dim },
            rows: rng.pick(&[0, 1, 1, 1, 2, 3, 5, 16, 17, 25, 33, 97, 100, 128, 129, 384, 385, 1000, 4096]),
            keys: rng.pick(&[0, 1, 5, 255, 256, 257, 300, 512, 1000, 4096, 10_000, 100_000]),
        }
    }
}

impl fmt::Display for Sizes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { batch, heads, kv: KvShape { kv_heads, head_dim, value_dim }, rows, keys } = self;
        write!(f, "{batch} × {heads}/{kv_heads} heads, {rows} × {keys}, {head_dim} → {value_dim}")
    }
}

/// Rules that are key ranges, in words too.
fn draw_rules(rng: &mut Rng, what: &mut String) -> Attention {
    let alignment =
        rng.pick(&[Alignment::TopLeft, Alignment::BottomRight, Alignment::BottomRight, Alignment::Offset(-300)]);
    let mut attention = Attention::new().align(alignment);
    *what += &format!(", {alignment:?}");
    if rng.below(2) == 0 {
        attention = attention.causal();
        *what += ", causal";
    }
    if rng.below(3) == 0 {
        let sides = [rng.pick(&[None, Some(0), Some(100), Some(3000)]), rng.pick(&[None, Some(0), Some(40)])];
        let first = rng.pick(&[0, 0, 4, 700]);
        attention = attention.window(Window::inclusive(sides[0], sides[1]).keep_first(first));
        *what += &format!(", window {sides:?} and {first} first keys");
    }
    attention
}

/// Ends of sequences of any length, that of the last at `all`.
fn draw_ends(rng: &mut Rng, sequences: usize, all: usize) -> Vec<usize> {
    let mut ends: Vec<usize> = (1..sequences).map(|_| rng.below(all + 1)).collect();
    ends.extend([0, all]);
    ends.sort_unstable();
    ends
}

/// Views one row that is read again and again: only plans are made of it.
fn repeated(one: &[f32], shape: [usize; 4], stride: isize) -> View<'_> {
    View::from_strides(one, 0, shape, [0, 0, 0, stride]).unwrap()
}

/// Fills a cache with sequences of these lengths; every third begins as a fork of the one before.
fn forked(sizes: Sizes, one: &[f32], lens: &[usize]) -> KvCache {
    let KvShape { kv_heads, head_dim, value_dim } = sizes.kv;
    let mut cache = KvCache::new(sizes.batch, sizes.kv).unwrap();
    for (sequence, &len) in lens.iter().enumerate() {
        if sequence % 3 == 1 {
            cache.fork(sequence - 1, sequence).unwrap();
        }
        let [k, v] = [head_dim, value_dim].map(|dim| repeated(one, [1, kv_heads, len, dim], 1));
        cache.append_to(sequence, k, v).unwrap();
    }
    cache
}

/// Plans the call of a number, and returns what there is to say about it.
fn line(number: u64) -> String {
    let rng = &mut Rng::new(number);
    let sizes = if number.is_multiple_of(2) { Sizes::draw(rng) } else { Sizes::draw_few(rng) };
    let Sizes { batch, heads, kv: KvShape { kv_heads, head_dim, value_dim }, rows, keys } = sizes;
    let mut what = sizes.to_string();
    let attention = draw_rules(rng, &mut what);
    let one = vec![0.5f32; head_dim.max(value_dim)];
    let stride = rng.pick(&[1, 1, 1, 0]);
    let q = |batch| repeated(&one, [batch, heads, rows, head_dim], stride);
    let kv = |batch, dim| repeated(&one, [batch, kv_heads, keys, dim], 1);
    let tensors = |batch| Inputs::new(q(batch), kv(batch, head_dim), kv(batch, value_dim));
    let (cache, lens, ends): (KvCache, Vec<usize>, [Vec<usize>; 2]);
    let kind = rng.below(9);
    let inputs = match kind {
        0 if batch > 0 && kv_heads > 0 => {
            lens = (0..batch).map(|_| rng.below(900)).collect();
            cache = forked(sizes, &one, &lens);
            write!(what, ", a cache of {lens:?}, every third of which is a fork").unwrap();
            if rng.below(2) == 0 {
                Inputs::cached(q(batch), &cache)
            } else {
                ends = [draw_ends(rng, batch, rows), Vec::new()];
                write!(what, ", rows end at {:?}", ends[0]).unwrap();
                Inputs::cached(q(1), &cache).ragged_queries(&ends[0])
            }
        }
        1 if batch > 0 => {
            ends = [rows, keys].map(|all| draw_ends(rng, batch, all));
            write!(what, ", ragged, sequences end at {ends:?}").unwrap();
            tensors(1).ragged(&ends[0], &ends[1])
        }
        2 => {
            lens = (0..batch).map(|_| rng.below(keys + 1)).collect();
            write!(what, ", lengths {lens:?}").unwrap();
            tensors(batch).kv_lens(&lens)
        }
        4 => {
            what += ", mask and bias";
            let mask = Mask::keep(View::from_strides(&[1u8], 0, [1, 1, rows, keys], [0; 4]).unwrap());
            tensors(batch).mask(mask).bias(repeated(&[0.0], [1, 1, rows, keys], 0))
        }
        _ => tensors(batch),
    };
    let mut memory = Memory::of(sizes, inputs.queries().shape()[0]);
    let outputs = memory.outputs(kind, &mut what);
    said(what, &attention.problem(inputs, outputs).unwrap(), rng)
}

/// Memory for what a call writes.
struct Memory {
    sizes: Sizes,
    out: Vec<f32>,
    lse: Vec<f32>,
    sums: Vec<f32>,
    /// Empty for many weights.
    weights: Vec<f32>,
}

impl Memory {
    fn of(sizes: Sizes, sequences: usize) -> Self {
        let Sizes { heads, kv: KvShape { kv_heads, value_dim, .. }, rows, keys, .. } = sizes;
        let all = sequences * heads * rows;
        let weights = if all * keys < 1 << 20 { all * keys } else { 0 };
        let [out, lse, sums, weights] =
            [all * value_dim, all, sequences * kv_heads * keys, weights].map(|n| vec![0.0; n]);
        Self { sizes: Sizes { batch: sequences, ..sizes }, out, lse, sums, weights }
    }

    /// Returns the outputs of a kind of call, and says what they are.
    fn outputs(&mut self, kind: usize, what: &mut String) -> Outputs<'_> {
        let Sizes { batch, heads, kv: KvShape { kv_heads, value_dim, .. }, rows, keys } = self.sizes;
        let outputs = Outputs::new(ViewMut::bhld(&mut self.out, [batch, heads, rows, value_dim]).unwrap());
        match kind {
            3 => {
                *what += ", lse and sums";
                let outputs = outputs.lse(ViewMut::bhl(&mut self.lse, [batch, heads, rows]).unwrap());
                outputs.key_weight_sums(ViewMut::bhl(&mut self.sums, [batch, kv_heads, keys]).unwrap())
            }
            5 if self.weights.len() == batch * heads * rows * keys => {
                *what += ", weights";
                outputs.weights(ViewMut::bhld(&mut self.weights, [batch, heads, rows, keys]).unwrap())
            }
            _ => outputs,
        }
    }
}

/// Returns what a plan of a problem is, in a line.
fn said(what: String, problem: &Problem<'_>, rng: &mut Rng) -> String {
    let threads = rng.pick(&[1, 1, 2, 3, 16, 100]);
    // Tiles of this instruction set are the same on every machine.
    let portable = Isa::from_name("portable").unwrap();
    let plan = Plan::new(problem, Exec::serial().threads(threads).isa(portable));
    let machine = Machine { flops: 1e11, bytes: 1e10 };
    let e = plan.explain(problem, Some(machine));
    // The widest instruction set is another on another machine; a model of a matrix unit goes with any.
    let modelled = portable.matrix_unit().is_ok();
    let notes =
        e.notes.iter().filter(|note| !(note.contains("as set;") || modelled && note.contains("matrix unit"))).count();
    let division = plan.to_string();
    let mut line = format!("{what}, {threads} threads: {}", division.lines().last().unwrap());
    write!(line, "; {} bytes of partials; blocks {:?}", plan.partials_bytes(), e.blocks).unwrap();
    write!(line, "; {} of {} FLOP useful", e.useful_flops, e.computed_flops).unwrap();
    write!(line, "; {} bytes, {} shared", e.bytes, e.shared_bytes).unwrap();
    write!(line, "; {:.3} ms; {notes} notes; busy", e.seconds.unwrap() * 1e3).unwrap();
    for workers in [1, 2, 7, 100] {
        let busy = plan.balance(problem, workers);
        let (count, sum) = (busy.len(), busy.iter().fold(0.0, |sum, busy| sum + busy));
        write!(line, " {sum:.4}/{count}").unwrap();
    }
    line
}

#[test]
fn plans_are_those_of_the_file() {
    let lines: String = (0..PLANS).map(|number| format!("{number} {}\n", line(number))).collect();
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/plans.txt");
    if are_written() {
        std::fs::write(&path, &lines).unwrap();
    }
    let golden = std::fs::read_to_string(&path).unwrap();
    for (got, expected) in lines.lines().zip(golden.lines()) {
        assert_eq!(got, expected, "if that is meant: SDPA_GOLDEN=write cargo test --test attention plans");
    }
    assert_eq!(lines.lines().count(), golden.lines().count());
}
