//! Outputs of a call: the attention output, lse, scores, key weight sums, and the state carried between calls.

use crate::attention::call::Call;
use crate::attention::call::options::Ragged;
use crate::tensor::any::TensorMut;
use crate::tensor::misfit::{Fault, Misfit, one_a_row, one_or_two_a_row, same, same_rows};
use crate::tensor::view_mut::ViewMut;

/// Stage of the score computation at which scores can be written out, `[batch, heads, rows, keys]`. Only such outputs
/// take memory proportional to rows times keys; the caller provides it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Point {
    /// Scaled dot products scale·(q·k), masks not applied (ONNX `qk_matmul_output_mode` 0).
    Raw,
    /// Scores after softcap, masks not applied (mode 1).
    Softcapped,
    /// Scores after bias, ALiBi, score function and masks: −∞ where hidden (mode 2).
    Masked,
    /// Weights after the softmax: 0 where hidden (mode 3).
    Weights,
}

impl Point {
    /// Returns the value written for rows and keys that a sequence does not have.
    pub(crate) fn beyond(self) -> f32 {
        if self == Self::Weights { 0.0 } else { f32::NEG_INFINITY }
    }
}

/// Every [`Point`], in the order of [`Outputs::points`].
pub(crate) const POINTS: [Point; 4] = [Point::Raw, Point::Softcapped, Point::Masked, Point::Weights];

/// Running softmax state of rows with keys that come in several calls, not normalised: dense, `[batch, heads, q_len]`, and
/// `[batch, heads, q_len, value_dim]` for `out`.
#[derive(Debug)]
pub struct State<'a> {
    /// Largest score so far; −∞ at first.
    pub max: ViewMut<'a>,
    /// Σ exp(score − max) so far.
    pub sum: ViewMut<'a>,
    /// Σ exp(score − max)·v so far.
    pub out: ViewMut<'a>,
    /// Keys that were accumulated.
    pub seen: Seen,
}

/// Keys that a state has seen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Seen {
    /// None yet: the state's numbers are not read.
    Nothing,
    /// Some.
    Keys,
}

/// Names of the scores at each [`Point`] in messages.
pub(crate) const SCORES: [&str; 4] = ["raw scores", "softcapped scores", "masked scores", "weights"];

/// Tensors that a call writes; tasks write through it, each to its own rows.
// Fields are set by methods; `sdpa` reads them.
#[derive(Debug)]
pub struct Outputs<'a> {
    #[doc(hidden)]
    pub out: Option<TensorMut<'a>>,
    #[doc(hidden)]
    pub lse: Option<ViewMut<'a>>,
    #[doc(hidden)]
    pub points: [Option<ViewMut<'a>>; 4],
    #[doc(hidden)]
    pub key_weight_sums: Option<ViewMut<'a>>,
    /// State accumulated by earlier calls. With an output, results are written and the state stays unchanged. Without one, the
    /// state takes in the keys, and there may be no other output.
    #[doc(hidden)]
    pub state: Option<State<'a>>,
    /// Name of an output that was given more than once.
    pub(crate) twice: Option<&'static str>,
}

impl<'a> Outputs<'a> {
    /// No outputs.
    #[doc(hidden)] // for states of blocks, which are not views
    pub const NONE: Self =
        Self { out: None, lse: None, points: [const { None }; 4], key_weight_sums: None, state: None, twice: None };

    /// Takes the output tensor, `[batch, heads, q_len, value_dim]`, of any element type: results are rounded once, to
    /// nearest even, when they are written. Outputs that are added later are `f32`.
    pub fn new(out: impl Into<TensorMut<'a>>) -> Self {
        Self { out: Some(out.into()), ..Self::NONE }
    }

    /// Accumulates the keys of the call into `state` and writes no results.
    #[doc(hidden)] // its type has no name in `sdpa`
    pub fn accumulate(state: State<'a>) -> Self {
        Self { state: Some(state), ..Self::NONE }
    }

    /// Continues from the state accumulated by earlier calls.
    #[doc(hidden)] // its type has no name in `sdpa`
    #[must_use]
    pub fn resume(self, state: State<'a>) -> Self {
        Self { state: Some(state), ..self }
    }

    /// Adds the LSE of each row, the natural log of Σ exp(score), `[batch, heads, q_len, 1]`; −∞ where no key is
    /// visible. Or `[batch, heads, q_len, 2]`: the second column is what rounding the LSE to `f32` leaves, LSE − its `f32`, and 0
    /// if that is not finite. It matters to rows with an LSE far from 0: at 10⁹ the `f32` is a multiple of 64, so the number of
    /// keys is lost. Gradients of keys in parts and merged results need it there.
    #[must_use]
    pub fn lse(self, lse: ViewMut<'a>) -> Self {
        let twice = self.twice.or(self.lse.is_some().then_some("lse"));
        Self { lse: Some(lse), twice, ..self }
    }

    /// Adds the weights, `[batch, heads, q_len, kv_len]`: each row sums to 1 less the weight of a sink (to within
    /// 0.0041 with [`Precision::Native`](crate::Precision::Native)); hidden keys have weight 0.
    #[must_use]
    pub fn weights(self, weights: ViewMut<'a>) -> Self {
        self.scores(Point::Weights, weights)
    }

