//! Kinds of cases. A new one is a file here with a function `check`, its `mod` line, and a row of [`KINDS`].

pub(crate) mod attention;
mod backward_pieces;
mod balance;
mod block_states;
mod cache;
mod callers;
mod channels;
mod differences;
mod divided;
mod dropout;
mod executors;
mod far_scores;
mod formats;
mod gradients;
mod histories;
mod huge;
pub(crate) mod imports;
mod kept;
mod latent;
mod layers;
mod lengths;
mod lists;
mod masks;
mod misfit;
mod misfit_gradients;
mod misfit_pieces;
mod mixed;
mod ndarray;
mod packed;
mod pages;
mod partial;
mod pieces;
mod pools;
mod selected;
mod states;
mod stops;
mod trees;
mod views;
mod zeros;

use super::bits::Recorder;
use super::memory;
use super::rng::Rng;
use std::panic::catch_unwind;

/// A kind of cases.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Kind {
    pub(crate) name: &'static str,
    /// Cases of it in a run of the tests.
    #[allow(dead_code, reason = "the program in `fuzz/` is told how many")]
    pub(crate) few: u64,
    /// Makes a case and checks it; panics if something is wrong.
    check: fn(&mut Rng),
}

/// Every kind there is, and how many cases of it a run of the tests makes.
pub(crate) static KINDS: [Kind; 38] = [
    kind("attention", 200, attention::check),
    kind("backward-pieces", 20, backward_pieces::check),
    kind("balance", 40, balance::check),
    kind("block-states", 20, block_states::check),
    kind("cache", 40, cache::check),
    kind("callers", 10, callers::check),
    kind("channels", 20, channels::check),
    kind("differences", 20, differences::check),
    kind("divided", 60, divided::check),
    kind("dropout", 20, dropout::check),
    kind("executors", 10, executors::check),
    kind("far-scores", 60, far_scores::check),
    kind("gradients", 50, gradients::check),
    kind("histories", 5, histories::check),
    kind("huge", 40, huge::check),
    kind("imports", 40, imports::check),
    kind("kept", 20, kept::check),
    kind("formats", 150, formats::check),
    kind("latent", 20, latent::check),
    kind("layers", 20, layers::check),
    kind("lengths", 5, lengths::check),
    kind("lists", 1000, lists::check),
    kind("masks", 40, masks::check),
    kind("misfit", 200, misfit::check),
    kind("misfit-gradients", 100, misfit_gradients::check),
    kind("misfit-pieces", 100, misfit_pieces::check),
    kind("mixed", 25, mixed::check),
    kind("ndarray", 40, ndarray::check),
    kind("pages", 25, pages::check),
    kind("partial", 60, partial::check),
    kind("pieces", 40, pieces::check),
    kind("pools", 20, pools::check),
    kind("selected", 100, selected::check),
    kind("states", 100, states::check),
    kind("stops", 10, stops::check),
    kind("trees", 20, trees::check),
    kind("views", 100, views::check),
    kind("zeros", 100, zeros::check),
];

pub(crate) const fn kind(name: &'static str, few: u64, check: fn(&mut Rng)) -> Kind {
    Kind { name, few, check }
}

/// A kind of the calls with recorded bits.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BitsOf {
    pub(crate) name: &'static str,
    pub(crate) make: fn(&mut Rng, &mut Recorder),
}

/// Kinds of the calls with recorded bits: number n is of kind n mod 18, for ever.
pub(crate) static BITS: [BitsOf; 18] = [
    bits_of("attention", attention::bits_of_tensors),
    bits_of("attention", attention::bits),
    bits_of("gradients", gradients::bits),
    bits_of("cache", cache::bits),
    bits_of("attention", attention::bits_of_tensors),
    bits_of("many keys", lengths::bits),
    bits_of("pool", pools::bits),
    bits_of("gradients", gradients::bits),
    bits_of("mixed", mixed::bits),
    bits_of("states", states::bits),
    bits_of("attention", attention::bits),
    bits_of("masks", masks::bits),
    bits_of("trees", trees::bits),
    bits_of("packed", packed::bits),
    bits_of("gradients", gradients::bits),
    bits_of("integers", channels::bits),
    bits_of("selected", selected::bits),
    bits_of("selected, mixed", mixed::bits_selected),
];

const fn bits_of(name: &'static str, make: fn(&mut Rng, &mut Recorder)) -> BitsOf {
    BitsOf { name, make }
}

impl Kind {
    /// Makes one case. False if something was wrong, which is then printed.
    pub(crate) fn case(&'static self, seed: u64, number: u64) -> bool {
        let running = memory::begin(&self.name, seed, number);
        let result = catch_unwind(|| (self.check)(&mut Rng::of_call(seed, number).with_zeros()));
        drop(running);
        if result.is_err() {
            eprintln!("fuzz: wrong: --kind {} --seed {seed} --only {number}", self.name);
        }
        result.is_ok()
    }

    /// Makes and checks the case that bytes say.
    #[allow(dead_code, reason = "for `fuzz/targets`")]
    pub(crate) fn said(&self, bytes: &[u8]) {
        (self.check)(&mut Rng::said(bytes));
    }
}
