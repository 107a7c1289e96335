//! Multi-head attention: against its parts in f64, the same bits however sequences are laid out, refusals.

use crate::counting::counted;
use crate::support::{Rng, UNWRITTEN};
use crate::vectors::bits;
use sdpa::{Attention, Bound, Error, Exec, Isa, Mask, View, ViewMut, alibi_slopes};
use sdpa_layers::{Compute, Linear, MultiHeadAttention, MultiHeadInput, Norm, Rope, RopePairs, Sequences, Weights};

fn normal(n: usize, seed: u64) -> Vec<f32> {
    let mut rng = Rng::new(seed);
    (0..n).map(|_| rng.normal() / 4.0).collect()
}

/// Sizes that are all different, so that none can stand in for another.
#[derive(Clone, Copy)]
struct Sizes {
    heads: usize,
    kv_heads: usize,
    /// Widths of x, of what keys are made of, and of what values are made of.
    widths: [usize; 3],
    key_dim: usize,
    value_dim: usize,
    out: usize,
}

/// Options of a layer and a call: gains of the norms of queries and keys, sinks, and a bias `[heads, rows, keys]`.
#[derive(Debug, Default, Clone, Copy)]
struct Options<'a> {
    gains: Option<[&'a [f32]; 2]>,
    sinks: Option<&'a [f32]>,
    bias: Option<&'a [f32]>,
}

const EPS: f32 = 1e-5;

/// RMS norm of rows as wide as the gain.
fn rms(x: &mut [f64], gain: &[f32]) {
    for row in x.chunks_exact_mut(gain.len()) {
        let mean = row.iter().map(|x| x * x).sum::<f64>() / gain.len() as f64;
        row.iter_mut().zip(gain).for_each(|(x, &gain)| *x *= f64::from(gain) / (mean + f64::from(EPS)).sqrt());
    }
}

const CROSS: Sizes = Sizes { heads: 6, kv_heads: 2, widths: [40, 28, 35], key_dim: 8, value_dim: 5, out: 33 };
const SELF: Sizes = Sizes { heads: 6, kv_heads: 3, widths: [40; 3], key_dim: 7, value_dim: 9, out: 40 };

impl Sizes {
    /// Outputs and inputs of the four projections.
    fn shapes(&self) -> [[usize; 2]; 4] {
        let (h, kv) = (self.heads, self.kv_heads);
        [
            [h * self.key_dim, self.widths[0]],
            [kv * self.key_dim, self.widths[1]],
            [kv * self.value_dim, self.widths[2]],
            [self.out, h * self.value_dim],
        ]
    }

    fn weights(&self) -> [(Vec<f32>, Vec<f32>); 4] {
        let mut seed = 0;
        self.shapes().map(|[o, i]| {
            seed += 1;
            (normal(o * i, seed), normal(o, 10 + seed))
        })
    }

    fn layer(&self) -> MultiHeadAttention {
        let (weights, shapes) = (self.weights(), self.shapes());
        let linear =
            |i: usize| Linear::new(Weights::rows(&weights[i].0, shapes[i]).unwrap().bias(&weights[i].1).unwrap());
        MultiHeadAttention::new([self.heads, self.kv_heads], [0, 1, 2, 3].map(linear)).unwrap()
    }

    fn project(&self, which: usize, x: &[f64]) -> Vec<f64> {
        let (weight, bias) = &self.weights()[which];
        let inputs = self.shapes()[which][1];
        let row = |row: &[f64]| -> Vec<f64> {
            let dot = |w: &[f32]| w.iter().zip(row).map(|(&w, x)| f64::from(w) * x).sum::<f64>();
            weight.chunks_exact(inputs).zip(bias).map(|(w, &b)| dot(w) + f64::from(b)).collect()
        };
        x.chunks_exact(inputs).flat_map(row).collect()
    }

    /// One sequence, written out; `sees(row, key)` says what is visible.
    fn expected(&self, tensors: [&[f32]; 3], sees: impl Fn(usize, usize) -> bool) -> Vec<f64> {
        self.expected_with(Options::default(), tensors, sees)
    }

