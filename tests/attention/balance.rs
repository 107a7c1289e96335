//! Equal shares for many workers, by a model of their time; and calls that divide keys because rows are too few for them.

use crate::kv_support::{append_part, cache_of, empty_cache, same_full};
use crate::memory::held;
use crate::options::{Case, Wanted};
use crate::support::{Rng, execs};
use sdpa::{
    Alignment, Attention, BackwardPlan, Bf16, Dtype, Exec, Gradients, Inputs, KvCache, KvShape, Outputs, Plan, Problem,
    Saved, Shape, View, ViewMut, Window,
};
use std::num::NonZeroUsize;

/// Calls `f` with a problem of tensors that are one row, read again and again; only plans are made of it.
fn planned<T>(shape: Shape, attention: Attention, f: impl FnOnce(&Problem<'_>) -> T) -> T {
    let Shape { batch, heads, kv_heads, q_len, kv_len, head_dim, value_dim } = shape;
    let row = vec![0.5f32; head_dim.max(value_dim)];
    let view = |heads, rows, dim| View::from_strides(&row, 0, [batch, heads, rows, dim], [0, 0, 0, 1]).unwrap();
    let inputs =
        Inputs::new(view(heads, q_len, head_dim), view(kv_heads, kv_len, head_dim), view(kv_heads, kv_len, value_dim));
    let mut out = vec![0.0; batch * heads * q_len * value_dim];
    let outputs = Outputs::new(ViewMut::bhld(&mut out, [batch, heads, q_len, value_dim]).unwrap());
    f(&attention.problem(inputs, outputs).unwrap())
}

fn shape([batch, heads, kv_heads]: [usize; 3], [q_len, kv_len]: [usize; 2], dim: usize) -> Shape {
    Shape { batch, heads, kv_heads, q_len, kv_len, head_dim: dim, value_dim: dim }
}

/// Plans for a number of workers and returns the fraction of their time in which they work: of all up to 64, for which every
/// problem here has enough to do, and beyond of those that the plan has work for.
fn efficiency(problem: &Problem<'_>, workers: usize) -> f64 {
    let plan = Plan::new(problem, Exec::default().threads(workers));
    let workers = workers.min(plan.workers().max(64));
    plan.balance(problem, workers).iter().sum::<f64>() / workers as f64
}

#[test]
fn many_workers_have_equal_shares() {
    let causal = Attention::new().causal().align(Alignment::BottomRight);
    let calls = [
        ("long-4096", shape([1, 12, 12], [4096; 2], 64), Attention::new()),
        ("long-4096-causal", shape([1, 12, 12], [4096; 2], 64), causal),
        ("llama-2048-gqa", shape([1, 32, 8], [2048; 2], 128), causal),
        ("bert-b8-128", shape([8, 12, 12], [128; 2], 64), Attention::new()),
        ("decode-16k", shape([1, 32, 8], [1, 16384], 128), causal),
        ("one head of 4096", shape([1, 1, 1], [4096; 2], 64), Attention::new()),
        ("one head of 4096, causal", shape([1, 1, 1], [4096; 2], 64), causal),
        ("100 rows of one head, 64k keys", shape([1, 1, 1], [100, 1 << 16], 128), causal),
        ("128 latent heads, 16k keys", Shape { value_dim: 512, ..shape([1, 128, 1], [1, 1 << 14], 576) }, causal),
    ];
    for (name, shape, attention) in calls {
        planned(shape, attention, |problem| {
            // The last of 114 tasks, as small as they are made, takes twice as long as the middle one.
            let last = if name == "one head of 4096, causal" { [0.85, 0.5] } else { [0.9, 0.8] };
            for (workers, least) in [(2, 0.92), (16, 0.9), (64, last[0]), (128, last[1])] {
                let efficiency = efficiency(problem, workers);
                assert!(efficiency >= least, "{name}, {workers} workers: {efficiency:.3}");
            }
        });
    }
}

/// One prompt of 300 rows and five single steps over a cache of long sequences.
#[test]
fn a_mixed_batch_is_balanced() {
    let lens = [8000, 9000, 12_000, 16_000, 7000, 8192];
    let row = [0.5f32; 128];
    let mut cache = KvCache::new(lens.len(), KvShape { kv_heads: 2, head_dim: 64, value_dim: 64 }).unwrap();
    for (sequence, &len) in lens.iter().enumerate() {
        let kv = View::from_strides(&row, 0, [1, 2, len, 64], [0, 0, 0, 1]).unwrap();
        cache.append_to(sequence, kv, kv).unwrap();
    }
    let ends = [0, 300, 301, 302, 303, 304, 305];
    let q = View::from_strides(&row, 0, [1, 8, 305, 64], [0, 0, 0, 1]).unwrap();
    let mut out = vec![0.0; 8 * 305 * 64];
    let outputs = Outputs::new(ViewMut::bhld(&mut out, [1, 8, 305, 64]).unwrap());
    let attention = Attention::new().causal().align(Alignment::BottomRight);
    let problem = attention.problem(Inputs::cached(q, &cache).ragged_queries(&ends), outputs).unwrap();
    for (workers, least) in [(2, 0.95), (16, 0.9), (64, 0.9)] {
        let efficiency = efficiency(&problem, workers);
        assert!(efficiency >= least, "{workers} workers: {efficiency:.3}");
    }
}

/// A worker alone does everything; more workers than tasks have nothing to do; nothing to do is done at once.
#[test]
fn the_ends_of_balance() {
    planned(shape([1, 2, 2], [100, 100], 16), Attention::new(), |problem| {
        let plan = Plan::new(problem, Exec::serial());
        assert_eq!(plan.tasks(), 2);
        assert_eq!(plan.balance(problem, 1), [1.0]);
        assert_eq!(plan.balance(problem, 0), [1.0]);
        assert_eq!(plan.balance(problem, usize::MAX), [1.0; 2]);
        assert_eq!(plan.balance(problem, 8), [1.0; 2]);
    });
    planned(shape([1, 2, 2], [0, 100], 16), Attention::new(), |problem| {
        assert_eq!(Plan::new(problem, Exec::serial()).balance(problem, 4), [0.0; 0]);
    });
}

/// A worker works in proportion to the pairs of rows and keys that its tasks have, and to the keys that it packs.
#[test]
fn work_is_counted_in_pairs_and_in_keys() {
    let (row, lens) = ([0.5f32; 16], [256, 100]);
    let view = |rows| View::from_strides(&row, 0, [2, 1, rows, 16], [0, 0, 0, 1]).unwrap();
    let busy = |attention: Attention, rows: usize, lens: &[usize]| {
        let mut out = vec![0.0; 2 * rows * 16];
        let outputs = Outputs::new(ViewMut::bhld(&mut out, [2, 1, rows, 16]).unwrap());
        let inputs = Inputs::new(view(rows), view(256), view(256)).kv_lens(lens);
        let problem = attention.problem(inputs, outputs).unwrap();
        let plan = Plan::new(&problem, Exec::serial());
        assert_eq!(plan.tasks(), 2);
        let mut busy = plan.balance(&problem, 2);
        busy.sort_by(f64::total_cmp);
        assert_eq!((busy.len(), busy[1]), (2, 1.0));
        busy[0]
    };
    // Every row sees every key: whatever a key costs beside its pairs.
    assert_eq!(busy(Attention::new(), 20, &lens), 100.0 / 256.0);
    // A key costs as much as `key` pairs: one row sees all, 20 rows see ever more.
    let causal = Attention::new().causal().align(Alignment::TopLeft);
    let one = busy(causal.align(Alignment::BottomRight), 20, &[256, 20]);
    let (many, few) = ((237..=256).sum::<u32>(), (1..=20).sum::<u32>());
    let key = (f64::from(many) * one - f64::from(few)) / (20.0 - 256.0 * one);
    assert!((key - key.round()).abs() < 1e-6 && key > 0.0, "{key}");
    // Of a window, the keys from the first row's first to the last row's last are packed.
    let window = causal.align(Alignment::BottomRight).window(Window::last_tokens(NonZeroUsize::new(10).unwrap()));
    let least = f64::from((1..=10).sum::<u32>() + 10 * 10) + 20.0 * key;
    assert!((busy(window, 20, &[256, 20]) - least / (200.0 + 29.0 * key)).abs() < 1e-9);
}

/// Up to 128 rows that share a head, and windows: keys are divided where workers would have nothing to do otherwise, with
/// the bits of whole rows.
#[test]
fn keys_divided_among_many_workers_have_the_same_bits() {
    let mut rng = Rng::new(11);
    let last = Some(Alignment::BottomRight);
    let window = Window::last_tokens(NonZeroUsize::new(1000).unwrap());
    for ([heads, kv_heads], rows) in [([1, 1], 17), ([1, 1], 97), ([1, 1], 128), ([4, 1], 25), ([4, 2], 1), ([3, 1], 5)]
    {
        for window in [None, Some(window), Some(window.keep_first(300))] {
            let sizes = [1, heads, kv_heads, rows, 9000, 48, 80];
            let case = Case { causal: true, alignment: last, window, ..Case::plain(&mut rng, sizes) };
            let case = Case { kv_lens: Some(vec![9000]), ..case };
            same_bits_by_workers(&format!("{heads}/{kv_heads} heads, {rows} rows, {window:?}"), &case, &mut rng);
        }
    }
    // Rows so long that a task by rows holds fewer: two row blocks meet a key block, for which values of 16 bits and those
    // that are not finite are packed each time.
    for (dim, last) in [(512, 1.0), (500, f32::INFINITY)] {
        let mut case = Case::plain(&mut rng, [1, 128, 1, 1, 1100, 576, dim]);
        case.kv_lens = Some(vec![1100]);
        *case.v.data.last_mut().expect("there are values") = last;
        same_bits_by_workers(&format!("128 latent heads, {dim}, {last}"), &case, &mut rng);
    }
}

/// Checks that tensors and a cache give the same bits on many workers as tensors on one, and a cache of 16 bits as on one.
fn same_bits_by_workers(what: &str, case: &Case, rng: &mut Rng) {
    let cache = cache_of(case, rng);
    let mut narrow = empty_cache(case).dtype(Dtype::Bf16).unwrap();
    append_part(&mut narrow, case, 0, 0..case.kv_len(0));
    let over = |cache, exec| case.run_over(Inputs::cached(case.q.view(), cache), exec, Wanted::LEAST);
    for (isa, exec) in execs() {
        let expected = case.run(exec.threads(1), Wanted::LEAST);
        let narrowed = over(&narrow, exec.threads(1));
        for exec in [8, 64].map(|threads| exec.threads(threads)) {
            same_full(&format!("{what}, {isa}"), &case.run(exec, Wanted::LEAST), &expected);
            same_full(&format!("{what}, {isa}, cache"), &over(&cache, exec), &expected);
            same_full(&format!("{what}, {isa}, bf16"), &over(&narrow, exec), &narrowed);
        }
    }
}

/// Partial results of key blocks are bounded for each thread.
#[test]
fn some_rows_are_divided_within_bounds() {
    let bytes = |rows: usize, keys: usize, threads: usize| {
        planned(shape([1, 1, 1], [rows, keys], 128), Attention::new(), |problem| {
            Plan::new(problem, Exec::default().threads(threads)).partials_bytes()
        })
    };
    let unit = |rows: usize| 4 * (2 * rows.next_multiple_of(16) + rows * 128);
    let blocks = |blocks: usize, rows: usize| held(blocks * unit(rows), 1);
    // Two threads have a task of rows each.
    assert_eq!(bytes(100, 1 << 16, 2), 0);
    assert_eq!(bytes(100, 1 << 16, 64), blocks(256, 100));
    assert_eq!(bytes(128, 1 << 16, 64), blocks(256, 128));
    let latent = Shape { value_dim: 512, ..shape([1, 128, 1], [1, 1100], 576) };
    let latent =
        planned(latent, Attention::new(), |problem| Plan::new(problem, Exec::default().threads(8)).partials_bytes());
    assert_eq!(latent, held(5 * 4 * (2 * 128 + 128 * 512), 1));
    assert_eq!(bytes(129, 1 << 16, 64), 0);
    // More than 4 MiB for each thread.
    assert_eq!(bytes(128, 1 << 19, 64), blocks(2048, 128));
    assert!(bytes(128, 1 << 21, 64) == 0 && 8192 * unit(128) > 256 << 20);
}

/// Returns the number of workers, of up to 100, for one row of each sequence, or some.
fn workers(attention: Attention, inputs: Inputs<'_>, value_dim: usize) -> usize {
    let [b, h, l, _] = inputs.queries().shape();
    let mut out = vec![0.0; b * h * l * value_dim];
    let outputs = Outputs::new(ViewMut::bhld(&mut out, [b, h, l, value_dim]).unwrap());
    Plan::new(&attention.problem(inputs, outputs).unwrap(), Exec::serial().threads(100)).workers()
}

/// Threads are worth waking for time: few rows take that of reading keys and values, 12,288 bytes for 4096 operations here.
#[test]
fn small_calls_are_divided_by_the_time_they_take() {
    const D: usize = 64;
    let (row, half) = ([0.5f32; D], [Bf16::from_f32(0.5); D]);
    let view = |batch, heads, rows| View::from_strides(&row, 0, [batch, heads, rows, D], [0, 0, 0, 1]).unwrap();
    let plain = |heads, rows, keys| {
        workers(Attention::new(), Inputs::new(view(1, heads, rows), view(1, heads, keys), view(1, heads, keys)), D)
    };
    // 128 µs and 102 µs of one core of Zen 5.
    assert_eq!([plain(8, 1, 1000), plain(12, 64, 64)], [3, 3]);
    // Up to six rows are memory-bound.
    for (rows, keys) in [(1, 651), (5, 651), (6, 651), (7, 558), (16, 244)] {
        assert_eq!([plain(8, rows, keys), plain(8, rows, keys + 1)], [1, 2], "{rows} rows, {keys} keys");
    }
    let short = |keys| {
        let kv = View::from_strides(&half, 0, [1, 8, keys, D], [0, 0, 0, 1]).unwrap();
        workers(Attention::new(), Inputs::new(view(1, 8, 1), kv, kv), D)
    };
    assert_eq!([short(1302), short(1303)], [1, 2]);
    // What nobody sees is not read.
    let last = Attention::new().align(Alignment::BottomRight);
    let window = last.window(Window::last_tokens(NonZeroUsize::new(651).unwrap()));
    let wider = last.window(Window::last_tokens(NonZeroUsize::new(652).unwrap()));
    let inputs = Inputs::new(view(1, 8, 1), view(1, 8, 100_000), view(1, 8, 100_000));
    assert_eq!([window, wider].map(|attention| workers(attention, inputs, D)), [1, 2]);
    assert_eq!(workers(Attention::new().causal().align(Alignment::TopLeft), inputs, D), 1);
    assert_eq!([651, 652].map(|len| workers(last, inputs.kv_lens(&[len]), D)), [1, 2]);
    // Scores that are written out are computed, hidden or not.
    let mut weights = vec![0.0; 8 * 2000];
    let mut scored = |attention: Attention| {
        let mut out = [0.0; 8 * D];
        let outputs = Outputs::new(ViewMut::bhld(&mut out, [1, 8, 1, D]).unwrap());
        let outputs = outputs.weights(ViewMut::bhld(&mut weights, [1, 8, 1, 2000]).unwrap());
        let inputs = Inputs::new(view(1, 8, 1), view(1, 8, 2000), view(1, 8, 2000));
        Plan::new(&attention.problem(inputs, outputs).unwrap(), Exec::serial().threads(100)).workers()
    };
    assert_eq!([scored(last), scored(window)], [6, 6]);
    // What sequences share is read once, until their rows take longer.
    let shared = |batch, keys| Inputs::new(view(batch, 8, 1), view(batch, 8, keys), view(batch, 8, keys));
    assert_eq!(
        [(6, 651), (6, 652), (12, 325), (12, 326)].map(|(n, keys)| workers(last, shared(n, keys), D)),
        [1, 2, 1, 2]
    );
}

/// The backward pass takes two and a half times as long as the forward pass, of ragged sequences by their own lengths.
#[test]
fn backward_calls_are_divided_by_the_time_they_take() {
    const D: usize = 64;
    let row = [0.5f32; D];
    let view = |rows, columns| View::from_strides(&row, 0, [1, 8, rows, columns], [0, 0, 0, 1]).unwrap();
    let workers = |attention: &Attention, inputs: Inputs<'_>, rows| {
        let saved = Saved::new(view(rows, D), view(rows, 1), view(rows, D));
        let problem = attention.backward(inputs, saved, Gradients::new()).unwrap();
        BackwardPlan::new(&problem, Exec::serial().threads(4)).workers()
    };
    let plain = Attention::new();
    let inputs = |rows, keys| Inputs::new(view(rows, D), view(keys, D), view(keys, D));
    // Two rows are memory-bound.
    assert_eq!([260, 261].map(|keys| workers(&plain, inputs(2, keys), 2)), [1, 2]);
    let window = plain.align(Alignment::BottomRight).window(Window::inclusive(Some(200), Some(0)));
    assert_eq!(workers(&window, inputs(2, 10_000), 2), 1);
    // One sequence of 600 rows beside 100 of one row, each with one key: not the longest for each.
    let ends: Vec<usize> = core::iter::once(0).chain(600..=700).collect();
    let keys: Vec<usize> = (0..=101).collect();
    assert_eq!(workers(&plain, inputs(700, 101).ragged(&ends, &keys), 700), 1);
}

