//! The sizes of a call.

/// The sizes of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Shape {
    /// Sequences.
    pub batch: usize,
    /// Query heads.
    pub heads: usize,
    /// Key/value heads; `heads` is a multiple of it.
    pub kv_heads: usize,
    /// Query rows of a sequence, the longest if they differ.
    pub q_len: usize,
    /// Keys of a sequence, the longest if they differ.
    pub kv_len: usize,
    /// Length of a query or key.
    pub head_dim: usize,
    /// Length of a value.
    pub value_dim: usize,
}

impl Shape {
    /// Multiplications and additions of QKᵀ and PV with every key visible: 2·B·H·Lq·Lk·(D + Dv).
    pub fn flops(&self) -> f64 {
        let rows = self.batch as f64 * self.heads as f64 * self.q_len as f64;
        2.0 * rows * self.kv_len as f64 * (self.head_dim + self.value_dim) as f64
    }
}
