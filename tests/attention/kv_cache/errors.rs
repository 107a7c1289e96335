//! Every way to hold a cache wrong: the words, and the cache as it was.

use crate::kv_support::{append_part, empty_cache, every_format, same_full};
use crate::options::{Case, Full, Wanted};
use crate::support::{Rng, Tensor};
use core::num::NonZeroUsize;
use sdpa::{
    Attention, BlockTable, Dtype, Error, Exec, F16, Inputs, KeyScales, KvCache, KvShape, Outputs, PagePool, View,
    ViewMut,
};

static ZEROS: [f32; 4096] = [0.0; 4096];

fn zeros(shape: [usize; 4]) -> View<'static> {
    View::bhld(&ZEROS, shape).expect("small")
}

/// Three sequences of 5, 20 and 0 keys of 6 and values of 7, two heads; queries of four heads.
fn good() -> (Case, KvCache) {
    let mut case = Case::plain(&mut Rng::new(1), [3, 4, 2, 2, 20, 6, 7]);
    case.kv_lens = Some(vec![5, 20, 0]);
    let mut cache = empty_cache(&case);
    append_part(&mut cache, &case, 0, 0..5);
    append_part(&mut cache, &case, 1, 0..20);
    (case, cache)
}

fn attend(case: &Case, cache: &KvCache) -> Full {
    case.run_over(Inputs::cached(case.q.view(), cache), Exec::serial(), Wanted::ALL)
}

/// Keys and values of these shapes but for one size of one of them.
fn with_size([mut k, mut v]: [[usize; 4]; 2], argument: &str, at: usize, size: usize) -> [View<'static>; 2] {
    if argument == "k" {
        k[at] = size
    } else {
        v[at] = size
    }
    [k, v].map(zeros)
}

/// A change that is refused with these words, and leaves the cache as it was.
#[track_caller]
fn refused<T: core::fmt::Debug>(words: &str, change: impl FnOnce(&mut KvCache) -> Result<T, Error>) {
    let (case, mut cache) = good();
    let (before, bytes) = (attend(&case, &cache), cache.bytes());
    let error = change(&mut cache).expect_err("nothing wrong was found");
    assert_eq!(error.to_string(), words);
    assert_eq!((cache.lens(), cache.bytes()), (&[5, 20, 0][..], bytes), "{words}");
    same_full(words, &attend(&case, &cache), &before);
    same_full(words, &before, &case.run(Exec::serial(), Wanted::ALL));
}

#[test]
fn a_cache_of_impossible_sizes() {
    let says = |dims: [usize; 2], words: &str| {
        assert_eq!(
            KvCache::new(1, KvShape { kv_heads: 1, head_dim: dims[0], value_dim: dims[1] }).unwrap_err().to_string(),
            words
        );
        let last = NonZeroUsize::MIN;
        assert_eq!(
            KvCache::sliding(1, KvShape { kv_heads: 1, head_dim: dims[0], value_dim: dims[1] }, last, 0)
                .unwrap_err()
                .to_string(),
            words
        );
    };
    says([0, 4], "cache: head_dim is 0, but must be at least 1");
    says([4, 0], "cache: value_dim is 0, but must be at least 1");
    let most = 1 << 24;
    says([most + 1, 4], "cache: head_dim is 16777217, but must be at most 16777216, the largest possible");
    says([4, most + 1], "cache: value_dim is 16777217, but must be at most 16777216, the largest possible");
    assert!(KvCache::new(0, KvShape { kv_heads: 0, head_dim: most, value_dim: most }).is_ok());
}

#[test]
fn shapes_that_do_not_fit_when_appended_to_all() {
    let (k, v) = ([3, 2, 4, 6], [3, 2, 4, 7]);
    for (argument, at, size, words) in [
        ("k", 0, 2, "k: batch is 2, but the cache has 3"),
        ("k", 0, 0, "k: batch is 0, but the cache has 3"),
        ("k", 1, 4, "k: heads is 4, but the cache has 2"),
        ("k", 1, 0, "k: heads is 0, but the cache has 2"),
        ("k", 3, 7, "k: head_dim is 7, but the cache has 6"),
        ("k", 3, 0, "k: head_dim is 0, but the cache has 6"),
        ("v", 0, 1, "v: batch is 1, but k has 3"),
        ("v", 1, 1, "v: heads is 1, but the cache has 2"),
        ("v", 2, 5, "v: rows is 5, but k has 4"),
        ("v", 2, 0, "v: rows is 0, but k has 4"),
        ("v", 3, 6, "v: value_dim is 6, but the cache has 7"),
    ] {
        let [k, v] = with_size([k, v], argument, at, size);
        refused(words, |cache| cache.append(k, v));
    }
}

