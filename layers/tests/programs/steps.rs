//! The steps made visible: they are those of the fused call, those of a real model, and what permutations say they are.

use crate::fixtures::{HEAD_DIM, HEADS, sentence};
use crate::support::{Rng, Sizes, Tensor, Tensors, assert_same_bits, execs, largest, run, worst};
use sdpa::{Alignment, Attention, Error, Exec, Inputs, View};
use sdpa_layers::{Compute, Steps};

fn steps(attention: &Attention, inputs: Inputs<'_>, exec: Exec) -> Steps {
    Steps::new(attention, inputs, &mut Compute::new(exec)).expect("a good call")
}

/// The same rows in another order, in every head.
fn reordered(tensor: &Tensor, order: &[usize]) -> Tensor {
    Tensor::from_fn(tensor.shape, |[b, h, l, d]| tensor.get([b, h, order[l], d]))
}

fn output(steps: &Steps) -> Tensor {
    let shape = steps.shape();
    let mut all = steps.output().iter();
    Tensor::from_fn([1, shape.heads, shape.q_len, shape.value_dim], |_| *all.next().expect("enough numbers"))
}

/// Random sizes; causal, so that something is hidden.
const CASES: [Sizes; 4] =
    [[1, 1, 1, 1, 1, 1, 1], [1, 3, 3, 11, 11, 32, 32], [1, 4, 2, 37, 300, 17, 5], [1, 2, 1, 130, 530, 64, 33]];

#[test]
fn they_are_those_of_the_fused_call() {
    for (seed, sizes) in CASES.into_iter().enumerate() {
        let tensors = Tensors::normal(sizes, seed as u64);
        for (isa, exec) in execs() {
            for attention in [Attention::new(), Attention::new().causal().align(Alignment::BottomRight).softcap(3.0)] {
                let what = format!("{sizes:?}, {isa}");
                let steps = steps(&attention, tensors.inputs(), exec);
                assert_same_bits(&what, &output(&steps), &run(&attention, &tensors, exec).out);
            }
        }
    }
}

#[test]
fn rows_sum_to_one_and_say_the_same_thrice() {
    for (seed, sizes) in CASES.into_iter().enumerate() {
        let tensors = Tensors::normal(sizes, 10 + seed as u64);
        for (isa, exec) in execs() {
            let attention = Attention::new().causal().align(Alignment::BottomRight);
            let steps = steps(&attention, tensors.inputs(), exec);
            let [_, heads, kv_heads, rows, keys, _, value_dim] = sizes;
            for (head, i) in (0..heads).flat_map(|head| (0..rows).map(move |i| (head, i))) {
                let row = steps.row(head, i).expect("inside");
                let what = format!("{sizes:?}, {isa}, head {head}, row {i}");
                let sum: f64 = row.weights.iter().map(|&w| f64::from(w)).sum();
                assert!((sum - 1.0).abs() < 1e-6, "{what}: weights sum to {sum}");
                // Softmax of the scores, and the values under the weights, as the formulas have it.
                let max = row.scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                let exps: Vec<f64> = row.scores.iter().map(|&s| f64::from(s - max).exp()).collect();
                let total: f64 = exps.iter().sum();
                let expected: Vec<f64> = exps.iter().map(|e| e / total).collect();
                assert!(worst(row.weights, &expected).0 < 1e-6, "{what}: weights are not the softmax of the scores");
                let value = |d| {
                    let key = |j: usize| f64::from(tensors.v.get([0, head / (heads / kv_heads), j, d]));
                    (0..keys).map(|j| f64::from(row.weights[j]) * key(j)).sum()
                };
                let expected: Vec<f64> = (0..value_dim).map(value).collect();
                assert!(worst(row.output, &expected).0 < 3e-6, "{what}: output is not the weighted sum");
                let visible = i + keys - rows;
                assert!(row.weights[visible + 1..].iter().all(|&w| w == 0.0), "{what}: a weight behind the row");
                assert!(row.scores[visible + 1..].iter().all(|&s| s == f32::NEG_INFINITY), "{what}: a score behind it");
            }
            assert_eq!((steps.row(heads, 0), steps.row(0, rows)), (None, None));
            assert_eq!(steps.head_weights(heads), None);
        }
    }
}

#[test]
fn those_of_a_model_on_two_sentences() {
    for name in ["minilm_sauerkraut", "minilm_park"] {
        let sentence = sentence(name);
        assert_eq!(sentence.tokens.len(), 11);
        for (n, layer) in sentence.layers.iter().enumerate() {
            for (isa, exec) in execs() {
                let steps = steps(&Attention::new(), layer.attends().expect("fits"), exec);
                let recorded: Vec<f64> = layer.weights.iter().map(|&w| f64::from(w)).collect();
                for (what, got, expected) in
                    [("weights", steps.weights(), &recorded), ("context", steps.output(), &layer.context)]
                {
                    let (error, at) = worst(got, expected);
                    assert!(error <= 1e-6, "{name}, layer {n}, {isa}: {what} off by {error:e} at {at}");
                }
                let mean = steps.mean_weights();
                for i in 0..11 {
                    let sum: f32 = mean[i * 11..(i + 1) * 11].iter().sum();
                    assert!((sum - 1.0).abs() < 1e-6, "{name}, layer {n}: mean weights of row {i} sum to {sum}");
                }
                let of_heads =
                    (0..HEADS).map(|h| steps.head_weights(h).expect("a head")[7]).sum::<f32>() / HEADS as f32;
                assert_eq!(mean[7], of_heads);
            }
        }
    }
}

