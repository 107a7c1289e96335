//! Caches whose keys and values have formats of their own, and integers in the Hadamard basis: each side is what it is in a cache
//! of one format, what the oracle sees is what the fused pass computes, and large channels cost the others nothing.

use crate::kv_support::{append_part, cuts};
use crate::options::{Case, Wanted, check_against_oracle};
use crate::support::{Rng, Tensor, Tensors, assert_same_bits, execs, fewer, indices};
use sdpa::{
    Attention, Basis, BlockTable, CacheFormat, Dtype, Error, Inputs, Int4, KvCache, KvFormat, KvShape, Mods, Outputs,
    PagePool, Point, Precision, ViewMut, naive,
};

const FORMATS: [CacheFormat<'static>; 7] = [
    CacheFormat::Elements(Dtype::F32),
    CacheFormat::Elements(Dtype::Bf16),
    CacheFormat::Elements(Dtype::F16),
    CacheFormat::Int8PerToken,
    CacheFormat::Int4(Int4::Symmetric),
    CacheFormat::Int4(Int4::Centred),
    CacheFormat::E4m3PerToken,
];

const INTEGERS: [CacheFormat<'static>; 3] =
    [CacheFormat::Int8PerToken, CacheFormat::Int4(Int4::Symmetric), CacheFormat::Int4(Int4::Centred)];

fn hadamard(format: CacheFormat<'_>) -> KvFormat<'_> {
    KvFormat::from(format).key_basis(Basis::Hadamard).value_basis(Basis::Hadamard)
}

fn empty(k: &Tensor, v: &Tensor, format: KvFormat<'_>) -> KvCache {
    let ([batch, kv_heads, _, head_dim], value_dim) = (k.shape, v.shape[3]);
    let cache = KvCache::new(batch, KvShape { kv_heads, head_dim, value_dim }).expect("good sizes");
    cache.with_format(format).expect("an empty cache")
}

fn filled(k: &Tensor, v: &Tensor, format: KvFormat<'_>) -> KvCache {
    let mut cache = empty(k, v, format);
    cache.append(k.view(), v.view()).expect("they fit");
    cache
}

/// Plain queries over a cache: the case has no options.
fn case(rng: &mut Rng, rows: usize, keys: usize, [d, dv]: [usize; 2]) -> Case {
    Case::plain(rng, [2, 4, 2, rows, keys, d, dv])
}

/// Raw scores of a cache of two formats are those of keys of the first, and with equal weights (queries of zeros) its outputs are
/// those of values of the second.
#[test]
fn keys_and_values_are_those_of_caches_of_one_format() {
    let mut rng = Rng::new(1);
    for (rows, keys, dims) in [(1, 300, [64, 40]), (5, 70, [33, 24]), (40, 520, [64, 96])] {
        let some = case(&mut rng, rows, keys, dims);
        let mut zeros = some.clone();
        zeros.q = Tensor::filled(some.q.shape, 0.0);
        let wanted = Wanted { points: [true, false, false, false], ..Wanted::LEAST };
        for (isa, exec) in execs() {
            let run = |case: &Case, format: KvFormat<'_>, wanted| {
                let cache = filled(&some.k, &some.v, format);
                case.run_over(Inputs::cached(case.q.view(), &cache), exec, wanted)
            };
            for keys in FORMATS {
                let [alone] = [run(&some, keys.into(), wanted)];
                for values in FORMATS {
                    let what = format!("{isa}, {rows} rows, {keys:?} and {values:?}");
                    let format = KvFormat::new(keys, values);
                    let scores = run(&some, format, wanted).points[0].clone().expect("raw scores");
                    assert_same_bits(&what, &scores, alone.points[0].as_ref().expect("raw scores"));
                    let equal = run(&zeros, format, Wanted::LEAST);
                    assert_same_bits(&what, &equal.out, &run(&zeros, values.into(), Wanted::LEAST).out);
                }
            }
        }
    }
}

/// Raw scores and outputs of the oracle, which no precision changes.
fn oracle(source: &Inputs<'_>) -> naive::Answer<f64> {
    naive::answer::<f64, _, _, _>(&Attention::new(), source, &Mods::new()).expect("a good call")
}

/// Root mean square of the differences.
fn error(got: &[f32], expected: &[f64]) -> f64 {
    let pairs = got.iter().zip(expected).map(|(&x, y)| (f64::from(x) - y).powi(2));
    (pairs.sum::<f64>() / got.len() as f64).sqrt()
}

/// Errors of raw scores and outputs of a call over a cache.
fn error_of(q: &Tensor, cache: Inputs<'_>, truth: &naive::Answer<f64>, exec: sdpa::Exec) -> [f64; 2] {
    error_at(Precision::Exact, q, cache, truth, exec)
}

fn error_at(
    precision: Precision,
    q: &Tensor,
    cache: Inputs<'_>,
    truth: &naive::Answer<f64>,
    exec: sdpa::Exec,
) -> [f64; 2] {
    let attention = Attention::new().precision(precision);
    let ([b, h, l, _], [_, _, keys, dv]) = (q.shape, cache.key_values().expect("keys").v_shape());
    let (mut out, mut raw) = (vec![0.0; b * h * l * dv], vec![0.0; b * h * l * keys]);
    let outputs = Outputs::new(ViewMut::bhld(&mut out, [b, h, l, dv]).expect("it fits"));
    let outputs = outputs.scores(Point::Raw, ViewMut::bhld(&mut raw, [b, h, l, keys]).expect("it fits"));
    attention.problem(cache, outputs).expect("a good call").run_once(exec);
    [error(&raw, &truth.points[0]), error(&out, &truth.out)]
}

/// What is computed is what is stored: only queries are rounded to bytes, and weights to 16 or eight bits.
#[test]
fn the_oracle_sees_what_a_transformed_cache_computes() {
    let mut seed = 0;
    for dims in [[1, 2], [16, 24], [40, 33], [64, 64], [80, 96], [128, 17], [300, 260]] {
        for rows in [1, 7, 40] {
            seed += 1;
            let t = Tensors::normal([2, 4, 2, rows, 290, dims[0], dims[1]], seed);
            for format in INTEGERS {
                for format in [hadamard(format), KvFormat::new(format, FORMATS[1]).key_basis(Basis::Hadamard)] {
                    let cache = filled(&t.k, &t.v, format);
                    let inputs = Inputs::cached(t.q.view(), &cache);
                    let seen = oracle(&inputs);
                    for (isa, exec) in execs() {
                        let [scores, out] = error_of(&t.q, inputs, &seen, exec);
                        let what = format!("{isa}, {dims:?}, {rows} rows, {format:?}: {scores} {out}");
                        assert!(scores < 9e-3 && out < 4e-3, "{what}");
                    }
                }
            }
        }
    }
}

/// Every pair of formats meets every precision, few rows and many.
#[test]
fn precisions_take_every_pair_of_formats() {
    for rows in [1, 7, 50] {
        let t = Tensors::normal([1, 4, 2, rows, 300, 64, 64], rows as u64);
        for (keys, values) in FORMATS.into_iter().flat_map(|keys| FORMATS.map(|values| (keys, values))) {
            let cache = filled(&t.k, &t.v, KvFormat::new(keys, values));
            let inputs = Inputs::cached(t.q.view(), &cache);
            let seen = oracle(&inputs);
            for (isa, exec) in execs() {
                for precision in [Precision::Native, Precision::Accurate] {
                    let [scores, out] = error_at(precision, &t.q, inputs, &seen, exec);
                    let what = format!("{isa}, {rows} rows, {precision:?}, {keys:?} and {values:?}: {scores} {out}");
                    assert!(scores < 9e-3 && out < 4e-3, "{what}");
                    // Without scores that are written, the softmax may scale them.
                    let attention = Attention::new().precision(precision);
                    let mut plain = vec![0.0; 4 * rows * 64];
                    let outputs = Outputs::new(ViewMut::bhld(&mut plain, [1, 4, rows, 64]).expect("it fits"));
                    attention.problem(inputs, outputs).expect("a good call").run_once(exec);
                    let error = error(&plain, &seen.out);
                    assert!(error < 4e-3, "{what}: {error}");
                }
            }
        }
    }
}

/// Keys read from a cache are what was appended, within half a scale of the transformed row, for every length.
#[test]
fn elements_are_given_in_the_channels() {
    for dim in [1, 5, 16, 48, 80, 128, 257, 576] {
        let t = Tensors::normal([1, 1, 1, 1, 20, dim, dim], dim as u64);
        let cache = filled(&t.k, &t.v, hadamard(CacheFormat::Int8PerToken));
        let held = Inputs::cached(t.q.view(), &cache).key_values().expect("a cache");
        for j in 0..20 {
            let mut sums = [0.0; 2];
            for d in 0..dim {
                let at = [0, 0, j, d];
                sums[0] += (held.key(at).expect("a key") - t.k.get(at)).powi(2);
                sums[1] += (held.value(at).expect("a value") - t.v.get(at)).powi(2);
            }
            // Errors of a row are spread over it: scales are below 4.5/127.
            let most = dim as f32 * (0.5 * 4.5f32 / 127.0).powi(2);
            assert!(sums.iter().all(|&sum| sum < most), "{dim}, {j}: {sums:?}, {most}");
        }
        assert_eq!(held.key([0, 0, 0, dim]), None);
    }
}

/// Keys with a few large channels: the other channels of a block of 32 lose their integers to these, unless they are spread.
#[test]
fn large_channels_cost_the_others_little() {
    let mut t = Tensors::normal([1, 8, 4, 16, 600, 128, 128], 4);
    t.k = Tensor::from_fn(t.k.shape, |at| t.k.get(at) * if at[3] == 37 { 20.0 } else { 1.0 });
    let truth = oracle(&Inputs::new(t.q.view(), t.k.view(), t.v.view()));
    let exec = sdpa::Exec::serial();
    for (format, most) in [(INTEGERS[0], 0.5), (INTEGERS[1], 0.55), (INTEGERS[2], 0.7)] {
        let errors = [format.into(), hadamard(format)].map(|format| {
            let cache = filled(&t.k, &t.v, format);
            error_of(&t.q, Inputs::cached(t.q.view(), &cache), &truth, exec)
        });
        let ratio = errors[1][0] / errors[0][0];
        assert!(ratio < most, "{format:?}: {errors:?}, {ratio}");
    }
}

/// A sequence of exact tokens alone has the answers of floats, few rows and many, and the first tokens of a longer one have their scores.
#[test]
fn exact_tokens_are_those_that_were_appended() {
    for (rows, keys) in [(1, 7), (40, 16), (3, 300), (100, 530)] {
        let t = Tensors::normal([2, 4, 2, rows, keys, 80, 48], 6);
        for format in INTEGERS {
            for format in [KvFormat::from(format), hadamard(format), KvFormat::new(format, FORMATS[0])] {
                let cache = filled(&t.k, &t.v, format.exact_first(16));
                let inputs = Inputs::cached(t.q.view(), &cache);
                let (seen, truth) = (oracle(&inputs), oracle(&t.inputs()));
                let held = inputs.key_values().expect("a cache");
                for [b, h, j, d] in indices([2, 2, keys.min(16), 48]) {
                    let [got, expected] = [held.key([b, h, j, d]).expect("a key"), t.k.get([b, h, j, d])];
                    assert_eq!(got.to_bits(), expected.to_bits(), "{format:?}");
                    let [got, expected] = [held.value([b, h, j, d]).expect("a value"), t.v.get([b, h, j, d])];
                    assert!((got - expected).abs() < 1e-6, "{format:?}: {got}, not {expected}");
                }
                for (isa, exec) in execs() {
                    let what = format!("{isa}, {rows} rows, {keys} keys, {format:?}");
                    let [scores, out] = error_of(&t.q, inputs, &seen, exec);
                    assert!(scores < 9e-3 && out < 4e-3, "{what}: {scores} {out} from what the oracle sees");
                    if keys <= 16 {
                        let [scores, out] = error_of(&t.q, inputs, &truth, exec);
                        assert!(scores < 1e-6 && out < 1e-6, "{what}: {scores} {out}");
                    }
                }
            }
        }
    }
}

/// Every option sees exact tokens as it sees others: over caches of integers whose tokens are all exact, random calls have the
/// answers of floats.
#[test]
fn options_compose_with_exact_tokens() {
    for seed in 0..fewer(300) {
        let mut rng = Rng::new(seed);
        let (heads, kv_heads) = rng.pick(&[(1, 1), (2, 1), (4, 2), (3, 3)]);
        let (rows, keys) = (rng.pick(&[1, 2, 6, 7, 16, 17, 40, 97]), 1 + rng.below(16));
        let [d, dv] = [(); 2].map(|()| rng.pick(&[1, 8, 16, 17, 33, 64, 80]));
        let batch = 1 + rng.below(2);
        let some = Case::of_sizes(&mut rng, [batch, heads, kv_heads, rows, keys, d, dv]).side_by_side();
        let shape = KvShape { kv_heads, head_dim: d, value_dim: dv };
        let format = rng.pick(&INTEGERS);
        let format = if rng.below(2) == 0 { format.into() } else { hadamard(format) };
        let mut cache = KvCache::new(some.batch(), shape).expect("good sizes");
        cache = cache.with_format(format.exact_first(16)).expect("an empty cache");
        for b in 0..some.batch() {
            for keys in cuts(some.kv_len(b), &mut rng) {
                append_part(&mut cache, &some, b, keys);
            }
        }
        let oracle = some.oracle::<f64>();
        for (isa, exec) in execs() {
            let got = some.run_over(Inputs::cached(some.q.view(), &cache), exec, Wanted::LEAST);
            check_against_oracle(&format!("seed {seed}, {isa}, {format:?}"), &some, &got, &oracle);
        }
    }
}

/// Tokens that move among the first: exact ones stay exact, others stay as they are; forks keep theirs, in caches and in pools.
#[test]
fn exact_tokens_move_with_their_bits() {
    let t = Tensors::normal([1, 2, 2, 1, 40, 24, 40], 8);
    let shape = KvShape { kv_heads: 2, head_dim: 24, value_dim: 40 };
    for format in [CacheFormat::Int8PerToken.into(), hadamard(CacheFormat::Int4(Int4::Symmetric))] {
        let format = format.exact_first(6);
        let mut cache = filled(&t.k, &t.v, format);
        let fork = cache.add_sequence();
        cache.fork(0, fork).expect("they are there");
        let mut pool = PagePool::new(9, 16, shape, format).expect("good sizes");
        let [table, copy] = [[5, 2, 0], [7, 2, 0]];
        let of = |entries, len| BlockTable { entries, lens: len };
        pool.append(of(&table, &[40]), t.k.view(), t.v.view()).expect("they fit");
        pool.copy_pages(&[[5, 7]]).expect("pages of the pool");
        let element = |cache: &KvCache, sequence: usize, [h, j, d]: [usize; 3]| {
            let held = Inputs::cached(t.q.view(), cache).key_values().expect("a cache");
            [held.key([sequence, h, j, d.min(23)]), held.value([sequence, h, j, d])].map(|x| x.expect("held").to_bits())
        };
        let before = cache.clone();
        let accepted = [0, 2, 3, 7, 20];
        cache.keep(fork, 1, &accepted).expect("they are there");
        pool.keep(of(&copy, &[40]), 0, 1, &accepted).expect("they are there");
        for [_, h, i, d] in indices([1, 2, 6, 40]) {
            let from = if i == 0 { 0 } else { 1 + accepted[i - 1] };
            let what = format!("{format:?}, token {i}, element {d}");
            assert_eq!(element(&cache, 0, [h, i, d]), element(&before, 0, [h, i, d]), "{what}: of the other");
            let ([key, value], [k, v]) = (element(&cache, fork, [h, i, d]), element(&before, 0, [h, from, d]));
            // Values that were integers are brought to their basis, and back.
            let close = (f32::from_bits(value) - f32::from_bits(v)).abs() < if from < 6 { 0.0 } else { 2e-6 };
            assert!(key == k && (value == v || close), "{what}: {key} {value}, not {k} {v}");
        }
        for (table, sequence, len) in [(&table, 0, &[40]), (&copy, fork, &[6])] {
            let pages = Inputs::paged(t.q.view(), pool.pages(of(table, len)).expect("a good table"));
            let got = pages.key_values().expect("pages");
            for [_, h, i, d] in indices([1, 2, len[0], 40]) {
                let bits = [got.key([0, h, i, d.min(23)]), got.value([0, h, i, d])].map(|x| x.expect("held").to_bits());
                assert_eq!(bits, element(&cache, sequence, [h, i, d]), "{format:?}, {sequence}, token {i}");
            }
        }
        // A page that a sequence no longer begins with has no exact rows.
        pool.append(of(&[1, 5], &[20]), t.k.rows(0..20).view(), t.v.rows(0..20).view()).expect("they fit");
        let pages = Inputs::paged(t.q.view(), pool.pages(of(&[5], &[16])).expect("a good table"));
        let got = pages.key_values().expect("pages").key([0, 0, 1, 0]).expect("a key");
        assert!(got != t.k.get([0, 0, 1, 0]) && (got - t.k.get([0, 0, 17, 0])).abs() < 0.4, "{got}");
    }
}

/// Memory of exact tokens goes where that of other tokens goes: to other sequences, and back.
#[test]
fn memory_of_exact_tokens_is_used_again() {
    let shape = KvShape { kv_heads: 2, head_dim: 24, value_dim: 40 };
    let format = KvFormat::from(CacheFormat::Int8PerToken).exact_first(4);
    let mut cache = KvCache::new(2, shape).and_then(|cache| cache.with_format(format)).expect("good sizes");
    let t = Tensors::normal([1, 2, 2, 1, 20, 24, 40], 9);
    let append = |cache: &mut KvCache, b| cache.append_to(b, t.k.view(), t.v.view()).expect("they fit");
    append(&mut cache, 0);
    let alone = cache.bytes();
    cache.clear(0).expect("it is there");
    append(&mut cache, 1);
    assert_eq!(cache.bytes(), alone, "the memory of the cleared sequence");
    for _ in 0..3 {
        cache.fork(1, 0).expect("they are there");
        cache.truncate(0, 2).expect("it has more");
        append(&mut cache, 0);
        cache.clear(0).expect("it is there");
    }
    assert_eq!(cache.bytes(), 2 * alone, "the memory of a fork");
    cache.clear(1).expect("it is there");
    cache.shrink();
    assert_eq!(cache.bytes(), 0);
    assert!(cache.with_format(CacheFormat::Int8PerToken).is_ok());
    // A page that is written twice in one list of copies has the exact rows of the last.
    let mut pool = PagePool::new(4, 32, shape, format).expect("good sizes");
    for page in [0, 2] {
        pool.append(BlockTable { entries: &[page], lens: &[20] }, t.k.view(), t.v.view()).expect("they fit");
    }
    pool.copy_pages(&[[1, 2], [0, 2], [2, 3]]).expect("pages of the pool");
    let pages = Inputs::paged(t.q.view(), pool.pages(BlockTable { entries: &[3], lens: &[20] }).expect("a good table"));
    let got = pages.key_values().expect("pages").key([0, 1, 3, 7]).expect("a key");
    assert_eq!(got.to_bits(), t.k.get([0, 1, 3, 7]).to_bits());
}

/// Rows have the same bits from a pool, whatever their number, and from a cache that grew token by token.
#[test]
fn bits_do_not_depend_on_how_tokens_came() {
    let mut rng = Rng::new(5);
    let shape = KvShape { kv_heads: 2, head_dim: 80, value_dim: 48 };
    let formats = [
        hadamard(CacheFormat::Int8PerToken),
        hadamard(CacheFormat::Int4(Int4::Centred)),
        KvFormat::new(CacheFormat::Int8PerToken, CacheFormat::Int4(Int4::Symmetric)).value_basis(Basis::Hadamard),
        KvFormat::new(CacheFormat::Elements(Dtype::Bf16), CacheFormat::Int8PerToken),
        KvFormat::new(CacheFormat::Int4(Int4::Symmetric), CacheFormat::Elements(Dtype::F32)).key_basis(Basis::Hadamard),
        hadamard(CacheFormat::Int4(Int4::Symmetric)).exact_first(4),
        KvFormat::from(CacheFormat::Int8PerToken).exact_first(16),
        KvFormat::new(CacheFormat::Elements(Dtype::F16), CacheFormat::Int8PerToken).exact_first(3),
        KvFormat::new(CacheFormat::Int4(Int4::Centred), CacheFormat::Elements(Dtype::Bf16)).exact_first(9),
    ];
    let some = Case::plain(&mut rng, [1, 4, 2, 40, 300, 80, 48]);
    for format in formats {
        let whole = filled(&some.k, &some.v, format);
        let mut grown = empty(&some.k, &some.v, format);
        let mut pool = PagePool::new(20, 16, shape, format).expect("good sizes");
        let entries: Vec<u32> = (0..19).rev().collect();
        let head_of = |x: &Tensor, j: usize| x.rows(j..j + 1);
        for j in 0..300 {
            let (k, v) = (head_of(&some.k, j), head_of(&some.v, j));
            grown.append(k.view(), v.view()).expect("they fit");
            pool.append(BlockTable { entries: &entries, lens: &[j + 1] }, k.view(), v.view()).expect("they fit");
        }
        let pages = pool.pages(BlockTable { entries: &entries, lens: &[300] }).expect("a good table");
        for (isa, exec) in execs() {
            let expected = some.run_over(Inputs::cached(some.q.view(), &whole), exec, Wanted::ALL);
            for (from, source) in
                [("grown", Inputs::cached(some.q.view(), &grown)), ("pool", Inputs::paged(some.q.view(), pages))]
            {
                let got = some.run_over(source, exec, Wanted::ALL);
                crate::kv_support::same_full(&format!("{isa}, {format:?}, {from}"), &got, &expected);
            }
            for i in 0..40 {
                let row = some.some_rows(i..i + 1);
                let got = row.run_over(Inputs::cached(row.q.view(), &whole), exec, Wanted::LEAST).out;
                let one = expected.out.rows(i..i + 1);
                assert_same_bits(&format!("{isa}, {format:?}, row {i}"), &got, &one);
            }
        }
    }
}

#[test]
fn what_has_no_meaning_is_refused() {
    let shape = KvShape { kv_heads: 1, head_dim: 32, value_dim: 32 };
    let new = || KvCache::new(1, shape).expect("good sizes");
    let said = |cache: Result<KvCache, Error>| cache.expect_err("it has no meaning").to_string();
    let scales = [1.0; 32];
    let (float, int8) = (FORMATS[1], CacheFormat::Int8PerToken);
    let channels = CacheFormat::Int8PerChannel(&scales);
    assert_eq!(
        said(new().with_format(KvFormat::new(int8, channels))),
        "values: needs a scale for each token (CacheFormat::Int8PerToken)"
    );
    let needs = "needs int8 with a scale for each token, or int4";
    for keys in [float, channels] {
        assert_eq!(
            said(new().with_format(KvFormat::from(keys).key_basis(Basis::Hadamard))),
            format!("key_basis: {needs}")
        );
    }
    let format = KvFormat::new(int8, float).value_basis(Basis::Hadamard);
    assert_eq!(said(new().with_format(format)), format!("value_basis: {needs}"));
    assert!(PagePool::new(1, 16, shape, format).is_err_and(|error| error.to_string().starts_with("value_basis")));
    let unlike = "latent: needs keys and values of one format, in the basis of their channels, none exact";
    for format in [KvFormat::new(int8, float), hadamard(int8)] {
        assert_eq!(said(new().latent().and_then(|cache| cache.with_format(format))), unlike);
        assert_eq!(said(new().with_format(format).and_then(KvCache::latent)), unlike);
    }
    let mut cache = new();
    let row = Tensor::filled([1, 1, 1, 32], 0.5);
    cache.append(row.view(), row.view()).expect("they fit");
    assert_eq!(said(cache.with_format(int8)), "format: needs an empty cache");
    // Settings that a shorter method would drop.
    let set = new().with_format(KvFormat::new(float, int8)).expect("an empty cache");
    assert_eq!(said(set.clone().dtype(Dtype::F16)), "dtype: needs a cache without with_format, which is set");
    assert!(set.with_format(int8).is_ok());
    // A transformed row may have an element sixteen times as large.
    for (format, most) in [(INTEGERS[1], 4094.0), (INTEGERS[2], 4094.0), (INTEGERS[0], 9e35)] {
        let mut cache = new().with_format(hadamard(format)).expect("an empty cache");
        let [fits, too_large] = [most, 1.2 * most].map(|x| Tensor::filled([1, 1, 1, 32], x));
        cache.append(fits.view(), fits.view()).expect("they fit");
        let error = cache.append(row.view(), too_large.view()).expect_err("too large").to_string();
        assert!(error.starts_with("v:") && cache.lens() == [1], "{error}");
        let held = Inputs::cached(row.view(), &cache).key_values().expect("a cache");
        let got = held.key([0, 0, 0, 5]).expect("a key");
        assert!((got / most - 1.0).abs() < 0.2, "{got}");
    }
    // Each side refuses what it cannot store, before anything is written.
    let mut cache = new().with_format(KvFormat::new(float, int8)).expect("an empty cache");
    let bad = Tensor::filled([1, 1, 1, 32], f32::INFINITY);
    assert!(cache.append(bad.view(), row.view()).is_ok());
    let error = cache.append(row.view(), bad.view()).expect_err("bytes are finite").to_string();
    assert_eq!((error.starts_with("v:"), cache.lens()), (true, &[1][..]), "{error}");
}
