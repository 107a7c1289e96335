//! Fused against unfused against naive attention, on shapes that people run, on one thread and on all.
//!
//! Throughput counts useful floating-point operations as elements: read `Gelem/s` as GFLOP/s.

mod support;

use criterion::{BenchmarkGroup, BenchmarkId, Criterion, SamplingMode, Throughput, measurement::WallTime};
use sdpa::{Exec, Isa, Plan, Workspace, naive};
use std::hint::black_box;
use std::time::Duration;
use support::{Tensors, WORKLOADS, Workload};

/// Above this the naive path would take longer than all the others together.
const NAIVE_FLOPS: u64 = 1_000_000_000;

/// Prepares a group for a workload: what counts as throughput, and how often it can be run.
fn prepare(group: &mut BenchmarkGroup<'_, WallTime>, workload: &Workload) {
    let flops = workload.flops();
    group.throughput(Throughput::Elements(flops));
    group.warm_up_time(Duration::from_secs(1)).measurement_time(Duration::from_secs(3));
    if flops > 5_000_000_000 {
        group.sample_size(10).sampling_mode(SamplingMode::Flat);
    } else {
        group.sample_size(40).sampling_mode(SamplingMode::Auto);
    }
}

fn bench_fused(group: &mut BenchmarkGroup<'_, WallTime>, id: &str, tensors: &mut Tensors, exec: Exec) {
    let attention = tensors.workload.attention();
    let mut workspace = Workspace::new();
    let (inputs, outputs) = tensors.bind();
    let plan = Plan::new(&attention.problem(inputs, outputs).expect("the shapes fit"), exec);
    let mut run = |tensors: &mut Tensors| {
        let (inputs, outputs) = tensors.bind();
        attention.problem(black_box(inputs), outputs).expect("the shapes fit").run(&plan, &mut workspace);
    };
    tensors.check(id, &mut run);
    group.bench_function(BenchmarkId::new(id, tensors.workload.name), |b| b.iter(|| run(tensors)));
}

fn bench_unfused(group: &mut BenchmarkGroup<'_, WallTime>, id: &str, tensors: &mut Tensors, exec: Exec) {
    let attention = tensors.workload.attention();
    let run = |tensors: &mut Tensors| {
        let (inputs, outputs) = tensors.bind();
        sdpa_unfused::attention(&attention, black_box(inputs), outputs, exec).expect("the shapes fit");
    };
    tensors.check(id, run);
    group.bench_function(BenchmarkId::new(id, tensors.workload.name), |b| b.iter(|| run(tensors)));
}

fn bench_naive(group: &mut BenchmarkGroup<'_, WallTime>, tensors: &mut Tensors) {
    let attention = tensors.workload.attention();
    group.sample_size(10).sampling_mode(SamplingMode::Flat);
    let name = tensors.workload.name;
    group.bench_function(BenchmarkId::new("naive", name), |b| {
        b.iter(|| naive::attention(&attention, &black_box(tensors.bind().0)).expect("the shapes fit"))
    });
}

/// How much does each instruction set give?
fn instruction_sets(c: &mut Criterion) {
    let workload = WORKLOADS[0].for_mode();
    let mut tensors = workload.tensors();
    let mut group = c.benchmark_group("isa");
    prepare(&mut group, &workload);
    for isa in Isa::available() {
        bench_fused(&mut group, isa.name(), &mut tensors, Exec::serial().isa(isa));
    }
    group.finish();
}

/// How much does fusing give, and how much threads?
fn paths(c: &mut Criterion) {
    for threads in support::thread_counts() {
        let mut group = c.benchmark_group(format!("{threads}-thread"));
        for workload in WORKLOADS.iter().copied().map(Workload::for_mode) {
            let mut tensors = workload.tensors();
            prepare(&mut group, &workload);
            let exec = support::exec(threads);
            bench_fused(&mut group, "fused", &mut tensors, exec);
            if workload.softcap.is_none() {
                bench_unfused(&mut group, "unfused", &mut tensors, exec);
            }
            if threads == 1
                && workload.flops() <= NAIVE_FLOPS
                && (!support::test_mode() || workload.flops() < 50_000_000)
            {
                bench_naive(&mut group, &mut tensors);
            }
        }
        group.finish();
    }
}

fn main() {
    support::print_machine();
    let mut criterion = Criterion::default().configure_from_args();
    instruction_sets(&mut criterion);
    paths(&mut criterion);
    criterion.final_summary();
}
