//! Wrong options, outputs and states: the words, and outputs as they were.

use sdpa::{
    Alignment, Attention, AttnState, Bound, Error, Exec, Inputs, KvShape, Mask, Outputs, Point, View, ViewMut, Window,
    merge,
};

/// Batch 2, 4 heads on 2, 3 rows, 5 keys, dims 6 and 7.
const Q: [usize; 4] = [2, 4, 3, 6];
const K: [usize; 4] = [2, 2, 5, 6];
const V: [usize; 4] = [2, 2, 5, 7];
const OUT: [usize; 4] = [2, 4, 3, 7];

static ZEROS: [f32; 512] = [0.0; 512];
/// Advice for biases and masks of some of the keys.
const FEWER: &str = "; mask_prefix and bias_prefix take fewer columns and hide the other keys; mask_suffix and bias_suffix \
        take the columns of the last keys";

static BYTES: [u8; 512] = [0; 512];

fn floats(shape: [usize; 4]) -> View<'static> {
    View::bhld(&ZEROS, shape).expect("small")
}

fn bytes(shape: [usize; 4]) -> View<'static, u8> {
    View::bhld(&BYTES, shape).expect("small")
}

fn good() -> Inputs<'static> {
    Inputs::new(floats(Q), floats(K), floats(V))
}

/// A change to the outputs of a call, given memory to put more of them.
type More = for<'a> fn(Outputs<'a>, &'a mut [f32]) -> Outputs<'a>;

fn none<'a>(outputs: Outputs<'a>, _: &'a mut [f32]) -> Outputs<'a> {
    outputs
}

/// The error of a call, checked to have left the outputs alone.
fn refusal(attention: Attention, inputs: Inputs<'_>, out_shape: [usize; 4], more: More) -> Option<Error> {
    let (mut out, mut rest) = (vec![42.0; 512], vec![42.0; 512]);
    let [b, h, l, _] = out_shape;
    let (lse, rest) = rest.split_at_mut(100);
    let outputs = Outputs::new(ViewMut::bhld(&mut out, out_shape).unwrap());
    let outputs = outputs.lse(ViewMut::bhl(lse, [b, h, l]).unwrap());
    let error = sdpa::attention(&attention, inputs, more(outputs, rest)).err();
    if error.is_some() {
        assert!(out.iter().chain(&*lse).chain(&*rest).all(|&x| x == 42.0), "a refused call wrote: {error:?}");
    }
    error
}

#[track_caller]
fn says(error: Option<Error>, words: &str) {
    assert_eq!(error.map(|error| error.to_string()).as_deref(), Some(words));
}

/// The words for a good call but for these inputs.
#[track_caller]
fn inputs_say(inputs: Inputs<'_>, words: &str) {
    says(refusal(Attention::new(), inputs, OUT, none), words);
}

#[test]
fn good_options_are_no_error() {
    let (lens, slopes, sinks) = ([5, 0], [0.5, -1.0, 0.0, 2.0], [0.0, f32::NEG_INFINITY, 1.0, 2.0]);
    let attention = Attention::new().causal().align(Alignment::BottomRight).softcap(1e-3).scale(-2.0);
    for shape in [[1, 1, 1, 1], [1, 1, 1, 5], [2, 1, 1, 1], [1, 4, 1, 5], [1, 2, 1, 5], [1, 1, 3, 5], [2, 4, 3, 5]] {
        let inputs = good().bias(floats(shape)).mask(Mask::keep(bytes(shape))).kv_lens(&lens);
        assert_eq!(refusal(attention, inputs.alibi(&slopes).sinks(&sinks), OUT, none), None);
    }
    for shape in [[1, 1, 1, 0], [2, 1, 1, 3], [2, 4, 3, 5], [1, 1, 1, 1]] {
        let inputs = good().bias_prefix(floats(shape)).mask_prefix(Mask::keep(bytes(shape))).kv_lens(&lens);
        assert_eq!(refusal(attention, inputs.alibi(&slopes).sinks(&sinks), OUT, none), None);
    }
}

