//! Calls on threads that are joined one by one: for ThreadSanitizer (`.ci/sanitizers thread`), which sees that threads are
//! started and joined, but neither the standard library's other ways to wait nor rayon's.

use sdpa::{Alignment, Attention, BackwardPlan, Exec, Executor, Gradients, Inputs, Outputs, Plan, Workspace};
use sdpa::{Run, Saved, View, ViewMut};

/// Threads started anew for each call.
struct Joined(usize);

impl Executor for Joined {
    fn threads(&self) -> usize {
        self.0
    }

    fn run(&self, tasks: usize, task: &(dyn Fn(usize) + Sync)) {
        std::thread::scope(|scope| {
            let others: Vec<_> = (1..tasks).map(|index| scope.spawn(move || task(index))).collect();
            task(0);
            others.into_iter().for_each(|other| other.join().expect("a task does not panic"));
        });
    }
}

/// Heads of queries.
const H: usize = 4;
/// Heads of keys and values.
const G: usize = 2;
/// Elements of a head.
const D: usize = 32;

fn numbers(n: usize, seed: u32) -> Vec<f32> {
    (0..n as u32).map(|i| (i.wrapping_mul(2_654_435_761).wrapping_add(seed) >> 16) as f32 / 65536.0 - 0.5).collect()
}

/// Outputs and gradients of a call on `threads` threads, and the number of workers planned.
fn call([rows, keys]: [usize; 2], threads: usize) -> (Vec<f32>, usize) {
    let (executor, of_rows, of_keys) = (Joined(threads), [1, H, rows, D], [1, G, keys, D]);
    let (q, k, v) = (numbers(H * rows * D, 1), numbers(G * keys * D, 2), numbers(G * keys * D, 3));
    let [q, k, v] = [(&q, of_rows), (&k, of_keys), (&v, of_keys)].map(|(x, shape)| View::bhld(x, shape).unwrap());
    let attention = Attention::new().causal().align(Alignment::BottomRight);
    let (mut out, mut lse) = (vec![0.0; H * rows * D], vec![0.0; H * rows]);
    let outputs = Outputs::new(ViewMut::bhld(&mut out, of_rows).unwrap());
    let outputs = outputs.lse(ViewMut::bhld(&mut lse, [1, H, rows, 1]).unwrap());
    let problem = attention.problem(Inputs::new(q, k, v), outputs).unwrap();
    let plan = Plan::new(&problem, Exec::on(&executor));
    problem.run_with(&plan, &mut Workspace::new(), Run::new().executor(&executor)).unwrap();

    let d_out = numbers(H * rows * D, 4);
    let [o, d_o] = [&out, &d_out].map(|x| View::bhld(x, of_rows).unwrap());
    let saved = Saved::new(o, View::bhld(&lse, [1, H, rows, 1]).unwrap(), d_o);
    let (mut dq, mut dk, mut dv) = (vec![0.0; H * rows * D], vec![0.0; G * keys * D], vec![0.0; G * keys * D]);
    let gradients = Gradients::new().q(ViewMut::bhld(&mut dq, of_rows).unwrap());
    let gradients = gradients.k(ViewMut::bhld(&mut dk, of_keys).unwrap()).v(ViewMut::bhld(&mut dv, of_keys).unwrap());
    let problem = attention.backward(Inputs::new(q, k, v), saved, gradients).unwrap();
    let backward = BackwardPlan::new(&problem, Exec::on(&executor));
    problem.run_with(&backward, &mut Workspace::new(), Run::new().executor(&executor)).unwrap();
    ([out, lse, dq, dk, dv].concat(), plan.workers().max(backward.workers()))
}

#[test]
fn joined_threads_do_not_show() {
    // By rows, by keys (split-KV), and both with several key blocks in the backward pass.
    for sizes in [[300, 1100], [97, 700], [3, 40_000]] {
        let (one, _) = call(sizes, 1);
        let (four, workers) = call(sizes, 4);
        assert!(workers > 1, "{sizes:?}: one worker alone");
        assert!(one.iter().map(|x| x.to_bits()).eq(four.iter().map(|x| x.to_bits())), "{sizes:?}: other bits");
    }
}
