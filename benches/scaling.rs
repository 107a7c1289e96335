//! Threads: how many times faster a call is on 2, 4, 8, … threads than on one, beside what callers that share nothing reach on
//! the same number of threads: each runs the same call alone, on separate tensors. Calls are made from within rayon's pool.
//! `cargo bench --bench scaling`, with a filter on names: `-- long`.
//!
//! The callers fall short of the number of threads, too, where cores share memory's bandwidth, power or execution units: the
//! second figure is what the crate answers for.

#[path = "support/interleaved.rs"]
mod interleaved;
mod support;

use interleaved::median;
use sdpa::{Exec, Plan, Problem, Shape, Workspace};
use std::sync::Barrier;
use std::time::{Duration, Instant};
use support::{Tensors, WORKLOADS, Workload};

const NAMES: [&str; 9] = [
    "tiny-16",
    "bert-512",
    "bert-b8-128",
    "minilm-b32-128",
    "gpt2-1024-causal",
    "long-4096",
    "llama-2048-gqa",
    "decode-4k",
    "decode-16k",
];
const ROUNDS: usize = 7;
/// Time that a case runs in each round, at least once.
const BURST: Duration = Duration::from_millis(40);

/// One head of 4096 rows: nothing but rows to share out.
fn one_head() -> Workload {
    let long = WORKLOADS.iter().find(|workload| workload.name == "long-4096").expect("a named workload");
    Workload { name: "one-head-4096", shape: Shape { heads: 1, kv_heads: 1, ..long.shape }, ..*long }
}

/// Returns the call of a workload's tensors.
fn problem(tensors: &mut Tensors) -> Problem<'_> {
    let attention = tensors.workload.attention();
    let (inputs, outputs) = tensors.bind();
    attention.problem(inputs, outputs).expect("a good call")
}

/// A call, its tensors and the memory that is kept between runs.
struct Caller {
    tensors: Tensors,
    workspace: Workspace,
}

impl Caller {
    fn new(workload: Workload) -> Self {
        Self { tensors: workload.tensors(), workspace: Workspace::new() }
    }

    fn call(&mut self, exec: Exec) {
        let problem = problem(&mut self.tensors);
        let plan = Plan::new(&problem, exec);
        problem.run(&plan, &mut self.workspace);
    }

    /// Returns the seconds of a call from within the pool, by the calls that a burst has time for.
    fn burst_in_pool(&mut self, exec: Exec) -> f64 {
        rayon::scope(|_| self.burst(exec))
    }

    /// Returns the seconds of a call, by the calls that a burst has time for.
    fn burst(&mut self, exec: Exec) -> f64 {
        let (start, mut calls) = (Instant::now(), 0);
        loop {
            self.call(exec);
            calls += 1;
            let elapsed = start.elapsed();
            if elapsed > BURST || support::test_mode() {
                return elapsed.as_secs_f64() / f64::from(calls);
            }
        }
    }
}

/// Returns the seconds that a call takes, on average, where callers that share nothing make calls of one thread.
fn apart(callers: &mut [Caller]) -> f64 {
    let barrier = Barrier::new(callers.len());
    let rates = std::thread::scope(|scope| {
        let threads = callers.iter_mut().map(|caller| {
            scope.spawn(|| {
                barrier.wait();
                1.0 / caller.burst(Exec::serial())
            })
        });
        let threads: Vec<_> = threads.collect();
        threads.into_iter().map(|thread| thread.join().expect("a good call")).sum::<f64>()
    });
    1.0 / rates
}

/// Efficiency of the work's division among threads, as the plan has it.
fn planned(caller: &mut Caller, threads: usize) -> f64 {
    let problem = problem(&mut caller.tensors);
    let busy = Plan::new(&problem, support::exec(threads)).balance(&problem, threads);
    busy.iter().sum::<f64>() / threads as f64
}

fn compare(workload: Workload, counts: &[usize]) {
    let most = counts.last().copied().unwrap_or(1);
    let mut callers: Vec<_> = (0..most).map(|_| Caller::new(workload)).collect();
    let mut seconds = vec![[vec![], vec![]]; counts.len()];
    // A round before those that count: memory is touched, threads are started.
    for round in 0..if support::test_mode() { 1 } else { ROUNDS + 1 } {
        for (&threads, [together, alone]) in counts.iter().zip(&mut seconds) {
            let times = [callers[0].burst_in_pool(support::exec(threads)), apart(&mut callers[..threads])];
            if round > 0 || support::test_mode() {
                together.push(times[0]);
                alone.push(times[1]);
            }
        }
    }
    let one = median(&mut seconds[0][0]);
    print!("{:16} {:9.3} ms", workload.name, one * 1e3);
    for (&threads, [together, alone]) in counts.iter().zip(&mut seconds).skip(1) {
        let (together, alone) = (median(together), median(alone));
        let (speed, share) = (one / together, 100.0 * alone / together);
        let planned = 100.0 * planned(&mut callers[0], threads);
        print!("  {threads:3}: {speed:5.2} × ({share:3.0} % of {threads} callers, planned {planned:3.0} %)");
    }
    println!();
}

fn main() {
    support::print_machine();
    let all = std::thread::available_parallelism().map_or(1, usize::from);
    let mut counts: Vec<_> = (0..).map(|i| 1 << i).take_while(|&threads| threads < all).collect();
    counts.push(all);
    let filter = std::env::args().skip(1).find(|arg| !arg.starts_with('-'));
    let named = WORKLOADS.iter().filter(|workload| NAMES.contains(&workload.name)).copied();
    for workload in named.chain([one_head()]) {
        if filter.as_ref().is_none_or(|filter| workload.name.contains(filter.as_str())) {
            compare(workload.for_mode(), &counts);
        }
    }
}
