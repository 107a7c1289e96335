//! The last value that is allowed, and the first that is not.

use crate::memory::held;
use crate::support::Rng;
use sdpa::{
    Alignment, Attention, BlockTable, CacheFormat, Dtype, Error, Exec, Inputs, Int4, KeyScales, KvCache, KvShape,
    Outputs, PagePool, Plan, View, ViewMut, Window,
};
use std::num::NonZeroUsize;

const SHAPE: KvShape = KvShape { kv_heads: 2, head_dim: 3, value_dim: 5 };
const KEYS: usize = 20;

fn tensors(rng: &mut Rng) -> [Vec<f32>; 2] {
    [SHAPE.head_dim, SHAPE.value_dim].map(|dim| (0..SHAPE.kv_heads * KEYS * dim).map(|_| rng.normal()).collect())
}

fn views(data: &[Vec<f32>; 2]) -> [View<'_>; 2] {
    let [k, v] = data;
    [(k, SHAPE.head_dim), (v, SHAPE.value_dim)].map(|(x, dim)| View::bhld(x, [1, SHAPE.kv_heads, KEYS, dim]).unwrap())
}

/// Elements are there up to the last of each index, and no further.
#[test]
fn elements_of_keys_and_values_end_with_the_shape() {
    let data = tensors(&mut Rng::new(1));
    let [k, v] = views(&data);
    let q = [0.0; 2 * 3];
    let q = View::bhld(&q, [1, 2, 1, 3]).unwrap();
    let mut cache = KvCache::new(1, SHAPE).unwrap();
    cache.append(k, v).unwrap();
    let table = BlockTable { entries: &[1, 0], lens: &[KEYS] };
    let formats = [CacheFormat::Elements(Dtype::F32), CacheFormat::Int8PerToken, CacheFormat::Int4(Int4::Centred)];
    let pools = formats.map(|format| {
        let mut pool = PagePool::new(3, 16, SHAPE, format).unwrap();
        pool.append(table, k, v).unwrap();
        pool
    });
    let paged = pools.iter().map(|pool| Inputs::paged(q, pool.pages(table).unwrap()));
    for inputs in [Inputs::new(q, k, v), Inputs::cached(q, &cache)].into_iter().chain(paged) {
        let held = inputs.key_values().unwrap();
        let last_key = [0, SHAPE.kv_heads - 1, KEYS - 1, SHAPE.head_dim - 1];
        let last_value = [0, SHAPE.kv_heads - 1, KEYS - 1, SHAPE.value_dim - 1];
        assert!(held.key(last_key).is_some() && held.value(last_value).is_some());
        for index in 0..4 {
            let beyond = |mut last: [usize; 4]| {
                last[index] += 1;
                last
            };
            assert_eq!((held.key(beyond(last_key)), held.value(beyond(last_value))), (None, None), "index {index}");
        }
    }
}

/// Integers take keys of up to 2¹⁷ elements.
#[test]
fn keys_of_integers_end_with_the_longest() {
    let shape = |head_dim| KvShape { kv_heads: 1, head_dim, value_dim: 1 };
    let cache = |head_dim| KvCache::new(1, shape(head_dim)).unwrap();
    for kind in [Int4::Symmetric, Int4::Centred] {
        assert!(cache(1 << 17).int4(kind).is_ok());
        assert!(matches!(cache((1 << 17) + 1).int4(kind), Err(Error::Range { .. })));
        assert!(PagePool::new(1, 16, shape(1 << 17), CacheFormat::Int4(kind)).is_ok());
        assert!(PagePool::new(1, 16, shape((1 << 17) + 1), CacheFormat::Int4(kind)).is_err());
    }
    let floats = CacheFormat::Elements(Dtype::F32);
    assert!(PagePool::new(1, 16, shape((1 << 17) + 1), floats).is_ok(), "of floats there may be more");
    assert!(cache(1 << 17).int8(KeyScales::PerToken).is_ok());
    assert!(matches!(cache((1 << 17) + 1).int8(KeyScales::PerToken), Err(Error::Range { .. })));
    assert!(PagePool::new(1, 16, shape(1 << 17), CacheFormat::Int8PerToken).is_ok());
    assert!(PagePool::new(1, 16, shape((1 << 17) + 1), CacheFormat::Int8PerToken).is_err());
    // What an empty cache was set to may be set again.
    assert!(cache(64).int8(KeyScales::PerToken).and_then(|cache| cache.int8(KeyScales::PerToken)).is_ok());
    let twice = cache(64).int4(Int4::Symmetric).and_then(|cache| cache.int4(Int4::Centred)).unwrap();
    assert_eq!(twice.format(), CacheFormat::Int4(Int4::Centred));
}