#[test]
fn the_order_of_keys_with_their_values_does_not_matter() {
    for (seed, sizes) in CASES.into_iter().enumerate() {
        let tensors = Tensors::normal(sizes, 20 + seed as u64);
        let keys = sizes[4];
        let mut order: Vec<usize> = (0..keys).collect();
        let mut rng = Rng::new(seed as u64);
        (1..keys).rev().for_each(|i| order.swap(i, rng.below(i + 1)));
        let (k, v) = (reordered(&tensors.k, &order), reordered(&tensors.v, &order));
        let both = Inputs::new(tensors.q.view(), k.view(), v.view());
        let keys_alone = Inputs::new(tensors.q.view(), k.view(), tensors.v.view());
        for (isa, exec) in execs() {
            let what = format!("{sizes:?}, {isa}");
            let plain = steps(&Attention::new(), tensors.inputs(), exec);
            let moved = steps(&Attention::new(), both, exec);
            // A score knows one query and one key, so each goes along with its key, bits and all; sums are taken in
            // another order.
            let expected = |all: &[f32]| -> Vec<f32> {
                all.chunks(keys).flat_map(|row| order.iter().map(|&j| row[j]).collect::<Vec<_>>()).collect()
            };
            let bits = |scores: &[f32]| scores.iter().map(|s| s.to_bits()).collect::<Vec<_>>();
            assert_eq!(bits(moved.scores()), bits(&expected(plain.scores())), "{what}: scores");
            let as_f64 = |xs: &[f32]| xs.iter().map(|&x| f64::from(x)).collect::<Vec<_>>();
            let (error, _) = worst(moved.weights(), &as_f64(&expected(plain.weights())));
            assert!(error < 1e-6, "{what}: weights off by {error:e}");
            let (error, _) = worst(moved.output(), &as_f64(plain.output()));
            assert!(error < 2e-6, "{what}: output off by {error:e}");
            if keys > 1 {
                let alone = steps(&Attention::new(), keys_alone, exec);
                let (change, _) = worst(alone.output(), &as_f64(plain.output()));
                assert!(change > 0.01 * largest(plain.output()), "{what}: keys alone change nothing: {change:e}");
            }
        }
    }
}

/// Where every sum is exact, its order cannot matter, and the bits are the same.
#[test]
fn nor_do_bits_where_sums_are_exact() {
    let mut rng = Rng::new(30);
    let mut small = |l, d| Tensor::from_fn([1, 2, l, d], |_| rng.below(17) as f32 - 8.0);
    let (q, v) = (small(9, 16), small(64, 8));
    let k = Tensor::from_fn([1, 2, 64, 16], |[_, h, _, d]| q.get([0, h, 0, d])); // every key alike: all weights 1/64
    let mut order: Vec<usize> = (0..64).rev().collect();
    order.rotate_left(23);
    let moved = reordered(&v, &order);
    for (isa, exec) in execs() {
        let plain = steps(&Attention::new(), Inputs::new(q.view(), k.view(), v.view()), exec);
        let moved = steps(&Attention::new(), Inputs::new(q.view(), k.view(), moved.view()), exec);
        assert!(plain.weights().iter().all(|&w| w == 1.0 / 64.0), "{isa}");
        assert_same_bits(isa.name(), &output(&moved), &output(&plain));
    }
}

#[test]
fn one_sequence_at_a_time() {
    let data = [0.0f32; 2 * HEAD_DIM];
    let x = View::bhld(&data, [2, 1, 1, HEAD_DIM]).expect("fits");
    let refused = Steps::new(&Attention::new(), Inputs::new(x, x, x), &mut Compute::default());
    let error = Error::Mismatch { argument: "inputs", what: "batch", got: 2, expected: 1, of: "one sequence" };
    assert_eq!(refused, Err(error));
    // No keys: nothing is seen.
    let none = View::bhld(&data[..0], [1, 1, 0, HEAD_DIM]).expect("fits");
    let x = View::bhld(&data[..HEAD_DIM], [1, 1, 1, HEAD_DIM]).expect("fits");
    let steps = steps(&Attention::new(), Inputs::new(x, none, none), Exec::serial());
    let row = steps.row(0, 0).expect("one row");
    assert_eq!((row.scores, row.weights, row.output), (&[][..], &[][..], &[0.0; HEAD_DIM][..]));
    // No heads have no mean.
    let headless = View::from_strides(&data, 0, [1, 0, 1 << 31, HEAD_DIM], [0; 4]).expect("empty");
    let refused = Steps::new(&Attention::new(), Inputs::new(headless, headless, headless), &mut Compute::default());
    assert_eq!(refused, Err(Error::Empty { argument: "q", what: "heads" }));
    // Scores that no machine can hold are an error, not an abort.
    let many = View::from_strides(&data, 0, [1, 1, 1 << 32, 1], [0; 4]).expect("broadcast");
    let refused = Steps::new(&Attention::new(), Inputs::new(many, many, many), &mut Compute::default());
    assert_eq!(refused, Err(Error::TooLarge { what: "scores", sizes: [1, 1, 1 << 32, 1 << 32] }));
    let many = View::from_strides(&data, 0, [1, 1, 1 << 29, 1], [0; 4]).expect("broadcast");
    let refused = Steps::new(&Attention::new(), Inputs::new(many, many, many), &mut Compute::default());
    assert_eq!(refused, Err(Error::Memory { what: "scores", bytes: 1 << 60 }));
}
