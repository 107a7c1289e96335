//! Checked calls of linear attention.

use super::settings::{FeatureMap, Form, Normaliser, Reach};
use sdpa::{Isa, View};

/// Checked call of linear attention.
pub(super) struct Call<'a> {
    pub(super) isa: Isa,
    pub(super) q: View<'a>,
    pub(super) k: View<'a>,
    pub(super) v: View<'a>,
    /// `[batch, kv_heads, kv_len, head_dim or 1]`: a decay for each state.
    pub(super) log_decay: Option<View<'a>>,
    /// `[batch, kv_heads, kv_len, 1]`.
    pub(super) beta: Option<View<'a>>,
    /// Number of tokens of each sequence that are not padding, if not all.
    pub(super) lens: Option<&'a [usize]>,
    /// Number of states of a sequence: the larger of key heads and value heads.
    pub(super) kv_heads: usize,
    /// Number of query heads that share a state.
    pub(super) group: usize,
    pub(super) kv_len: usize,
    pub(super) head_dim: usize,
    /// Columns of the state: those of the values, and one more with a normaliser.
    pub(super) width: usize,
    pub(super) scale: f32,
    pub(super) form: Form,
    pub(super) reach: Reach,
    pub(super) feature_map: FeatureMap,
    pub(super) normaliser: Normaliser,
}

impl Call<'_> {
    /// Number of tokens that are processed at a time.
    pub(super) fn chunk(&self) -> usize {
        match self.form {
            Form::Recurrent => 1,
            Form::Chunked(n) => n,
        }
    }

    /// Floating-point operations, without those among the tokens of a chunk.
    pub(super) fn flops(&self) -> f64 {
        let [batch, heads, q_len, _] = self.q.shape();
        let passes = if self.beta.is_some() { 2.0 } else { 1.0 };
        let rows = heads.max(self.kv_heads) as f64 * q_len as f64 + passes * self.kv_heads as f64 * self.kv_len as f64;
        2.0 * batch as f64 * rows * self.head_dim as f64 * self.width as f64
    }
}
