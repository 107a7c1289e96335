//! The largest scores of rows: lists against the oracle, hostile numbers, rules that mislead a sample, shares.

use crate::choosing::{list, random_rule, shared};
use crate::support::{Layout, Rng, Tensor, execs, fewer};
use sdpa::{Exec, SelectedKeys, TopK, View, Workspace, naive, top_k};

/// A row of scores with many equals, hidden keys, zeros of both signs, infinities and NaN.
fn hostile(rng: &mut Rng, keys: usize) -> Vec<f32> {
    let kinds = rng.pick(&[2, 10, 1000]);
    let odd = rng.pick(&[0, 0, 3, 50]);
    let mut score = || match rng.below(kinds) {
        0 => rng.pick(&[0.0, -0.0]),
        n if odd > 0 && rng.below(odd) == 0 => {
            let _ = n;
            rng.pick(&[f32::NEG_INFINITY, f32::NAN, -f32::NAN, f32::INFINITY, f32::MAX, f32::MIN, 1e-45])
        }
        n if kinds < 1000 => n as f32 - 3.0,
        _ => rng.normal(),
    };
    (0..keys).map(|_| score()).collect()
}

#[test]
fn top_k_agrees_with_the_oracle() {
    for seed in 0..fewer(300) {
        let rng = &mut Rng::new(seed ^ 0x709);
        let (batch, heads, rows) = (rng.pick(&[1, 2]), rng.pick(&[1, 3]), rng.pick(&[1, 7]));
        let keys = rng.pick(&[0, 1, 15, 64, 300, 9000, 20_000]);
        let data = hostile(rng, batch * heads * rows * keys);
        let dense =
            Tensor { data, shape: [batch, heads, rows, keys], ..Tensor::filled([batch, heads, rows, keys], 0.0) };
        let layout = rng.pick(&[Layout::Bhld, Layout::Bhld, Layout::Spread, Layout::Transposed]);
        let scores = if keys == 0 { dense.clone() } else { dense.laid_out(layout) };
        let rule = random_rule(rng, keys);
        for (isa, exec) in execs() {
            for exec in [exec, Exec::default().threads(2).isa(isa)] {
                let mut selected = SelectedKeys::new();
                top_k(scores.view(), &rule, exec, &mut Workspace::new(), &mut selected).expect("a good rule");
                assert_eq!((selected.heads(), selected.rows(), selected.unit()), (heads, rule.rows, rule.unit));
                for (b, h) in (0..batch).flat_map(|b| (0..heads).map(move |h| (b, h))) {
                    for first in (0..rows).step_by(rule.rows) {
                        let of_list: Vec<&[f32]> = (first..rows.min(first + rule.rows))
                            .map(|l| &dense.data[((b * heads + h) * rows + l) * keys..][..keys])
                            .collect();
                        let expected = naive::top_k(&shared(&of_list), &rule);
                        assert_eq!(
                            list(&selected, [b, h, first]),
                            expected,
                            "seed {seed}, {isa}, {rule:?}, {b} {h} {first}"
                        );
                    }
                }
            }
        }
    }
}

/// Rows with periods that a sample may fall in with, and all equal.
#[test]
fn samples_that_mislead_change_nothing() {
    let keys = 40_000;
    type Row = fn(usize) -> f32;
    let rows: [Row; 5] = [
        |j| if j.is_multiple_of(78) { 5.0 } else { (j % 77) as f32 / 100.0 },
        |_| 1.0,
        |j| if j < 39_000 { f32::NEG_INFINITY } else { j as f32 },
        |j| -(j as f32),
        |j| if j % 100 == 3 { f32::NAN } else { f32::NEG_INFINITY },
    ];
    for (n, row) in rows.iter().enumerate() {
        let data: Vec<f32> = (0..keys).map(row).collect();
        for k in [1, 500, 2048, 4999] {
            for (isa, exec) in execs() {
                let mut selected = SelectedKeys::new();
                let view = View::bhld(&data, [1, 1, 1, keys]).unwrap();
                top_k(view, &TopK::new(k), exec, &mut Workspace::new(), &mut selected).unwrap();
                assert_eq!(list(&selected, [0; 3]), naive::top_k(&data, &TopK::new(k)), "row {n}, {k} keys, {isa}");
            }
        }
    }
}

/// The weights of the chosen keys reach the share, and would not without the last of them.
#[test]
fn shares_are_reached() {
    for seed in 0..fewer(60) {
        let rng = &mut Rng::new(seed ^ 0x5a7e);
        let keys = rng.pick(&[1, 40, 3000]);
        let middle = rng.pick(&[0.0, 0.0, 1000.0, -1000.0]);
        let mut score = || if rng.below(5) == 0 { f32::NEG_INFINITY } else { middle + 3.0 * rng.normal() };
        let data: Vec<f32> = (0..keys).map(|_| score()).collect();
        let share = rng.pick(&[0.01, 0.5, 0.9, 1.0]);
        let rule = TopK { share: Some(share), ..random_rule(rng, keys) };
        let rule = TopK { rows: 1, ..rule };
        for (isa, exec) in execs() {
            let mut selected = SelectedKeys::new();
            let view = View::bhld(&data, [1, 1, 1, keys]).unwrap();
            top_k(view, &rule, exec, &mut Workspace::new(), &mut selected).unwrap();
            let got = list(&selected, [0; 3]);
            // The sums of f32 may end a key before or after those of f64.
            let by = |slack: f32| {
                let share = (share + slack).clamp(1e-6, 1.0);
                naive::top_k(&data, &TopK { share: Some(share), ..rule }).len()
            };
            let what = format!("seed {seed}, {isa}, {rule:?}");
            assert!((by(-1e-4)..=by(1e-4)).contains(&got.len()), "{what}: {} keys", got.len());
            assert_eq!(
                got,
                {
                    let k = TopK { k: got.len().max(1), share: None, ..rule };
                    let all = naive::top_k(&data, &k);
                    if got.is_empty() { Vec::new() } else { all }
                },
                "{what}"
            );
        }
    }
}
