//! Whatever is hidden may hold anything: NaN, ±∞ and 1e38 behind every mask, window, length and −∞ change no bit of
//! any output, for random options.
//!
//! What is hidden is what the `f64` oracle hides. Two kinds of tests: what nobody sees is poisoned, and everything must
//! stay; what one row does not see is poisoned, and all rows that are as blind must stay, whatever becomes of the rest.

use super::POISONS;
use crate::options::elements::Rounded;
use crate::options::mods::{Functions, Keep};
use crate::options::{Case, Full, Wanted, same_rows};
use crate::support::{Rng, Tensor, assert_same_bits, execs, indices};
use sdpa::{Alignment, Exec, Point, Window, naive};

const MOST: usize = 600_000;

/// The case with these rows (sequence, kv head, key) of k and v poisoned.
fn poisoned(case: &Case, keys: &[[usize; 3]], x: f32, k: bool, v: bool) -> Case {
    let mut case = case.clone();
    for &[b, g, j] in keys {
        let (at, key) = case.key_at(b, j);
        for (tensor, _) in [(&mut case.k, k), (&mut case.v, v)].into_iter().filter(|(_, poison)| *poison) {
            (0..tensor.shape[3]).for_each(|d| tensor.set([at, g, key, d], x));
        }
    }
    case
}

/// Undoes in `got` what may differ: at the first two points hidden keys show, if they lie inside the length.
fn forgive(case: &Case, got: &mut Full, clean: &Full, keys: &[[usize; 3]]) {
    let sharing = case.heads() / case.kv_heads();
    for point in [Point::Raw, Point::Softcapped] {
        let (Some(got), Some(clean)) = (&mut got.points[point as usize], &clean.points[point as usize]) else {
            continue;
        };
        for &[b, g, j] in keys.iter().filter(|&&[b, _, j]| j < case.kv_len(b)) {
            for [h, i, ..] in indices([sharing, case.rows(b), 1, 1]) {
                let at = [b, g * sharing + h, i, j];
                got.set(at, clean.get(at));
            }
        }
    }
}

/// Poisons these keys and compares: the rows given, and if these are all rows the key weight sums.
fn check(what: &str, case: &Case, keys: &[[usize; 3]], rows: Option<&[[usize; 3]]>, exec: Exec, wanted: Wanted) {
    let clean = case.run(exec, wanted);
    for x in POISONS {
        for (name, k, v) in [("k", true, false), ("v", false, true), ("k and v", true, true)] {
            let bad = poisoned(case, keys, x, k, v);
            let mut got = bad.run(exec, wanted);
            forgive(case, &mut got, &clean, keys);
            let what = format!("{what}: {x} in {name} of {} keys", keys.len());
            same_rows(&what, (&bad, &got), (case, &clean), |row| {
                rows.is_none_or(|rows| rows.contains(&row)).then_some(row)
            });
            if let (Some(got), Some(clean), None) = (&got.mass, &clean.mass, rows) {
                assert_same_bits(&format!("{what}: key weight sums"), got, clean);
            }
        }
    }
}

fn wanted(n: u64) -> Wanted {
    if n.is_multiple_of(2) { Wanted::MASS } else { Wanted::ALL }
}

/// Random cases, half of them made to hide something.
fn random(seed: u64) -> Case {
    let mut rng = Rng::new(seed);
    let mut case = Case::random(&mut rng, MOST);
    match seed % 8 {
        0 => case.window = Some(Window::inclusive(Some(2), Some(1)).keep_first(rng.below(3))),
        1 => (case.causal, case.alignment) = (true, Some(Alignment::Offset(-3))),
        2 => {
            case.functions = Functions { mask: Some((Keep::Bands(9), seed.is_multiple_of(3))), ..Functions::default() }
        }
        3 => case.kv_lens = Some((0..case.batch()).map(|b| case.keys(b) / 2).collect()),
        _ => {}
    }
    case
}

#[test]
fn keys_that_nobody_sees_do_not_matter() {
    let mut tried = 0;
    for seed in 0..120 {
        let case = random(200_000 + seed);
        let oracle = case.oracle::<f64>();
        let keys = case.unseen(|row, j| case.hides(&oracle, row, j), &case.every_row());
        if keys.is_empty() {
            continue;
        }
        tried += 1;
        for (isa, exec) in execs() {
            check(&format!("seed {seed}, {isa}"), &case, &keys, None, exec, wanted(seed));
        }
    }
    println!("{tried} cases with keys that nobody sees");
    assert!(tried > 40, "only {tried} cases hid anything");
}

#[test]
fn keys_that_a_row_does_not_see_do_not_matter_to_it() {
    let mut tried = 0;
    for seed in 0..160 {
        let case = random(300_000 + seed);
        let (oracle, rows) = (case.oracle::<f64>(), case.every_row());
        if rows.is_empty() {
            continue;
        }
        let row = rows[Rng::new(seed).below(rows.len())];
        let sharing = case.heads() / case.kv_heads();
        let mut keys = case.unseen(|row, j| case.hides(&oracle, row, j), &[row]);
        keys.retain(|&[b, g, _]| b == row[0] && g == row[1] / sharing);
        if keys.is_empty() {
            continue;
        }
        tried += 1;
        let blind = |&[b, h, i]: &[usize; 3]| {
            keys.iter().all(|&[kb, g, j]| kb != b || g != h / sharing || case.hides(&oracle, [b, h, i], j))
        };
        let blind: Vec<_> = rows.iter().copied().filter(blind).collect();
        assert!(blind.contains(&row));
        for (isa, exec) in execs() {
            check(&format!("seed {seed}, {isa}, {row:?}"), &case, &keys, Some(&blind), exec, wanted(seed));
        }
    }
    println!("{tried} cases with rows that do not see every key");
    assert!(tried > 80, "only {tried} cases hid anything");
}

