//! What the type of the elements costs: f32, bf16 and f16 widened, bf16 by the machine's own products; interleaved,
//! medians. `cargo bench --bench elements`.

#[path = "support/interleaved.rs"]
mod interleaved;
mod support;

use interleaved::medians;
use sdpa::{Attention, Bf16, Exec, F16, Inputs, Outputs, Plan, Precision, Tensor, TensorMut, View, ViewMut, Workspace};
use std::hint::black_box;
use support::{WORKLOADS, Workload};

const NAMES: [&str; 6] =
    ["bert-512", "bert-b8-128", "minilm-b32-128", "gpt2-1024-causal", "long-4096", "llama-2048-gqa"];

/// A workload's tensors in elements of one type.
struct Typed<T> {
    parts: [Vec<T>; 3],
    out: Vec<T>,
}

impl<T: Copy> Typed<T> {
    fn new(parts: [&[f32]; 3], out: usize, round: fn(f32) -> T) -> Self {
        let parts = parts.map(|x| x.iter().map(|&x| round(x)).collect());
        Self { parts, out: vec![round(f32::NAN); out] }
    }

    fn run(&mut self, workload: &Workload, attention: Attention, exec: Exec, workspace: &mut Workspace)
    where
        for<'a> Tensor<'a>: From<View<'a, T>>,
        for<'a> TensorMut<'a>: From<ViewMut<'a, T>>,
    {
        let s = workload.shape;
        let [q, k, v] = &self.parts;
        let inputs = Inputs::new(
            View::bhld(q, [s.batch, s.heads, s.q_len, s.head_dim]).expect("q fits"),
            View::bhld(k, [s.batch, s.kv_heads, s.kv_len, s.head_dim]).expect("k fits"),
            View::bhld(v, [s.batch, s.kv_heads, s.kv_len, s.value_dim]).expect("v fits"),
        );
        let out = ViewMut::bhld(&mut self.out, [s.batch, s.heads, s.q_len, s.value_dim]).expect("out fits");
        let problem = attention.problem(black_box(inputs), Outputs::new(out)).expect("the shapes fit");
        let plan = Plan::new(&problem, exec);
        problem.run(&plan, workspace);
    }
}

/// The largest difference.
fn distance<T: Copy>(xs: &[T], ys: &[f32], widen: fn(T) -> f32) -> f32 {
    xs.iter()
        .zip(ys)
        .map(|(&x, y)| (widen(x) - y).abs())
        .fold(0.0, |most, x| if x > most || x.is_nan() { x } else { most })
}

fn main() {
    support::print_machine();
    if !support::isa().has_native_bf16() {
        println!("this machine has no bf16 dot product: native is exact");
    }
    for workload in WORKLOADS.iter().filter(|w| NAMES.contains(&w.name)).map(|w| w.for_mode()) {
        let tensors = workload.tensors();
        let s = workload.shape;
        let (parts, out) = (tensors.parts(), s.batch * s.heads * s.q_len * s.value_dim);
        let (mut wide, mut half) = (Typed::new(parts, out, |x| x), Typed::new(parts, out, F16::from_f32));
        let (mut exact, mut native) = (Typed::new(parts, out, Bf16::from_f32), Typed::new(parts, out, Bf16::from_f32));
        let attention = workload.attention();
        let products = attention.precision(Precision::Native);
        for threads in support::thread_counts() {
            let exec = support::exec(threads);
            let mut workspaces = [const { Workspace::new() }; 4];
            let [a, b, c, d] = &mut workspaces;
            let rounds = if support::test_mode() { 1 } else { 5 };
            let times = medians(
                rounds,
                [
                    &mut || wide.run(&workload, attention, exec, a),
                    &mut || exact.run(&workload, attention, exec, b),
                    &mut || half.run(&workload, attention, exec, c),
                    &mut || native.run(&workload, products, exec, d),
                ],
            );
            let [f32, bf16, f16, pairs] = times.map(|seconds| seconds * 1e3);
            println!(
                "{:17} {threads} thread(s)  f32 {f32:8.3} ms   bf16 {:.3} × f32   f16 {:.3} × f32   bf16 native {pairs:8.3} ms, {:.3} × f32",
                workload.name,
                bf16 / f32,
                f16 / f32,
                pairs / f32,
            );
        }
        // Inputs of 8 bits: outputs, averages of unit-normal numbers, within a few of their last.
        let far = [
            distance(&exact.out, &wide.out, Bf16::to_f32),
            distance(&half.out, &wide.out, F16::to_f32),
            distance(&native.out, &wide.out, Bf16::to_f32),
        ];
        assert!(far.iter().all(|&x| x < 0.1), "{}: off by {far:?}", workload.name);
    }
}
