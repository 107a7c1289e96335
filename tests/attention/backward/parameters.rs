//! Gradients in what a score function captures: a bias by distance and a softcap of each head, learned.

use super::oracle::error;
use crate::options::Case;
use crate::support::{Rng, Tensor, UNWRITTEN, assert_same_bits, execs};
use sdpa::{
    Alignment, Attention, BackwardPlan, Exec, Gradients, Inputs, Mods, Outputs, Position, Run, Saved, ScoreMod, View,
    ViewMut, Workspace, naive,
};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Distances that a head tells apart.
const BUCKETS: usize = 4;

/// A cap for each head, then a bias for each bucket of each head.
#[derive(Debug, Clone)]
struct Learned {
    heads: usize,
    numbers: Vec<f32>,
}

impl Learned {
    fn random(heads: usize, rng: &mut Rng) -> Self {
        let coarse = |x: f32| (x * 64.0).round() / 64.0;
        let caps = (0..heads).map(|_| 1.0 + coarse(rng.normal().abs())).collect::<Vec<_>>();
        let biases = (0..heads * BUCKETS).map(|_| coarse(rng.normal()));
        Self { heads, numbers: caps.into_iter().chain(biases).collect() }
    }

    fn bias(&self, at: Position) -> usize {
        self.heads + at.head * BUCKETS + at.distance.unsigned_abs().min(BUCKETS - 1)
    }

    /// tanh(score / cap), in `f64` as far as it goes.
    fn tanh(&self, score: f32, at: Position) -> f64 {
        (f64::from(score) / f64::from(self.numbers[at.head])).tanh()
    }
}

impl ScoreMod for Learned {
    fn score(&self, score: f32, at: Position) -> f32 {
        let bias = f64::from(self.numbers[self.bias(at)]);
        (f64::from(self.numbers[at.head]) * self.tanh(score, at) + bias) as f32
    }

    fn derivative(&self, score: f32, at: Position) -> Option<f32> {
        Some((1.0 - self.tanh(score, at).powi(2)) as f32)
    }

    fn parameters(&self) -> usize {
        self.numbers.len()
    }

    fn parameter_derivatives(&self, score: f32, at: Position, add: &mut dyn FnMut(usize, f32)) {
        let (tanh, ratio) = (self.tanh(score, at), f64::from(score) / f64::from(self.numbers[at.head]));
        add(at.head, (tanh - ratio * (1.0 - tanh * tanh)) as f32);
        add(self.bias(at), 1.0);
    }
}

/// A call, and the gradient of a loss in its output.
struct Call {
    case: Case,
    d_out: Tensor,
    score: Learned,
}

impl Call {
    fn new(rng: &mut Rng, sizes: [usize; 7], causal: bool) -> Self {
        let alignment = Some(Alignment::BottomRight);
        let case = Case { causal, alignment, ..Case::plain(rng, sizes) };
        let [batch, heads, _, rows, _, _, value_dim] = sizes;
        let d_out = Tensor::normal([batch, heads, rows, value_dim], rng);
        Self { case, d_out, score: Learned::random(heads, rng) }
    }

    fn forward<S: ScoreMod>(&self, inputs: Inputs<'_>, score: &S, exec: Exec) -> [Tensor; 2] {
        let [b, h, l, dv] = self.d_out.shape;
        let (mut out, mut lse) = (Tensor::filled([b, h, l, dv], 0.0), Tensor::filled([b, h, l, 1], 0.0));
        let outputs = Outputs::new(ViewMut::bhld(&mut out.data, out.shape).unwrap());
        let outputs = outputs.lse(ViewMut::bhld(&mut lse.data, lse.shape).unwrap());
        let problem = self.case.attention().problem(inputs, outputs).unwrap();
        problem.run_once_with(exec, Run::new().mods(&Mods::new().score(score as &dyn ScoreMod))).unwrap();
        [out, lse]
    }

    fn gradient(&self, exec: Exec) -> Vec<f32> {
        let mut gradient = vec![f32::from_bits(UNWRITTEN); self.score.parameters()];
        self.run(exec, &self.score, &mut Workspace::new(), Gradients::new().parameters(&mut gradient));
        gradient
    }

    fn run<S: ScoreMod>(&self, exec: Exec, score: &S, workspace: &mut Workspace, gradients: Gradients<'_>) {
        let [out, lse] = self.forward(self.case.inputs(), &self.score, exec);
        let saved = Saved::new(out.view(), lse.view(), self.d_out.view());
        let problem = self.case.attention().backward(self.case.inputs(), saved, gradients).unwrap();
        let plan = BackwardPlan::new(&problem, exec);
        problem.run_with(&plan, workspace, Run::new().mods(&Mods::new().score(score as &dyn ScoreMod))).unwrap();
    }

