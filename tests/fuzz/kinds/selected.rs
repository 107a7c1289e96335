//! A random call of which rows select keys: as any other call, over any source; each list as a call over its keys alone.

use crate::fuzzer::array::Array;
use crate::fuzzer::bits::{Recorder, settle, sizes};
use crate::fuzzer::case::{Case, Cover, Entries, Polarity};
use crate::fuzzer::compare::Place;
use crate::fuzzer::draw::{Home, draw, draw_of, own_positions};
use crate::fuzzer::functions::Functions;
use crate::fuzzer::kinds::attention::{Whole, check_case, record_case};
use crate::fuzzer::kinds::executors::shared;
use crate::fuzzer::kinds::{latent, mixed};
use crate::fuzzer::outs::Wanted;
use crate::fuzzer::rng::Rng;
use crate::fuzzer::selection::Selection;

pub(super) fn check(rng: &mut Rng) {
    match rng.below(24) {
        0 => return latent::check_selected(rng),
        1..4 => return mixed::check_selected(rng),
        _ => {}
    }
    let (mut case, home) = match rng.one_in(400) {
        true => {
            let (home, sizes) = (Home::draw(rng), shared(rng));
            (draw_of(rng, home, sizes), home)
        }
        false => draw(rng),
    };
    if rng.one_in(4) {
        own_positions(rng, &mut case);
    }
    case.selected = Some(Selection::draw(rng, &case));
    check_case(rng, &case, home);
}

/// A call with keys from anywhere.
pub(super) fn bits(rng: &mut Rng, recorder: &mut Recorder) {
    let (home, sizes) = (Home::draw(rng), sizes(rng));
    let mut case = draw_of(rng, home, sizes);
    settle(rng, &mut case);
    case.selected = Some(Selection::draw(rng, &case));
    record_case(rng, recorder, &case, home);
}

/// Rows of some lists, each as a call over the keys that the list names, which keep their positions.
pub(super) fn lists_alone(rng: &mut Rng, whole: &Whole<'_>) {
    let case = whole.case;
    let Functions { score, mask, prob, .. } = case.functions;
    let by_number = case.settings.dropout.is_some() || score.is_some() || mask.is_some() || prob.is_some();
    let far = |b: usize| i32::try_from(case.offset(b).saturating_add_unsigned(case.rows(b))).is_err();
    if by_number || (0..case.batch()).any(|b| far(b) || i32::try_from(case.offset(b)).is_err()) {
        return;
    }
    // A cache of one head has the scales of the first one's channels.
    let by_channel = matches!(whole.home, Home::Bytes { channels: Some(_) });
    let (mut rows, expected) = (case.every_row(), whole.run(rng, "once more", case, Wanted::LEAST));
    rows.retain(|row| !by_channel || row[1] < case.sharing());
    for _ in 0..rows.len().min(4) {
        let row = rng.pick(&rows);
        let (alone, first) = of_list(case, row);
        let what = format!("the list of {row:?} alone");
        let results = whole.run(rng, &what, &alone, Wanted::LEAST);
        for i in 0..alone.rows(0) {
            let (at, l) = case.row_at(row[0], first + i);
            let mine = Place { row: [0, 0, i], scores: [0; 3], keys: 0 };
            let others = Place { row: [at, row[1], l], scores: [0; 3], keys: 0 };
            results.same_row(&what, mine, &expected, others);
        }
    }
}

/// All rows of a row's list and head over the keys that it names; and the first of these rows.
fn of_list(case: &Case, row: [usize; 3]) -> (Case, usize) {
    let ([b, h, i], selected) = (row, case.selected.as_ref().expect("a case with lists"));
    let (g, first) = (h / case.sharing(), i / selected.rows * selected.rows);
    let rows = first..case.rows(b).min(first + selected.rows);
    let keys = selected.keys(case.list_of(selected, row), case.kv_len(b));
    let one = case.some_rows(b, rows.clone());
    let gathered = |x: &Array| {
        let [.., dim] = x.shape;
        Array::from_fn([1, 1, keys.len(), dim], |[_, _, j, c]| x.get([0, g, keys[j], c]))
    };
    let q = Array::from_fn([1, 1, rows.len(), one.q.shape[3]], |[_, _, i, c]| one.q.get([0, h, i, c]));
    let columns = |x: &Entries, none: f32| {
        let of = |[_, _, i, j]: [usize; 4]| x.get([0, h, i, keys[j]]).unwrap_or(none);
        Entries { of: Array::from_fn([1, 1, rows.len(), keys.len()], of), cover: Cover::All }
    };
    let hidden = |polarity: Polarity| if polarity == Polarity::NonzeroKeeps { 0.0 } else { 1.0 };
    let [at, of_keys] = &one.positions;
    let stands = |i: usize| at.as_ref().map_or(one.offset(0) as i32 + i as i32, |at| at[0][i]);
    let position = |&key: &usize| of_keys.as_ref().map_or(key as i32, |of_keys| of_keys[0][key]);
    let alone = Case {
        q,
        k: gathered(&one.k),
        v: gathered(&one.v),
        bias: one.bias.as_ref().map(|(x, dtype)| (columns(x, f32::NEG_INFINITY), *dtype)),
        mask: one.mask.as_ref().map(|(x, polarity)| (columns(x, hidden(*polarity)), *polarity)),
        alibi: one.alibi.as_ref().map(|slopes| vec![slopes[h]]),
        sinks: one.sinks.as_ref().map(|sinks| vec![sinks[h]]),
        kv_lens: Some(vec![keys.len()]),
        positions: [Some(vec![(0..rows.len()).map(stands).collect()]), Some(vec![keys.iter().map(position).collect()])],
        selected: None,
        ..one
    };
    (alone, first)
}
