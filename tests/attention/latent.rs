//! Latent caches: values are the first columns of the keys. They have the bits of a cache that stores both, in less memory.

use crate::counting::counted;
use crate::kv_support::{append_part, cuts, empty_cache, same_cache, same_full};
use crate::options::{Case, Wanted};
use crate::selected::random_lists;
use crate::support::{Rng, Tensor, execs, fewer};
use core::num::NonZeroUsize;
use sdpa::{
    Alignment, Attention, Dtype, Error, Inputs, Int4, KeyScales, KvCache, KvShape, Outputs, Plan, Precision, View,
    ViewMut, Workspace,
};

const DTYPES: [Dtype; 3] = [Dtype::F32, Dtype::Bf16, Dtype::F16];

/// The case with the first columns of its keys for values: its `value_dim`, or those that keys have.
fn latent(case: Case) -> Case {
    let [b, h, n, _] = case.v.shape;
    let dim = case.v.shape[3].min(case.k.shape[3]);
    let v = Tensor::from_fn([b, h, n, dim], |at| case.k.get(at));
    Case { v, ..case }
}

/// Appends some keys of a sequence of a case.
fn append(cache: &mut KvCache, case: &Case, b: usize, keys: core::ops::Range<usize>) {
    let k = case.k.part(b..b + 1, 0..case.kv_heads(), keys);
    let (k, columns) = (k.view(), 0..case.v.shape[3]);
    cache.append_to(b, k, k.columns(columns).expect("it has these")).expect("they fit");
}

/// A latent cache of a case, appended in random parts, and one that stores keys and values.
fn both(case: &Case, empty: &KvCache, dtype: Dtype, rng: &mut Rng) -> [KvCache; 2] {
    let empty = empty.clone().dtype(dtype).expect("an empty cache");
    let mut stored = [empty.clone().latent().expect("an empty cache"), empty];
    for b in 0..case.batch() {
        cuts(case.kv_len(b), rng).into_iter().for_each(|keys| append(&mut stored[0], case, b, keys));
        append_part(&mut stored[1], case, b, 0..case.kv_len(b));
    }
    stored
}

fn check(what: &str, case: &Case, rng: &mut Rng) {
    for dtype in DTYPES {
        let caches = both(case, &empty_cache(case), dtype, rng);
        assert!(caches[0].is_latent() && !caches[1].is_latent());
        for (isa, exec) in execs() {
            for (wanted, threads) in [(Wanted::LEAST, 1), (Wanted::ALL, 64)] {
                let over = |cache| case.run_over(Inputs::cached(case.q.view(), cache), exec.threads(threads), wanted);
                same_full(&format!("{what}, {dtype:?}, {isa}"), &over(&caches[0]), &over(&caches[1]));
            }
        }
    }
}

#[test]
fn any_options() {
    for seed in 0..40 {
        let mut rng = Rng::new(seed);
        let case = latent(Case::random(&mut rng, 300_000).side_by_side());
        check(&format!("seed {seed}"), &case, &mut rng);
    }
}

#[test]
fn rows_that_select_keys() {
    for seed in 0..40 {
        let mut rng = Rng::new(seed ^ 0x1a7e);
        let case = latent(Case::random(&mut rng, 300_000).side_by_side());
        let selected = Some(random_lists(&mut rng, &case));
        check(&format!("seed {seed}"), &Case { selected, ..case }, &mut rng);
    }
}

/// Sets the elements of an empty cache.
type SetElements = fn(KvCache) -> Result<KvCache, Error>;

/// Kinds of integers.
const INTEGERS: [(&str, SetElements); 3] = [
    ("int8", |cache| cache.int8(KeyScales::PerToken)),
    ("int4", |cache| cache.int4(Int4::Symmetric)),
    ("int4 with centres", |cache| cache.int4(Int4::Centred)),
];

/// Columns of a call's output.
fn columns(out: &Tensor, dim: usize) -> Tensor {
    let [b, h, n, _] = out.shape;
    Tensor::from_fn([b, h, n, dim], |at| out.get(at))
}

