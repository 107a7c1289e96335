//! Keys and values of a block, independent of their source: rows to be packed, or panels that are packed already; rows
//! of values, or value panels of their columns.

use crate::kv::value_panels::{AnyValuePanels, ValueLayout, ValuePanels};
use crate::matmul::bf16_parts::Parts;
use crate::matmul::e4m3::E4m3;
use crate::matmul::finite;
use crate::matmul::int4::{self, Int4, NibbleQuad};
use crate::matmul::int8::ValueQuad;
use crate::simd::{Bf16x2, LANES, Lower, Simd};
use crate::tensor::any::{AnyPanels, AnyRows, Typed};
use crate::tensor::element::{Bf16, Element, F16};
use crate::tensor::rows::Rows;
use core::ops::Range;

/// Keys of a block.
#[derive(Clone, Copy)]
pub(crate) enum Keys {
    /// Rows that are not packed yet.
    Rows(AnyRows),
    /// Packed keys, f32 or f16, whole panels. If they are scattered, a table entry follows for each panel: memory to prefetch.
    Packed(AnyPanels),
    /// Keys packed as pairs of bfloat16, `[panel][pair][16]`.
    Pairs(Rows<Bf16x2>),
    /// Keys packed in parts, `[panel][part][pair][16]`.
    Parts(Parts),
    /// Panels of int8 keys (`int8.rs`), like packed keys, and the keys' scales, in whole panels, if they have any.
    Int8 { panels: Rows<i8>, scales: Option<*const [f32]> },
    /// Panels of int4 keys (`int4.rs`), and the numbers of each panel.
    Int4 { panels: Rows<i8>, kind: Int4, numbers: Rows<F16> },
    /// Packed E4M3 keys (`e4m3.rs`), whole panels, and the keys' scales, in whole panels.
    E4m3 { panels: Rows<E4m3>, scales: *const [f32] },
    /// Latent keys of integers, not packed yet: those that the block's values are the first columns of.
    Latent,
}

impl Keys {
    /// Returns true if keys are rows by a table of addresses.
    pub(crate) fn are_scattered_rows(self) -> bool {
        matches!(self, Self::Rows(rows) if rows.are_scattered())
    }
}

/// Values of a block.
#[derive(Clone, Copy)]
pub(crate) enum BlockValues {
    /// Rows, and the number of columns that may be read of each: their length, or more.
    Rows { rows: AnyRows, readable: usize },
    /// Value panels.
    ValuePanels(AnyValuePanels),
    /// Value panels of pairs of bfloat16, each of two keys. The last key of an odd number is beside any element.
    Pairs(ValuePanels<Bf16x2>),
    /// Int8 values, all finite, and their scales, in whole panels.
    Int8 { values: ValuePanels<ValueQuad>, scales: *const [f32] },
    /// Int4 values, in panels of a block of columns, and the numbers of those blocks.
    Int4 { values: ValuePanels<NibbleQuad<Lower>>, numbers: Int4Numbers },
    /// E4M3 values, and their scales, in whole panels.
    E4m3 { values: ValuePanels<E4m3>, scales: *const [f32] },
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
    /// Values, starting at the first of these columns.
    pub(crate) values: ColumnValues,
    pub(crate) first: usize,
    pub(crate) cols: usize,
}

/// Values of contiguous columns, for each key of a block.
#[derive(Clone, Copy)]
pub(crate) enum ColumnValues {
    /// Rows of elements.
    Elements(AnyRows),
    /// Pairs of bfloat16, each of two keys, `[pair of keys][columns]`.
    Pairs(Rows<Bf16x2>),
    /// Values packed in parts, `[part][pair of keys][columns]`.
    Parts(Parts),
    /// Int8 values of a value panel, in fours of keys.
    Int8(Rows<ValueQuad>),
    /// Int4 values, in panels of a block of columns, and the numbers of those blocks.
    Int4 { panels: ValuePanels<NibbleQuad<Lower>>, numbers: Int4Numbers },
    /// Rows of E4M3 values, without their scales and factor.
    E4m3(Rows<E4m3>),
}

impl ColumnValues {
    /// Returns the value of key `j` in column `c`, widened, without its scale.
    ///
    /// # Panics
    /// If values are integers, or packed in parts.
    ///
    /// # Safety
    /// There is such a value.
    pub(crate) unsafe fn get(self, j: usize, c: usize) -> f32 {
        // SAFETY: the caller guarantees the value.
        unsafe {
            match self {
                Self::Elements(rows) => rows.get(j, c),
                Self::Pairs(pairs) => Bf16((*pairs.at(j / 2).add(c)).elements()[j % 2]).widen(),
                Self::E4m3(rows) => (*rows.at(j).add(c)).widen(),
                Self::Parts(_) => unreachable!("values that are packed"),
                Self::Int8(_) | Self::Int4 { .. } => unreachable!("values of integers"),
            }
        }
    }

    /// Returns true if the values of key `j` in the first `cols` columns are finite, read sixteen at a time. It may return false
    /// where those of the other key of a pair are not.
    ///
    /// # Safety
    /// There are such values.
    pub(crate) unsafe fn key_is_finite<S: Simd>(self, s: S, j: usize, cols: usize) -> bool {
        // SAFETY: the caller guarantees the key's values. A pair is one element, which holds those of both keys; beside a last key
        // alone lies some number.
        unsafe {
            match self {
                Self::Elements(rows) => finite::all_finite(s, rows.rows_from(j), 1, cols),
                Self::Pairs(pairs) => {
                    finite::all_finite(s, Typed::Bf16(pairs.elements(2)).rows_from(j / 2), 1, 2 * cols)
                }
                _ => (0..cols).all(|c| self.get(j, c).is_finite()),
            }
        }
    }

