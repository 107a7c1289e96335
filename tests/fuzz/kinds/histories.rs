//! Histories of caches of many steps.

use crate::fuzzer::kinds::cache;
use crate::fuzzer::rng::Rng;

pub(super) fn check(rng: &mut Rng) {
    let steps = 15 + rng.below(46);
    cache::steps_of(rng, steps);
}