/// Values with the scales of their keys: the bits of the first columns where whole keys are the values, stored apart.
fn check_integers(what: &str, case: &Case, rng: &mut Rng) {
    let whole = Case { v: case.k.clone(), ..case.clone() };
    for (name, integers) in INTEGERS {
        let mut latent = integers(empty_cache(case)).and_then(KvCache::latent).expect("an empty cache");
        let mut stored = integers(empty_cache(&whole)).expect("an empty cache");
        for b in 0..case.batch() {
            cuts(case.kv_len(b), rng).into_iter().for_each(|keys| append(&mut latent, case, b, keys));
            append_part(&mut stored, &whole, b, 0..case.kv_len(b));
        }
        for (isa, exec) in execs() {
            for (wanted, threads) in [(Wanted::LEAST, 1), (Wanted::ALL, 64)] {
                let exec = exec.threads(threads);
                let mut expected = whole.run_over(Inputs::cached(case.q.view(), &stored), exec, wanted);
                expected.out = columns(&expected.out, case.v.shape[3]);
                let got = case.run_over(Inputs::cached(case.q.view(), &latent), exec, wanted);
                same_full(&format!("{what}, {name}, {isa}"), &got, &expected);
            }
        }
        let held = [&latent, &stored].map(|x| Inputs::cached(case.q.view(), x).key_values().expect("a cache"));
        for at in crate::support::indices(case.k.shape).filter(|&[b, _, j, _]| j < case.kv_len(b)) {
            assert_eq!(held[0].key(at), held[1].key(at), "{what}, {name}: {at:?}");
            let value = held[1].value(at).filter(|_| at[3] < case.v.shape[3]);
            assert_eq!(held[0].value(at), value, "{what}, {name}: {at:?}");
        }
    }
}

#[test]
fn any_options_over_integers() {
    for seed in 0..fewer(20) {
        let mut rng = Rng::new(seed);
        let case = latent(Case::random(&mut rng, 200_000).side_by_side());
        let selected = (seed % 2 == 1).then(|| random_lists(&mut rng, &case));
        check_integers(&format!("seed {seed}"), &Case { selected, ..case }, &mut rng);
    }
}

/// Keys that are packed at once, in parts, and panel by panel; rows of one task and of several.
#[test]
fn integer_keys_of_any_length() {
    for (heads, rows, keys, [d, dv]) in [
        (16, 1, 520, [72, 64]),
        (128, 1, 300, [96, 80]),
        (16, 3, 520, [576, 512]),
        (4, 40, 520, [33, 17]),
        (2, 110, 530, [64, 33]),
        (1, 1, 3, [1, 1]),
        (1, 100, 270, [5000, 40]),
    ] {
        let mut rng = Rng::new(heads as u64);
        let mut case = latent(Case::plain(&mut rng, [2, heads, 1, rows, keys, d, dv]));
        (case.causal, case.alignment) = (true, Some(Alignment::BottomRight));
        case.kv_lens = Some(vec![keys, keys / 2]);
        check_integers(&format!("{heads} heads, {rows} rows, {d}, {dv}"), &case, &mut rng);
    }
}

