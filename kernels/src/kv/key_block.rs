//! The keys and values of a block, whatever their source: rows to be packed, or panels that are packed already; rows of
//! values, or panels of their columns.

use crate::kv::value_panels::{AnyValuePanels, ValuePanels, value_panel};
use crate::matmul::pack_steps::PackSteps;
use crate::tensor::any::{AnyPanels, AnyRows, Typed};
use core::ops::Range;

/// The keys of a block.
#[derive(Clone, Copy)]
pub(crate) enum Keys {
    /// Rows, yet to be packed.
    Rows(AnyRows),
    /// `[panel][head_dim][16]`, whole panels.
    Packed(AnyPanels),
    /// Bytes of a whole block: see `int8.rs`.
    Int8 { keys: *const [i8], scales: Option<*const [f32]> },
}

/// The values of a block.
#[derive(Clone, Copy)]
pub(crate) enum BlockValues {
    /// Rows, and columns that may be read of each: as many as there are, or more.
    Rows { rows: AnyRows, readable: usize },
    /// ValuePanels.
    ValuePanels(AnyValuePanels),
    /// ValuePanels of bytes, all finite; and the scales of a whole block.
    Int8 { value_panels: ValuePanels<i8>, scales: *const [f32] },
}

/// Columns of a block's values that lie together.
#[derive(Clone, Copy)]
pub(crate) struct Run {
    /// Rows from the first of them on.
    pub(crate) rows: AnyRows,
    pub(crate) first: usize,
    pub(crate) cols: usize,
}

impl BlockValues {
    /// Some of the columns, in runs. Of bytes, none.
    ///
    /// # Safety
    /// The values have these columns.
    pub(crate) unsafe fn runs(self, columns: Range<usize>) -> impl Iterator<Item = Run> {
        let mut first = columns.start;
        core::iter::from_fn(move || {
            if first >= columns.end {
                return None;
            }
            // SAFETY: the caller vouches for column `first`.
            let (rows, together) = unsafe {
                match self {
                    Self::Rows { rows, .. } => (rows.columns_from(first), usize::MAX),
                    Self::ValuePanels(value_panels) => {
                        (value_panels.from(first), value_panel(first, self.readable()).end - first)
                    }
                    Self::Int8 { .. } => return None,
                }
            };
            let run = Run { rows, first, cols: together.min(columns.end - first) };
            first += run.cols;
            Some(run)
        })
    }

    /// Whether they are `f32`.
    pub(crate) fn are_floats(self) -> bool {
        matches!(self, Self::Rows { rows: Typed::F32(_), .. } | Self::ValuePanels(Typed::F32(_)))
    }

    /// Columns that may be read of each row.
    #[inline]
    pub(crate) fn readable(self) -> usize {
        match self {
            Self::Rows { readable, .. } => readable,
            Self::ValuePanels(value_panels) => by_type!(Typed, value_panels, |value_panels| value_panels.width),
            Self::Int8 { value_panels, .. } => value_panels.width,
        }
    }

    /// True if nothing of `len` keys' values is infinite or NaN.
    ///
    /// # Safety
    /// There are so many, of so many columns.
    pub(crate) unsafe fn all_finite<S: PackSteps>(self, s: S, len: usize, cols: usize) -> bool {
        // SAFETY: passed on.
        unsafe { self.runs(0..cols).all(|run| s.all_finite(run.rows, len, run.cols)) }
    }
}

/// What query rows are to be, for the keys they will meet.
#[derive(Clone, Copy)]
pub(crate) enum QueryForm<'a> {
    Floats,
    /// Bytes; the scales of the keys' channels, if there are such, belong into them.
    Bytes {
        channels: Option<&'a [f32]>,
    },
}
