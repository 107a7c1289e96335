//! Every way a call of linear attention can be wrong: the error, its words, and state and output as they were.

use sdpa::{Error, Exec, View, ViewMut};
use sdpa_layers::{Compute, Form, LinearAttention, LinearInputs, LinearState, Normaliser, Reach, Update};

/// Shapes of q, k, v, log_decay, beta, state and out.
type Shapes = [[usize; 4]; 7];

/// A good call: batch 2, 4 heads on 2, 3 tokens, dims 6 and 7.
const GOOD: Shapes = [[2, 4, 3, 6], [2, 2, 3, 6], [2, 2, 3, 7], [2, 2, 3, 6], [2, 2, 3, 1], [2, 2, 6, 7], [2, 4, 3, 7]];

#[derive(Clone, Copy, PartialEq, Eq)]
enum Rule {
    Linear,
    Gated,
    Delta,
    GatedDelta,
}

/// The error of a call with these shapes, checked to have left state and output alone.
fn refusal(layer: LinearAttention, rule: Rule, shapes: Shapes, normalised: bool) -> Option<Error> {
    let n = |shape: [usize; 4]| shape.iter().product::<usize>();
    let data: Vec<Vec<f32>> = shapes[..5].iter().map(|&shape| vec![-0.5; n(shape)]).collect();
    let view = |i: usize| View::bhld(&data[i], shapes[i]).unwrap();
    let (log_decay, beta) = (view(3), view(4));
    let update = match rule {
        Rule::Linear => Update::Linear,
        Rule::Gated => Update::Gated { log_decay },
        Rule::Delta => Update::Delta { beta },
        Rule::GatedDelta => Update::GatedDelta { log_decay, beta },
    };
    let mut state = if normalised { LinearState::normalised(shapes[5]) } else { LinearState::new(shapes[5]) }.unwrap();
    state.as_mut_slice().fill(42.0);
    let before = state.clone();
    let mut out = vec![42.0f32; n(shapes[6])];
    let inputs = LinearInputs::new(view(0), view(1), view(2), update);
    let mut compute = Compute::new(Exec::serial());
    let error = layer.forward(inputs, &mut state, ViewMut::bhld(&mut out, shapes[6]).unwrap(), &mut compute).err();
    if error.is_some() {
        assert!(out.iter().all(|&x| x == 42.0) && state == before, "a refused call wrote: {error:?}");
    } else {
        assert!(out.iter().all(|&x| x != 42.0), "a good call did not write");
    }
    error
}

#[track_caller]
fn says(error: Option<Error>, words: &str) {
    assert_eq!(error.map(|error| error.to_string()).as_deref(), Some(words));
}

#[test]
fn good_calls_are_no_errors() {
    for form in [Form::Recurrent, Form::Chunked(1), Form::Chunked(1024)] {
        for rule in [Rule::Linear, Rule::Gated, Rule::Delta, Rule::GatedDelta] {
            assert_eq!(refusal(LinearAttention::new().form(form), rule, GOOD, false), None);
        }
    }
    let mut cross = GOOD;
    (cross[1][2], cross[2][2]) = (5, 5);
    assert_eq!(refusal(LinearAttention::new().reach(Reach::Whole), Rule::Linear, cross, false), None);
    let normalised = LinearAttention::new().normaliser(Normaliser::KeySum);
    assert_eq!(refusal(normalised, Rule::Gated, GOOD, true), None);
    let mut one_for_all = GOOD;
    (one_for_all[3], one_for_all[4]) = ([1, 2, 1, 1], [1, 1, 3, 1]);
    assert_eq!(refusal(LinearAttention::new(), Rule::GatedDelta, one_for_all, false), None);
}

