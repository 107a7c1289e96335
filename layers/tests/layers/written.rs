//! Every element of a layer's output is written by a call that is no error, however few rows, keys and sequences there are.

use crate::support::{Rng, UNWRITTEN};
use crate::tiny_bert::{CONFIG, model, source};
use sdpa::{Attention, Exec, View, ViewMut};
use sdpa_layers::{
    Activation, Bert, BertInput, Compute, Dictionary, Embedding, FeedForward, Form, LayerInput, Linear,
    LinearAttention, LinearInputs, LinearState, MultiHeadAttention, MultiHeadInput, Norm, NormOrder, Pooling, Reach,
    Sequences, Transformer, TransformerLayer, Update, Weights,
};

fn blank(len: usize) -> Vec<f32> {
    vec![f32::from_bits(UNWRITTEN); len]
}

/// All elements written, or after an error none.
#[track_caller]
fn check<E>(what: &str, done: Result<(), E>, out: &[f32]) {
    let kept = out.iter().filter(|x| x.to_bits() == UNWRITTEN).count();
    assert!(kept == if done.is_ok() { 0 } else { out.len() }, "{what}: {kept} of {} are as they were", out.len());
}

fn compute() -> Compute<'static> {
    Compute::new(Exec::serial())
}

fn linear(outputs: usize, inputs: usize) -> Linear {
    Linear::new(Weights::rows(&[0.5; 64][..outputs * inputs], [outputs, inputs]).unwrap())
}

/// Width 4, two heads on one or two key/value heads.
fn attention(kv_heads: usize, causal: bool) -> MultiHeadAttention {
    let projections = [linear(4, 4), linear(2 * kv_heads, 4), linear(2 * kv_heads, 4), linear(4, 4)];
    let settings = if causal { Attention::new().causal() } else { Attention::new() };
    MultiHeadAttention::new([2, kv_heads], projections).unwrap().attention(settings)
}

fn norm() -> Norm {
    Norm::layer([1.0; 4], 1e-5).unwrap()
}

fn feed_forward() -> FeedForward {
    FeedForward::gated(Activation::Gelu, linear(8, 4), linear(8, 4), linear(4, 8)).unwrap()
}

/// Ends of 0 to 2 sequences of 0 to 2 rows.
fn ends(rng: &mut Rng, sequences: usize) -> Vec<usize> {
    (0..sequences).fold(vec![0], |mut ends, n| {
        ends.push(ends[n] + rng.below(3));
        ends
    })
}

#[test]
fn every_output_of_a_layer_is_written_whatever_the_number_of_rows() {
    for seed in 0..300 {
        let mut rng = Rng::new(seed);
        let count = rng.below(3);
        let (rows, keys) = (ends(&mut rng, count), ends(&mut rng, count));
        let what = format!("seed {seed}, rows {rows:?}, keys {keys:?}");
        let (n, m) = (rows[count], keys[count]);
        let (x, memory) = (vec![0.5; n * 4], vec![0.25; m * 4]);
        let (own, others) = (Sequences::Ragged(&rows), Sequences::Ragged(&keys));
        let longest = |ends: &[usize]| ends.windows(2).map(|w| w[1] - w[0]).max().unwrap_or(0);
        let compute = &mut compute();
        let mut run = |name: &str, len: usize, f: &mut dyn FnMut(&mut [f32], &mut Compute) -> bool| {
            let mut out = blank(len);
            let done = f(&mut out, compute).then_some(()).ok_or(());
            assert!(done.is_ok() || name.ends_with('?'), "{what}: {name}");
            check(&format!("{what}: {name}"), done, &out);
        };
        run("linear", n * 3, &mut |out, c| linear(3, 4).forward(&x, out, c).is_ok());
        run("linear without outputs", 0, &mut |out, c| linear(0, 4).forward(&x, out, c).is_ok());
        run("norm", n * 4, &mut |out, c| norm().forward(&x, out, c).is_ok());
        run("feed forward", n * 4, &mut |out, c| feed_forward().forward(&x, out, c).is_ok());
        let table = Embedding::new([0.5; 12], 4).unwrap();
        run("embedding", n * 4, &mut |out, c| table.look_up(&vec![1; n], out, c).is_ok());
        for pooling in [Pooling::Mean, Pooling::First] {
            run("pooling", count * 4, &mut |out, _| pooling.forward(&x, 4, own, out).is_ok());
        }
        for (kv_heads, causal) in [(1, false), (2, true)] {
            let layer = attention(kv_heads, causal);
            run("attention", n * 4, &mut |out, c| layer.forward(MultiHeadInput::new(&x, own), out, c).is_ok());
            let cross = MultiHeadInput::new(&x, own).memory(&memory, others);
            run("attention to memory?", n * 4, &mut |out, c| layer.forward(cross, out, c).is_ok());
            let shape = [count, 2, longest(&rows), longest(&keys)];
            run("weights?", shape.iter().product(), &mut |weights, c| {
                let weights = ViewMut::bhld(weights, shape).unwrap();
                layer.forward_with_weights(cross, &mut blank(n * 4), weights, c).is_ok()
            });
        }
        let layer =
            || TransformerLayer::encoder(NormOrder::Pre, (attention(1, false), norm()), (feed_forward(), norm()));
        for layers in 0..3 {
            let Ok(stack) = Transformer::new((0..layers).map(|_| layer().unwrap()).collect()) else { continue };
            let stack = stack.norm(norm()).unwrap();
            run("transformer", n * 4, &mut |out, c| stack.forward(LayerInput::new(&x, own), out, c).is_ok());
        }
        let mut dictionary = Dictionary::<[f32; 3]>::new(4, 1.0).unwrap();
        (0..rng.below(3)).for_each(|n| dictionary.insert(&[1.0, n as f32, 0.0, 0.0], [0.5; 3]).unwrap());
        run("dictionary?", n * 3, &mut |out, c| dictionary.get_many(&x, out, c).is_ok());
    }
}

