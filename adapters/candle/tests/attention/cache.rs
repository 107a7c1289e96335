//! Caches of every type, against candle's own attention over all keys and against one call over tensors.

use crate::oracle::{Scores, TYPES, assert_close, assert_same, candle, mask, random};
use candle_core::{DType, Tensor};
use sdpa_candle::sdpa;
use sdpa_candle::{Alignment, Attention, Int4, KeyScales, KvCache, KvShape, Sdpa};
use std::num::NonZeroUsize;

const KEYS: usize = 262;

fn causal() -> Sdpa {
    Sdpa::new(Attention::new().causal().align(Alignment::BottomRight))
}

fn qkv() -> [Tensor; 3] {
    [random((2, 4, KEYS, 32), 1), random((2, 2, KEYS, 32), 2), random((2, 2, KEYS, 24), 3)]
}

/// Appends keys piece by piece and attends with the queries of each; the outputs together.
fn in_pieces(mut cache: KvCache, [q, k, v]: &[Tensor; 3]) -> Tensor {
    let (mut outs, mut from) = (Vec::new(), 0);
    for rows in [250, 1, 1, 7, 3] {
        let [q, k, v] = [q, k, v].map(|x| x.narrow(2, from, rows).unwrap());
        cache.append(&k, &v).unwrap();
        outs.push(cache.attend(&q, &causal()).unwrap());
        from += rows;
    }
    assert_eq!(cache.lens(), [KEYS; 2]);
    Tensor::cat(&outs, 2).unwrap()
}

#[test]
fn pieces_have_the_bits_of_one_call() {
    for dtype in TYPES {
        let rounded = qkv().map(|x| x.to_dtype(dtype).unwrap());
        // Rows before heads, as projections are.
        let strided = rounded.each_ref().map(|x| {
            let stored = x.transpose(1, 2).unwrap().contiguous().unwrap();
            stored.transpose(1, 2).unwrap()
        });
        let cache =
            KvCache::new(2, KvShape { kv_heads: 2, head_dim: 32, value_dim: 24 }).unwrap().dtype(dtype).unwrap();
        let got = in_pieces(cache, &strided);
        let [q, k, v] = &rounded;
        assert_same(&got, &causal().forward(q, k, v).unwrap(), &format!("{dtype:?}"));
        let scores = Scores::keep(mask(KEYS, KEYS, |row, key| key <= row));
        let expected = candle(q, k, v, &scores).unwrap();
        let bound = if dtype == DType::F32 { 1e-5 } else { 4.0 / 256.0 };
        assert_close(&got, &expected, bound, &format!("{dtype:?}, candle"));
    }
}

#[test]
fn types_of_caches_are_near_candles_own() {
    let [q, k, v] = qkv();
    let expected = candle(&q, &k, &v, &Scores::keep(mask(KEYS, KEYS, |row, key| key <= row))).unwrap();
    let new = || KvCache::new(2, KvShape { kv_heads: 2, head_dim: 32, value_dim: 24 }).unwrap();
    let channels = KeyScales::PerChannel(vec![6.0 / 127.0; 2 * 32]);
    let caches = [
        ("bf16", new().dtype(DType::BF16).unwrap(), 3e-2),
        ("f16", new().dtype(DType::F16).unwrap(), 4e-3),
        ("int8", new().int8(KeyScales::PerToken).unwrap(), 6e-2),
        ("int8 by channel", new().int8(channels).unwrap(), 6e-2),
        ("int4", new().int4(Int4::Symmetric).unwrap(), 6e-1),
    ];
    for (name, cache, bound) in caches {
        let got = in_pieces(cache, &[q.clone(), k.clone(), v.clone()]);
        assert_eq!(got.dtype(), DType::F32);
        assert_close(&got, &expected, bound, name);
    }
}

#[test]
fn queries_have_a_type_of_their_own() {
    let [q, k, v] = qkv();
    let mut cache = KvCache::new(2, KvShape { kv_heads: 2, head_dim: 32, value_dim: 24 }).unwrap();
    cache.append(&k, &v).unwrap();
    let q = q.to_dtype(DType::BF16).unwrap();
    let out = cache.attend(&q, &causal()).unwrap();
    assert_same(&out, &causal().forward(&q, &k, &v).unwrap(), "queries in bf16");
}

#[test]
fn sequences_have_lengths_of_their_own() {
    let [q, k, v] = qkv();
    let mut cache = KvCache::new(2, KvShape { kv_heads: 2, head_dim: 32, value_dim: 24 }).unwrap();
    for (sequence, rows) in [(1, 20), (0, 5), (1, 3)] {
        let from = cache.lens()[sequence];
        let [k, v] = [&k, &v].map(|x| x.narrow(0, sequence, 1).unwrap().narrow(2, from, rows).unwrap());
        cache.append_to(sequence, &k, &v).unwrap();
    }
    cache.truncate(1, 21).unwrap();
    assert_eq!(cache.lens(), [5, 21]);
    let q = q.narrow(2, 0, 2).unwrap();
    let out = cache.attend(&q, &causal()).unwrap();
    for (sequence, len) in [(0, 5), (1, 21)] {
        let one = |x: &Tensor, len: usize| x.narrow(0, sequence, 1).unwrap().narrow(2, 0, len).unwrap();
        let expected = causal().forward(&one(&q, 2), &one(&k, len), &one(&v, len)).unwrap();
        assert_same(&one(&out, 2), &expected, &format!("sequence {sequence}"));
    }
}

#[test]
fn options_hold_over_caches() {
    let [q, k, v] = qkv();
    let drop = mask(KEYS, KEYS, |row, key| (row + key) % 7 == 3);
    let sdpa = causal().drop_mask(&drop).sinks(&random(4, 5)).bias(&random((1, 4, 1, KEYS), 6));
    let mut cache = KvCache::new(2, KvShape { kv_heads: 2, head_dim: 32, value_dim: 24 }).unwrap();
    cache.append(&k, &v).unwrap();
    assert_same(&cache.attend(&q, &sdpa).unwrap(), &sdpa.forward(&q, &k, &v).unwrap(), "options");
}

#[test]
fn sliding_caches() {
    let [q, k, v] = qkv();
    let last = NonZeroUsize::new(10).unwrap();
    let window = sdpa::Window::last_tokens(last);
    let sdpa = Sdpa::new(Attention::new().causal().window(window).align(Alignment::BottomRight));
    let mut cache = KvCache::from(
        sdpa::KvCache::sliding(2, sdpa::KvShape { kv_heads: 2, head_dim: 32, value_dim: 24 }, last, 0).unwrap(),
    );
    cache.append(&k, &v).unwrap();
    let q = q.narrow(2, KEYS - 1, 1).unwrap();
    assert_same(&cache.attend(&q, &sdpa).unwrap(), &sdpa.forward(&q, &k, &v).unwrap(), "sliding");
}
