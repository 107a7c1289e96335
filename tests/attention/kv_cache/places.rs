//! Sequences removed, their places used again, and what a cache says about itself.

use crate::kv_support::{append_tokens, exact_and_others, new_tokens, same_cache};
use crate::support::{Rng, Tensor, assert_same_bits};
use core::num::NonZeroUsize;
use sdpa::{
    Attention, Basis, CacheFormat, Dtype, Error, Inputs, Int4, KvCache, KvFormat, KvShape, Outputs, View, ViewMut,
};

#[test]
fn getters_say_what_the_cache_was_made_of() {
    let last = NonZeroUsize::new(300).unwrap();
    let full = KvCache::new(2, KvShape { kv_heads: 3, head_dim: 17, value_dim: 20 }).unwrap();
    let sliding = KvCache::sliding(2, KvShape { kv_heads: 3, head_dim: 17, value_dim: 20 }, last, 4)
        .unwrap()
        .rollback_room(9)
        .unwrap();
    for empty in [&full, &sliding] {
        for (name, mut cache) in exact_and_others(empty) {
            let tokens = new_tokens(&cache, 5, &mut Rng::new(1));
            append_tokens(&mut cache, 1, &tokens);
            let shape = KvShape { kv_heads: 3, head_dim: 17, value_dim: 20 };
            assert_eq!((cache.sequences(), cache.shape()), (2, shape));
            assert_eq!(cache.lens(), [0, 5]);
            let format = cache.format();
            match name {
                "f32" => assert_eq!(format, CacheFormat::Elements(Dtype::F32)),
                "bf16" => assert_eq!(format, CacheFormat::Elements(Dtype::Bf16)),
                "f16" => assert_eq!(format, CacheFormat::Elements(Dtype::F16)),
                "int8 per token" => assert_eq!(format, CacheFormat::Int8PerToken),
                "int4" => assert_eq!(format, CacheFormat::Int4(Int4::Symmetric)),
                "int4 with centres" => assert_eq!(format, CacheFormat::Int4(Int4::Centred)),
                "int8 with 5 exact tokens" => assert_eq!(format.exact_first, 5),
                "int4 in the Hadamard basis with 16 exact tokens" => assert_eq!(format.exact_first, 16),
                "e4m3" => assert_eq!(format, CacheFormat::E4m3PerToken),
                "int8 and e4m3 per head" => assert_eq!(format.values, CacheFormat::E4m3PerHead(&[0.02; 3])),
                "bf16 and int8" => {
                    let bf16 = CacheFormat::Elements(Dtype::Bf16);
                    assert_eq!(format, KvFormat::new(bf16, CacheFormat::Int8PerToken));
                }
                "int8 and int4" => assert_eq!(format.values, CacheFormat::Int4(Int4::Centred)),
                "int4 and int8 in the Hadamard basis" => {
                    assert_eq!([format.key_basis, format.value_basis], [Basis::Hadamard; 2]);
                }
                _ => assert!(matches!(format.keys, CacheFormat::Int8PerChannel(scales) if scales.len() == 3 * 17)),
            }
            let window = cache.sliding_window().map(|keys| (keys.last, keys.first, keys.rollback));
            assert_eq!(window, empty.sliding_window().map(|_| (last, 4, 9)));
            assert_eq!(cache.evicted(1), Ok(0..0));
        }
    }
    let Some(window) = sliding.sliding_window() else { panic!("it is a sliding cache") };
    assert_eq!((window.last, window.first, window.rollback), (last, 4, 9));
}

#[test]
fn evicted_keys_are_named() {
    let last = NonZeroUsize::new(16).unwrap();
    let mut cache = KvCache::sliding(2, KvShape { kv_heads: 1, head_dim: 8, value_dim: 8 }, last, 4).unwrap();
    for n in [600, 1] {
        let tokens = new_tokens(&cache, n, &mut Rng::new(1));
        append_tokens(&mut cache, 1, &tokens);
    }
    assert_eq!((cache.evicted(0), cache.evicted(1)), (Ok(0..0), Ok(256..512)));
    let none = Error::Sequence { argument: "sequence", got: 2, sequences: 2 };
    assert_eq!(cache.evicted(2), Err(none));
}

/// Three sequences of 300, 20 and 5 keys.
fn three(empty: &KvCache) -> KvCache {
    let mut cache = empty.clone();
    for (sequence, n) in [300, 20, 5].into_iter().enumerate() {
        append_tokens(&mut cache, sequence, &new_tokens(empty, n, &mut Rng::new(n as u64)));
    }
    cache
}

/// In a call over the whole cache a removed sequence is one of length 0.
#[test]
fn a_removed_sequence_sees_nothing() {
    for (name, empty) in
        exact_and_others(&KvCache::new(3, KvShape { kv_heads: 2, head_dim: 17, value_dim: 20 }).unwrap())
    {
        let (mut removed, mut cleared) = (three(&empty), three(&empty));
        removed.remove_sequence(1).unwrap();
        cleared.clear(1).unwrap();
        assert_eq!((removed.lens(), removed.sequences()), (&[300, 0, 5][..], 3));
        assert_eq!([0, 1, 2, 3].map(|sequence| removed.has_sequence(sequence)), [true, false, true, false]);
        same_cache(name, &removed, &cleared);
        let q = Tensor::normal([3, 2, 1, 17], &mut Rng::new(9));
        let mut out = Tensor::filled([3, 2, 1, 20], f32::NAN);
        let outputs = Outputs::new(ViewMut::bhld(&mut out.data, out.shape).unwrap());
        sdpa::attention(&Attention::new(), Inputs::cached(q.view(), &removed), outputs).unwrap();
        assert_same_bits(name, &out.part(1..2, 0..2, 0..1), &Tensor::filled([1, 2, 1, 20], 0.0));
    }
}

