//! Prompts of different lengths appended in one call: as if each had been appended by itself.

use crate::kv_support::{append_tokens, exact_and_others, new_tokens, picked, same_cache};
use crate::support::{LAYOUTS, Rng, Tensor};
use core::num::NonZeroUsize;
use sdpa::{CacheFormat, Dtype, Error, KvCache, KvShape, View};

fn empty(sequences: usize) -> KvCache {
    KvCache::new(sequences, KvShape { kv_heads: 2, head_dim: 17, value_dim: 20 }).unwrap()
}

/// Any subset, in any order, from any length on.
#[test]
fn a_ragged_append_is_the_appends_one_by_one() {
    let rng = &mut Rng::new(1);
    let last = NonZeroUsize::new(40).unwrap();
    for empty in [empty(5), KvCache::sliding(5, KvShape { kv_heads: 2, head_dim: 17, value_dim: 20 }, last, 3).unwrap()]
    {
        for (name, empty) in exact_and_others(&empty) {
            let (mut together, mut apart) = (empty.clone(), empty);
            for lens in [&[(3, 255), (0, 1)][..], &[(4, 17), (3, 2), (1, 0), (0, 300)], &[(2, 600)], &[], &[(3, 256)]] {
                let sequences: Vec<usize> = lens.iter().map(|&(sequence, _)| sequence).collect();
                let mut ends = vec![0];
                for (sequence, n) in lens {
                    let first = *ends.last().unwrap();
                    ends.push(first + n);
                    let _ = sequence;
                }
                let tokens = new_tokens(&apart, *ends.last().unwrap(), rng);
                for (sequence, at) in sequences.iter().zip(ends.windows(2)) {
                    let rows: Vec<usize> = (at[0]..at[1]).collect();
                    append_tokens(&mut apart, *sequence, &picked(&tokens, &rows));
                }
                let [k, v] = tokens.map(|x| x.laid_out(rng.pick(&LAYOUTS)));
                together.append_ragged(&sequences, &ends, k.view(), v.view()).unwrap();
                same_cache(&format!("{name}, {lens:?}"), &together, &apart);
                assert_eq!(together.bytes(), apart.bytes(), "{name}, {lens:?}");
            }
        }
    }
}

/// Sequences that share blocks, written to in one call.
#[test]
fn forks_are_appended_to_together() {
    let rng = &mut Rng::new(2);
    for (name, empty) in exact_and_others(&empty(3)) {
        let (mut together, mut apart) = (empty.clone(), empty);
        let (prompt, tokens) = (new_tokens(&apart, 300, rng), new_tokens(&apart, 7, rng));
        for cache in [&mut together, &mut apart] {
            append_tokens(cache, 0, &prompt);
            cache.fork(0, 1).unwrap();
            cache.fork(0, 2).unwrap();
        }
        together.append_ragged(&[2, 0, 1], &[0, 3, 4, 7], tokens[0].view(), tokens[1].view()).unwrap();
        for (sequence, rows) in [(2, 0..3), (0, 3..4), (1, 4..7)] {
            append_tokens(&mut apart, sequence, &picked(&tokens, &rows.collect::<Vec<_>>()));
        }
        same_cache(name, &together, &apart);
    }
}

/// A refused append, in its words, and the cache as it was.
#[track_caller]
fn refused(words: &str, sequences: &[usize], ends: &[usize], [k, v]: [[usize; 4]; 2]) {
    let mut cache = empty(4);
    let tokens = new_tokens(&cache, 5, &mut Rng::new(3));
    append_tokens(&mut cache, 0, &tokens);
    cache.remove_sequence(2).unwrap();
    let before = cache.clone();
    let zeros = vec![0.0; 4096];
    let view = |shape| View::bhld(&zeros, shape).unwrap();
    let error = cache.append_ragged(sequences, ends, view(k), view(v)).unwrap_err();
    assert_eq!(error.to_string(), words);
    same_cache(words, &cache, &before);
}

