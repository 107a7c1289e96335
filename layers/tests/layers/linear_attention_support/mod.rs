//! What the tests of linear attention share: random calls, a scalar oracle, one way to run.
#![allow(dead_code, unreachable_pub, reason = "every test binary compiles this module and uses its part of it")]

use crate::support::{Rng, Tensor, UNWRITTEN};
use sdpa::naive::Real;
use sdpa::{Exec, Isa, ViewMut};
use sdpa_layers::{Compute, FeatureMap, Form, LinearAttention, LinearInputs, LinearState, Normaliser, Update};

/// `[batch, kv_heads, group, rows, keys, head_dim, value_dim]`.
pub type Sizes = [usize; 7];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rule {
    Linear,
    Gated,
    Delta,
    GatedDelta,
}

pub const RULES: [Rule; 4] = [Rule::Linear, Rule::Gated, Rule::Delta, Rule::GatedDelta];

/// The tensors of a call, and the state it starts from.
#[derive(Debug, Clone)]
pub struct Case {
    pub q: Tensor,
    pub k: Tensor,
    pub v: Tensor,
    pub log_decay: Option<Tensor>,
    pub beta: Option<Tensor>,
    pub state: LinearState,
    pub lens: Option<Vec<usize>>,
}

/// What a call gave.
#[derive(Debug, Clone)]
pub struct Outcome {
    pub out: Tensor,
    pub state: LinearState,
}

impl Case {
    /// Keys of length about 1, as delta rules want them; decays between e⁻¹ and 1, strengths between 0 and 1; a state that
    /// has seen something.
    pub fn new(rule: Rule, normaliser: Normaliser, [b, h, group, rows, keys, d, dv]: Sizes, seed: u64) -> Self {
        let mut rng = Rng::new(seed);
        let q = Tensor::normal([b, h * group, rows, d], &mut rng);
        let mut k = Tensor::normal([b, h, keys, d], &mut rng);
        k.data.iter_mut().for_each(|x| *x /= (d as f32).sqrt());
        let v = Tensor::normal([b, h, keys, dv], &mut rng);
        let mut unit = |shape| Tensor::from_fn(shape, |_| rng.below(1 << 20) as f32 / (1 << 20) as f32);
        let (mut log_decay, mut beta) = (unit([b, h, keys, d]), unit([b, h, keys, 1]));
        log_decay.data.iter_mut().for_each(|x| *x = -*x);
        beta.data.iter_mut().for_each(|x| *x = 0.05 + 0.9 * *x);
        let mut state = match normaliser {
            Normaliser::None => LinearState::new([b, h, d, dv]).unwrap(),
            Normaliser::KeySum => LinearState::normalised([b, h, d, dv]).unwrap(),
            normaliser => panic!("a new normaliser: {normaliser:?}"),
        };
        // Positive, so that sums of keys are no nearer to 0 than those of the oracle's rows.
        state.as_mut_slice().iter_mut().for_each(|s| *s = rng.normal().abs());
        let log_decay = matches!(rule, Rule::Gated | Rule::GatedDelta).then_some(log_decay);
        let beta = matches!(rule, Rule::Delta | Rule::GatedDelta).then_some(beta);
        Self { q, k, v, log_decay, beta, state, lens: None }
    }

    pub fn update(&self) -> Update<'_> {
        match (&self.log_decay, &self.beta) {
            (None, None) => Update::Linear,
            (Some(log_decay), None) => Update::Gated { log_decay: log_decay.view() },
            (None, Some(beta)) => Update::Delta { beta: beta.view() },
            (Some(log_decay), Some(beta)) => Update::GatedDelta { log_decay: log_decay.view(), beta: beta.view() },
        }
    }

    pub fn inputs(&self) -> LinearInputs<'_> {
        let inputs = LinearInputs::new(self.q.view(), self.k.view(), self.v.view(), self.update());
        self.lens.as_ref().map_or(inputs, |lens| inputs.lens(lens))
    }

    /// The same with other tensors in place of each that has rows.
    pub fn map(&self, mut f: impl FnMut(&Tensor) -> Tensor) -> Self {
        let state = self.state.clone();
        let (log_decay, beta) = (self.log_decay.as_ref().map(&mut f), self.beta.as_ref().map(&mut f));
        Self { q: f(&self.q), k: f(&self.k), v: f(&self.v), log_decay, beta, state, lens: None }
    }

    pub fn out_shape(&self) -> [usize; 4] {
        let heads = self.q.shape[1].max(self.state.shape()[1]);
        [self.q.shape[0], heads, self.q.shape[2], self.v.shape[3]]
    }

    pub fn run(&self, layer: LinearAttention, exec: Exec) -> Outcome {
        self.run_with(layer, &mut Compute::new(exec))
    }

    pub fn run_with(&self, layer: LinearAttention, compute: &mut Compute) -> Outcome {
        let (shape, mut state) = (self.out_shape(), self.state.clone());
        let mut out = Tensor::filled(shape, f32::from_bits(UNWRITTEN));
        let view = ViewMut::bhld(&mut out.data, shape).unwrap();
        layer.forward(self.inputs(), &mut state, view, compute).expect("a good call");
        Outcome { out, state }
    }
}

