//! Latent heads (DeepSeek's multi-head latent attention, absorbed): 128 query heads on one key of 576 elements, of which 512
//! are the value. A step over a past, as a share of the machine's peak, from tensors and from caches; beside it, heads of 128.
//! `cargo bench --bench latent`, with lengths: `-- 4096`.

#[path = "support/interleaved.rs"]
mod interleaved;
mod support;

use interleaved::{medians, random};
use sdpa::{
    Alignment, Attention, Dtype, Error, Exec, Inputs, Isa, KvCache, KvShape, Outputs, Plan, View, ViewMut, Workspace,
    probe,
};

const HEADS: usize = 128;
const ROUNDS: usize = 9;

fn view(data: &[f32], heads: usize, rows: usize) -> View<'_> {
    View::bhld(data, [1, heads, rows, data.len() / heads / rows]).expect("as many as the shape has")
}

/// A step that attends over a source, and its memory.
struct Step<'a> {
    name: &'static str,
    inputs: Inputs<'a>,
    value_dim: usize,
    out: Vec<f32>,
    workspace: Workspace,
}

impl<'a> Step<'a> {
    fn new(name: &'static str, inputs: Inputs<'a>, value_dim: usize) -> Self {
        Self { name, inputs, value_dim, out: vec![0.0; HEADS * value_dim], workspace: Workspace::new() }
    }

    fn run(&mut self, exec: Exec) {
        let out = ViewMut::bhld(&mut self.out, [1, HEADS, 1, self.value_dim]).expect("it fits");
        let attention = Attention::new().causal().align(Alignment::BottomRight);
        let problem = attention.problem(self.inputs, Outputs::new(out)).expect("a good call");
        let plan = Plan::new(&problem, exec);
        problem.run(&plan, &mut self.workspace);
    }
}

/// A cache with these tokens.
fn filled(cache: Result<KvCache, Error>, k: View<'_>, v: View<'_>) -> KvCache {
    let mut cache = cache.expect("a cache");
    cache.append(k, v).expect("they fit");
    cache
}

fn steps(keys: usize, threads: usize) {
    let (rows, q) = (random(keys * 576, 1), random(HEADS * 576, 2));
    let (heads, narrow) = ([random(keys * 128, 3), random(keys * 128, 4)], random(HEADS * 128, 5));
    let (k, q) = (view(&rows, 1, keys), view(&q, HEADS, 1));
    let v = k.columns(0..512).expect("it has these");
    let stored = |dtype| {
        KvCache::new(1, KvShape { kv_heads: 1, head_dim: 576, value_dim: 512 }).and_then(|cache| cache.dtype(dtype))
    };
    let [floats, halves] = [Dtype::F32, Dtype::Bf16].map(|dtype| move || stored(dtype));
    let latent = [floats(), halves()].map(|cache| cache.and_then(KvCache::latent));
    let [a, b] = latent.map(|cache| filled(cache, k, v));
    let [c, d] = [floats(), halves()].map(|cache| filled(cache, k, v));
    let caches = [a, b, c, d];
    let [a, b, c, d] = caches.each_ref().map(|cache| Inputs::cached(q, cache));
    let [hk, hv] = heads.each_ref().map(|rows| view(rows, 1, keys));
    let mut steps = [
        Step::new("latent cache, f32", a, 512),
        Step::new("latent cache, bf16", b, 512),
        Step::new("cache, f32", c, 512),
        Step::new("cache, bf16", d, 512),
        Step::new("tensors, f32", Inputs::new(q, k, v), 512),
        Step::new("heads of 128", Inputs::new(view(&narrow, HEADS, 1), hk, hv), 128),
    ];
    let exec = Exec::default().threads(threads);
    let rounds = if support::test_mode() { 1 } else { ROUNDS };
    let seconds = rayon::scope(|_| {
        let [a, b, c, d, e, f] = &mut steps;
        medians(
            rounds,
            [
                &mut || a.run(exec),
                &mut || b.run(exec),
                &mut || c.run(exec),
                &mut || d.run(exec),
                &mut || e.run(exec),
                &mut || f.run(exec),
            ],
        )
    });
    let peak = probe::peak_flops(Isa::detect()) * threads as f64;
    for (step, seconds) in steps.iter().zip(seconds) {
        let [.., head_dim] = step.inputs.queries().shape();
        let flops = 2.0 * (HEADS * keys * (head_dim + step.value_dim)) as f64;
        println!(
            "{keys:6} keys  {threads} thread(s)  {:18} {:8.2} ms  {:3.0} % of peak",
            step.name,
            seconds * 1e3,
            100.0 * flops / seconds / peak
        );
    }
}

fn main() {
    support::print_machine();
    let lengths: Vec<usize> = std::env::args().skip(1).filter_map(|arg| arg.parse().ok()).collect();
    let lengths = if lengths.is_empty() { vec![4096] } else { lengths };
    for keys in if support::test_mode() { vec![300] } else { lengths } {
        for threads in support::thread_counts() {
            steps(keys, threads);
        }
    }
}
