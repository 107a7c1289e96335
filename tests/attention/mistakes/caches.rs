//! 42–53: caches that do not fit a call, and changes that do not fit a cache. 63: a file that is none.

use super::{Mistake, More, call, floats, mistake, numbers, outcome};
use core::num::NonZeroUsize;
use sdpa::{Alignment, Attention, Dtype, Error, Inputs, KeyScales, KvCache, KvShape, View, Window};

/// Two sequences of 5 and 3 keys of 6 and values of 7, two heads.
fn cache() -> KvCache {
    let mut cache = KvCache::new(2, KvShape { kv_heads: 2, head_dim: 6, value_dim: 7 }).unwrap();
    cache.append(floats([2, 2, 3, 6]), floats([2, 2, 3, 7])).unwrap();
    cache.append_to(0, floats([1, 2, 2, 6]), floats([1, 2, 2, 7])).unwrap();
    cache
}

/// One sequence of 1000 keys; the last 100 and the first 4 may be seen.
fn sliding() -> KvCache {
    let mut cache =
        KvCache::sliding(1, KvShape { kv_heads: 1, head_dim: 2, value_dim: 2 }, NonZeroUsize::new(100).unwrap(), 4)
            .unwrap();
    (0..10).for_each(|_| cache.append(floats([1, 1, 100, 2]), floats([1, 1, 100, 2])).unwrap());
    cache
}

/// Outcome of a change, checked to have changed nothing if it was refused.
fn change<T>(mut cache: KvCache, change: impl FnOnce(&mut KvCache) -> Result<T, Error>) -> String {
    let before = (cache.lens().to_vec(), cache.bytes());
    let result = change(&mut cache);
    assert!(result.is_ok() || before == (cache.lens().to_vec(), cache.bytes()), "a refused change changed the cache");
    outcome(result)
}

pub(super) fn mistakes() -> Vec<Mistake> {
    let cached = cache();
    let over = |q: [usize; 4]| {
        let [b, h, l, _] = q;
        call(Attention::new(), Inputs::cached(floats(q), &cached), [b, h, l, 7], &[])
    };
    vec![
        mistake(42, "cache of another head_dim", over([2, 4, 1, 5]), "cache: head_dim is 6, but q has 5"),
        mistake(
            43,
            "cache with other kv_heads, called",
            over([2, 3, 1, 6]),
            "q: 3 heads are no multiple of the 2 heads of cache",
        ),
        mistake(
            43,
            "cache with other kv_heads, appended to",
            change(cache(), |cache| cache.append(floats([2, 4, 3, 6]), floats([2, 4, 3, 7]))),
            "k: heads is 4, but the cache has 2",
        ),
        mistake(
            44,
            "queries for more sequences than the cache has",
            over([3, 4, 1, 6]),
            "cache: number of sequences is 2, but q (batch) has 3",
        ),
    ]
    .into_iter()
    .chain(changes())
    .chain(evicted())
    .collect()
}

/// 34, 35 and 45–48: changes.
fn changes() -> Vec<Mistake> {
    let (k, v) = (floats([1, 2, 3, 6]), floats([1, 2, 3, 7]));
    vec![
        mistake(
            45,
            "append to a sequence that is not there",
            change(cache(), |cache| cache.append_to(2, k, v)),
            "sequence: there is no sequence 2, the cache has 2",
        ),
        mistake(
            34,
            "append_ragged with lengths",
            change(cache(), |cache| cache.append_ragged(&[0, 1], &[2, 1], k, v)),
            "ends: entry 0 is 2, but must be exactly 0, where cumulative lengths begin",
        ),
        mistake(
            35,
            "append_ragged that ends early",
            change(cache(), |cache| cache.append_ragged(&[0, 1], &[0, 1, 2], k, v)),
            "ends: entry 2 is 2, but must be exactly 3, the number of rows",
        ),
        mistake(
            46,
            "append k of 3 tokens, v of 2",
            change(cache(), |cache| cache.append_to(1, k, floats([1, 2, 2, 7]))),
            "v: rows is 2, but k has 3",
        ),
        mistake(
            47,
            "truncate beyond the length",
            change(cache(), |cache| cache.truncate(0, 6)),
            "length: 6, but sequence 0 has 5 keys",
        ),
        mistake(
            47,
            "keep more than there are",
            change(cache(), |cache| cache.keep(1, 9, &[])),
            "from: 9, but sequence 1 has 3 keys",
        ),
        mistake(
            47,
            "keep more drafts than there are",
            change(cache(), |cache| cache.keep(1, 3, &[0])),
            "accepted: length is 1, but must be at most 0, the tokens that the sequence has behind `from`",
        ),
        mistake(
            47,
            "keep a draft twice",
            change(cache(), |cache| cache.keep(0, 3, &[1, 1])),
            "accepted: entry 1 is 1, but must be at least 2, one more than the entry before it",
        ),
        mistake(
            42,
            "a latent cache of longer values",
            outcome(KvCache::new(2, KvShape { kv_heads: 2, head_dim: 6, value_dim: 7 }).unwrap().latent()),
            "latent: value_dim is 7, but must be at most 6, the head_dim of keys: values are their first columns",
        ),
        mistake(
            48,
            "truncate into what slid away",
            change(sliding(), |cache| cache.truncate(0, 300)),
            "length: 300, but must be at least 867 for sequence 0: the sliding cache has evicted keys that its next row would \
             see (KvCache::rollback_room keeps more)",
        ),
    ]
}