#[test]
fn bias_and_mask_of_wrong_shapes() {
    let cases = [
        ([3, 1, 1, 5], "batch is 3, but the call has 2", ""),
        ([0, 1, 1, 5], "batch is 0, but the call has 2", ""),
        ([1, 3, 1, 5], "heads is 3, but the call has 4", ""),
        ([1, 0, 1, 5], "heads is 0, but the call has 4", ""),
        ([1, 1, 2, 5], "rows is 2, but the call has 3", ""),
        ([2, 4, 4, 5], "rows is 4, but the call has 3", ""),
        ([1, 1, 0, 5], "rows is 0, but the call has 3", ""),
        ([1, 1, 1, 6], "columns is 6, but k (rows) has 5", ""),
        ([1, 1, 1, 4], "columns is 4, but k (rows) has 5", FEWER),
        ([1, 1, 1, 0], "columns is 0, but k (rows) has 5", FEWER),
    ];
    for (shape, words, cause) in cases {
        let words = format!("{words}{cause}");
        inputs_say(good().bias(floats(shape)), &format!("bias: {words}"));
        inputs_say(good().mask(Mask::keep(bytes(shape))), &format!("mask: {words}"));
        inputs_say(good().mask(Mask::drop(bytes(shape))), &format!("mask: {words}"));
    }
    let error = refusal(Attention::new(), good().bias(floats([3, 1, 1, 5])), OUT, none);
    let expected = Error::Mismatch { argument: "bias", what: "batch", got: 3, expected: 2, of: "the call" };
    assert_eq!(error, Some(expected));
}

#[test]
fn key_lengths() {
    inputs_say(good().kv_lens(&[5, 6]), "kv_lens: entry 1 is 6, but must be at most 5, the keys of that sequence");
    inputs_say(
        good().kv_lens(&[usize::MAX, 6]),
        &format!("kv_lens: entry 0 is {}, but must be at most 5, the keys of that sequence", usize::MAX),
    );
    inputs_say(good().kv_lens(&[5]), "kv_lens: length is 1, but the batch has 2");
    inputs_say(good().kv_lens(&[]), "kv_lens: length is 0, but the batch has 2");
    inputs_say(good().kv_lens(&[1, 2, 3]), "kv_lens: length is 3, but the batch has 2");
    let error = refusal(Attention::new(), good().kv_lens(&[5, 6]), OUT, none);
    let expected = Error::Entry {
        argument: "kv_lens",
        index: 1,
        got: 6,
        bound: Bound::AtMost,
        limit: 5,
        of: "the keys of that sequence",
    };
    assert_eq!(error, Some(expected));
}

const RAGGED: [usize; 4] = [1, 4, 6, 7];

fn ragged<'a>(q: &'a [usize], k: &'a [usize]) -> Inputs<'a> {
    Inputs::new(floats([1, 4, 6, 6]), floats([1, 2, 9, 6]), floats([1, 2, 9, 7])).ragged(q, k)
}

#[test]
fn cumulative_lengths() {
    assert_eq!(refusal(Attention::new(), ragged(&[0, 2, 2, 6], &[0, 0, 5, 9]), RAGGED, none), None);
    let cases: [(&[usize], &[usize], &str); 11] = [
        (&[], &[0, 9], "ragged q: the list of cumulative lengths is 0, but must be at least 1"),
        (&[0, 6], &[], "ragged k: the list of cumulative lengths is 0, but must be at least 1"),
        (&[1, 6], &[0, 9], "ragged q: entry 0 is 1, but must be exactly 0, where cumulative lengths begin"),
        (&[0], &[0, 9], "ragged q: entry 0 is 0, but must be exactly 6, the number of rows"),
        (&[0, 6], &[2, 9], "ragged k: entry 0 is 2, but must be exactly 0, where cumulative lengths begin"),
        (&[0, 4, 3, 6], &[0, 1, 2, 9], "ragged q: entry 2 is 3, but must be at least 4, the entry before it"),
        (&[0, 1, 2, 6], &[0, 5, 4, 9], "ragged k: entry 2 is 4, but must be at least 5, the entry before it"),
        (&[0, 5], &[0, 9], "ragged q: entry 1 is 5, but must be exactly 6, the number of rows"),
        (&[0, 7], &[0, 9], "ragged q: entry 1 is 7, but must be exactly 6, the number of rows"),
        (&[0, 6], &[0, 10], "ragged k: entry 1 is 10, but must be exactly 9, the number of rows"),
        (&[0, 2, 6], &[0, 9], "ragged k: number of sequences is 1, but ragged q has 2"),
    ];
    for (q, k, words) in cases {
        says(refusal(Attention::new(), ragged(q, k), RAGGED, none), words);
    }
    inputs_say(good().ragged(&[0, 3], &[0, 5]), "q: batch is 2, but a ragged call has 1");
    // Lengths, biases and masks are by sequence.
    let ends: (&[usize], &[usize]) = (&[0, 2, 6], &[0, 4, 9]);
    let two = || ragged(ends.0, ends.1);
    let words = "kv_lens: entry 0 is 5, but must be at most 4, the keys of that sequence";
    says(refusal(Attention::new(), two().kv_lens(&[5, 5]), RAGGED, none), words);
    says(refusal(Attention::new(), two().kv_lens(&[4]), RAGGED, none), "kv_lens: length is 1, but the batch has 2");
    says(
        refusal(Attention::new(), two().bias(floats([1, 1, 6, 5])), RAGGED, none),
        "bias: rows is 6, but the call has 4",
    );
    says(
        refusal(Attention::new(), two().mask(Mask::keep(bytes([1, 1, 1, 9]))), RAGGED, none),
        "mask: columns is 9, but k (keys of the longest sequence) has 5",
    );
}

