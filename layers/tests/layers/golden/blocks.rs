//! Layers made of others: multi-head attention, transformers, a whole BERT.

use super::{Draw, Recorder};
use crate::tiny_bert::{CONFIG, model, source};
use sdpa::{Alignment, Attention, Inputs, Mask, View, ViewMut, Window, alibi_slopes};
use sdpa_layers::{
    Bert, BertInput, Compute, FeedForward, LayerInput, MultiHeadAttention, MultiHeadInput, NormOrder, Pooling, Rope,
    RopePairs, Sequences, Steps, Transformer, TransformerLayer,
};
use std::num::NonZeroUsize;

/// Sizes of a layer of attention.
#[derive(Debug, Clone, Copy)]
struct Sizes {
    heads: usize,
    kv_heads: usize,
    /// Widths of what queries are made of, and keys and values.
    widths: [usize; 2],
    head_dim: usize,
    value_dim: usize,
    outputs: usize,
}

impl Sizes {
    fn draw(draw: &mut Draw, widths: [usize; 2], outputs: usize) -> Self {
        let (heads, kv_heads) = draw.pick(&[(1, 1), (2, 2), (4, 2), (6, 2), (3, 1)]);
        let (head_dim, value_dim) = (draw.pick(&[4, 8, 16, 20, 32]), draw.pick(&[5, 8, 16, 24]));
        Self { heads, kv_heads, widths, head_dim, value_dim, outputs }
    }

    fn layer(self, draw: &mut Draw) -> MultiHeadAttention {
        let Self { heads, kv_heads, widths: [x, memory], head_dim, value_dim, outputs } = self;
        let shapes = [
            [heads * head_dim, x],
            [kv_heads * head_dim, memory],
            [kv_heads * value_dim, memory],
            [outputs, heads * value_dim],
        ];
        let projections = shapes.map(|[outputs, inputs]| draw.any_linear(outputs, inputs));
        MultiHeadAttention::new([heads, kv_heads], projections).expect("good sizes").precision(draw.1)
    }
}

/// Positions by rotation, by slopes, or none.
fn with_positions(
    draw: &mut Draw,
    recorder: &mut Recorder,
    layer: MultiHeadAttention,
    sizes: Sizes,
) -> MultiHeadAttention {
    match draw.upto(3) {
        1 => {
            recorder.say("rope");
            let pairs = draw.pick(&[RopePairs::Half, RopePairs::Interleaved]);
            layer.rope(Rope::new(700, sizes.head_dim, 10_000.0, pairs).expect("good sizes")).expect("it fits")
        }
        2 => {
            recorder.say("ALiBi");
            layer.alibi(alibi_slopes(sizes.heads)).expect("one for each head")
        }
        _ => layer,
    }
}

/// Of a sequence on itself, or on another.
pub(super) fn multi_head(draw: &mut Draw, recorder: &mut Recorder) {
    let (batch, len, width, outputs) = (draw.upto(3), draw.upto(40), draw.pick(&[16, 33, 48]), draw.pick(&[17, 64]));
    let (cross, memory_len) = (draw.flip(), draw.pick(&[1, 20, 300]));
    let widths = if cross { [width, draw.pick(&[16, 40])] } else { [width; 2] };
    let sizes = Sizes::draw(draw, widths, outputs);
    recorder.say(format!("{batch} × {len} rows, {sizes:?}"));
    let mut layer = sizes.layer(draw);
    let keys = if cross { memory_len } else { len };
    if cross {
        recorder.say(format!("{memory_len} rows of memory"));
    } else {
        layer = with_positions(draw, recorder, layer, sizes);
        // With fewer keys than rows, these must stand somewhere.
        layer = layer.attention(Attention::new().causal().align(Alignment::TopLeft));
    }
    let (x, memory) = (draw.numbers(batch * len * width), draw.numbers(batch * memory_len * widths[1]));
    let lens: Option<Vec<usize>> = draw.flip().then(|| (0..batch).map(|_| draw.upto(keys)).collect());
    recorder.say(format!("lengths {lens:?}"));
    let hidden: Option<Vec<u8>> = draw.flip().then(|| (0..batch * keys).map(|_| u8::from(draw.upto(4) == 1)).collect());
    if hidden.is_some() {
        recorder.say("mask");
    }
    recorder.each(|compute| {
        let mut input = MultiHeadInput::new(&x, Sequences::Even { batch, len });
        if cross {
            input = input.memory(&memory, Sequences::Even { batch, len: memory_len });
        }
        input = lens.as_ref().map_or(input, |lens| input.kv_lens(lens));
        input = hidden
            .as_ref()
            .map_or(input, |hidden| input.mask(Mask::drop(View::bhld(hidden, [batch, 1, 1, keys]).expect("dense"))));
        let (mut out, shape) = (vec![0.0; batch * len * outputs], [batch, sizes.heads, len, keys]);
        let (mut second, mut weights) = (out.clone(), vec![0.0; shape.iter().product()]);
        layer.forward(input, &mut out, compute).expect("it fits");
        let view = ViewMut::bhld(&mut weights, shape).expect("dense");
        layer.forward_with_weights(input, &mut second, view, compute).expect("it fits");
        [out, second, weights]
    });
}

