//! Identities that hold up to rounding, for any numbers.

use crate::support::{Answer, Rng, Sizes, Tensor, Tensors, assert_close, assert_same, execs, indices, largest, run};
use proptest::prelude::*;
use proptest::test_runner::RngSeed;
use sdpa::{Alignment, Attention, Isa};

const EPS: f64 = f32::EPSILON as f64;

/// Sizes with boundaries of tiles, panels and blocks preferred.
fn sizes() -> impl Strategy<Value = Sizes> {
    let length = || prop_oneof![1..40usize, prop::sample::select(vec![1, 6, 7, 15, 16, 17, 63, 65, 97]), 255..259usize];
    let dim = || prop_oneof![1..40usize, prop::sample::select(vec![1, 15, 16, 17, 32, 64, 65])];
    (1..3usize, 1..3usize, 1..4usize, length(), length(), dim(), dim())
        .prop_map(|(b, hkv, sharing, lq, lk, d, dv)| [b, hkv * sharing, hkv, lq, lk, d, dv])
}

fn config(cases: u32) -> ProptestConfig {
    ProptestConfig {
        cases,
        failure_persistence: None,
        rng_seed: RngSeed::Fixed(20_261_121),
        ..ProptestConfig::default()
    }
}

fn as_f64(x: &Tensor) -> Vec<f64> {
    x.data.iter().map(|&x| x as f64).collect()
}

fn same_within(what: &str, got: &Answer, expected: &Answer, out: f64, lse: f64) {
    assert_close(&format!("{what}: out"), &got.out, &as_f64(&expected.out), out);
    assert_close(&format!("{what}: lse"), &got.lse, &as_f64(&expected.lse), lse);
}

