//! Layers that have one step.

use super::{Draw, Recorder};
use sdpa_layers::{
    Compute, Dictionary, Embedding, FeedForward, Linear, Pooling, Rope, RopePairs, Sequences, Start, normalise,
};

const WIDTHS: [usize; 14] = [1, 3, 8, 15, 16, 17, 31, 33, 48, 64, 100, 129, 256, 300];

pub(super) fn linear(draw: &mut Draw, recorder: &mut Recorder) {
    let (rows, inputs, outputs) = (draw.pick(&[1, 2, 5, 17, 70]), draw.pick(&WIDTHS), draw.pick(&WIDTHS));
    let activation = draw.any_activation();
    let layer = draw.any_linear(outputs, inputs).then(activation);
    recorder.say(format!("{rows} rows of {inputs}, {outputs} outputs, {activation:?}"));
    let x = draw.numbers(rows * inputs);
    recorder.each(|compute| [through(&layer, &x, compute)]);
}

fn through(layer: &Linear, x: &[f32], compute: &mut Compute) -> Vec<f32> {
    let mut out = vec![0.0; x.len() / layer.inputs() * layer.outputs()];
    layer.forward(x, &mut out, compute).expect("it fits");
    out
}

pub(super) fn norm(draw: &mut Draw, recorder: &mut Recorder) {
    let (rows, width) = (draw.pick(&[1, 3, 40]), draw.pick(&WIDTHS));
    let norm = draw.any_norm(width);
    recorder.say(format!("{rows} rows of {width}"));
    let (x, add) = (draw.numbers(rows * width), draw.numbers(rows * width));
    recorder.each(|compute| {
        let (mut sum, mut out, mut second) = (x.clone(), vec![0.0; x.len()], vec![0.0; x.len()]);
        norm.forward(&x, &mut out, compute).expect("it fits");
        norm.add_and_forward(&mut sum, &add, &mut second, compute).expect("it fits");
        [out, sum, second]
    });
}

pub(super) fn feed_forward(draw: &mut Draw, recorder: &mut Recorder) {
    let (rows, [inputs, hidden, outputs]) = (draw.pick(&[1, 4, 33]), [(); 3].map(|()| draw.pick(&WIDTHS)));
    let (activation, gated) = (draw.any_activation(), draw.flip());
    let [gate, up, down] = [[hidden, inputs], [hidden, inputs], [outputs, hidden]].map(|[o, i]| draw.any_linear(o, i));
    let layer =
        if gated { FeedForward::gated(activation, gate, up, down) } else { FeedForward::new(activation, up, down) };
    let layer = layer.expect("good sizes");
    let kind = if gated { "gated " } else { "" };
    recorder.say(format!("{rows} rows of {inputs}, {hidden} hidden, {outputs} outputs, {kind}{activation:?}"));
    let x = draw.numbers(rows * inputs);
    recorder.each(|compute| {
        let mut out = vec![0.0; rows * outputs];
        layer.forward(&x, &mut out, compute).expect("it fits");
        [out]
    });
}

pub(super) fn activation(draw: &mut Draw, recorder: &mut Recorder) {
    let (n, size, activation) = (draw.upto(500), draw.pick(&[0.01, 1.0, 8.0, 100.0]), draw.any_activation());
    recorder.say(format!("{activation:?} of {n} numbers of size {size}"));
    let (x, up): (Vec<f32>, _) = (draw.numbers(n).into_iter().map(|x| size * x).collect(), draw.numbers(n));
    recorder.each(|compute| {
        let (mut applied, mut gate) = (x.clone(), x.clone());
        activation.apply(compute.exec().instruction_set(), &mut applied);
        activation.gate(compute.exec().instruction_set(), &mut gate, &up);
        [applied, gate]
    });
}

/// Rotations of heads, and sines that are added.
pub(super) fn positions(draw: &mut Draw, recorder: &mut Recorder) {
    let ([batch, len], heads, half, more) = ([draw.upto(3), draw.upto(20)], draw.upto(4), draw.upto(33), draw.upto(5));
    let (head_dim, pairs) = (2 * half + more - 1, draw.pick(&[RopePairs::Half, RopePairs::Interleaved]));
    let (theta, table) = (draw.pick(&[10_000.0, 500_000.0, 100.5]), len + draw.pick(&[1, 100, 3000]));
    let frequencies = draw.flip().then(|| (0..half).map(|_| f64::from(draw.normal())).collect::<Vec<_>>());
    let rope = match &frequencies {
        Some(frequencies) => Rope::from_frequencies(table, frequencies, pairs),
        None => Rope::new(table, 2 * half, theta, pairs),
    };
    let (rope, width) = (rope.expect("good sizes"), heads * head_dim);
    let added = Embedding::sinusoidal(table, width).expect("good sizes");
    let starts: Vec<usize> = (0..batch).map(|_| table - len).collect();
    let kind = if frequencies.is_some() { "any frequencies".to_owned() } else { format!("θ {theta}") };
    recorder.say(format!("{batch} × {len} rows, {heads} heads of {head_dim}, {} turned, {pairs:?}, {kind}", 2 * half));
    recorder.say(format!("from {starts:?}"));
    let (x, sequences) = (draw.numbers(batch * len * width), Sequences::Even { batch, len });
    recorder.each(|compute| {
        let (mut turned, mut moved) = (x.clone(), x.clone());
        let start = Start::Each(&starts);
        rope.rotate(&mut turned, [heads, head_dim], sequences, start, compute).expect("it fits");
        added.add_positions(&mut moved, sequences, start, compute).expect("it fits");
        [turned, moved]
    });
}

/// Embeddings and their means, and values by similar keys.
pub(super) fn look_up(draw: &mut Draw, recorder: &mut Recorder) {
    let (entries, width, n) = (draw.upto(40), draw.pick(&WIDTHS), draw.upto(30));
    let embedding = Embedding::new(draw.numbers(entries * width), width).expect("good sizes");
    let tokens: Vec<u32> = (0..n).map(|_| draw.upto(entries) as u32 - 1).collect();
    let (pooling, cut) = (draw.pick(&[Pooling::Mean, Pooling::First]), draw.upto(n));
    let ends = if cut == n { vec![0, n] } else { vec![0, cut, n] };
    recorder.say(format!("{n} of {entries} entries of {width}, {pooling:?} of {ends:?}"));
    let mut dictionary = Dictionary::new(width, draw.pick(&[0.05, 0.5, 2.0])).expect("good sizes");
    for _ in 0..draw.upto(300) {
        let (key, value) = (draw.numbers(width), draw.numbers(5));
        dictionary.insert(&key, value).expect("it fits");
    }
    recorder.say(format!("dictionary of {}", dictionary.len()));
    let queries = draw.numbers(n * width);
    recorder.each(|compute| {
        let (mut rows, mut pooled) = (vec![0.0; n * width], vec![0.0; (ends.len() - 1) * width]);
        embedding.look_up(&tokens, &mut rows, compute).expect("they are there");
        pooling.forward(&rows, width, Sequences::Ragged(&ends), &mut pooled).expect("it fits");
        let mut unit = pooled.clone();
        normalise(&mut unit, width).expect("it fits");
        let mut values = vec![0.0; n * 5];
        dictionary.get_many(&queries, &mut values, compute).expect("it fits");
        let found = dictionary.get(&queries[..width], compute).expect("it fits");
        let best = dictionary.best_many(&queries, compute).expect("it fits").into_iter().map(|best| best as f32);
        [rows, pooled, unit, values, found.weights, found.value, vec![found.similarity], best.collect()]
    });
}