/// Sequences of a cache count by their own lengths, and only those that the call names, or that have rows.
#[test]
fn sequences_count_by_what_they_have() {
    let kv = View::from_strides(&[0.5f32; 64], 0, [1, 8, 1000, 64], [0, 0, 0, 1]).unwrap();
    let mut cache = KvCache::new(4, KvShape { kv_heads: 8, head_dim: 64, value_dim: 64 }).unwrap();
    for (sequence, len) in [300, 1, 351, 352].into_iter().enumerate() {
        let kv = kv.rows(0..len).unwrap();
        cache.append_to(sequence, kv, kv).unwrap();
    }
    let q = |batch, rows| View::from_strides(&[0.5f32; 64], 0, [batch, 8, rows, 64], [0, 0, 0, 1]).unwrap();
    let of = |inputs: Inputs<'_>| workers(Attention::new(), inputs, 64);
    let named = |sequences| of(Inputs::cached(q(2, 1), &cache).sequences(sequences));
    assert_eq!([named(&[0, 2]), named(&[0, 3]), named(&[1, 2])], [1, 2, 1]);
    // Sequences laid end to end in tensors share nothing, whatever the stride of their one batch.
    let tensors = |rows, keys| Inputs::new(q(1, rows), kv.rows(0..keys).unwrap(), kv.rows(0..keys).unwrap());
    assert_eq!([651, 652].map(|keys| of(tensors(2, keys).ragged(&[0, 1, 2], &[0, 300, keys]))), [1, 2]);
    let with_rows = |ends| of(Inputs::cached(q(1, 2), &cache).ragged_queries(ends));
    assert_eq!([with_rows(&[0, 1, 1, 2, 2]), with_rows(&[0, 1, 1, 1, 2])], [1, 2]);
}
