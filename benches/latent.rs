//! Latent heads (DeepSeek's multi-head latent attention, absorbed): 128 query heads on one key of 576 elements; the first 512 are
//! the value. A step over a past, as a share of the machine's peak, from tensors and from caches; beside it, heads of 128. `cargo
//! bench --bench latent`, with lengths: `-- 4096`.

#[path = "support/interleaved.rs"]
mod interleaved;
mod support;

use interleaved::{medians, random};
use sdpa::{
    Alignment, Attention, Dtype, Error, Exec, Inputs, Int4, KeyScales, KvCache, KvShape, Outputs, Plan, View, ViewMut,
    Workspace, probe,
};

const HEADS: usize = 128;
const ROUNDS: usize = 9;

fn view(data: &[f32], heads: usize, rows: usize) -> View<'_> {
    View::bhld(data, [1, heads, rows, data.len() / heads / rows]).expect("data of this shape")
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
    let empty = || KvCache::new(1, KvShape { kv_heads: 1, head_dim: 576, value_dim: 512 });
    let of_type = |dtype| move || empty().and_then(|cache| cache.dtype(dtype));
    let [floats, halves] = [Dtype::F32, Dtype::Bf16].map(of_type);
    let bytes = || empty().and_then(|cache| cache.int8(KeyScales::PerToken));
    let nibbles = || empty().and_then(|cache| cache.int4(Int4::Symmetric));
    let caches = [
        ("latent cache, f32", floats().and_then(KvCache::latent)),
        ("latent cache, bf16", halves().and_then(KvCache::latent)),
        ("latent cache, int8", bytes().and_then(KvCache::latent)),
        ("latent cache, int4", nibbles().and_then(KvCache::latent)),
        ("cache, f32", floats()),
        ("cache, bf16", halves()),
        ("cache, int8", bytes()),
        ("cache, int4", nibbles()),
    ]
    .map(|(name, cache)| (name, filled(cache, k, v)));
    let [a, b, c, d, e, f, g, h] =
        caches.each_ref().map(|(name, cache)| Step::new(name, Inputs::cached(q, cache), 512));
    let [hk, hv] = heads.each_ref().map(|rows| view(rows, 1, keys));
    let tensors = Step::new("tensors, f32", Inputs::new(q, k, v), 512);
    let whole_heads = Step::new("heads of 128", Inputs::new(view(&narrow, HEADS, 1), hk, hv), 128);
    let mut steps = [a, b, c, d, e, f, g, h, tensors, whole_heads];
    let exec = support::exec(threads);
    let rounds = if support::test_mode() { 1 } else { ROUNDS };
    let seconds = rayon::scope(|_| {
        let mut runs = steps.each_mut().map(|step| || step.run(exec));
        medians(rounds, runs.each_mut().map(|run| run as &mut dyn FnMut()))
    });
    let peak = probe::peak_flops(support::isa()) * threads as f64;
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