/// Forks, truncation, kept tokens, eviction and files of integers.
#[test]
fn an_integer_cache_like_any_other() {
    let mut rng = Rng::new(4);
    let mut case = latent(Case::plain(&mut rng, [3, 2, 1, 1, 700, 80, 64]));
    // The third sequence begins as the first does.
    (0..600).for_each(|j| case.k.copy_row([2, 0, j], &case.k.clone(), [0, 0, j]));
    let case = latent(case);
    for (name, integers) in INTEGERS {
        let empty = empty_cache(&case).latent().and_then(integers).expect("an empty cache");
        let mut cache = empty.clone();
        append(&mut cache, &case, 0, 0..700);
        cache.fork(0, 2).expect("sequences");
        cache.truncate(2, 600).expect("it is shorter");
        append(&mut cache, &case, 2, 600..630);
        cache.keep(2, 590, &[3, 20, 39]).expect("it has these");
        let mut fresh = empty.clone();
        append(&mut fresh, &case, 0, 0..700);
        append(&mut fresh, &case, 2, 0..590);
        for token in [593, 610, 629] {
            append(&mut fresh, &case, 2, token..token + 1);
        }
        same_cache(name, &cache, &fresh);
        let mut apart = integers(empty_cache(&case)).expect("an empty cache");
        [0..700, 0..593].into_iter().zip([0, 2]).for_each(|(keys, b)| append_part(&mut apart, &case, b, keys));
        assert!(fresh.bytes() < apart.bytes() * 2 / 3, "{name}: {} of {}", fresh.bytes(), apart.bytes());
        #[cfg(feature = "safetensors")]
        {
            let imported = KvCache::import(&fresh.export().expect("a cache")).expect("its file");
            assert!(imported.is_latent() && imported.format() == fresh.format());
            same_cache(&format!("{name}, imported"), &imported, &fresh);
        }
    }
}

/// Many heads on one key, as models have them; few rows, chunks and prompts.
#[test]
fn many_heads_on_one_key() {
    for (heads, rows, [d, dv]) in [(16, 1, [72, 64]), (128, 1, [96, 80]), (16, 3, [576, 512]), (4, 40, [33, 17])] {
        for precision in [Precision::Exact, Precision::Native] {
            let mut rng = Rng::new(heads as u64);
            let mut case = latent(Case::plain(&mut rng, [2, heads, 1, rows, 520, d, dv]));
            (case.causal, case.alignment, case.precision) = (true, Some(Alignment::BottomRight), precision);
            case.kv_lens = Some(vec![520, 300]);
            check(&format!("{heads} heads, {rows} rows, {d}, {dv}, {precision:?}"), &case, &mut rng);
        }
    }
}

/// Elements that only keys have, and values, that are not finite.
#[test]
fn infinities_and_nan() {
    for (column, x) in [(3, f32::INFINITY), (3, f32::NAN), (30, f32::NEG_INFINITY), (30, f32::NAN)] {
        let mut rng = Rng::new(8);
        let mut case = Case::plain(&mut rng, [1, 4, 1, 5, 300, 40, 24]);
        case.k.set([0, 0, 290, column], x);
        (case.causal, case.alignment) = (true, Some(Alignment::BottomRight));
        check(&format!("{x} in column {column}"), &latent(case), &mut rng);
    }
}

/// Forks, truncation, kept tokens, eviction and files.
#[test]
fn a_cache_like_any_other() {
    let mut rng = Rng::new(4);
    let case = latent(Case::plain(&mut rng, [3, 2, 1, 1, 700, 80, 64]));
    for dtype in DTYPES {
        let mut caches =
            both(&Case { kv_lens: Some(vec![700, 300, 0]), ..case.clone() }, &empty_cache(&case), dtype, &mut rng);
        for (cache, append) in caches.iter_mut().zip([append, append_part]) {
            cache.fork(0, 2).expect("sequences");
            cache.truncate(2, 600).expect("it is shorter");
            append(cache, &case, 2, 0..30);
            cache.keep(2, 590, &[3, 20, 39]).expect("it has these");
            cache.keep(1, 200, &[1, 70, 71]).expect("it has these");
        }
        let [latent, stored] = &caches;
        same_cache(&format!("{dtype:?}"), latent, stored);
        assert!(latent.bytes() < stored.bytes() * 2 / 3, "{} of {} bytes", latent.bytes(), stored.bytes());
        #[cfg(feature = "safetensors")]
        {
            let imported = KvCache::import(&latent.export().expect("a cache")).expect("its file");
            assert!(imported.is_latent());
            same_cache(&format!("{dtype:?}, imported"), &imported, stored);
        }
    }
    // A sliding one evicts blocks that no row sees.
    let last = NonZeroUsize::new(100).expect("some");
    let sliding =
        || KvCache::sliding(3, KvShape { kv_heads: 1, head_dim: 80, value_dim: 64 }, last, 4).expect("good sizes");
    let (mut latent, mut stored) = (sliding().latent().expect("an empty cache"), sliding());
    for keys in [0..400, 400..650, 650..700] {
        append(&mut latent, &case, 1, keys.clone());
        append_part(&mut stored, &case, 1, keys);
    }
    assert!(!latent.evicted(1).expect("a sequence").is_empty());
    same_cache("sliding", &latent, &stored);
}