#[test]
fn sizes_that_do_not_match() {
    for (tensor, dim, size, words) in [
        (1, 0, 9, "k: batch is 9, but q has 2"),
        (2, 0, 9, "v: batch is 9, but q has 2"),
        (1, 3, 9, "k: head_dim is 9, but q has 6"),
        (2, 1, 9, "v: heads is 9, but k has 2"),
        (2, 2, 9, "v: rows is 9, but k has 3"),
        (0, 1, 3, "q: 3 heads are no multiple of the 2 heads of k"),
        (0, 2, 9, "k: rows is 3, but q has 9"),
        (3, 0, 9, "log_decay: batch is 9, but k has 2"),
        (3, 1, 9, "log_decay: heads is 9, but k has 2"),
        (3, 1, 0, "log_decay: heads is 0, but k has 2"),
        (3, 2, 9, "log_decay: rows is 9, but k has 3"),
        (3, 3, 9, "log_decay: head_dim is 9, but k has 6"),
        (4, 0, 9, "beta: batch is 9, but k has 2"),
        (4, 1, 4, "beta: heads is 4, but k has 2"),
        (4, 2, 9, "beta: rows is 9, but k has 3"),
        (4, 3, 6, "beta: last dimension is 6, but k has 1"),
        (5, 0, 9, "state: batch is 9, but q has 2"),
        (5, 1, 4, "state: heads is 4, but k has 2"),
        (5, 2, 9, "state: head_dim is 9, but q has 6"),
        (5, 3, 9, "state: value_dim is 9, but v has 7"),
        (6, 0, 9, "out: batch is 9, but q has 2"),
        (6, 1, 2, "out: heads is 2, but q has 4"),
        (6, 2, 0, "out: rows is 0, but q has 3"),
        (6, 3, 9, "out: value_dim is 9, but v has 7"),
    ] {
        let mut shapes = GOOD;
        shapes[tensor][dim] = size;
        says(refusal(LinearAttention::new(), Rule::GatedDelta, shapes, false), words);
    }
    let mut empty = GOOD;
    (empty[0][3], empty[1][3]) = (0, 0);
    says(refusal(LinearAttention::new(), Rule::Linear, empty, false), "q: head_dim is 0, but must be at least 1");
}

#[test]
fn settings_that_do_not_fit() {
    let new = LinearAttention::new();
    for (layer, rule, normalised, words) in [
        (new.scale(f32::NAN), Rule::Linear, false, "scale: NaN, but must be finite"),
        (new.scale(f32::INFINITY), Rule::Linear, false, "scale: inf, but must be finite"),
        (new.form(Form::Chunked(0)), Rule::Linear, false, "form: length of a chunk is 0, but must be at least 1"),
        (
            new.form(Form::Chunked(1025)),
            Rule::Linear,
            false,
            "form: length of a chunk is 1025, but must be at most 1024, the longest possible",
        ),
        (
            new.normaliser(Normaliser::KeySum),
            Rule::Linear,
            false,
            "the normaliser: needs a state made by LinearState::normalised",
        ),
        (
            new,
            Rule::Linear,
            true,
            "a normalised state: needs the normaliser it was made for: without it the sums of its keys would not go on",
        ),
    ] {
        says(refusal(layer, rule, GOOD, normalised), words);
    }
    for rule in [Rule::Gated, Rule::Delta, Rule::GatedDelta] {
        says(
            refusal(new.reach(Reach::Whole), rule, GOOD, false),
            "whole reach: needs the linear update: under the others the order of the keys counts",
        );
    }
    for rule in [Rule::Delta, Rule::GatedDelta] {
        says(
            refusal(new.normaliser(Normaliser::KeySum), rule, GOOD, true),
            "the normaliser: needs an update that adds: under a delta rule there is no sum of weights",
        );
    }
}

