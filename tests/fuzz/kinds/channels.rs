//! Calls over bytes whose keys have scales by channel, and mixed batches and histories of them.

use crate::fuzzer::draw::{Home, draw_at};
use crate::fuzzer::kinds::attention;
use crate::fuzzer::rng::Rng;

pub(super) fn check(rng: &mut Rng) {
    let home = Home::channels(rng);
    let case = draw_at(rng, home);
    attention::check_case(rng, &case, home);
}