#[test]
fn what_does_not_fit_is_refused() {
    let rows = |n| [[1, 2, n, 17], [1, 2, n, 20]];
    refused("sequences: there is no sequence 4, the cache has 4", &[0, 4], &[0, 1, 2], rows(2));
    refused("sequences: sequence 2 was removed", &[0, 2], &[0, 1, 2], rows(2));
    refused("sequences: sequence 3 is named twice", &[3, 0, 3], &[0, 1, 2, 3], rows(3));
    refused("ends: number of sequences is 1, but sequences has 2", &[0, 1], &[0, 2], rows(2));
    refused("ends: number of sequences is 2, but sequences has 1", &[1], &[0, 2, 2], rows(2));
    refused("ends: entry 0 is 1, but must be exactly 0, where cumulative lengths begin", &[0, 1], &[1, 1, 2], rows(2));
    refused("ends: entry 2 is 1, but must be at least 2, the entry before it", &[0, 1, 3], &[0, 2, 1, 2], rows(2));
    let last = "ends: entry 2 is 2, but must be exactly 3, the number of rows";
    refused(last, &[0, 1], &[0, 1, 2], rows(3));
    refused("ends: the list of cumulative lengths is 0, but must be at least 1", &[], &[], rows(0));
    refused("k: batch is 2, but a ragged append has 1", &[0], &[0, 2], [[2, 2, 2, 17], [2, 2, 2, 20]]);
    refused("k: heads is 1, but the cache has 2", &[0], &[0, 3], [[1, 1, 3, 17], [1, 2, 3, 20]]);
    refused("v: rows is 3, but k has 2", &[0], &[0, 2], [[1, 2, 2, 17], [1, 2, 3, 20]]);
    refused("v: value_dim is 21, but the cache has 20", &[0], &[0, 2], [[1, 2, 2, 17], [1, 2, 2, 21]]);
}

/// The last of several rows is one that the cache has no place for: none of them is written.
#[test]
fn all_or_nothing() {
    for (name, mut cache) in exact_and_others(&empty(2)) {
        let rng = &mut Rng::new(4);
        let tokens = new_tokens(&cache, 5, rng);
        append_tokens(&mut cache, 0, &tokens);
        let (before, bytes, [k, mut v]) = (cache.clone(), cache.bytes(), new_tokens(&cache, 9, rng));
        v.set([0, 1, 8, 19], 1e30);
        let values = cache.format().values;
        if values == CacheFormat::Int8PerToken {
            v.set([0, 1, 8, 19], f32::NAN);
        }
        if values == CacheFormat::E4m3PerToken {
            v.set([0, 1, 8, 19], f32::INFINITY);
        }
        let of_any_size = CacheFormat::E4m3PerHead(&[0.02; 2]);
        let takes_all = matches!(values, CacheFormat::Elements(Dtype::F32 | Dtype::Bf16)) || values == of_any_size;
        let result = cache.append_ragged(&[1, 0], &[0, 4, 9], k.view(), v.view());
        if takes_all {
            result.unwrap();
            continue;
        }
        assert!(matches!(result, Err(Error::Row { argument: "v", row: 8, .. })), "{name}: {result:?}");
        same_cache(name, &cache, &before);
        assert_eq!(cache.bytes(), bytes);
    }
    let mut cache = KvCache::new(2, KvShape { kv_heads: 1, head_dim: 8, value_dim: 8 }).unwrap();
    let many = View::from_strides(&[0.0; 8], 0, [1, 1, 1 << 44, 8], [0, 0, 0, 1]).unwrap();
    let error = cache.append_ragged(&[0, 1], &[0, 1, 1 << 44], many, many).unwrap_err();
    assert!(matches!(error, Error::Memory { what: "cache", .. }), "{error}");
    assert_eq!(cache.lens(), [0, 0]);
}

/// A sliding cache that has no memory for what is appended keeps what the last row may see.
#[test]
fn nothing_is_evicted_where_memory_is_refused() {
    let mut cache =
        KvCache::sliding(1, KvShape { kv_heads: 1, head_dim: 8, value_dim: 8 }, NonZeroUsize::MIN, 0).unwrap();
    let rows = Tensor::normal([1, 1, 600, 8], &mut Rng::new(5));
    cache.append(rows.view(), rows.view()).unwrap();
    let many = View::from_strides(&[0.0; 8], 0, [1, 1, 1 << 44, 8], [0, 0, 0, 1]).unwrap();
    assert!(matches!(cache.append(many, many), Err(Error::Memory { .. })));
    assert_eq!(cache.evicted(0), Ok(0..0));
    let one = rows.rows(0..1);
    cache.append(one.view(), one.view()).unwrap();
    assert_eq!(cache.evicted(0), Ok(0..512));
}
