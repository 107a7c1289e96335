//! Gradients of one element each, held against differences of the loss as the oracle computes it in `f64`.

use crate::fuzzer::case::Case;
use crate::fuzzer::draw::{Home, draw_of, sizes_of};
use crate::fuzzer::kinds::gradients::{Back, NAMES};
use crate::fuzzer::oracle::{Answer, Oracle};
use crate::fuzzer::place::value;
use crate::fuzzer::rng::Rng;

/// Half the distance of two values of an element.
const STEP: f64 = 1e-5;

pub(super) fn check(rng: &mut Rng) {
    let sizes = sizes_of(rng, 1..=1500);
    let case = draw_of(rng, Home::Tensors, sizes);
    let mut back = Back::draw(rng, case).unrounded();
    back.case.settings.softcap = back.case.settings.softcap.map(|cap| cap.max(0.5));
    if !back.is_tame() {
        return;
    }
    back.describing(|| differences(&mut rng.clone(), &back));
}

fn differences(rng: &mut Rng, back: &Back) {
    let (all, noise) = (back.gradients(rng, "gradients", sdpa::Exec::serial()), back.noise());
    for (n, written) in all.iter().enumerate() {
        let Some(written) = written else { continue };
        let count = written.bits.data.len();
        if count == 0 {
            continue;
        }
        let at = rng.below(count);
        let Some(expected) = difference(back, n, at) else { continue };
        let values = written.bits.data.iter().map(|&bits| f64::from(value(bits, written.dtype)));
        let largest = values.fold(0.0f64, |most, x| most.max(x.abs()));
        let got = f64::from(value(written.bits.data[at], written.dtype));
        let rounding = if written.dtype == sdpa::Dtype::F32 { 0.0 } else { expected.abs() / 200.0 };
        let bound = 1e-3 * largest.max(expected.abs()) + 4.0 * noise[n] + rounding + 1e-5;
        let name = NAMES[n];
        assert!(
            (got - expected).abs() <= bound,
            "element {at} of {name} is {got:e}, by differences {expected:e}, {bound:e}"
        );
    }
}

/// The derivative of the loss in one element of an input; `None` if it has none.
fn difference(back: &Back, input: usize, at: usize) -> Option<f64> {
    let losses = [-STEP, STEP].map(|step| {
        let mut case = back.case.clone();
        let moved = move_option(&mut case, input, at, step)?;
        let mut oracle = Oracle::of(&case);
        let tensor = match input {
            0 => Some(&mut oracle.q),
            1 => Some(&mut oracle.k),
            2 => Some(&mut oracle.v),
            _ => None,
        };
        let moved = match tensor {
            Some(tensor) => {
                tensor.data[at] += step;
                step
            }
            None => moved,
        };
        Some((loss(back, &oracle.answer())?, moved))
    });
    let [(low, from), (high, to)] = [losses[0]?, losses[1]?];
    (to > from).then(|| (high - low) / (to - from))
}

/// Moves an element of an option by about so much. Returns by how much it was moved.
fn move_option(case: &mut Case, input: usize, at: usize, step: f64) -> Option<f64> {
    let scale = case.scale();
    let x = match input {
        3 => case.bias.as_mut().map(|(entries, _)| &mut entries.of.data[at]),
        4 => case.sinks.as_mut().map(|sinks| &mut sinks[at]),
        5 => case.alibi.as_mut().map(|slopes| &mut slopes[at]),
        6 => {
            case.settings.scale = Some(scale);
            case.settings.scale.as_mut()
        }
        _ => return Some(0.0),
    };
    let x = x?;
    let was = f64::from(*x);
    *x = (was + step) as f32;
    x.is_finite().then(|| f64::from(*x) - was)
}

/// The loss with the gradients `d_out` and `d_lse` in the outputs; `None` if it is not finite.
fn loss(back: &Back, answer: &Answer) -> Option<f64> {
    let mut loss = 0.0;
    for (out, d_out) in answer.out.data.iter().zip(&back.d_out.0.data) {
        loss += out.x * f64::from(*d_out);
    }
    for (lse, d_lse) in answer.lse.data.iter().zip(back.d_lse.iter().flat_map(|x| &x.data)) {
        // A row that sees nothing has no gradient.
        loss += if lse.x == f64::NEG_INFINITY { 0.0 } else { lse.x * f64::from(*d_lse) };
    }
    loss.is_finite().then_some(loss)
}
