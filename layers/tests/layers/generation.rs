//! Decoding from a cache: the bits of the whole sequence at once, however it is cut, rolled back, forked or batched.

use crate::counting::counted;
use crate::fixture::{Fixture, assert_close};
use crate::models::{Model, Params, gpt2, llama};
use crate::support::UNWRITTEN;
use crate::vectors::{normal, unwritten};
use sdpa::{Alignment, Attention, Error, Exec, Isa, KvCache, KvShape, LayerCaches, View, Window, alibi_slopes};
use sdpa_layers::{
    Activation, Compute, FeedForward, LayerInput, Linear, MultiHeadAttention, MultiHeadInput, Norm, NormOrder, Rope,
    RopePairs, Sequences, Transformer, TransformerLayer, Weights,
};
use std::num::NonZeroUsize;

/// What PyTorch's answers may be off by, as in `torch_layers.rs`.
const TOLERANCE: f64 = 1e-5;
pub(crate) const WIDTH: usize = 24;
/// More than two blocks of 256 keys.
pub(crate) const LEN: usize = 600;

#[track_caller]
pub(crate) fn assert_same(what: &str, got: &[f32], expected: &[f32]) {
    assert_eq!(got.len(), expected.len(), "{what}");
    let other = got.iter().zip(expected).position(|(got, expected)| got.to_bits() != expected.to_bits());
    if let Some(i) = other {
        panic!("{what}: element {i} is {}, expected {}", got[i], expected[i]);
    }
}

fn linear(outputs: usize, inputs: usize, seed: u64) -> Linear {
    let weights: Vec<f32> = normal(outputs * inputs, seed).iter().map(|w| w / (inputs as f32).sqrt()).collect();
    let bias = normal(outputs, 100 + seed);
    Linear::new(Weights::rows(&weights, [outputs, inputs]).unwrap().bias(&bias).unwrap())
}

fn attention(seed: u64) -> MultiHeadAttention {
    let projections = [(24, WIDTH), (12, WIDTH), (16, WIDTH), (WIDTH, 32)];
    let projections = projections.map(|(outputs, inputs)| linear(outputs, inputs, seed));
    MultiHeadAttention::new([4, 2], projections).unwrap().attention(Attention::new().causal())
}

fn rope() -> Rope {
    Rope::new(LEN + 1, 6, 10_000.0, RopePairs::Half).unwrap()
}

fn stack(order: NormOrder, attention: impl Fn(u64) -> MultiHeadAttention) -> Transformer {
    let norm = |seed| Norm::layer(normal(WIDTH, seed), 1e-5).unwrap();
    let layer = |seed| {
        let feed_forward = FeedForward::new(Activation::Gelu, linear(40, WIDTH, seed + 1), linear(WIDTH, 40, seed + 2));
        let own = (attention(seed), norm(seed + 3));
        TransformerLayer::encoder(order, own, (feed_forward.unwrap(), norm(seed + 4))).unwrap()
    };
    Transformer::new(vec![layer(10), layer(20)]).unwrap().norm(norm(30)).unwrap()
}

/// Rotary positions; rules that go by position, with norms after.
pub(crate) fn stacks() -> [Transformer; 3] {
    let window = Window::last_tokens(NonZeroUsize::new(70).unwrap()).keep_first(3);
    [
        stack(NormOrder::Pre, |seed| attention(seed).rope(rope()).unwrap()),
        stack(NormOrder::Post, |seed| {
            let attention = attention(seed).alibi(alibi_slopes(4)).unwrap();
            attention.attention(Attention::new().causal().softcap(20.0).align(Alignment::TopLeft))
        }),
        stack(NormOrder::Pre, |seed| {
            attention(seed).rope(rope()).unwrap().attention(Attention::new().causal().window(window))
        }),
    ]
}

/// Number of rows of each sequence, which all layers have.
#[track_caller]
pub(crate) fn lens(caches: &LayerCaches) -> &[usize] {
    let lens = caches.layers()[0].lens();
    assert!(caches.layers().iter().all(|cache| cache.lens() == lens));
    lens
}