#[test]
fn slopes_and_sinks() {
    for values in [&[][..], &[0.0; 2], &[0.0; 5]] {
        let n = values.len();
        inputs_say(good().alibi(values), &format!("alibi slopes: length is {n}, but q (heads) has 4"));
        inputs_say(good().sinks(values), &format!("sinks: length is {n}, but q (heads) has 4"));
    }
    for (bad, words) in [(f32::NAN, "NaN"), (f32::INFINITY, "inf"), (f32::NEG_INFINITY, "-inf")] {
        let slopes = [0.0, 1.0, bad, 2.0];
        inputs_say(good().alibi(&slopes), &format!("alibi slopes: {words}, but must be finite"));
    }
}

#[test]
fn softcaps() {
    for (cap, words) in
        [(0.0, "0"), (-0.0, "-0"), (-1.0, "-1"), (f32::NAN, "NaN"), (f32::INFINITY, "inf"), (-f32::INFINITY, "-inf")]
    {
        let error = refusal(Attention::new().softcap(cap), good(), OUT, none);
        says(error, &format!("softcap: {words}, but must be positive and finite"));
    }
}

#[test]
fn rules_of_position_without_an_alignment() {
    let none_says = "and no alignment says where the rows stand among the keys (top-left, bottom-right or an offset)";
    let words =
        |rule: &str, rows: usize, keys: usize| format!("{rule}: {rows} rows and {keys} keys differ, {none_says}");
    let second = |rule: &str, rows: usize, keys: usize| {
        format!("{rule}: sequence 1 has {rows} rows and {keys} keys, {none_says}")
    };
    let slopes = [0.5; 4];
    let window = Attention::new().window(Window::inclusive(None, None));
    says(refusal(Attention::new().causal(), good(), OUT, none), &words("causal", 3, 5));
    says(refusal(window, good(), OUT, none), &words("window", 3, 5));
    inputs_say(good().alibi(&slopes), &words("alibi", 3, 5));
    // Each sequence by its own lengths: here the second differs.
    let square = Inputs::new(floats([2, 4, 5, 6]), floats(K), floats(V));
    let out = [2, 4, 5, 7];
    assert_eq!(refusal(Attention::new().causal(), square, out, none), None);
    says(refusal(Attention::new().causal(), square.kv_lens(&[5, 4]), out, none), &second("causal", 5, 4));
    says(refusal(Attention::new().causal(), ragged(&[0, 2, 6], &[0, 2, 9]), RAGGED, none), &second("causal", 4, 7));
    says(refusal(Attention::new(), square.alibi(&slopes).kv_lens(&[5, 0]), out, none), &second("alibi", 5, 0));
    // Lengths that make them equal leave nothing to choose.
    assert_eq!(refusal(Attention::new().causal(), good().kv_lens(&[3, 3]), OUT, none), None);
}

