//! Decoding: one query row a sequence against a long past, where time is that of reading keys and values; and several rows,
//! as a draft's tokens are, against one.
//!
//! Throughput is bytes of keys and values read per second, each case in turn with a plain read of the same memory, caches
//! flushed between; medians. `cargo bench --bench decode`, with a filter on names: `-- 16k`, `-- rows`. Steps run inside the
//! pool, as a decoder's should: from outside each would begin and end with a thread asleep.

#[path = "support/interleaved.rs"]
mod interleaved;
mod support;

use interleaved::median;
use sdpa::{
    Alignment, Attention, BlockTable, CacheFormat, Dtype, Exec, Inputs, Int4, KeyScales, KvCache, KvShape, Outputs,
    PagePool, Pages, Plan, Precision, View, ViewMut, Workspace, probe,
};
use std::hint::black_box;
use std::time::Instant;

/// Query heads and key/value heads, as a model of eight billion parameters has them.
const HEADS: [usize; 2] = [32, 8];
const DIM: usize = 128;
const PAGE: usize = 16;
/// Layers with appends that make up a step.
const LAYERS: usize = 32;

/// Caches and tensors that are decoded.
struct Shape {
    name: &'static str,
    batch: usize,
    keys: usize,
    rounds: usize,
    /// Whether keys and values come from memory, or stay in cache between steps.
    from_memory: bool,
}

const SHAPES: &[Shape] = &[
    Shape { name: "128", batch: 1, keys: 128, rounds: 400, from_memory: false },
    Shape { name: "4k", batch: 1, keys: 4096, rounds: 21, from_memory: true },
    Shape { name: "16k", batch: 1, keys: 16384, rounds: 9, from_memory: true },
    Shape { name: "8 x 4k", batch: 8, keys: 4096, rounds: 7, from_memory: true },
];

