//! A mixed batch, one prompt's rows and five single steps over a cache or pages: in one call, in a call for each sequence,
//! and padded to the longest. 8/2 heads of 64. `cargo bench --bench mixed`.

#[path = "support/interleaved.rs"]
mod interleaved;
mod support;

use interleaved::{medians, random};
use sdpa::{
    Alignment, Attention, BlockTable, Exec, Inputs, KvCache, KvShape, Outputs, Pages, Plan, View, ViewMut, Workspace,
};

const HEADS: [usize; 2] = [8, 2];
const DIM: usize = 64;
const PAGE: usize = 64;
/// Keys of each sequence, and rows that attend to them.
const SEQUENCES: [(usize, usize); 6] = [(450, 300), (900, 1), (850, 1), (1000, 1), (800, 1), (950, 1)];
const ROUNDS: usize = 15;

/// A call, and memory for its results `[batch, heads, rows, DIM]`.
struct Call<'a> {
    inputs: Inputs<'a>,
    out: Vec<f32>,
}

impl<'a> Call<'a> {
    fn new(inputs: Inputs<'a>) -> Self {
        Self { inputs, out: vec![0.0; inputs.queries().shape().iter().product()] }
    }

    fn run(&mut self, exec: Exec, workspace: &mut Workspace) {
        let out = ViewMut::bhld(&mut self.out, self.inputs.queries().shape()).expect("data of this shape");
        let attention = Attention::new().causal().align(Alignment::BottomRight);
        let problem = attention.problem(self.inputs, Outputs::new(out)).expect("a good call");
        let plan = Plan::new(&problem, exec);
        problem.run(&plan, workspace);
    }
}

/// Keys and values of the sequences, in a cache and in pages.
struct Store {
    cache: KvCache,
    pools: [Vec<f32>; 2],
    entries: Vec<u32>,
    lens: Vec<usize>,
}

impl Store {
    fn new() -> Self {
        let lens: Vec<usize> = SEQUENCES.iter().map(|&(keys, _)| keys).collect();
        let width = lens.iter().max().expect("some").div_ceil(PAGE);
        let mut cache =
            KvCache::new(lens.len(), KvShape { kv_heads: HEADS[1], head_dim: DIM, value_dim: DIM }).expect("a cache");
        for (sequence, &keys) in lens.iter().enumerate() {
            let shape = [1, HEADS[1], keys, DIM];
            let [k, v] = [1, 2].map(|seed| random(HEADS[1] * keys * DIM, seed));
            let view = |x| View::bhld(x, shape).expect("data of this shape");
            cache.append_to(sequence, view(&k), view(&v)).expect("they fit");
        }
        let pages = width * lens.len();
        let pools = [3, 4].map(|seed| random(pages * HEADS[1] * PAGE * DIM, seed));
        Self { cache, pools, entries: (0..pages as u32).rev().collect(), lens }
    }

    fn pages(&self) -> Pages<'_> {
        let shape = [self.entries.len(), HEADS[1], PAGE, DIM];
        let [k, v] = self.pools.each_ref().map(|pool| View::bhld(pool, shape).expect("data of this shape"));
        Pages::new(k, v, BlockTable { entries: &self.entries, lens: &self.lens }).expect("a good table")
    }
}

/// Calls over the same keys and values: all sequences together, each alone, and padded.
struct Calls<'a> {
    together: Call<'a>,
    alone: Vec<Call<'a>>,
    padded: Call<'a>,
}

impl<'a> Calls<'a> {
    /// `ends` are the cumulative rows, `numbers` those of the sequences; `q` has enough rows for all.
    fn new(source: impl Fn(View<'a>) -> Inputs<'a>, q: &'a [f32], [ends, numbers]: [&'a [usize]; 2]) -> Self {
        let queries = |batch: usize, rows: usize| {
            let shape = [batch, HEADS[0], rows, DIM];
            source(View::bhld(q, shape).expect("enough for the shape"))
        };
        let most = SEQUENCES.iter().map(|&(_, rows)| rows).max().expect("some");
        let alone = SEQUENCES.iter().zip(numbers.chunks(1));
        Self {
            together: Call::new(queries(1, ends[SEQUENCES.len()]).ragged_queries(ends)),
            alone: alone.map(|(&(_, rows), number)| Call::new(queries(1, rows).sequences(number))).collect(),
            padded: Call::new(queries(SEQUENCES.len(), most)),
        }
    }

    fn compare(&mut self, name: &str, threads: usize) {
        let exec = support::exec(threads);
        let [first, second, third] = &mut [const { Workspace::new() }; 3];
        let seconds = medians(
            if support::test_mode() { 1 } else { ROUNDS },
            [
                &mut || self.together.run(exec, first),
                &mut || self.alone.iter_mut().for_each(|call| call.run(exec, second)),
                &mut || self.padded.run(exec, third),
            ],
        );
        let [together, alone, padded] = seconds.map(|seconds| seconds * 1e3);
        let ratio = together / alone;
        println!(
            "{name:5} {threads} thread(s)  together {together:6.3} ms  one by one {alone:6.3} ms ({ratio:.3})  \
             padded {padded:6.2} ms"
        );
    }
}

fn main() {
    support::print_machine();
    let store = Store::new();
    let mut ends = vec![0];
    SEQUENCES.iter().for_each(|&(_, rows)| ends.push(ends[ends.len() - 1] + rows));
    let numbers: Vec<usize> = (0..SEQUENCES.len()).collect();
    let q = random(SEQUENCES.len() * HEADS[0] * 300 * DIM, 7);
    let rows = [ends.as_slice(), &numbers];
    let pages = store.pages();
    let mut cached = Calls::new(|q| Inputs::cached(q, &store.cache), &q, rows);
    let mut paged = Calls::new(|q| Inputs::paged(q, pages), &q, rows);
    for threads in support::thread_counts() {
        cached.compare("cache", threads);
        paged.compare("pages", threads);
    }
}