pub(crate) fn whole(stack: &Transformer, x: &[f32], batch: usize, compute: &mut Compute) -> Vec<f32> {
    let (mut out, len) = (unwritten(x.len()), x.len() / WIDTH / batch);
    stack.forward(LayerInput::new(x, Sequences::Even { batch, len }), &mut out, compute).unwrap();
    out
}

/// Rows after those in the caches, in chunks of these sizes and then one by one.
fn decode(
    stack: &Transformer,
    x: &[f32],
    caches: &mut LayerCaches,
    chunks: impl IntoIterator<Item = usize>,
    compute: &mut Compute,
) -> Vec<f32> {
    let mut out = unwritten(x.len());
    let (mut rest_in, mut rest_out) = (x, &mut out[..]);
    let mut chunks = chunks.into_iter();
    while !rest_in.is_empty() {
        let n = WIDTH * chunks.next().unwrap_or(1);
        let (x, out);
        (x, rest_in) = rest_in.split_at(n);
        (out, rest_out) = rest_out.split_at_mut(n);
        stack.decode(x, caches, out, compute).unwrap();
    }
    out
}

/// The model's answers to the file's tokens, a prompt of `prompt` of them first: of both sequences side by side.
fn generate(file: &Fixture, name: &str, model: &Model, prompt: usize, compute: &mut Compute) -> Vec<f32> {
    let tokens = file.tokens(&format!("{name}.in.ids"));
    let [batch, len, width] = file.shape(&format!("{name}.out.last"));
    let mut all = unwritten(batch * len * width);
    let mut caches = model.transformer.caches(batch).unwrap();
    let mut at = 0;
    while at < len {
        let n = if at == 0 { prompt } else { 1 };
        let part: Vec<u32> = (0..batch).flat_map(|b| &tokens[b * len + at..][..n]).copied().collect();
        let (mut x, mut out) = (unwritten(batch * n * width), unwritten(batch * n * width));
        model.embed_from(lens(&caches), (&part, Sequences::Even { batch, len: n }), &mut x, compute);
        model.transformer.decode(&x, &mut caches, &mut out, compute).unwrap();
        for (b, rows) in out.chunks(n * width).enumerate() {
            all[(b * len + at) * width..][..n * width].copy_from_slice(rows);
        }
        at += n;
        assert_eq!(lens(&caches), vec![at; batch]);
    }
    all
}

#[test]
fn gpt2_and_llama_give_the_bits_of_the_whole_sequence_and_the_numbers_of_pytorch() {
    let file = Fixture::open("torch_layers.safetensors", "SDPA_TORCH_LAYERS");
    let models = [("gpt2", gpt2(&Params::new(&file, "gpt2"))), ("llama", llama(&Params::new(&file, "llama")))];
    for (name, model) in &models {
        let tokens = file.tokens(&format!("{name}.in.ids"));
        let [batch, len] = file.shape(&format!("{name}.in.ids"));
        let sequences = Sequences::Even { batch, len };
        let expected = file.floats(&format!("{name}.out.last"));
        for isa in Isa::available() {
            for exec in [Exec::serial().isa(isa), Exec::default().isa(isa)] {
                let compute = &mut Compute::new(exec);
                let (mut x, mut whole) = (unwritten(expected.len()), unwritten(expected.len()));
                model.embed(&tokens, sequences, &mut x, compute);
                model.transformer.forward(LayerInput::new(&x, sequences), &mut whole, compute).unwrap();
                for prompt in [1, 2, 8, len - 1, len] {
                    let got = generate(&file, name, model, prompt, compute);
                    assert_same(&format!("{name} on {isa}, prompt of {prompt}"), &got, &whole);
                    assert_close(&format!("{name} on {isa}"), &got, &expected, TOLERANCE);
                }
            }
        }
    }
}

#[test]
fn however_a_sequence_is_cut_its_bits_are_those_of_the_whole() {
    let x = normal(LEN * WIDTH, 1);
    for (number, stack) in stacks().iter().enumerate() {
        for isa in Isa::available() {
            let compute = &mut Compute::new(Exec::serial().isa(isa));
            let expected = whole(stack, &x, 1, compute);
            let cuts: [&[usize]; 6] = [&[], &[LEN], &[256, 256], &[255, 2, 256], &[1, 300, 17, 100], &[599]];
            for cut in cuts {
                let mut caches = stack.caches(1).unwrap();
                let got = decode(stack, &x, &mut caches, cut.iter().copied(), compute);
                assert_same(&format!("stack {number} on {isa}, {cut:?}"), &got, &expected);
                assert_eq!(lens(&caches), [LEN]);
            }
        }
    }
}