/// Forms around blocks of four, and longer than the sequence.
pub const FORMS: [Form; 8] = [
    Form::Recurrent,
    Form::Chunked(1),
    Form::Chunked(3),
    Form::Chunked(4),
    Form::Chunked(5),
    Form::Chunked(16),
    Form::Chunked(40),
    Form::Chunked(1000),
];

/// Every instruction set of this machine, on the calling thread.
pub fn execs() -> impl Iterator<Item = (Isa, Exec<'static>)> {
    Isa::available().map(|isa| (isa, Exec::serial().isa(isa)))
}

/// The recurrence as it is written down, one number at a time: outputs `[batch, heads, len, value_dim]` and the state.
/// In `f64` the truth, in `f32` the yardstick.
pub fn oracle<T: Real>(case: &Case, map: FeatureMap, scale: Option<f32>) -> (Vec<T>, Vec<T>) {
    let [b, h, d, dv] = case.state.shape();
    let normalised = case.state.as_slice().len() != b * h * d * dv;
    let columns = dv + normalised as usize;
    let group = case.q.shape[1] / h;
    let (zero, one) = (T::from(0.0), T::from(1.0));
    let feature = |x: f32| match map {
        FeatureMap::Identity => T::from(x),
        FeatureMap::EluPlusOne if x > 0.0 => T::from(x) + one,
        FeatureMap::EluPlusOne => T::from(x).exp(),
        map => panic!("a new map: {map:?}"),
    };
    let scale = T::from(scale.unwrap_or(1.0 / (d as f32).sqrt()));
    let mut states: Vec<T> = case.state.as_slice().iter().map(|&s| T::from(s)).collect();
    let mut out = vec![zero; case.out_shape().iter().product()];
    for (index, state) in states.chunks_exact_mut(d * columns).enumerate() {
        let (n, kv) = (index / h, index % h);
        for t in 0..case.k.shape[2] {
            let key = |i: usize| feature(case.k.get([n, kv, t, i]));
            let value = |m: usize| if m < dv { T::from(case.v.get([n, kv, t, m])) } else { one };
            if let Some(decay) = &case.log_decay {
                for (i, row) in state.chunks_exact_mut(columns).enumerate() {
                    let kept = T::from(decay.get([n, kv, t, i])).exp();
                    row.iter_mut().for_each(|s| *s = *s * kept);
                }
            }
            for m in 0..columns {
                let written = match &case.beta {
                    None => value(m),
                    Some(beta) => {
                        let held = (0..d).fold(zero, |sum, i| sum + state[i * columns + m] * key(i));
                        T::from(beta.get([n, kv, t, 0])) * (value(m) - held)
                    }
                };
                (0..d).for_each(|i| state[i * columns + m] = state[i * columns + m] + key(i) * written);
            }
            for g in 0..group {
                let head = kv * group + g;
                let read = |m: usize| {
                    (0..d).fold(zero, |sum, i| sum + state[i * columns + m] * feature(case.q.get([n, head, t, i])))
                };
                for m in 0..dv {
                    let at = ((n * h * group + head) * case.q.shape[2] + t) * dv + m;
                    out[at] = if normalised { read(m) / read(dv) } else { scale * read(m) };
                }
            }
        }
    }
    (out, states)
}
