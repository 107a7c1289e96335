//! The steps of the fused loop, and the backward pass's sums over rows, one at a time, on each instruction set: 96 rows against
//! a block of 256 keys.
//!
//! Throughput is floating-point operations for scores, values, key sums and the tile (`Gelem/s` is GFLOP/s), exponentials for
//! softmax and exp, bytes read for packing.

mod support;

use criterion::{BenchmarkId, Criterion, Throughput};
use sdpa::Isa;
use sdpa::probe::{self, Bench, Step};
use std::hint::black_box;
use std::time::Duration;

const ROWS: usize = 96;
const KEYS: usize = 256;
const HEAD_DIMS: [usize; 2] = [64, 128];
const FORWARD: [(&str, Step); 4] =
    [("pack", Step::Pack), ("scores", Step::Scores), ("softmax", Step::Softmax), ("values", Step::Values)];
/// Steps of the backward pass that the forward pass has not.
const BACKWARD: [(&str, Step); 1] = [("key_sums", Step::KeySums)];

/// Runs all steps and holds sampled rows against sums in f64.
///
/// # Panics
/// If one is off by more than rounding explains.
fn checked(isa: Isa, head_dim: usize) -> Bench {
    let mut normal = support::normal(7);
    // Queries scaled as attention scales them, so that weights are not all on one key.
    let (mut filled, scale) = (0, 1.0 / (head_dim as f32).sqrt());
    let mut bench = Bench::new(ROWS, KEYS, head_dim, || {
        filled += 1;
        normal() * if filled <= ROWS * head_dim { scale } else { 1.0 }
    });
    let sampled = [0, 1, 50, ROWS - 1];
    // Weights take the place of scores.
    let mut after = |steps: &[Step]| {
        steps.iter().for_each(|&step| bench.run(isa, step));
        sampled.map(|row| bench.scores(row).to_vec())
    };
    let found = after(&[Step::Pack, Step::Scores]);
    let weights = after(&[Step::Softmax]);
    bench.run(isa, Step::Values);
    let close = |what: &str, got: f32, want: f64, size: f64| {
        assert!((f64::from(got) - want).abs() <= 2e-6 * size, "{what}, {isa}: {got}, but f64 says {want}");
    };
    for (row, (found, weights)) in sampled.into_iter().zip(found.iter().zip(&weights)) {
        let dot = |[q, k, _]: [&[f32]; 3]| q.iter().zip(k).map(|(&q, &k)| f64::from(q) * f64::from(k)).sum::<f64>();
        let scores: Vec<f64> = (0..KEYS).map(|j| dot(bench.inputs(row, j))).collect();
        let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        for (j, &score) in scores.iter().enumerate() {
            close("score", found[j], score, 4.0);
            close("weight", weights[j], (score - max).exp(), 4.0);
        }
        for (d, &got) in bench.out(row).iter().enumerate() {
            let terms = || (0..KEYS).map(|j| (scores[j] - max).exp() * f64::from(bench.inputs(row, j)[2][d]));
            close("output", got, terms().sum(), terms().map(f64::abs).sum());
        }
    }
    bench.run(isa, Step::KeySums);
    for j in [0, 1, 100, KEYS - 1] {
        let weight = |row: usize| f64::from(bench.scores(row)[j]);
        for (d, &got) in bench.key_sums(j).iter().enumerate() {
            let terms = || (0..ROWS).map(|row| weight(row) * f64::from(bench.inputs(row, j)[0][d]));
            close("key sum", got, terms().sum(), terms().map(f64::abs).sum());
        }
    }
    bench
}

fn steps(c: &mut Criterion) {
    let work = (2 * ROWS * KEYS) as u64;
    for (name, step) in FORWARD.into_iter().chain(BACKWARD) {
        let mut group = c.benchmark_group(name);
        group.warm_up_time(Duration::from_millis(500)).measurement_time(Duration::from_secs(2));
        for head_dim in HEAD_DIMS {
            group.throughput(match step {
                Step::Pack => Throughput::Bytes((KEYS * head_dim * size_of::<f32>()) as u64),
                Step::Softmax => Throughput::Elements((ROWS * KEYS) as u64),
                Step::Scores | Step::Values | Step::KeySums => Throughput::Elements(work * head_dim as u64),
            });
            for isa in Isa::available() {
                let mut bench = checked(isa, head_dim);
                group.bench_function(BenchmarkId::new(isa.name(), format!("d{head_dim}")), |b| {
                    b.iter(|| black_box(&mut bench).run(isa, step))
                });
            }
        }
        group.finish();
    }
}

/// All steps in turn: what a group of rows and a block of keys cost in the fused loop.
fn tile(c: &mut Criterion) {
    let mut group = c.benchmark_group("tile");
    group.warm_up_time(Duration::from_millis(500)).measurement_time(Duration::from_secs(2));
    for head_dim in HEAD_DIMS {
        group.throughput(Throughput::Elements((4 * ROWS * KEYS * head_dim) as u64));
        for isa in Isa::available() {
            let mut bench = checked(isa, head_dim);
            group.bench_function(BenchmarkId::new(isa.name(), format!("d{head_dim}")), |b| {
                b.iter(|| FORWARD.iter().for_each(|&(_, step)| black_box(&mut bench).run(isa, step)))
            });
        }
    }
    group.finish();
}

fn exp(c: &mut Criterion) {
    const N: usize = 4096;
    let mut normal = support::normal(9);
    let xs: Vec<f32> = (0..N).map(|_| -normal().abs() * 4.0).collect();
    let mut group = c.benchmark_group("exp");
    group.warm_up_time(Duration::from_millis(500)).measurement_time(Duration::from_secs(2));
    group.throughput(Throughput::Elements(N as u64));
    for isa in Isa::available() {
        let mut out = xs.clone();
        probe::exp(isa, &mut out);
        for (&x, &y) in xs.iter().zip(&out) {
            let want = f64::from(x).exp();
            assert!((f64::from(y) - want).abs() <= 1.2e-7 * want, "exp({x}), {isa}: {y}, but f64 says {want}");
        }
        group.bench_function(BenchmarkId::new(isa.name(), N), |b| {
            b.iter(|| {
                out.copy_from_slice(black_box(&xs));
                probe::exp(isa, &mut out);
                black_box(out[0])
            })
        });
    }
    group.finish();
}

fn main() {
    support::print_machine();
    let mut criterion = Criterion::default().configure_from_args();
    steps(&mut criterion);
    exp(&mut criterion);
    tile(&mut criterion);
    criterion.final_summary();
}
