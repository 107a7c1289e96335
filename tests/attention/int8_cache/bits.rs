//! The same bits, however the tokens came into the cache and whoever computes.

use super::{All, Kind, empty, filled, kinds};
use crate::support::{LAYOUTS, Rng, Tensor, Tensors, assert_same_bits, execs};
use core::num::NonZeroUsize;
use core::ops::Range;
use sdpa::{
    Alignment, Attention, Bf16, Exec, Inputs, KvCache, KvShape, Outputs, Plan, View, ViewMut, Window, Workspace,
};

fn causal() -> Attention {
    Attention::new().causal().align(Alignment::BottomRight)
}

#[track_caller]
fn same(what: &str, got: &All, expected: &All) {
    assert_same_bits(&format!("{what}: out"), &got.out, &expected.out);
    assert_same_bits(&format!("{what}: lse"), &got.lse, &expected.lse);
    assert_same_bits(&format!("{what}: raw"), &got.raw, &expected.raw);
    assert_same_bits(&format!("{what}: weights"), &got.weights, &expected.weights);
    assert_same_bits(&format!("{what}: key weight sums"), &got.mass, &expected.mass);
}

fn append(cache: &mut KvCache, sequence: usize, t: &Tensors, b: usize, rows: Range<usize>) {
    let part = |x: &Tensor| x.part(b..b + 1, 0..x.shape[1], rows.clone());
    cache.append_to(sequence, part(&t.k).view(), part(&t.v).view()).unwrap();
}

#[test]
fn instruction_sets_do_not_show() {
    for (seed, sizes) in super::SIZES.into_iter().enumerate() {
        let t = Tensors::normal(sizes, seed as u64);
        for kind in kinds(sizes[2], sizes[5]) {
            let cache = filled(&t, &kind);
            let mut fused = execs().filter(|(isa, _)| isa.has_fma());
            let Some((_, exec)) = fused.next() else { continue };
            let first = All::of(&causal(), Inputs::cached(t.q.view(), &cache), exec);
            for (isa, exec) in fused {
                let all = All::of(&causal(), Inputs::cached(t.q.view(), &cache), exec);
                same(&format!("{sizes:?}, {isa}"), &all, &first);
            }
        }
    }
}

/// Out and LSE alone, so that keys may be shared out.
fn least(attention: &Attention, inputs: Inputs<'_>, exec: Exec, workspace: &mut Workspace) -> [Tensor; 2] {
    let ([b, h, l, _], e) = (inputs.queries().shape(), inputs.key_values().unwrap().v_shape()[3]);
    let [mut out, mut lse] = [e, 1].map(|e| Tensor::filled([b, h, l, e], f32::NAN));
    let outputs = Outputs::new(ViewMut::bhld(&mut out.data, out.shape).unwrap());
    let outputs = outputs.lse(ViewMut::bhld(&mut lse.data, lse.shape).unwrap());
    let problem = attention.problem(inputs, outputs).unwrap();
    let plan = Plan::new(&problem, exec);
    problem.run(&plan, workspace);
    [out, lse]
}

#[test]
fn threads_do_not_show() {
    for sizes in [[8, 8, 2, 1, 1520, 96, 100], [2, 8, 2, 150, 700, 40, 33]] {
        let t = Tensors::normal(sizes, 1);
        for kind in kinds(2, sizes[5]) {
            let cache = filled(&t, &kind);
            for (isa, serial) in execs() {
                let inputs = || Inputs::cached(t.q.view(), &cache);
                let expected = least(&causal(), inputs(), serial, &mut Workspace::new());
                for threads in [2, 3, 8] {
                    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
                    let mut workspace = Workspace::new();
                    for run in 0..2 {
                        let got = pool.install(|| least(&causal(), inputs(), serial.threads(threads), &mut workspace));
                        for (got, expected) in got.iter().zip(&expected) {
                            assert_same_bits(&format!("{isa}, {threads} threads, run {run}"), got, expected);
                        }
                    }
                }
            }
        }
    }
}