    fn expected_with(
        &self,
        options: Options<'_>,
        [x, keys, values]: [&[f32]; 3],
        sees: impl Fn(usize, usize) -> bool,
    ) -> Vec<f64> {
        let wide = |x: &[f32]| x.iter().map(|&x| f64::from(x)).collect::<Vec<_>>();
        let (mut q, mut k) = (self.project(0, &wide(x)), self.project(1, &wide(keys)));
        let v = self.project(2, &wide(values));
        if let Some([of_q, of_k]) = options.gains {
            rms(&mut q, of_q);
            rms(&mut k, of_k);
        }
        let (rows, all) = (q.len() / (self.heads * self.key_dim), k.len() / (self.kv_heads * self.key_dim));
        let (d, dv, kv) = (self.key_dim, self.value_dim, self.kv_heads);
        let mut attended = Vec::new();
        for (i, q) in q.chunks_exact(self.heads * d).enumerate() {
            for h in 0..self.heads {
                let shared = h / (self.heads / kv);
                let weight = |(j, k): (usize, &[f64])| {
                    let dot: f64 = (0..d).map(|c| q[h * d + c] * k[shared * d + c]).sum();
                    let bias = options.bias.map_or(0.0, |bias| f64::from(bias[(h * rows + i) * all + j]));
                    if sees(i, j) { (dot / (d as f64).sqrt() + bias).exp() } else { 0.0 }
                };
                let weights: Vec<f64> = k.chunks_exact(kv * d).enumerate().map(weight).collect();
                let sink = options.sinks.map_or(0.0, |sinks| f64::from(sinks[h]).exp());
                let sum: f64 = weights.iter().sum::<f64>() + sink;
                for c in 0..dv {
                    let total: f64 =
                        weights.iter().zip(v.chunks_exact(kv * dv)).map(|(w, v)| w * v[shared * dv + c]).sum();
                    attended.push(if sum > 0.0 { total / sum } else { 0.0 });
                }
            }
        }
        self.project(3, &attended)
    }
}

fn assert_close(got: &[f32], expected: &[f64]) {
    assert_eq!(got.len(), expected.len());
    for (i, (&got, expected)) in got.iter().zip(expected).enumerate() {
        assert!((f64::from(got) - expected).abs() < 3e-6, "element {i}: {got}, expected {expected}");
    }
}

fn forward(layer: &MultiHeadAttention, input: MultiHeadInput<'_>, rows: usize, exec: Exec) -> Vec<f32> {
    let mut out = vec![f32::from_bits(UNWRITTEN); rows * layer.outputs()];
    layer.forward(input, &mut out, &mut Compute::new(exec)).unwrap();
    out
}

#[test]
fn cross_attention_is_its_parts() {
    let (rows, keys) = (11, 17);
    let x = normal(rows * CROSS.widths[0], 20);
    let (k, v) = (normal(keys * CROSS.widths[1], 21), normal(keys * CROSS.widths[2], 22));
    let layer = CROSS.layer();
    let input = MultiHeadInput::new(&x, Sequences::one(rows)).keys_and_values(&k, &v, Sequences::one(keys));
    let hidden: Vec<u8> = (0..rows * keys).map(|i| u8::from(i * 5 % 7 == 0)).collect();
    let mask = Mask::drop(View::bhld(&hidden, [1, 1, rows, keys]).unwrap());
    for isa in Isa::available() {
        let exec = Exec::serial().isa(isa);
        assert_close(&forward(&layer, input, rows, exec), &CROSS.expected([&x, &k, &v], |_, _| true));
        assert_close(&forward(&layer, input.kv_lens(&[12]), rows, exec), &CROSS.expected([&x, &k, &v], |_, j| j < 12));
        assert_close(
            &forward(&layer, input.mask(mask), rows, exec),
            &CROSS.expected([&x, &k, &v], |i, j| hidden[i * keys + j] == 0),
        );
    }
}

