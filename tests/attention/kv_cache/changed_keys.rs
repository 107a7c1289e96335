//! Keys changed where they are stored: the cache is then what appending the changed keys gives.

use crate::kv_support::{append_tokens, exact_and_others, new_tokens, same_cache};
use crate::support::{Rng, Tensor, execs, fewer};
use sdpa::{Alignment, Attention, Dtype, Error, Inputs, KeyScales, KvCache, KvShape, Outputs, View, ViewMut, Window};
use std::num::NonZeroUsize;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};

const SHAPE: KvShape = KvShape { kv_heads: 2, head_dim: 40, value_dim: 24 };

/// Changes a key by its position and head: a rotation of half its elements, and a little more.
fn change(position: usize, head: usize, key: &mut [f32]) {
    let half = key.len() / 2;
    for d in 0..half {
        let (sin, cos) = (0.1 * (position + d) as f32 + head as f32).sin_cos();
        (key[d], key[d + half]) = (cos * key[d] - sin * key[d + half], sin * key[d] + cos * key[d + half]);
    }
}

/// Stored key of a head, widened.
fn stored(cache: &KvCache, [sequence, head, token]: [usize; 3]) -> Option<Vec<f32>> {
    let none = View::<f32>::bhld(&[], [cache.sequences(), 0, 0, 1]).unwrap();
    let all = Inputs::cached(none, cache).key_values().unwrap();
    (0..cache.shape().head_dim).map(|d| all.key([sequence, head, token, d])).collect()
}

/// Tokens with some keys that `change` makes of those that the cache stores.
fn changed(cache: &KvCache, [k, v]: &[Tensor; 2], keys: Range<usize>) -> [Tensor; 2] {
    let mut k = k.clone();
    for (head, token) in (0..SHAPE.kv_heads).flat_map(|head| keys.clone().map(move |token| (head, token))) {
        let mut key = stored(cache, [0, head, token]).expect("it is held");
        change(token, head, &mut key);
        let at = (head * k.shape[2] + token) * SHAPE.head_dim;
        k.data[at..at + SHAPE.head_dim].copy_from_slice(&key);
    }
    let v = if cache.is_latent() { Tensor::from_fn(v.shape, |at| k.get(at)) } else { v.clone() };
    [k, v]
}

fn append(cache: &mut KvCache, tokens: &[Tensor; 2]) {
    let [k, v] = tokens.each_ref().map(Tensor::view);
    match cache.is_latent() {
        true => cache.append_to(0, k, k.columns(0..SHAPE.value_dim).unwrap()).unwrap(),
        false => cache.append_to(0, k, v).unwrap(),
    }
}

/// Caches of every format, and latent ones of floats.
fn formats() -> Vec<(String, KvCache)> {
    let empty = KvCache::new(2, SHAPE).unwrap();
    let latent = exact_and_others(&empty).into_iter().take(3).map(|(name, cache)| (format!("latent {name}"), cache));
    let latent = latent.map(|(name, cache)| (name, cache.latent().unwrap()));
    exact_and_others(&empty).into_iter().map(|(name, cache)| (name.to_owned(), cache)).chain(latent).collect()
}

#[test]
fn changed_keys_are_those_that_were_appended_changed() {
    let mut rng = Rng::new(1);
    let ranges = [
        (1, 0..1),
        (15, 3..15),
        (16, 0..16),
        (17, 15..17),
        (40, 7..39),
        (40, 16..32),
        (40, 5..5),
        (70, 0..17),
        (255, 250..255),
        (257, 255..257),
        (300, 12..290),
        (600, 255..513),
        (600, 0..600),
    ];
    for (len, keys) in ranges.into_iter().take(fewer(13) as usize) {
        for (name, empty) in formats() {
            let what = format!("{name}, keys {keys:?} of {len}");
            let mut tokens = new_tokens(&empty, len, &mut rng);
            if empty.is_latent() {
                tokens[1] = Tensor::from_fn(tokens[1].shape, |at| tokens[0].get(at));
            }
            let mut cache = empty.clone();
            append(&mut cache, &tokens);
            cache.fork(0, 1).unwrap();
            let before = cache.clone();
            let mut expected = empty;
            append(&mut expected, &changed(&cache, &tokens, keys.clone()));
            let mut seen = Vec::new();
            let called = cache.change_keys(0, keys.clone(), |position, head, key| {
                seen.push((position, head));
                change(position, head, key);
            });
            called.unwrap_or_else(|e| panic!("{what}: {e}"));
            seen.sort_unstable();
            let all: Vec<_> = keys.clone().flat_map(|at| (0..SHAPE.kv_heads).map(move |head| (at, head))).collect();
            assert_eq!(seen, all, "{what}");
            // The fork keeps its keys, and so does a copy of the cache.
            let mut fork = expected.clone();
            append_all(&mut fork, &tokens);
            same_cache(&what, &cache, &fork);
            let mut copy = before.clone();
            copy.fork(1, 0).unwrap();
            same_cache(&what, &before, &copy);
            goes_on(&what, [cache, fork], &mut rng);
        }
    }
}

