//! Linear attention: every rule, form and normaliser that go together.

use super::{Draw, Recorder};
use crate::linear_attention_support::{Case, FORMS, RULES, Rule};
use crate::support::Tensor;
use sdpa_layers::{FeatureMap, Form, LinearAttention, LinearState, Normaliser, Reach};

pub(super) fn forward(draw: &mut Draw, recorder: &mut Recorder) {
    let (rule, form) = (draw.pick(&RULES), draw.pick(&FORMS));
    let adds = matches!(rule, Rule::Linear | Rule::Gated);
    let sums = adds && draw.flip();
    let (normaliser, map) =
        if sums { (Normaliser::KeySum, FeatureMap::EluPlusOne) } else { (Normaliser::None, FeatureMap::Identity) };
    let reach = if matches!(rule, Rule::Linear) && form == Form::Recurrent && draw.flip() {
        Reach::Whole
    } else {
        Reach::Causal
    };
    let mut layer = LinearAttention::new().form(form).normaliser(normaliser).feature_map(map).reach(reach);
    if !sums && draw.flip() {
        layer = layer.scale(0.25);
    }
    let [b, h, group, keys] = [draw.upto(2), draw.upto(2), draw.upto(3), draw.upto(50)];
    let (d, dv) = (draw.pick(&[1, 4, 16, 20, 33, 64]), draw.pick(&[1, 8, 16, 33, 65]));
    recorder.say(format!("{rule:?}, {form:?}, {normaliser:?}, {reach:?}, {:?}", [b, h, group, keys, d, dv]));
    let case = case(draw, (rule, normaliser), [b, h, group, keys, d, dv]);
    recorder.each(|compute| {
        let outcome = case.run_with(layer, compute);
        [outcome.out.data, outcome.state.as_slice().to_vec()]
    });
}

fn case(draw: &mut Draw, (rule, normaliser): (Rule, Normaliser), [b, h, group, keys, d, dv]: [usize; 6]) -> Case {
    let small = 1.0 / (d as f32).sqrt();
    let q = Tensor::from_fn([b, h * group, keys, d], |_| draw.normal());
    let k = Tensor::from_fn([b, h, keys, d], |_| small * draw.normal());
    let v = Tensor::from_fn([b, h, keys, dv], |_| draw.normal());
    let gated = matches!(rule, Rule::Gated | Rule::GatedDelta);
    let log_decay = gated.then(|| Tensor::from_fn([b, h, keys, d], |_| -draw.unit()));
    let delta = matches!(rule, Rule::Delta | Rule::GatedDelta);
    let beta = delta.then(|| Tensor::from_fn([b, h, keys, 1], |_| 0.05 + 0.9 * draw.unit()));
    let shape = [b, h, d, dv];
    let state = if normaliser == Normaliser::None { LinearState::new(shape) } else { LinearState::normalised(shape) };
    let mut state = state.expect("good sizes");
    state.as_mut_slice().iter_mut().for_each(|x| *x = draw.normal().abs());
    Case { q, k, v, log_decay, beta, state, lens: None }
}
