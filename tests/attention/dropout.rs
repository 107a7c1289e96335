//! Dropout: what the rule says is dropped, forward and backward, in any cut of the work; nothing else changes.

use crate::options::{Case, Full, Wanted, same_rows};
use crate::support::{Rng, Tensor, assert_close, assert_same_bits, execs};
use sdpa::{
    Attention, AttnState, Dropout, Exec, Inputs, KvCache, KvShape, Mods, Outputs, Plan, Position, Run, View, ViewMut,
    Workspace,
};

/// A case without ragged sequences and functions, and its settings with dropout.
fn case(seed: u64, sizes: [usize; 7]) -> Case {
    let case = Case::of_sizes(&mut Rng::new(seed), sizes);
    if case.ragged.is_some() { self::case(seed + 1000, sizes) } else { Case { functions: Default::default(), ..case } }
}

fn run(case: &Case, attention: &Attention, inputs: Inputs<'_>, exec: Exec) -> Full {
    let mut full = case.unwritten(Wanted::LEAST);
    let problem = attention.problem(inputs, full.outputs()).expect("a good call");
    let plan = Plan::new(&problem, exec);
    problem.run(&plan, &mut Workspace::new());
    full
}

#[test]
fn it_drops_what_the_rule_says() {
    for seed in 0..20 {
        let case = case(seed, [2, 4, 2, [1, 7, 100][seed as usize % 3], 300, 16, 24]);
        let p = [0.1, 0.5, 0.9][seed as usize % 3];
        let attention = case.attention().dropout(p, seed << 33 | 7, seed as u32);
        let expected = sdpa::naive::oracle(&attention, &case.inputs()).expect("a good call");
        for (isa, exec) in execs() {
            let got = run(&case, &attention, case.inputs(), exec);
            assert_close(&format!("seed {seed}, {isa}"), &got.out, &expected.out, 2e-5 / f64::from(1.0 - p));
            let none = run(&case, &case.attention(), case.inputs(), exec);
            assert_same_bits("log-sum-exp", &got.lse, &none.lse);
            let pool = rayon::ThreadPoolBuilder::new().num_threads(3).build().unwrap();
            let shared = pool.install(|| run(&case, &attention, case.inputs(), exec.threads(3)));
            assert_same_bits(&format!("seed {seed}, {isa}, three threads"), &shared.out, &got.out);
        }
    }
}

/// With rows of the unit matrix for values, outputs are weights: each is 0 or the weight without dropout times a factor.
#[test]
fn every_weight_is_dropped_or_scaled() {
    const KEYS: usize = 300;
    let mut rng = Rng::new(3);
    let plain = Case::plain(&mut rng, [1, 2, 1, 40, KEYS, 8, KEYS]);
    let v = Tensor::from_fn([1, 1, KEYS, KEYS], |[_, _, j, d]| if j == d { 1.0 } else { 0.0 });
    let case = Case { v, ..plain };
    let dropout = Dropout { p: 0.3, seed: 99, offset: 5 };
    let attention = case.attention().dropout(dropout.p, dropout.seed, dropout.offset);
    for (isa, exec) in execs() {
        let (kept, all) =
            (run(&case, &attention, case.inputs(), exec), run(&case, &case.attention(), case.inputs(), exec));
        for ([b, h, i, j], (got, weight)) in
            crate::support::indices(all.out.shape).zip(kept.out.data.iter().zip(&all.out.data))
        {
            let keeps = dropout.keeps(Position { batch: b, head: h, row: i, key: j, position: 0, distance: 0 }, 2);
            let expected = if keeps { weight * dropout.factor() } else { 0.0 };
            assert!((got - expected).abs() <= 1e-6 * expected, "{isa}, row {i}, key {j}: {got}, expected {expected}");
        }
    }
}

#[test]
fn a_probability_of_zero_is_none() {
    let case = case(5, [2, 2, 2, 50, 270, 16, 16]);
    let zero = case.attention().dropout(0.0, 1, 2);
    for (isa, exec) in execs() {
        let [with, without] = [zero, case.attention()].map(|attention| run(&case, &attention, case.inputs(), exec));
        assert_same_bits(&isa.to_string(), &with.out, &without.out);
    }
}

/// One row against a cache, shared out by keys, drops what row 0 of a call drops.
#[test]
fn few_rows_over_a_cache_drop_alike() {
    let mut rng = Rng::new(8);
    let case = Case::plain(&mut rng, [2, 4, 2, 1, 700, 16, 16]);
    let mut cache = KvCache::new(2, KvShape { kv_heads: 2, head_dim: 16, value_dim: 16 }).unwrap();
    cache.append(case.k.view(), case.v.view()).unwrap();
    let attention = case.attention().dropout(0.4, 11, 0);
    for (isa, exec) in execs() {
        let tensors = run(&case, &attention, case.inputs(), exec);
        let cached = run(&case, &attention, Inputs::cached(case.q.view(), &cache), exec.threads(2));
        same_rows(&isa.to_string(), (&case, &cached), (&case, &tensors), Some);
    }
}

/// What is dropped is multiplied by 0: NaN stays NaN, under a weight function too.
#[test]
fn a_dropped_nan_is_nan() {
    let mut rng = Rng::new(12);
    let mut case = Case::plain(&mut rng, [1, 1, 1, 4, 3, 8, 8]);
    case.q.fill_row(2, f32::NAN);
    let halved = Mods::new().weight(|weight: f32, _: Position| 0.5 * weight);
    for (isa, exec) in execs() {
        let mut full = case.unwritten(Wanted::LEAST);
        let attention = case.attention().dropout(0.99, 3, 0);
        attention
            .problem(case.inputs(), full.outputs())
            .expect("a good call")
            .run_once_with(exec, Run::new().mods(&halved))
            .expect("functions that fit");
        for i in 0..4 {
            let all = (0..8).all(|d| full.out.get([0, 0, i, d]).is_nan() == (i == 2));
            assert!(all, "{isa}, row {i}");
        }
    }
}

