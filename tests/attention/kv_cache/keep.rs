//! Tokens kept of a draft: the cache is as if they alone had been appended.

use crate::kv_support::{append_tokens, every_format, new_tokens, picked, same_cache};
use crate::support::{Rng, Tensor};
use core::num::NonZeroUsize;
use sdpa::{KvCache, KvShape};

/// Some of `n`, in order: none, all, the first, the last, every other, any.
fn choices(n: usize, rng: &mut Rng) -> Vec<Vec<usize>> {
    let mut choices = vec![vec![], (0..n).collect(), (0..n).step_by(2).collect(), (n / 2..n).collect()];
    choices.push((0..n).filter(|_| rng.below(3) == 0).collect());
    if n > 0 {
        choices.extend([vec![0], vec![n - 1]]);
    }
    choices
}

/// Drafts before, at and behind the ends of panels and blocks, short ones and such as span several blocks; the next
/// tokens are appended as if nothing had been.
#[test]
fn what_is_kept_is_what_was_appended() {
    let rng = &mut Rng::new(1);
    let drafts = [(0, 5), (10, 20), (15, 2), (250, 12), (255, 1), (256, 3), (255, 600), (3, 300)];
    for (dims, drafts) in [([3, 5], &drafts[..]), ([17, 84], &drafts[6..])] {
        for (name, empty) in
            every_format(&KvCache::new(1, KvShape { kv_heads: 2, head_dim: dims[0], value_dim: dims[1] }).unwrap())
        {
            for &(from, n) in drafts {
                let [prompt, draft, next] = [from, n, 3].map(|n| new_tokens(&empty, n, rng));
                for accepted in choices(n, rng) {
                    let (mut kept, mut fresh) = (empty.clone(), empty.clone());
                    append_tokens(&mut kept, 0, &prompt);
                    append_tokens(&mut kept, 0, &draft);
                    kept.keep(0, from, &accepted).unwrap();
                    append_tokens(&mut fresh, 0, &prompt);
                    append_tokens(&mut fresh, 0, &picked(&draft, &accepted));
                    let what = format!("{name}, {n} behind {from}, {} kept", accepted.len());
                    assert_eq!(kept.lens(), [from + accepted.len()]);
                    same_cache(&what, &kept, &fresh);
                    for cache in [&mut kept, &mut fresh] {
                        append_tokens(cache, 0, &next);
                    }
                    same_cache(&what, &kept, &fresh);
                }
            }
        }
    }
}

/// A token moved keeps its bits, NaN's payload and the sign of zero too.
#[test]
fn bits_are_moved_as_they_are() {
    let strange = [f32::from_bits(0x7fc1_2345), f32::NEG_INFINITY, -0.0, f32::from_bits(1)];
    let mut cache = KvCache::new(1, KvShape { kv_heads: 1, head_dim: 4, value_dim: 4 }).unwrap();
    let tokens = Tensor::from_fn([1, 1, 9, 4], |[_, _, j, d]| if j == 7 { strange[d] } else { 1.0 });
    cache.append(tokens.view(), tokens.view()).unwrap();
    cache.keep(0, 2, &[5]).unwrap();
    let q = Tensor::filled([1, 1, 1, 4], 0.0);
    let held = sdpa::Inputs::cached(q.view(), &cache).key_values().unwrap();
    for (d, x) in strange.into_iter().enumerate() {
        let bits = [held.key([0, 0, 2, d]), held.value([0, 0, 2, d])].map(|x| x.unwrap().to_bits());
        assert_eq!(bits, [x.to_bits(); 2]);
    }
}

/// Blocks that a fork or a copy of the cache shares are copied before a token moves within them.
#[test]
fn forks_keep_what_they_have() {
    let rng = &mut Rng::new(2);
    for (name, empty) in every_format(&KvCache::new(3, KvShape { kv_heads: 2, head_dim: 17, value_dim: 20 }).unwrap()) {
        let mut cache = empty.clone();
        let tokens = new_tokens(&empty, 600, rng);
        append_tokens(&mut cache, 0, &tokens);
        cache.fork(0, 1).unwrap();
        cache.fork(0, 2).unwrap();
        let (before, bytes) = (cache.clone(), cache.bytes());
        let accepted: Vec<usize> = (0..400).filter(|i| i % 3 != 1).collect();
        cache.keep(1, 200, &accepted).unwrap();
        let mut fresh = empty.clone();
        let rows: Vec<usize> = (0..200).chain(accepted.iter().map(|i| 200 + i)).collect();
        append_tokens(&mut fresh, 0, &tokens);
        append_tokens(&mut fresh, 1, &picked(&tokens, &rows));
        append_tokens(&mut fresh, 2, &tokens);
        same_cache(name, &cache, &fresh);
        assert_eq!(cache.bytes(), bytes / 3 * 5, "{name}: two blocks became its own");
        let mut whole = empty.clone();
        (0..3).for_each(|sequence| append_tokens(&mut whole, sequence, &tokens));
        same_cache(name, &before, &whole);
        // Kept in place, nothing is copied.
        cache.keep(2, 10, &(0..590).collect::<Vec<_>>()).unwrap();
        assert_eq!((cache.lens(), cache.bytes()), (&[600, 467, 600][..], bytes / 3 * 5));
    }
}