#[test]
fn states() {
    let state = LinearState::new([2, 3, 4, 5]).unwrap();
    assert_eq!((state.shape(), state.as_slice()), ([2, 3, 4, 5], &[0.0; 120][..]));
    let state = LinearState::normalised([2, 3, 4, 5]).unwrap();
    assert_eq!((state.shape(), state.as_slice().len()), ([2, 3, 4, 5], 144));
    for shape in [[1 << 40, 1 << 40, 1, 1], [1, 1, 1, usize::MAX], [1, 1, 1 << 61, 1]] {
        for state in [LinearState::new(shape), LinearState::normalised(shape)] {
            assert_eq!(state.unwrap_err(), Error::TooLarge { what: "state", sizes: shape });
        }
    }
    for (shape, what) in [([2, 3, 0, 5], "head_dim"), ([2, 3, 4, 0], "value_dim"), ([0, 0, 0, 0], "head_dim")] {
        for state in [LinearState::new(shape), LinearState::normalised(shape)] {
            assert_eq!(state.unwrap_err(), Error::Empty { argument: "state", what });
        }
    }
    assert!(LinearState::new([0, 3, 4, 5]).is_ok_and(|state| state.as_slice().is_empty()));
    let none = LinearState::new([1 << 29, 1 << 29, 1, 1]).unwrap_err();
    assert_eq!(none, Error::Memory { what: "state", bytes: 1 << 60 });
    let none = LinearState::normalised([1 << 29, 1 << 28, 1, 1]).unwrap_err();
    assert_eq!(none, Error::Memory { what: "state", bytes: 1 << 60 });
}

/// Heads without queries would take in no keys, in silence.
#[test]
fn no_heads_read_a_state() {
    let mut shapes = GOOD;
    (shapes[0][1], shapes[6][1]) = (0, 0);
    says(refusal(LinearAttention::new(), Rule::Linear, shapes, false), "q: heads is 0, but must be at least 1");
}

/// Many heads that share a state, each with a long query: of one number, repeated.
#[test]
fn scratch_that_there_is_no_memory_for() {
    const HEADS: usize = 1 << 23;
    const DIM: usize = 1 << 24;
    let one = [1.0f32];
    let repeat = |shape| View::from_strides(&one, 0, shape, [0; 4]).unwrap();
    let inputs = LinearInputs::new(repeat([1, HEADS, 1, DIM]), repeat([1, 1, 1, DIM]), repeat([1; 4]), Update::Linear);
    let (mut state, mut out) = (LinearState::new([1, 1, DIM, 1]).unwrap(), vec![0.0; HEADS]);
    let out = ViewMut::bhld(&mut out, [1, HEADS, 1, 1]).unwrap();
    let refused = LinearAttention::new().forward(inputs, &mut state, out, &mut Compute::new(Exec::serial()));
    let bytes = 4 * ((3 + HEADS) * DIM + 1 + HEADS);
    assert_eq!(refused, Err(Error::Memory { what: "scratch", bytes }));
    assert!(state.as_slice().iter().all(|&x| x == 0.0));
}

/// Views that repeat one row for ever, and empty ones: nothing is read, nothing overflows.
#[test]
fn hostile_sizes() {
    let one = [1.0f32];
    let repeat = |shape| View::from_strides(&one, 0, shape, [0; 4]).unwrap();
    let mut compute = Compute::new(Exec::default());
    for form in [Form::Recurrent, Form::Chunked(1024)] {
        let layer = LinearAttention::new().form(form);
        // No batch, no rows, no heads, of very much.
        for [b, h, kv, l, d] in [[0, 1 << 30, 1 << 20, 1 << 12, 1], [1, 1 << 40, 2, 0, 1], [1, 0, 0, 1 << 50, 8]] {
            let mut state = LinearState::new([b, kv, d, d]).unwrap();
            let (q, k) = (repeat([b, h, l, d]), repeat([b, kv, l, d]));
            let out = ViewMut::bhld(&mut [], [b, h, l, d]).unwrap();
            layer.forward(LinearInputs::new(q, k, k, Update::Linear), &mut state, out, &mut compute).unwrap();
        }
        // A long sequence costs time, not memory; heads without rows cost nothing.
        let mut state = LinearState::new([1, 1, 1, 1]).unwrap();
        let (q, k) = (repeat([1, 1 << 40, 0, 1]), repeat([1, 1, 100_000, 1]));
        let out = ViewMut::bhld(&mut [], [1, 1 << 40, 0, 1]).unwrap();
        let whole = layer.reach(Reach::Whole);
        whole.forward(LinearInputs::new(q, k, k, Update::Linear), &mut state, out, &mut compute).unwrap();
        assert_eq!(state.as_slice(), [100_000.0]);
    }
}