/// Norms of heads and of whole projections, sinks, and a bias that also hides keys, alone and together.
#[test]
fn norms_sinks_and_biases_are_those_of_the_formula() {
    let (rows, keys) = (11, 17);
    let x = normal(rows * CROSS.widths[0], 20);
    let (k, v) = (normal(keys * CROSS.widths[1], 21), normal(keys * CROSS.widths[2], 22));
    let sinks: Vec<f32> = (0..6).map(|h| h as f32 / 3.0 - 1.0).collect();
    let mut bias = normal(6 * rows * keys, 25);
    bias.iter_mut().step_by(7).for_each(|x| *x = f32::NEG_INFINITY);
    let gain = |n, seed| normal(n, seed).iter().map(|x| 1.0 + x).collect::<Vec<_>>();
    let (of_heads, of_all) = ([gain(8, 26), gain(8, 27)], [gain(48, 28), gain(16, 29)]);
    let view = View::bhld(&bias, [1, 6, rows, keys]).unwrap();
    let input = MultiHeadInput::new(&x, Sequences::one(rows)).keys_and_values(&k, &v, Sequences::one(keys));
    for gains in [None, Some(&of_heads), Some(&of_all)] {
        for (with_sinks, with_bias) in [(false, false), (true, false), (false, true), (true, true)] {
            let mut layer = CROSS.layer();
            if let Some(gains) = gains {
                layer = layer.qk_norm(gains.clone().map(|gain| Norm::rms(gain, EPS).unwrap())).unwrap();
            }
            if with_sinks {
                layer = layer.sinks(sinks.clone()).unwrap();
            }
            let options = Options {
                gains: gains.map(|[q, k]| [&q[..], &k[..]]),
                sinks: with_sinks.then_some(&sinks[..]),
                bias: with_bias.then_some(&bias[..]),
            };
            let input = if with_bias { input.bias(view) } else { input };
            let expected = CROSS.expected_with(options, [&x, &k, &v], |_, _| true);
            for isa in Isa::available() {
                assert_close(&forward(&layer, input, rows, Exec::serial().isa(isa)), &expected);
            }
        }
    }
}

/// Decoding with norms and sinks has the bits of the whole sequence.
#[test]
fn norms_and_sinks_are_the_same_step_by_step() {
    let norm = || Norm::rms(normal(7, 30), EPS).unwrap();
    let layer = SELF.layer().attention(Attention::new().causal()).qk_norm([norm(), norm()]).unwrap();
    let layer = layer.sinks(normal(6, 31)).unwrap().rope(Rope::new(32, 6, 1e4, RopePairs::Half).unwrap()).unwrap();
    let x = normal(9 * 40, 32);
    for isa in Isa::available() {
        let exec = Exec::serial().isa(isa);
        let whole = forward(&layer, MultiHeadInput::new(&x, Sequences::one(9)), 9, exec);
        let (mut cache, mut out, mut compute) = (layer.cache(1).unwrap(), vec![0.0; 9 * 40], Compute::new(exec));
        for (x, out) in x.chunks(3 * 40).zip(out.chunks_mut(3 * 40)) {
            layer.decode(x, &mut cache, out, &mut compute).unwrap();
        }
        assert_eq!(bits(&out), bits(&whole), "{isa}");
    }
}

#[test]
fn sequences_have_the_same_bits_alone_in_a_batch_and_end_to_end() {
    let layer = SELF.layer().attention(Attention::new().causal()).alibi(alibi_slopes(6)).unwrap();
    let ends = [0, 9, 9, 30, 31];
    let rows = 31;
    let x = normal(rows * 40, 23);
    for exec in [Exec::serial(), Exec::default().threads(3)] {
        let together = forward(&layer, MultiHeadInput::new(&x, Sequences::Ragged(&ends)), rows, exec);
        for s in 0..ends.len() - 1 {
            let range = Sequences::Ragged(&ends).rows(s);
            let len = range.len();
            let (part, got) = (&x[range.start * 40..range.end * 40], &together[range.start * 40..range.end * 40]);
            let alone = forward(&layer, MultiHeadInput::new(part, Sequences::one(len)), len, exec);
            assert_eq!(bits(got), bits(&alone), "sequence {s}");
            let twice = [part, part].concat();
            let pair = Sequences::Even { batch: 2, len };
            let batch = forward(&layer, MultiHeadInput::new(&twice, pair), 2 * len, exec);
            assert_eq!(bits(&batch), [bits(got), bits(got)].concat(), "sequence {s} in a batch");
        }
    }
}