/// Step by step with drafts, a sliding cache gives what one gives that never saw a draft.
#[test]
fn a_sliding_cache_takes_every_draft_back() {
    let rng = &mut Rng::new(3);
    for (last, first, rollback) in [(1, 0, 0), (16, 4, 0), (257, 1, 30), (100, 300, 0)] {
        let sliding = KvCache::sliding(
            1,
            KvShape { kv_heads: 1, head_dim: 8, value_dim: 8 },
            NonZeroUsize::new(last).unwrap(),
            first,
        )
        .unwrap();
        for (name, empty) in every_format(&sliding.rollback_room(rollback).unwrap()) {
            let (mut kept, mut fresh) = (empty.clone(), empty.clone());
            while kept.lens()[0] < 900 {
                let (from, n) = (kept.lens()[0], rng.pick(&[1, 5, 40, 90]));
                let draft = new_tokens(&empty, n, rng);
                let accepted: Vec<usize> = (0..n).filter(|_| rng.below(3) > 0).collect();
                append_tokens(&mut kept, 0, &draft);
                kept.keep(0, from, &accepted).unwrap();
                append_tokens(&mut fresh, 0, &picked(&draft, &accepted));
                // Both decide alike what to evict: by the length before the next append.
                if !accepted.is_empty() {
                    same_cache(&format!("{name}, last {last}, {} keys", kept.lens()[0]), &kept, &fresh);
                }
            }
        }
    }
}

/// One sequence of 601 keys; 256 to 511 were evicted; a row may see the last 16 and the first 4.
fn gappy() -> KvCache {
    let mut cache =
        KvCache::sliding(1, KvShape { kv_heads: 1, head_dim: 8, value_dim: 8 }, NonZeroUsize::new(16).unwrap(), 4)
            .unwrap();
    for n in [600, 1] {
        let tokens = new_tokens(&cache, n, &mut Rng::new(n as u64));
        append_tokens(&mut cache, 0, &tokens);
    }
    cache
}

#[test]
fn what_cannot_be_kept_is_refused() {
    #[track_caller]
    fn says(words: &str, cache: &KvCache, from: usize, accepted: &[usize]) {
        let mut changed = cache.clone();
        assert_eq!(changed.keep(0, from, accepted).unwrap_err().to_string(), words);
        same_cache(words, &changed, cache);
    }
    let mut cache = KvCache::new(1, KvShape { kv_heads: 1, head_dim: 8, value_dim: 8 }).unwrap();
    let tokens = new_tokens(&cache, 20, &mut Rng::new(1));
    append_tokens(&mut cache, 0, &tokens);
    says("from: 21, but sequence 0 has 20 keys", &cache, 21, &[]);
    says(
        "accepted: length is 3, but must be at most 2, the tokens that the sequence has behind `from`",
        &cache,
        18,
        &[0, 1, 2],
    );
    says(
        "accepted: length is 1, but must be at most 0, the tokens that the sequence has behind `from`",
        &cache,
        20,
        &[0],
    );
    says(
        "accepted: entry 1 is 10, but must be at most 9, the last token of the sequence, counted from `from`",
        &cache,
        10,
        &[0, 10],
    );
    says("accepted: entry 2 is 3, but must be at least 4, one more than the entry before it", &cache, 10, &[0, 3, 3]);
    says("accepted: entry 1 is 0, but must be at least 6, one more than the entry before it", &cache, 10, &[5, 0]);
    let huge = format!(
        "accepted: entry 0 is {}, but must be at most 9, the last token of the sequence, counted from `from`",
        usize::MAX
    );
    says(&huge, &cache, 10, &[usize::MAX]);
    assert!(cache.keep(1, 0, &[]).is_err());
    // Evicted: a token to be moved, a place to move to, a key that the next row would see.
    let cache = gappy();
    says(
        "accepted: entry 0 is 111, but must be at least 312, the first token that is not evicted, counted from `from`",
        &cache,
        200,
        &[111, 400],
    );
    let place = "from: 250, but must be at least 512 for sequence 0: the sliding cache has evicted keys from places that \
                 accepted keys would move to";
    says(place, &cache, 250, &(300..320).collect::<Vec<_>>());
    says(&super::too_short(514, 527), &cache, 512, &[3, 8]);
    says(&super::too_short(300, 527), &cache, 300, &[]);
}

/// What a sliding cache still has may move, to behind the gap or to before it.
#[test]
fn what_was_not_evicted_moves() {
    let mut cache = gappy();
    cache.keep(0, 520, &(10..30).collect::<Vec<_>>()).unwrap();
    assert_eq!((cache.lens(), cache.evicted(0)), (&[540][..], Ok(256..512)));
    let mut cache = gappy();
    cache.keep(0, 200, &[3, 320, 400]).unwrap();
    assert_eq!((cache.lens(), cache.evicted(0)), (&[203][..], Ok(0..0)));
    let mut expected =
        KvCache::sliding(1, KvShape { kv_heads: 1, head_dim: 8, value_dim: 8 }, NonZeroUsize::new(16).unwrap(), 4)
            .unwrap();
    let tokens = [600, 1].map(|n| new_tokens(&expected, n, &mut Rng::new(n as u64)));
    let rows: Vec<usize> = (0..200).chain([203, 520]).collect();
    append_tokens(&mut expected, 0, &picked(&tokens[0], &rows));
    append_tokens(&mut expected, 0, &tokens[1]);
    same_cache("moved over the gap", &cache, &expected);
}
