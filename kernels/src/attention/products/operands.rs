//! Operands of products, as an arithmetic takes them.

use crate::kv::key_block::{BlockValues, ColumnValues, Keys};
use crate::matmul::hadamard::Basis;
use crate::matmul::pack::NonFinite;
use crate::tensor::any::AnyRows;
use crate::tensor::element::Dtype;
use core::ops::Range;

/// Query to be written to scratch.
#[derive(Clone, Copy)]
pub(crate) struct QueryRow<'a> {
    /// The query is row 0.
    pub(crate) row: AnyRows,
    pub(crate) head_dim: usize,
    /// Factor of its products with keys.
    pub(crate) scale: f32,
    /// Scales of the keys' channels, if keys have such.
    pub(crate) channels: Option<&'a [f32]>,
    /// Basis of the keys.
    pub(crate) basis: Basis,
}

/// Queries of a row block.
#[derive(Clone, Copy)]
pub(crate) struct QueryRows<'a> {
    /// Rows, contiguous each.
    pub(crate) rows: &'a [*const f32],
    pub(crate) head_dim: usize,
    /// Type of the call's queries.
    pub(crate) dtype: Dtype,
    /// Factor of their products with keys.
    pub(crate) scale: f32,
}

/// Keys of a block, and its values, which latent keys lie in.
#[derive(Clone, Copy)]
pub(crate) struct KeySource<'b> {
    pub(crate) keys: &'b Keys,
    pub(crate) values: &'b BlockValues,
}

/// Keys to be packed.
#[derive(Clone)]
pub(crate) struct KeysToPack<'b> {
    pub(crate) source: KeySource<'b>,
    /// Keys of the block, from a whole panel on.
    pub(crate) keys: Range<usize>,
    /// Number of keys from the first of these on that are packed or, after these, prefetched.
    pub(crate) all: usize,
    pub(crate) head_dim: usize,
    pub(crate) packing: Packing,
}

/// Whether keys or values are packed already.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Packing {
    Done,
    Needed,
}

/// Values to be packed: all of a block, some contiguous columns.
#[derive(Clone, Copy)]
pub(crate) struct ValuesToPack {
    pub(crate) values: ColumnValues,
    /// Number of keys, and of columns.
    pub(crate) size: [usize; 2],
    pub(crate) nonfinite: NonFinite,
    pub(crate) packing: Packing,
}

/// Keys of a run, as an arithmetic reads them: its first panel is the run's first. Floats and pairs of many rows are not scattered.
#[derive(Clone, Copy)]
pub(crate) struct RunKeys {
    pub(crate) keys: Keys,
    /// Keys that few rows prefetch meanwhile.
    pub(crate) later: Option<LaterKeys>,
}

/// Keys that few rows prefetch while they compute others.
#[derive(Clone, Copy)]
pub(crate) enum LaterKeys {
    /// Panels `far` bytes [behind](crate::matmul::dot_tile::behind) those that are computed.
    Panels { far: usize },
    /// Rows that are not packed yet, from `at` on, which are prefetched as the keys are read: `bytes` for each element of a panel.
    Rows { at: *const u8, bytes: usize },
}