/// Appends tokens to sequence 1.
fn append_all(cache: &mut KvCache, tokens: &[Tensor; 2]) {
    let [k, v] = tokens.each_ref().map(Tensor::view);
    let v = if cache.is_latent() { k.columns(0..SHAPE.value_dim).unwrap() } else { v };
    cache.append_to(1, k, v).unwrap();
}

/// Both give the same when more tokens are appended, on every instruction set.
fn goes_on(what: &str, mut caches: [KvCache; 2], rng: &mut Rng) {
    let (tokens, q) = (new_tokens(&caches[0], 3, rng), Tensor::normal([2, 4, 3, SHAPE.head_dim], rng));
    caches.iter_mut().for_each(|cache| append(cache, &tokens));
    for (isa, exec) in execs() {
        let [got, expected] = caches.each_ref().map(|cache| {
            let mut out = vec![f32::NAN; 2 * 4 * 3 * SHAPE.value_dim];
            let outputs = Outputs::new(ViewMut::bhld(&mut out, [2, 4, 3, SHAPE.value_dim]).unwrap());
            let attention = Attention::new().causal().align(Alignment::BottomRight);
            attention.problem(Inputs::cached(q.view(), cache), outputs).unwrap().run_once(exec);
            out.into_iter().map(f32::to_bits).collect::<Vec<_>>()
        });
        assert!(got == expected, "{what}, {isa}");
    }
}

/// A context is shifted: some tokens go, those behind move up and are rotated to their new positions.
#[test]
fn a_shifted_context_is_the_shorter_text() {
    let (mut rng, dim) = (Rng::new(2), 16);
    let shape = KvShape { kv_heads: 1, head_dim: dim, value_dim: 8 };
    let rotate = |key: &mut [f32], by: f64| {
        for d in 0..dim / 2 {
            let (sin, cos) = (by * 1e4f64.powf(-2.0 * d as f64 / dim as f64)).sin_cos();
            let [a, b] = [key[d], key[d + dim / 2]].map(f64::from);
            (key[d], key[d + dim / 2]) = ((cos * a - sin * b) as f32, (sin * a + cos * b) as f32);
        }
    };
    let (plain, v) = (Tensor::normal([1, 1, 600, dim], &mut rng), Tensor::normal([1, 1, 600, 8], &mut rng));
    let kept: Vec<usize> = (0..4).chain(300..600).collect();
    // Tokens by their numbers in the text, each rotated to its place among these.
    let rotated = |tokens: &[usize]| {
        let mut k = Tensor::from_fn([1, 1, tokens.len(), dim], |[b, h, j, d]| plain.get([b, h, tokens[j], d]));
        k.data.chunks_exact_mut(dim).enumerate().for_each(|(at, key)| rotate(key, at as f64));
        [k, Tensor::from_fn([1, 1, tokens.len(), 8], |[b, h, j, d]| v.get([b, h, tokens[j], d]))]
    };
    let new = || KvCache::new(1, shape).unwrap();
    let (mut cache, mut expected) = (new(), new());
    append_tokens(&mut cache, 0, &rotated(&(0..600).collect::<Vec<_>>()));
    append_tokens(&mut expected, 0, &rotated(&kept));
    cache.keep(0, 4, &(296..596).collect::<Vec<_>>()).unwrap();
    cache.change_keys(0, 4..304, |_, _, key| rotate(key, -296.0)).unwrap();
    for token in 0..304 {
        let [got, expected] = [&cache, &expected].map(|cache| stored(cache, [0, 0, token]).unwrap());
        let off = got.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(off < 1e-5, "token {token}: {off}");
    }
}

