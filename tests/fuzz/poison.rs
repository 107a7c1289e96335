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
    // Integers are refused what is not finite.
    let x = match home {
        Home::Bytes { .. } => 1e19,
        Home::Bits(_) => 5e4,
        _ => rng.pick(&POISONS),
    };
    keys(case, &mut bad, targets, x);
    options(rng, case, &mut bad, targets);
    (bad, x)
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
    let matters = |x: &Entries, rule: Rule| {
        let shape = x.of.shape;
        let mut matters = Array::from_fn(shape, |_| false);
        for &[b, h, i] in targets {
            let sees = |&j: &usize| case.sees([b, h, i], j, Some(rule)) && x.get([b, h, i, j]).is_some();
            for j in (0..case.kv_len(b)).filter(sees) {
                let at = [b, h, i, j];
                matters.set(core::array::from_fn(|dim| if shape[dim] == 1 { 0 } else { at[dim] }), true);
            }
        }
        matters
    };
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
        for at in indices(mask.of.shape).filter(|&at| !matters.get(at)) {
            let flipped = if mask.of.get(at) == 0.0 { 255.0 } else { 0.0 };
            mask.of.set(at, flipped);
        }
    }
}
