//! Dropout with probabilities next to 0 and to 1, and beyond.

use crate::fuzzer::draw::{Home, draw, draw_at};
use crate::fuzzer::kinds::{attention, gradients};
use crate::fuzzer::outs::{Outs, Wanted};
use crate::fuzzer::rng::Rng;
use crate::fuzzer::stage::Stage;
use sdpa::{Dropout, Error};

/// The last one is the largest number below 1; of 2³² random numbers, 256 keep a weight.
const EXTREME: [f32; 10] =
    [-0.0, f32::from_bits(1), f32::MIN_POSITIVE, 1e-10, 1.0 / 8_589_934_592.0, 1e-9, 0.999, 0.999_99, 0.999_999, ONE];
const ONE: f32 = f32::from_bits(0x3f7f_ffff);
const REFUSED: [f32; 7] = [1.0, 1.5, -1e-45, -0.5, f32::NAN, f32::INFINITY, f32::NEG_INFINITY];

pub(super) fn check(rng: &mut Rng) {
    let refused = rng.one_in(8);
    let p = if refused { rng.pick(&REFUSED) } else { rng.pick(&EXTREME) };
    let dropout = Some(Dropout { p, seed: rng.pick(&[0, u64::MAX, 1 << 32]), offset: rng.pick(&[0, u32::MAX]) });
    if !refused && rng.one_in(3) {
        let mut case = draw_at(rng, Home::Tensors);
        case.settings.dropout = dropout;
        return gradients::check_case(rng, case);
    }
    let (mut case, home) = draw(rng);
    case.settings.dropout = dropout;
    if !refused {
        return attention::check_case(rng, &case, home);
    }
    let (stage, mut outs) = (Stage::new(rng, &case, home), Outs::blank(rng, &case, Wanted::ALL));
    let error = case.attention().problem(stage.inputs(), outs.outputs()).err();
    assert!(matches!(error, Some(Error::Number { argument: "dropout", .. })), "{p}: {error:?}");
    assert!(outs.is_blank(), "{p}: a refused call wrote");
}