#[test]
fn evicted_keys_are_passed_over() {
    let mut rng = Rng::new(3);
    let window = NonZeroUsize::new(100).unwrap();
    let mut cache = KvCache::sliding(1, SHAPE, window, 3).unwrap();
    for n in [900, 1] {
        let tokens = new_tokens(&cache, n, &mut rng);
        append(&mut cache, &tokens);
    }
    let evicted = cache.evicted(0).unwrap();
    assert_eq!(evicted, 256..768);
    let before = cache.clone();
    let mut seen = Vec::new();
    cache
        .change_keys(0, 200..850, |position, head, key| {
            seen.extend((head == 1).then_some(position));
            change(position, head, key);
        })
        .unwrap();
    assert_eq!(seen, (200..256).chain(768..850).collect::<Vec<_>>());
    for token in 0..901 {
        let mut was = stored(&before, [0, 1, token]);
        assert_eq!(was.is_none(), evicted.contains(&token));
        if (200..850).contains(&token) {
            was.iter_mut().for_each(|key| change(token, 1, key));
        }
        assert_eq!(stored(&cache, [0, 1, token]), was, "token {token}");
    }
    let attention = Attention::new().window(Window::last_tokens(window).keep_first(3)).align(Alignment::BottomRight);
    let (q, mut out) = (Tensor::normal([1, 2, 1, SHAPE.head_dim], &mut rng), vec![0.0; 2 * SHAPE.value_dim]);
    let outputs = Outputs::new(ViewMut::bhld(&mut out, [1, 2, 1, SHAPE.value_dim]).unwrap());
    sdpa::attention(&attention, Inputs::cached(q.view(), &cache), outputs).unwrap();
}

#[test]
fn what_cannot_be_changed_is_refused_and_nothing_is() {
    let mut rng = Rng::new(4);
    let empty = KvCache::new(2, SHAPE).unwrap();
    let refused = |cache: &mut KvCache, sequence: usize, keys: Range<usize>, to: f32| {
        let before = cache.clone();
        let done = cache.change_keys(sequence, keys, |position, head, key| {
            change(position, head, key);
            if (position, head) == (290, 1) {
                key[7] = to;
            }
        });
        same_cache("a refused change", cache, &before);
        done.expect_err("a mistake").to_string()
    };
    for (name, empty) in exact_and_others(&empty) {
        let mut cache = empty;
        let tokens = new_tokens(&cache, 300, &mut rng);
        append(&mut cache, &tokens);
        let cache = &mut cache;
        assert_eq!(refused(cache, 2, 0..1, 0.0), "sequence: there is no sequence 2, the cache has 2");
        let beyond = "keys: end is 301, but must be at most 300, the keys of that sequence";
        assert_eq!(refused(cache, 0, 299..301, 0.0), beyond);
        assert_eq!(refused(cache, 1, 0..1, 0.0), beyond.replace("301", "1").replace("300", "0"));
        let falling = "keys: first key is 9, but must be at most 8, the end of the keys";
        #[allow(clippy::reversed_empty_ranges, reason = "what is refused")]
        let range = 9..8;
        assert_eq!(refused(cache, 0, range, 0.0), falling);
        let unfit = [("f16", 65520.0), ("int8 per token", f32::NAN), ("int8 per channel", f32::INFINITY)];
        let unfit = unfit.into_iter().chain([("int4", 1e5), ("int4 with centres", f32::NEG_INFINITY)]);
        if let Some((_, to)) = unfit.into_iter().find(|(format, _)| *format == name) {
            let words = refused(cache, 0, 2..300, to);
            assert!(words.starts_with("k: an element of row 290 is "), "{name}: {words}");
        }
        // A panic leaves the cache as it was, too.
        let before = cache.clone();
        let change = |position, _: usize, key: &mut [f32]| {
            key.fill(1.0);
            assert!(position < 290, "a panic");
        };
        assert!(catch_unwind(AssertUnwindSafe(|| cache.change_keys(0, 0..300, change))).is_err());
        same_cache(name, cache, &before);
        cache.remove_sequence(0).unwrap();
        let gone = cache.change_keys(0, 0..0, |_, _, _| ());
        assert_eq!(gone, Err(Error::Removed { argument: "sequence", sequence: 0 }));
    }
    let mut latent = KvCache::new(2, SHAPE).unwrap().int8(KeyScales::PerToken).and_then(KvCache::latent).unwrap();
    let tokens = new_tokens(&latent, 300, &mut rng);
    append(&mut latent, &tokens);
    let words = refused(&mut latent, 0, 0..1, 0.0);
    assert!(words.starts_with("changed keys: needs a latent cache of floats"), "{words}");
    let none = KvCache::new(1, KvShape { kv_heads: 0, ..SHAPE }).unwrap().dtype(Dtype::F16);
    let mut none = none.unwrap();
    none.append(View::<f32>::bhld(&[], [1, 0, 20, 40]).unwrap(), View::<f32>::bhld(&[], [1, 0, 20, 24]).unwrap())
        .unwrap();
    none.change_keys(0, 0..20, |_, _, _| panic!("there is no head")).unwrap();
}