/// Keys and values once in every form.
struct Forms {
    tensors: [Vec<f32>; 2],
    caches: Vec<(&'static str, KvCache)>,
    pools: [Vec<f32>; 2],
    packed_pools: Vec<(&'static str, PagePool)>,
    entries: Vec<u32>,
    lens: Vec<usize>,
}

impl Forms {
    fn new(batch: usize, keys: usize) -> Self {
        let heads = HEADS[1];
        let mut normal = support::normal(5);
        let mut fill = |n: usize| (0..n).map(|_| normal()).collect::<Vec<_>>();
        let n = batch * heads * keys * DIM;
        let (k, v) = (fill(n), fill(n));
        let shape = [batch, heads, keys, DIM];
        let caches = caches(&k, &v, shape);
        // Pages in an order that nobody foresees.
        let pages = batch * keys.div_ceil(PAGE);
        let mut entries: Vec<u32> = (0..pages as u32).collect();
        for i in (1..pages).rev() {
            entries.swap(i, i * 7919 % (i + 1));
        }
        let pool = |rows: &[f32]| {
            let mut pool = vec![0.0; pages * heads * PAGE * DIM];
            for (row, from) in rows.chunks_exact(DIM).enumerate() {
                let (b, h, j) = (row / keys / heads, row / keys % heads, row % keys);
                let page = entries[b * keys.div_ceil(PAGE) + j / PAGE] as usize;
                pool[((page * heads + h) * PAGE + j % PAGE) * DIM..][..DIM].copy_from_slice(from);
            }
            pool
        };
        let (pools, lens) = ([pool(&k), pool(&v)], vec![keys; batch]);
        let packed_pools = [
            ("pool, f32", CacheFormat::Elements(Dtype::F32)),
            ("pool, bf16", CacheFormat::Elements(Dtype::Bf16)),
            ("pool, f16", CacheFormat::Elements(Dtype::F16)),
            ("pool, int8", CacheFormat::Int8PerToken),
            ("pool, int4", CacheFormat::Int4(Int4::Symmetric)),
        ];
        let packed_pools = packed_pools.map(|(name, format)| {
            let mut pool =
                PagePool::new(pages, PAGE, KvShape { kv_heads: heads, head_dim: DIM, value_dim: DIM }, format)
                    .expect("a pool");
            let table = BlockTable { entries: &entries, lens: &lens };
            pool.append(table, view(&k, shape), view(&v, shape)).expect("they fit");
            (name, pool)
        });
        let packed_pools = packed_pools.into();
        Self { tensors: [k, v], caches, pools, packed_pools, entries, lens }
    }
}

/// The same keys and values in a cache of each format.
fn caches(k: &[f32], v: &[f32], shape: [usize; 4]) -> Vec<(&'static str, KvCache)> {
    let empty = || KvCache::new(shape[0], KvShape { kv_heads: shape[1], head_dim: DIM, value_dim: DIM });
    let typed = |dtype| empty().and_then(|cache| cache.dtype(dtype));
    let caches = [
        ("cache, f32", typed(Dtype::F32)),
        ("cache, bf16", typed(Dtype::Bf16)),
        ("cache, f16", typed(Dtype::F16)),
        ("cache, int8", empty().and_then(|cache| cache.int8(KeyScales::PerToken))),
        ("cache, int4", empty().and_then(|cache| cache.int4(Int4::Symmetric))),
    ];
    let filled = caches.map(|(name, cache)| {
        let mut cache = cache.expect("a cache");
        cache.append(view(k, shape), view(v, shape)).expect("they fit");
        (name, cache)
    });
    filled.into()
}

fn view(data: &[f32], shape: [usize; 4]) -> View<'_> {
    View::bhld(data, shape).expect("data of this shape")
}

/// In which order keys and heads lie.
#[derive(Clone, Copy)]
enum Layout {
    HeadsFirst,
    KeysFirst,
}

impl Layout {
    /// `[batch, heads, keys, dim]`.
    fn view(self, data: &[f32], shape: [usize; 4]) -> View<'_> {
        let [batch, heads, keys, dim] = shape;
        match self {
            Self::HeadsFirst => view(data, shape),
            Self::KeysFirst => View::blhd(data, [batch, keys, heads, dim]).expect("data of this shape"),
        }
    }
}

/// One way to have keys and values.
struct Case<'a> {
    name: &'static str,
    precision: Precision,
    inputs: Inputs<'a>,
    /// The slices they lie in, to be read from end to end; a cache's blocks are read as they come.
    slices: &'a [Vec<f32>],
}

/// A call, with room for what it writes.
struct Step<'a> {
    attention: Attention,
    inputs: Inputs<'a>,
    exec: Exec<'a>,
    /// Batch, heads and rows.
    rows: [usize; 3],
    out: Vec<f32>,
    workspace: Workspace,
}

impl<'a> Step<'a> {
    fn new(inputs: Inputs<'a>, rows: [usize; 3], precision: Precision, exec: Exec<'a>) -> Self {
        let attention = Attention::new().causal().align(Alignment::BottomRight).precision(precision);
        let out = vec![0.0; rows.iter().product::<usize>() * DIM];
        let mut step = Self { attention, inputs, exec, rows, out, workspace: Workspace::new() };
        step.run();
        step
    }

    fn run(&mut self) {
        let [batch, heads, rows] = self.rows;
        let out = ViewMut::bhld(&mut self.out, [batch, heads, rows, DIM]).expect("it fits");
        let problem = self.attention.problem(black_box(self.inputs), Outputs::new(out)).expect("the shapes fit");
        let plan = Plan::new(&problem, self.exec);
        problem.run(&plan, &mut self.workspace);
    }
}

/// Seconds that some work takes; keys and values come from memory, or stay in cache.
fn timed(shape: &Shape, flush: &[f32], work: &mut dyn FnMut()) -> f64 {
    if shape.from_memory {
        black_box(probe::read(flush));
    }
    let start = Instant::now();
    work();
    start.elapsed().as_secs_f64()
}

