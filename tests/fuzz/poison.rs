//! What rows do not see changes no bit of them.

use super::array::{Array, indices};
use super::case::{Case, Entries, Rule};
use super::compare::Place;
use super::draw::Home;
use super::kinds::attention::Whole;
use super::outs::Wanted;
use super::place::rounded;
use super::rng::Rng;

const POISONS: [f32; 6] = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 1e38, -1e38, 60_000.0];

/// Changes everything that no row sees, or that one row does not see, and holds what is left against what it was.
pub(crate) fn behind_masks(rng: &mut Rng, whole: &Whole<'_>) {
    let case = whole.case;
    if case.selected.is_some() && rng.one_in(2) {
        return beside_lists(rng, whole);
    }
    let rows = case.every_row();
    if rows.is_empty() {
        return;
    }
    let one = rng.one_in(2).then(|| rng.pick(&rows));
    let targets = one.map_or(rows, |row| vec![row]);
    let (bad, x) = changed(rng, case, whole.home, &targets);
    let wanted = if rng.one_in(2) { Wanted::ALL } else { Wanted { mass: one.is_none(), ..Wanted::LEAST } };
    let expected = whole.run(rng, "once more", case, wanted).without_raw();
    let got = whole.run(rng, "changed", &bad, wanted).without_raw();
    let what = format!("{x} behind masks");
    match one {
        None => got.same(&what, &expected),
        Some([b, h, i]) => {
            let (at, l) = case.row_at(b, i);
            let place = Place { row: [at, h, l], scores: [b, h, i], keys: case.longest().1 };
            got.same_row(&format!("{what} of {:?}", [b, h, i]), place, &expected, place);
        }
    }
}

/// The case with everything changed that no target sees, and what keys and values became.
pub(crate) fn changed(rng: &mut Rng, case: &Case, home: Home, targets: &[[usize; 3]]) -> (Case, f32) {
    let mut bad = case.clone();
    let x = poison(rng, home);
    keys(case, &mut bad, targets, x);
    options(rng, case, &mut bad, targets);
    (bad, x)
}

/// A number that is to be found where it should not be. Integers are refused what is not finite.
fn poison(rng: &mut Rng, home: Home) -> f32 {
    match home {
        Home::Bytes { .. } => 1e19,
        Home::Bits(_) => 5e4,
        _ => rng.pick(&POISONS),
    }
}

/// Changes all keys that no list names, with their values, positions and columns: not even scores before masks change.
fn beside_lists(rng: &mut Rng, whole: &Whole<'_>) {
    let (case, mut bad) = (whole.case, whole.case.clone());
    let (x, rows) = (poison(rng, whole.home), case.every_row());
    let [_, k, v] = case.dtypes;
    for (b, j) in (0..case.batch()).flat_map(|b| (0..case.keys(b)).map(move |j| (b, j))) {
        let mut named = vec![false; case.kv_heads()];
        for &row in rows.iter().filter(|row| row[0] == b && case.asked(**row, j).is_some()) {
            named[row[1] / case.sharing()] = true;
        }
        let (at, n) = case.key_at(b, j);
        for g in (0..case.kv_heads()).filter(|&g| !named[g]) {
            bad.k.row_mut(at, g, n).fill(rounded(x, k));
            bad.v.row_mut(at, g, n).fill(rounded(x, v));
        }
        if let Some(position) = bad.positions[1].as_mut().and_then(|all| all[b].get_mut(j))
            && !named.contains(&true)
        {
            *position = rng.pick(&[i32::MIN, -1, 0, i32::MAX]);
        }
    }
    let names = |row: [usize; 3], j: usize| case.asked(row, j).is_some();
    if let Some((bias, dtype)) = &mut bad.bias {
        let matters = mattering(case, bias, &rows, names);
        let x = rounded(rng.pick(&POISONS), *dtype);
        indices(bias.of.shape).filter(|&at| !matters.get(at)).for_each(|at| bias.of.set(at, x));
    }
    if let Some((mask, _)) = &mut bad.mask {
        flip(mask, &mattering(case, mask, &rows, names));
    }
    let wanted = if rng.one_in(2) { Wanted::ALL } else { Wanted::LEAST };
    let expected = whole.run(rng, "once more", case, wanted);
    whole.run(rng, "changed", &bad, wanted).same(&format!("{x} beside lists"), &expected);
}

/// Which entries of a bias or mask are those of a pair that `sees` is true of.
fn mattering(case: &Case, x: &Entries, rows: &[[usize; 3]], sees: impl Fn([usize; 3], usize) -> bool) -> Array<bool> {
    let shape = x.of.shape;
    let mut matters = Array::from_fn(shape, |_| false);
    for &[b, h, i] in rows {
        for j in (0..case.kv_len(b)).filter(|&j| sees([b, h, i], j) && x.get([b, h, i, j]).is_some()) {
            let at = [b, h, i, j];
            matters.set(core::array::from_fn(|dim| if shape[dim] == 1 { 0 } else { at[dim] }), true);
        }
    }
    matters
}

/// Turns entries of a mask that do not matter into their opposite.
fn flip(mask: &mut Entries, matters: &Array<bool>) {
    for at in indices(mask.of.shape).filter(|&at| !matters.get(at)) {
        let flipped = if mask.of.get(at) == 0.0 { 255.0 } else { 0.0 };
        mask.of.set(at, flipped);
    }
}

/// Keys and values that no target sees.
fn keys(case: &Case, bad: &mut Case, targets: &[[usize; 3]], x: f32) {
    let [_, k, v] = case.dtypes;
    for b in 0..case.batch() {
        for g in 0..case.kv_heads() {
            let mine: Vec<[usize; 3]> =
                targets.iter().copied().filter(|t| t[0] == b && t[1] / case.sharing() == g).collect();
            for j in 0..case.keys(b) {
                if !mine.iter().any(|&row| case.sees(row, j, None)) {
                    let (at, n) = case.key_at(b, j);
                    bad.k.row_mut(at, g, n).fill(rounded(x, k));
                    bad.v.row_mut(at, g, n).fill(rounded(x, v));
                }
            }
        }
    }
}

/// Entries of a bias or mask that matter to no target, since something else hides their keys. Not of both: they may hide for
/// each other.
fn options(rng: &mut Rng, case: &Case, bad: &mut Case, targets: &[[usize; 3]]) {
    let matters = |x: &Entries, rule: Rule| mattering(case, x, targets, |row, j| case.sees(row, j, Some(rule)));
    let both = bad.bias.is_some() && bad.mask.is_some();
    let first = rng.one_in(2);
    if let Some((bias, dtype)) = &mut bad.bias
        && (!both || first)
    {
        let matters = matters(bias, Rule::Bias);
        let x = rounded(rng.pick(&POISONS), *dtype);
        indices(bias.of.shape).filter(|&at| !matters.get(at)).for_each(|at| bias.of.set(at, x));
    }
    if let Some((mask, _)) = &mut bad.mask
        && (!both || !first)
    {
        let matters = matters(mask, Rule::Mask);
        flip(mask, &matters);
    }
}