/// A cache is made if its blocks are no larger than memory can be; nothing is allocated for its keys.
#[test]
fn heads_of_a_cache_end_where_a_block_is_larger_than_memory_can_be() {
    // Of 256 keys and values, 16 floats each.
    let most = isize::MAX as usize / (256 * 32 * 4);
    let cache = |kv_heads| KvCache::new(1, KvShape { kv_heads, head_dim: 16, value_dim: 3 });
    assert!(cache(most).is_ok());
    assert_eq!(cache(most + 1).err(), Some(Error::TooLarge { what: "cache", sizes: [1, most + 1, 16, 3] }));
}

/// A token that repeats the one before is too small, one behind the last is too large.
#[test]
fn accepted_tokens_end_with_the_last() {
    let data = tensors(&mut Rng::new(2));
    let [k, v] = views(&data);
    let mut cache = KvCache::new(1, SHAPE).unwrap();
    cache.append(k, v).unwrap();
    let mut said = |accepted: &[usize]| cache.keep(0, 18, accepted).unwrap_err().to_string();
    let texts = [said(&[1, 2]), said(&[1, 1]), said(&[2])];
    for (text, word) in texts.iter().zip(["last token", "one more than", "last token"]) {
        assert!(text.contains(word), "{text}");
    }
    cache.keep(0, 18, &[0, 1]).unwrap();
    assert_eq!(cache.lens(), [KEYS]);
}

/// Weights of all keys are there as long as a sliding cache has all keys, and for rows that are none.
#[test]
fn weights_over_a_sliding_cache_end_with_the_first_block_that_it_evicts() {
    let shape = KvShape { kv_heads: 1, head_dim: 2, value_dim: 2 };
    let mut cache = KvCache::sliding(1, shape, NonZeroUsize::new(10).unwrap(), 0).unwrap();
    let window = Attention::new().causal().align(Alignment::BottomRight).window(Window::inclusive(Some(9), Some(0)));
    let mut compute = |keys: usize, rows: usize| {
        let row = [0.5f32; 2];
        let view = |rows: usize| View::from_strides(&row, 0, [1, 1, rows, 2], [0, 0, 0, 1]).unwrap();
        cache.append(view(keys), view(keys)).unwrap();
        let len = cache.lens()[0];
        let (mut out, mut weights) = (vec![0.0; rows * 2], vec![0.0; rows * len]);
        let outputs = Outputs::new(ViewMut::bhld(&mut out, [1, 1, rows, 2]).unwrap())
            .weights(ViewMut::bhld(&mut weights, [1, 1, rows, len]).unwrap());
        let problem = window.problem(Inputs::cached(view(rows), &cache), outputs);
        problem.map(|problem| problem.run_once(Exec::serial())).map(|()| weights.iter().sum::<f32>())
    };
    assert!((compute(200, 1).unwrap() - 1.0).abs() < 1e-6);
    assert_eq!((compute(400, 0), compute(1, 0)), (Ok(0.0), Ok(0.0)));
    assert!(matches!(compute(1, 1), Err(Error::Needs { needs: "a cache that keeps all keys", .. })));
}

/// A cause is named where an index is below 0, not where the first is.
#[test]
fn views_that_are_too_long_say_so() {
    let x = [0.0; 3];
    let said =
        |offset, stride| View::from_strides(&x, offset, [1, 1, 2, 2], [0, 0, stride, 1]).unwrap_err().to_string();
    assert!(!said(0, 2).contains("negative") && said(0, -1).contains("negative"), "{}", said(0, 2));
}

