//! Outputs of a call: the attention output, lse, scores, key weight sums, and the state carried between calls.

use crate::tensor::any::{AnyShared, TensorMut};
use crate::tensor::view_mut::{SharedMut, ViewMut};

/// Stages of the score computation at which scores can be written out, `[batch, heads, rows, keys]`. Only such outputs
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

/// Running softmax state of rows whose keys come in several calls, not normalised: dense, `[batch, heads, q_len]`, and
/// `[batch, heads, q_len, value_dim]` for `out`.
#[derive(Debug)]
pub struct State<'a> {
    /// Largest score so far; −∞ at first.
    pub max: ViewMut<'a>,
    /// Σ exp(score − max) so far.
    pub sum: ViewMut<'a>,
    /// Σ exp(score − max)·v so far.
    pub out: ViewMut<'a>,
}

/// Outputs of a call: `out` `[B, H, Lq, Dv]` and the optional ones.
#[derive(Debug)]
pub struct Outputs<'a> {
    /// Weighted sums of values, `[batch, heads, q_len, value_dim]`. With it, results are written and the state stays
    /// unchanged. Without it, the state takes in the keys, and there may be no other output.
    pub out: Option<TensorMut<'a>>,
    /// Log-sum-exp, ln Σ exp(score), `[batch, heads, q_len, 1]`.
    pub lse: Option<ViewMut<'a>>,
    /// Scores at each [`Point`], `[batch, heads, q_len, kv_len]`.
    pub points: [Option<ViewMut<'a>>; 4],
    /// Sum of each key's weights over the rows and heads that share it, `[batch, kv_heads, kv_len, 1]`.
    pub key_weight_sums: Option<ViewMut<'a>>,
    /// State accumulated by earlier calls.
    pub state: Option<State<'a>>,
}

/// [`State`] in a form that tasks write through, each to its own rows.
pub(crate) struct SharedState<'a> {
    pub(crate) max: SharedMut<'a, f32>,
    pub(crate) sum: SharedMut<'a, f32>,
    pub(crate) out: SharedMut<'a, f32>,
}

/// [`Outputs`] in a form that tasks write through, each to its own rows.
pub(crate) struct Shared<'a> {
    pub(crate) out: Option<AnyShared<'a>>,
    pub(crate) lse: Option<SharedMut<'a, f32>>,
    pub(crate) points: [Option<SharedMut<'a, f32>>; 4],
    pub(crate) key_weight_sums: Option<SharedMut<'a, f32>>,
    pub(crate) state: Option<SharedState<'a>>,
}

impl<'a> Outputs<'a> {
    pub(crate) fn into_shared(self) -> Shared<'a> {
        Shared {
            out: self.out.map(TensorMut::into_shared),
            lse: self.lse.map(ViewMut::into_shared),
            points: self.points.map(|view| view.map(ViewMut::into_shared)),
            key_weight_sums: self.key_weight_sums.map(ViewMut::into_shared),
            state: self.state.map(|State { max, sum, out }| SharedState {
                max: max.into_shared(),
                sum: sum.into_shared(),
                out: out.into_shared(),
            }),
        }
    }
}

impl<'a> Shared<'a> {
    /// No outputs at all.
    pub(crate) const NOTHING: Shared<'static> =
        Shared { out: None, lse: None, points: [const { None }; 4], key_weight_sums: None, state: None };

    #[inline]
    pub(crate) fn point(&self, point: Point) -> Option<&SharedMut<'a, f32>> {
        self.points[point as usize].as_ref()
    }

    /// Returns true if scores or weights are written out: then every key is computed, hidden or not.
    #[inline]
    pub(crate) fn wants_all_keys(&self) -> bool {
        self.points.iter().any(Option::is_some)
    }
}
