//! 3–5: which tensors a message names where heads and rows look exchanged, and where nothing does.

use super::sizes::{exchanged, unaligned};
use super::{KEY_HEADS, Mistake, call, floats, mistake, outcome};
use sdpa::{Attention, Gradients, Inputs, KvCache, KvShape, Saved, ViewMut};

/// A shape but for the batch, which is 1, and the dimension, which is 6 for all.
type Sizes = [usize; 2];

fn shape([heads, rows]: Sizes) -> [usize; 4] {
    [1, heads, rows, 6]
}

/// Message of a call with q, k, v and out of these heads and rows.
fn of(attention: Attention, sizes: [Sizes; 4]) -> String {
    let [q, k, v, out] = sizes.map(shape);
    call(attention, Inputs::new(floats(q), floats(k), floats(v)), out, &[])
}

fn heads(heads: usize, of: usize) -> String {
    format!("q: {heads} heads are no multiple of the {of} heads of k")
}

pub(super) fn mistakes() -> Vec<Mistake> {
    let all = [of_keys_or_values(), of_queries_or_outputs(), of_all(), of_nothing(), over_caches(), of_gradients()];
    all.into_iter().flatten().collect()
}

fn of_keys_or_values() -> Vec<Mistake> {
    let says =
        |what, sizes, words: &str, argument| mistake(4, what, of(Attention::new(), sizes), exchanged(words, argument));
    let v_heads = |v: usize, k: usize| format!("v: heads is {v}, but k has {k}");
    vec![
        says("k, cross", [[8, 10], [14, 2], [2, 14], [8, 10]], &v_heads(2, 14), "k"),
        says("k, as many heads as q", [[8, 10], [10, 8], [8, 10], [8, 10]], &v_heads(8, 10), "k"),
        says("v, as many heads as q", [[8, 10], [8, 10], [10, 8], [8, 10]], &v_heads(10, 8), "v"),
        says("k or v, both divide", [[8, 10], [4, 2], [2, 4], [8, 10]], &v_heads(2, 4), "k or v"),
        says("k or v, neither divides", [[5, 10], [4, 2], [2, 4], [5, 10]], &v_heads(2, 4), "k or v"),
        says("k, as there are as many rows", [[20, 10], [10, 2], [2, 10], [20, 10]], &v_heads(2, 10), "k"),
        says("k and v, a step", [[8, 1], [33, 2], [33, 2], [8, 1]], &heads(8, 33), "k and v"),
        says("k and v, cross", [[8, 10], [14, 2], [14, 2], [8, 10]], &heads(8, 14), "k and v, perhaps of q too,"),
    ]
}

fn of_queries_or_outputs() -> Vec<Mistake> {
    let says =
        |what, sizes, words: &str, argument| mistake(4, what, of(Attention::new(), sizes), exchanged(words, argument));
    let out_heads = |out: usize, q: usize| format!("out: heads is {out}, but q has {q}");
    vec![
        says("q, grouped heads", [[10, 8], [2, 10], [2, 10], [8, 10]], &out_heads(8, 10), "q"),
        says("q or out, cross", [[10, 8], [2, 14], [2, 14], [8, 10]], &out_heads(8, 10), "q or out"),
        says("out, a step", [[8, 1], [2, 33], [2, 33], [1, 8]], &out_heads(1, 8), "out"),
        says("q, a step", [[1, 8], [2, 33], [2, 33], [8, 1]], &heads(1, 2), "q"),
        says("q and out, a step", [[1, 8], [2, 33], [2, 33], [1, 8]], &heads(1, 2), "q"),
        says("q, cross", [[10, 8], [4, 14], [4, 14], [8, 10]], &heads(10, 4), "q"),
        says("all but out", [[10, 8], [10, 2], [10, 2], [8, 10]], &out_heads(8, 10), "out, or of q, k and v,"),
    ]
}

fn of_all() -> Vec<Mistake> {
    let says = |what, [q, k]: [Sizes; 2], words: &str| {
        mistake(4, what, of(Attention::new(), [q, k, k, q]), exchanged(words, "q, k and v"))
    };
    vec![
        says("all, a step", [[1, 8], [33, 8]], &heads(1, 33)),
        says("all, a step, grouped heads", [[1, 8], [33, 2]], &heads(1, 33)),
        says("all, a chunk", [[4, 8], [33, 8]], &heads(4, 33)),
        says("all, a chunk, grouped heads", [[10, 8], [33, 2]], &heads(10, 33)),
        mistake(
            4,
            "all, causal, a short prompt",
            of(Attention::new().causal(), [[5, 32], [5, 8], [5, 8], [5, 32]]),
            exchanged(&unaligned("causal", 32, 8), "q, k and v"),
        ),
        mistake(
            4,
            "some, as each would do",
            of(Attention::new(), [[4, 12], [6, 2], [6, 2], [4, 12]]),
            exchanged(&heads(4, 6), "some of q, k and v"),
        ),
    ]
}