/// The lowest place first; memory of removed sequences is used again; nothing of the old tokens is left.
#[test]
fn places_and_memory_are_used_again() {
    for (name, empty) in
        exact_and_others(&KvCache::new(3, KvShape { kv_heads: 2, head_dim: 17, value_dim: 20 }).unwrap())
    {
        let (mut cache, rng) = (three(&empty), &mut Rng::new(8));
        let bytes = cache.bytes();
        for sequence in [2, 0] {
            cache.remove_sequence(sequence).unwrap();
        }
        assert_eq!(cache.bytes(), bytes);
        assert_eq!(cache.add_sequence(), 0);
        let tokens = new_tokens(&empty, 270, rng);
        append_tokens(&mut cache, 0, &tokens);
        assert_eq!(cache.bytes(), bytes, "{name}: memory of removed sequences is used again");
        assert_eq!([cache.add_sequence(), cache.add_sequence()], [2, 3]);
        assert_eq!(cache.lens(), [270, 20, 0, 0]);
        let mut fresh = empty.clone();
        fresh.add_sequence();
        append_tokens(&mut fresh, 0, &tokens);
        append_tokens(&mut fresh, 1, &new_tokens(&empty, 20, &mut Rng::new(20)));
        same_cache(name, &cache, &fresh);
    }
}

/// Removing one of two that share blocks leaves the other as it was; a copy of the cache knows what was removed.
#[test]
fn forks_and_copies_outlive_a_removal() {
    for (name, empty) in
        exact_and_others(&KvCache::new(3, KvShape { kv_heads: 2, head_dim: 17, value_dim: 20 }).unwrap())
    {
        let mut cache = three(&empty);
        cache.fork(0, 2).unwrap();
        cache.remove_sequence(0).unwrap();
        let mut copy = cache.clone();
        let (tokens, rng) = (new_tokens(&empty, 300, &mut Rng::new(300)), &mut Rng::new(2));
        let mut fresh = empty.clone();
        append_tokens(&mut fresh, 1, &new_tokens(&empty, 20, &mut Rng::new(20)));
        append_tokens(&mut fresh, 2, &tokens);
        same_cache(name, &cache, &fresh);
        assert_eq!(copy.add_sequence(), 0);
        append_tokens(&mut copy, 0, &new_tokens(&empty, 40, rng));
        assert!(!cache.has_sequence(0));
        same_cache(name, &cache, &fresh);
    }
}

#[test]
fn whatever_names_a_removed_sequence_is_refused() {
    let mut cache = three(&KvCache::new(3, KvShape { kv_heads: 2, head_dim: 17, value_dim: 20 }).unwrap());
    cache.remove_sequence(1).unwrap();
    let zeros = vec![0.0; 4096];
    let rows = |batch, dim| View::bhld(&zeros, [batch, 2, 4, dim]).unwrap();
    let before = cache.clone();
    #[track_caller]
    fn says<T: core::fmt::Debug>(words: &str, result: Result<T, Error>) {
        assert_eq!(result.unwrap_err().to_string(), words);
    }
    says("sequence: sequence 1 was removed", cache.append_to(1, rows(1, 17), rows(1, 20)));
    says("append: sequence 1 was removed", cache.append(rows(3, 17), rows(3, 20)));
    says("sequence: sequence 1 was removed", cache.truncate(1, 0));
    says("sequence: sequence 1 was removed", cache.clear(1));
    says("sequence: sequence 1 was removed", cache.keep(1, 0, &[]));
    says("sequence: sequence 1 was removed", cache.evicted(1));
    says("sequence: sequence 1 was removed", cache.remove_sequence(1));
    says("from: sequence 1 was removed", cache.fork(1, 0));
    says("to: sequence 1 was removed", cache.fork(0, 1));
    says("sequence: there is no sequence 3, the cache has 3", cache.remove_sequence(3));
    let q = vec![0.0; 2 * 2 * 17];
    let mut out = vec![42.0; 2 * 2 * 20];
    let inputs = Inputs::cached(View::bhld(&q, [2, 2, 1, 17]).unwrap(), &cache).sequences(&[2, 1]);
    let outputs = Outputs::new(ViewMut::bhld(&mut out, [2, 2, 1, 20]).unwrap());
    says("sequences: sequence 1 was removed", sdpa::attention(&Attention::new(), inputs, outputs));
    assert!(out.iter().all(|&x| x == 42.0));
    same_cache("refused", &cache, &before);
    assert_eq!(cache.add_sequence(), 1);
    cache.append(rows(3, 17), rows(3, 20)).unwrap();
    assert_eq!(cache.lens(), [304, 4, 9]);
}
