//! Gradients of rows with all scores far from 0, as a finite mask makes them: as close to those in `f64` as the plain passes'.

use crate::fuzzer::array::Array;
use crate::fuzzer::case::{Case, Cover, Entries};
use crate::fuzzer::draw::{Home, draw_of, sizes_of};
use crate::fuzzer::kinds::gradients::Back;
use crate::fuzzer::pieces::any_isa;
use crate::fuzzer::rng::Rng;
use sdpa::{Dtype, Exec};

/// What is added to all scores of a row. Frameworks hide padding by the last ones.
const SHARED: [f32; 16] =
    [1e3, 1e4, -1e4, 1e5, -1e5, 1e6, 1e7, -1e7, 1e8, 1e9, -1e9, -1e30, -65_504.0, 1e-3, f32::MIN, -3e38];

pub(super) fn check(rng: &mut Rng) {
    let mut sizes = sizes_of(rng, 1..=10_000);
    if rng.one_in(2) {
        // Few rows of many keys: an error by their number stands out.
        (sizes[3], sizes[4], sizes[5]) = (1 + rng.below(4), rng.pick(&[100, 255, 256, 257, 300, 600]), sizes[5].min(8));
    }
    let mut case = draw_of(rng, Home::Tensors, sizes);
    case.make_tame();
    let x = shared(rng, &mut case);
    let back = loop {
        let mut back = Back::draw(rng, case.clone()).unrounded();
        // The one that was drawn takes what is extreme for what is odd.
        back.case.bias = case.bias.clone();
        let tame = Back { case: Case { bias: None, ..back.case.clone() }, ..back.clone() };
        if tame.is_tame() {
            break back;
        }
        case.settings.alignment = None;
        case.settings.softcap = None;
        case.settings.causal = false;
        case.settings.window = None;
        case.alibi = None;
    };
    let exec = Exec::serial().isa(any_isa(rng));
    back.describing(|| {
        let all = back.gradients(&mut rng.clone(), "far scores", exec);
        back.close(&format!("scores beside {x:e}, {exec:?}"), &all, &back.oracle::<f64>(), &back.oracle::<f32>());
    });
}

/// Gives all rows, or some of them, a bias that their keys share: exactly, or beside scores of their own.
fn shared(rng: &mut Rng, case: &mut Case) -> f32 {
    let ([batch, heads], (rows, keys)) = ([case.batch(), case.heads()], case.longest());
    let (x, all) = (rng.pick(&SHARED), rng.one_in(2));
    let columns = if rng.one_in(3) { 1 } else { keys };
    let of_row = Array::from_fn([batch, heads, rows, 1], |_| if all || rng.one_in(3) { x } else { 0.0 });
    let of = Array::from_fn([batch, heads, rows, columns], |[b, h, l, _]| of_row.get([b, h, l, 0]));
    case.bias = Some((Entries { of, cover: Cover::All }, Dtype::F32));
    match rng.below(3) {
        // Scores are the bias: all weights of a row are alike.
        0 => case.q.data.fill(0.0),
        1 => case.settings.scale = Some(0.0),
        _ => {}
    }
    x
}