#[test]
fn outputs_of_wrong_shapes() {
    macro_rules! with {
        ($outputs:ident, $memory:ident => $body:expr) => {{
            fn more<'a>($outputs: Outputs<'a>, $memory: &'a mut [f32]) -> Outputs<'a> {
                $body
            }
            refusal(Attention::new(), good(), OUT, more)
        }};
    }
    macro_rules! points {
        ($($point:ident $name:literal),*) => {$(
            let say = |error, words: &str| says(error, &format!("{}: {words}", $name));
            say(with!(o, m => o.scores(Point::$point, ViewMut::bhld(m, [1, 4, 3, 5]).unwrap())), "batch is 1, but the call has 2");
            say(with!(o, m => o.scores(Point::$point, ViewMut::bhld(m, [2, 2, 3, 5]).unwrap())), &format!("heads is 2, but q has 4"));
            say(with!(o, m => o.scores(Point::$point, ViewMut::bhld(m, [2, 4, 1, 5]).unwrap())), "rows is 1, but q has 3");
            say(with!(o, m => o.scores(Point::$point, ViewMut::bhld(m, [2, 4, 3, 6]).unwrap())), "columns is 6, but k (rows) has 5");
        )*};
    }
    points!(Raw "raw scores", Softcapped "softcapped scores", Masked "masked scores", Weights "weights");
    says(
        with!(o, m => o.weights(ViewMut::bhld(m, [2, 4, 3, 4]).unwrap())),
        "weights: columns is 4, but k (rows) has 5",
    );
    says(
        with!(o, m => o.key_weight_sums(ViewMut::bhl(m, [1, 2, 5]).unwrap())),
        "key weight sums: batch is 1, but k has 2",
    );
    says(
        with!(o, m => o.key_weight_sums(ViewMut::bhl(m, [2, 4, 5]).unwrap())),
        "key weight sums: heads is 4, but k has 2",
    );
    says(
        with!(o, m => o.key_weight_sums(ViewMut::bhl(m, [2, 2, 3]).unwrap())),
        "key weight sums: rows is 3, but k has 5",
    );
    says(
        with!(o, m => o.key_weight_sums(ViewMut::bhld(m, [2, 2, 5, 2]).unwrap())),
        "key weight sums: last dimension is 2, but must be 1 (one value a key)",
    );
    says(with!(o, m => o.lse(ViewMut::bhl(m, [2, 4, 5]).unwrap())), "lse: given twice, but an output is written once");
}

fn state(attention: Attention) -> Result<AttnState<'static>, Error> {
    AttnState::new(attention, floats(Q), KvShape { kv_heads: 2, head_dim: Q[3], value_dim: 7 }, Exec::serial())
}

#[test]
fn states_that_cannot_be() {
    let bottom_right = Attention::new().causal().align(Alignment::BottomRight);
    says(state(bottom_right).err(), "bottom-right: needs the number of keys, which a state does not know");
    says(state(Attention::new().softcap(-1.0)).err(), "softcap: -1, but must be positive and finite");
    says(state(Attention::new().scale(f32::NAN)).err(), "scale: NaN, but must be finite");
    let new = |[kv_heads, value_dim]: [usize; 2]| {
        let keys = KvShape { kv_heads, head_dim: Q[3], value_dim };
        AttnState::new(Attention::new(), floats(Q), keys, Exec::serial()).err()
    };
    says(new([3, 7]), "q: 4 heads are no multiple of the 3 heads of k");
    says(new([2, 0]), "v: value_dim is 0, but must be at least 1");
    assert!(matches!(new([2, usize::MAX]), Some(Error::TooLarge { what: "state", .. })));
    let fresh = || state(Attention::new()).unwrap();
    let lost = "needs an alignment: top-left or an offset, since a state does not know how many keys will come";
    says(state(Attention::new().causal()).err(), &format!("causal: {lost}"));
    says(state(Attention::new().window(Window::inclusive(None, None))).err(), &format!("window: {lost}"));
    says(fresh().alibi(&ZEROS[..4]).err(), &format!("alibi: {lost}"));
    let aligned = state(Attention::new().align(Alignment::TopLeft)).unwrap();
    says(aligned.alibi(&ZEROS[..3]).err(), "alibi slopes: length is 3, but q (heads) has 4");
    says(fresh().sinks(&ZEROS[..3]).err(), "sinks: length is 3, but q (heads) has 4");
    says(fresh().starting_at(100).err(), "first key: 100, but must be a multiple of 256");
    says(fresh().starting_at(700).err(), "first key: 700, but must be a multiple of 256");
    let used = || {
        let mut state = fresh();
        state.push(floats(K), floats(V)).unwrap();
        state
    };
    says(used().starting_at(256).err(), "first key: needs a state without keys");
    says(used().alibi(&ZEROS[..4]).err(), "alibi slopes: needs a state without keys");
}