/// A prompt at once, in parts, and token by token.
#[test]
fn parts_and_steps_are_the_prefill() {
    let t = Tensors::normal([1, 4, 2, 530, 530, 24, 20], 3);
    let rng = &mut Rng::new(5);
    for kind in kinds(2, 24) {
        let whole = filled(&t, &kind);
        for (isa, exec) in execs() {
            let mut workspace = Workspace::new();
            let expected = least(&causal(), Inputs::cached(t.q.view(), &whole), exec, &mut workspace);
            for most in [1, 300] {
                let (mut cache, mut at) = (empty(&t, &kind), 0);
                while at < 530 {
                    let end = 530.min(at + 1 + rng.below(most));
                    append(&mut cache, 0, &t, 0, at..end);
                    let q = t.q.rows(at..end);
                    let got = least(&causal(), Inputs::cached(q.view(), &cache), exec, &mut workspace);
                    for (got, expected) in got.iter().zip(&expected) {
                        assert_same_bits(&format!("{isa}, rows {at}..{end}"), got, &expected.rows(at..end));
                    }
                    at = end;
                }
            }
        }
    }
}

/// The same queries, with keys and values times a factor.
fn scaled(t: &Tensors, factor: f32) -> Tensors {
    let mut t = t.clone();
    for x in [&mut t.k, &mut t.v] {
        x.data.iter_mut().for_each(|x| *x *= factor);
    }
    t
}

/// Appends to each sequence those tokens of `t` that are listed for it.
fn append_picked(cache: &mut KvCache, t: &Tensors, model: &[Vec<usize>]) {
    for (s, tokens) in model.iter().enumerate() {
        let pick =
            |x: &Tensor| Tensor::from_fn([1, 2, tokens.len(), x.shape[3]], |[_, h, j, i]| x.get([0, h, tokens[j], i]));
        cache.append_to(s, pick(&t.k).view(), pick(&t.v).view()).unwrap();
    }
}

/// Sequences that were rolled back, forked, cleared, copied: as if they had been appended at once.
#[test]
fn histories_do_not_show() {
    for seed in 0..12 {
        let rng = &mut Rng::new(seed);
        let (d, e) = (1 + rng.below(40), 1 + rng.below(40));
        let t = Tensors::normal([1, 2, 2, 2, 900, d, e], seed);
        // What is rolled back is much larger than what stays.
        let kind = &kinds(2, d)[seed as usize % 4];
        let wild = scaled(&t, if let Kind::Int4(_) = kind { 1e4 } else { 1e30 });
        let mut cache = kind.of(KvCache::new(3, KvShape { kv_heads: 2, head_dim: d, value_dim: e }).unwrap()).unwrap();
        // Tokens of each sequence.
        let mut model: Vec<Vec<usize>> = vec![Vec::new(); 3];
        let mut copies = Vec::new();
        for _ in 0..60 {
            let s = rng.below(model.len());
            let n = rng.pick(&[0, 1, 1, 5, 16, 100, 256]);
            match rng.below(8) {
                0..4 => {
                    let first = rng.below(900 - n);
                    append(&mut cache, s, &t, 0, first..first + n);
                    model[s].extend(first..first + n);
                }
                4 => {
                    append(&mut cache, s, &wild, 0, 0..n);
                    cache.truncate(s, model[s].len()).unwrap();
                }
                5 => {
                    let len = rng.below(model[s].len() + 1);
                    cache.truncate(s, len).unwrap();
                    model[s].truncate(len);
                }
                6 => {
                    let to = rng.below(model.len());
                    cache.fork(s, to).unwrap();
                    model[to] = model[s].clone();
                }
                _ if rng.below(4) == 0 => copies.push((cache.clone(), model.clone())),
                _ if model.len() < 5 => {
                    assert_eq!(cache.add_sequence(), model.len());
                    model.push(Vec::new());
                }
                _ => {
                    cache.clear(s).unwrap();
                    model[s].clear();
                }
            }
        }
        copies.push((cache, model));
        for (cache, model) in copies {
            let mut fresh = kind
                .of(KvCache::new(model.len(), KvShape { kv_heads: 2, head_dim: d, value_dim: e }).unwrap())
                .unwrap();
            append_picked(&mut fresh, &t, &model);
            assert_eq!(cache.lens(), fresh.lens());
            let q = Tensor::normal([model.len(), 4, 2, d], rng);
            for (isa, exec) in execs() {
                let [got, expected] =
                    [&cache, &fresh].map(|cache| All::of(&Attention::new(), Inputs::cached(q.view(), cache), exec));
                same(&format!("seed {seed}, {isa}"), &got, &expected);
            }
        }
    }
}

