//! Rows or keys around 4,096: many blocks of keys, many tasks of rows.

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

/// Many keys for few rows, or the other way round.
pub(super) fn sizes(rng: &mut Rng) -> Sizes {
    let (many, few) = (4095 + rng.below(4), 1 + rng.below(2));
    let [rows, keys] = if rng.one_in(4) { [many, few] } else { [few, many] };
    let (heads, kv_heads) = rng.pick(&[(1, 1), (1, 1), (2, 1), (2, 2)]);
    [1, heads, kv_heads, rows, keys, rng.pick(&[1, 3, 8]), rng.pick(&[1, 4, 9])]
}
