//! Oracle of index scores and of choices.

use super::oracle;
use super::sequence::OracleSequence;
use crate::attention::Attention;
use crate::error::Error;
use crate::inputs::Inputs;
use sdpa_kernels::{TopK, View};

/// Computes index scores in `f64`, `[batch, kv_heads, q_len, kv_len]`, as [`Indexer`](crate::Indexer) defines them. Ragged sequences
/// are the batch, padded to the longest; −∞ where a key is hidden or there is none.
///
/// ```
/// use sdpa::{Attention, Inputs, View, naive};
/// let (q, k) = ([1.0, -1.0], [2.0, -3.0]); // two heads, two keys
/// let (q, k) = (View::bhld(&q, [1, 2, 1, 1])?, View::bhld(&k, [1, 1, 2, 1])?);
/// let (inputs, weights) = (Inputs::new(q, k, k), View::bhl(&[10.0, 100.0], [1, 2, 1])?);
/// assert_eq!(naive::index_scores(&Attention::new(), &inputs, weights, None)?, [20.0, 300.0]);
/// # Ok::<(), sdpa::Error>(())
/// ```
///
/// # Errors
/// As [`oracle`].
///
/// # Panics
/// If `weights` or `factors` have fewer rows or heads than [`Attention::indexer`] and
/// [`Indexer::key_factors`](crate::Indexer::key_factors) ask for.
pub fn index_scores(
    attention: &Attention,
    inputs: &Inputs<'_>,
    weights: View<'_>,
    factors: Option<View<'_>>,
) -> Result<Vec<f64>, Error> {
    let [.., scores, _] = oracle(attention, inputs)?.points;
    let shape = inputs.shape()?;
    let (group_size, element) = (shape.heads / shape.kv_heads.max(1), |x: Option<&f32>| f64::from(*x.expect("inside")));
    let mut all = Vec::new();
    for sequence in (0..shape.batch).map(|index| OracleSequence::new(attention, inputs, shape, index)) {
        for (kv_head, row) in (0..shape.kv_heads).flat_map(|head| (0..shape.q_len).map(move |row| (head, row))) {
            for key in 0..shape.kv_len {
                let heads = (kv_head * group_size..(kv_head + 1) * group_size).map(|head| {
                    let at = sequence.with_key(sequence.at(head, row), key);
                    let s = scores[((at.batch * shape.heads + head) * shape.q_len + row) * shape.kv_len + key];
                    (at, s)
                });
                if row >= sequence.q_len || key >= sequence.kv_len || heads.clone().any(|(_, s)| s == f64::NEG_INFINITY)
                {
                    all.push(f64::NEG_INFINITY);
                    continue;
                }
                let relu = |s: f64| if s < 0.0 { 0.0 } else { s };
                let weight = |at| {
                    let [b, h, l] = sequence.query(at);
                    element(weights.get([b, h, l, 0]))
                };
                let sum: f64 = heads.clone().map(|(at, s)| weight(at) * relu(s)).sum();
                let factor = factors.map_or(1.0, |factors| {
                    let [b, h, j] = sequence.key(sequence.with_key(sequence.at(kv_head * group_size, row), key));
                    element(factors.get([b, h, j, 0]))
                });
                all.push(factor * sum);
            }
        }
    }
    Ok(all)
}

/// Chooses keys of one row by a rule, as [`TopK`] defines it: their numbers, ascending. `rows` and `unit` have no effect.
///
/// ```
/// use sdpa::{TopK, naive};
/// assert_eq!(naive::top_k(&[1.0, 5.0, 5.0, 0.0], &TopK { last: 1, ..TopK::new(2) }), [1, 3]);
/// ```
pub fn top_k(scores: &[f32], rule: &TopK) -> Vec<usize> {
    let mut seen: Vec<usize> = (0..scores.len()).filter(|&key| scores[key] != f32::NEG_INFINITY).collect();
    let last = seen.last().map_or(0, |last| (last + 1).saturating_sub(rule.last));
    let forced = |key: usize| key < rule.first || key >= last;
    let rank = |key: usize| if scores[key].is_nan() { f32::NEG_INFINITY } else { scores[key] + 0.0 };
    let most = seen.iter().fold(f32::NEG_INFINITY, |most, &key| most.max(scores[key]));
    let weight = |key: usize| (f64::from(scores[key]) - f64::from(most)).exp();
    let total: f64 = seen.iter().map(|&key| weight(key)).sum();
    // Stable: of equals the lower stays first.
    seen.sort_by(|&a, &b| {
        let by_score = || if forced(a) { core::cmp::Ordering::Equal } else { rank(b).total_cmp(&rank(a)) };
        forced(b).cmp(&forced(a)).then_with(by_score)
    });
    seen.truncate(rule.k);
    if let Some(share) = rule.share.filter(|_| total.is_finite()) {
        let mut sum = 0.0;
        let reached = seen.iter().position(|&key| {
            sum += weight(key);
            sum >= f64::from(share) * total
        });
        seen.truncate(reached.map_or(seen.len(), |place| place + 1));
    }
    seen.sort_unstable();
    seen
}
