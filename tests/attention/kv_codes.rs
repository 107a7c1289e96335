//! Caches of E4M3 codes: the bits of widening first, NaN and all; bytes of other engines.

use crate::kv_support::same_full;
use crate::options::{Case, Wanted};
use crate::support::{Rng, Tensor, execs, fewer, indices};
use sdpa::{
    Bf16, BlockTable, CacheFormat, Dtype, Error, Inputs, KvCache, KvFormat, KvShape, PagePool, View, widen_e4m3,
    widen_latent_e4m3, widen_latent_page,
};

fn number(code: u8) -> f32 {
    let mut wide = [Bf16::default()];
    widen_e4m3(&[code], &mut wide).expect("one of one");
    wide[0].to_f32()
}

/// Codes of a tensor's shape, and what they stand for.
fn codes(shape: [usize; 4], rng: &mut Rng, nan: bool) -> (Vec<u8>, Tensor) {
    let n = shape.iter().product();
    let code = |rng: &mut Rng| {
        let code = rng.below(256) as u8;
        if code & 0x7f == 0x7f && !(nan && rng.below(40) == 0) { 0x30 } else { code }
    };
    let codes: Vec<u8> = (0..n).map(|_| code(rng)).collect();
    let mut all = codes.iter().map(|&code| number(code));
    let tensor = Tensor::from_fn(shape, |_| all.next().expect("as many"));
    (codes, tensor)
}

/// With scales of 1, a cache of codes gives the bits of a cache of the numbers, whatever the options; powers of two as scales change
/// exponents alone.
#[test]
fn codes_have_the_bits_of_the_numbers_they_stand_for() {
    for seed in 0..fewer(120) {
        let mut rng = Rng::new(seed);
        let mut case = Case::random(&mut rng, 300_000).side_by_side();
        let ([batch, heads, keys, d], dv) = (case.k.shape, case.v.shape[3]);
        let nan = rng.below(4) == 0;
        let (k_codes, k) = codes([batch, heads, keys, d], &mut rng, nan);
        let (v_codes, v) = codes([batch, heads, keys, dv], &mut rng, nan);
        (case.k, case.v) = (k.clone(), v.clone());
        case.scale = Some(case.scale.unwrap_or(1.0) / 64.0);
        let shape = KvShape { kv_heads: heads, head_dim: d, value_dim: dv };
        let ones = vec![1.0; heads];
        let format = KvFormat::from(CacheFormat::E4m3PerHead(&ones));
        let mut cache = KvCache::new(batch, shape).and_then(|cache| cache.with_format(format)).expect("good sizes");
        let mut floats = KvCache::new(batch, shape).and_then(|cache| cache.dtype(Dtype::Bf16)).expect("good sizes");
        for b in 0..batch {
            let n = case.kv_len(b);
            let part = |codes: &[u8], x: &Tensor| {
                let dim = x.shape[3];
                let rows = (0..heads).flat_map(|h| (0..n).map(move |j| ((b * heads + h) * keys + j) * dim));
                rows.flat_map(|at| codes[at..at + dim].to_vec()).collect::<Vec<_>>()
            };
            let (k_codes, v_codes) = (part(&k_codes, &k), part(&v_codes, &v));
            let view = |x, dim| View::bhld(x, [1, heads, n, dim]).expect("dense");
            cache.append_codes(b, view(&k_codes, d), view(&v_codes, dv)).expect("they fit");
            let [k, v] = [&k, &v].map(|x| x.part(b..b + 1, 0..heads, 0..n));
            floats.append_to(b, k.view(), v.view()).expect("they fit");
        }
        for (isa, exec) in execs() {
            let wanted = Wanted { points: [true, false, true, false], mass: seed % 3 == 0 };
            let [got, expected] =
                [&cache, &floats].map(|cache| case.run_over(Inputs::cached(case.q.view(), cache), exec, wanted));
            same_full(&format!("seed {seed}, {isa}"), &got, &expected);
        }
    }
}