/// Sequences of a cache are named up to the last.
#[test]
fn sequences_of_a_call_end_with_those_of_the_cache() {
    let cache = KvCache::new(3, SHAPE).unwrap();
    let (q, mut out) = ([0.0; 2 * 3], [0.0; 2 * 5]);
    let q = View::bhld(&q, [1, 2, 1, 3]).unwrap();
    let mut problem = |sequence| {
        let outputs = Outputs::new(ViewMut::bhld(&mut out, [1, 2, 1, 5]).unwrap());
        Attention::new().problem(Inputs::cached(q, &cache).sequences(&[sequence]), outputs).map(drop)
    };
    assert_eq!(problem(2), Ok(()));
    let refused = Err(Error::Sequence { argument: "sequences", got: 3, sequences: 3 });
    assert_eq!(problem(3), refused);
    let pool = PagePool::new(1, 16, SHAPE, CacheFormat::Elements(Dtype::F32)).unwrap();
    let pages = pool.pages(BlockTable { entries: &[], lens: &[0; 3] }).unwrap();
    let outputs = Outputs::new(ViewMut::bhld(&mut out, [1, 2, 1, 5]).unwrap());
    let problem = Attention::new().problem(Inputs::paged(q, pages).sequences(&[3]), outputs);
    assert_eq!(problem.map(drop), refused);
}

/// Blocks of keys are divided as long as their results take a sixteenth of what is read, if that is more than a megabyte.
#[test]
fn partial_results_take_a_sixteenth_of_what_is_read() {
    let row = [0.5; 64];
    // Maxima, sums and outputs of 16 rows: (2 + 64) · 16 numbers; and 256 · (2 + 64) are read.
    for (dim, divided) in [(2, true), (1, false)] {
        let view = |rows, dim| View::from_strides(&row, 0, [1, 1, rows, dim], [0, 0, 0, 1]).unwrap();
        let mut out = [0.0; 16 * 64];
        let outputs = Outputs::new(ViewMut::bhld(&mut out, [1, 1, 16, 64]).unwrap());
        let inputs = Inputs::new(view(16, dim), view(300 * 256, dim), view(300 * 256, 64));
        let problem = Attention::new().problem(inputs, outputs).unwrap();
        let bytes = Plan::new(&problem, Exec::serial()).partials_bytes();
        assert_eq!(bytes, if divided { held(300 * 66 * 16 * 4, 1) } else { 0 }, "keys of {dim}");
    }
}

/// A bias of one sequence of a batch is for all of them, for each, or for each of a period.
#[test]
fn a_bias_for_another_number_of_sequences_is_refused_for_one_of_them_too() {
    let x = [0.0f32; 6 * 5];
    let view = |batch, rows| View::bhld(&x[..batch * rows], [batch, 1, rows, 1]).unwrap();
    for (batch, period, fits) in [
        (1, None, true),
        (6, None, true),
        (3, None, false),
        (3, Some(3), true),
        (2, Some(3), false),
        (1, Some(3), true),
    ] {
        let bias = View::from_strides(&x, 0, [batch, 1, 1, 5], [0; 4]).unwrap();
        let inputs = Inputs::new(view(6, 1), view(6, 5), view(6, 5)).bias(bias);
        let inputs = period.map_or(inputs, |period| inputs.batch_period(period));
        assert_eq!(inputs.of_sequence(4, 0..1).is_ok(), fits, "a bias for {batch}, period {period:?}");
    }
}

/// A sliding cache can be exported and imported from the token on with which it evicts a block.
#[test]
fn a_cache_is_imported_from_the_length_on_that_evicts_its_first_block() {
    let shape = KvShape { kv_heads: 1, head_dim: 1, value_dim: 1 };
    for (last, first) in [(1, 0), (10, 0), (300, 3)] {
        let mut cache = KvCache::sliding(1, shape, NonZeroUsize::new(last).unwrap(), first).unwrap();
        let row = [0.5];
        let row = View::bhld(&row, [1, 1, 1, 1]).unwrap();
        for len in 1..900 {
            cache.append(row, row).unwrap();
            let imported = KvCache::import(&cache.export().unwrap()).unwrap();
            assert_eq!((imported.lens(), imported.evicted(0)), (&[len][..], cache.evicted(0)));
        }
        // As short as rows need that come after a rollback.
        let mut cache = KvCache::sliding(1, shape, NonZeroUsize::new(last).unwrap(), first).unwrap();
        cache = cache.rollback_room(5).unwrap();
        (0..900).for_each(|_| cache.append(row, row).unwrap());
        while cache.truncate(0, cache.lens()[0] - 1).is_ok() {
            let imported = KvCache::import(&cache.export().unwrap()).unwrap();
            assert_eq!((imported.lens(), imported.evicted(0)), (cache.lens(), cache.evicted(0)));
        }
        assert!(!cache.evicted(0).unwrap().is_empty());
    }
}

