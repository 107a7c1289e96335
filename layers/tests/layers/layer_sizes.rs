//! Layers and sizes that mean harm: an answer or an error, whatever they are; never a panic, never an abort.

use proptest::prelude::*;
use sdpa::{Attention, Exec, Mask, View, ViewMut};
use sdpa_layers::{
    Activation, BertConfig, Compute, Dictionary, Embedding, FeedForward, LayerInput, Linear, LinearState,
    MultiHeadAttention, MultiHeadInput, Norm, NormOrder, Pooling, Rope, RopePairs, Sequences, Start, Tensor,
    Transformer, TransformerLayer, Weights, normalise,
};

/// Small, or more than any machine has memory for.
fn size() -> impl Strategy<Value = usize> {
    const HUGE: [usize; 7] = [1 << 47, 1 << 58, 1 << 61, 1 << 62, isize::MAX as usize, usize::MAX - 1, usize::MAX];
    prop_oneof![4 => 0..5usize, 1 => proptest::sample::select(&HUGE[..])]
}

/// Cumulative lengths, or anything but.
fn ends() -> impl Strategy<Value = Vec<usize>> {
    proptest::collection::vec(size(), 0..5)
}

/// Sequences, ragged ones by `ends`.
fn sequences(ends: &[usize], even: Option<[usize; 2]>) -> Sequences<'_> {
    even.map_or(Sequences::Ragged(ends), |[batch, len]| Sequences::Even { batch, len })
}

/// `[outputs, inputs]` weights with a bias.
fn linear(outputs: usize, inputs: usize) -> Linear {
    Linear::new(Weights::rows(&[0.5; 64][..outputs * inputs], [outputs, inputs]).unwrap())
}

/// Width 4, two heads; causal, so that it decodes.
fn attention() -> MultiHeadAttention {
    let projections = [(); 4].map(|()| linear(4, 4));
    MultiHeadAttention::new([2, 2], projections).unwrap().attention(Attention::new().causal())
}

