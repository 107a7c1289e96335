//! Where results go.

use crate::view::{SharedMut, ViewMut};

/// The points on a score's way at which it can be written out, `[batch, heads, rows, keys]`. Asking for one is the
/// only thing that costs memory in the number of rows times keys: the caller's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Point {
    /// scale·(q·k), masks not applied (ONNX `qk_matmul_output_mode` 0).
    Raw,
    /// After softcap, masks not applied (mode 1).
    Softcapped,
    /// After bias, ALiBi, score function and masks: −∞ where hidden (mode 2).
    Masked,
    /// After the softmax: 0 where hidden (mode 3).
    Weights,
}

/// All points, in order.
pub(crate) const POINTS: [Point; 4] = [Point::Raw, Point::Softcapped, Point::Masked, Point::Weights];

/// The outputs of a call: `out` `[B, H, Lq, Dv]` and what else was asked for.
#[derive(Debug)]
pub struct Outputs<'a> {
    /// Weighted sums of values, `[batch, heads, q_len, value_dim]`.
    pub out: ViewMut<'a>,
    /// ln Σ exp(score), `[batch, heads, q_len, 1]`.
    pub lse: Option<ViewMut<'a>>,
    /// Scores at each [`Point`], `[batch, heads, q_len, kv_len]`.
    pub points: [Option<ViewMut<'a>>; 4],
    /// Σ of each key's weights over the rows and heads that share it, `[batch, kv_heads, kv_len, 1]`. Needs `lse`.
    pub key_mass: Option<ViewMut<'a>>,
}

/// The same, in a form that tasks write through, each to its own rows.
pub(crate) struct Shared<'a> {
    pub(crate) out: SharedMut<'a, f32>,
    pub(crate) lse: Option<SharedMut<'a, f32>>,
    pub(crate) points: [Option<SharedMut<'a, f32>>; 4],
    pub(crate) key_mass: Option<SharedMut<'a, f32>>,
}

impl<'a> Outputs<'a> {
    pub(crate) fn into_shared(self) -> Shared<'a> {
        Shared {
            out: self.out.into_shared(),
            lse: self.lse.map(ViewMut::into_shared),
            points: self.points.map(|view| view.map(ViewMut::into_shared)),
            key_mass: self.key_mass.map(ViewMut::into_shared),
        }
    }
}

impl<'a> Shared<'a> {
    pub(crate) fn point(&self, point: Point) -> Option<&SharedMut<'a, f32>> {
        self.points[point as usize].as_ref()
    }

    /// True if scores or weights are written out: then every key is computed, hidden or not.
    pub(crate) fn wants_all_keys(&self) -> bool {
        self.points.iter().any(Option::is_some)
    }
}
