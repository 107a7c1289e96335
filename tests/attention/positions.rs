//! Rows and keys with given positions: the bits of default ones, the oracle's numbers, packed documents,
//! padding, refusals.

use crate::options::{Case, Full, Wanted, check_against_oracle, kept};
use crate::support::{Rng, Tensor, Tensors, assert_same_bits, execs, fewer};
use sdpa::masks::Documents;
use sdpa::{
    Alignment, Attention, AttnState, Error, Exec, Inputs, KvCache, KvShape, Mods, Outputs, Position, Run, View,
    ViewMut, Window, naive,
};

/// The positions that rows and keys have without any of their own.
pub(crate) fn default_positions(case: &Case) -> Case {
    let offset = |b: usize| case.offset(b) as i32;
    let rows = (0..case.batch()).map(|b| (0..case.rows(b)).map(|i| offset(b) + i as i32).collect()).collect();
    let keys = (0..case.batch()).map(|b| (0..case.kv_len(b) as i32).collect()).collect();
    Case { positions: [Some(kept(rows)), Some(kept(keys))], ..case.clone() }
}

/// Random positions, in order or not, of rows, keys or both. With slopes none is far away, as scores would be huge.
pub(crate) fn random_positions(rng: &mut Rng, case: &Case) -> Case {
    let mut lists = |len: &dyn Fn(usize) -> usize| -> Vec<Vec<i32>> {
        let mut list = |n: usize| -> Vec<i32> {
            let most = 2 * n + 2;
            match rng.below(5) {
                // Documents that count from 0.
                0 => {
                    let len = 1 + rng.below(n + 1);
                    (0..n).map(|i| (i % len) as i32).collect()
                }
                // Padding on the left.
                1 => {
                    let (pad, far) = (rng.below(n + 1), if case.alibi.is_some() { 9 } else { i32::MAX });
                    (0..n).map(|i| if i < pad { far } else { (i - pad) as i32 }).collect()
                }
                // Far below 0.
                2 if case.alibi.is_none() => (0..n).map(|_| i32::MIN + rng.below(most) as i32).collect(),
                _ => (0..n).map(|_| rng.below(most) as i32 - 9).collect(),
            }
        };
        (0..case.batch()).map(|b| list(len(b))).collect()
    };
    let (rows, keys) = (lists(&|b| case.rows(b)), lists(&|b| case.kv_len(b)));
    let which = rng.below(6);
    let case = case.clone();
    let given = |lists, given: bool| given.then(|| kept(lists));
    Case { positions: [given(rows, which != 0), given(keys, which != 1)], ..case }
}

/// Positions that a state takes: of keys, mostly of rows too.
pub(crate) fn of_state(rng: &mut Rng, case: &Case) -> Case {
    loop {
        let case = random_positions(rng, case);
        if case.positions[1].is_some() {
            return case;
        }
    }
}

pub(crate) fn assert_same_full(what: &str, got: &Full, expected: &Full) {
    assert_same_bits(what, &got.out, &expected.out);
    assert_same_bits(what, &got.lse, &expected.lse);
    let others = |full: &Full| full.points.clone().into_iter().chain([full.mass.clone()]).flatten().collect::<Vec<_>>();
    for (got, expected) in others(got).iter().zip(&others(expected)) {
        assert_same_bits(what, got, expected);
    }
}

/// Half of the cases are of few rows and more than one key block, which split-KV computes.
pub(crate) fn random_case(rng: &mut Rng, seed: u64) -> Case {
    let heads = rng.pick(&[[2, 1], [2, 2], [4, 2]]);
    let mut case = match seed % 2 {
        0 => Case::random(rng, 200_000),
        _ => {
            let (batch, rows, keys) = (1 + rng.below(3), 1 + rng.below(5), 257 + rng.below(600));
            Case::of_sizes(rng, [batch, heads[0], heads[1], rows, keys, 16, 16])
        }
    };
    if rng.below(2) == 0 {
        case.causal = true;
        case.alignment = case.alignment.or(Some(Alignment::BottomRight));
    }
    case
}

#[test]
fn default_positions_have_the_bits_of_none() {
    for seed in 0..fewer(200) {
        let case = random_case(&mut Rng::new(seed), seed);
        let given = default_positions(&case);
        for (isa, exec) in execs() {
            for wanted in [Wanted::LEAST, Wanted::ALL] {
                let what = format!("seed {seed}, {isa}");
                assert_same_full(&what, &given.run(exec, wanted), &case.run(exec, wanted));
            }
        }
    }
}

