//! Workers: what the queue, the threads and waking them cost. `taskset -c 0,1 cargo bench --bench workers`, with a filter on
//! names: `-- bert`, `-- steps`.
//!
//! Tasks: 64 workers on the cores that there are, against one worker a core, on one queue of tiny tasks. Both do the same
//! work. Workloads: `ThreadPool` against rayon, on all cores, calls from within its pool. Steps: work of some microseconds on
//! one worker, and in halves on two, at once one after the other or with pauses in which threads fall asleep.

#[path = "support/interleaved.rs"]
mod interleaved;
mod support;

use interleaved::{median, medians, random};
use sdpa::{Attention, CurrentPool, Exec, Executor, Inputs, Outputs, Plan, Run, ThreadPool, View, ViewMut, Workspace};
use std::cell::RefCell;
use std::time::{Duration, Instant};
use support::{Tensors, WORKLOADS, Workload};

const WORKERS: usize = 64;
/// Rows and keys of a task, and their length: one or two microseconds.
const ROWS: usize = 16;
const DIM: usize = 16;
const ROUNDS: usize = 15;

fn pool(threads: usize) -> rayon::ThreadPool {
    rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a pool")
}

/// Runs a batch on a pool's threads; each entry is a task.
fn run(pool: &rayon::ThreadPool, x: &[f32], out: &mut [f32], workspace: &mut Workspace) {
    let shape = [x.len() / ROWS / DIM, 1, ROWS, DIM];
    let x = View::bhld(x, shape).expect("data of this shape");
    pool.install(|| {
        let outputs = Outputs::new(ViewMut::bhld(out, shape).expect("data of this shape"));
        let problem = Attention::new().problem(Inputs::new(x, x, x), outputs).expect("a good call");
        let plan = Plan::new(&problem, Exec::default().isa(support::isa()));
        problem.run(&plan, workspace);
    });
}

/// Many workers on one queue of tiny tasks.
fn tasks(cores: usize) {
    let (few, many) = (pool(cores), pool(WORKERS));
    // As many operations as 64 workers pay for.
    for batch in if support::test_mode() { [64, 128] } else { [1 << 14, 1 << 16] } {
        let x = random(batch * ROWS * DIM, 1);
        let mut outs = [vec![0.0; x.len()], vec![0.0; x.len()]];
        let [first, second] = &mut outs;
        let [a, b] = &mut [const { Workspace::new() }; 2];
        let rounds = if support::test_mode() { 1 } else { ROUNDS };
        let [few, many] =
            medians(rounds, [&mut || run(&few, &x, first, a), &mut || run(&many, &x, second, b)]).map(|s| s * 1e3);
        assert_eq!(outs[0], outs[1]);
        println!("{batch:6} tasks  {cores} workers {few:7.3} ms  {WORKERS} workers {many:7.3} ms  ({:.3})", many / few);
    }
}

/// Computes a workload on an executor.
fn call(tensors: &mut Tensors, executor: &dyn Executor, workspace: &mut Workspace) {
    let attention = tensors.workload.attention();
    let (inputs, outputs) = tensors.bind();
    let problem = attention.problem(inputs, outputs).expect("a good call");
    let plan = Plan::new(&problem, Exec::on(executor));
    problem.run_with(&plan, workspace, Run::new().executor(executor)).expect("nothing stops it");
}

/// The library's pool against rayon's on a workload.
fn workload(workload: Workload, threads: &ThreadPool, rayon: &rayon::ThreadPool) {
    // One memory for both: where it lies matters more than the threads.
    let (mut tensors, mut workspace) = (workload.tensors(), Workspace::new());
    tensors.check("the library's pool", |tensors| call(tensors, threads, &mut workspace));
    let shared = RefCell::new((tensors, workspace));
    let rounds = if support::test_mode() { 1 } else { ROUNDS };
    let on_ours = || {
        let (tensors, workspace) = &mut *shared.borrow_mut();
        call(tensors, threads, workspace);
    };
    let on_rayon = || {
        let (tensors, workspace) = &mut *shared.borrow_mut();
        rayon.install(|| call(tensors, &CurrentPool, workspace));
    };
    // In both orders: what is run after the other may find a core that is warmer, by a few percent.
    let times = medians(rounds, [&mut || on_ours(), &mut || on_rayon(), &mut || on_rayon(), &mut || on_ours()]);
    let [ours, rayons] = [times[0] + times[3], times[1] + times[2]].map(|s| s / 2.0 * 1e3);
    println!("{:20} ThreadPool {ours:8.3} ms  rayon {rayons:8.3} ms  ({:.3})", workload.name, ours / rayons);
}

/// Arithmetic, `times` times.
fn work(times: usize) {
    let sum = (0..times).fold(1.0f64, |x, _| x * 1.000_000_1 + 0.1);
    std::hint::black_box(sum);
}

/// Median seconds of a step, each after a pause in which the calling thread is busy.
fn step(pause: Duration, steps: usize, step: &mut dyn FnMut()) -> f64 {
    let mut one = || {
        let start = Instant::now();
        while start.elapsed() < pause {
            std::hint::spin_loop();
        }
        let start = Instant::now();
        step();
        start.elapsed().as_secs_f64()
    };
    median(&mut (0..steps).map(|_| one()).collect::<Vec<_>>())
}

/// Steps of some microseconds on one worker and on two.
fn steps(threads: &ThreadPool, rayon: &rayon::ThreadPool) {
    let count = |micros: u64| if support::test_mode() { 2 } else { (100_000 / micros) as usize };
    let unit = step(Duration::ZERO, count(100), &mut || work(100_000)) / 100_000.0;
    for micros in [5, 20, 100] {
        let (whole, half) = ((micros as f64 * 1e-6 / unit) as usize, (micros as f64 * 5e-7 / unit) as usize);
        for pause in [0, 20, 60, 500].map(Duration::from_micros) {
            let steps = count(micros + pause.as_micros() as u64);
            let one = step(pause, steps, &mut || work(whole));
            let ours = step(pause, steps, &mut || threads.run(2, &|_| work(half)));
            let rayons = rayon.install(|| step(pause, steps, &mut || CurrentPool.run(2, &|_| work(half))));
            let [one, ours, rayons] = [one, ours, rayons].map(|s| s * 1e6);
            println!(
                "step of {micros:3} µs, pause {pause:5.0?}: one {one:6.1}  ThreadPool {ours:6.1}  rayon {rayons:6.1}"
            );
        }
    }
}

fn main() {
    support::print_machine();
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let filter: Vec<String> = std::env::args().skip(1).filter(|arg| !arg.starts_with('-')).collect();
    let wanted = |name: &str| filter.is_empty() || filter.iter().any(|part| name.contains(part.as_str()));
    if wanted("tasks") {
        tasks(cores);
    }
    let (threads, rayon) = (ThreadPool::new(cores).expect("a thread a core"), pool(cores));
    for named in WORKLOADS.iter().copied().filter(|named| wanted(named.name)) {
        workload(named.for_mode(), &threads, &rayon);
    }
    if wanted("steps") {
        steps(&threads, &rayon);
    }
}
