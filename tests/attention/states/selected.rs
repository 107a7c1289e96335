//! Rows that select keys, in states.

use super::stateful;
use crate::kv_support::cuts;
use crate::options::mods::with_mods;
use crate::options::{Case, Full, Wanted, check_against_oracle};
use crate::selected::random_lists;
use crate::support::{Rng, Tensors, assert_same_bits, execs, fewer};
use core::ops::Range;
use sdpa::{Attention, AttnState, Error, Exec, SelectedKeys, SelectionShape};

/// Runs a case in a state, with keys in these parts.
fn in_parts(case: &Case, exec: Exec, parts: &[Range<usize>]) -> Full {
    let state = AttnState::from_inputs(case.attention(), case.inputs(), exec).unwrap();
    let mut got = case.unwritten(Wanted::LEAST);
    with_mods!(case, |mods| {
        let mut state = state.mods(&mods).unwrap();
        for keys in parts {
            if state.sees(keys.clone()) {
                state
                    .push(case.k.view().rows(keys.clone()).unwrap(), case.v.view().rows(keys.clone()).unwrap())
                    .unwrap();
            } else {
                state.skip(keys.len()).unwrap();
            }
        }
        state.read(got.outputs()).unwrap();
    });
    got
}

#[test]
fn rows_that_select_keys_have_the_same_bits_however_keys_are_divided() {
    let (cases, mut skipped) = (100, 0);
    for seed in 0..fewer(cases) {
        let rng = &mut Rng::new(79_000 + seed);
        let case = stateful(rng, 200_000);
        let case = Case { selected: Some(random_lists(rng, &case)), ..case };
        let oracle = case.oracle::<f64>();
        let all = case.k.shape[2];
        let parts = cuts(all, rng);
        let mut first: Option<Full> = None;
        for (isa, exec) in execs() {
            let what = format!("seed {seed}, {isa}, {parts:?}");
            let got = in_parts(&case, exec, &parts);
            check_against_oracle(&what, &case, &got, &oracle);
            let whole = in_parts(&case, exec, core::slice::from_ref(&(0..all)));
            assert_same_bits(&what, &got.out, &whole.out);
            assert_same_bits(&what, &got.lse, &whole.lse);
            if isa.has_fma() {
                assert_same_bits(&what, &got.out, &first.get_or_insert(got.clone()).out);
            }
        }
        let state = AttnState::from_inputs(case.attention(), case.inputs(), Exec::serial()).unwrap();
        let dense = Case { selected: None, ..case.clone() };
        let dense_state = AttnState::from_inputs(dense.attention(), dense.inputs(), Exec::serial()).unwrap();
        skipped +=
            parts.iter().filter(|keys| dense_state.sees((*keys).clone()) && !state.sees((*keys).clone())).count();
    }
    // A few cases need not have such a part.
    assert!(skipped > 3 || fewer(cases) < cases, "only {skipped} parts that no list names");
}

/// As long as no list has more keys than a block, and all lie in one, the bits are those of one call.
#[test]
fn lists_inside_a_block_have_the_bits_of_a_call() {
    let tensors = Tensors::normal([1, 2, 1, 3, 700, 8, 8], 1);
    let shape = SelectionShape { q_lens: &[3], heads: 1, rows: 1, unit: 1 };
    let mut selected = SelectedKeys::new();
    selected.fill(shape, &[0, 3, 3, 5], &[300, 301, 500, 12, 255], None).unwrap();
    let inputs = tensors.inputs().selected(&selected);
    let mut whole = crate::support::unwritten(&inputs);
    sdpa::attention(&Attention::new(), inputs, crate::support::outputs(&mut whole)).unwrap();
    let mut state = AttnState::from_inputs(Attention::new(), inputs, Exec::serial()).unwrap();
    state.push(tensors.k.view(), tensors.v.view()).unwrap();
    let mut got = crate::support::unwritten(&inputs);
    state.read(crate::support::outputs(&mut got)).unwrap();
    assert!(crate::support::same_bits(&got.out.data, &whole.out.data));
}

#[test]
fn lists_that_a_state_refuses() {
    let tensors = Tensors::normal([1, 4, 2, 2, 6, 8, 8], 0);
    let list = |q_lens, last: u32| {
        let mut selected = SelectedKeys::new();
        let shape = SelectionShape { q_lens, heads: 1, rows: 2, unit: 1 };
        selected.fill(shape, &[0, 1], &[last], None).unwrap();
        selected
    };
    let made = |selected: &SelectedKeys, lens: &[usize]| {
        let inputs = tensors.inputs().selected(selected).kv_lens(lens);
        AttnState::from_inputs(Attention::new(), inputs, Exec::serial()).map(|_| ()).map_err(|error| error.to_string())
    };
    assert_eq!(made(&list(&[2], 4), &[5]), Ok(()));
    let beyond = "selected keys, one past the greatest number of each sequence: entry 0 is 6, but must be at most 5, the units of \
                  keys that the sequence has";
    assert_eq!(made(&list(&[2], 5), &[5]), Err(beyond.into()));
    assert_eq!(made(&list(&[1], 4), &[5]), Err("selected keys: rows of a sequence is 1, but q has 2".into()));
    // States with lists and without are not merged.
    let (some, dense) = (list(&[2], 5), tensors.inputs());
    let state = |inputs| AttnState::from_inputs(Attention::new(), inputs, Exec::serial()).unwrap();
    let differs = state(dense).merge(&state(tensors.inputs().selected(&some))).unwrap_err().to_string();
    assert!(differs.contains("selection of keys"), "{differs}");
    // A list names no key beyond those that came: it waits for them.
    let selected = list(&[2], 5);
    let inputs = tensors.inputs().selected(&selected);
    let mut state = AttnState::from_inputs(Attention::new(), inputs, Exec::serial()).unwrap();
    assert!(state.sees(5..6) && !state.sees(0..5) && !state.sees(6..99));
    state.skip(5).unwrap();
    assert!(matches!(state.skip(1), Err(Error::Needs { argument: "skip", .. })));
}