/// The entries of the case's bias that only ever meet keys hidden by something else.
fn dead_entries(case: &Case, bias: &Tensor) -> Vec<[usize; 4]> {
    let without = Case { bias: None, ..case.clone() };
    let oracle: naive::Answer<f64> = without.oracle();
    let dim = |n: usize, i: usize| if n == 1 { 0 } else { i };
    let mut alive = vec![false; bias.shape.iter().product()];
    let [nb, nh, nl, n] = bias.shape;
    for row @ [b, h, i] in case.every_row() {
        // One column is every key's.
        for j in (0..case.keys(b)).filter(|&j| (n == 1 || j < n) && !without.hides(&oracle, row, j)) {
            alive[((dim(nb, b) * nh + dim(nh, h)) * nl + dim(nl, i)) * n + dim(n, j)] = true;
        }
    }
    indices(bias.shape).zip(alive).filter(|(_, alive)| !alive).map(|(at, _)| at).collect()
}

#[test]
fn biases_of_hidden_keys_do_not_matter() {
    let mut tried = 0;
    for seed in 0..160 {
        let mut case = random(400_000 + seed);
        let mut rng = Rng::new(seed);
        if case.bias.is_none() {
            let [b, h] = [case.batch(), case.heads()].map(|n| if rng.below(2) == 0 { 1 } else { n });
            case.bias = Some(Tensor::normal([b, h, case.longest().0, case.longest().1], &mut rng).into());
        }
        let bias = case.bias.clone().unwrap();
        let dead = dead_entries(&case, &bias.wide);
        if dead.is_empty() {
            continue;
        }
        tried += 1;
        for (isa, exec) in execs() {
            let clean = case.run(exec, wanted(seed));
            for x in POISONS {
                let mut wide = bias.wide.clone();
                dead.iter().for_each(|&at| wide.set(at, x));
                let bad = Case { bias: Some(Rounded::new(&wide, bias.dtype())), ..case.clone() };
                let got = bad.run(exec, wanted(seed));
                let what = format!("seed {seed}, {isa}: {x} in {} entries of the bias", dead.len());
                same_rows(&what, (&bad, &got), (&case, &clean), Some);
                if let (Some(got), Some(clean)) = (&got.mass, &clean.mass) {
                    assert_same_bits(&format!("{what}: key weight sums"), got, clean);
                }
            }
        }
    }
    println!("{tried} cases with biases of hidden keys");
    assert!(tried > 60, "only {tried} cases hid anything");
}

/// Everything that hides, one at a time, at the sizes where it is cut by tiles and blocks: nothing is left to chance.
#[test]
fn behind_each_rule_alone() {
    let sizes = [2, 4, 2, 37, 300, 20, 33];
    let [batch, heads, _, rows, keys, ..] = sizes;
    let plain = Case { alignment: Some(Alignment::Offset(200)), ..Case::plain(&mut Rng::new(1), sizes) };
    let sees = |[b, h, i, j]: [usize; 4]| (b + h + i / 7 + j / 5) % 3 != 0 && j < 290;
    let function = |hint| Functions { mask: Some((Keep::Bands(9), hint)), ..Functions::default() };
    let hiding = |at| if sees(at) { 0.5 } else { f32::NEG_INFINITY };
    let cases = [
        ("causal", Case { causal: true, ..plain.clone() }),
        ("window", Case { window: Some(Window::inclusive(Some(20), Some(7))), ..plain.clone() }),
        ("window", Case { window: Some(Window::inclusive(Some(20), Some(7)).keep_first(9)), ..plain.clone() }),
        ("keep mask", Case { mask: Some(plain.mask_by(true, sees)), ..plain.clone() }),
        ("drop mask", Case { mask: Some(plain.mask_by(false, sees)), ..plain.clone() }),
        ("bias", Case { bias: Some(Tensor::from_fn([batch, heads, rows, keys], hiding).into()), ..plain.clone() }),
        ("short bias", Case { bias: Some(Tensor::filled([1, 1, 1, 259], 0.5).into()), ..plain.clone() }),
        ("short mask", Case { mask: Some(plain.mask_by(true, |_| true)), ..plain.clone() }),
        ("kv_lens", Case { kv_lens: Some(vec![259, 3]), ..plain.clone() }),
        ("function", Case { functions: function(false), ..plain.clone() }),
        ("function with a hint", Case { functions: function(true), ..plain.clone() }),
    ];
    for (rule, mut case) in cases {
        if rule == "short mask" {
            let mask = case.mask.take().unwrap();
            case.mask = Some(mask.over(Tensor::filled([1, 1, 1, 259], 1.0)));
        }
        let oracle = case.oracle::<f64>();
        for row in [[0, 0, 0], [1, 3, 5], [1, 1, rows - 1]] {
            let sharing = case.heads() / case.kv_heads();
            let mut unseen = case.unseen(|row, j| case.hides(&oracle, row, j), &[row]);
            unseen.retain(|&[b, g, _]| b == row[0] && g == row[1] / sharing);
            assert!(!unseen.is_empty(), "{rule} hides nothing from {row:?}");
            for (isa, exec) in execs() {
                check(&format!("{rule}, {isa}, {row:?}"), &case, &unseen, Some(&[row]), exec, Wanted::ALL);
                check(&format!("{rule}, {isa}, {row:?}"), &case, &unseen, Some(&[row]), exec, Wanted::LEAST);
            }
        }
    }
}
