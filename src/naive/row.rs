//! One row of the oracle: scores of every key in the order of operations, softmax, weighted sum.

use super::sequence::OracleSequence;
use super::{Answer, Dense, Real};
use sdpa_kernels::{Causality, Cover, Covered, Mask, MaskMod, Mods, Position, ScoreMod, WeightMod};

impl OracleSequence<'_> {
    /// Appends the results of the row at `at` to `all`.
    pub(super) fn row<T: Real, S: ScoreMod, M: MaskMod, P: WeightMod>(
        &self,
        [q, k, v]: &[Dense<T>; 3],
        mods: &Mods<S, M, P>,
        at: Position,
        all: &mut Answer<T>,
    ) {
        let (inputs, shape) = (self.inputs, self.shape);
        let (zero, hidden) = (T::from(0.0), T::from(f32::NEG_INFINITY));
        let scores = self.scores([q, k], mods, at);
        let sink = inputs.sinks.map_or(hidden, |sinks| T::from(sinks[at.head]));
        let seen = scores[2].iter().copied().filter(|_| at.row < self.q_len);
        let max = seen.fold(sink, |max, s| if s > max { s } else { max });
        let reference = if max == hidden { zero } else { max };
        let exponentials: Vec<T> = scores[2].iter().map(|&s| (s - reference).exp()).collect();
        let sum = exponentials.iter().fold((sink - reference).exp(), |sum, &e| sum + e);
        let sees = |j: usize| scores[2][j] != hidden;
        let weights: Vec<T> = (0..shape.kv_len).map(|j| if sees(j) { exponentials[j] / sum } else { zero }).collect();
        all.lse.push(if sum == zero { hidden } else { reference + sum.ln() });
        let mut out = vec![zero; shape.value_dim];
        for j in (0..shape.kv_len).filter(|&j| sees(j)) {
            let here = self.with_key(at, j);
            let given = mods.weight.is_given();
            let weight = if given { T::from(mods.weight.weight(weights[j].to_f32(), here)) } else { weights[j] };
            let weight = weight * T::from(self.dropout_factor(here));
            for (out, &v) in out.iter_mut().zip(v.row(self.key(here))) {
                *out = *out + weight * v;
            }
        }
        all.out.extend(out);
        let kv_head = at.batch * shape.kv_heads + self.kv_head(at);
        for (sum, &weight) in all.key_weight_sums[kv_head * shape.kv_len..].iter_mut().zip(&weights) {
            *sum = *sum + weight;
        }
        for (all, row) in all.points.iter_mut().zip(scores.iter().chain([&weights])) {
            all.extend(row);
        }
    }

    /// Returns the scores of every key at the first three points of [`Answer`]: raw, softcapped, masked.
    fn scores<T: Real, S: ScoreMod, M: MaskMod, P: WeightMod>(
        &self,
        [q, k]: [&Dense<T>; 2],
        mods: &Mods<S, M, P>,
        at: Position,
    ) -> [Vec<T>; 3] {
        let (attention, inputs, shape) = (self.attention, self.inputs, self.shape);
        let (zero, hidden) = (T::from(0.0), T::from(f32::NEG_INFINITY));
        let mut scores = [const { Vec::new() }; 3];
        for j in 0..shape.kv_len {
            let here = self.with_key(at, j);
            let exists = at.row < self.q_len && j < self.kv_len && self.selects(here);
            let mut s = hidden;
            if exists {
                let (query, key) = (q.row(self.query(at)), k.row(self.key(here)));
                let dot = query.iter().zip(key).fold(zero, |sum, (&q, &k)| sum + q * k);
                s = dot * T::from(attention.scale_for(shape.head_dim));
            }
            scores[0].push(s);
            if let (Some(c), true) = (attention.softcap.map(T::from), exists) {
                s = (s / c).tanh() * c;
            }
            scores[1].push(s);
            let ahead = self.ahead(here);
            let first = |kept: usize| match inputs.key_positions {
                Some(positions) => positions[at.batch].get(j).is_some_and(|&key| key >= 0 && (key as usize) < kept),
                None => j < kept,
            };
            let window = attention.visible.window.is_none_or(|w| w.sees(ahead) || first(w.kept_first()));
            let causal = attention.visible.causality == Causality::Full || ahead >= 0;
            let entry = |of: [usize; 4], cover: Cover| self.entry(of, cover, here);
            let bias = inputs.bias.and_then(|Covered { of, cover }| {
                entry(of.shape(), cover).map(|at| of.get(at).unwrap_or(f32::NEG_INFINITY))
            });
            // Of all numbers, −0 alone leaves each as it is when added.
            let bias = bias.unwrap_or(-0.0);
            let masked = inputs.mask.is_some_and(|Covered { of, cover }| {
                let hides = |&byte: &u8| (byte != 0) != matches!(of, Mask::Keep(_));
                entry(of.view().shape(), cover).is_some_and(|at| of.view().get(at).is_none_or(hides))
            });
            let visible = exists && window && causal && bias != f32::NEG_INFINITY;
            if !visible || masked || self.asks(here) && !mods.mask.keep(here) {
                s = hidden;
            } else {
                s = s + T::from(bias)
                    - inputs.alibi.map_or(zero, |slopes| T::from(slopes[at.head]) * T::from(ahead.abs() as f32));
                s = if mods.score.is_given() && s != hidden { T::from(mods.score.score(s.to_f32(), here)) } else { s };
            }
            scores[2].push(s);
        }
        scores
    }
}
