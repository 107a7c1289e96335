//! Feed-forward and transformer layers: the same bits however they are run, what they take of memory, what they refuse.

use crate::counting::counted;
use crate::support::UNWRITTEN;
use crate::vectors::{bits, normal, unwritten};
use sdpa::{Attention, Exec, Isa, Mask, View};
use sdpa_layers::{
    Activation, Compute, FeedForward, LayerInput, Linear, MultiHeadAttention, Norm, NormOrder, Rope, RopePairs,
    Sequences, Transformer, TransformerLayer, Weights,
};

const WIDTH: usize = 24;
const HIDDEN: usize = 40;

fn linear(outputs: usize, inputs: usize, seed: u64) -> Linear {
    let weights: Vec<f32> = normal(outputs * inputs, seed).iter().map(|w| w / (inputs as f32).sqrt()).collect();
    let bias = normal(outputs, 100 + seed);
    Linear::new(Weights::rows(&weights, [outputs, inputs]).unwrap().bias(&bias).unwrap())
}

fn attention(memory: usize, seed: u64) -> MultiHeadAttention {
    let projections = [(24, WIDTH), (12, memory), (12, memory), (WIDTH, 24)];
    MultiHeadAttention::new([4, 2], projections.map(|(outputs, inputs)| linear(outputs, inputs, seed))).unwrap()
}

fn norm(seed: u64) -> Norm {
    Norm::layer(normal(WIDTH, 200 + seed), 1e-5).unwrap().bias(normal(WIDTH, 201 + seed)).unwrap()
}

fn gated() -> FeedForward {
    let [gate, up] = [7, 8].map(|seed| linear(HIDDEN, WIDTH, seed));
    FeedForward::gated(Activation::Silu, gate, up, linear(WIDTH, HIDDEN, 9)).unwrap()
}

fn plain(activation: Activation) -> FeedForward {
    FeedForward::new(activation, linear(HIDDEN, WIDTH, 8), linear(WIDTH, HIDDEN, 9)).unwrap()
}

/// A causal layer with rotary positions and a gate, a decoder layer on memories 10 wide.
fn llama_like(order: NormOrder) -> TransformerLayer {
    let rope = Rope::new(2000, 6, 10_000.0, RopePairs::Half).unwrap();
    let own = attention(WIDTH, 1).attention(Attention::new().causal()).rope(rope).unwrap();
    TransformerLayer::encoder(order, (own, norm(1)), (gated(), norm(2))).unwrap()
}

fn decoder(order: NormOrder) -> TransformerLayer {
    let own = attention(WIDTH, 1).attention(Attention::new().causal());
    let feed_forward = (plain(Activation::Gelu), norm(3));
    TransformerLayer::decoder(order, (own, norm(1)), (attention(10, 4), norm(2)), feed_forward).unwrap()
}

fn forward(layer: &TransformerLayer, x: &[f32], sequences: Sequences<'_>, exec: Exec) -> Vec<f32> {
    let mut out = unwritten(x.len());
    layer.forward(LayerInput::new(x, sequences), &mut out, &mut Compute::new(exec)).unwrap();
    out
}

#[test]
fn a_feed_forward_is_its_parts() {
    let rows = 1000; // more than are taken through at once
    let x = normal(rows * WIDTH, 1);
    for isa in Isa::available() {
        let mut compute = Compute::new(Exec::serial().isa(isa));
        let project = |outputs, inputs, seed, x: &[f32], compute: &mut Compute| {
            let mut out = unwritten(rows * outputs);
            linear(outputs, inputs, seed).forward(x, &mut out, compute).unwrap();
            out
        };
        for activation in [Activation::Relu, Activation::Gelu, Activation::GeluTanh, Activation::Silu] {
            let mut hidden = project(HIDDEN, WIDTH, 8, &x, &mut compute);
            activation.apply(isa, &mut hidden);
            let expected = project(WIDTH, HIDDEN, 9, &hidden, &mut compute);
            let mut out = unwritten(x.len());
            plain(activation).forward(&x, &mut out, &mut compute).unwrap();
            assert_eq!(bits(&out), bits(&expected), "{activation:?} on {isa}");
        }
        let [mut gate, up] = [7, 8].map(|seed| project(HIDDEN, WIDTH, seed, &x, &mut compute));
        Activation::Silu.gate(isa, &mut gate, &up);
        let expected = project(WIDTH, HIDDEN, 9, &gate, &mut compute);
        let mut out = unwritten(x.len());
        gated().forward(&x, &mut out, &mut compute).unwrap();
        assert_eq!(bits(&out), bits(&expected), "gated on {isa}");
    }
}

