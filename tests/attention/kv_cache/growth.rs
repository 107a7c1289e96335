//! Memory of short sequences: the first block grows with its keys, and nobody notices but who counts bytes.

use crate::kv_support::{append_tokens, every_format, new_tokens, picked, same_cache};
use crate::support::{Rng, Tensor};
use core::num::NonZeroUsize;
use sdpa::{Int4, KeyScales, KvCache, KvShape};

/// In every format, and latent: name, empty cache.
fn formats(empty: &KvCache) -> Vec<(&'static str, KvCache)> {
    let latent = || empty.clone().latent().unwrap();
    let int8 = ("latent int8", latent().int8(KeyScales::PerToken).unwrap());
    let latent = [("latent", latent()), int8, ("latent int4", latent().int4(Int4::Centred).unwrap())];
    every_format(empty).into_iter().chain(latent).collect()
}

/// Appends tokens to a sequence, in the form that the cache takes.
fn append(cache: &mut KvCache, sequence: usize, tokens: &[Tensor; 2]) {
    if cache.is_latent() {
        let (k, columns) = (tokens[0].view(), 0..cache.shape().value_dim);
        cache.append_to(sequence, k, k.columns(columns).unwrap()).unwrap();
    } else {
        append_tokens(cache, sequence, tokens);
    }
}

#[test]
fn short_sequences_take_little_more_memory_than_their_tokens() {
    for (name, empty) in formats(&KvCache::new(1, KvShape { kv_heads: 2, head_dim: 128, value_dim: 128 }).unwrap()) {
        let mut whole = empty.clone();
        append(&mut whole, 0, &new_tokens(&empty, 256, &mut Rng::new(1)));
        let mut one_by_one = empty.clone();
        for len in 1..=256 {
            append(&mut one_by_one, 0, &new_tokens(&empty, 1, &mut Rng::new(len as u64)));
            // Memory grows by sixteen tokens or more.
            if ![15, 0, 1].contains(&(len % 16)) {
                continue;
            }
            let mut at_once = empty.clone();
            append(&mut at_once, 0, &new_tokens(&empty, len, &mut Rng::new(1)));
            let needed = whole.bytes() * len.next_multiple_of(16) / 256;
            assert_eq!(at_once.bytes(), one_by_one.bytes(), "{name}, {len} tokens");
            assert!(at_once.bytes() < 2 * needed, "{name}, {len} tokens: {} of {needed} bytes", at_once.bytes());
        }
    }
}

/// 512 sequences of 16 tokens, 8 heads of 128: prints what docs/benchmarks.md says.
#[test]
fn many_short_sequences_take_at_most_half_more_than_their_tokens() {
    for (name, empty) in formats(&KvCache::new(512, KvShape { kv_heads: 8, head_dim: 128, value_dim: 128 }).unwrap()) {
        let (mut whole, mut many) = (empty.clone(), empty.clone());
        let tokens = new_tokens(&empty, 256, &mut Rng::new(1));
        append(&mut whole, 0, &tokens);
        let sixteen = picked(&tokens, &(0..16).collect::<Vec<_>>());
        (0..512).for_each(|sequence| append(&mut many, sequence, &sixteen));
        let needed = 512 * whole.bytes() / 16;
        println!("{name}: {} bytes for {needed}", many.bytes());
        assert!(2 * many.bytes() <= 3 * needed, "{name}: {} of {needed} bytes", many.bytes());
    }
}

#[test]
fn a_sequence_that_grew_has_the_bits_of_one_that_came_at_once() {
    for dims in [[17, 16], [40, 33], [96, 84]] {
        for (name, empty) in
            formats(&KvCache::new(2, KvShape { kv_heads: 2, head_dim: dims[0], value_dim: dims[1] }).unwrap())
        {
            let rng = &mut Rng::new(3);
            let all = new_tokens(&empty, 300, rng);
            let (mut grown, mut len) = (empty.clone(), 0);
            for n in [1, 14, 1, 1, 15, 1, 31, 1, 63, 1, 126, 1, 1, 43] {
                append(&mut grown, 1, &picked(&all, &(len..len + n).collect::<Vec<_>>()));
                len += n;
                let mut fresh = empty.clone();
                append(&mut fresh, 1, &picked(&all, &(0..len).collect::<Vec<_>>()));
                same_cache(&format!("{name}, {dims:?}, {len} tokens"), &grown, &fresh);
                assert_eq!(grown.bytes(), fresh.bytes(), "{name}, {len} tokens");
            }
            assert_eq!(len, 300);
        }
    }
}

