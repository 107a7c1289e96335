//! Calls over bytes with scales of keys by channel, and mixed batches and histories of them.

use crate::fuzzer::bits::{Recorder, sizes};
use crate::fuzzer::draw::{Home, draw_at, draw_of};
use crate::fuzzer::kinds::attention;
use crate::fuzzer::rng::Rng;
use sdpa::CacheFormat;

pub(super) fn check(rng: &mut Rng) {
    let home = Home::channels(rng);
    let case = draw_at(rng, home);
    attention::check_case(rng, &case, home);
}

/// A call over integers of any kind, in a cache or in pages.
pub(super) fn bits(rng: &mut Rng, recorder: &mut Recorder) {
    let (home, sizes) = (Home::integers(rng), sizes(rng));
    let case = draw_of(rng, home, sizes);
    let home = match home {
        Home::Bytes { channels: None } if rng.one_in(2) => Home::IntegerPool(CacheFormat::Int8PerToken),
        Home::Bits(kind) if rng.one_in(2) => Home::IntegerPool(CacheFormat::Int4(kind)),
        home => home,
    };
    attention::bits_of_case(rng, recorder, case, home);
}