#[test]
fn a_warm_step_allocates_nothing() {
    let empty = KvCache::new(1, KvShape { kv_heads: 1, head_dim: 40, value_dim: 24 }).and_then(KvCache::latent);
    let empty = empty.expect("a cache");
    a_warm_step_of(empty.clone());
    INTEGERS.into_iter().for_each(|(_, integers)| a_warm_step_of(integers(empty.clone()).expect("an empty cache")));
}

fn a_warm_step_of(mut cache: KvCache) {
    let (rows, q) = (vec![0.5; 300 * 40], vec![0.1; 16 * 40]);
    let k = View::bhld(&rows, [1, 1, 300, 40]).expect("it fits");
    cache.append(k, k.columns(0..24).expect("it has these")).expect("they fit");
    let token = k.rows(0..1).expect("it has one");
    for (isa, exec) in execs() {
        let (mut workspace, mut out) = (Workspace::new(), vec![0.0; 16 * 24]);
        let mut step = || {
            cache.append(token, token.columns(0..24).expect("it has these")).expect("they fit");
            let inputs = Inputs::cached(View::bhld(&q, [1, 16, 1, 40]).expect("it fits"), &cache);
            let outputs = Outputs::new(ViewMut::bhld(&mut out, [1, 16, 1, 24]).expect("it fits"));
            let problem = Attention::new().problem(inputs, outputs).expect("a good call");
            let plan = Plan::new(&problem, exec);
            problem.run(&plan, &mut workspace);
        };
        step();
        assert_eq!(counted(step), (0, 0), "{isa}");
    }
}

#[test]
fn what_is_no_latent_cache_is_refused() {
    let said = |result: Result<KvCache, Error>| result.expect_err("a mistake").to_string();
    let new = |dims: [usize; 2]| {
        KvCache::new(1, KvShape { kv_heads: 1, head_dim: dims[0], value_dim: dims[1] }).expect("good sizes")
    };
    assert_eq!(
        said(new([8, 9]).latent()),
        "latent: value_dim is 9, but must be at most 8, the head_dim of keys: values are their first columns"
    );
    let channels = || KeyScales::PerChannel(vec![0.1; 8]);
    let needs = "latent: needs keys with a scale for each token, not for each channel (KeyScales::PerToken)";
    let bytes = new([8, 8]).int8(channels()).expect("an empty cache");
    assert_eq!(said(bytes.latent()), needs);
    let latent = new([8, 4]).latent().expect("an empty cache");
    assert_eq!(said(latent.int8(channels())), needs);
    let mut cache = new([8, 4]).latent().expect("an empty cache");
    let rows = [0.5; 2 * 8];
    let k = View::bhld(&rows, [1, 1, 2, 8]).expect("it fits");
    let copy = [0.5; 2 * 4];
    let mistakes = [k.columns(4..8).expect("it has these"), View::bhld(&copy, [1, 1, 2, 4]).expect("it fits")];
    for v in mistakes {
        assert_eq!(
            cache.append(k, v).expect_err("a mistake").to_string(),
            "v: needs the first columns of k (View::columns), which are the values of a latent cache"
        );
    }
    assert_eq!(cache.lens(), [0]);
    cache.append(k, k.columns(0..4).expect("it has these")).expect("they fit");
    assert_eq!(said(cache.latent()), "latent: needs an empty cache");
    let reversed = core::ops::Range { start: 5, end: 4 };
    assert!(k.columns(0..9).is_none() && k.columns(reversed).is_none());
    assert_eq!(k.columns(8..8).expect("none of them").shape(), [1, 1, 2, 0]);
}