/// A prompt and tokens behind it, from a cache.
pub(super) fn decode(draw: &mut Draw, recorder: &mut Recorder) {
    let (batch, width, prompt, tokens) =
        (draw.upto(2), draw.pick(&[16, 24]), draw.pick(&[1, 17, 250, 300]), draw.upto(8));
    let sizes = Sizes::draw(draw, [width; 2], width);
    recorder.say(format!("{batch} × {prompt} rows, then {tokens}, {sizes:?}"));
    let layer = sizes.layer(draw);
    let window = draw.flip();
    let attention = if window {
        recorder.say("window");
        Attention::new().causal().window(Window::last_tokens(NonZeroUsize::new(20).expect("not 0")))
    } else {
        Attention::new().causal()
    };
    let layer = with_positions(draw, recorder, layer, sizes).attention(attention);
    let parts = [vec![prompt], vec![1; tokens]].concat();
    let inputs: Vec<Vec<f32>> = parts.iter().map(|n| draw.numbers(batch * n * width)).collect();
    recorder.each(|compute| {
        let mut cache = layer.cache(batch).expect("a cache");
        let step = |x: &Vec<f32>| {
            let mut out = vec![0.0; x.len()];
            layer.decode(x, &mut cache, &mut out, compute).expect("it fits");
            out
        };
        inputs.iter().map(step).collect::<Vec<_>>()
    });
}

fn feed_forward(draw: &mut Draw, width: usize) -> FeedForward {
    let (hidden, activation) = (draw.pick(&[20, 33, 64]), draw.any_activation());
    let [gate, up, down] = [[hidden, width], [hidden, width], [width, hidden]].map(|[o, i]| draw.any_linear(o, i));
    let layer = if draw.flip() {
        FeedForward::gated(activation, gate, up, down)
    } else {
        FeedForward::new(activation, up, down)
    };
    layer.expect("good sizes")
}

/// Encoder layers, or decoder layers with a memory; then the same token by token.
pub(super) fn transformer(draw: &mut Draw, recorder: &mut Recorder) {
    let (batch, len, width, layers) = (draw.upto(2), draw.upto(30), draw.pick(&[16, 24, 40]), draw.upto(3));
    let (order, cross, memory_len) = (draw.pick(&[NormOrder::Pre, NormOrder::Post]), draw.flip(), draw.upto(20));
    recorder.say(format!("{layers} layers, {order:?}, {batch} × {len} rows of {width}"));
    if cross {
        recorder.say(format!("{memory_len} rows of memory"));
    }
    let layer = |draw: &mut Draw, recorder: &mut Recorder| {
        let sizes = Sizes::draw(draw, [width; 2], width);
        let own = sizes.layer(draw);
        let own = with_positions(draw, recorder, own, sizes).attention(Attention::new().causal());
        let own = (own, draw.any_norm(width));
        let feed_forward = (feed_forward(draw, width), draw.any_norm(width));
        if cross {
            let other = Sizes::draw(draw, [width; 2], width).layer(draw);
            return TransformerLayer::decoder(order, own, (other, draw.any_norm(width)), feed_forward);
        }
        TransformerLayer::encoder(order, own, feed_forward)
    };
    let stack = (0..layers).map(|_| layer(draw, recorder).expect("one width")).collect();
    let transformer = Transformer::new(stack).and_then(|x| x.norm(draw.any_norm(width))).expect("one width");
    let (x, memory) = (draw.numbers(batch * len * width), draw.numbers(batch * memory_len * width));
    recorder.each(|compute| {
        let mut out = vec![0.0; x.len()];
        let input = LayerInput::new(&x, Sequences::Even { batch, len });
        if cross {
            let memory = LayerInput::new(&memory, Sequences::Even { batch, len: memory_len });
            transformer.forward_with_memory(input, memory, &mut out, compute).expect("it fits");
            return vec![out];
        }
        transformer.forward(input, &mut out, compute).expect("it fits");
        let decoded = decoded(&transformer, &x[..len * width], compute);
        vec![out, decoded]
    });
}