proptest! {
    #![proptest_config(config(150))]

    #[test]
    fn weights_sum_to_one(sizes in sizes(), seed: u64, causal: bool) {
        let mut tensors = Tensors::normal(sizes, seed);
        tensors.v.data.fill(1.0);
        let attention = if causal { Attention::new().causal().align(Alignment::Offset(0)) } else { Attention::new() };
        for (isa, exec) in execs() {
            let got = run(&attention, &tensors, exec);
            // The same weights are summed twice: in one chain of 256 and in 16 lanes. The chain's rounding errors walk at
            // random, so that its 256 steps of up to half an EPS come to √256 / 2 at one standard deviation of the worst.
            assert_close(&format!("{isa}"), &got.out, &vec![1.0; got.out.data.len()], 16.0 * EPS);
        }
    }

    #[test]
    fn a_shift_of_every_score_shows_only_in_the_lse(sizes in sizes(), seed: u64) {
        let mut tensors = Tensors::normal(sizes, seed);
        let d = sizes[5];
        // The first dimension of queries is 1, so what is added to that of keys is added to every score.
        for [b, h, l, _] in indices([sizes[0], sizes[1], sizes[3], 1]) {
            tensors.q.set([b, h, l, 0], 1.0);
        }
        let mut shifted = tensors.clone();
        for key in shifted.k.data.chunks_mut(d) {
            key[0] += 4.0;
        }
        for (isa, exec) in execs() {
            let attention = Attention::new().scale(0.5);
            let mut expected = run(&attention, &tensors, exec);
            expected.lse.data.iter_mut().for_each(|x| *x += 2.0);
            let got = run(&attention, &shifted, exec);
            // Rounding of scores up to some 0.5·D in size.
            let bound = (64.0 + d as f64) * EPS;
            same_within(&format!("{isa}"), &got, &expected, bound * largest(&tensors.v.data), bound);
        }
    }

    #[test]
    fn the_order_of_keys_shows_only_in_rounding(sizes in sizes(), seed: u64) {
        let tensors = Tensors::normal(sizes, seed);
        let keys = sizes[4];
        let mut order: Vec<usize> = (0..keys).collect();
        let mut rng = Rng::new(seed);
        for n in (1..keys).rev() {
            order.swap(n, rng.below(n + 1));
        }
        let shuffled = |x: &Tensor| Tensor::from_fn(x.shape, |[b, h, l, d]| x.get([b, h, order[l], d]));
        let moved = Tensors { q: tensors.q.clone(), k: shuffled(&tensors.k), v: shuffled(&tensors.v) };
        for (isa, exec) in execs() {
            let (got, expected) = (run(&Attention::new(), &moved, exec), run(&Attention::new(), &tensors, exec));
            // Scores are the same bits; only sums of weights and of products run in another order.
            same_within(&format!("{isa}"), &got, &expected, 8.0 * EPS * largest(&tensors.v.data), 8.0 * EPS * 10.0);
        }
    }

    #[test]
    fn a_causal_prefix_is_the_call_on_the_prefix(sizes in sizes(), seed: u64, cut in 0.0..1.0f64) {
        let [b, h, hkv, n, _, d, dv] = sizes;
        let tensors = Tensors::normal([b, h, hkv, n, n, d, dv], seed);
        let first = 1 + (cut * (n - 1) as f64) as usize;
        let prefix = Tensors {
            q: tensors.q.rows(0..first),
            k: tensors.k.rows(0..first),
            v: tensors.v.rows(0..first),
        };
        for (isa, exec) in execs() {
            let attention = Attention::new().causal();
            let whole = run(&attention, &tensors, exec);
            assert_same(&format!("{isa}, {first} rows"), &run(&attention, &prefix, exec), &whole.rows(0..first));
        }
    }

    #[test]
    fn keys_past_the_last_row_are_as_good_as_absent(sizes in sizes(), seed: u64, more in 1..300usize) {
        let [b, h, hkv, n, _, d, dv] = sizes;
        let tensors = Tensors::normal([b, h, hkv, n, n + more, d, dv], seed);
        let short = Tensors { q: tensors.q.clone(), k: tensors.k.rows(0..n), v: tensors.v.rows(0..n) };
        for (isa, exec) in execs() {
            let whole = run(&Attention::new().causal().align(Alignment::TopLeft), &tensors, exec);
            assert_same(&format!("{isa}"), &run(&Attention::new().causal(), &short, exec), &whole);
        }
    }

    #[test]
    fn causal_that_hides_nothing_is_no_rule(sizes in sizes(), seed: u64) {
        let tensors = Tensors::normal(sizes, seed);
        for far in [sizes[4] as isize, isize::MAX] {
            let attention = Attention::new().causal().align(Alignment::Offset(far));
            for (isa, exec) in execs() {
                let what = format!("{isa}, offset {far}");
                assert_same(&what, &run(&attention, &tensors, exec), &run(&Attention::new(), &tensors, exec));
            }
        }
    }

    #[test]
    fn rows_that_see_nothing_are_zero(sizes in sizes(), seed: u64, hidden in 1..300isize) {
        let tensors = Tensors::normal(sizes, seed);
        for offset in [-hidden, isize::MIN] {
            let attention = Attention::new().causal().align(Alignment::Offset(offset));
            for (isa, exec) in execs() {
                let got = run(&attention, &tensors, exec);
                let empty = sizes[3].min(offset.unsigned_abs());
                assert_nothing(&format!("{isa}, offset {offset}"), &got.rows(0..empty));
                prop_assert!(got.lse.rows(empty..sizes[3]).data.iter().all(|x| x.is_finite()));
            }
        }
    }

    #[test]
    fn one_key_is_copied(sizes in sizes(), seed: u64) {
        let [b, h, hkv, lq, _, d, dv] = sizes;
        let tensors = Tensors::normal([b, h, hkv, lq, 1, d, dv], seed);
        let expected = Tensor::from_fn([b, h, lq, dv], |[b, g, _, c]| tensors.v.get([b, g / (h / hkv), 0, c]));
        for (isa, exec) in execs() {
            let got = run(&Attention::new(), &tensors, exec);
            crate::support::assert_same_bits(&format!("{isa}"), &got.out, &expected);
        }
    }

    #[test]
    fn scale_zero_is_the_mean(sizes in sizes(), seed: u64) {
        let [b, h, hkv, lq, lk, _, dv] = sizes;
        let tensors = Tensors::normal(sizes, seed);
        let mean = indices([b, h, lq, dv]).map(|[b, g, _, c]| {
            (0..lk).map(|j| tensors.v.get([b, g / (h / hkv), j, c]) as f64).sum::<f64>() / lk as f64
        });
        let mean: Vec<f64> = mean.collect();
        let lse = vec![(lk as f64).ln(); b * h * lq];
        for (isa, exec) in execs() {
            for scale in [0.0, -0.0] {
                let got = run(&Attention::new().scale(scale), &tensors, exec);
                assert_close(&format!("{isa} {scale}: out"), &got.out, &mean, 4.0 * EPS * largest(&tensors.v.data));
                assert_close(&format!("{isa} {scale}: lse"), &got.lse, &lse, EPS * (1.0 + lse[0]));
            }
        }
    }

    #[test]
    fn a_negative_scale_is_negative_queries(sizes in sizes(), seed: u64, scale in 0.01..2.0f32) {
        let tensors = Tensors::normal(sizes, seed);
        let mut negative = tensors.clone();
        negative.q.data.iter_mut().for_each(|x| *x = -*x);
        for (isa, exec) in execs() {
            let got = run(&Attention::new().scale(-scale), &tensors, exec);
            assert_same(&format!("{isa}"), &got, &run(&Attention::new().scale(scale), &negative, exec));
        }
    }
}

