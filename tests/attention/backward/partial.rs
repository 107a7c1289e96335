//! Gradients of calls with biases and masks by key/value head, over the last keys, with a period over the batch.

use super::oracle::check;
use super::support::{Back, Full};
use crate::options::Case;
use crate::support::{Rng, Tensor, assert_same_bits, execs, fewer};
use sdpa::Workspace;

/// A random case; several sequences are mostly of different lengths.
fn random(rng: &mut Rng, seed: u64) -> Back {
    let case = match seed % 2 {
        0 => Case::random(rng, 300_000),
        _ => Case::of_sizes(rng, [4, 4, 2, 20, 520, 8, 8]),
    };
    let case = case.partial(rng);
    Back::of(rng, case)
}

#[test]
fn they_have_the_gradients_of_the_oracle() {
    for seed in 0..fewer(150) {
        check(&format!("seed {seed}"), &random(&mut Rng::new(seed), seed));
    }
}

/// Those of the bias apart, which has fewer elements.
#[test]
fn other_gradients_have_the_bits_of_whole_biases() {
    for seed in 0..fewer(100) {
        let back = random(&mut Rng::new(seed), seed);
        let whole = Back { case: back.case.whole(), ..back.clone() };
        for (isa, exec) in execs() {
            let none = |full: Full| Full { bias: Tensor::filled([0; 4], 0.0), ..full };
            none(back.run(exec)).same(&format!("seed {seed}, {isa}"), &none(whole.run(exec)));
        }
    }
}

/// Sequences of different lengths have the last keys in different blocks, which add to the same elements.
#[test]
fn threads_do_not_show_in_the_gradient_of_a_shared_suffix() {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(3).build().unwrap();
    for seed in 0..fewer(40) {
        let mut rng = Rng::new(seed);
        let case = Case::plain(&mut rng, [5, 4, 2, 30, 1100, 16, 16]);
        let lens = (0..5).map(|_| rng.below(1101)).collect();
        let bias = Tensor::normal([1, rng.pick(&[1, 2, 4]), rng.pick(&[1, 30]), rng.pick(&[1, 40, 700])], &mut rng);
        let case = Case { kv_lens: Some(lens), bias: Some(bias.into()), suffix: true, ..case };
        let back = Back::of(&mut rng, case);
        for (isa, exec) in execs() {
            let alone = back.run(exec).bias;
            let together = pool.install(|| back.run_in(exec.threads(3), &mut Workspace::new())).bias;
            assert_same_bits(&format!("seed {seed}, {isa}"), &together, &alone);
        }
    }
}
