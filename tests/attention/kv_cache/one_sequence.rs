//! One sequence to a file and back into a cache, and the memory that it will take.

use crate::kv_support::{append_tokens, exact_and_others, new_tokens, picked, same_cache};
use crate::support::Rng;
use core::num::NonZeroUsize;
use sdpa::{Dtype, Error, KeyScales, KvCache, KvShape};

const SHAPE: KvShape = KvShape { kv_heads: 2, head_dim: 17, value_dim: 20 };

fn sliding(last: usize, first: usize, rollback: usize) -> KvCache {
    let cache = KvCache::sliding(3, SHAPE, NonZeroUsize::new(last).expect("some"), first).expect("a cache");
    cache.rollback_room(rollback).expect("an empty cache")
}

fn kinds() -> Vec<(&'static str, KvCache)> {
    let all = [KvCache::new(3, SHAPE).expect("a cache"), sliding(16, 4, 9), sliding(300, 0, 0), sliding(20, 300, 3)];
    all.iter().flat_map(exact_and_others).collect()
}

#[test]
fn a_sequence_that_was_swapped_is_the_one_it_was() {
    for (name, empty) in kinds() {
        for lens in [&[0][..], &[1], &[700], &[520, 30, 1]] {
            let (mut cache, rng) = (empty.clone(), &mut Rng::new(1));
            append_tokens(&mut cache, 0, &new_tokens(&empty, 290, rng));
            lens.iter().for_each(|&n| append_tokens(&mut cache, 1, &new_tokens(&empty, n, rng)));
            let mut expected = cache.clone();
            expected.fork(1, 2).expect("sequences");
            expected.clear(1).expect("a sequence");
            let bytes = cache.export_sequence(1).expect("a file");
            assert_eq!(KvCache::import(&bytes).expect("a cache's file").lens(), &cache.lens()[1..2]);
            cache.clear(1).expect("a sequence");
            cache.import_sequence(2, &bytes).expect("its file");
            same_cache(name, &cache, &expected);
            assert_eq!(cache.evicted(2), expected.evicted(2));
            let tokens = new_tokens(&empty, 40, rng);
            for cache in [&mut cache, &mut expected] {
                append_tokens(cache, 2, &tokens);
                append_tokens(cache, 0, &tokens);
            }
            same_cache(&format!("{name}, goes on"), &cache, &expected);
        }
    }
}

#[test]
fn what_cannot_be_swapped_in_is_refused_and_changes_nothing() {
    let int8 = KvCache::new(3, SHAPE).and_then(|cache| cache.int8(KeyScales::PerToken)).expect("a cache");
    let (mut cache, rng) = (int8.clone(), &mut Rng::new(2));
    append_tokens(&mut cache, 0, &new_tokens(&int8, 30, rng));
    cache.remove_sequence(1).expect("a sequence");
    let file = cache.export_sequence(0).expect("a file");
    let before = cache.clone();
    let mut says = |words: &str, sequence: usize, bytes: &[u8]| {
        let refused = cache.import_sequence(sequence, bytes).expect_err(words);
        same_cache(words, &cache, &before);
        assert_eq!(refused.to_string(), words);
    };
    says("sequence: number of keys is 30, but must be at most 0, that of an empty sequence", 0, &file);
    says("sequence: sequence 1 was removed", 1, &file);
    says("sequence: there is no sequence 3, the cache has 3", 3, &file);
    let of = |cache: &KvCache| cache.export_sequence(0).expect("a file");
    let other = KvCache::new(1, KvShape { head_dim: 16, ..SHAPE }).expect("a cache");
    says("file: head_dim is 16, but the cache has 17", 2, &of(&other));
    let bf16 = KvCache::new(1, SHAPE).and_then(|cache| cache.dtype(Dtype::Bf16)).expect("a cache");
    says("import: keys of the file are Bf16, but those of the cache are Int8PerToken", 2, &of(&bf16));
    let slides = sliding(16, 4, 9).int8(KeyScales::PerToken).expect("a cache");
    says(
        "import: kept keys of the file are the first 4 and the last 16, with 9 to take back, but those of the cache are all",
        2,
        &of(&slides),
    );
    says("import: the file has 3 sequences, but must have 1", 2, &before.export().expect("a file"));
    let mut removed = KvCache::new(1, SHAPE).and_then(|cache| cache.int8(KeyScales::PerToken)).expect("a cache");
    removed.remove_sequence(0).expect("a sequence");
    says("import: the sequence in the file was removed", 2, &removed.export().expect("a file"));
    assert_eq!(cache.export_sequence(1), Err(Error::Removed { argument: "sequence", sequence: 1 }));
    assert!(cache.export_sequence(3).is_err());
    for cut in (0..file.len()).step_by(7) {
        assert!(cache.import_sequence(2, &file[..cut]).is_err(), "{cut} of {} bytes", file.len());
    }
    let scales = |scale| KeyScales::PerChannel(vec![scale; 34]);
    let by_channel = |scale| KvCache::new(1, SHAPE).and_then(|cache| cache.int8(scales(scale))).expect("a cache");
    let refused = by_channel(0.5).import_sequence(0, &of(&by_channel(0.25))).expect_err("other scales");
    let words = "import: the scales of the keys' channels in the file are not those of the cache";
    assert_eq!(refused.to_string(), words);
    by_channel(0.5).import_sequence(0, &of(&by_channel(0.5))).expect("the same scales");
}

#[test]
fn a_forecast_is_what_is_held() {
    for (name, empty) in kinds() {
        let (mut cache, tokens) = (empty.clone(), new_tokens(&empty, 900, &mut Rng::new(3)));
        assert_eq!(empty.bytes_for(0), 0);
        for len in 1..=900 {
            append_tokens(&mut cache, 1, &picked(&tokens, &[len - 1]));
            if len % 15 < 3 || len % 256 < 2 {
                let mut held = cache.clone();
                held.shrink();
                assert_eq!(held.bytes(), cache.bytes_for(len), "{name}, {len} tokens");
            }
        }
        assert!(empty.bytes_for(usize::MAX) > usize::MAX / 2 || empty.sliding_window().is_some(), "{name}");
    }
}