#[test]
fn random_positions_have_the_numbers_of_the_oracle() {
    for seed in 0..fewer(400) {
        let mut rng = Rng::new(1000 + seed);
        let case = random_case(&mut rng, seed);
        let case = random_positions(&mut rng, &case);
        let oracle = case.oracle::<f64>();
        for (isa, exec) in execs() {
            for wanted in [Wanted::LEAST, Wanted::ALL] {
                check_against_oracle(&format!("seed {seed}, {isa}"), &case, &case.run(exec, wanted), &oracle);
            }
        }
    }
}

#[test]
fn a_cache_has_the_bits_of_tensors() {
    for seed in 0..fewer(60) {
        let mut rng = Rng::new(2000 + seed);
        let (rows, keys) = (rng.pick(&[1, 3, 40]), 1 + rng.below(700));
        let case = Case::plain(&mut rng, [2, 4, 2, rows, keys, 16, 16]);
        let window =
            (rng.below(2) == 0).then(|| Window::inclusive(Some(rng.below(400)), None).keep_first(rng.below(3)));
        let alibi = (rng.below(2) == 0).then(|| vec![0.1, 0.2, 0.3, 0.02]);
        let alignment = Some(Alignment::BottomRight);
        let case = random_positions(&mut rng, &Case { causal: true, window, alibi, alignment, ..case });
        let mut cache = KvCache::new(2, KvShape { kv_heads: 2, head_dim: 16, value_dim: 16 }).expect("good sizes");
        cache.append(case.k.view(), case.v.view()).expect("they fit");
        for (isa, exec) in execs() {
            let got = case.run_over(Inputs::cached(case.q.view(), &cache), exec, Wanted::LEAST);
            assert_same_full(&format!("seed {seed}, {isa}"), &got, &case.run(exec, Wanted::LEAST));
        }
    }
}

#[test]
fn functions_are_told_the_distance() {
    let mut rng = Rng::new(3);
    let case = Case::plain(&mut rng, [2, 2, 1, 30, 300, 8, 8]);
    for case in [case.clone(), default_positions(&case), random_positions(&mut rng, &case)] {
        // Both of the rules of a call, as functions.
        let alibi =
            case.positions[0].is_none() || case.positions[1].is_none_or(|x| x[0].iter().all(|&x| x.abs() < 1000));
        let slope = if alibi { 0.01 } else { 0.0 };
        let near = |at: Position| at.distance >= 0 && at.distance < 50;
        let mods = Mods::new().mask(near).score(|s: f32, at: Position| s - slope * (at.distance as f32).abs());
        let window = Window::last_tokens(50.try_into().expect("not 0"));
        let slopes = [slope; 2];
        let attention = case.attention().align(Alignment::TopLeft);
        let expected = naive::oracle(&attention.window(window), &case.inputs().alibi(&slopes)).expect("good");
        for (isa, exec) in execs() {
            let mut full = case.unwritten(Wanted::LEAST);
            let problem = attention.problem(case.inputs(), full.outputs()).expect("a good call");
            problem.run_once_with(exec, Run::new().mods(&mods)).expect("functions that fit");
            check_against_oracle(&format!("{isa}"), &case, &full, &expected);
        }
    }
}

#[test]
fn a_row_that_sees_no_key_has_zeros_and_no_sum() {
    let case = Case::plain(&mut Rng::new(4), [1, 2, 1, 3, 300, 16, 16]);
    let positions = [Some(kept(vec![vec![4, i32::MIN, 5]])), Some(kept(vec![vec![5; 300]]))];
    let case = Case { causal: true, positions, ..case };
    for (isa, exec) in execs() {
        let full = case.run(exec, Wanted::LEAST);
        for [_, h, i] in case.every_row() {
            let zeros = (0..16).all(|c| full.out.get([0, h, i, c]).to_bits() == 0);
            assert_eq!((zeros, full.lse.get([0, h, i, 0]) == f32::NEG_INFINITY), (i < 2, i < 2), "{isa}, row {i}");
        }
    }
}

/// A causal rule, a window and slopes.
fn measured(rng: &mut Rng, [batch, rows]: [usize; 2]) -> Case {
    let window = Some(Window::inclusive(Some(100), None).keep_first(3));
    let plain = Case::plain(rng, [batch, 2, 1, rows, rows, 16, 24]);
    Case { causal: true, window, alibi: Some(vec![0.2, 0.01]), ..plain }
}