    fn oracle<T: naive::Real>(&self) -> Vec<T> {
        let mods = Mods::new().score(self.score.clone());
        let (attention, inputs) = (self.case.attention(), self.case.inputs());
        naive::gradients::<T, _, _, _>(&attention, &inputs, self.d_out.view(), None, &mods).unwrap().parameters
    }

    /// Σ out·d_out with a parameter moved.
    fn loss(&self, parameter: usize, step: f32) -> f64 {
        let mut score = self.score.clone();
        score.numbers[parameter] += step;
        let (attention, inputs) = (self.case.attention(), self.case.inputs());
        let answer = naive::answer::<f64, _, _, _>(&attention, &inputs, &Mods::new().score(score)).unwrap();
        answer.out.iter().zip(&self.d_out.data).map(|(x, &d)| x * f64::from(d)).sum()
    }
}

#[test]
fn the_oracle_agrees_with_differences() {
    for seed in 0..40 {
        let mut rng = Rng::new(seed);
        let sizes = [1 + rng.below(2), 2, 1, 3, 5, 3, 2];
        let call = Call::new(&mut rng, sizes, seed % 2 == 0);
        for (parameter, expected) in call.oracle::<f64>().into_iter().enumerate() {
            let step = 1.0f32 / 64.0;
            let at = |steps: f32| call.loss(parameter, steps * step);
            let got = (8.0 * (at(1.0) - at(-1.0)) - (at(2.0) - at(-2.0))) / (12.0 * f64::from(step));
            let off = (got - expected).abs();
            assert!(off < 1e-4 * (1.0 + expected.abs()), "seed {seed}, {parameter}: {got} by differences, {expected}");
        }
    }
}

/// On every instruction set those of the oracle, no farther from them than the plain passes; on any number of threads, in one head
/// too, whose key blocks wait for each other, the same bits.
#[test]
fn gradients_are_the_oracles_whoever_computes_them() {
    let pools = [2, 3, 8].map(|threads| rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap());
    let sizes = [[1, 1, 1, 300, 1100, 16, 16], [2, 4, 2, 130, 600, 24, 32], [1, 2, 2, 1, 700, 8, 8]];
    for (seed, sizes) in (1..).zip(sizes) {
        let call = Call::new(&mut Rng::new(seed), sizes, seed == 1);
        let (expected, plain) = (call.oracle::<f64>(), call.oracle::<f32>());
        let mut first: Option<Vec<f32>> = None;
        for (isa, exec) in execs() {
            let alone = call.gradient(exec);
            let (off, plain) = (error(&alone, &expected), error(&plain, &expected));
            assert!(off <= plain.max(1e-6), "{sizes:?}, {isa}: off by {off:e}, plain passes by {plain:e}");
            let tensor = |x: &[f32]| Tensor { data: x.to_vec(), ..Tensor::filled([1, 1, 1, x.len()], 0.0) };
            for pool in &pools {
                let threads = pool.current_num_threads();
                for _ in 0..3 {
                    let together = pool.install(|| call.gradient(exec.threads(threads)));
                    assert_same_bits(&format!("{isa}, {threads} threads"), &tensor(&together), &tensor(&alone));
                }
            }
            if isa.has_fma() {
                assert_same_bits(
                    &isa.to_string(),
                    &tensor(first.get_or_insert_with(|| alone.clone())),
                    &tensor(&alone),
                );
            }
        }
    }
}

/// A table by distance is a bias tensor that says it again for each row and key; its gradient has a term for each.
#[test]
fn gradients_of_a_table_are_sums_of_those_of_a_bias() {
    let mut rng = Rng::new(3);
    let mut call = Call::new(&mut rng, [1, 2, 1, 200, 520, 16, 16], true);
    call.score.numbers[..2].fill(1e6);
    let (table, mut bias) = (call.score.clone(), Tensor::filled([1, 2, 200, 520], 0.0));
    let position = |[batch, head, row, key]: [usize; 4]| {
        let position = row as isize + 320;
        Position { batch, head, row, key, position, distance: position - key as isize }
    };
    let indices: Vec<_> = crate::support::indices(bias.shape).collect();
    indices.iter().for_each(|&at| bias.set(at, table.numbers[table.bias(position(at))]));
    let biased = Call { case: Case { bias: Some(bias.into()), ..call.case.clone() }, ..call };
    for (isa, exec) in execs() {
        let mut dbias = Tensor::filled([1, 2, 200, 520], f32::NAN);
        let none = sdpa::WithDerivative::new(|s: f32, _: Position| s, |_, _: Position| 1.0);
        let [out, lse] = biased.forward(biased.case.inputs(), &none, exec);
        let saved = Saved::new(out.view(), lse.view(), biased.d_out.view());
        let gradients = Gradients::new().bias(ViewMut::bhld(&mut dbias.data, dbias.shape).unwrap());
        let problem = biased.case.attention().backward(biased.case.inputs(), saved, gradients).unwrap();
        problem.run_once(exec).unwrap();
        let mut expected = vec![0.0f64; table.parameters()];
        indices.iter().for_each(|&at| expected[table.bias(position(at))] += f64::from(dbias.get(at)));
        let plain = Call {
            case: Case { bias: None, ..biased.case.clone() },
            d_out: biased.d_out.clone(),
            score: table.clone(),
        };
        let off = error(&plain.gradient(exec)[2..], &expected[2..]);
        assert!(off < 1e-5, "{isa}: off by {off:e}");
    }
}