#[test]
fn threads_do_not_show() {
    let x = normal(LEN * WIDTH, 2);
    let pool = rayon::ThreadPoolBuilder::new().num_threads(3).build().unwrap();
    for stack in &stacks() {
        let expected = whole(stack, &x, 1, &mut Compute::new(Exec::serial()));
        let exec = Exec::serial().threads(3);
        let got = pool.install(|| {
            let mut caches = stack.caches(1).unwrap();
            decode(stack, &x, &mut caches, [500], &mut Compute::new(exec))
        });
        assert_same("three threads", &got, &expected);
    }
}

#[test]
fn what_is_rolled_back_leaves_no_trace() {
    let (x, other) = (normal(LEN * WIDTH, 3), normal(LEN * WIDTH, 4));
    let compute = &mut Compute::default();
    for stack in &stacks() {
        let expected = whole(stack, &x, 1, compute);
        let mut caches = stack.caches(1).unwrap();
        decode(stack, &x[..400 * WIDTH], &mut caches, [400], compute);
        for len in [400, 399, 257, 256, 255, 16, 1, 0] {
            // Another continuation, then back.
            decode(stack, &other[..20 * WIDTH], &mut caches, [11], compute);
            caches.truncate(0, len).unwrap();
            assert_eq!(lens(&caches), [len]);
            let mut again = caches.clone();
            let got = decode(stack, &x[len * WIDTH..], &mut again, [100], compute);
            assert_same(&format!("from {len}"), &got, &expected[len * WIDTH..]);
        }
        decode(stack, &other, &mut caches, [LEN], compute);
        caches.truncate(0, 0).unwrap();
        assert_eq!(lens(&caches), [0]);
        assert_same("after a reset", &decode(stack, &x, &mut caches, [300, 100], compute), &expected);
    }
}

#[test]
fn sequences_of_a_batch_do_not_meet() {
    let lens = [70, 300, 1];
    let tails = 40;
    let compute = &mut Compute::default();
    for stack in &stacks() {
        let xs: Vec<Vec<f32>> = (0..3).map(|s| normal((lens[s] + tails) * WIDTH, 5 + s as u64)).collect();
        // Prompts of different lengths: padded at their ends, and truncated.
        let longest = 300 * WIDTH;
        let padded: Vec<f32> = (0..3)
            .flat_map(|s| {
                let mut prompt = xs[s][..lens[s] * WIDTH].to_vec();
                prompt.resize(longest, f32::NAN);
                prompt
            })
            .collect();
        let mut caches = stack.caches(3).unwrap();
        let mut prompts = unwritten(padded.len());
        stack.decode(&padded, &mut caches, &mut prompts, compute).unwrap();
        (0..3).for_each(|s| caches.truncate(s, lens[s]).unwrap());
        assert_eq!(caches.layers()[0].lens(), lens);
        let mut got: Vec<Vec<f32>> = (0..3).map(|s| prompts[s * longest..][..lens[s] * WIDTH].to_vec()).collect();
        for t in 0..tails {
            let step: Vec<f32> = (0..3).flat_map(|s| &xs[s][(lens[s] + t) * WIDTH..][..WIDTH]).copied().collect();
            let mut out = unwritten(step.len());
            stack.decode(&step, &mut caches, &mut out, compute).unwrap();
            got.iter_mut().zip(out.chunks(WIDTH)).for_each(|(got, row)| got.extend_from_slice(row));
        }
        for s in 0..3 {
            assert_same(&format!("sequence {s}"), &got[s], &whole(stack, &xs[s], 1, compute));
        }
    }
}

