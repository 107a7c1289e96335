//! Choosing keys: index scores of a step and of a prompt, as a share of the machine's peak, and lists of the largest scores beside
//! a plain read of them. `cargo bench --bench selection`, with a filter on groups: `-- index`, `-- top`.

#[path = "support/interleaved.rs"]
mod interleaved;
mod support;

use interleaved::random;
use sdpa::{
    Alignment, Attention, Bf16, Dtype, Exec, Inputs, KeyScales, KvCache, KvShape, Precision, SelectedKeys, TopK, View,
    ViewMut, Workspace, probe, top_k,
};
use std::hint::black_box;
use std::time::{Duration, Instant};

/// Number of rounds, in each of which every case has a burst of runs.
const ROUNDS: usize = 9;
const BURST: Duration = Duration::from_millis(40);
/// Index heads of DeepSeek V3.2, on one key head.
const HEADS: usize = 64;
const DIM: usize = 128;

fn main() {
    let wanted: Vec<String> = std::env::args().skip(1).filter(|word| !word.starts_with("--")).collect();
    let groups: [(&str, fn()); 2] = [("index scores", index_scores), ("top k", largest)];
    for (name, group) in groups {
        if wanted.is_empty() || wanted.iter().any(|word| name.contains(word.as_str())) {
            group();
        }
    }
}

/// Index scores of rows at the end of their keys, on one thread.
fn index_scores() {
    let exec = Exec::serial();
    let isa = exec.instruction_set();
    let floats = probe::peak_flops(isa);
    println!("index scores, {HEADS} heads of {DIM}, {isa}: peak of FMAs {:.1} GFLOP/s", floats / 1e9);
    for [rows, keys] in [[1, 4096], [1, 131_072], [4, 16_384], [64, 4096]] {
        index_scores_of(rows, keys, exec, floats);
    }
}

fn index_scores_of(rows: usize, keys: usize, exec: Exec, floats: f64) {
    let (q, k) = (random(HEADS * rows * DIM, 1), random(keys * DIM, 2));
    let weights = random(HEADS * rows, 3);
    let short = |x: &[f32]| x.iter().map(|&x| Bf16::from_f32(x)).collect::<Vec<_>>();
    let (short_q, short_k) = (short(&q), short(&k));
    let shapes = [[1, HEADS, rows, DIM], [1, 1, keys, DIM]];
    let view = |x, shape| View::bhld(x, shape).expect("data of this shape");
    let (q, k) = (view(&q, shapes[0]), view(&k, shapes[1]));
    let short_k = View::bhld(&short_k, shapes[1]).expect("data of this shape");
    let short_q = View::bhld(&short_q, shapes[0]).expect("data of this shape");
    let empty = || KvCache::new(1, KvShape { kv_heads: 1, head_dim: DIM, value_dim: 1 }).expect("a cache");
    let ones = vec![1.0; keys];
    let caches = [empty().dtype(Dtype::Bf16), empty().int8(KeyScales::PerToken)].map(|cache| {
        let mut cache = cache.expect("a format");
        cache.append(k, view(&ones, [1, 1, keys, 1])).expect("it fits");
        cache
    });
    let cases = [
        ("f32", Inputs::new(q, k, k), Precision::Exact),
        ("bf16, exact", Inputs::new(short_q, short_k, short_k), Precision::Exact),
        ("bf16, native", Inputs::new(short_q, short_k, short_k), Precision::Native),
        ("cache, bf16, native", Inputs::cached(short_q, &caches[0]), Precision::Native),
        ("cache, int8", Inputs::cached(q, &caches[1]), Precision::Exact),
    ];
    let mut out = vec![0.0; rows * keys];
    for (name, inputs, precision) in cases {
        let attention = Attention::new().causal().align(Alignment::BottomRight).precision(precision);
        let indexer = attention.indexer(inputs, view(&weights, [1, HEADS, rows, 1])).expect("a good call");
        let mut workspace = Workspace::new();
        let [seconds] = fastest([&mut || {
            let out = ViewMut::bhld(&mut out, [1, 1, rows, keys]).expect("it fits");
            indexer.scores(out, exec, &mut workspace).expect("memory");
        }]);
        let seen: usize = (0..rows).map(|i| keys - rows + 1 + i).sum();
        let flops = 2.0 * (HEADS * DIM * seen) as f64 / seconds;
        println!(
            "  {rows} × {keys}, {name:<20} {:9.3} ms  {:7.1} GFLOP/s  {:.2} of FMAs",
            seconds * 1e3,
            flops / 1e9,
            flops / floats
        );
    }
}

/// Lists of the largest of given scores, beside a read of the scores.
fn largest() {
    let exec = Exec::serial();
    println!("top k, {}, beside a read of the scores", exec.instruction_set());
    for [rows, keys, k] in
        [[1, 4096, 512], [1, 32_768, 2048], [1, 131_072, 2048], [8, 131_072, 2048], [1, 131_072, 65_536]]
    {
        let scores = random(rows * keys, 4);
        let view = View::bhld(&scores, [1, 1, rows, keys]).expect("data of this shape");
        let (mut workspace, mut selected) = (Workspace::new(), SelectedKeys::new());
        let [chosen, read] = fastest([
            &mut || top_k(view, &TopK::new(k), exec, &mut workspace, &mut selected).expect("a good rule"),
            &mut || assert!(!probe::read(black_box(&scores)) || !scores.is_empty()),
        ]);
        println!(
            "  {k} of {keys}, {rows} row(s)  {:8.1} µs  read {:8.1} µs  {:.2}",
            chosen * 1e6,
            read * 1e6,
            chosen / read
        );
    }
}

/// Least seconds of each case, in turn: what else runs on the machine only adds to them.
fn fastest<const N: usize>(mut cases: [&mut dyn FnMut(); N]) -> [f64; N] {
    let mut seconds = [f64::INFINITY; N];
    for _ in 0..ROUNDS {
        for (case, seconds) in cases.iter_mut().zip(&mut seconds) {
            let burst = Instant::now();
            while burst.elapsed() < BURST {
                let start = Instant::now();
                case();
                *seconds = seconds.min(start.elapsed().as_secs_f64());
            }
        }
    }
    seconds
}
