//! Rows with all weight on a few keys, where the gradients of scores are differences of large numbers; and keys that are
//! spread over several calls, so that a call's weights do not sum to 1.

use super::support::Back;
use crate::options::Case;
use crate::support::{Rng, Tensor, execs};
use sdpa::{Window, Workspace};

/// The score of the only key does not change the output.
#[test]
fn rows_that_see_one_key_have_gradients_of_zero() {
    let mut rng = Rng::new(1);
    let case = Case { causal: true, ..Case::plain(&mut rng, [1, 12, 12, 150, 150, 64, 64]) };
    let back = Back { d_lse: None, ..Back::of(&mut rng, case) };
    for (isa, exec) in execs() {
        let got = back.run(exec);
        for head in 0..12 {
            let row = (0..64).map(|d| got.q.get([0, head, 0, d]));
            assert!(row.clone().all(|x| x == 0.0), "{isa}, head {head}: {:?}", row.collect::<Vec<_>>());
        }
    }
}

/// As above, where row blocks begin with other key blocks than those of their later rows; with a gradient of the log-sum-exp, that
/// is the score's.
#[test]
fn what_is_known_of_a_row_is_kept_from_key_block_to_key_block() {
    let mut rng = Rng::new(2);
    let window = Some(Window::inclusive(Some(0), Some(0)));
    let case = Case { window, ..Case::plain(&mut rng, [1, 2, 2, 300, 300, 64, 64]) };
    let mut back = Back { d_lse: None, ..Back::of(&mut rng, case) };
    for (isa, exec) in execs() {
        assert!(back.run(exec).q.data.iter().all(|&x| x == 0.0), "{isa}");
    }
    let d_lse = Tensor::normal([1, 2, 300, 1], &mut rng);
    back.d_lse = Some(d_lse.clone());
    for (isa, exec) in execs() {
        let got = back.run(exec).q;
        for [b, h, i, d] in crate::support::indices(got.shape) {
            let expected = d_lse.get([b, h, i, 0]) * back.case.k.get([b, h, i, d]) / 8.0;
            let off = (got.get([b, h, i, d]) - expected).abs();
            assert!(off <= 1e-6 * (1.0 + expected.abs()), "{isa}, row {i}: off by {off:e}");
        }
    }
}

/// Errors of dq in the rows that see up to eight keys, of the fused pass and of the plain passes.
#[test]
fn rows_that_see_a_few_keys_are_as_near_as_in_plain_passes() {
    for (isa, exec) in execs() {
        let (mut fused, mut plain) = (0.0f64, 0.0f64);
        for seed in 0..20 {
            let mut rng = Rng::new(seed);
            let case = Case { causal: true, ..Case::plain(&mut rng, [1, 4, 4, 8, 8, 64, 64]) };
            let back = Back { d_lse: None, ..Back::of(&mut rng, case) };
            let ([(_, exact), ..], [(_, rounded), ..]) = (back.oracle::<f64>(), back.oracle::<f32>());
            let largest = |x: &[f32]| x.iter().zip(&exact).map(|(&x, e)| (f64::from(x) - e).abs()).fold(0.0, f64::max);
            plain += largest(&rounded);
            fused += largest(&back.run(exec).q.data);
        }
        assert!(fused <= plain, "{isa}: {fused:e} fused, {plain:e} in plain passes");
    }
}

/// Gradients of a call over a part of the keys, with what was saved of all of them: parts add up.
#[test]
fn keys_may_be_spread_over_calls() {
    let parts = [(1, 0.0, 1.0), (2, 2.0, 1.0), (3, 14.0, 1e5), (4, 16.0, 1e3), (5, 16.0, 1.0)];
    for ((seed, far, large), with_d_lse) in parts.into_iter().flat_map(|part| [(part, false), (part, true)]) {
        let mut rng = Rng::new(seed);
        let mut case = Case::plain(&mut rng, [1, 2, 2, 70, 120, 16, 16]);
        // Keys of the second part have scores lower by `far`, and values larger by a factor.
        for [b, h, l] in (0..2).flat_map(|h| (0..120).map(move |l| [0, h, l])) {
            if l < 70 {
                case.q.set([b, h, l, 0], 1.0);
            }
            case.k.set([b, h, l, 0], if l < 60 { 0.0 } else { -far * 4.0 });
            for d in 0..if l < 60 { 0 } else { 16 } {
                let x = case.v.get([b, h, l, d]);
                case.v.set([b, h, l, d], x * large);
            }
        }
        let d_lse = with_d_lse.then(|| Tensor::normal([1, 2, 70, 1], &mut rng));
        let back = Back { d_lse, ..Back::of(&mut rng, case) };
        let [(_, exact_q), (_, exact_k), (_, exact_v), ..] = back.oracle::<f64>();
        for (isa, exec) in execs() {
            let [out, lse] = back.forward(exec);
            let parts = [0..60, 60..120].map(|keys| {
                let part = |x: &Tensor| x.part(0..1, 0..2, keys.clone());
                let case = Case { k: part(&back.case.k), v: part(&back.case.v), ..back.case.clone() };
                let part = Back { case, ..back.clone() };
                let mut full = part.unwritten();
                part.run_into(exec, [&out, &lse], &mut full, &mut Workspace::new());
                full
            });
            let sum = |at: usize| parts[0].q.data[at] + parts[1].q.data[at];
            let q: Vec<f32> = (0..exact_q.len()).map(sum).collect();
            let joined = |of: fn(&super::support::Full) -> &Tensor| -> Vec<f32> {
                let rows = |h: usize| parts.each_ref().map(|part| of(part).data[h * 960..][..960].to_vec()).concat();
                [rows(0), rows(1)].concat()
            };
            let all = [(q, &exact_q), (joined(|full| &full.k), &exact_k), (joined(|full| &full.v), &exact_v)];
            for (name, (got, exact)) in ["q", "k", "v"].into_iter().zip(all) {
                // Keys of either part by the size of their own gradients; what cancels is rounding of the output's size.
                for (got, exact) in got.chunks(960).zip(exact.chunks(960)) {
                    let size = exact.iter().fold(0.0f64, |size, x| size.max(x.abs()));
                    for (got, exact) in got.iter().zip(exact) {
                        let off = (f64::from(*got) - exact).abs();
                        assert!(off < 3e-6 * size, "seed {seed}, {isa}: gradient in {name} {got}, expected {exact}");
                    }
                }
            }
        }
    }
}

/// Nothing flows back into the output here, and log-sum-exps near 30 are rounded by up to a millionth: what that makes of weights
/// is taken out of gradients all the same.
#[test]
fn gradients_of_a_rows_scores_add_up_to_that_of_its_log_sum_exp() {
    let mut rng = Rng::new(3);
    let bias = Tensor::from_fn([1, 1, 400, 1], |_| 29.0 + rng.normal());
    let case = Case { bias: Some(bias.into()), ..Case::plain(&mut rng, [1, 1, 1, 400, 3, 64, 16]) };
    let d_lse = Tensor::normal([1, 1, 400, 1], &mut rng);
    let back =
        Back { d_out: Tensor::filled([1, 1, 400, 16], 0.0), d_lse: Some(d_lse.clone()), ..Back::of(&mut rng, case) };
    for (isa, exec) in execs() {
        let got = back.run(exec).bias;
        for (row, (sum, expected)) in got.data.iter().zip(&d_lse.data).enumerate() {
            let off = (sum - expected).abs() / expected.abs();
            assert!(off < 4e-7, "{isa}, row {row}: {sum}, expected {expected}: off by {off:e} of it");
        }
    }
}
