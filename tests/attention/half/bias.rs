//! Biases of 16 bits: the bits of an `f32` bias of the same numbers.

use super::short::{SHORT, rounded};
use crate::kv_support::{Pool, cache_of, same_full, same_oracle};
use crate::options::elements::Rounded;
use crate::options::{Case, Wanted};
use crate::support::{LAYOUTS, Rng, Tensor, execs, indices};
use sdpa::{Alignment, Dtype, Exec, Inputs, KeyScales, KvCache, KvShape};

/// Around tiles, panels and blocks: few rows, many rows, several heads on one.
const SIZES: [[usize; 7]; 8] = [
    [1, 1, 1, 1, 1, 1, 1],
    [2, 2, 1, 5, 15, 16, 16],
    [1, 2, 2, 6, 16, 8, 17],
    [2, 4, 2, 1, 17, 20, 33],
    [1, 3, 1, 7, 255, 16, 8],
    [1, 4, 2, 97, 256, 17, 16],
    [2, 2, 1, 1, 257, 64, 48],
    [1, 2, 1, 17, 530, 33, 24],
];

/// Numbers of every kind: zeros of both signs, subnormal in either type, largest, infinite, NaN.
const KINDS: [f32; 14] = [
    0.0,
    -0.0,
    6e-8,
    -6.1e-5,
    1e-40,
    -1e-39,
    65504.0,
    -65504.0,
    3.3e38,
    f32::MIN,
    f32::INFINITY,
    f32::NEG_INFINITY,
    f32::NAN,
    f32::from_bits(0xffc1_2345),
];

/// A case with this bias in a type, and with the numbers of that type as `f32`.
fn both(case: &Case, bias: &Tensor, dtype: Dtype) -> [Case; 2] {
    let short = Rounded::new(bias, dtype);
    let wide = Rounded::from(short.wide.clone());
    [short, wide].map(|bias| Case { bias: Some(bias), ..case.clone() })
}

/// Every instruction set, all outputs, and the oracle too.
fn check(what: &str, case: &Case, bias: &Tensor) {
    for dtype in SHORT {
        let [short, wide] = both(case, bias, dtype);
        let what = format!("{what}, {dtype}");
        for (isa, exec) in execs() {
            for wanted in [Wanted::LEAST, Wanted::ALL] {
                let expected = wide.run(exec, wanted);
                for exec in [exec, exec.threads(64)] {
                    same_full(&format!("{what}, {isa}"), &short.run(exec, wanted), &expected);
                }
            }
        }
        same_oracle(&what, &short.oracle(), &wide.oracle());
    }
}

#[test]
fn every_shape_in_every_layout() {
    for (n, sizes) in SIZES.into_iter().enumerate() {
        let [batch, heads, _, rows, keys, ..] = sizes;
        let mut rng = Rng::new(n as u64);
        let case = Case::plain(&mut rng, sizes);
        for (i, layout) in LAYOUTS.into_iter().enumerate() {
            // Whole, one for all rows, one for all heads, one column.
            let shape = match i % 4 {
                0 => [batch, heads, rows, keys],
                1 => [1, heads, 1, keys],
                2 => [batch, 1, rows, keys],
                _ => [batch, heads, rows, 1],
            };
            check(
                &format!("{sizes:?}, {shape:?}, {layout:?}"),
                &case,
                &Tensor::normal(shape, &mut rng).laid_out(layout),
            );
        }
    }
}

/// Keys behind the last column are hidden, wherever in a panel that is.
#[test]
fn fewer_columns_than_keys() {
    let mut rng = Rng::new(11);
    let case = Case::plain(&mut rng, [1, 2, 1, 9, 280, 16, 16]);
    for columns in [0, 2, 15, 16, 17, 31, 33, 255, 256, 257, 279] {
        check(&format!("{columns} columns"), &case, &Tensor::normal([1, 2, 9, columns], &mut rng));
    }
}

#[test]
fn numbers_of_every_kind() {
    for (n, sizes) in SIZES.into_iter().enumerate() {
        let [batch, heads, _, rows, keys, ..] = sizes;
        for one_in in [2, 40] {
            let mut rng = Rng::new(30 + n as u64);
            let case = Case { softcap: Some(3.0), ..Case::plain(&mut rng, sizes) };
            let shape = [batch, heads, rows, keys];
            let bias =
                Tensor::from_fn(shape, |_| if rng.below(one_in) == 0 { rng.pick(&KINDS) } else { 9.0 * rng.normal() });
            check(&format!("{sizes:?}, one in {one_in}"), &case, &bias.laid_out(LAYOUTS[n % LAYOUTS.len()]));
        }
    }
}

