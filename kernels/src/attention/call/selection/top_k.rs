//! Rule by which rows choose keys.

use crate::tensor::misfit::{Fault, Misfit};

/// Rule by which rows choose keys from their scores: the `k` keys with the largest, or fewer by a [share](Self::share) of weight.
///
/// Ties go to the lower key. A key with score −∞ is hidden and never chosen; a row that sees fewer than `k` keys chooses all of
/// them. NaN is below every number: such a key is chosen only if fewer than `k` others are seen, or if `first` or `last` forces it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TopK {
    /// Largest number of keys of a list.
    pub k: usize,
    /// Number of first keys that are chosen whatever their scores, if they are seen. They count among the `k`.
    pub first: usize,
    /// Number of keys up to the last one that the row sees, its own under a causal mask, that are chosen whatever their scores,
    /// if they are seen. They count among the `k`; of more forced keys than `k` the lower ones are chosen.
    pub last: usize,
    /// Number of neighbouring rows that share a list: a key's score is then the largest of theirs.
    pub rows: usize,
    /// Number of keys that a scored key stands for, as in [`SelectionShape::unit`](crate::SelectionShape). Nothing is pooled: above
    /// 1, scores are those of pooled keys already, one for each `unit` keys, and `k`, `first` and `last` count pooled keys.
    pub unit: usize,
    /// Share of weight, above 0 and at most 1: of the keys that would be chosen, the fewest with the largest scores whose softmax
    /// weights, among all keys that the row sees, sum to it at least. Forced keys come first. Weights are `f32`; where one is not
    /// finite or a score is NaN, all `k` are chosen.
    pub share: Option<f32>,
}

impl TopK {
    /// Chooses the `k` keys with the largest scores; each row has a list, of single keys.
    pub const fn new(k: usize) -> Self {
        Self { k, first: 0, last: 0, rows: 1, unit: 1, share: None }
    }

    /// Checks sizes and share.
    #[doc(hidden)] // its error has no name in `sdpa`
    pub fn check(&self) -> Result<(), Misfit> {
        let sizes = [("k", self.k), ("rows", self.rows), ("unit", self.unit)];
        match sizes.into_iter().find(|&(_, size)| size == 0) {
            Some((what, _)) => Fault::Empty(what).of("top_k"),
            None => Ok(()),
        }
    }
}