#[test]
fn forks_share_a_past_and_nothing_else() {
    let compute = &mut Compute::default();
    let [stack, ..] = stacks();
    let (prompt, tails) = (normal(300 * WIDTH, 6), [normal(30 * WIDTH, 7), normal(30 * WIDTH, 8)]);
    let mut caches = stack.caches(1).unwrap();
    decode(&stack, &prompt, &mut caches, [300], compute);
    let held = caches.bytes();
    let second = caches.add_sequence();
    assert_eq!((second, lens(&caches)), (1, &[300, 0][..]));
    caches.fork(0, 1).unwrap();
    assert_eq!((lens(&caches), caches.bytes()), (&[300, 300][..], held));
    let mut got = [Vec::new(), Vec::new()];
    for t in 0..30 {
        let step: Vec<f32> = tails.iter().flat_map(|tail| &tail[t * WIDTH..][..WIDTH]).copied().collect();
        let mut out = unwritten(step.len());
        stack.decode(&step, &mut caches, &mut out, compute).unwrap();
        got.iter_mut().zip(out.chunks(WIDTH)).for_each(|(got, row)| got.extend_from_slice(row));
    }
    for (got, tail) in got.iter().zip(&tails) {
        let expected = whole(&stack, &[&prompt[..], tail].concat(), 1, compute);
        assert_same("a fork", got, &expected[300 * WIDTH..]);
    }
}

#[test]
fn attention_alone_decodes_too_with_a_sliding_cache() {
    let x = normal(LEN * WIDTH, 9);
    let last = NonZeroUsize::new(100).unwrap();
    let layer = attention(1).attention(Attention::new().causal().window(Window::last_tokens(last)));
    let compute = &mut Compute::default();
    let mut expected = unwritten(x.len());
    layer.forward(MultiHeadInput::new(&x, Sequences::one(LEN)), &mut expected, compute).unwrap();
    let mut all = layer.cache(1).unwrap();
    let mut sliding = KvCache::sliding(1, KvShape { kv_heads: 2, head_dim: 6, value_dim: 8 }, last, 0).unwrap();
    for cache in [&mut all, &mut sliding] {
        let mut got = unwritten(x.len());
        for (x, out) in x.chunks(WIDTH).zip(got.chunks_mut(WIDTH)) {
            layer.decode(x, cache, out, compute).unwrap();
        }
        assert_same("a row at a time", &got, &expected);
    }
    assert!(sliding.bytes() < all.bytes());
}

#[test]
fn a_warm_step_allocates_nothing_but_blocks() {
    let x = normal(LEN * WIDTH, 10);
    for stack in &stacks() {
        let compute = &mut Compute::new(Exec::serial());
        let mut caches = stack.caches(1).unwrap();
        let mut out = unwritten(WIDTH);
        decode(stack, &x[..201 * WIDTH], &mut caches, [200], compute);
        for (t, x) in x[201 * WIDTH..].chunks(WIDTH).enumerate() {
            let (calls, _) = counted(|| stack.decode(x, &mut caches, &mut out, compute).unwrap());
            // A block, and room for it in a list, of each of the two layers.
            let opens = (201 + t).is_multiple_of(256);
            assert!(if opens { calls > 0 && calls <= 6 } else { calls == 0 }, "step {t}: {calls} allocations");
        }
    }
}

/// Same words as [`sdpa::Error`] has.
macro_rules! refused {
    ($result:expr, $message:expr) => {
        assert_eq!($result.expect_err("must be refused").to_string(), $message)
    };
}

