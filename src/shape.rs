//! Sizes of a call, and of the keys and values of a token.

use crate::error::Error;
use sdpa_kernels::{Call, Fault, MAX_DIM, Misfit};

/// Sizes of a call.
///
/// ```
/// use sdpa::{Inputs, Shape, View};
/// let (q, kv) = ([0.0; 8 * 2 * 16], [0.0; 2 * 5 * 16]);
/// let (q, kv) = (View::bhld(&q, [1, 8, 2, 16])?, View::bhld(&kv, [1, 2, 5, 16])?);
/// let shape = Inputs::new(q, kv, kv).shape()?;
/// let Shape { heads, kv_heads, q_len, kv_len, .. } = shape;
/// assert_eq!((heads, kv_heads, q_len, kv_len), (8, 2, 2, 5));
/// assert_eq!(shape.flops(), 2.0 * 8.0 * 2.0 * 5.0 * 32.0);
/// # Ok::<(), sdpa::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Shape {
    /// Number of sequences.
    pub batch: usize,
    /// Number of query heads.
    pub heads: usize,
    /// Number of key/value heads; `heads` is a multiple of it.
    pub kv_heads: usize,
    /// Number of query rows of a sequence, the longest if they differ.
    pub q_len: usize,
    /// Number of keys of a sequence, the longest if they differ.
    pub kv_len: usize,
    /// Length of a query or key.
    pub head_dim: usize,
    /// Length of a value.
    pub value_dim: usize,
}

/// Sizes of the keys and values of a token, for what stores them or awaits them.
///
/// ```
/// use sdpa::{KvCache, KvShape};
/// let shape = KvShape { kv_heads: 8, head_dim: 192, value_dim: 128 };
/// let cache = KvCache::new(4, shape)?; // four sequences
/// assert_eq!(cache.shape(), shape);
/// # Ok::<(), sdpa::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct KvShape {
    /// Number of key/value heads.
    pub kv_heads: usize,
    /// Length of a key.
    pub head_dim: usize,
    /// Length of a value.
    pub value_dim: usize,
}

impl KvShape {
    /// Refuses lengths of keys and values that are 0 or beyond the largest possible.
    pub(crate) fn check(self, argument: &'static str) -> Result<(), Error> {
        for (what, got) in [("head_dim", self.head_dim), ("value_dim", self.value_dim)] {
            if got == 0 {
                return Err(Error::Empty { argument, what });
            }
            if got > MAX_DIM {
                return Err(Misfit { argument, fault: Fault::Long { what, got } }.into());
            }
        }
        Ok(())
    }

    /// Lengths of a key and a value.
    pub(crate) fn dims(self) -> [usize; 2] {
        [self.head_dim, self.value_dim]
    }
}

impl Shape {
    /// Returns the sizes of a call; its inputs fit together.
    pub(crate) fn of(call: &Call<'_>) -> Self {
        let ([_, heads, ..], [head_dim, value_dim]) = (call.q.shape(), call.kv.dims());
        let (batch, kv_heads, (q_len, kv_len)) = (call.sequence_count(), call.kv.kv_heads(), call.longest());
        Self { batch, heads, kv_heads, q_len, kv_len, head_dim, value_dim }
    }

    /// Floating-point operations of QKᵀ and PV with every key visible: 2·B·H·Lq·Lk·(D + Dv).
    pub fn flops(&self) -> f64 {
        let rows = self.batch as f64 * self.heads as f64 * self.q_len as f64;
        2.0 * rows * self.kv_len as f64 * (self.head_dim + self.value_dim) as f64
    }
}
