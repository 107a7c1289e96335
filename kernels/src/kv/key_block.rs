//! Keys and values of a block, independent of their source: rows to be packed, or panels that are packed already; rows
//! of values, or value panels of their columns.

use crate::kv::value_panels::{AnyValuePanels, ValuePanels};
use crate::matmul::finite;
use crate::matmul::int4::{Int4, NibbleQuad};
use crate::matmul::int8::ValueQuad;
use crate::simd::{Lower, Simd};
use crate::tensor::any::{AnyPanels, AnyRows, Typed};
use crate::tensor::element::F16;
use crate::tensor::rows::Rows;
use core::ops::Range;

/// Keys of a block.
#[derive(Clone, Copy)]
pub(crate) enum Keys {
    /// Rows that are not packed yet.
    Rows(AnyRows),
    /// Packed keys, whole panels. If they are scattered, a table entry follows for each panel: memory to prefetch.
    Packed(AnyPanels),
    /// Panels of int8 keys (`int8.rs`), like packed keys, and the keys' scales, in whole panels, if they have any.
    Int8 { panels: Rows<i8>, scales: Option<*const [f32]> },
    /// Panels of int4 keys (`int4.rs`), and the numbers of each panel.
    Int4 { panels: Rows<i8>, kind: Int4, numbers: Rows<F16> },
    /// Latent keys of integers, not packed yet: those that the block's values are the first columns of.
    Latent,
}

/// Values of a block.
#[derive(Clone, Copy)]
pub(crate) enum BlockValues {
    /// Rows, and the number of columns that may be read of each: their length, or more.
    Rows { rows: AnyRows, readable: usize },
    /// Value panels.
    ValuePanels(AnyValuePanels),
    /// Int8 values, all finite, and their scales, in whole panels.
    Int8 { values: ValuePanels<ValueQuad>, scales: *const [f32] },
    /// Int4 values, in panels of a block of columns, and the numbers of those blocks.
    Int4 { values: ValuePanels<NibbleQuad<Lower>>, numbers: Int4Numbers },
}

/// Numbers of int4 values.
#[derive(Clone, Copy)]
pub(crate) struct Int4Numbers {
    pub(crate) kind: Int4,
    /// Scales of the first block of columns, a panel of sixteen keys a row.
    pub(crate) first: Rows<F16>,
    /// Distance from these to the next numbers of the same keys: centres if there are any, then numbers of the next
    /// block.
    pub(crate) step: usize,
}

/// Columns of a block's values that are contiguous.
#[derive(Clone, Copy)]
pub(crate) struct Columns {
    /// Rows, starting at the first of these columns.
    pub(crate) rows: AnyRows,
    pub(crate) first: usize,
    pub(crate) cols: usize,
}

/// Distance of rows in bytes from which tiles of many rows read them from a copy: each is on a different page.
pub const FAR_ROWS: usize = 4096;

impl Columns {
    /// Returns true if the rows are evenly spaced and on different pages: their lines share few sets of the caches, and the
    /// hardware's prefetcher does not follow from page to page.
    #[inline]
    pub(crate) fn are_far(&self) -> bool {
        let bytes = |step: isize, size: usize| step.unsigned_abs().saturating_mul(size);
        by_type!(Typed, self.rows, |rows| !rows.are_scattered() && bytes(rows.step(), rows.element_bytes()) >= FAR_ROWS)
    }
}

impl BlockValues {
    /// Iterates over some of the columns, contiguous ones together; of int8 and int4 values, over none.
    ///
    /// # Safety
    /// The values have these columns.
    pub(crate) unsafe fn columns_together(self, columns: Range<usize>) -> impl Iterator<Item = Columns> {
        debug_assert!(columns.end <= self.readable(), "columns {columns:?} of {}", self.readable());
        let mut first = columns.start;
        core::iter::from_fn(move || {
            if first >= columns.end {
                return None;
            }
            // SAFETY: the caller guarantees that column `first` exists.
            let (rows, together) = unsafe {
                match self {
                    Self::Rows { rows, .. } => (rows.columns_from(first), usize::MAX),
                    Self::ValuePanels(value_panels) => {
                        (value_panels.from(first), value_panels.layout().panel(first).end - first)
                    }
                    Self::Int8 { .. } | Self::Int4 { .. } => return None,
                }
            };
            let next = Columns { rows, first, cols: together.min(columns.end - first) };
            first += next.cols;
            Some(next)
        })
    }

    /// Returns true if the values are `f32`.
    pub(crate) fn are_floats(self) -> bool {
        matches!(self, Self::Rows { rows: Typed::F32(_), .. } | Self::ValuePanels(Typed::F32(_)))
    }

    /// Returns the number of columns that may be read of each row.
    #[inline]
    pub(crate) fn readable(self) -> usize {
        match self {
            Self::Rows { readable, .. } => readable,
            Self::ValuePanels(value_panels) => value_panels.layout().width,
            Self::Int8 { values, .. } => values.layout.width,
            // A four holds two columns.
            Self::Int4 { values, .. } => 2 * values.layout.width,
        }
    }

    /// Returns true if all of `len` keys' values are finite. Int8 and int4 values always are.
    ///
    /// # Safety
    /// The block has `len` values of `cols` columns.
    pub(crate) unsafe fn all_finite<S: Simd>(self, s: S, len: usize, cols: usize) -> bool {
        // SAFETY: same contract: the caller guarantees `len` rows of `cols` columns.
        unsafe { self.columns_together(0..cols).all(|columns| finite::all_finite(s, columns.rows, len, columns.cols)) }
    }
}

/// Form of query rows that the keys require.
#[derive(Clone, Copy)]
pub(crate) enum QueryForm<'a> {
    /// Rows of f32.
    F32,
    /// Rows of int8, multiplied by the scales of the keys' channels, if there are any.
    Int8 { channels: Option<&'a [f32]> },
    /// Rows of int8, with the sum of each block.
    Int4,
}
