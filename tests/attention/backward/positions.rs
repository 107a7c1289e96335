//! Gradients of calls with given positions of rows and keys.

use super::oracle::check;
use super::support::Back;
use crate::positions::{default_positions, random_positions, with_lengths_and_positions, with_positions_of_padding};
use crate::support::{Rng, execs, fewer};

#[test]
fn default_positions_have_the_gradients_of_none() {
    for seed in 0..fewer(100) {
        let back = Back::random(&mut Rng::new(seed), 300_000);
        let given = Back { case: default_positions(&back.case), ..back.clone() };
        for (isa, exec) in execs() {
            given.run(exec).same(&format!("seed {seed}, {isa}"), &back.run(exec));
        }
    }
}

#[test]
fn random_positions_have_the_gradients_of_the_oracle() {
    for seed in 0..fewer(200) {
        let mut rng = Rng::new(500 + seed);
        let back = Back::random(&mut rng, 300_000);
        let back = Back { case: random_positions(&mut rng, &back.case), ..back };
        check(&format!("seed {seed}"), &back);
    }
}

#[test]
fn positions_of_padding_are_not_read() {
    for seed in 0..fewer(60) {
        let mut rng = Rng::new(900 + seed);
        let back = Back::random(&mut rng, 300_000);
        let back = Back { case: with_lengths_and_positions(&mut rng, back.case.clone()), ..back };
        let padded = Back { case: with_positions_of_padding(&mut rng, &back.case), ..back.clone() };
        for (isa, exec) in execs() {
            padded.run(exec).same(&format!("seed {seed}, {isa}"), &back.run(exec));
        }
    }
}