#[test]
fn a_sequence_has_the_same_bits_alone_in_a_batch_and_end_to_end() {
    let ends = [0, 9, 9, 30, 31];
    let x = normal(31 * WIDTH, 2);
    for order in [NormOrder::Pre, NormOrder::Post] {
        let layer = llama_like(order);
        let together = forward(&layer, &x, Sequences::Ragged(&ends), Exec::serial());
        for range in (0..4).map(|s| Sequences::Ragged(&ends).rows(s)) {
            let part = &x[range.start * WIDTH..range.end * WIDTH];
            let got = &together[range.start * WIDTH..range.end * WIDTH];
            let alone = forward(&layer, part, Sequences::one(range.len()), Exec::serial());
            assert_eq!(bits(got), bits(&alone), "{order:?} {range:?}");
            let pair = Sequences::Even { batch: 2, len: range.len() };
            let batch = forward(&layer, &part.repeat(2), pair, Exec::serial());
            assert_eq!(bits(&batch), bits(&alone.repeat(2)), "{order:?} {range:?}");
        }
    }
}

#[test]
fn threads_and_instruction_sets_with_fma_do_not_show() {
    let x = normal(1500 * WIDTH, 3);
    let pool = rayon::ThreadPoolBuilder::new().num_threads(4).build().unwrap();
    for order in [NormOrder::Pre, NormOrder::Post] {
        let layer = llama_like(order);
        let mut fused = None;
        for isa in Isa::available() {
            let run = |threads| {
                let exec = Exec::serial().isa(isa).threads(threads);
                pool.install(|| bits(&forward(&layer, &x, Sequences::one(1500), exec)))
            };
            let one = run(1);
            for threads in [2, 3, usize::MAX] {
                assert!(run(threads) == one, "{order:?}, {threads} threads on {isa}");
            }
            if isa.has_fma() {
                assert!(*fused.get_or_insert(one.clone()) == one, "{order:?} on {isa}");
            }
        }
    }
}

#[test]
fn rows_see_what_causality_lengths_and_masks_allow() {
    let (len, memory_len) = (12, 5);
    let (x, memory) = (normal(len * WIDTH, 4), normal(memory_len * 10, 5));
    let layer = decoder(NormOrder::Pre);
    let run = |x: &[f32], memory: &[f32], lens: &[usize], mask: Mask<'_>| {
        let mut out = unwritten(x.len());
        let own = LayerInput::new(x, Sequences::one(len));
        let memory = LayerInput::new(memory, Sequences::one(memory_len)).kv_lens(lens).mask(mask);
        layer.forward_with_memory(own, memory, &mut out, &mut Compute::default()).unwrap();
        out
    };
    let bytes = [1, 0, 1, 1, 1];
    let mask = Mask::keep(View::bhld(&bytes, [1, 1, 1, 5]).unwrap());
    let out = run(&x, &memory, &[4], mask);
    let changed = |x: &[f32], row: usize, width: usize| {
        let mut x = x.to_vec();
        x[row * width..][..width].fill(f32::NAN);
        x
    };
    // Row 7 shows in itself and after; of the memory, rows 1 and 4 are hidden and row 2 is not.
    let later = run(&changed(&x, 7, WIDTH), &memory, &[4], mask);
    assert_eq!(bits(&later[..7 * WIDTH]), bits(&out[..7 * WIDTH]));
    assert!(later[7 * WIDTH..].iter().all(|y| y.is_nan()));
    for (row, hidden) in [(1, true), (4, true), (2, false)] {
        let got = run(&x, &changed(&memory, row, 10), &[4], mask);
        assert_eq!(bits(&got) == bits(&out), hidden, "row {row} of the memory");
    }
    // Self-attention takes them too.
    let layer = TransformerLayer::encoder(NormOrder::Post, (attention(WIDTH, 1), norm(1)), (gated(), norm(2))).unwrap();
    let run = |x: &[f32], lens: &[usize]| {
        let mut out = unwritten(x.len());
        let input = LayerInput::new(x, Sequences::one(len)).kv_lens(lens);
        layer.forward(input, &mut out, &mut Compute::default()).unwrap();
        out
    };
    let padded = run(&changed(&x, 11, WIDTH), &[11]);
    assert_eq!(bits(&padded[..11 * WIDTH]), bits(&run(&x, &[11])[..11 * WIDTH]));
}

