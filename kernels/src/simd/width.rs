//! Widths of a vector and of a cache line.

/// Number of lanes of a vector: keys in a panel, and the fixed number of partial sums of a softmax row.
pub(crate) const LANES: usize = 16;

/// Number of bytes of a cache line, which is sixteen floats.
pub(crate) const LINE_BYTES: usize = LANES * size_of::<f32>();
