//! Sizes of 0, 1 and 2: nothing is left unwritten, forward and backward.

use crate::fuzzer::draw::{Home, draw_of};
use crate::fuzzer::kinds::{attention, gradients};
use crate::fuzzer::rng::Rng;

pub(super) fn check(rng: &mut Rng) {
    let [batch, kv_heads, rows, keys] = [(); 4].map(|()| rng.below(3));
    let heads = kv_heads * rng.below(3);
    let sizes = [batch, heads, kv_heads, rows, keys, 1 + rng.below(2), 1 + rng.below(2)];
    if rng.one_in(2) {
        let case = draw_of(rng, Home::Tensors, sizes);
        return gradients::check_case(rng, case);
    }
    let home = Home::draw(rng);
    let case = draw_of(rng, home, sizes);
    attention::check_case(rng, &case, home);
}