/// Asserts that some rows of a call's answer are those of a text by itself: its bits, or the numbers of its oracle.
fn check_part(what: &str, text: &Case, [b, first]: [usize; 2], whole: &Full, exec: Exec) {
    let part = |x: &Tensor| x.part(b..b + 1, 0..2, first..first + text.rows(0));
    let got = Full { out: part(&whole.out), lse: part(&whole.lse), ..text.unwritten(Wanted::LEAST) };
    check_against_oracle(what, text, &got, &text.oracle());
    // Then every key has its place in a block.
    if first.is_multiple_of(256) {
        assert_same_full(what, &got, &text.run(exec, Wanted::LEAST));
    }
}

#[test]
fn documents_that_count_from_0_are_each_computed_as_if_alone() {
    let mut rng = Rng::new(5);
    for lens in [&[256, 30, 7][..], &[40, 270, 1], &[512, 17, 239, 9]] {
        let ends: Vec<usize> = (0..=lens.len()).map(|n| lens[..n].iter().sum()).collect();
        let case = measured(&mut rng, [1, lens.iter().sum()]);
        let counted = || kept(vec![lens.iter().flat_map(|&len| 0..len as i32).collect()]);
        let packed = Case { positions: [Some(counted()), Some(counted())], ..case.clone() };
        let ragged = default_positions(&Case { ragged: Some([ends.clone(), ends.clone()]), ..case.clone() });
        let mods = Mods::new().mask(Documents::by_ends(&ends[1..]).expect("in order"));
        for (isa, exec) in execs() {
            let (mut full, apart) = (packed.unwritten(Wanted::LEAST), ragged.run(exec, Wanted::LEAST));
            let problem = packed.attention().problem(packed.inputs(), full.outputs()).expect("a good call");
            problem.run_once_with(exec, Run::new().mods(&mods)).expect("documents that fit");
            for (n, &first) in ends[..lens.len()].iter().enumerate() {
                let (what, text) = (format!("{lens:?}, document {n}, {isa}"), ragged.sequence(n));
                let text = Case { positions: [None; 2], ..text };
                check_part(&what, &text, [0, first], &full, exec);
                assert_same_bits(&what, &apart.out.rows(first..ends[n + 1]), &text.run(exec, Wanted::LEAST).out);
            }
        }
    }
}

#[test]
fn padding_on_the_left_leaves_each_text_as_it_is() {
    let mut rng = Rng::new(6);
    for (rows, pads) in [(40, [0, 7, 39]), (300, [256, 44, 299]), (530, [512, 256, 100])] {
        let case = measured(&mut rng, [3, rows]);
        let behind = |far: i32| {
            let at = |pad: usize| (0..rows).map(|i| if i < pad { far } else { (i - pad) as i32 }).collect();
            Some(kept(pads.map(at).to_vec()))
        };
        let padded = Case { positions: [behind(i32::MIN), behind(i32::MAX)], ..case.clone() };
        for (isa, exec) in execs() {
            let full = padded.run(exec, Wanted::LEAST);
            for (b, pad) in pads.into_iter().enumerate() {
                let part = |x: &Tensor| x.part(b..b + 1, 0..x.shape[1], pad..rows);
                let text = Case { q: part(&case.q), k: part(&case.k), v: part(&case.v), ..case.clone() };
                check_part(&format!("{rows} rows, {pad} of them padding, {isa}"), &text, [b, pad], &full, exec);
                assert!(full.out.part(b..b + 1, 0..2, 0..pad).data.iter().all(|&x| x == 0.0), "{isa}: rows of padding");
            }
        }
    }
}

/// The case with lists of key positions as long as its keys: those of padding are any.
pub(crate) fn with_positions_of_padding(rng: &mut Rng, case: &Case) -> Case {
    let lists = case.positions[1].expect("positions of keys");
    let mut padded = |b: usize| {
        let mut list = lists[b].to_vec();
        list.resize_with(case.keys(b), || rng.pick(&[i32::MIN, -1, 0, 3, i32::MAX]));
        list
    };
    let lists = (0..case.batch()).map(&mut padded).collect();
    Case { positions: [case.positions[0], Some(kept(lists))], ..case.clone() }
}

/// The case with lengths, and positions of keys.
pub(crate) fn with_lengths_and_positions(rng: &mut Rng, case: Case) -> Case {
    let kv_lens = (0..case.batch()).map(|b| rng.below(case.keys(b) + 1)).collect();
    of_state(rng, &Case { kv_lens: Some(kv_lens), ..case })
}