fn of_nothing() -> Vec<Mistake> {
    let says = |number, what, [q, k]: [Sizes; 2], words: &str| {
        mistake(number, what, of(Attention::new(), [q, k, k, q]), words)
    };
    let causal = |what, [q, k]: [Sizes; 2]| {
        mistake(8, what, of(Attention::new().causal(), [q, k, k, q]), unaligned("causal", q[1], k[1]))
    };
    vec![
        says(3, "12 heads on 8, 4 rows and keys", [[12, 4], [8, 4]], &heads(12, 8)),
        says(3, "12 heads on 8, a row and a key", [[12, 1], [8, 1]], &heads(12, 8)),
        says(3, "12 heads on 8, 8 rows", [[12, 8], [8, 14]], &heads(12, 8)),
        says(3, "8 heads on 32", [[8, 10], [32, 10]], &heads(8, 32)),
        causal("a step", [[8, 1], [2, 33]]),
        causal("a chunk", [[8, 4], [2, 8]]),
        causal("a chunk of as many rows as heads", [[8, 8], [8, 16]]),
    ]
}

/// Keys of a cache have their heads where they belong.
fn over_caches() -> Vec<Mistake> {
    let of = |what, [kv_heads, keys]: Sizes, [q, out]: [Sizes; 2], words: String| {
        let mut cache = KvCache::new(1, KvShape { kv_heads, head_dim: 6, value_dim: 6 }).unwrap();
        cache.append(floats(shape([kv_heads, keys])), floats(shape([kv_heads, keys]))).unwrap();
        let got = call(Attention::new(), Inputs::cached(floats(shape(q)), &cache), shape(out), &[]);
        mistake(4, what, got, words)
    };
    let heads = |heads: usize, of: usize| format!("q: {heads} heads are no multiple of the {of} heads of cache");
    vec![
        of("q over a cache, a step", [2, 33], [[1, 8], [8, 1]], exchanged(&heads(1, 2), "q")),
        of("q and out over a cache, a step", [2, 33], [[1, 8], [1, 8]], exchanged(&heads(1, 2), "q")),
        of(
            "q over a cache, a chunk",
            [2, 33],
            [[10, 8], [8, 10]],
            exchanged("out: heads is 8, but q has 10", "q or out"),
        ),
        of("12 heads over a cache of 8", [8, 1], [[12, 1], [12, 1]], heads(12, 8)),
        of("10 heads over a cache of 7", [7, 2], [[10, 8], [10, 8]], heads(10, 7)),
    ]
}

/// Backward calls of 8 heads on 2, 10 rows.
fn of_gradients() -> Vec<Mistake> {
    let (q, k) = ([8, 10], [2, 10]);
    let of = |d_out: Sizes, [dq, dk]: [Sizes; 2], sinks: &[f32]| {
        let inputs = Inputs::new(floats(shape(q)), floats(shape(k)), floats(shape(k))).sinks(sinks);
        let saved = Saved::new(floats(shape(q)), floats([1, 8, 10, 1]), floats(shape(d_out)));
        let (mut q_memory, mut k_memory, mut sinks_memory) = ([42.0f32; 480], [42.0f32; 120], [42.0f32; 2]);
        let gradients = Gradients::new().q(ViewMut::bhld(&mut q_memory, shape(dq)).unwrap()).k(ViewMut::bhld(
            &mut k_memory,
            shape(dk),
        )
        .unwrap());
        let gradients = if sinks.len() == 8 { gradients.sinks(&mut sinks_memory) } else { gradients };
        outcome(sdpa::attention_backward(&Attention::new(), inputs, saved, gradients))
    };
    let of_key_heads = |list: &str| format!("{list}: length is 2, but q (heads) has 8{KEY_HEADS}");
    vec![
        mistake(4, "d_out", of([10, 8], [q, k], &[0.5; 8]), exchanged("d_out: heads is 10, but q has 8", "d_out")),
        mistake(4, "dq", of(q, [[10, 8], k], &[0.5; 8]), exchanged("dq: heads is 10, but q has 8", "dq")),
        mistake(4, "dk", of(q, [q, [10, 2]], &[0.5; 8]), exchanged("dk: heads is 10, but k has 2", "dk")),
        mistake(30, "sinks by kv_heads, backward", of(q, [q, k], &[0.5; 2]), of_key_heads("sinks")),
        mistake(30, "dsinks by kv_heads", of(q, [q, k], &[0.5; 8]), of_key_heads("dsinks")),
    ]
}