/// Medians of a step's and a plain read's time, in seconds.
fn time(shape: &Shape, case: &Case<'_>, exec: Exec, flush: &[f32]) -> [f64; 2] {
    let mut step = Step::new(case.inputs, [shape.batch, HEADS[0], 1], case.precision, exec);
    let source = case.inputs.key_values().expect("a good call");
    let rounds = if support::test_mode() { 1 } else { shape.rounds };
    let mut times = [Vec::new(), Vec::new()];
    for _ in 0..rounds {
        times[0].push(timed(shape, flush, &mut || step.run()));
        times[1].push(timed(shape, flush, &mut || match case.slices {
            [] => _ = black_box(probe::read_source(&source)),
            slices => slices.iter().for_each(|slice| _ = black_box(probe::read(slice))),
        }));
    }
    times.map(|mut times| median(&mut times))
}

/// Rows of a call of several. Heads: grouped as elsewhere, and a key/value head for each query head.
const DRAFT: usize = 4;
const ROW_HEADS: [[usize; 2]; 2] = [HEADS, [HEADS[1], HEADS[1]]];
const ROW_SHAPES: &[Shape] = &[
    Shape { name: "rows, 4k", batch: 1, keys: 4096, rounds: 41, from_memory: true },
    Shape { name: "rows, 16k", batch: 1, keys: 16384, rounds: 15, from_memory: true },
];

/// Times several rows in one call, as a share of the time of a call for each row, which read the cache each time.
fn several_rows(shape: &Shape, wanted: &dyn Fn(&str) -> bool, flush: &[f32]) {
    let keys = if support::test_mode() { shape.keys.min(300) } else { shape.keys };
    let mut normal = support::normal(5);
    let mut fill = |n: usize| (0..n).map(|_| normal()).collect::<Vec<_>>();
    let (k, v) = (fill(HEADS[1] * keys * DIM), fill(HEADS[1] * keys * DIM));
    let caches = caches(&k, &v, [1, HEADS[1], keys, DIM]);
    for heads in ROW_HEADS {
        let q = fill(heads[0] * DRAFT * DIM);
        for (threads, (name, cache)) in
            support::thread_counts().into_iter().flat_map(|n| caches.iter().map(move |case| (n, case)))
        {
            let name = format!("{}, {}/{} heads, {threads} thread(s), {name}", shape.name, heads[0], heads[1]);
            if !wanted(&name) {
                continue;
            }
            let step = |rows: usize| {
                let q = view(&q[..heads[0] * rows * DIM], [1, heads[0], rows, DIM]);
                Step::new(Inputs::cached(q, cache), [1, heads[0], rows], Precision::Exact, support::exec(threads))
            };
            let (mut one, mut several) = (step(1), step(DRAFT));
            let mut times = [Vec::new(), Vec::new()];
            for _ in 0..if support::test_mode() { 1 } else { shape.rounds } {
                let (one, several) = (&mut || one.run(), &mut || several.run());
                let [first, second] = rayon::scope(|_| [timed(shape, flush, one), timed(shape, flush, several)]);
                times[0].push(first);
                times[1].push(second);
            }
            let [one, several] = times.map(|mut times| median(&mut times));
            println!(
                "{name:50} one {:8.1} µs  {DRAFT} rows {:8.1} µs  {:.2} of one each",
                one * 1e6,
                several * 1e6,
                several / one / DRAFT as f64,
            );
        }
    }
}