#[test]
fn shapes_that_do_not_fit_when_appended_to_one() {
    let (k, v) = ([1, 2, 4, 6], [1, 2, 4, 7]);
    for (argument, at, size, words) in [
        ("k", 0, 3, "k: batch is 3, but must be exactly 1, as tokens of one sequence are appended"),
        ("k", 1, 1, "k: heads is 1, but the cache has 2"),
        ("k", 3, 5, "k: head_dim is 5, but the cache has 6"),
        ("v", 0, 2, "v: batch is 2, but k has 1"),
        ("v", 1, 3, "v: heads is 3, but the cache has 2"),
        ("v", 2, 3, "v: rows is 3, but k has 4"),
        ("v", 3, 8, "v: value_dim is 8, but the cache has 7"),
    ] {
        let [k, v] = with_size([k, v], argument, at, size);
        refused(words, |cache| cache.append_to(1, k, v));
    }
}

#[test]
fn sequences_that_are_not_there() {
    let (k, v) = (zeros([1, 2, 4, 6]), zeros([1, 2, 4, 7]));
    refused("sequence: there is no sequence 3, the cache has 3", |cache| cache.append_to(3, k, v));
    refused("sequence: there is no sequence 3, the cache has 3", |cache| cache.truncate(3, 0));
    refused("sequence: there is no sequence 9, the cache has 3", |cache| cache.clear(9));
    refused("from: there is no sequence 3, the cache has 3", |cache| cache.fork(3, 0));
    refused("to: there is no sequence 4, the cache has 3", |cache| cache.fork(0, 4));
    let huge = format!("sequence: there is no sequence {}, the cache has 3", usize::MAX);
    refused(&huge, |cache| cache.clear(usize::MAX));
}

#[test]
fn rollbacks_beyond_the_length() {
    refused("length: 6, but sequence 0 has 5 keys", |cache| cache.truncate(0, 6));
    refused("length: 256, but sequence 1 has 20 keys", |cache| cache.truncate(1, 256));
    refused("length: 1, but sequence 2 has 0 keys", |cache| cache.truncate(2, 1));
    let huge = format!("length: {}, but sequence 2 has 0 keys", usize::MAX);
    refused(&huge, |cache| cache.truncate(2, usize::MAX));
}

#[test]
fn changes_that_change_nothing() {
    let (case, mut cache) = good();
    let before = attend(&case, &cache);
    cache.append(zeros([3, 2, 0, 6]), zeros([3, 2, 0, 7])).unwrap();
    cache.append_to(0, zeros([1, 2, 0, 6]), zeros([1, 2, 0, 7])).unwrap();
    cache.truncate(1, 20).unwrap();
    cache.clear(2).unwrap();
    cache.fork(1, 1).unwrap();
    assert_eq!(cache.lens(), [5, 20, 0]);
    same_full("nothing changed", &attend(&case, &cache), &before);
}

