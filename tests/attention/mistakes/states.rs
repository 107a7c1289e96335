//! 61 and 62: results and states that do not belong together.

use super::{ACCEPTED, K, Mistake, Q, V, floats, mistake, outcome};
use sdpa::{Alignment, Attention, AttnState, Exec, KvShape, Outputs, Precision, ViewMut, Window, merge};

pub(super) fn mistakes() -> Vec<Mistake> {
    let other = |attention: Attention, slopes: Option<&'static [f32]>| {
        let state = AttnState::new(
            attention.align(Alignment::TopLeft),
            floats(Q),
            KvShape { kv_heads: 2, head_dim: Q[3], value_dim: 7 },
            Exec::serial(),
        )
        .unwrap();
        match slopes {
            Some(slopes) => state.alibi(slopes).unwrap(),
            None => state,
        }
    };
    let mut first = other(Attention::new(), None);
    first.push(floats(K), floats(V)).unwrap();
    let mut merged = |later: AttnState<'_>| {
        let words = outcome(first.merge(&later));
        assert_eq!(first.len(), 5);
        words
    };
    let differs = |what, got, expected| format!("later state: {what} is {got}, but this state has {expected}");
    let new = Attention::new;
    let window = |n| Window::inclusive(Some(n), None);
    let slope = |got, expected| differs("ALiBi slope of a head", got, expected);
    let mut all = vec![
        mistake(61, "merge of other rows", merged_out([2, 4, 2, 7]), "other out: rows is 2, but out has 3"),
        mistake(61, "merge of other values", merged_out([2, 4, 3, 6]), "other out: value_dim is 6, but out has 7"),
        mistake(62, "another scale", merged(other(new().scale(2.0), None)), differs("scale", "2", "0.4082483")),
        mistake(62, "another softcap", merged(other(new().softcap(30.0), None)), differs("softcap", "30", "none")),
        mistake(62, "causal", merged(other(new().causal(), None)), differs("causal rule", "causal", "none")),
        mistake(
            62,
            "another window",
            merged(other(new().window(window(3).keep_first(2)), None)),
            differs("window", "3 before, all after, the first 2", "none"),
        ),
        mistake(
            62,
            "another precision",
            merged(other(new().precision(Precision::Native), None)),
            differs("precision", "native", "exact"),
        ),
        mistake(62, "slopes", merged(other(new(), Some(&[0.5; 4]))), slope("0.5", "none")),
    ];
    all.extend(starts());
    all.extend(positions());
    all.extend([mistake(62, "weights of a state", weights(), "weights: needs a call over all keys, not a state")]);
    all
}

/// 61: states that do not start where another ends. To obey a message leads to no other message.
fn starts() -> Vec<Mistake> {
    let new = || {
        AttnState::new(
            Attention::new(),
            floats([1, 1, 3, 2]),
            KvShape { kv_heads: 1, head_dim: 2, value_dim: 2 },
            Exec::serial(),
        )
        .unwrap()
    };
    let merged = |keys: usize, first: usize| {
        let mut state = new();
        state.push(floats([1, 1, keys, 2]), floats([1, 1, keys, 2])).unwrap();
        outcome(state.merge(&new().starting_at(first).unwrap()))
    };
    vec![
        mistake(
            61,
            "a first key within a block",
            outcome(new().starting_at(14)),
            "first key: 14, but must be a multiple of 256",
        ),
        mistake(
            61,
            "merge of a state from the first key on",
            merged(512, 0),
            "later state: its first key is 0, but this state ends at 512 (AttnState::starting_at)",
        ),
        mistake(61, "merge of one that starts there", merged(512, 512), ACCEPTED),
        mistake(
            61,
            "merge after 270 keys",
            merged(270, 256),
            "later state: this state ends at 270, and merges only at a multiple of 256: push the later keys to this state instead",
        ),
    ]
}

/// 62: settings that depend on positions, and such as are the same in other words.
fn positions() -> Vec<Mistake> {
    let q = floats([1, 1, 3, 4]);
    let new = |attention: Attention| {
        AttnState::new(attention, q, KvShape { kv_heads: 1, head_dim: 4, value_dim: 2 }, Exec::serial()).unwrap()
    };
    let merged = |mine: Attention, later: Attention| outcome(new(mine).merge(&new(later)));
    let (plain, at) = (Attention::new(), |n| Attention::new().align(Alignment::Offset(n)));
    let top_left = plain.align(Alignment::TopLeft);
    let slopes = |slope: &'static [f32]| new(top_left).alibi(slope).unwrap();
    vec![
        mistake(
            62,
            "another offset",
            merged(top_left.causal(), at(5).causal()),
            "later state: alignment is offset 5, but this state has offset 0",
        ),
        mistake(
            62,
            "another slope",
            outcome(slopes(&[0.25]).merge(&slopes(&[0.5]))),
            "later state: ALiBi slope of a head is 0.5, but this state has 0.25",
        ),
        mistake(62, "the default scale in numbers", merged(plain, plain.scale(0.5)), ACCEPTED),
        mistake(62, "top-left as an offset", merged(top_left.causal(), at(0).causal()), ACCEPTED),
        mistake(62, "an offset that no rule uses", merged(plain, at(5)), ACCEPTED),
        mistake(
            62,
            "a window without bounds",
            merged(top_left, top_left.window(Window::inclusive(None, None))),
            ACCEPTED,
        ),
    ]
}

/// Outcome of reading a state with its weights.
fn weights() -> String {
    let mut state = AttnState::new(
        Attention::new(),
        floats(Q),
        KvShape { kv_heads: 2, head_dim: Q[3], value_dim: 7 },
        Exec::serial(),
    )
    .unwrap();
    state.push(floats(K), floats(V)).unwrap();
    let (mut out, mut weights) = ([42.0; 168], [42.0; 120]);
    let outputs = Outputs::new(ViewMut::bhld(&mut out, [2, 4, 3, 7]).unwrap());
    let result = state.read(outputs.weights(ViewMut::bhld(&mut weights, [2, 4, 3, 5]).unwrap()));
    assert!(out.iter().chain(&weights).all(|&x| x == 42.0), "a refused read wrote");
    outcome(result)
}

fn merged_out(other: [usize; 4]) -> String {
    let (mut out, mut lse) = ([42.0; 168], [42.0; 24]);
    let mine = (ViewMut::bhld(&mut out, [2, 4, 3, 7]).unwrap(), ViewMut::bhl(&mut lse, [2, 4, 3]).unwrap());
    let [b, h, l, _] = other;
    let result = merge(mine, (floats(other), floats([b, h, l, 1])));
    assert!(out.iter().chain(&lse).all(|&x| x == 42.0), "a refused merge wrote");
    outcome(result)
}
