//! Every layer against PyTorch's answers, on every instruction set: `tests/fixtures/torch_layers.safetensors`, or the file
//! that `SDPA_TORCH_LAYERS` names.

#[path = "support/fixture.rs"]
mod fixture;

use fixture::{Fixture, assert_close};
use sdpa::layers::{Compute, Embedding, Rope, RopePairs, Sequences};
use sdpa::{Exec, Isa};

/// What the answers may be off by.
const TOLERANCE: f64 = 1e-5;

fn answers() -> Fixture {
    Fixture::open("torch_layers.safetensors", "SDPA_TORCH_LAYERS")
}

/// Runs on every instruction set, one thread and all, and compares.
fn check(file: &Fixture, name: &str, forward: impl Fn(&mut [f32], &mut Compute)) {
    let expected = file.floats(name);
    for isa in Isa::available() {
        for exec in [Exec::serial().isa(isa), Exec::default().isa(isa)] {
            let mut got = vec![f32::NAN; expected.len()];
            forward(&mut got, &mut Compute::new(exec));
            let off = assert_close(&format!("{name} on {isa}"), &got, &expected, TOLERANCE);
            println!("{name} on {isa}: {off:.2e}");
        }
    }
}

#[test]
fn sinusoidal() {
    let file = answers();
    let [positions, width] = file.shape("sinusoidal.out");
    let table = Embedding::sinusoidal(positions, width).unwrap();
    check(&file, "sinusoidal.out", |out, compute| {
        out.fill(0.0);
        table.add_positions(out, Sequences::one(positions), 0, compute).unwrap();
    });
}

/// `[a][b][c]` to `[b][a][c]`.
fn swapped(x: &[f32], [a, b, c]: [usize; 3]) -> Vec<f32> {
    let run = |i: usize, j: usize| &x[(i * b + j) * c..][..c];
    (0..b).flat_map(|j| (0..a).flat_map(move |i| run(i, j))).copied().collect()
}

#[test]
fn rope() {
    let file = answers();
    let [_, heads, rows, dim] = file.shape("rope.in");
    // The file has heads before rows.
    let x = swapped(&file.floats("rope.in"), [heads, rows, dim]);
    for (name, pairs) in [("rope.out.half", RopePairs::Half), ("rope.out.interleaved", RopePairs::Interleaved)] {
        let rope = Rope::new(64, dim, 10_000.0, pairs).unwrap();
        check(&file, name, |out, compute| {
            let mut x = x.clone();
            rope.rotate(&mut x, [heads, dim], Sequences::one(rows), 5, compute).unwrap();
            out.copy_from_slice(&swapped(&x, [rows, heads, dim]));
        });
    }
}