/// Calls over a cache that does not fit them.
#[test]
fn calls_that_do_not_fit_the_cache() {
    let (_, cache) = good();
    #[track_caller]
    fn says(words: &str, inputs: Inputs<'_>, [b, h, l, _]: [usize; 4]) {
        let mut out = vec![42.0; b * h * l * 7];
        let outputs = Outputs::new(ViewMut::bhld(&mut out, [b, h, l, 7]).unwrap());
        let error = sdpa::attention(&Attention::new(), inputs, outputs).unwrap_err();
        assert_eq!(error.to_string(), words);
        assert!(out.iter().all(|&x| x == 42.0), "a refused call wrote: {words}");
    }
    let over = |shape| Inputs::cached(zeros(shape), &cache);
    let q = [3, 4, 2, 6];
    says("cache: number of sequences is 3, but q (batch) has 2", over([2, 4, 2, 6]), q);
    says("cache: head_dim is 6, but q has 5", over([3, 4, 2, 5]), q);
    says("q: 3 heads are no multiple of the 2 heads of cache", over([3, 3, 2, 6]), q);
    says("bias: columns is 21, but cache (keys of the longest sequence) has 20", over(q).bias(zeros([1, 1, 1, 21])), q);
    let own = "needs tensors; caches and pages have their own lengths";
    says(&format!("kv_lens: {own}"), over(q).kv_lens(&[5, 20, 0]), q);
    // Ragged calls are batch 1, so there is a cache of one sequence for them.
    let mut one = KvCache::new(1, KvShape { kv_heads: 2, head_dim: 6, value_dim: 7 }).unwrap();
    one.append(zeros([1, 2, 4, 6]), zeros([1, 2, 4, 7])).unwrap();
    let q = [1, 4, 2, 6];
    says(&format!("ragged: {own}"), Inputs::cached(zeros(q), &one).ragged(&[0, 2], &[0, 4]), q);
    let (rule, rows) = ("causal: sequence 0 has 2 rows and 4 keys, and no alignment", [1, 4, 2, 7]);
    let mut out = Tensor::filled(rows, 42.0);
    let outputs = Outputs::new(ViewMut::bhld(&mut out.data, rows).unwrap());
    let error = Attention::new().causal().problem(Inputs::cached(zeros(q), &one), outputs).unwrap_err();
    assert!(error.to_string().starts_with(rule), "{error}");
    let outputs = Outputs::new(ViewMut::bhld(&mut out.data, rows).unwrap());
    let error = sdpa_unfused::attention(&Attention::new(), Inputs::cached(zeros(q), &one), outputs, Exec::serial());
    println!("{}", error.as_ref().unwrap_err());
    assert!(matches!(error, Err(Error::Needs { .. })));
    assert!(out.data.iter().all(|&x| x == 42.0));
}

#[test]
fn a_cache_whose_blocks_have_no_address_is_refused() {
    let error = KvCache::new(1, KvShape { kv_heads: usize::MAX / 4096, head_dim: 64, value_dim: 64 }).unwrap_err();
    assert!(matches!(error, Error::TooLarge { what: "cache", sizes: [1, _, 64, 64] }), "{error}");
}

#[test]
fn more_sequences_than_memory_are_refused() {
    let error = KvCache::new(1 << 56, KvShape { kv_heads: 1, head_dim: 64, value_dim: 64 }).unwrap_err();
    assert!(matches!(error, Error::Memory { what: "cache", .. }), "{error}");
    for sequences in [usize::MAX, isize::MAX as usize] {
        let error = KvCache::new(sequences, KvShape { kv_heads: 1, head_dim: 64, value_dim: 64 }).unwrap_err();
        assert_eq!(error, Error::TooLarge { what: "cache", sizes: [sequences, 1, 64, 64] });
    }
}

/// Int8 and another type at once: whichever is set last, the other would be dropped in silence.
#[test]
fn contradictory_builders_are_refused() {
    let new = || KvCache::new(1, KvShape { kv_heads: 1, head_dim: 4, value_dim: 4 }).unwrap();
    let int8 = |cache: KvCache| cache.int8(KeyScales::PerToken);
    for dtype in [Dtype::Bf16, Dtype::F16] {
        let error = int8(new()).unwrap().dtype(dtype).unwrap_err().to_string();
        assert_eq!(error, "dtype: needs a cache without int8, which is set");
        let error = int8(new().dtype(dtype).unwrap()).unwrap_err().to_string();
        assert_eq!(error, "int8: needs a cache without dtype, which is set");
        assert!(new().dtype(Dtype::F16).unwrap().dtype(dtype).is_ok());
    }
    assert!(int8(new().dtype(Dtype::F32).unwrap()).is_ok());
}