fn transformer(rope: Option<Rope>) -> Transformer {
    let own = match rope {
        Some(rope) => attention().rope(rope).unwrap(),
        None => attention(),
    };
    let norm = || Norm::layer([1.0; 4], 1e-5).unwrap();
    let feed_forward = FeedForward::new(Activation::Gelu, linear(8, 4), linear(4, 8)).unwrap();
    let layer = TransformerLayer::encoder(NormOrder::Pre, (own, norm()), (feed_forward, norm())).unwrap();
    Transformer::new(vec![layer]).unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn nothing_is_made_of_any_sizes(small in [size(), size(), size(), size()], any: [usize; 4], len in 0..9usize) {
        let data = [0.5f32; 8];
        for [a, b, c, d] in [small, any] {
            for pairs in [RopePairs::Half, RopePairs::Interleaved] {
                // What is made is as large as it says. (Nothing in between: that would take memory for a while.)
                if let (true, Ok(rope)) = (fits([a, b]), Rope::new(a, b, 1e4, pairs)) {
                    prop_assert_eq!((rope.positions(), rope.dim()), (a, b));
                }
                let _ = if fits([a, 2]) { Rope::from_frequencies(a, &[1.0], pairs).is_ok() } else { false };
            }
            if let (true, Ok(table)) = (fits([a, b]), Embedding::sinusoidal(a, b)) {
                prop_assert_eq!((table.entries(), table.width()), (a, b));
            }
            if let Ok(table) = Embedding::new(&data[..len], a) {
                prop_assert_eq!(table.entries() * table.width(), len);
            }
            let both = [Weights::rows(&data[..len], [a, b]), Weights::columns(&data[..len], [a, b])];
            for weights in both.into_iter().flatten() {
                let linear = Linear::new(weights.part(c..d).unwrap_or(weights));
                let mut out = [0.0; 8];
                let _ = linear.forward(&data, &mut out, &mut Compute::new(Exec::serial()));
                let _ = FeedForward::new(Activation::Relu, linear, Linear::new(weights));
            }
            let _ = MultiHeadAttention::new([a, b], [linear(0, 1), linear(0, 1), linear(4, 1), linear(4, 4)]);
            let _ = MultiHeadAttention::new([a, b], [(); 4].map(|()| linear(4, 4)));
            if fits([a, b]) && fits([c, d]) {
                let _ = (LinearState::new([a, b, c, d]).is_ok(), LinearState::normalised([a, b, c, d]).is_ok());
            }
            let _ = (Dictionary::<f32>::new(a, 1.0).is_ok(), Tensor::new([a, b, c], &data[..]).is_ok());
            let _ = normalise(&mut [1.0; 8][..len], a);
        }
    }

    #[test]
    fn no_sequences_make_a_layer_panic(
        ends in ends(),
        even in proptest::option::of([size(), size()]),
        starts in proptest::collection::vec(size(), 0..4),
        start in proptest::option::of(size()),
        shape in [size(), size()],
        lens in proptest::option::of(proptest::collection::vec(size(), 0..4)),
        [rows, keys] in [0..5usize, 0..5usize],
    ) {
        let (x, mut out, mut compute) = ([0.5f32; 16], [0.0f32; 16], Compute::new(Exec::serial()));
        let sequences = sequences(&ends, even);
        let start = start.map_or(Start::Each(&starts), Start::At);
        let (x, memory, out) = (&x[..4 * rows.min(4)], &x[..4 * keys.min(4)], &mut out[..4 * rows.min(4)]);
        let rope = Rope::new(3, 2, 1e4, RopePairs::Half).unwrap();
        let table = Embedding::new([0.5; 12], 4).unwrap();
        let _ = rope.rotate(out, shape, sequences, start, &mut compute);
        let _ = rope.rotate(out, [2, 2], sequences, start, &mut compute);
        let _ = table.add_positions(out, sequences, start, &mut compute);
        let mut pooled = [0.0; 16];
        for pooling in [Pooling::Mean, Pooling::First] {
            let _ = pooling.forward(x, shape[0], sequences, &mut pooled);
            let rows = sequences.count().min(4);
            if pooling.forward(x, 4, sequences, &mut pooled[..4 * rows]).is_ok() {
                prop_assert!(pooled[..4 * rows].iter().all(|&x| x == 0.0 || x == 0.5));
            }
        }
        let bytes = [1u8; 16];
        let mask = View::from_strides(&bytes, 0, [1, 1, 1, shape[1]], [0; 4]).map(Mask::keep);
        for rope in [None, Some(rope)] {
            let stack = transformer(rope);
            let mut input = LayerInput::new(x, sequences);
            if let Some(lens) = &lens {
                input = input.kv_lens(lens);
            }
            let _ = stack.forward(input, out, &mut compute);
            if let Ok(mask) = mask {
                let _ = stack.forward(input.mask(mask), out, &mut compute);
            }
        }
        let cross = MultiHeadInput::new(x, Sequences::one(rows.min(4))).memory(memory, sequences);
        let _ = attention().forward(cross, out, &mut compute);
        let mut weights = [0.0; 64];
        if let Ok(view) = ViewMut::bhld(&mut weights, [1, 2, shape[0], shape[1]]) {
            let _ = attention().forward_with_weights(cross, out, view, &mut compute);
        }
    }
}

/// Whether two sizes are too small to matter, or too large to be had.
fn fits([a, b]: [usize; 2]) -> bool {
    a.checked_mul(b).is_none_or(|n| !(1 << 10..=1 << 46).contains(&n))
}

#[test]
fn a_configuration_of_any_sizes_is_refused_without_weights() {
    use sdpa_layers::Bert;
    use std::collections::HashMap;
    let none: HashMap<String, Tensor<'_>> = HashMap::new();
    for size in [0, 1, 1 << 61, usize::MAX] {
        let config = BertConfig {
            vocab_size: size,
            hidden_size: size,
            num_hidden_layers: size,
            num_attention_heads: 1,
            intermediate_size: size,
            max_position_embeddings: size,
            type_vocab_size: size,
            ..BertConfig::default()
        };
        assert!(Bert::new(config, &none).is_err());
    }
}