/// A weight that dropout has made larger than 1 overflows with the largest values; beside an infinite value that is nothing.
#[test]
fn an_infinite_value_outweighs_those_that_overflow() {
    for keys in [40, 300] {
        let mut case = Case::plain(&mut Rng::new(12), [1, 1, 1, 6, keys, 8, 20]);
        case.q.data.fill(0.0);
        for j in 0..keys {
            case.v.set([0, 0, j, 17], if j % 3 == 0 { f32::MIN } else { f32::MAX });
        }
        case.v.set([0, 0, keys - 1, 17], f32::NEG_INFINITY);
        let (attention, mut kept) = (case.attention().dropout(0.5, 3, 0), [0; 2]);
        for (isa, exec) in execs() {
            let out = run(&case, &attention, case.inputs(), exec).out;
            for row in 0..6 {
                let here = Position { batch: 0, head: 0, row, key: keys - 1, position: 0, distance: 0 };
                let keeps = Dropout { p: 0.5, seed: 3, offset: 0 }.keeps(here, 1);
                // 0 times infinity is NaN.
                let expected = if keeps { f32::NEG_INFINITY } else { f32::NAN };
                assert_eq!(out.get([0, 0, row, 17]).to_bits(), expected.to_bits(), "{isa}, {keys} keys, row {row}");
                kept[usize::from(keeps)] += 1;
            }
        }
        assert!(!kept.contains(&0), "some rows keep it, some drop it");
    }
}

#[test]
fn probabilities_that_are_none_are_refused() {
    let x = [0.5f32; 8];
    let (view, mut out) = (View::bhld(&x, [1, 1, 1, 8]).unwrap(), [7.0f32; 8]);
    for p in [-0.1, 1.0, f32::NAN] {
        let outputs = Outputs::new(ViewMut::bhld(&mut out, [1, 1, 1, 8]).unwrap());
        let error = Attention::new().dropout(p, 0, 0).problem(Inputs::new(view, view, view), outputs).unwrap_err();
        assert_eq!(error.to_string(), format!("dropout: {p}, but must be at least 0 and below 1"));
    }
    assert_eq!(out, [7.0; 8]);
    let (attention, keys) = (Attention::new().dropout(1.0, 0, 0), KvShape { kv_heads: 1, head_dim: 8, value_dim: 8 });
    let error = AttnState::new(attention, view, keys, Exec::serial()).unwrap_err();
    assert_eq!(error.to_string(), "dropout: 1, but must be at least 0 and below 1");
    let error = sdpa::parts::BlockStates::new().compute(
        &Attention::new().dropout(0.5, 0, 0),
        Inputs::new(view, view, view),
        0,
        Exec::serial(),
    );
    assert_eq!(error.unwrap_err().to_string(), "dropout: needs a call over all keys, or an AttnState of them");
}

/// Rows and keys in pieces drop what one call drops; so do states of later keys that are merged, which must have the same dropout.
#[test]
fn pieces_drop_what_one_call_drops() {
    let mut rng = Rng::new(21);
    let case = Case::plain(&mut rng, [2, 4, 2, 100, 700, 16, 24]);
    let attention = case.attention().dropout(0.4, 5, 1);
    for (isa, exec) in execs() {
        let whole = run(&case, &attention, case.inputs(), exec);
        for rows in [0..33, 33..100] {
            let some = Case { q: case.q.rows(rows.clone()), ..case.clone() };
            let state = |attention, first| {
                let state = AttnState::from_inputs(attention, some.inputs(), exec).unwrap();
                state.rows_from(rows.start).unwrap().starting_at(first).unwrap()
            };
            let pushed = |mut state: AttnState<'_>, keys: &[core::ops::Range<usize>]| {
                for keys in keys {
                    state
                        .push(case.k.view().rows(keys.clone()).unwrap(), case.v.view().rows(keys.clone()).unwrap())
                        .unwrap();
                }
                let mut full = some.unwritten(Wanted::LEAST);
                state.read(full.outputs()).unwrap();
                full.out
            };
            let what = format!("{isa}, {rows:?}");
            let expected = whole.out.rows(rows.clone());
            assert_same_bits(&what, &pushed(state(attention, 0), &[0..100, 100..613, 613..700]), &expected);
            let (mut early, mut late) = (state(attention, 0), state(attention, 512));
            for (state, keys) in [(&mut early, 0..512), (&mut late, 512..700)] {
                let [k, v] = [&case.k, &case.v].map(|x| x.view().rows(keys.clone()).unwrap());
                state.push(k, v).unwrap();
            }
            early.merge(&late).unwrap();
            assert_same_bits(&format!("{what}, merged"), &pushed(early, &[]), &expected);
        }
        let none = AttnState::from_inputs(case.attention(), case.inputs(), exec).unwrap();
        let error = AttnState::from_inputs(attention, case.inputs(), exec).unwrap().merge(&none).unwrap_err();
        let words = "later state: dropout is none, but this state has 0.4, seed 5, offset 1";
        assert_eq!(error.to_string(), words, "{isa}");
    }
}
