//! Projections against the machine's limits and against sgemm, multi-head attention against the sum of its parts:
//! interleaved runs, medians, ratios.
//!
//! ```text
//! cargo bench -p sdpa-layers --bench layers
//! ```

#[path = "../../benches/support/interleaved.rs"]
mod interleaved;

use interleaved::{medians, random};
use sdpa::{Attention, Exec, Inputs, Isa, Outputs, Plan, View, ViewMut, Workspace, probe};
use sdpa_layers::{Compute, Linear, MultiHeadAttention, MultiHeadInput, Sequences, Weights};

/// Enough memory to push everything else out of a cache of 32 MiB.
const FLUSH: usize = 16 << 20;

fn linear(outputs: usize, inputs: usize, seed: u64) -> Linear {
    let (weight, bias) = (random(outputs * inputs, seed), random(outputs, seed + 1));
    Linear::new(Weights::rows(&weight, [outputs, inputs]).and_then(|w| w.bias(&bias)).expect("sizes fit"))
}

/// Rows × outputs × inputs on one thread and on two, and matrixmultiply's sgemm on the same numbers.
fn projection([rows, outputs, inputs]: [usize; 3], rounds: usize) {
    let (x, weight) = (random(rows * inputs, 1), random(outputs * inputs, 2));
    let layer = linear(outputs, inputs, 2);
    let mut out = [vec![0.0; rows * outputs], vec![0.0; rows * outputs], vec![0.0; rows * outputs]];
    let [one, two, sgemm] = &mut out;
    let (mut serial, mut pair) = (Compute::new(Exec::serial()), Compute::new(Exec::default().threads(2)));
    let [one, two, sgemm] = medians(
        rounds,
        [
            &mut || layer.forward(&x, one, &mut serial).expect("sizes fit"),
            &mut || layer.forward(&x, two, &mut pair).expect("sizes fit"),
            &mut || {
                let (a, b) = (sdpa_kernels::gemm::Matrix { data: &x, strides: (inputs, 1) }, &weight);
                let b = sdpa_kernels::gemm::Matrix { data: b, strides: (1, inputs) };
                sdpa_kernels::gemm::sgemm([rows, inputs, outputs], 1.0, a, b, sgemm);
            },
        ],
    );
    let share = 2.0 * (rows * outputs * inputs) as f64 / probe::peak_flops(Isa::detect());
    println!(
        "{rows:4} × {outputs} × {inputs}: {:8.4} ms, {:5.1} % of peak; two threads {:.2} ×; matrixmultiply {:4.1} %",
        one * 1e3,
        100.0 * share / one,
        one / two,
        100.0 * share / sgemm
    );
}

/// One row: what counts is how fast the weights come in, from memory.
fn one_row(size: usize, rounds: usize) {
    let x = random(size, 1);
    // As many layers as a cache does not hold, used in turn.
    let layers: Vec<Linear> = (0..FLUSH.div_ceil(size * size) + 1).map(|i| linear(size, size, i as u64)).collect();
    let buffer = vec![1.0f32; layers.len() * size * size];
    let (mut out, mut compute) = (vec![0.0; size], Compute::new(Exec::serial()));
    let [layers_time, read] = medians(
        rounds,
        [
            &mut || layers.iter().for_each(|layer| layer.forward(&x, &mut out, &mut compute).expect("sizes fit")),
            &mut || {
                std::hint::black_box(probe::read(&buffer));
            },
        ],
    );
    let bytes = (layers.len() * size * size * size_of::<f32>()) as f64;
    println!(
        "   1 × {size} × {size}: {:5.1} GB/s of weights, {:5.1} % of a plain read ({:.1} GB/s)",
        bytes / layers_time / 1e9,
        100.0 * read / layers_time,
        bytes / read / 1e9
    );
}

/// The layer at BERT-base size, and its parts one by one on buffers of their own.
fn multi_head(rows: usize, rounds: usize) {
    const WIDTH: usize = 768;
    const HEADS: usize = 12;
    let x = random(rows * WIDTH, 1);
    let layer = MultiHeadAttention::new([HEADS; 2], [1, 2, 3, 4].map(|seed| linear(WIDTH, WIDTH, seed))).expect("fits");
    let projections = [1, 2, 3, 4].map(|seed| linear(WIDTH, WIDTH, seed));
    let mut computes = [(); 2].map(|()| Compute::new(Exec::serial()));
    let [whole, parts] = &mut computes;
    let mut outs = [(); 5].map(|()| vec![0.0; rows * WIDTH]);
    let [whole_out, parts_out @ ..] = &mut outs;
    let mut attended = vec![0.0; rows * WIDTH];
    let mut workspace = Workspace::new();
    let stored = [1, rows, HEADS, WIDTH / HEADS];
    let [layer_time, parts_time] = medians(
        rounds,
        [
            &mut || {
                let input = MultiHeadInput::new(&x, Sequences::one(rows));
                layer.forward(input, whole_out, whole).expect("sizes fit");
            },
            &mut || {
                for (projection, out) in projections[..3].iter().zip(parts_out.iter_mut()) {
                    projection.forward(&x, out, parts).expect("sizes fit");
                }
                let [q, k, v, out] = parts_out;
                let [q, k, v] = [q, k, v].map(|x| View::blhd(x, stored).expect("dense"));
                let inputs = Inputs::new(q, k, v);
                let outputs = Outputs::new(ViewMut::blhd(&mut attended, stored).expect("dense"));
                let problem = Attention::new().problem(inputs, outputs).expect("consistent");
                let plan = Plan::new(&problem, Exec::serial());
                problem.run(&plan, &mut workspace);
                projections[3].forward(&attended, out, parts).expect("sizes fit");
            },
        ],
    );
    println!(
        "multi-head attention, {rows} × {WIDTH}, {HEADS} heads: {:.3} ms, {:.3} × its parts",
        layer_time * 1e3,
        layer_time / parts_time
    );
}

fn main() {
    println!("{}, one thread unless said", Isa::detect());
    // `cargo bench -- --test` only wants to see that it runs.
    if std::env::args().any(|arg| arg == "--test") {
        projection([7, 40, 50], 1);
        one_row(1024, 1);
        multi_head(16, 1);
        return;
    }
    for shape in [[512, 768, 768], [512, 3072, 768], [512, 768, 3072], [128, 384, 384], [11, 384, 384]] {
        projection(shape, 11);
    }
    one_row(768, 11);
    one_row(4096, 11);
    multi_head(512, 21);
}
