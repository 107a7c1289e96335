//! 58–60: outputs of the wrong shape, or given twice.

use super::{Mistake, More, OUT, call, good, mistake};
use sdpa::{Attention, Outputs, Point, ViewMut};

pub(super) fn mistakes() -> Vec<Mistake> {
    let with = |more: &[(More, [usize; 4])]| call(Attention::new(), good(), OUT, more);
    let weights = (More::Weights, [2, 4, 3, 5]);
    let lse = (More::Lse, [2, 4, 3, 1]);
    let sums = (More::Sums, [2, 2, 5, 1]);
    let twice = "given twice, but an output is written once";
    vec![
        mistake(58, "LSE of other rows", with(&[(More::Lse, [2, 4, 5, 1])]), "lse: rows is 5, but q has 3"),
        mistake(
            58,
            "LSE as long as a value",
            with(&[(More::Lse, [2, 4, 3, 7])]),
            "lse: last dimension is 7, but must be 1 (one value a row), or 2 (and its rounding error)",
        ),
        mistake(59, "weights of kv_heads", with(&[(More::Weights, [2, 2, 3, 5])]), "weights: heads is 2, but q has 4"),
        mistake(60, "weights twice", with(&[weights, weights]), format!("weights: {twice}")),
        mistake(60, "LSE twice", with(&[lse, weights, lse]), format!("lse: {twice}")),
        mistake(60, "key weight sums twice", with(&[sums, sums]), format!("key weight sums: {twice}")),
        mistake(60, "raw scores twice", raw_scores_twice(), format!("raw scores: {twice}")),
    ]
}

fn raw_scores_twice() -> String {
    let (mut out, mut one, mut other) = ([42.0; 168], [42.0; 120], [42.0; 120]);
    let [first, second] = [&mut one, &mut other].map(|memory| ViewMut::bhld(memory, [2, 4, 3, 5]).unwrap());
    let outputs = Outputs::new(ViewMut::bhld(&mut out, OUT).unwrap()).scores(Point::Raw, first);
    let error = sdpa::attention(&Attention::new(), good(), outputs.scores(Point::Raw, second)).unwrap_err();
    assert!(out.iter().chain(&one).chain(&other).all(|&x| x == 42.0), "a refused call wrote");
    error.to_string()
}
