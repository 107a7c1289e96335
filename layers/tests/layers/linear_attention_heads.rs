//! Linear attention with unequal heads of keys and values, and with lengths: the bits of heads written out, and of each
//! sequence alone.

use crate::linear_attention_support::{Case, FORMS, RULES, Rule, execs};
use crate::support::{Tensor, assert_same_bits};
use sdpa::{Error, Exec, ViewMut};
use sdpa_layers::{Compute, FeatureMap, LinearAttention, LinearState, Normaliser, Reach};

/// Every head `times` times, one behind the other.
fn repeated(x: &Tensor, times: usize) -> Tensor {
    let [b, h, l, d] = x.shape;
    Tensor::from_fn([b, h * times, l, d], |[b, h, l, d]| x.get([b, h / times, l, d]))
}

/// Some first heads.
fn fewer(x: &Tensor, heads: usize) -> Tensor {
    x.part(0..x.shape[0], 0..heads, 0..x.shape[2])
}

#[test]
fn heads_that_share_keys_values_or_queries_are_those_written_out() {
    // Heads of queries, keys and values.
    for [q, k, v] in [[2, 2, 4], [4, 2, 4], [8, 2, 4], [1, 1, 6], [6, 6, 2], [3, 6, 2], [12, 6, 1], [2, 4, 4]] {
        let (states, group) = (k.max(v), (q / k.max(v)).max(1));
        for rule in RULES {
            let full = Case::new(rule, Normaliser::None, [2, states, group, 23, 23, 9, 17], 4);
            let case = Case { q: fewer(&full.q, q), k: fewer(&full.k, k), v: fewer(&full.v, v), ..full.clone() };
            let q_times = if q < states { states / q } else { 1 };
            let (all_q, all_k) = (repeated(&case.q, q_times), repeated(&case.k, states / k));
            let full = Case { q: all_q, k: all_k, v: repeated(&case.v, states / v), ..full };
            for form in FORMS {
                for (isa, exec) in execs() {
                    let layer = LinearAttention::new().form(form);
                    let (got, expected) = (case.run(layer, exec), full.run(layer, exec));
                    let what = format!("{q}, {k}, {v} heads, {rule:?}, {form:?}, {isa}");
                    assert_same_bits(&what, &got.out, &expected.out);
                    assert_eq!(got.state, expected.state, "{what}");
                }
            }
        }
    }
}

#[test]
fn padding_changes_nothing() {
    let lens = [13, 0, 23, 4];
    for rule in RULES {
        for normaliser in [Normaliser::None, Normaliser::KeySum] {
            if normaliser == Normaliser::KeySum && matches!(rule, Rule::Delta | Rule::GatedDelta) {
                continue;
            }
            let mut case = Case::new(rule, normaliser, [4, 2, 2, 23, 23, 9, 17], 5);
            for tensor in
                [&mut case.q, &mut case.k, &mut case.v].into_iter().chain(&mut case.log_decay).chain(&mut case.beta)
            {
                let shape = tensor.shape;
                for at in crate::support::indices(shape).filter(|&[b, _, l, _]| l >= lens[b]) {
                    tensor.set(at, f32::NAN);
                }
            }
            case.lens = Some(lens.to_vec());
            for form in FORMS {
                let layer =
                    LinearAttention::new().form(form).normaliser(normaliser).feature_map(FeatureMap::EluPlusOne);
                for (isa, exec) in execs() {
                    let got = case.run(layer, exec);
                    let size = got.state.as_slice().len() / 4;
                    for (b, &len) in lens.iter().enumerate() {
                        let what = format!("{rule:?}, {normaliser:?}, {form:?}, {isa}, sequence {b}");
                        let part = |x: &Tensor| x.part(b..b + 1, 0..x.shape[1], 0..len);
                        let mut alone = case.map(part);
                        alone.state = match normaliser {
                            Normaliser::None => LinearState::new([1, 2, 9, 17]).unwrap(),
                            _ => LinearState::normalised([1, 2, 9, 17]).unwrap(),
                        };
                        alone.state.as_mut_slice().copy_from_slice(&case.state.as_slice()[b * size..][..size]);
                        let expected = alone.run(layer, exec);
                        assert_same_bits(&what, &got.out.part(b..b + 1, 0..4, 0..len), &expected.out);
                        assert_eq!(expected.state.as_slice(), &got.state.as_slice()[b * size..][..size], "{what}");
                        let padding = got.out.part(b..b + 1, 0..4, len..23);
                        assert!(
                            crate::support::indices(padding.shape).all(|at| padding.get(at).to_bits() == 0),
                            "{what}"
                        );
                    }
                }
            }
        }
    }
}

/// With all keys in reach, lengths count keys, and every row is a query.
#[test]
fn padded_keys_are_out_of_reach() {
    let mut case = Case::new(Rule::Linear, Normaliser::None, [2, 2, 1, 5, 23, 9, 17], 6);
    let first = Case { k: case.k.rows(0..11), v: case.v.rows(0..11), ..case.clone() };
    case.lens = Some(vec![11, 11]);
    case.k.fill_row(11, f32::NAN);
    for form in FORMS {
        let layer = LinearAttention::new().form(form).reach(Reach::Whole);
        let (got, expected) = (case.run(layer, Exec::serial()), first.run(layer, Exec::serial()));
        assert_same_bits(&format!("{form:?}"), &got.out, &expected.out);
    }
}

#[test]
fn heads_and_lengths_that_do_not_fit_are_refused() {
    let full = Case::new(Rule::GatedDelta, Normaliser::None, [2, 4, 1, 5, 5, 3, 2], 7);
    let said = |case: &Case, out: [usize; 4]| {
        let (mut state, mut memory) = (case.state.clone(), vec![42.0; out.iter().product()]);
        let view = ViewMut::bhld(&mut memory, out).unwrap();
        let error: Error =
            LinearAttention::new().forward(case.inputs(), &mut state, view, &mut Compute::default()).unwrap_err();
        assert!(memory.iter().all(|&x| x == 42.0) && state == case.state, "a refused call wrote");
        error.to_string()
    };
    let out = [2, 4, 5, 2];
    let heads = |q, k, v| Case { q: fewer(&full.q, q), k: fewer(&full.k, k), v: fewer(&full.v, v), ..full.clone() };
    assert_eq!(said(&heads(4, 3, 4), out), "v: heads is 4, but k has 3");
    assert_eq!(said(&heads(3, 2, 4), out), "v: heads is 4, but k has 2");
    assert_eq!(said(&heads(3, 4, 4), out), "q: 3 heads are no multiple of the 4 heads of k");
    assert_eq!(said(&heads(2, 2, 4), [2, 2, 5, 2]), "out: heads is 2, but v has 4");
    let mut narrow = heads(2, 2, 4);
    narrow.state = LinearState::new([2, 2, 3, 2]).unwrap();
    assert_eq!(said(&narrow, out), "state: heads is 2, but v has 4");
    let mut short = heads(2, 2, 4);
    short.beta = Some(fewer(short.beta.as_ref().unwrap(), 2));
    assert_eq!(said(&short, out), "beta: heads is 2, but v has 4");
    let rows = Case { v: full.v.rows(0..4), ..heads(2, 2, 4) };
    assert_eq!(said(&rows, out), "v: rows is 4, but k has 5");
    let lens = |lens: &[usize]| Case { lens: Some(lens.to_vec()), ..full.clone() };
    assert_eq!(said(&lens(&[5]), out), "lens: length is 1, but the batch has 2");
    assert_eq!(said(&lens(&[5, 6]), out), "lens: entry 1 is 6, but must be at most 5, the rows of k");
}