#[test]
fn weights_are_those_the_output_was_made_with() {
    let layer = SELF.layer().attention(Attention::new().causal());
    let (batch, len) = (2, 13);
    let x = normal(batch * len * 40, 24);
    let input = MultiHeadInput::new(&x, Sequences::Even { batch, len });
    let plain = forward(&layer, input, batch * len, Exec::serial());
    let (mut out, mut weights) = (vec![0.0; plain.len()], vec![f32::NAN; batch * 6 * len * len]);
    let view = ViewMut::bhld(&mut weights, [batch, 6, len, len]).unwrap();
    layer.forward_with_weights(input, &mut out, view, &mut Compute::default()).unwrap();
    assert_eq!(bits(&out), bits(&plain));
    for (i, row) in weights.chunks_exact(len).enumerate() {
        assert!((row.iter().sum::<f32>() - 1.0).abs() < 1e-6, "row {i} sums to {}", row.iter().sum::<f32>());
        assert!(row[i % len + 1..].iter().all(|&w| w == 0.0), "row {i} looks ahead");
    }
}

#[test]
fn a_warm_call_allocates_nothing() {
    let norm = || Norm::rms(vec![1.0; 7], EPS).unwrap();
    let layer = SELF.layer().qk_norm([norm(), norm()]).unwrap().sinks(vec![0.5; 6]).unwrap();
    let (x, mut out, mut compute) = (normal(50 * 40, 2), vec![0.0; 50 * 40], Compute::new(Exec::serial()));
    let mut call = || layer.forward(MultiHeadInput::new(&x, Sequences::one(50)), &mut out, &mut compute).unwrap();
    call();
    call();
    assert_eq!(counted(call), (0, 0));
}