/// A pool of codes has the bits of a cache of them, with a scale for each row too.
#[test]
fn pools_of_codes_are_caches_of_codes() {
    let mut rng = Rng::new(3);
    let some = Case::plain(&mut rng, [1, 4, 2, 9, 300, 40, 33]);
    let scales = [0.01, 0.03];
    for format in [CacheFormat::E4m3PerToken, CacheFormat::E4m3PerHead(&scales)] {
        let shape = KvShape { kv_heads: 2, head_dim: 40, value_dim: 33 };
        let mut cache = KvCache::new(1, shape).and_then(|cache| cache.with_format(format)).expect("good sizes");
        let mut pool = PagePool::new(7, 48, shape, format).expect("good sizes");
        let entries = [6, 0, 5, 1, 4, 2, 3];
        cache.append(some.k.view(), some.v.view()).expect("they fit");
        for end in [1, 2, 100, 300] {
            let first = [0, 1, 2, 100][[1, 2, 100, 300].iter().position(|&x| x == end).expect("one of these")];
            let [k, v] = [&some.k, &some.v].map(|x| x.rows(first..end));
            pool.append(BlockTable { entries: &entries, lens: &[end] }, k.view(), v.view()).expect("they fit");
        }
        let pages = pool.pages(BlockTable { entries: &entries, lens: &[300] }).expect("a good table");
        let held = Inputs::cached(some.q.view(), &cache).key_values().expect("a cache");
        for at @ [_, _, j, d] in indices([1, 2, 300, 40]) {
            let (got, expected) = (held.key(at).expect("a key"), some.k.get(at));
            assert!((got - expected).abs() <= expected.abs() / 15.0 + 0.01, "key {j}, {d}: {got}, not {expected}");
        }
        for (isa, exec) in execs() {
            let expected = some.run_over(Inputs::cached(some.q.view(), &cache), exec, Wanted::ALL);
            let got = some.run_over(Inputs::paged(some.q.view(), pages), exec, Wanted::ALL);
            same_full(&format!("{isa}, {format:?}"), &got, &expected);
        }
    }
}

/// Codes in a pool are those in a cache.
#[test]
fn pools_take_codes_as_they_are() {
    let mut rng = Rng::new(4);
    let shape = KvShape { kv_heads: 2, head_dim: 24, value_dim: 17 };
    let scales = [0.5, 3.0];
    let format = CacheFormat::E4m3PerHead(&scales);
    let [(k, wide), (v, _)] = [24, 17].map(|dim| codes([1, 2, 20, dim], &mut rng, true));
    let [k, v] = [(&k, 24), (&v, 17)].map(|(x, dim)| View::bhld(x, [1, 2, 20, dim]).expect("dense"));
    let mut cache = KvCache::new(1, shape).and_then(|cache| cache.with_format(format)).expect("good sizes");
    let mut pool = PagePool::new(3, 16, shape, format).expect("good sizes");
    cache.append_codes(0, k, v).expect("they fit");
    let table = BlockTable { entries: &[2, 0], lens: &[20] };
    pool.append_codes(table, k, v).expect("they fit");
    let q = Tensor::normal([1, 2, 1, 24], &mut rng);
    let pages = Inputs::paged(q.view(), pool.pages(table).expect("a good table")).key_values().expect("pages");
    let held = Inputs::cached(q.view(), &cache).key_values().expect("a cache");
    for at @ [_, h, _, d] in indices([1, 2, 20, 24]) {
        let [got, other] = [pages.key(at), held.key(at)].map(|x| x.expect("a key").to_bits());
        assert_eq!(got, other);
        let expected = wide.get(at) * scales[h];
        assert!(f32::from_bits(got) == expected || expected.is_nan() && f32::from_bits(got).is_nan(), "{at:?}");
        let place = [0, h, at[2], d.min(16)];
        assert_eq!(pages.value(place).map(f32::to_bits), held.value(place).map(f32::to_bits));
    }
    let mut floats = PagePool::new(3, 16, shape, CacheFormat::Elements(Dtype::F32)).expect("good sizes");
    assert!(matches!(floats.append_codes(table, k, v), Err(Error::Needs { argument: "format", .. })));
}

/// A latent token of 656 bytes: codes, four scales, then bfloat16.
#[test]
fn latent_tokens_of_other_engines_are_read() {
    let mut token = vec![0x38; 512]; // 1.0
    token[511] = 0x7f;
    [1.0f32, 2.0, 0.5, -4.0].iter().for_each(|scale| token.extend_from_slice(&scale.to_le_bytes()));
    (0..64u16).for_each(|i| token.extend_from_slice(&(0x3f80 + i).to_le_bytes()));
    let mut row = [0.0; 576];
    widen_latent_e4m3(&token, &mut row).expect("656 bytes");
    assert_eq!([row[0], row[127], row[128], row[300], row[510]], [1.0, 1.0, 2.0, 0.5, -4.0]);
    assert!(row[511].is_nan());
    assert_eq!([row[512], row[513]], [1.0, f32::from_bits(0x3f81_0000)]);
    let refused = widen_latent_e4m3(&token[1..], &mut row).expect_err("a byte less").to_string();
    assert_eq!(refused, "tokens: length is 655, but the rows (656 bytes for 576 elements) has 656");
    assert!(widen_latent_e4m3(&token, &mut row[1..]).is_err());
}

