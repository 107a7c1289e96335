//! Decoding eight sequences that have a prompt of 4096 keys in common, and 64 further keys each: as forks of a cache, and
//! as tables that name the same pages, each against eight copies of the prompt. Cold memory; `cargo bench --bench prefixes`.

#[path = "support/interleaved.rs"]
mod interleaved;
mod support;

use interleaved::{median, random};
use sdpa::{
    Alignment, Attention, BlockTable, Dtype, Exec, Inputs, KeyScales, KvCache, KvShape, Outputs, Pages, Plan, View,
    ViewMut, Workspace, probe,
};
use std::hint::black_box;
use std::time::Instant;

/// Query heads and key/value heads: as a model of eight billion parameters has them, and without grouped heads.
const HEADS: [[usize; 2]; 2] = [[32, 8], [8, 8]];
const DIM: usize = 128;
const SEQUENCES: usize = 8;
const OWN: usize = 64;
const PAGE: usize = 16;

fn prompt() -> usize {
    if support::test_mode() { 512 } else { 4096 }
}

fn view(data: &[f32], shape: [usize; 4]) -> View<'_> {
    View::bhld(data, shape).expect("data of this shape")
}

/// Home of the prompt: one for all sequences, or one for each.
#[derive(Clone, Copy, PartialEq)]
enum Prompt {
    Shared,
    Copied,
}

/// Appends keys and values to a sequence; each has other ones.
fn append(cache: &mut KvCache, sequence: usize, keys: usize) {
    let shape = [1, cache.shape().kv_heads, keys, DIM];
    let [k, v] = [0, 1].map(|n| random(shape.iter().product(), (2 * sequence + n) as u64));
    cache.append_to(sequence, view(&k, shape), view(&v, shape)).expect("they fit");
}

fn filled(empty: &KvCache, prompt_is: Prompt) -> KvCache {
    let mut cache = empty.clone();
    append(&mut cache, 0, prompt());
    for sequence in 1..SEQUENCES {
        match prompt_is {
            Prompt::Shared => cache.fork(0, sequence).expect("a sequence"),
            Prompt::Copied => append(&mut cache, sequence, prompt()),
        }
    }
    (0..SEQUENCES).for_each(|sequence| append(&mut cache, sequence, OWN));
    cache
}

/// Entries of the tables: pages of the prompt, which may be those of sequence 0, then pages of one's own.
fn entries(prompt_is: Prompt) -> Vec<u32> {
    let (common, width) = (prompt() / PAGE, (prompt() + OWN) / PAGE);
    let entry = |sequence: usize, n: usize| match prompt_is {
        Prompt::Shared if n < common => n,
        _ => sequence * width + n,
    };
    (0..SEQUENCES).flat_map(|sequence| (0..width).map(move |n| entry(sequence, n) as u32)).collect()
}

/// Call, and memory for it.
struct Step<'a> {
    inputs: Inputs<'a>,
    out: Vec<f32>,
    workspace: Workspace,
}

impl<'a> Step<'a> {
    fn new(inputs: Inputs<'a>) -> Self {
        Self { inputs, out: vec![0.0; inputs.queries().shape().iter().product()], workspace: Workspace::new() }
    }

    /// Returns the seconds that the call takes.
    fn time(&mut self, exec: Exec, flush: &[f32]) -> f64 {
        let shape = self.inputs.queries().shape();
        let attention = Attention::new().causal().align(Alignment::BottomRight);
        black_box(probe::read(flush));
        let start = Instant::now();
        let out = ViewMut::bhld(&mut self.out, shape).expect("it fits");
        let problem = attention.problem(black_box(self.inputs), Outputs::new(out)).expect("the shapes fit");
        let plan = Plan::new(&problem, exec);
        problem.run(&plan, &mut self.workspace);
        start.elapsed().as_secs_f64()
    }
}

/// Prints the medians of both calls.
fn compare(name: &str, heads: [usize; 2], [shared, copied]: [Inputs<'_>; 2], flush: &[f32]) {
    let mut steps = [Step::new(shared), Step::new(copied)];
    for threads in support::thread_counts() {
        let exec = support::exec(threads);
        let mut times = [Vec::new(), Vec::new()];
        for round in 0..if support::test_mode() { 1 } else { 12 } {
            for n in [round % 2, 1 - round % 2] {
                let seconds = rayon::scope(|_| steps[n].time(exec, flush));
                times[n].push(seconds);
            }
        }
        let [shared, copied] = times.map(|mut times| 1e3 * median(&mut times));
        let ratio = shared / copied;
        let [heads, kv_heads] = heads;
        println!(
            "{heads:2}/{kv_heads} heads  {name:11} {threads} thread(s)  shared {shared:7.3} ms  copied {copied:7.3} ms  \
             ({ratio:.3})"
        );
    }
}

fn run(heads: [usize; 2], flush: &[f32]) {
    let q = random(SEQUENCES * heads[0] * DIM, 99);
    let q = view(&q, [SEQUENCES, heads[0], 1, DIM]);
    let empty =
        || KvCache::new(SEQUENCES, KvShape { kv_heads: heads[1], head_dim: DIM, value_dim: DIM }).expect("a cache");
    let formats = [
        ("cache, f32", empty().dtype(Dtype::F32)),
        ("cache, bf16", empty().dtype(Dtype::Bf16)),
        ("cache, int8", empty().int8(KeyScales::PerToken)),
    ];
    for (name, empty) in formats {
        let caches = [Prompt::Shared, Prompt::Copied].map(|prompt| filled(empty.as_ref().expect("a cache"), prompt));
        compare(name, heads, caches.each_ref().map(|cache| Inputs::cached(q, cache)), flush);
    }
    let tables = [Prompt::Shared, Prompt::Copied].map(entries);
    let pages = tables[0].len();
    let pools = [1, 2].map(|seed| random(pages * heads[1] * PAGE * DIM, seed));
    let lens = [prompt() + OWN; SEQUENCES];
    let inputs = tables.each_ref().map(|entries| {
        let [k, v] = pools.each_ref().map(|pool| view(pool, [pages, heads[1], PAGE, DIM]));
        Inputs::paged(q, Pages::new(k, v, BlockTable { entries, lens: &lens }).expect("a good table"))
    });
    compare("pages of 16", heads, inputs, flush);
}

fn main() {
    support::print_machine();
    let flush = support::flush();
    for heads in HEADS {
        run(heads, &flush);
    }
}