#[track_caller]
fn assert_nothing(what: &str, got: &Answer) {
    assert!(got.out.data.iter().all(|x| x.to_bits() == 0), "{what}: out is not +0 all over");
    assert!(got.lse.data.iter().all(|&x| x == f32::NEG_INFINITY), "{what}: lse is not −∞ all over");
}

#[test]
fn no_keys_give_zero() {
    for (isa, exec) in execs() {
        for sizes in [[1, 1, 1, 1, 0, 1, 1], [2, 6, 2, 100, 0, 20, 33]] {
            for attention in [Attention::new(), Attention::new().causal().align(Alignment::BottomRight)] {
                assert_nothing(&format!("{isa} {sizes:?}"), &run(&attention, &Tensors::normal(sizes, 0), exec));
            }
        }
    }
}

#[test]
fn no_rows_batches_or_heads_write_nothing() {
    for (isa, exec) in execs() {
        for sizes in
            [[2, 2, 1, 0, 5, 4, 4], [0, 2, 1, 3, 5, 4, 4], [2, 0, 1, 3, 5, 4, 4], [2, 0, 0, 3, 5, 4, 4], [0; 7]]
        {
            let sizes = if sizes == [0; 7] { [0, 0, 0, 0, 0, 1, 1] } else { sizes };
            for attention in [Attention::new(), Attention::new().causal().align(Alignment::BottomRight)] {
                let got = run(&attention, &Tensors::normal(sizes, 0), exec);
                assert!(got.out.data.is_empty() && got.lse.data.is_empty(), "{isa} {sizes:?}");
            }
        }
    }
}

#[test]
fn large_scores_do_not_overflow() {
    // Scores of ±10⁴, far past where exp itself would: one key takes all the weight.
    for isa in Isa::available() {
        let mut tensors = Tensors::normal([1, 1, 1, 20, 300, 8, 16], 1);
        tensors.q.data.iter_mut().for_each(|x| *x *= 1e4);
        let expected = sdpa::naive::oracle(&Attention::new(), &tensors.inputs()).unwrap();
        let got = run(&Attention::new(), &tensors, sdpa::Exec::serial().isa(isa));
        // Scores are rounded to 2⁻¹⁰ or so, and weights with them.
        assert_close(&format!("{isa}: out"), &got.out, &expected.out, 4e-2);
        assert_close(&format!("{isa}: lse"), &got.lse, &expected.lse, 4e-2);
    }
}