/// Gradients of another length, and calls that have no such sums, are refused, and nothing is written.
#[test]
fn gradients_in_other_than_all_parameters_are_refused() {
    let x = [0.5f32; 2 * 3 * 4];
    let (shape, lse, mut written) = ([1, 2, 3, 4], [0.0f32; 6], [f32::from_bits(UNWRITTEN); 11]);
    let view = View::bhld(&x, shape).unwrap();
    let (inputs, saved) = (Inputs::new(view, view, view), Saved::new(view, View::bhl(&lse, [1, 2, 3]).unwrap(), view));
    let learned = Learned::random(2, &mut Rng::new(1));
    let none = sdpa::WithDerivative::new(|s: f32, _: Position| s, |_, _: Position| 1.0);
    let of = "dparameters: length is 11, but the score function (ScoreMod::parameters) has";
    for (score, has) in [(&learned as &dyn ScoreMod, 10), (&none, 0), (&(), 0)] {
        let (mods, gradients) = (Mods::new().score(score), Gradients::new().parameters(&mut written));
        let run = Run::new().mods(&mods);
        let error = sdpa::attention_backward_with(&Attention::new(), inputs, saved, gradients, run).unwrap_err();
        assert_eq!(error.to_string(), format!("{of} {has}"));
    }
    let gradients = Gradients::new().parameters(&mut written);
    let error = sdpa::attention_backward(&Attention::new(), inputs, saved, gradients).unwrap_err();
    assert_eq!(error.to_string(), format!("{of} 0"));
    let gradients = Gradients::new().parameters(&mut written);
    let error = sdpa_unfused::attention_backward(&Attention::new(), inputs, saved, gradients, Exec::serial());
    assert!(error.unwrap_err().to_string().starts_with("dparameters"));
    assert!(written.iter().all(|x| x.to_bits() == UNWRITTEN));
    sdpa::attention_backward(&Attention::new(), inputs, saved, Gradients::new().parameters(&mut [])).unwrap();
}

/// Names a parameter that it does not have, of the last pair.
struct Hostile(Learned);

impl ScoreMod for Hostile {
    fn score(&self, score: f32, at: Position) -> f32 {
        self.0.score(score, at)
    }
    fn derivative(&self, score: f32, at: Position) -> Option<f32> {
        self.0.derivative(score, at)
    }
    fn parameters(&self) -> usize {
        self.0.parameters()
    }
    fn parameter_derivatives(&self, _: f32, at: Position, add: &mut dyn FnMut(usize, f32)) {
        add(if (at.row, at.key) == (129, 299) { self.parameters() } else { 0 }, 1.0);
    }
}

#[test]
fn a_parameter_that_is_not_there_is_a_panic_and_the_workspace_serves_others() {
    let call = Call::new(&mut Rng::new(4), [1, 2, 2, 130, 300, 16, 16], false);
    let pool = rayon::ThreadPoolBuilder::new().num_threads(2).build().unwrap();
    for (isa, exec) in execs() {
        let expected = call.gradient(exec);
        for exec in [exec, exec.threads(2)] {
            let (mut gradient, mut workspace) = (vec![f32::NAN; call.score.parameters()], Workspace::new());
            let hostile = Hostile(call.score.clone());
            let gradients = Gradients::new().parameters(&mut gradient);
            let run = AssertUnwindSafe(|| pool.install(|| call.run(exec, &hostile, &mut workspace, gradients)));
            let thrown = catch_unwind(run).expect_err("it has no such parameter");
            let message = thrown.downcast_ref::<String>().expect("a message");
            assert_eq!(message, "score function: parameter 10, but it has 10 (ScoreMod::parameters)", "{isa}");
            let gradients = Gradients::new().parameters(&mut gradient);
            pool.install(|| call.run(exec, &call.score, &mut workspace, gradients));
            assert_eq!(gradient, expected, "{isa}");
        }
    }
}
