//! Short texts: calls without options over at most 16 rows and 16 keys are computed in registers. A mask that hides nothing
//! sends the same call through the loop over key blocks, and both give the same bits.

use crate::support::{Rng, Tensor, Tensors, assert_same, execs, run_inputs};
use sdpa::{Attention, Exec, Inputs, Mask, View};

/// Holds the call against the same call with a mask that keeps every key.
fn assert_as_by_the_loop(what: &str, attention: &Attention, inputs: Inputs<'_>, keys: usize, exec: Exec) {
    let keep = vec![1u8; keys];
    let mask = Mask::keep(View::bhld(&keep, [1, 1, 1, keys]).expect("it fits"));
    let by_loop = run_inputs(attention, inputs.mask(mask), exec);
    assert_same(what, &run_inputs(attention, inputs, exec), &by_loop);
}

#[test]
fn every_size_to_a_vector_of_keys_and_beyond_has_the_bits_of_the_loop() {
    for (isa, exec) in execs() {
        for rows in 1..=17 {
            for keys in 1..=17 {
                let seed = (rows * 100 + keys) as u64;
                let mut rng = Rng::new(seed);
                let (group, head_dim) = (rng.pick(&[1, 2, 3]), rng.pick(&[1, 16, 33, 64, 80]));
                let value_dim = rng.pick(&[16, 24, 32, 48, 64]);
                let tensors = Tensors::normal([2, 2 * group, 2, rows, keys, head_dim, value_dim], seed);
                let sinks: Vec<f32> = (0..2 * group).map(|_| rng.normal()).collect();
                let lens = [keys, rng.below(keys + 1)];
                let attention = Attention::new().scale(rng.pick(&[0.0, -0.3, 0.5, 30.0]));
                for (with, inputs) in [
                    ("no option", tensors.inputs()),
                    ("sinks", tensors.inputs().sinks(&sinks)),
                    ("lengths", tensors.inputs().kv_lens(&lens)),
                ] {
                    let what = format!("{isa}, {rows} × {keys}, D {head_dim}, {value_dim}, {attention:?}, {with}");
                    assert_as_by_the_loop(&what, &attention, inputs, keys, exec);
                }
            }
        }
    }
}

#[test]
fn numbers_that_are_not_finite_have_the_bits_of_the_loop() {
    let numbers = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX, -f32::MAX, -0.0];
    for (isa, exec) in execs() {
        for seed in 0..200 {
            let mut rng = Rng::new(seed);
            let (rows, keys) = (1 + rng.below(16), 1 + rng.below(16));
            let mut tensors = Tensors::normal([1, 2, 1, rows, keys, 16, 32], seed);
            for _ in 0..=rng.below(3) {
                let number = rng.pick(&numbers);
                let mut place = |x: &mut Tensor| {
                    let index = x.shape.map(|n| rng.below(n));
                    x.set(index, number);
                };
                place([&mut tensors.q, &mut tensors.k, &mut tensors.v][seed as usize % 3]);
            }
            let what = format!("{isa}, seed {seed}");
            assert_as_by_the_loop(&what, &Attention::new(), tensors.inputs(), keys, exec);
        }
    }
}