#[test]
fn keys_that_do_not_fit_a_state() {
    let mut state = state(Attention::new()).unwrap();
    let cases = [
        ([1, 2, 5, 6], V, "k: batch is 1, but q has 2"),
        ([2, 4, 5, 6], V, "k: heads is 4, but the state has 2"),
        ([2, 2, 5, 7], V, "k: head_dim is 7, but q has 6"),
        (K, [1, 2, 5, 7], "v: batch is 1, but q has 2"),
        (K, [2, 1, 5, 7], "v: heads is 1, but the state has 2"),
        (K, [2, 2, 4, 7], "v: rows is 4, but k has 5"),
        (K, [2, 2, 5, 6], "v: value_dim is 6, but the state has 7"),
    ];
    for (k, v, words) in cases {
        says(state.push(floats(k), floats(v)).err(), words);
        assert!(state.is_empty(), "{words}");
    }
    let (mut out, mut more) = ([42.0; 168], [42.0; 120]);
    let mut read = |shape, weights: bool, mass: bool| {
        let mut outputs = Outputs::new(ViewMut::bhld(&mut out, shape).unwrap());
        outputs = if weights {
            outputs.weights(ViewMut::bhld(&mut more, [2, 4, 3, 5]).unwrap())
        } else if mass {
            outputs.key_weight_sums(ViewMut::bhl(&mut more, [2, 2, 5]).unwrap())
        } else {
            outputs
        };
        let error = state.read(outputs).err();
        assert!(out.iter().chain(&more).all(|&x| x == 42.0), "a refused read wrote");
        error
    };
    says(read(OUT, true, false), "weights: needs a call over all keys, not a state");
    says(read(OUT, false, true), "key weight sums: needs a call over all keys, not a state");
    says(read([2, 4, 3, 6], false, false), "out: value_dim is 6, but v has 7");
}

#[test]
fn states_that_do_not_follow_each_other() {
    let with_keys = |first| {
        let mut state = state(Attention::new()).unwrap().starting_at(first).unwrap();
        state.push(floats(K), floats(V)).unwrap();
        state
    };
    let mut first = with_keys(0);
    let at_five = "later state: this state ends at 5, and merges only at a multiple of 256: push the later keys to this state instead";
    says(first.merge(&with_keys(256)).err(), at_five);
    says(first.merge(&with_keys(0)).err(), at_five);
    assert_eq!(first.len(), 5);
    let other = |q: [usize; 4], [kv_heads, value_dim]: [usize; 2]| {
        let keys = KvShape { kv_heads, head_dim: q[3], value_dim };
        AttnState::new(Attention::new(), floats(q), keys, Exec::serial()).unwrap()
    };
    let cases = [
        (other([1, 4, 3, 6], [2, 7]), "later q: batch is 1, but this state has 2"),
        (other([2, 2, 3, 6], [2, 7]), "later q: heads is 2, but this state has 4"),
        (other([2, 4, 1, 6], [2, 7]), "later q: rows is 1, but this state has 3"),
        (other([2, 4, 3, 5], [2, 7]), "later q: head_dim is 5, but this state has 6"),
        (other(Q, [4, 7]), "later state: kv_heads is 4, but this state has 2"),
        (other(Q, [2, 6]), "later state: value_dim is 6, but this state has 7"),
    ];
    for (later, words) in cases {
        says(first.merge(&later).err(), words);
    }
}

#[test]
fn results_that_do_not_merge() {
    let cases = [
        (
            [2, 4, 3, 7],
            [2, 4, 3, 3],
            [2, 4, 3, 7],
            [2, 4, 3, 1],
            "lse: last dimension is 3, but must be 1 (one value a row), or 2 (and its rounding error)",
        ),
        ([2, 4, 3, 7], [2, 4, 3, 1], [1, 4, 3, 7], [2, 4, 3, 1], "other out: batch is 1, but out has 2"),
        ([2, 4, 3, 7], [2, 4, 3, 1], [2, 4, 3, 6], [2, 4, 3, 1], "other out: value_dim is 6, but out has 7"),
        ([2, 4, 3, 7], [2, 4, 1, 1], [2, 4, 3, 7], [2, 4, 3, 1], "lse: rows is 1, but out has 3"),
        ([2, 4, 3, 7], [2, 4, 3, 1], [2, 4, 3, 7], [2, 1, 3, 1], "other lse: heads is 1, but out has 4"),
        ([2, 4, 3, 7], [2, 4, 3, 2], [2, 4, 3, 7], [2, 4, 3, 1], "other lse: columns is 1, but lse has 2"),
    ];
    for (out_shape, lse_shape, other, other_lse, words) in cases {
        let (mut out, mut lse) = ([42.0; 168], [42.0; 72]);
        let mine = (ViewMut::bhld(&mut out, out_shape).unwrap(), ViewMut::bhld(&mut lse, lse_shape).unwrap());
        says(merge(mine, (floats(other), floats(other_lse))).err(), words);
        assert!(out.iter().chain(&lse).all(|&x| x == 42.0));
    }
}
