//! Indexers, rules and scores that do not fit.

use crate::choosing::{Index, weights_of};
use crate::options::Case;
use crate::support::{Rng, Tensor};
use sdpa::{Attention, Error, Exec, SelectedKeys, SelectionError, TopK, View, ViewMut, Workspace, top_k};

#[test]
fn what_does_not_fit_is_refused() {
    let rng = &mut Rng::new(8);
    let case = Case::plain(rng, [2, 4, 2, 3, 5, 6, 6]);
    let attention = Attention::new();
    let message = |weights: [usize; 4]| {
        let weights = Tensor::filled(weights, 0.0);
        attention.indexer(case.inputs(), weights.view()).map(drop).unwrap_err().to_string()
    };
    assert_eq!(message([2, 3, 3, 1]), "weights: heads is 3, but q has 4");
    assert_eq!(message([2, 4, 3, 2]), "weights: last dimension is 2, but must be 1 (one value a row)");
    let weights = weights_of(&case, rng);
    let error = case.attention().causal().indexer(case.inputs(), weights.view()).map(drop).unwrap_err();
    assert!(matches!(error, Error::Unaligned { rule: "causal", .. }), "{error}");
    let (lists, exec) = (Index::of(&case, &weights).select(&TopK::new(2), Exec::serial()), Exec::serial());
    let error = attention.indexer(case.inputs().selected(&lists), weights.view()).map(drop).unwrap_err();
    assert_eq!(error.to_string(), "index scores: needs all keys, not lists of them");
    let indexer = attention.indexer(case.inputs(), weights.view()).unwrap();
    let mut out = vec![42.0; 2 * 2 * 3 * 6];
    let error =
        indexer.scores(ViewMut::bhld(&mut out, [2, 2, 3, 6]).unwrap(), exec, &mut Workspace::new()).unwrap_err();
    assert_eq!(error.to_string(), "index scores: columns is 6, but the call has 5");
    assert!(out.iter().all(|&x| x == 42.0));
    let factors = Tensor::filled([2, 2, 4, 1], 1.0);
    assert_eq!(indexer.key_factors(factors.view()).unwrap_err().to_string(), "key factors: rows is 4, but k has 5");
    let rules = [
        (TopK::new(0), "top_k: k is 0, but must be at least 1"),
        (TopK { rows: 0, ..TopK::new(1) }, "top_k: rows is 0, but must be at least 1"),
        (TopK { unit: 0, ..TopK::new(1) }, "top_k: unit is 0, but must be at least 1"),
        (TopK { share: Some(1.5), ..TopK::new(1) }, "share of top_k: 1.5, but must be above 0 and at most 1"),
        (TopK { share: Some(f32::NAN), ..TopK::new(1) }, "share of top_k: NaN, but must be above 0 and at most 1"),
    ];
    for (rule, expected) in rules {
        let mut selected = lists.clone();
        let view = View::bhld(&[1.0, 2.0], [1, 1, 1, 2]).unwrap();
        let error = top_k(view, &rule, exec, &mut Workspace::new(), &mut selected).unwrap_err();
        assert_eq!((error.to_string().as_str(), selected.sequences()), (expected, 0));
    }
    let view = View::bhld(&[], [1, 0, 1, 2]).unwrap();
    let error = top_k(view, &TopK::new(1), exec, &mut Workspace::new(), &mut SelectedKeys::new()).unwrap_err();
    assert!(matches!(error, Error::Selection(SelectionError::Empty { what: "heads" })), "{error}");
}
