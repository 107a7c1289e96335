//! Refusals of caches of eight and four bits.

use super::{All, Kind, channels, empty, filled, kinds, scales};
use crate::support::{Tensor, Tensors, assert_same_bits, execs};
use sdpa::{Alignment, Attention, CacheFormat, Dtype, Error, Inputs, Int4, KeyScales, KvCache, KvShape, PagePool};

#[test]
fn scales_that_do_not_fit() {
    let says = |kind: KeyScales, words: &str| {
        let error =
            KvCache::new(1, KvShape { kv_heads: 2, head_dim: 3, value_dim: 4 }).unwrap().int8(kind).unwrap_err();
        assert_eq!(error.to_string(), words);
    };
    let words = "key scales: length is 5, but the cache (kv_heads × head_dim) has 6";
    says(KeyScales::PerChannel(vec![1.0; 5]), words);
    for bad in ["0", "-0", "-1", "inf", "NaN"] {
        let mut scales = vec![1.0; 6];
        scales[4] = bad.parse().unwrap();
        says(KeyScales::PerChannel(scales), &format!("key scales: {bad}, but must be positive and finite"));
    }
    let error = KvCache::new(1, KvShape { kv_heads: 1, head_dim: (1 << 17) + 1, value_dim: 4 })
        .unwrap()
        .int8(KeyScales::PerToken)
        .unwrap_err();
    let words = "int8: head_dim is 131073, but must be at most 131072, the largest possible of integers";
    assert_eq!(error.to_string(), words);
    assert!(
        KvCache::new(0, KvShape { kv_heads: 0, head_dim: 8, value_dim: 8 })
            .unwrap()
            .int8(KeyScales::PerChannel(Vec::new()))
            .is_ok()
    );
}

#[test]
fn a_cache_that_is_not_empty() {
    let t = Tensors::normal([1, 1, 1, 1, 3, 8, 8], 0);
    for kind in scales(1, 8).map(Kind::Int8) {
        let error = kind.of(filled(&t, &kind)).unwrap_err();
        assert_eq!(error.to_string(), "int8: needs an empty cache");
        assert!(filled(&t, &kind).dtype(Dtype::F32).is_err());
        // Nor one that was asked to keep bytes.
        let error = empty(&t, &kind).dtype(Dtype::F32).unwrap_err();
        assert_eq!(error.to_string(), "dtype: needs a cache without int8, which is set");
    }
}

/// Settings that four bits do not go with, and keys that are too long.
#[test]
fn four_bits_beside_other_settings() {
    let new = || KvCache::new(1, KvShape { kv_heads: 1, head_dim: 8, value_dim: 8 }).unwrap();
    let says = |cache: Result<KvCache, Error>, words: &str| assert_eq!(cache.unwrap_err().to_string(), words);
    for numbers in [Int4::Symmetric, Int4::Centred] {
        let int4 = |cache: KvCache| cache.int4(numbers);
        says(int4(new().dtype(Dtype::Bf16).unwrap()), "int4: needs a cache without dtype, which is set");
        says(int4(new().int8(KeyScales::PerToken).unwrap()), "int4: needs a cache without int8, which is set");
        says(int4(new()).unwrap().int8(KeyScales::PerToken), "int8: needs a cache without int4, which is set");
        says(int4(new()).unwrap().dtype(Dtype::F32), "dtype: needs a cache without int4, which is set");
        let t = Tensors::normal([1, 1, 1, 1, 3, 8, 8], 0);
        says(int4(filled(&t, &Kind::Int4(numbers))), "int4: needs an empty cache");
        let long = KvCache::new(1, KvShape { kv_heads: 1, head_dim: (1 << 17) + 1, value_dim: 4 }).unwrap();
        says(int4(long), "int4: head_dim is 131073, but must be at most 131072, the largest possible of integers");
        let pool = PagePool::new(
            1,
            16,
            KvShape { kv_heads: 1, head_dim: (1 << 17) + 1, value_dim: 4 },
            CacheFormat::Int4(numbers),
        )
        .unwrap_err();
        assert_eq!(
            pool.to_string(),
            "int4: head_dim is 131073, but must be at most 131072, the largest possible of integers"
        );
    }
}

/// Scales are `f16`, and so is what they have to reach.
#[test]
fn tokens_that_four_bits_do_not_reach() {
    let t = Tensors::normal([1, 1, 1, 1, 20, 40, 8], 1);
    for kind in [Int4::Symmetric, Int4::Centred].map(Kind::Int4) {
        let mut cache = filled(&t, &kind);
        for bad in [f32::NAN, f32::NEG_INFINITY, 65520.0, -1e30] {
            for (argument, row) in [("k", 7), ("v", 19)] {
                let mut t = t.clone();
                let x = if argument == "k" { &mut t.k } else { &mut t.v };
                x.set([0, 0, row, 3], bad);
                let error = cache.append(t.k.view(), t.v.view()).unwrap_err().to_string();
                let rest = "but must be below 65520 in size where elements are int4, with scales of f16";
                assert_eq!(error, format!("{argument}: an element of row {row} is {bad}, {rest}"));
                assert_eq!(cache.lens(), [20]);
            }
        }
        let most = Tensor::filled([1, 1, 1, 40], 65519.0);
        cache.append(most.view(), Tensor::filled([1, 1, 1, 8], -65519.0).view()).unwrap();
        let inputs = Inputs::cached(t.q.view(), &cache);
        let held = inputs.key_values().unwrap().key([0, 0, 20, 39]).unwrap();
        assert!((held - 65519.0).abs() <= 65519.0 / 14.0, "{held}");
    }
}