#[test]
fn layers_follow_one_another() {
    let x = normal(20 * WIDTH, 6);
    let sequences = Sequences::Even { batch: 2, len: 10 };
    let stack = Transformer::new(vec![llama_like(NormOrder::Pre), llama_like(NormOrder::Pre)]).unwrap();
    let stack = stack.norm(norm(5)).unwrap();
    let mut compute = Compute::new(Exec::serial());
    let mut expected = x.clone();
    for layer in stack.layers() {
        expected = forward(layer, &expected, sequences, Exec::serial());
    }
    let mut normed = unwritten(x.len());
    norm(5).forward(&expected, &mut normed, &mut compute).unwrap();
    let mut out = unwritten(x.len());
    stack.forward(LayerInput::new(&x, sequences), &mut out, &mut compute).unwrap();
    assert_eq!(bits(&out), bits(&normed));
}

#[test]
fn a_warm_call_allocates_nothing() {
    let ends = [0, 7, 20];
    for order in [NormOrder::Pre, NormOrder::Post] {
        let (layer, decoder) = (llama_like(order), decoder(order));
        let (x, memory, mut out) = (normal(500 * WIDTH, 7), normal(30 * 10, 8), unwritten(500 * WIDTH));
        let mut compute = Compute::new(Exec::serial());
        let mut run = || {
            layer.forward(LayerInput::new(&x, Sequences::one(500)), &mut out, &mut compute).unwrap();
            let (x, out) = (&x[..20 * WIDTH], &mut out[..20 * WIDTH]);
            layer.forward(LayerInput::new(x, Sequences::Ragged(&ends)), out, &mut compute).unwrap();
            let memory = LayerInput::new(&memory, Sequences::Even { batch: 2, len: 15 });
            let x = LayerInput::new(x, Sequences::Even { batch: 2, len: 10 });
            decoder.forward_with_memory(x, memory, out, &mut compute).unwrap();
        };
        run();
        assert_eq!(counted(run), (0, 0), "{order:?}");
    }
}

#[test]
fn hidden_rows_do_not_take_memory_by_their_number() {
    let layer = FeedForward::new(Activation::Relu, linear(1000, 1, 1), linear(1, 1000, 2)).unwrap();
    for rows in [384, 20_000] {
        let (x, mut out) = (vec![1.0; rows], vec![0.0; rows]);
        let mut compute = Compute::new(Exec::serial());
        let (_, bytes) = counted(|| layer.forward(&x, &mut out, &mut compute).unwrap());
        assert!(bytes < 384 * 1000 * 4 + 4096, "{bytes} bytes for {rows} rows");
    }
}

/// `$call` is refused with these words.
macro_rules! refused {
    ($call:expr, $words:expr) => {
        assert_eq!($call.unwrap_err().to_string(), $words)
    };
}

#[test]
fn parts_that_do_not_fit_together_are_refused() {
    let down = "down projection: inputs is 39, but the up projection (outputs) has 40";
    refused!(FeedForward::new(Activation::Relu, linear(40, 24, 1), linear(24, 39, 2)), down);
    let gate = |outputs, inputs| {
        FeedForward::gated(Activation::Silu, linear(outputs, inputs, 1), linear(40, 24, 2), linear(24, 40, 3))
    };
    refused!(gate(40, 23), "gate projection: inputs is 23, but the up projection has 24");
    refused!(gate(39, 24), "gate projection: outputs is 39, but the up projection has 40");
    let nothing = Linear::new(Weights::rows(&[], [0, 40]).unwrap());
    let words = "down projection: outputs is 0, but must be at least 1";
    refused!(FeedForward::new(Activation::Relu, linear(40, 24, 1), nothing), words);

    let narrow = || Norm::rms([1.0; 23], 1e-5).unwrap();
    let own = || (attention(WIDTH, 1), norm(1));
    let encoder = |own, feed_forward| TransformerLayer::encoder(NormOrder::Pre, own, feed_forward);
    let of = "but the norm of the self-attention has";
    refused!(
        encoder((attention(WIDTH, 1), narrow()), (gated(), norm(2))),
        format!("self-attention: inputs is 24, {of} 23")
    );
    refused!(
        encoder((attention(10, 1), norm(1)), (gated(), norm(2))),
        format!("self-attention: width of keys is 10, {of} 24")
    );
    refused!(encoder(own(), (gated(), narrow())), format!("norm of the feed-forward: width is 23, {of} 24"));
    let up = FeedForward::new(Activation::Relu, linear(40, 23, 1), linear(24, 40, 2)).unwrap();
    refused!(encoder(own(), (up, norm(2))), format!("feed-forward: inputs is 23, {of} 24"));
    let down = FeedForward::new(Activation::Relu, linear(40, 24, 1), linear(23, 40, 2)).unwrap();
    refused!(encoder(own(), (down, norm(2))), format!("feed-forward: outputs is 23, {of} 24"));
    let decoder = |cross| TransformerLayer::decoder(NormOrder::Pre, own(), cross, (gated(), norm(2)));
    refused!(decoder((attention(10, 1), narrow())), format!("norm of the cross-attention: width is 23, {of} 24"));
    let uneven = [(24, WIDTH), (12, 10), (12, 11), (WIDTH, 24)].map(|(outputs, inputs)| linear(outputs, inputs, 1));
    let uneven = MultiHeadAttention::new([4, 2], uneven).unwrap();
    refused!(decoder((uneven, norm(2))), "cross-attention: width of values is 11, but its keys has 10");

    refused!(Transformer::new(Vec::new()), "transformer: number of layers is 0, but must be at least 1");
    let stack = Transformer::new(vec![llama_like(NormOrder::Pre)]).unwrap();
    refused!(stack.norm(narrow()), "norm: width is 23, but the layers has 24");
    let rope = Rope::new(10, 8, 10_000.0, RopePairs::Half).unwrap();
    refused!(
        attention(WIDTH, 1).rope(rope),
        "q projection: head_dim is 6, but must be at least 8, the dim of the rope"
    );
}

