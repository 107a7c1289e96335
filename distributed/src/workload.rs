//! Workload: the sizes of a call, as far as they decide how long it takes.

/// Sizes of a call over all ranks, as far as they decide how long it takes.
///
/// ```
/// let workload = sdpa_mpi::Workload {
///     batch: 1,
///     heads: [32, 8],
///     dims: [128, 128],
///     rows: 65_536,
///     keys: 65_536,
///     visible: 0.5, // causal
///     bytes: [2, 2, 2],
///     options: [0, 0], // neither bias nor mask
/// };
/// assert_eq!(workload.key_value_bytes(), 65_536 * 8 * 256 * 2);
/// assert_eq!(workload.flops(), 2.0 * 32.0 * 256.0 * 65_536f64.powi(2) * 0.5);
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Workload {
    /// Sequences.
    pub batch: usize,
    /// Query heads and key/value heads.
    pub heads: [usize; 2],
    /// `head_dim` and `value_dim`.
    pub dims: [usize; 2],
    /// Query rows of all ranks.
    pub rows: usize,
    /// Keys of all ranks.
    pub keys: usize,
    /// Share of the pairs of rows and keys that are seen: 1, or about ½ under a causal rule; less for ragged sequences.
    pub visible: f64,
    /// Bytes of an element of queries, keys and values.
    pub bytes: [usize; 3],
    /// Bytes of the rows of biases and masks, of all ranks: of those that differ from head to head, and of those that all heads
    /// share. They travel if the call is cut by heads.
    pub options: [usize; 2],
}

impl Workload {
    /// Bytes of all keys and values.
    pub fn key_value_bytes(&self) -> usize {
        let ([dim, value_dim], [_, k, v]) = (self.dims, self.bytes);
        self.batch * self.heads[1] * self.keys * (dim * k + value_dim * v)
    }

    /// Bytes of all queries, and of the results of all rows, which travel as `f32`.
    pub fn row_bytes(&self) -> usize {
        let ([dim, value_dim], [q, ..]) = (self.dims, self.bytes);
        self.batch * self.heads[0] * self.rows * (dim * q + (value_dim + 1) * size_of::<f32>())
    }

    /// Floating-point operations of QKᵀ and PV.
    pub fn flops(&self) -> f64 {
        let pairs = (self.batch * self.heads[0]) as f64 * self.rows as f64 * self.keys as f64 * self.visible;
        2.0 * pairs * (self.dims[0] + self.dims[1]) as f64
    }
}