#[test]
fn what_cannot_be_decoded_is_refused() {
    let free = stack(NormOrder::Pre, |seed| attention(seed).attention(Attention::new()));
    refused!(free.caches(1), "decoding: needs causal attention");
    let off =
        stack(NormOrder::Pre, |seed| attention(seed).attention(Attention::new().causal().align(Alignment::Offset(1))));
    refused!(off.caches(1), "decoding: needs rows that stand at their own keys, no other offset");
    let [good, ..] = stacks();
    refused!(good.caches(0), "caches: number of sequences is 0, but must be at least 1");
    for sequences in [1 << 58, usize::MAX] {
        let message = format!("cache: sizes [{sequences}, 2, 6, 8] do not fit the address space");
        refused!(good.caches(sequences), message);
    }
    assert!(matches!(good.caches(1 << 50), Err(Error::Memory { .. })));
    // Caches for one are not caches for the other.
    let mut caches = good.caches(1).unwrap();
    let (x, mut out, compute) = (normal(WIDTH, 1), unwritten(WIDTH), &mut Compute::default());
    refused!(free.decode(&x, &mut caches, &mut out, compute), "decoding: needs causal attention");
    assert_eq!(lens(&caches), [0]);
    let fewer = &mut LayerCaches::new(caches.layers()[..1].to_vec()).unwrap();
    let refused = good.decode(&x, fewer, &mut out, compute);
    refused!(refused, "caches: number of layers is 1, but the transformer has 2");
    // The first layer is a token ahead.
    let (k, v) = ([0.0; 12], [0.0; 16]);
    let (k, v) = (View::bhld(&k, [1, 2, 1, 6]).unwrap(), View::bhld(&v, [1, 2, 1, 8]).unwrap());
    caches.layer_mut(0).unwrap().append(k, v).unwrap();
    let refused = good.decode(&x, &mut caches, &mut out, compute);
    refused!(refused, "caches: number of keys of a sequence is 0, but the first layer has 1");
    caches.roll_back().unwrap();
    good.decode(&x, &mut caches, &mut out, compute).unwrap();
}

#[test]
fn after_a_refusal_everything_is_as_it_was() {
    let [good, ..] = stacks();
    let x = normal((LEN + 2) * WIDTH, 11);
    let compute = &mut Compute::default();
    let expected = whole(&good, &x[..LEN * WIDTH], 1, compute);
    let mut caches = good.caches(1).unwrap();
    let mut out = unwritten(x.len());
    decode(&good, &x[..300 * WIDTH], &mut caches, [300], compute);

    let refusals = [
        ("x: length is 25, but must be a multiple of 24, the width of a row", 25, 25),
        ("out: length is 48, but must be exactly 24, the number of rows × their width", 24, 48),
        ("positions: entry 301 is 601, but must be at most 600, the last row of the table", 302 * WIDTH, 302 * WIDTH),
    ];
    for (message, x_len, out_len) in refusals {
        refused!(good.decode(&x[..x_len], &mut caches, &mut out[..out_len], compute), message);
    }
    // The last layer refuses when the first has appended, and when it has itself.
    for wrong in [Attention::new().causal().softcap(-1.0), Attention::new()] {
        let broken = stack(NormOrder::Pre, |seed| {
            let attention = attention(seed).rope(rope()).unwrap();
            if seed == 20 { attention.attention(wrong) } else { attention }
        });
        broken.decode(&x[..5 * WIDTH], &mut caches, &mut out[..5 * WIDTH], compute).unwrap_err();
        assert!(lens(&caches) == [300]);
    }
    let mut cache = good.layers()[0].self_attention().cache(1).unwrap();
    let capped = attention(10).attention(Attention::new().causal().softcap(-1.0));
    let refused = capped.decode(&x[..WIDTH], &mut cache, &mut out[..WIDTH], compute);
    refused!(refused, "softcap: -1, but must be positive and finite");
    assert_eq!(cache.lens(), [0]);
    refused!(caches.truncate(0, 301), "length: 301, but sequence 0 has 300 keys");
    refused!(caches.truncate(1, 0), "sequence: there is no sequence 1, the cache has 1");
    refused!(caches.fork(0, 1), "to: there is no sequence 1, the cache has 1");
    assert!(out.iter().all(|x| x.to_bits() == UNWRITTEN));
    assert_eq!(lens(&caches), [300]);
    // No rows are no work.
    good.decode(&[], &mut caches, &mut [], compute).unwrap();
    let got = decode(&good, &x[300 * WIDTH..LEN * WIDTH], &mut caches, [100], compute);
    assert_same("after refusals", &got, &expected[300 * WIDTH..]);
    let mut three = good.caches(3).unwrap();
    let four = &x[..4 * WIDTH];
    refused!(
        good.decode(four, &mut three, &mut out[..4 * WIDTH], compute),
        "x: rows is 4, but must be a multiple of 3, the number of sequences"
    );
}