#[test]
fn input_that_does_not_fit_is_refused_and_nothing_is_written() {
    let mut compute = Compute::default();
    let mut out = unwritten(10 * WIDTH);
    let x = normal(10 * WIDTH, 9);
    let ten = LayerInput::new(&x, Sequences::one(10));
    let memory = normal(30, 10);
    let three = LayerInput::new(&memory, Sequences::one(3));
    let (layer, decoder) = (llama_like(NormOrder::Post), decoder(NormOrder::Post));
    let mut plain = |input, out: &mut [f32]| layer.forward(input, out, &mut compute);
    refused!(
        plain(LayerInput::new(&x[1..], Sequences::one(10)), &mut out),
        "x: length is 239, but must be a multiple of 24, the width of a row"
    );
    refused!(
        plain(ten, &mut out[1..]),
        "out: length is 239, but must be exactly 240, the number of rows × their width"
    );
    refused!(
        plain(LayerInput::new(&x, Sequences::one(9)), &mut out),
        "x: rows is 10, but must be exactly 9, the tokens of all sequences"
    );
    let lens = "kv_lens: entry 0 is 11, but must be at most 10, the keys of that sequence";
    refused!(plain(ten.kv_lens(&[11]), &mut out), lens);
    let mut compute = Compute::default();
    let needs = "memory: needs a layer with cross-attention";
    refused!(layer.forward_with_memory(ten, three, &mut out, &mut compute), needs);
    refused!(decoder.forward(ten, &mut out, &mut compute), "cross-attention: needs a memory");
    let mut cross = |memory| decoder.forward_with_memory(ten, memory, &mut out, &mut compute);
    refused!(
        cross(LayerInput::new(&memory[1..], Sequences::one(3))),
        "keys: length is 29, but must be a multiple of 10, the width of a row"
    );
    refused!(cross(LayerInput::new(&memory, Sequences::Even { batch: 3, len: 1 })), "k: batch is 3, but q has 1");
    refused!(cross(three.kv_lens(&[4])), "kv_lens: entry 0 is 4, but must be at most 3, the keys of that sequence");
    // A sequence longer than the table of rotary positions.
    let long = normal(2001 * WIDTH, 11);
    let mut long_out = unwritten(long.len());
    let refused = layer.forward(LayerInput::new(&long, Sequences::one(2001)), &mut long_out, &mut compute);
    refused!(refused, "positions: entry 2000 is 2000, but must be at most 1999, the last row of the table");
    assert_eq!((bits(&out), bits(&long_out)), (vec![UNWRITTEN; 10 * WIDTH], vec![UNWRITTEN; 2001 * WIDTH]));
}

#[test]
fn no_rows_are_no_work() {
    let layer = llama_like(NormOrder::Pre);
    layer.forward(LayerInput::new(&[], Sequences::one(0)), &mut [], &mut Compute::default()).unwrap();
    let empty = Sequences::Ragged(&[0]);
    layer.forward(LayerInput::new(&[], empty), &mut [], &mut Compute::default()).unwrap();
    gated().forward(&[], &mut [], &mut Compute::default()).unwrap();
}
