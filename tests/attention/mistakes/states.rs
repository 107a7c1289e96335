//! 61 and 62: results and states that do not belong together.

use super::{K, Mistake, Q, V, floats, mistake, outcome};
use sdpa::{Alignment, Attention, AttnState, Exec, Outputs, ViewMut, Window, merge};

pub(super) fn mistakes() -> Vec<Mistake> {
    let other = |attention: Attention, slopes: Option<&'static [f32]>| {
        let attention = attention.align(Alignment::TopLeft);
        let state = AttnState::new(attention, floats(Q), [2, 7], Exec::serial()).unwrap();
        slopes.map_or(Ok(state.starting_at(0).unwrap()), |slopes| {
            AttnState::new(attention, floats(Q), [2, 7], Exec::serial()).unwrap().alibi(slopes)
        })
    };
    let mut first = other(Attention::new(), None).unwrap();
    first.push(floats(K), floats(V)).unwrap();
    let mut merged = |later: AttnState<'_>| {
        let words = outcome(first.merge(&later));
        assert_eq!(first.len(), 5);
        words
    };
    let other_than = |what| format!("later state: has another {what} than this state");
    let window = Attention::new().window(Window::inclusive(Some(3), None));
    vec![
        mistake(61, "merge of other rows", merged_out([2, 4, 2, 7]), "other out: rows is 2, but out has 3"),
        mistake(61, "merge of other values", merged_out([2, 4, 3, 6]), "other out: value_dim is 6, but out has 7"),
        mistake(
            62,
            "state of another scale",
            merged(other(Attention::new().scale(2.0), None).unwrap()),
            other_than("scale"),
        ),
        mistake(62, "state of another window", merged(other(window, None).unwrap()), other_than("window")),
        mistake(
            62,
            "state with slopes",
            merged(other(Attention::new(), Some(&[0.5; 4])).unwrap()),
            other_than("list of ALiBi slopes"),
        ),
        mistake(62, "weights of a state", weights(), "weights: needs a call over all keys, not a state"),
    ]
}

/// Outcome of reading a state with its weights.
fn weights() -> String {
    let mut state = AttnState::new(Attention::new(), floats(Q), [2, 7], Exec::serial()).unwrap();
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