/// The first sequence alone, half of it at once and then token by token.
fn decoded(transformer: &Transformer, x: &[f32], compute: &mut Compute) -> Vec<f32> {
    let width = transformer.width();
    let mut caches = transformer.caches(1).expect("caches");
    let (mut out, half) = (vec![0.0; x.len()], x.len() / width / 2 * width);
    let (first, last) = out.split_at_mut(half);
    if half > 0 {
        transformer.decode(&x[..half], &mut caches, first, compute).expect("it fits");
    }
    for (x, out) in x[half..].chunks_exact(width).zip(last.chunks_exact_mut(width)) {
        transformer.decode(x, &mut caches, out, compute).expect("it fits");
    }
    out
}

/// The small model of the tests, with numbers of its own.
pub(super) fn bert(draw: &mut Draw, recorder: &mut Recorder) {
    let mut model = model();
    for (name, (shape, data)) in &mut model {
        let norm = name.contains("LayerNorm.weight");
        let size = if shape.len() == 2 { 1.0 / (shape[1] as f32).sqrt() } else { 0.3 };
        data.iter_mut().for_each(|x| *x = if norm { 1.0 } else { 0.0 } + size * draw.normal());
    }
    let bert = Bert::new(CONFIG, &source(&model)).expect("a good model").precision(draw.1);
    let (batch, pooling) = (draw.upto(4), draw.pick(&[Pooling::Mean, Pooling::First]));
    let mut ends = vec![0];
    (0..batch).for_each(|b| ends.push(ends[b] + draw.upto(CONFIG.max_position_embeddings)));
    recorder.say(format!("sequences to {ends:?}, {pooling:?}"));
    let n = ends[batch];
    let mut some = |of: usize| (0..n).map(|_| draw.upto(of) as u32 - 1).collect::<Vec<_>>();
    let (tokens, types) = (some(CONFIG.vocab_size), some(CONFIG.type_vocab_size));
    recorder.each(|compute| {
        let input = BertInput::new(&tokens, Sequences::Ragged(&ends)).types(&types);
        let (mut first, mut all, mut embedded) =
            (vec![0.0; n * bert.width()], vec![0.0; n * bert.width()], vec![0.0; batch * bert.width()]);
        bert.forward_to(1, input, &mut first, compute).expect("it fits");
        bert.forward(input, &mut all, compute).expect("it fits");
        bert.embed(input, pooling, &mut embedded, compute).expect("it fits");
        [first, all, embedded]
    });
}

/// The steps of attention one by one.
pub(super) fn steps(draw: &mut Draw, recorder: &mut Recorder) {
    let (h, l, n, d, dv) = (draw.upto(3), draw.upto(20), draw.pick(&[1, 7, 40, 300]), draw.upto(40), draw.upto(40));
    recorder.say(format!("{:?}", [h, l, n, d, dv]));
    let [q, k, v] = [[l, d], [n, d], [n, dv]].map(|[l, d]| draw.numbers(h * l * d));
    recorder.each(|compute| {
        let view = |x, l, d| View::bhld(x, [1, h, l, d]).expect("dense");
        let inputs = Inputs::new(view(&q, l, d), view(&k, n, d), view(&v, n, dv));
        let steps = Steps::new(&Attention::new().softcap(5.0), inputs, compute).expect("a good call");
        [steps.scores().to_vec(), steps.weights().to_vec(), steps.output().to_vec(), steps.mean_weights()]
    });
}
