//! Threads that are not rayon's: layers run on the executor of their settings, and have the bits of one thread on any.

use crate::support::Rng;
use sdpa::{Attention, Exec, Executor, ThreadPool, View, ViewMut};
use sdpa_layers::{
    Compute, Form, Linear, LinearAttention, LinearInputs, LinearState, MultiHeadAttention, MultiHeadInput, Norm,
    Sequences, Update, Weights,
};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

fn normal(n: usize, seed: u64) -> Vec<f32> {
    let mut rng = Rng::new(seed);
    (0..n).map(|_| rng.normal() / 8.0).collect()
}

/// The calling thread, which calls one index in so many, and counts the calls of itself.
struct Every {
    every: usize,
    runs: AtomicUsize,
}

impl Executor for Every {
    fn threads(&self) -> usize {
        3
    }

    fn run(&self, tasks: usize, task: &(dyn Fn(usize) + Sync)) {
        self.runs.fetch_add(1, Relaxed);
        (0..tasks).filter(|index| (index + 1).is_multiple_of(self.every)).for_each(task);
    }
}

/// Asserts that a layer has the bits of one thread on the library's pool, and on executors that keep their promise or do
/// not, and that it runs on them.
fn on_any_executor(layer: &str, forward: impl Fn(&mut Compute<'_>) -> Vec<f32>) {
    let bits = |compute: &mut Compute<'_>| forward(compute).iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    let expected = bits(&mut Compute::new(Exec::serial()));
    for every in [1, 2, usize::MAX] {
        let executor = Every { every, runs: AtomicUsize::new(0) };
        let mut compute = Compute::new(Exec::on(&executor));
        assert!(bits(&mut compute) == expected, "{layer}, one index in {every}");
        assert!(executor.runs.into_inner() > 0, "{layer} does not run on the executor");
    }
    for threads in [1, 2, 5] {
        let pool = ThreadPool::new(threads).unwrap();
        let mut compute = Compute::new(Exec::on(&pool));
        for _ in 0..3 {
            assert!(bits(&mut compute) == expected, "{layer} on {threads} threads");
        }
    }
}

#[test]
fn products_and_norms_run_on_any_executor() {
    let [rows, outputs, inputs] = [300, 256, 512];
    let (x, w) = (normal(rows * inputs, 2), normal(outputs * inputs, 3));
    let layer = Linear::new(Weights::rows(&w, [outputs, inputs]).unwrap());
    on_any_executor("linear", |compute| {
        let mut out = vec![f32::NAN; rows * outputs];
        layer.forward(&x, &mut out, compute).unwrap();
        out
    });
    let (x, norm) = (normal(4000 * inputs, 4), Norm::rms(vec![1.0; inputs], 1e-5).unwrap());
    on_any_executor("norm", |compute| {
        let mut out = vec![f32::NAN; x.len()];
        norm.forward(&x, &mut out, compute).unwrap();
        out
    });
}

#[test]
fn attention_runs_on_any_executor() {
    let (width, rows) = (64, 400);
    let projection = |seed| Linear::new(Weights::rows(&normal(width * width, seed), [width, width]).unwrap());
    let layer = MultiHeadAttention::new([4, 4], [1, 2, 3, 4].map(projection)).unwrap();
    let (layer, x) = (layer.attention(Attention::new().causal()), normal(rows * width, 5));
    on_any_executor("multi-head attention", |compute| {
        let mut out = vec![f32::NAN; rows * width];
        layer.forward(MultiHeadInput::new(&x, Sequences::one(rows)), &mut out, compute).unwrap();
        out
    });
}

#[test]
fn linear_attention_runs_on_any_executor() {
    let shape = [2, 3, 300, 48];
    let [q, k, v] = [6, 7, 8].map(|seed| normal(shape.iter().product(), seed));
    let [q, k, v] = [&q, &k, &v].map(|x| View::bhld(x, shape).unwrap());
    for form in [Form::Recurrent, Form::Chunked(16)] {
        on_any_executor("linear attention", |compute| {
            let (mut state, mut out) = (LinearState::new([2, 3, 48, 48]).unwrap(), vec![f32::NAN; 2 * 3 * 300 * 48]);
            let view = ViewMut::bhld(&mut out, shape).unwrap();
            let inputs = LinearInputs::new(q, k, v, Update::Linear);
            LinearAttention::new().form(form).forward(inputs, &mut state, view, compute).unwrap();
            [out, state.as_slice().to_vec()].concat()
        });
    }
}