/// −∞ of 16 bits hides a key whatever its score is, NaN and +∞ too; a NaN passes through to the rows that see it.
#[test]
fn infinity_hides_and_nan_shows() {
    for dtype in SHORT {
        let mut rng = Rng::new(5);
        let mut case = Case::plain(&mut rng, [1, 1, 1, 4, 40, 8, 8]);
        case.k.fill_row(7, f32::NAN);
        case.v.fill_row(7, f32::INFINITY);
        let hiding = |[.., i, j]: [usize; 4]| match (i, j) {
            (_, 7) => f32::NEG_INFINITY,
            (2, 20) => f32::NAN,
            _ => 0.5,
        };
        case.bias = Some(Rounded::new(&Tensor::from_fn([1, 1, 4, 40], hiding), dtype));
        for (isa, exec) in execs() {
            let full = case.run(exec, Wanted::ALL);
            for [_, _, i, d] in indices(full.out.shape) {
                assert_eq!(full.out.get([0, 0, i, d]).is_nan(), i == 2, "{dtype}, {isa}: row {i}");
            }
            let weights = full.points[3].as_ref().expect("asked for");
            for i in 0..4 {
                assert_eq!(weights.get([0, 0, i, 7]).to_bits(), 0, "{dtype}, {isa}: row {i}");
            }
        }
    }
}

/// What hides a key in `f32` and is a number there hides nothing in 16 bits, unless it is rounded to −∞.
#[test]
fn large_numbers_hide_only_if_they_round_to_infinity() {
    assert_eq!([1e9, -1e9].map(|x| rounded(x, Dtype::F16)), [f32::INFINITY, f32::NEG_INFINITY]);
    assert!(rounded(-1e9, Dtype::Bf16).is_finite() && rounded(f32::MIN, Dtype::Bf16) == f32::NEG_INFINITY);
    let mut case = Case::plain(&mut Rng::new(6), [1, 1, 1, 2, 20, 8, 8]);
    let padding = Tensor::filled([1, 1, 1, 20], -1e9);
    for (dtype, hidden) in [(Dtype::Bf16, false), (Dtype::F16, true)] {
        case.bias = Some(Rounded::new(&padding, dtype));
        let full = case.run(Exec::serial(), Wanted::LEAST);
        assert!(full.lse.data.iter().all(|&x| (x == f32::NEG_INFINITY) == hidden), "{dtype}");
        assert!(full.out.data.iter().all(|&x| (x == 0.0) == hidden), "{dtype}");
    }
}

/// Pages, caches of every type, prompts and single rows.
#[test]
fn over_pages_and_caches() {
    let rows = [1, 6, 40];
    for (n, (rows, keys)) in rows.into_iter().flat_map(|rows| [16, 257, 300].map(|keys| (rows, keys))).enumerate() {
        let mut rng = Rng::new(100 + n as u64);
        let mut case = Case::plain(&mut rng, [2, 4, 2, rows, keys, 32, 16]);
        case.kv_lens = Some(vec![keys, keys - 5]);
        (case.causal, case.alignment) = (true, Some(Alignment::BottomRight));
        let bias = Tensor::normal([2, 4, rows, keys], &mut rng).laid_out(rng.pick(&LAYOUTS));
        let pool = Pool::of(&case, 16, [LAYOUTS[0]; 2], f32::NAN, &mut rng);
        let new = || KvCache::new(2, KvShape { kv_heads: 2, head_dim: 32, value_dim: 16 }).expect("good sizes");
        let mut caches = vec![cache_of(&case, &mut rng)];
        for mut cache in [
            new().dtype(Dtype::Bf16).unwrap(),
            new().dtype(Dtype::F16).unwrap(),
            new().int8(KeyScales::PerToken).unwrap(),
        ] {
            for b in 0..2 {
                crate::kv_support::append_part(&mut cache, &case, b, 0..case.kv_len(b));
            }
            caches.push(cache);
        }
        for dtype in SHORT {
            let [short, wide] = both(&case, &bias, dtype);
            for (isa, exec) in execs() {
                let what = format!("{rows} rows, {keys} keys, {dtype}, {isa}");
                let sources = caches.iter().map(|cache| Inputs::cached(case.q.view(), cache));
                for source in sources.chain([Inputs::paged(case.q.view(), pool.pages())]) {
                    let expected = wide.run_over(source, exec, Wanted::ALL);
                    same_full(&what, &short.run_over(source, exec, Wanted::ALL), &expected);
                    same_full(&what, &short.run_over(source, exec.threads(64), Wanted::ALL), &expected);
                }
            }
        }
    }
}