#[test]
fn every_output_of_decoding_is_written_whatever_the_number_of_sequences() {
    for (sequences, new) in (0..3).flat_map(|a| (0..3).map(move |b| (a, b))) {
        let (layer, mut compute) = (attention(1, true), compute());
        let mut cache = layer.cache(sequences).unwrap();
        for step in 0..3 {
            let mut out = blank(sequences * new * 4);
            let done = layer.decode(&vec![0.5; sequences * new * 4], &mut cache, &mut out, &mut compute);
            check(&format!("{sequences} sequences, {new} tokens, step {step}"), done, &out);
        }
    }
}

#[test]
fn every_output_of_linear_attention_is_written_whatever_its_sizes() {
    for seed in 0..500 {
        let mut rng = Rng::new(seed);
        let [batch, kv_heads, group, rows, keys] = [(); 5].map(|()| rng.below(3));
        let (form, reach) = (rng.pick(&[Form::Recurrent, Form::Chunked(2)]), rng.pick(&[Reach::Causal, Reach::Whole]));
        let keys = if reach == Reach::Causal { rows } else { keys };
        let (heads, data) = (kv_heads * group, [0.5f32; 64]);
        let view = |shape: [usize; 4]| View::bhld(&data[..shape.iter().product()], shape).unwrap();
        let inputs = LinearInputs::new(
            view([batch, heads, rows, 2]),
            view([batch, kv_heads, keys, 2]),
            view([batch, kv_heads, keys, 1]),
            Update::Linear,
        );
        let (shape, mut compute) = ([batch, heads, rows, 1], compute());
        let mut out = blank(shape.iter().product());
        let mut state = LinearState::new([batch, kv_heads, 2, 1]).unwrap();
        let call = LinearAttention::new().form(form).reach(reach);
        let done = call.forward(inputs, &mut state, ViewMut::bhld(&mut out, shape).unwrap(), &mut compute);
        check(&format!("seed {seed}, {shape:?}, {keys} keys, {form:?}"), done, &out);
    }
}

#[test]
fn every_output_of_a_model_is_written_whatever_the_number_of_tokens() {
    let model = model();
    let bert = Bert::new(CONFIG, &source(&model)).unwrap();
    for seed in 0..20 {
        let mut rng = Rng::new(seed);
        let count = rng.below(3);
        let ends = ends(&mut rng, count);
        let tokens = vec![7; ends[count]];
        let input = BertInput::new(&tokens, Sequences::Ragged(&ends));
        let (mut out, mut pooled) = (blank(tokens.len() * CONFIG.hidden_size), blank(count * CONFIG.hidden_size));
        check(&format!("{ends:?}"), bert.forward(input, &mut out, &mut compute()), &out);
        check(&format!("{ends:?}, pooled"), bert.embed(input, Pooling::Mean, &mut pooled, &mut compute()), &pooled);
    }
}