/// A fork of a short sequence shares its small block until one of the two writes, and takes what it needs then.
#[test]
fn forks_of_short_sequences_grow_apart() {
    for (name, empty) in formats(&KvCache::new(2, KvShape { kv_heads: 2, head_dim: 24, value_dim: 20 }).unwrap()) {
        let rng = &mut Rng::new(4);
        for (len, more) in [(5, 3), (16, 1), (20, 200), (100, 300), (128, 128)] {
            let [start, mine, others] = [len, more, more + 1].map(|n| new_tokens(&empty, n, rng));
            let (mut forked, mut apart) = (empty.clone(), empty.clone());
            append(&mut forked, 0, &start);
            let one = forked.bytes();
            forked.fork(0, 1).unwrap();
            assert_eq!(forked.bytes(), one, "{name}: a fork takes no memory");
            (0..2).for_each(|sequence| append(&mut apart, sequence, &start));
            for (sequence, tokens) in [(1, &mine), (0, &others)] {
                [&mut forked, &mut apart].into_iter().for_each(|cache| append(cache, sequence, tokens));
            }
            same_cache(&format!("{name}, {len} and {more}"), &forked, &apart);
            assert_eq!(forked.bytes(), apart.bytes(), "{name}, {len} and {more}");
        }
    }
}

/// Memory that a long sequence leaves is used by short ones, and that of short ones by short ones.
#[test]
fn memory_that_was_left_is_used_again() {
    let sliding =
        KvCache::sliding(3, KvShape { kv_heads: 1, head_dim: 8, value_dim: 8 }, NonZeroUsize::new(300).unwrap(), 0)
            .unwrap();
    for (name, mut cache) in
        [("all", KvCache::new(3, KvShape { kv_heads: 1, head_dim: 8, value_dim: 8 }).unwrap()), ("sliding", sliding)]
    {
        let [long, short] = [600, 10].map(|n| new_tokens(&cache, n, &mut Rng::new(5)));
        append(&mut cache, 0, &long);
        cache.clear(0).unwrap();
        let held = cache.bytes();
        (0..3).for_each(|sequence| append(&mut cache, sequence, &short));
        assert_eq!(cache.bytes(), held, "{name}: three blocks for three sequences");
        (0..3).for_each(|sequence| cache.clear(sequence).unwrap());
        append(&mut cache, 2, &long);
        assert_eq!(cache.bytes(), held, "{name}");
    }
    let mut cache = KvCache::new(2, KvShape { kv_heads: 1, head_dim: 8, value_dim: 8 }).unwrap();
    let short = new_tokens(&cache, 10, &mut Rng::new(5));
    append(&mut cache, 0, &short);
    let held = cache.bytes();
    cache.clear(0).unwrap();
    append(&mut cache, 1, &short);
    assert_eq!(cache.bytes(), held);
}

/// A block that sequences share stays one block, however few of its keys they have.
#[test]
fn a_shared_block_is_not_copied_to_give_memory_back() {
    let mut cache = KvCache::new(3, KvShape { kv_heads: 1, head_dim: 8, value_dim: 8 }).unwrap();
    let tokens = new_tokens(&cache, 200, &mut Rng::new(6));
    append(&mut cache, 0, &tokens);
    (1..3).for_each(|sequence| cache.fork(0, sequence).unwrap());
    (0..3).for_each(|sequence| cache.truncate(sequence, 100).unwrap());
    let held = cache.bytes();
    cache.shrink();
    assert_eq!(cache.bytes(), held);
    (1..3).for_each(|sequence| cache.clear(sequence).unwrap());
    cache.shrink();
    assert!(cache.bytes() < held);
}

/// Memory that no key is in is given back, and what is left has the same bits, and can be appended to.
#[test]
fn a_cache_that_gave_memory_back_is_one_that_never_had_it() {
    for (name, empty) in formats(&KvCache::new(4, KvShape { kv_heads: 2, head_dim: 40, value_dim: 33 }).unwrap()) {
        let tokens = new_tokens(&empty, 700, &mut Rng::new(3));
        let first = |n: usize| picked(&tokens, &(0..n).collect::<Vec<_>>());
        let mut cache = empty.clone();
        (0..3).for_each(|sequence| append(&mut cache, sequence, &tokens));
        cache.fork(0, 3).unwrap();
        for (sequence, len) in [(1, 20), (2, 0), (3, 300)] {
            cache.truncate(sequence, len).unwrap();
        }
        let mut fresh = empty.clone();
        for (sequence, len) in [(0, 700), (1, 20), (3, 300)] {
            append(&mut fresh, sequence, &first(len));
        }
        let before = cache.bytes();
        cache.shrink();
        assert!(cache.bytes() < before && cache.bytes() <= fresh.bytes(), "{name}: {} of {before}", cache.bytes());
        same_cache(name, &cache, &fresh);
        for cache in [&mut cache, &mut fresh] {
            append(cache, 1, &first(300));
            append(cache, 3, &first(2));
        }
        same_cache(&format!("{name}, appended to"), &cache, &fresh);
    }
}