/// A finite number that f16 has no place for is refused; ∞ and NaN are kept, and so is the largest that rounds down.
#[test]
fn an_f16_cache_refuses_what_would_become_infinite() {
    let mut cache =
        KvCache::new(1, KvShape { kv_heads: 1, head_dim: 3, value_dim: 3 }).unwrap().dtype(Dtype::F16).unwrap();
    let rows = |x: f32| [1.0, 2.0, 3.0, -1.0, x, 0.0];
    for (x, fits) in [(70000.0, false), (-65520.0, false), (65519.996, true), (-65504.0, true), (f32::INFINITY, true)] {
        let data = rows(x);
        let dense = View::bhld(&data, [1, 1, 2, 3]).unwrap();
        let backwards = View::from_strides(&data, 5, [1, 1, 2, 3], [0, 0, -3, -1]).unwrap();
        for (k, v, argument) in [(dense, zeros([1, 1, 2, 3]), "k"), (zeros([1, 1, 2, 3]), dense, "v")] {
            let done = cache.append(k, v).map_err(|e| e.to_string());
            let says = format!("{argument}: an element of row 1 is {x}, but must be below 65520 in size, as f16 is");
            assert_eq!(done, if fits { Ok(()) } else { Err(says) });
        }
        let done = cache.append(backwards, backwards).map_err(|e| e.to_string());
        assert_eq!(done.is_ok(), fits, "{x}: {done:?}");
        assert_eq!(cache.lens(), [if fits { 6 } else { 0 }]);
        cache.clear(0).unwrap();
    }
    // As they are: f16 tensors, and any number in the other types.
    let huge = [F16(0x7bff); 6];
    let view = View::bhld(&huge, [1, 1, 2, 3]).unwrap();
    cache.append(view, view).unwrap();
    let huge = [f32::MAX; 6];
    let view = View::bhld(&huge, [1, 1, 2, 3]).unwrap();
    for dtype in [Dtype::F32, Dtype::Bf16] {
        KvCache::new(1, KvShape { kv_heads: 1, head_dim: 3, value_dim: 3 })
            .unwrap()
            .dtype(dtype)
            .unwrap()
            .append(view, view)
            .unwrap();
    }
}

/// A view may stand for more numbers than there is memory for: that is found before they are looked at one by one.
#[test]
fn sizes_and_memory_are_checked_before_contents() {
    let huge = 1 << 44;
    for element in [0.25, f32::NAN] {
        let elements = [element; 8];
        let many = |batch| View::from_strides(&elements, 0, [batch, 1, huge, 8], [0, 0, 0, 1]).unwrap();
        for (name, mut cache) in
            every_format(&KvCache::new(2, KvShape { kv_heads: 1, head_dim: 8, value_dim: 8 }).unwrap())
        {
            for refused in [
                cache.append(many(2), many(2)),
                cache.append_to(1, many(1), many(1)),
                cache.append_ragged(&[1, 0], &[0, 1, huge], many(1), many(1)),
            ] {
                assert!(matches!(refused, Err(Error::Memory { what: "cache", .. })), "{name}: {refused:?}");
            }
            assert_eq!((cache.lens(), cache.bytes()), (&[0, 0][..], 0), "{name}");
            let mut pool =
                PagePool::new(4, 16, KvShape { kv_heads: 1, head_dim: 8, value_dim: 8 }, cache.format()).unwrap();
            for len in [1, 64, huge] {
                let table = BlockTable { entries: &[3, 1, 0, 2], lens: &[len] };
                let refused =
                    [pool.append(table, many(1), many(1)), pool.append_ragged(table, &[0, huge], many(1), many(1))];
                assert!(refused.iter().all(|refused| matches!(refused, Err(Error::Pages(_)))), "{name}: {refused:?}");
            }
        }
    }
}

/// What was allocated for tokens that the cache has no place for is given back.
#[test]
fn refused_contents_leave_no_memory_behind() {
    for (name, mut cache) in every_format(&KvCache::new(1, KvShape { kv_heads: 1, head_dim: 8, value_dim: 8 }).unwrap())
    {
        let unfit = View::from_strides(&[f32::MAX], 0, [1, 1, 600, 8], [0; 4]).unwrap();
        if name.starts_with("int4") || name == "f16" {
            assert!(matches!(cache.append(unfit, unfit), Err(Error::Row { .. })), "{name}");
            assert_eq!((cache.lens(), cache.bytes()), (&[0][..], 0), "{name}");
        }
    }
}

#[test]
fn tokens_beyond_memory_are_refused() {
    let mut wide = KvCache::new(1, KvShape { kv_heads: 1 << 40, head_dim: 8, value_dim: 8 }).unwrap();
    let one = |heads, n| View::from_strides(&ZEROS, 0, [1, heads, n, 8], [0, 0, 0, 1]).unwrap();
    let error = wide.append(one(1 << 40, 1), one(1 << 40, 1)).unwrap_err();
    assert!(matches!(error, Error::Memory { what: "cache", .. }), "{error}");
    let mut cache = KvCache::new(1, KvShape { kv_heads: 1, head_dim: 8, value_dim: 8 }).unwrap();
    let error = cache.append(one(1, 1 << 44), one(1, 1 << 44)).unwrap_err();
    assert!(matches!(error, Error::Memory { what: "cache", .. }), "{error}");
    assert_eq!((wide.lens(), cache.lens()), (&[0][..], &[0][..]));
}
