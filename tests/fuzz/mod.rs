//! A fuzzer: random calls, checked in every way there is. `tests/fuzz.rs` makes a few of them with every run of the tests;
//! `fuzz/` is a program that makes as many as one likes. A call is a seed and a number, and is the same for ever.
//!
//! | what is random | checked by |
//! |---|---|
//! | calls: sizes, strides, types, options, sources | an oracle in `f64` with its own bounds; the same bits by other ways |
//! | what is behind masks | the same bits |
//! | gradients | the plain passes in `f64`; the same bits on two threads, in other layouts, behind masks, after a panic |
//! | mixed batches over caches and pages | the oracle; the bits of ragged tensors, and of each sequence alone |
//! | functions that lie or panic | nothing else is written; the next call is right |
//! | histories of caches | lists of tokens; the same bits from tensors |
//! | block tables, views, sizes that do not fit together | rules of one line each |
//!
//! Tensors lie flush against pages without access, and every byte around their elements is 0xff, which is NaN.

mod array;
mod attention;
mod cache;
mod case;
mod compare;
mod draw;
mod functions;
mod gradients;
mod memory;
mod misfit;
mod mixed;
mod oracle;
mod outs;
mod pages;
mod parts;
mod place;
mod poison;
mod rng;
mod sources;
mod stage;
mod states;
#[cfg(test)]
mod tests;
mod unruly;
mod views;

use rng::Rng;
use std::panic::catch_unwind;

/// Makes one call. False if something was wrong, which is then printed.
pub(crate) fn call(seed: u64, number: u64) -> bool {
    memory::begin(seed, number);
    let result = catch_unwind(|| {
        let mut rng = Rng::of_call(seed, number);
        // Several at a time of what takes microseconds.
        let some = |rng: &mut Rng, check: fn(&mut Rng)| (0..8).for_each(|_| check(rng));
        match rng.below(32) {
            0..3 => cache::check(&mut rng),
            3 | 4 => pages::check(&mut rng),
            5 | 6 => some(&mut rng, misfit::check),
            7 => some(&mut rng, states::check),
            8 => some(&mut rng, views::check),
            9 | 10 => mixed::check(&mut rng),
            11..15 => gradients::check(&mut rng),
            _ => attention::check(&mut rng),
        }
    });
    memory::end();
    if result.is_err() {
        eprintln!("fuzz: wrong: --seed {seed} --only {number}");
    }
    result.is_ok()
}

/// Faults from here on, and calls that do not end, are reported.
pub(crate) fn watch() {
    memory::watch();
}