#[test]
fn a_sliding_cache_is_a_full_one_under_the_window() {
    let last = NonZeroUsize::new(300).unwrap();
    let attention = causal().window(Window::last_tokens(last).keep_first(3));
    let t = Tensors::normal([1, 4, 2, 1500, 1500, 18, 35], 6);
    for kind in kinds(2, 18) {
        let mut slid = kind
            .of(KvCache::sliding(1, KvShape { kv_heads: 2, head_dim: 18, value_dim: 35 }, last, 3).unwrap())
            .unwrap();
        let (mut full, mut workspace) = (empty(&t, &kind), Workspace::new());
        for first in (0..1500).step_by(50) {
            for cache in [&mut slid, &mut full] {
                append(cache, 0, &t, 0, first..first + 50);
            }
            let q = t.q.rows(first + 49..first + 50);
            let mut run = |cache| least(&attention, Inputs::cached(q.view(), cache), Exec::serial(), &mut workspace);
            let [got, expected] = [run(&slid), run(&full)];
            assert_same_bits(&format!("token {first}"), &got[0], &expected[0]);
            assert_same_bits(&format!("token {first}"), &got[1], &expected[1]);
        }
        assert!(slid.bytes() < full.bytes());
    }
}

/// However tensors lie that are appended, and the queries; and elements of 16 bits are the floats that they stand for.
#[test]
fn layouts_and_types_do_not_show() {
    let mut t = Tensors::normal([2, 4, 2, 3, 40, 17, 20], 7);
    for x in [&mut t.q, &mut t.k, &mut t.v] {
        x.data.iter_mut().for_each(|x| *x = Bf16::from_f32(*x).to_f32());
    }
    for kind in kinds(2, 17) {
        let run = |q: &Tensor, cache: &KvCache| All::of(&causal(), Inputs::cached(q.view(), cache), Exec::serial());
        let expected = run(&t.q, &filled(&t, &kind));
        for layout in LAYOUTS {
            let laid = t.laid_out(layout, layout, layout);
            same(&format!("{layout:?}"), &run(&laid.q, &filled(&laid, &kind)), &expected);
        }
        let [q, k, v] = [&t.q, &t.k, &t.v].map(|x| x.data.iter().map(|&x| Bf16::from_f32(x)).collect::<Vec<_>>());
        let mut cache = empty(&t, &kind);
        let view = |x, of: &Tensor| View::bhld(x, of.shape).unwrap();
        cache.append(view(&k[..], &t.k), view(&v[..], &t.v)).unwrap();
        let all = All::of(&causal(), Inputs::cached(view(&q[..], &t.q), &cache), Exec::serial());
        same("bf16", &all, &expected);
    }
}

/// A few rows are one group, many are several, and tasks of several heads cut anywhere.
#[test]
fn rows_do_not_know_each_other() {
    let mut t = Tensors::normal([1, 4, 1, 150, 300, 64, 64], 8);
    let caches = kinds(1, 64).map(|kind| (format!("{kind:?}"), filled(&t, &kind)));
    // Rows that are NaN stay alone with it.
    t.q.fill_row(2, f32::NAN);
    t.q.fill_row(97, f32::INFINITY);
    for ((kind, cache), (isa, exec)) in caches.iter().flat_map(|cache| execs().map(move |exec| (cache, exec))) {
        let run = |q: &Tensor| least(&Attention::new(), Inputs::cached(q.view(), cache), exec, &mut Workspace::new());
        let all = run(&t.q);
        for i in [0, 1, 2, 3, 95, 96, 97, 98, 149] {
            let [out, lse] = run(&t.q.rows(i..i + 1));
            assert_same_bits(&format!("{kind}, {isa}, row {i}"), &out, &all[0].rows(i..i + 1));
            assert_same_bits(&format!("{kind}, {isa}, row {i}"), &lse, &all[1].rows(i..i + 1));
            assert_eq!(out.data.iter().all(|x| x.is_finite()), ![2, 97].contains(&i), "{kind}, {isa}, row {i}");
        }
    }
}
