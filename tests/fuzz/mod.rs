//! A fuzzer: random cases, checked in every way there is. `tests/fuzz.rs` makes a few of them with every run of the tests;
//! `fuzz/` is a program that makes any number of them. A case is a kind, a seed and a number, and is the same for ever.
//!
//! | kind | what is random | checked by |
//! |---|---|---|
//! | attention | calls: sizes, strides, types, options, sources | an oracle in `f64` with its own bounds; the same bits by other ways |
//! | | what is behind masks | the same bits |
//! | | functions that lie or panic | nothing else is written; the next call is right |
//! | backward-pieces | backward passes over rows and keys in pieces | the bits of one call |
//! | balance | plans for any number of workers | rules that hold for any division of work |
//! | block-states | states of blocks of keys, folded and merged | the bits of one call; the oracle |
//! | cache | histories of caches | lists of tokens; the same bits from tensors |
//! | callers | a thread pool under several callers, with tasks that call and panic | each index once; the bits of one thread |
//! | channels | calls over bytes with scales by channel | as attention |
//! | differences | gradients of one element | differences of the oracle's loss |
//! | divided | calls divided by heads and sequences, rows by heads | the bits of the whole; rules of one line each |
//! | dropout | probabilities next to 0 and 1, and beyond | as attention and gradients; refused |
//! | executors | threads that keep their promise, or do not | the same bits |
//! | far-scores | gradients of rows with all scores far from 0 | the plain passes in `f64` |
//! | gradients | gradients of calls | the plain passes in `f64`; the same bits on two threads, in other layouts, behind masks, after a panic |
//! | histories | histories of caches of up to 60 steps | as cache |
//! | huge | huge views that repeat one row: planned, balanced, explained | definitions of one line each |
//! | imports | files of caches, damaged | refused, or a cache that works |
//! | kept | plans and workspaces of other calls | the bits of each call's own |
//! | formats | histories of caches with a format each for keys and values, in either basis, with exact first tokens | what each token reads as, through files and pools; the bits of rows; the oracle |
//! | latent | histories of latent caches of integers | the bits of whole keys stored as values |
//! | layers | histories of the caches of several layers, and of a pool | the same changes of each alone, or none |
//! | lengths | rows or keys around 4,096 | as attention and gradients |
//! | lists | lists of keys, good, damaged and hostile; calls that they fit or do not | a model of a few loops; nothing is written; the oracle |
//! | masks | stock masks and what they are combined to | a definition of one line each; the bits of a tensor |
//! | misfit, misfit-gradients | sizes that do not fit together | rules of one line each |
//! | misfit-pieces | pieces that do not fit together | rules of one line each; nothing is written |
//! | mixed | mixed batches over caches and pages | the oracle; the bits of ragged tensors, and of each sequence alone |
//! | ndarray | arrays of ndarray, sliced, turned and broadcast | the bits of dense tensors |
//! | pages, views | block tables, views | rules of one line each |
//! | partial | biases and masks by key/value head, of the last keys, with a period | the oracle, and the bits, of whole ones; sums of their gradients |
//! | pieces | states over rows and keys in pieces, with every option they take | the bits of one call, or of one push of selected keys; the oracle |
//! | pools | histories of page pools | lists of tokens; the same bits from tensors |
//! | selected | calls of which rows select keys, mixed batches and latent caches too | as attention; a call over the keys of a list alone; the same bits, whatever no list names |
//! | states | states and merges that do not fit together | rules of one line each |
//! | stops | calls that are stopped | rows are whole or untouched; the next call is right |
//! | trees | trees of drafted tokens | the oracle on each path; what is accepted, from tensors |
//! | zeros | sizes of 0, 1 and 2 | as attention and gradients; every element is written |
//!
//! `fuzz/src/layers.rs` lists kinds of `sdpa-layers`, which the program in `fuzz/` makes, too.
//!
//! `bits.rs` makes calls of these kinds without checking them, for hashes of what they write.
//!
//! Tensors lie flush against pages without access, and every byte around their elements is 0xff, which is NaN.

mod array;
#[allow(dead_code, reason = "each of the programs that compile this uses its part")]
pub(crate) mod bits;
mod case;
mod compare;
mod draw;
mod functions;
#[path = "../support/golden.rs"]
pub(crate) mod golden;
mod hosts;
mod kinds;
mod memory;
mod oracle;
mod outs;
mod parts;
mod pieces;
mod place;
mod poison;
mod rng;
mod selection;
mod sources;
mod stage;
#[cfg(test)]
mod tests;
mod unruly;

#[allow(unused_imports, reason = "for `fuzz/targets`")]
pub(crate) use kinds::imports::import;
#[allow(unused_imports, reason = "for kinds of `fuzz/src`")]
pub(crate) use kinds::kind;
#[allow(unused_imports, reason = "not all of `fuzz/targets` need them")]
pub(crate) use kinds::{KINDS, Kind};
#[allow(unused_imports, reason = "for the fuzzer itself")]
pub(crate) use memory::watch;
#[allow(unused_imports, reason = "for `fuzz/targets`")]
pub(crate) use rng::Rng;

use core::ops::Range;
use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Wrong cases of a kind after which no more are made.
pub(crate) const ENOUGH: u64 = 20;

/// Makes cases of a kind on `threads` threads. Returns how many were wrong.
pub(crate) fn run(kind: &'static Kind, seed: u64, numbers: Range<u64>, threads: usize) -> u64 {
    let (next, wrong) = (AtomicU64::new(numbers.start), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while wrong.load(Relaxed) < ENOUGH {
                    let number = next.fetch_add(1, Relaxed);
                    if number >= numbers.end {
                        break;
                    }
                    if !kind.case(seed, number) {
                        wrong.fetch_add(1, Relaxed);
                    }
                }
            });
        }
    });
    wrong.into_inner()
}