#[test]
fn tokens_that_are_not_finite() {
    let t = Tensors::normal([2, 4, 2, 2, 40, 17, 20], 1);
    for kind in scales(2, 17).map(Kind::Int8) {
        let mut cache = filled(&t, &kind);
        let before = All::of(&Attention::new(), Inputs::cached(t.q.view(), &cache), execs().next().unwrap().1);
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for (argument, at) in
                [("k", [0, 0, 0, 0]), ("k", [1, 1, 39, 16]), ("v", [1, 0, 20, 19]), ("v", [0, 1, 7, 2])]
            {
                let mut t = t.clone();
                let x = if argument == "k" { &mut t.k } else { &mut t.v };
                x.set(at, bad);
                let words = format!(
                    "{argument}: an element of row {} is {bad}, but must be finite where elements are int8",
                    at[2]
                );
                assert_eq!(cache.append(t.k.view(), t.v.view()).unwrap_err().to_string(), words);
                let one = at[0]..at[0] + 1;
                let part = |x: &crate::support::Tensor| x.part(one.clone(), 0..2, 0..40);
                let refused = cache.append_to(1, part(&t.k).view(), part(&t.v).view());
                assert_eq!(refused.unwrap_err().to_string(), words);
            }
        }
        assert_eq!(cache.lens(), [40, 40]);
        let after = All::of(&Attention::new(), Inputs::cached(t.q.view(), &cache), execs().next().unwrap().1);
        assert_same_bits("nothing was appended", &after.out, &before.out);
        assert_eq!(cache.bytes(), filled(&t, &kind).bytes());
    }
}

/// A query row that is not finite is NaN in its scores, its own alone.
#[test]
fn queries_that_are_not_finite() {
    let mut t = Tensors::normal([1, 2, 1, 3, 40, 17, 20], 2);
    for kind in kinds(1, 17) {
        let cache = filled(&t, &kind);
        for (isa, exec) in execs() {
            let good = All::of(&Attention::new(), Inputs::cached(t.q.view(), &cache), exec);
            let kept = t.q.get([0, 1, 1, 3]);
            t.q.set([0, 1, 1, 3], f32::INFINITY);
            let bad = All::of(&Attention::new(), Inputs::cached(t.q.view(), &cache), exec);
            t.q.set([0, 1, 1, 3], kept);
            for at @ [_, h, l, _] in crate::support::indices(good.out.shape) {
                let (got, want) = (bad.out.get(at), good.out.get(at));
                let same = if [h, l] == [1, 1] { got.is_nan() } else { got.to_bits() == want.to_bits() };
                assert!(same, "{isa}: {at:?}: {got}, {want}");
            }
        }
    }
    // Finite, but not with the scale of its channel.
    let mut scales = channels(1, 17);
    scales[0] = 1e20;
    t.q.set([0, 0, 0, 0], 1e30);
    let cache = filled(&t, &Kind::Int8(KeyScales::PerChannel(scales)));
    let all = All::of(&Attention::new(), Inputs::cached(t.q.view(), &cache), execs().next().unwrap().1);
    assert!(all.raw.get([0, 0, 0, 5]).is_nan() && all.raw.get([0, 0, 1, 5]).is_finite());
}

/// The factors of a large query and a large key overflow together; a dot product of 0 stays 0.
#[test]
fn zero_scores_of_huge_factors() {
    let (rows, d, keys) = (20, 128, 300);
    // Bytes of 127 and −127 in pairs: the integer sums of even keys are 0, those of odd keys are not.
    let mut t = Tensors::normal([1, 2, 1, rows, keys, d, 4], 3);
    t.q = Tensor::filled(t.q.shape, f32::MAX);
    t.k = Tensor::from_fn(t.k.shape, |[_, _, j, i]| if j % 2 == 0 && i % 2 == 1 { -3e5 } else { 3e5 });
    let cache = filled(&t, &Kind::PER_TOKEN);
    for (isa, exec) in execs() {
        let all = All::of(&Attention::new(), Inputs::cached(t.q.view(), &cache), exec);
        for at @ [_, _, _, j] in crate::support::indices(all.raw.shape) {
            let expected = if j % 2 == 0 { 0.0 } else { f32::INFINITY };
            assert_eq!(all.raw.get(at), expected, "{isa}: {at:?}");
        }
        let local = Attention::new().causal().align(Alignment::Offset(0)).scale(0.0);
        let all = All::of(&local, Inputs::cached(t.q.view(), &cache), exec);
        assert!(all.out.data.iter().all(|x| x.is_finite()), "{isa}: a scale of 0");
    }
}