fn decode(shape: &Shape, flush: &[f32]) {
    let keys = if support::test_mode() { shape.keys.min(300) } else { shape.keys };
    let forms = Forms::new(shape.batch, keys);
    let shape = &Shape { keys, ..*shape };
    let (kv_shape, q_shape) = ([shape.batch, HEADS[1], keys, DIM], [shape.batch, HEADS[0], 1, DIM]);
    let mut normal = support::normal(6);
    let q: Vec<f32> = (0..shape.batch * HEADS[0] * DIM).map(|_| normal()).collect();
    let q = view(&q, q_shape);
    let table = BlockTable { entries: &forms.entries, lens: &forms.lens };
    let mut cases: Vec<_> = forms
        .caches
        .iter()
        .map(|(name, cache)| Case { name, precision: Precision::Exact, inputs: Inputs::cached(q, cache), slices: &[] })
        .collect();
    let native = cases.iter().find(|case| case.name == "cache, bf16").map(|case| Case {
        name: "bf16 native",
        precision: Precision::Native,
        ..*case
    });
    cases.extend(native);
    cases.extend(forms.packed_pools.iter().map(|(name, pool)| {
        let pages = pool.pages(table).expect("a good table");
        Case { name, precision: Precision::Exact, inputs: Inputs::paged(q, pages), slices: &[] }
    }));
    let exact = |name, inputs, slices| Case { name, precision: Precision::Exact, inputs, slices };
    // The same memory, as if a head's keys lay together, and as if a key's heads did.
    for (layout, [tensors, pages]) in
        [(Layout::HeadsFirst, ["tensors", "pages of 16"]), (Layout::KeysFirst, ["tensors, blhd", "pages, blhd"])]
    {
        let [k, v] = forms.tensors.each_ref().map(|rows| layout.view(rows, kv_shape));
        cases.push(exact(tensors, Inputs::new(q, k, v), &forms.tensors));
        let [k, v] = forms.pools.each_ref().map(|pool| {
            let number = pool.len() / (HEADS[1] * PAGE * DIM);
            layout.view(pool, [number, HEADS[1], PAGE, DIM])
        });
        let pool = Pages::new(k, v, table).expect("a good table");
        cases.push(exact(pages, Inputs::paged(q, pool), &forms.pools));
    }
    for threads in support::thread_counts() {
        for case in &cases {
            let kv = case.inputs.key_values().expect("a good call");
            let bytes = (kv_shape[..3].iter().product::<usize>() * kv.token_bytes()) as f64;
            let [step, read] = rayon::scope(|_| time(shape, case, support::exec(threads), flush));
            println!(
                "{:8} {threads} thread(s)  {:13} {:9.1} µs  {:6.1} GB/s  {:5.0} % of one thread's plain read of it",
                shape.name,
                case.name,
                step * 1e6,
                bytes / step / 1e9,
                100.0 * read / step,
            );
        }
    }
}

/// Times appending a token to all layers.
fn append() {
    let shape = [1, HEADS[1], 1, DIM];
    let row = vec![0.5; HEADS[1] * DIM];
    let mut caches: Vec<_> = (0..LAYERS)
        .map(|_| KvCache::new(1, KvShape { kv_heads: HEADS[1], head_dim: DIM, value_dim: DIM }).expect("a cache"))
        .collect();
    let mut times: Vec<f64> = (0..if support::test_mode() { 2 } else { 200 })
        .map(|_| {
            let start = Instant::now();
            for cache in &mut caches {
                cache.append(view(&row, shape), view(&row, shape)).expect("it fits");
            }
            start.elapsed().as_secs_f64()
        })
        .collect();
    println!("append   one token, {LAYERS} layers: {:.1} µs", median(&mut times) * 1e6);
}

fn main() {
    support::print_machine();
    let filter: Vec<String> = std::env::args().skip(1).filter(|arg| !arg.starts_with('-')).collect();
    let flush = support::flush();
    append();
    let wanted = |name: &str| filter.is_empty() || filter.iter().any(|part| name.contains(part.as_str()));
    SHAPES.iter().filter(|shape| wanted(shape.name)).for_each(|shape| decode(shape, &flush));
    ROW_SHAPES.iter().for_each(|shape| several_rows(shape, &wanted, &flush));
}