    /// Adds the scores at a [`Point`], `[batch, heads, q_len, kv_len]`. Keys beyond a sequence's length are written as
    /// −∞ (weight 0). Blocks that masks hide are no longer skipped, so this costs time as well as memory.
    #[must_use]
    pub fn scores(mut self, point: Point, scores: ViewMut<'a>) -> Self {
        let before = self.points[point as usize].replace(scores);
        self.twice = self.twice.or(before.map(|_| SCORES[point as usize]));
        self
    }

    /// Adds the sum of each key's weights over the query rows and heads that share it, `[batch, kv_heads, kv_len, 1]`,
    /// as cache eviction uses it. Costs QKᵀ two more times and no memory; workers share the work by sequence and
    /// key/value head. Rows are added in order, so the bits do not depend on threads.
    #[must_use]
    pub fn key_weight_sums(self, sums: ViewMut<'a>) -> Self {
        let twice = self.twice.or(self.key_weight_sums.is_some().then_some("key weight sums"));
        Self { key_weight_sums: Some(sums), twice, ..self }
    }

    /// Checks that every output fits the call; its inputs fit together.
    #[doc(hidden)] // its error has no name in `sdpa`
    pub fn fits(&self, call: &Call<'_>) -> Result<(), Misfit> {
        if let Some(argument) = self.twice {
            return Fault::Twice.of(argument);
        }
        let (q, [_, value_dim], [keys, values]) = (call.q.shape(), call.kv.dims(), call.kv.names());
        if let Some(out) = &self.out {
            same_rows("out", out.shape(), q, "q")?;
            same("out", "value_dim", out.shape()[3], value_dim, values)?;
        }
        if let Some(lse) = &self.lse {
            same_rows("lse", lse.shape(), q, "q")?;
            one_or_two_a_row("lse", lse.shape()[3])?;
        }
        for (argument, [b, h, l, columns]) in self.score_shapes() {
            let (longest_rows, longest_keys) = call.longest();
            same(argument, "batch", b, call.sequence_count(), "the call")?;
            same(argument, "heads", h, q[1], "q")?;
            same(argument, "rows", l, longest_rows, "q")?;
            same(argument, "columns", columns, longest_keys, call.columns_of())?;
        }
        if let Some(sums) = &self.key_weight_sums {
            let ([b, h, l, last], expected) = (sums.shape(), call.key_weight_sums_shape());
            let of = if matches!(call.options.ragged, Some(Ragged { k: None, .. })) { "the call" } else { keys };
            same("key weight sums", "batch", b, expected[0], of)?;
            same("key weight sums", "heads", h, expected[1], keys)?;
            same("key weight sums", "rows", l, expected[2], of)?;
            if last != 1 {
                return Fault::Wide { got: last, expected: "1 (one value a key)" }.of("key weight sums");
            }
        }
        self.state_fits(call)
    }

    /// Checks that a state fits the call, and that without an output there is a state and nothing else.
    fn state_fits(&self, call: &Call<'_>) -> Result<(), Misfit> {
        if let Some(State { max, sum, out, .. }) = &self.state {
            for shape in [max.shape(), sum.shape()] {
                same_rows("state", shape, call.q.shape(), "q")?;
                one_a_row("state", shape[3])?;
            }
            same_rows("state", out.shape(), call.q.shape(), "q")?;
            same("state", "value_dim", out.shape()[3], call.kv.dims()[1], call.kv.names()[1])?;
        }
        let alone = self.lse.is_none() && self.of_all_keys().is_none();
        match self.out.is_some() || self.state.is_some() && alone {
            true => Ok(()),
            false => Fault::Needs("an output, or a state alone").of("outputs"),
        }
    }

    /// Returns names and shapes of the scores that are given.
    fn score_shapes(&self) -> impl Iterator<Item = (&'static str, [usize; 4])> {
        SCORES.into_iter().zip(&self.points).filter_map(|(name, view)| Some((name, view.as_ref()?.shape())))
    }

    /// Returns the name of the first output, if any, that has an element for every key, hidden or not.
    #[doc(hidden)] // for `sdpa`
    pub fn of_all_keys(&self) -> Option<&'static str> {
        let scores = self.score_shapes().next().map(|(name, _)| name);
        scores.or(self.key_weight_sums.as_ref().map(|_| "key weight sums"))
    }

    /// Refuses outputs that need all keys at once.
    #[doc(hidden)] // its error has no name in `sdpa`
    pub fn check_for_state(&self) -> Result<(), Misfit> {
        let refuse = |argument| Fault::Needs("a call over all keys, not a state").of(argument);
        self.of_all_keys().map_or(Ok(()), refuse)
    }

    /// Returns true if log-sum-exps have a second column.
    #[inline]
    pub(crate) fn wants_lse_rests(&self) -> bool {
        self.lse.as_ref().is_some_and(|lse| lse.shape()[3] == 2)
    }

    #[inline]
    pub(crate) fn point(&self, point: Point) -> Option<&ViewMut<'a>> {
        self.points[point as usize].as_ref()
    }

    /// Returns true if scores or weights are written out: then every key is computed, hidden or not.
    #[inline]
    pub(crate) fn wants_all_keys(&self) -> bool {
        self.points.iter().any(Option::is_some)
    }
}
