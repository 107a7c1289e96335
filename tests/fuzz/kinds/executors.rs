//! Threads of the caller's, which may leave indices out, repeat them or make them up: the bits of one thread.

use crate::fuzzer::draw::{DTYPES, Home, SHARED, Sizes, draw_of, sizes_of};
use crate::fuzzer::hosts::Hosts;
use crate::fuzzer::kinds::gradients;
use crate::fuzzer::outs::{Outs, Wanted};
use crate::fuzzer::rng::Rng;
use crate::fuzzer::stage::{How, Stage};
use sdpa::{Exec, Workspace};

pub(super) fn check(rng: &mut Rng) {
    let (sizes, hosts) = (shared(rng), Hosts::draw(rng));
    if rng.one_in(4) {
        let case = draw_of(rng, Home::Tensors, sizes);
        return gradients::check_on(rng, case, &hosts);
    }
    let cache = Home::Cache(rng.pick(&DTYPES));
    let home = rng.pick(&[Home::Tensors, Home::Pages, cache]);
    let case = draw_of(rng, home, sizes);
    let stage = Stage::new(rng, &case, home);
    let expected = stage.run("one thread", &mut Outs::blank(rng, &case, Wanted::ALL), Exec::serial());
    let (wanted, mut workspace) = (Wanted { lse: true, ..Wanted::LEAST }, Workspace::new());
    let mut outs = Outs::blank(rng, &case, wanted);
    for _ in 0..2 {
        let what = format!("{hosts:?}, {}", case.describe());
        let how = How { executor: Some(&hosts), ..Exec::serial().threads(8).into() };
        assert_eq!(stage.run_into(outs.outputs(), how, &mut workspace), Ok(()), "{what}");
        outs.take(&what).same(&what, &expected);
    }
}

/// Sizes of calls that are shared out, by rows, or few rows by keys: many multiplications of few numbers.
pub(super) fn shared(rng: &mut Rng) -> Sizes {
    if rng.one_in(2) {
        let (heads, keys) = (8 + rng.below(5), 1100 + rng.below(500));
        return [1, heads, 1, 2, keys, rng.pick(&[128, 129]), 128];
    }
    loop {
        let sizes @ [batch, heads, kv_heads, rows, keys, d, dv] = sizes_of(rng, SHARED..=2 * SHARED);
        let numbers = batch * (heads * rows * (d + dv + keys) + kv_heads * keys * (d + dv));
        if numbers < 300_000 {
            return sizes;
        }
    }
}