#[test]
fn positions_of_padding_are_not_read() {
    let mut padding = 0;
    for seed in 0..fewer(200) {
        let mut rng = Rng::new(7000 + seed);
        let case = random_case(&mut rng, seed);
        let case = with_lengths_and_positions(&mut rng, case);
        let padded = with_positions_of_padding(&mut rng, &case);
        padding += (0..case.batch()).map(|b| case.keys(b) - case.kv_len(b)).sum::<usize>();
        let oracle = |case: &Case| case.oracle::<f64>().out.into_iter().map(f64::to_bits).collect::<Vec<_>>();
        assert_eq!(oracle(&padded), oracle(&case), "seed {seed}");
        for (isa, exec) in execs() {
            for wanted in [Wanted::LEAST, Wanted::ALL] {
                let what = format!("seed {seed}, {isa}");
                assert_same_full(&what, &padded.run(exec, wanted), &case.run(exec, wanted));
            }
        }
    }
    assert!(padding > 1000, "{padding} keys of padding");
}

#[test]
fn positions_that_do_not_fit_are_refused() {
    let x = [0.5; 2 * 3 * 4];
    let x = View::bhld(&x, [2, 1, 3, 4]).expect("dense");
    let inputs = Inputs::new(x, x, x);
    let words = |inputs: Inputs<'_>| {
        let mut out = [42.0; 24];
        let error = sdpa::attention(
            &Attention::new(),
            inputs,
            Outputs::new(ViewMut::bhld(&mut out, [2, 1, 3, 4]).expect("dense")),
        );
        assert_eq!(out, [42.0; 24]);
        error.expect_err("a mistake").to_string()
    };
    let all: [&[i32]; 2] = [&[0, 1, 2]; 2];
    let text = words(inputs.row_positions(&all[..1]));
    assert!(text.contains("row positions") && text.contains('1') && text.contains('2'), "{text}");
    let text = words(inputs.key_positions(&[&[0, 1, 2], &[0, 1]]));
    assert!(text.contains("key positions") && text.contains('2') && text.contains('3'), "{text}");
    let text = words(inputs.kv_lens(&[3, 1]).key_positions(&[&[0, 1, 2], &[0, 1]]));
    assert_eq!(text, "key positions: length is 2, but the keys of that sequence has 1");
    let text = words(inputs.kv_lens(&[3, 1]).key_positions(&[&[0, 1, 2], &[0, 1, 2, 3]]));
    assert_eq!(text, "key positions: length is 4, but the keys of that sequence has 1");
    let text = words(inputs.key_positions(&[&[0, 1, 2], &[0, 1, 2, 3]]));
    assert_eq!(text, "key positions: length is 4, but the keys of that sequence has 3");
    let state = |inputs| AttnState::from_inputs(Attention::new(), inputs, Exec::default());
    let error = state(inputs.row_positions(&all)).expect_err("rows alone");
    assert!(matches!(error, Error::Needs { argument: "row positions", .. }), "{error}");
    let mut state = state(inputs.key_positions(&all)).expect("a state");
    state.push(x, x).expect("a position for each key");
    let text = state.push(x, x).expect_err("more keys").to_string();
    assert_eq!(text, "k: rows is 3, but must be at most 0, the key positions that are left");
}

/// A sequence needs positions for the keys that it has, however many are pushed for the others.
#[test]
fn a_short_sequence_has_as_many_positions_as_keys() {
    let tensors = Tensors::normal([2, 1, 1, 3, 700, 4, 4], 5);
    let (long, short): (Vec<i32>, Vec<i32>) = ((0..700).map(|n| 699 - n).collect(), (0..10).rev().collect());
    // Positions of the padding may be there, too.
    let padded: Vec<i32> = short.iter().copied().chain((10..700).map(|n| n % 7)).collect();
    for short in [short, padded] {
        check_short(&tensors, &[&long, &short]);
    }
}

fn check_short(tensors: &Tensors, keys: &[&[i32]; 2]) {
    let rows: [&[i32]; 2] = [&[5, 300, 600], &[9, 5, 0]];
    let inputs = tensors.inputs().kv_lens(&[700, 10]).row_positions(&rows).key_positions(keys);
    let attention = Attention::new().causal();
    let [mut whole, mut parts] = [[0.0; 24]; 2];
    fn outputs(out: &mut [f32]) -> Outputs<'_> {
        Outputs::new(ViewMut::bhld(out, [2, 1, 3, 4]).expect("dense"))
    }
    sdpa::attention(&attention, inputs, outputs(&mut whole)).expect("a good call");
    let mut state = AttnState::from_inputs(attention, inputs, Exec::serial()).expect("a state");
    for cut in [0..5, 5..300, 300..600, 600..700] {
        let part = |x: &Tensor| x.part(0..2, 0..1, cut.clone());
        state.push(part(&tensors.k).view(), part(&tensors.v).view()).expect("they have positions");
    }
    state.read(outputs(&mut parts)).expect("they fit");
    assert_eq!(whole.map(f32::to_bits), parts.map(f32::to_bits));
}
