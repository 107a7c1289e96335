//! What is refused, and in which words.

use super::short::{DTYPES, Elements, Rounded, SHORT};
use crate::support::{Rng, Tensor, UNWRITTEN};
use core::num::NonZeroUsize;
use sdpa::{Attention, Dtype, Error, Exec, Inputs, KvCache, KvShape, Outputs};

fn ones(shape: [usize; 4]) -> Tensor {
    Tensor::filled(shape, 1.0)
}

#[test]
fn the_type_of_a_cache_that_is_not_empty() {
    let (k, v) = (ones([1, 2, 3, 4]), ones([1, 2, 3, 5]));
    let refused = |cache: KvCache, dtype| {
        let error = cache.dtype(dtype).expect_err("it has memory");
        assert_eq!(error.to_string(), "dtype: needs an empty cache");
        assert_eq!(error, Error::Needs { argument: "dtype", needs: "an empty cache" });
    };
    for from in DTYPES {
        for to in DTYPES {
            let mut cache =
                KvCache::new(2, KvShape { kv_heads: 2, head_dim: 4, value_dim: 5 }).unwrap().dtype(from).unwrap();
            cache.append_to(1, k.view(), v.view()).unwrap();
            refused(cache.clone(), to);
            cache.truncate(1, 0).unwrap();
            refused(cache, to); // what it keeps for later is of its type
        }
    }
    // Nothing was appended yet: any number of times, sliding ones and further sequences too.
    let mut cache =
        KvCache::sliding(1, KvShape { kv_heads: 2, head_dim: 4, value_dim: 5 }, NonZeroUsize::MIN, 3).unwrap();
    assert_eq!(cache.add_sequence(), 1);
    let cache = SHORT.into_iter().try_fold(cache, KvCache::dtype).unwrap();
    assert_eq!((cache.lens(), cache.bytes()), (&[0, 0][..], 0));
}

/// Appending what does not fit leaves a cache of short elements as it was.
#[test]
fn shapes_that_do_not_fit() {
    for dtype in SHORT {
        let mut cache =
            KvCache::new(1, KvShape { kv_heads: 2, head_dim: 4, value_dim: 5 }).unwrap().dtype(dtype).unwrap();
        let short = |shape| Rounded::new(&ones(shape), dtype);
        cache.append(short([1, 2, 3, 4]).view(), short([1, 2, 3, 5]).view()).unwrap();
        let (bytes, k, v) = (cache.bytes(), short([1, 2, 3, 6]), short([1, 2, 3, 5]));
        let error = cache.append(k.view(), v.view()).unwrap_err();
        assert_eq!(error.to_string(), "k: head_dim is 6, but the cache has 4");
        assert_eq!((cache.lens(), cache.bytes()), (&[3][..], bytes));
    }
}

#[test]
fn the_unfused_baseline() {
    let mut rng = Rng::new(1);
    let (shape, mut refusals) = ([1, 2, 3, 4], 0);
    let tensor = Tensor::normal(shape, &mut rng);
    for types in (0..81).map(|n| [n / 27, n / 9 % 3, n / 3 % 3, n % 3].map(|i| DTYPES[i])) {
        let [q, k, v] = [types[0], types[1], types[2]].map(|dtype| Rounded::new(&tensor, dtype));
        let mut out = Elements::of(&[f32::from_bits(UNWRITTEN); 24], types[3]);
        let before = out.bits();
        let inputs = Inputs::new(q.view(), k.view(), v.view());
        let outputs = Outputs::new(out.view_mut(&tensor));
        let answer = sdpa_unfused::attention(&Attention::new(), inputs, outputs, Exec::serial());
        if types == [Dtype::F32; 4] {
            answer.unwrap();
            continue;
        }
        assert_eq!(
            answer.unwrap_err().to_string(),
            "16-bit elements: needs the fused path; the unfused baseline has no such option"
        );
        assert_eq!(out.bits(), before, "a refused call wrote: {types:?}");
        refusals += 1;
    }
    assert_eq!(refusals, 80);
}

#[test]
fn outputs_that_do_not_fit() {
    let tensor = ones([1, 2, 3, 4]);
    for dtype in SHORT {
        let short = Rounded::new(&tensor, dtype);
        let mut out = short.elements.clone();
        let like = ones([1, 2, 2, 4]);
        let inputs = Inputs::new(short.view(), short.view(), short.view());
        let error = Attention::new().problem(inputs, Outputs::new(out.view_mut(&like))).unwrap_err();
        assert_eq!(error.to_string(), "out: rows is 2, but q has 3");
    }
}