/// Two tokens of DeepSeek V4: scales lie behind both, and are powers of two with the smallest and NaN as the specification has them.
#[test]
fn a_page_of_latent_tokens_is_read_as_other_engines_store_it() {
    let mut page = vec![0x38; 2 * 448];
    page.splice(448..448, [0; 128]);
    page.extend([0; 128]);
    page[576..][..3].copy_from_slice(&[0x7f, 0x01, 0xc0]);
    page[576 + 448..][..4].copy_from_slice(&[0x80, 0x3f, 0x81, 0x3f]);
    page.extend([127, 128, 126, 127, 127, 127, 0, 99]);
    page.extend([127, 255, 254, 1, 127, 127, 127, 99]);
    let mut rows = vec![9.0; 2 * 512];
    widen_latent_page(&page, &mut rows).expect("two tokens");
    let (first, second) = rows.split_at(512);
    assert_eq!([first[0], first[63], first[64], first[128], first[447]], [1.0, 1.0, 2.0, 0.5, 2f32.powi(-127)]);
    assert!(first[448..].iter().all(|&x| x == 0.0));
    assert!(second[0].is_nan() && second[64..128].iter().all(|x| x.is_nan()));
    assert_eq!([second[1], second[2], second[3]], [2f32.powi(-9), -2.0, 1.0]);
    assert_eq!([second[128], second[192], second[256]], [2f32.powi(127), 2f32.powi(-126), 1.0]);
    assert_eq!([second[448], second[449]], [1.0, f32::from_bits(0x3f81_0000)]);
    let refused = widen_latent_page(&page[1..], &mut rows).expect_err("a byte less").to_string();
    assert_eq!(refused, "page: length is 1167, but the rows (584 bytes for 512 elements) has 1168");
    let refused = widen_latent_page(&page, &mut [0.0; 1025]).expect_err("a number more").to_string();
    assert_eq!(refused, "rows: length is 1025, but the page (512 elements for 584 bytes) has 1024");
}

#[test]
fn what_codes_do_not_fit_is_refused() {
    let shape = KvShape { kv_heads: 2, head_dim: 16, value_dim: 16 };
    let new = || KvCache::new(1, shape).expect("good sizes");
    let said = |cache: Result<KvCache, Error>| cache.expect_err("it does not fit").to_string();
    assert_eq!(
        said(new().with_format(CacheFormat::E4m3PerHead(&[1.0]))),
        "key scales: length is 1, but the key/value heads has 2"
    );
    let wrong = [1.0, 0.0];
    assert!(said(new().with_format(CacheFormat::E4m3PerHead(&wrong))).starts_with("key scales: "));
    for scale in [1e-40, 1e37] {
        let error = said(new().with_format(CacheFormat::E4m3PerHead(&[1.0, scale])));
        assert!(error.ends_with("one with which every code is a finite f32"), "{error}");
    }
    let e4m3 = KvFormat::from(CacheFormat::E4m3PerToken);
    assert_eq!(said(new().with_format(e4m3.exact_first(1))), "exact_first: needs integer keys or values");
    assert_eq!(said(new().latent().and_then(|cache| cache.with_format(e4m3))), "latent: needs floats or integers");
    let codes = [0x38; 2 * 16];
    let codes = View::bhld(&codes, [1, 2, 1, 16]).expect("dense");
    let error = new().append_codes(0, codes, codes).expect_err("floats").to_string();
    assert_eq!(error, "format: needs E4m3PerHead, for keys and values");
    let scales = [1.0; 2];
    let mut cache = new().with_format(CacheFormat::E4m3PerHead(&scales)).expect("an empty cache");
    let narrow = View::bhld(&[0x38; 30], [1, 2, 1, 15]).expect("dense");
    assert!(matches!(cache.append_codes(0, narrow, codes), Err(Error::Mismatch { argument: "k", .. })));
    assert!(cache.append_codes(1, codes, codes).is_err());
    let huge = View::from_strides(&[0x38], 0, [1, 2, 1 << 44, 16], [0; 4]).expect("broadcast");
    assert!(matches!(cache.append_codes(1, huge, huge), Err(Error::Sequence { .. })));
    assert!(matches!(cache.append_codes(0, huge, huge), Err(Error::Memory { .. })));
    assert_eq!(cache.lens(), [0]);
}