/// 49 and 50: rows that would see keys which a sliding cache has let go.
fn evicted() -> Vec<Mistake> {
    let cache = sliding();
    let attend = |attention: Attention, more: &[(More, [usize; 4])]| {
        let attention = attention.align(Alignment::BottomRight);
        call(attention, Inputs::cached(floats([1, 1, 1, 2]), &cache), [1, 1, 1, 2], more)
    };
    let window = |n| Attention::new().window(Window::last_tokens(NonZeroUsize::new(n).unwrap()).keep_first(4));
    let keep_first = |n| Window::last_tokens(NonZeroUsize::MIN).keep_first(n);
    assert_eq!(attend(window(100), &[]), super::ACCEPTED);
    let wide = "the sliding cache has evicted keys before 768: the call has no window, or one that reaches further back \
                than the cache keeps";
    let all = |output| format!("{output}: needs a cache that keeps all keys");
    vec![
        mistake(
            49,
            "window wider than a sliding cache's",
            attend(window(500), &[]),
            "window: shows the last 500 keys, but the sliding cache was made to keep the last 100",
        ),
        mistake(
            49,
            "more first keys than a sliding cache's",
            attend(Attention::new().window(keep_first(300)), &[]),
            "window: shows the first 300 keys, but the sliding cache was made to keep the first 4",
        ),
        mistake(
            50,
            "attention over all keys of a sliding cache",
            attend(Attention::new(), &[]),
            format!("cache: row 0 of sequence 0 sees key 256, but {wide}"),
        ),
        mistake(
            50,
            "weights of all keys of a sliding cache",
            attend(window(100), &[(More::Weights, [1, 1, 1, 1000])]),
            all("weights"),
        ),
        mistake(
            50,
            "key weight sums of a sliding cache",
            attend(window(100), &[(More::Sums, [1, 1, 1000, 1])]),
            all("key weight sums"),
        ),
        mistake(
            50,
            "attention over all keys of the second sequence",
            second_of_two(),
            format!("cache: row 0 of sequence 1 sees key 0, but {wide}"),
        ),
    ]
}

/// Outcome of a call over the second sequence of a sliding cache alone, the first of the call.
fn second_of_two() -> String {
    let mut cache =
        KvCache::sliding(2, KvShape { kv_heads: 1, head_dim: 2, value_dim: 2 }, NonZeroUsize::new(100).unwrap(), 0)
            .unwrap();
    (0..10).for_each(|_| cache.append_to(1, floats([1, 1, 100, 2]), floats([1, 1, 100, 2])).unwrap());
    let inputs = Inputs::cached(floats([1, 1, 1, 2]), &cache).sequences(&[1]);
    call(Attention::new(), inputs, [1, 1, 1, 2], &[])
}

/// 51–53: elements that a cache has no place for, and scales of another length.
pub(super) fn elements() -> Vec<Mistake> {
    let new = || KvCache::new(1, KvShape { kv_heads: 2, head_dim: 4, value_dim: 4 }).unwrap();
    let append = |cache: KvCache, bad: f32| {
        let mut rows = numbers(24);
        rows[2 * 4 + 1] = bad;
        let (good, bad) = (floats([1, 2, 3, 4]), View::bhld(&rows, [1, 2, 3, 4]).unwrap());
        [change(cache.clone(), |cache| cache.append(bad, good)), change(cache, |cache| cache.append(good, bad))]
    };
    let [nan_k, nan_v] = append(new().int8(KeyScales::PerToken).unwrap(), f32::NAN);
    let [large_k, large_v] = append(new().dtype(Dtype::F16).unwrap(), 70000.0);
    let half = "an element of row 2 is 70000, but must be below 65520 in size, as f16 is";
    vec![
        mistake(
            51,
            "int8 with NaN in k",
            nan_k,
            "k: an element of row 2 is NaN, but must be finite where elements are int8",
        ),
        mistake(
            51,
            "int8 with NaN in v",
            nan_v,
            "v: an element of row 2 is NaN, but must be finite where elements are int8",
        ),
        mistake(52, "f16 with 70000 in k", large_k, format!("k: {half}")),
        mistake(52, "f16 with 70000 in v", large_v, format!("v: {half}")),
        mistake(
            53,
            "int8 scales of another length",
            outcome(new().int8(KeyScales::PerChannel(vec![0.1; 4]))),
            "key scales: length is 4, but the cache (kv_heads × head_dim) has 8",
        ),
    ]
}

/// 63: a file of a cache that does not end where its header says.
pub(super) fn cut_off() -> Vec<Mistake> {
    let mut cache = KvCache::new(1, KvShape { kv_heads: 1, head_dim: 4, value_dim: 4 }).unwrap();
    cache.append(floats([1, 1, 3, 4]), floats([1, 1, 3, 4])).unwrap();
    let cache = cache.export().unwrap();
    vec![mistake(
        63,
        "a file of a cache cut off",
        outcome(KvCache::import(&cache[..cache.len() - 1])),
        format!("import: the file has {} bytes, but its header speaks of {}", cache.len() - 1, cache.len()),
    )]
}
