//! Many workers on one queue of tiny tasks: 64 workers on as many cores as there are, against one worker a core. Both do the
//! same work, so the ratio is what the queue and the threads cost. `taskset -c 0,1 cargo bench --bench workers`.

#[path = "support/interleaved.rs"]
mod interleaved;
mod support;

use interleaved::{medians, random};
use sdpa::{Attention, Exec, Inputs, Outputs, Plan, View, ViewMut, Workspace};

const WORKERS: usize = 64;
/// Rows and keys of a task, and their length: one or two microseconds.
const ROWS: usize = 16;
const DIM: usize = 16;
const ROUNDS: usize = 15;

fn pool(threads: usize) -> rayon::ThreadPool {
    rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a pool")
}

/// Runs a batch, each of which is a task, on a pool's threads.
fn run(pool: &rayon::ThreadPool, x: &[f32], out: &mut [f32], workspace: &mut Workspace) {
    let shape = [x.len() / ROWS / DIM, 1, ROWS, DIM];
    let x = View::bhld(x, shape).expect("as many as the shape has");
    pool.install(|| {
        let outputs = Outputs::new(ViewMut::bhld(out, shape).expect("as many as the shape has"));
        let problem = Attention::new().problem(Inputs::new(x, x, x), outputs).expect("a good call");
        let plan = Plan::new(&problem, Exec::default());
        problem.run(&plan, workspace);
    });
}

fn main() {
    support::print_machine();
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
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
