//! Rows or keys around 4,096: many blocks of keys, many tasks of rows.

use crate::fuzzer::bits::Recorder;
use crate::fuzzer::draw::{Home, Sizes, draw_of};
use crate::fuzzer::kinds::{attention, gradients};
use crate::fuzzer::rng::Rng;

pub(super) fn check(rng: &mut Rng) {
    let sizes = sizes(rng);
    if rng.one_in(4) {
        let case = draw_of(rng, Home::Tensors, sizes);
        return gradients::check_case(rng, case);
    }
    let home = Home::draw(rng);
    let case = draw_of(rng, home, sizes);
    attention::check_case(rng, &case, home);
}

/// A few rows, up to 2,000 keys.
pub(super) fn bits(rng: &mut Rng, recorder: &mut Recorder) {
    let (keys, rows) = (600 + rng.below(1401), rng.pick(&[1, 1, 1, 2, 3, 8, 17]));
    let (heads, kv_heads) = rng.pick(&[(1, 1), (2, 1), (2, 2), (4, 1)]);
    let (d, dv) = (rng.pick(&[16, 64, 65, 128]), rng.pick(&[4, 16, 64, 100, 128]));
    let (home, batch) = (Home::draw(rng), 1 + rng.below(2));
    let case = draw_of(rng, home, [batch, heads, kv_heads, rows, keys, d, dv]);
    attention::bits_of_case(rng, recorder, case, home);
}

/// Many keys for few rows, or the other way round.
pub(super) fn sizes(rng: &mut Rng) -> Sizes {
    let (many, few) = (4095 + rng.below(4), rng.up_to(2));
    let [rows, keys] = if rng.one_in(4) { [many, few] } else { [few, many] };
    let (heads, kv_heads) = rng.pick(&[(1, 1), (1, 1), (2, 1), (2, 2)]);
    [1, heads, kv_heads, rows, keys, rng.pick(&[1, 3, 8]), rng.pick(&[1, 4, 9])]
}