#[test]
fn what_does_not_fit_is_refused_by_name() {
    let mismatch = |argument, what, got, expected, of| Error::Mismatch { argument, what, got, expected, of };
    let range = |argument, what, got, (bound, limit), of| Error::Range { argument, what, got, bound, limit, of };
    let linears =
        |shapes: [[usize; 2]; 4]| shapes.map(|[o, i]| Linear::new(Weights::rows(&vec![0.0; o * i], [o, i]).unwrap()));
    for (heads, shapes, error) in [
        ([6, 4], SELF.shapes(), Error::Heads { q_heads: 6, kv_heads: 4, of: "k" }),
        ([0, 0], SELF.shapes(), Error::Heads { q_heads: 0, kv_heads: 0, of: "k" }),
        (
            [2, 2],
            [[5, 4], [4, 4], [4, 4], [4, 4]],
            range("q projection", "outputs", 5, (Bound::MultipleOf, 2), "the number of query heads"),
        ),
        (
            [2, 1],
            [[4, 4], [4, 4], [2, 4], [4, 4]],
            range("k projection", "outputs", 4, (Bound::Exactly, 2), "kv_heads × the head_dim of q"),
        ),
        (
            [2, 2],
            [[4, 4], [4, 4], [5, 4], [4, 4]],
            range("v projection", "outputs", 5, (Bound::MultipleOf, 2), "the number of key/value heads"),
        ),
        (
            [2, 2],
            [[4, 4], [4, 4], [6, 4], [4, 4]],
            range("out projection", "inputs", 4, (Bound::Exactly, 6), "query heads × the value_dim of v"),
        ),
        ([2, 2], [[0, 4], [0, 4], [4, 4], [4, 4]], Error::Empty { argument: "q projection", what: "head" }),
    ] {
        assert_eq!(MultiHeadAttention::new(heads, linears(shapes)).unwrap_err(), error);
    }
    // Heads without end, of nothing.
    let none = MultiHeadAttention::new([usize::MAX, 1], linears([[0, 4], [0, 4], [8, 4], [4, 4]]));
    assert_eq!(
        none.unwrap_err(),
        range("out projection", "inputs", 4, (Bound::Exactly, usize::MAX), "query heads × the value_dim of v")
    );
    let layer = CROSS.layer();
    let (x, k, v) = (normal(3 * 40, 1), normal(4 * 28, 2), normal(4 * 35, 3));
    let (three, four) = (Sequences::one(3), Sequences::one(4));
    let cross = MultiHeadInput::new(&x, three).keys_and_values(&k, &v, four);
    let mut out = vec![f32::from_bits(UNWRITTEN); 3 * 33];
    let whole = "the number of rows × their width";
    for (input, len, error) in [
        (
            MultiHeadInput::new(&x[1..], three),
            99,
            range("x", "length", 119, (Bound::MultipleOf, 40), "the width of a row"),
        ),
        (cross, 98, range("out", "length", 98, (Bound::Exactly, 99), whole)),
        (cross.keys_and_values(&k, &v[35..], four), 99, range("values", "length", 105, (Bound::Exactly, 140), whole)),
        (
            cross.keys_and_values(&k, &v, three),
            99,
            range("keys", "rows", 4, (Bound::Exactly, 3), "the tokens of all sequences"),
        ),
        (cross.keys_and_values(&k, &v, Sequences::Even { batch: 2, len: 2 }), 99, mismatch("k", "batch", 2, 1, "q")),
        (
            cross.keys_and_values(&k, &v, Sequences::Ragged(&[0, 4])),
            99,
            Error::Needs { argument: "ragged sequences", needs: "x and the keys to be ragged, both" },
        ),
        (cross.kv_lens(&[1, 2]), 99, mismatch("kv_lens", "length", 2, 1, "the batch")),
    ] {
        assert_eq!(layer.forward(input, &mut out[..len], &mut Compute::default()).unwrap_err(), error);
    }
    for ends in [&[][..], &[0, 2], &[1, 3], &[0, 4, 3]] {
        let input =
            MultiHeadInput::new(&x, Sequences::Ragged(ends)).keys_and_values(&k, &v, Sequences::Ragged(&[0, 4]));
        assert!(layer.forward(input, &mut out, &mut Compute::default()).is_err(), "{ends:?}");
    }
    assert!(out.iter().all(|x| x.to_bits() == UNWRITTEN), "a refused call wrote");
    assert!(CROSS.layer().alibi(vec![1.0; 5]).is_err());
    assert_eq!(CROSS.layer().sinks(vec![1.0; 5]).unwrap_err(), mismatch("sinks", "length", 5, 6, "the layer (heads)"));
    let norm = |width| Norm::rms(vec![1.0; width], EPS).unwrap();
    for (widths, argument, got) in [([7, 8], "q norm", 7), ([8, 48], "k norm", 48), ([16, 8], "q norm", 16)] {
        let error = range(argument, "width", got, (Bound::Exactly, 8), "the head_dim of the layer");
        assert_eq!(CROSS.layer().qk_norm(widths.map(norm)).unwrap_err(), error);
    }
    let bias = normal(6 * 4 * 5, 4);
    let bias = View::bhld(&bias, [1, 6, 4, 5]).unwrap();
    let refused = CROSS.layer().forward(cross.bias(bias), &mut vec![0.0; 99], &mut Compute::default());
    assert_eq!(refused.unwrap_err(), mismatch("bias", "rows", 4, 3, "the call"));
}

/// Few numbers in, few numbers out, and between them more than any machine holds.
#[test]
fn projections_that_there_is_no_memory_for_are_refused() {
    const DIM: usize = 1 << 22;
    const ROWS: usize = 1 << 24;
    let wide = vec![1.0; DIM];
    let linear = |outputs: usize| Linear::new(Weights::rows(&wide[..outputs], [outputs, 1]).unwrap());
    let layer = MultiHeadAttention::new([1, 1], [linear(DIM), linear(DIM), linear(1), linear(1)]).unwrap();
    let (x, mut out) = (vec![0.0; ROWS], vec![0.0; ROWS]);
    let refused = layer.forward(MultiHeadInput::new(&x, Sequences::one(ROWS)), &mut out, &mut Compute::default());
    assert_eq!(refused, Err(Error::Memory { what: "projections", bytes: 4 * ROWS * DIM }));
}