/// Inputs of some heads have these heads of a bias, whether it is for each query head or for each key/value head.
#[test]
fn inputs_of_heads_have_their_heads_of_a_bias() {
    let x = [0.0f32; 6 * 2];
    let [q, kv, one] = [6, 3, 1].map(|heads| View::bhld(&x[..2 * heads], [1, heads, 1, 2]).unwrap());
    let numbers: Vec<f32> = (0..6).map(|head| head as f32).collect();
    for (heads, first) in [(6, 2.0), (3, 1.0), (1, 0.0)] {
        let bias = View::bhld(&numbers[..heads], [1, heads, 1, 1]).unwrap();
        // Query heads 2 and 3 share key/value head 1.
        let two = q.heads(2..4).unwrap();
        let some = Inputs::new(q, kv, kv).bias(bias).of_heads(2..4, [two.into(), one.into(), one.into()]);
        let bias = some.bias_and_mask().0.unwrap();
        assert_eq!((bias.shape()[1], bias.get([0, 0, 0, 0])), (heads.div_ceil(3), Some(first)), "{heads} heads");
    }
    let ends = ([0, 1, 1], [0, 0, 1]);
    let ragged = Inputs::new(q, kv, kv).ragged(&ends.0, &ends.1);
    assert_eq!((ragged.ragged_ends(), Inputs::new(q, kv, kv).ragged_ends()), (Some([&ends.0[..], &ends.1]), None));
    let lens = Inputs::new(q, kv, kv).kv_lens(&[1]);
    assert_eq!((lens.key_lens(), Inputs::new(q, kv, kv).key_lens()), (Some(&[1][..]), None));
}

/// A sequence of a ragged call may have all the keys that there are for it.
#[test]
fn keys_of_one_sequence_end_with_those_laid_out_for_it() {
    let (x, ends) = ([0.0f32; 9], [0, 4, 9]);
    let view = |rows| View::bhld(&x[..rows], [1, 1, rows, 1]).unwrap();
    let of_sequence = |lens: &[usize]| {
        Inputs::new(view(9), view(9), view(9)).ragged(&ends, &ends).kv_lens(lens).of_sequence(1, 4..5).map(drop)
    };
    assert_eq!(of_sequence(&[4, 5]), Ok(()));
    assert!(matches!(of_sequence(&[4, 6]), Err(Error::Entry { argument: "kv_lens", index: 1, got: 6, limit: 5, .. })));
}

/// A stride of 0 is said to repeat elements where there is more than one.
#[test]
fn a_single_element_is_not_said_to_be_repeated() {
    let said =
        |strides| ViewMut::from_strides(&mut [0.0f32; 9], 0, [1, 1, 2, 2], strides).map(drop).unwrap_err().to_string();
    assert!(!said([0, 0, 1, 1]).contains("stride of 0") && said([1, 1, 1, 0]).contains("stride of 0"));
}

/// The error says how many bytes all tokens would take.
#[test]
fn memory_for_tokens_is_that_of_keys_and_values() {
    let (x, tokens) = ([0.0; 5], 1 << 44);
    let view = |dim| View::from_strides(&x, 0, [1, 2, tokens, dim], [0, 0, 0, 1]).unwrap();
    let refused = KvCache::new(1, SHAPE).unwrap().append(view(3), view(5));
    assert_eq!(refused, Err(Error::Memory { what: "cache", bytes: tokens * 2 * (3 + 5) * 4 }));
}