    /// Returns the rows of elements.
    ///
    /// # Panics
    /// If values are pairs or integers.
    #[inline(always)]
    pub(crate) fn elements(self) -> AnyRows {
        let Self::Elements(rows) = self else { unreachable!("values in groups of keys") };
        rows
    }
}

/// Distance of rows in bytes from which tiles of many rows read them from a copy: each is on another page.
pub const FAR_ROWS: usize = 4096;

impl Columns {
    /// Returns true if the columns of each row are contiguous.
    #[inline]
    pub(crate) fn are_contiguous(&self) -> bool {
        match self.values {
            ColumnValues::Elements(rows) => rows.element() == 1,
            _ => true,
        }
    }

    /// Returns true if the rows are evenly spaced and on pages of their own: their lines share few sets of the caches, and the
    /// hardware's prefetcher does not follow from page to page.
    #[inline]
    pub(crate) fn are_far(&self) -> bool {
        let bytes = |step: isize, size: usize| step.unsigned_abs().saturating_mul(size);
        let Self { values: ColumnValues::Elements(rows), .. } = self else { return false };
        by_type!(Typed, rows, |rows| !rows.are_scattered() && bytes(rows.step(), rows.element_bytes()) >= FAR_ROWS)
    }
}

impl BlockValues {
    /// Iterates over some of the columns, contiguous ones together; of int4 values, all of them, which begin with a block.
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
            let (values, together) = unsafe {
                match self {
                    Self::Rows { rows, .. } => (ColumnValues::Elements(rows.columns_from(first)), usize::MAX),
                    Self::ValuePanels(panels) => {
                        let (rows, together) = panels.from(first);
                        (ColumnValues::Elements(rows), together)
                    }
                    Self::Pairs(panels) => {
                        let (rows, together) = panels.from(first);
                        (ColumnValues::Pairs(rows), together)
                    }
                    Self::Int8 { values, .. } => {
                        let (rows, together) = values.from(first);
                        (ColumnValues::Int8(rows), together)
                    }
                    Self::E4m3 { values, .. } => {
                        let (rows, together) = values.from(first);
                        (ColumnValues::E4m3(rows), together)
                    }
                    Self::Int4 { values, numbers } => {
                        (Self::blocks_of_int4(values, numbers, first, columns.end), usize::MAX)
                    }
                }
            };
            let next = Columns { values, first, cols: together.min(columns.end - first) };
            first += next.cols;
            Some(next)
        })
    }

    /// Returns int4 values of some columns, from a block's first on.
    ///
    /// # Safety
    /// The values have these columns.
    unsafe fn blocks_of_int4(
        values: ValuePanels<NibbleQuad<Lower>>,
        numbers: Int4Numbers,
        first: usize,
        end: usize,
    ) -> ColumnValues {
        let blocks = first / int4::BLOCK..int4::blocks(end);
        debug_assert!(first.is_multiple_of(int4::BLOCK), "columns that begin inside a block");
        let layout = ValueLayout { width: blocks.len() * LANES, ..values.layout };
        // SAFETY: the caller guarantees the columns, and so their numbers.
        unsafe {
            let panels = ValuePanels { first: values.vector(blocks.start), layout };
            let number = blocks.start * numbers.kind.numbers() * numbers.step;
            let numbers = Int4Numbers { first: numbers.first.columns_from(number), ..numbers };
            ColumnValues::Int4 { panels, numbers }
        }
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
            Self::Pairs(panels) => panels.layout.width,
            Self::Int8 { values, .. } => values.layout.width,
            Self::E4m3 { values, .. } => values.layout.width,
            // A four holds two columns.
            Self::Int4 { values, .. } => 2 * values.layout.width,
        }
    }

    /// Returns true if all of `len` keys' values are finite. Int8 and int4 values always are.
    ///
    /// # Safety
    /// The block has `len` values of `cols` columns.
    pub(crate) unsafe fn all_finite<S: Simd>(self, s: S, len: usize, cols: usize) -> bool {
        let finite = |Columns { values, cols, .. }| match values {
            // SAFETY: same contract: the caller guarantees `len` rows of `cols` columns.
            ColumnValues::Elements(rows) => unsafe { finite::all_finite(s, rows, len, cols) },
            // SAFETY: as above. Whole pairs of keys are rows of their elements; then a last key alone.
            ColumnValues::Pairs(pairs) => unsafe {
                let both = Typed::Bf16(pairs.elements(2));
                let last = || (0..cols).all(|c| values.get(len - 1, c).is_finite());
                finite::all_finite(s, both, len / 2, 2 * cols) && (len.is_multiple_of(2) || last())
            },
            // SAFETY: as above.
            ColumnValues::E4m3(_) => (0..len).all(|j| (0..cols).all(|c| unsafe { values.get(j, c) }.is_finite())),
            ColumnValues::Parts(_) => unreachable!("values that are packed"),
            ColumnValues::Int8(_) | ColumnValues::Int4 { .. } => true,
        };
        // SAFETY: as above.
        unsafe { self.columns_together(0..cols).all(finite) }
    }
}
