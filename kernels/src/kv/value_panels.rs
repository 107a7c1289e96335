//! Value panels: a block's values by panels of columns, `[value panel][keys][columns of the value panel]`.
//!
//! A register tile covers 64 columns at most. If values were stored as wider rows, a tile of few rows would read 64
//! columns of each, skip the rest, and come back for it: a pattern that the core's prefetcher follows badly. A value
//! panel is what one tile reads, from front to back.

use crate::matmul::tile_shape::next_part;
use crate::simd::LANES;
use crate::tensor::any::{AnyRows, Typed};
use crate::tensor::element::{Bf16, F16};
use crate::tensor::rows::Rows;
use core::ops::Range;

/// Largest number of columns of a value panel: that of the widest register tile. It is part of a cache's memory layout,
/// so it is the same for every instruction set.
pub(crate) const VALUE_PANEL: usize = 4 * LANES;

/// Largest number of value columns that are packed at once, for 256 keys a quarter of a megabyte, and divided into value
/// panels of about equal width: 80 make 48 + 32.
pub(crate) const VALUE_COLS: usize = 256;

/// Returns the columns of the value panel that holds `column`, in rows of `width`, a whole number of vectors.
fn value_panel(column: usize, width: usize) -> Range<usize> {
    assert!(column < width, "column {column} of {width}");
    let mut first = column / VALUE_COLS * VALUE_COLS;
    let end = width.min(first + VALUE_COLS);
    loop {
        let next = first + next_part((end - first) / LANES, VALUE_PANEL / LANES) * LANES;
        if column < next {
            return first..next;
        }
        first = next;
    }
}

/// Order of the values of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ValueOrder {
    /// Value panels, one after the other.
    Panels,
    /// Rows, one after the other: a single panel, however wide.
    Rows,
    /// Panels of one vector, one after the other.
    Vectors,
}

/// Layout of the values of a block, in panels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ValueLayout {
    pub(crate) order: ValueOrder,
    /// Number of rows of a block: its keys divided by those of a group, 2 in bf16 pairs, 4 in int8 and int4.
    pub(crate) rows: usize,
    /// Number of columns in all panels, whole vectors: in int4, which stores two columns as one, half of them.
    pub(crate) width: usize,
}

impl ValueLayout {
    /// Returns the columns of the panel that holds `column`.
    pub(crate) fn panel(self, column: usize) -> Range<usize> {
        match self.order {
            ValueOrder::Panels => value_panel(column, self.width),
            ValueOrder::Rows => 0..self.width,
            ValueOrder::Vectors => column / LANES * LANES..(column / LANES + 1) * LANES,
        }
    }

    /// Iterates over the columns of each panel.
    #[inline(always)]
    pub(crate) fn panels(self) -> impl Iterator<Item = Range<usize>> {
        core::iter::successors((self.width > 0).then(|| self.panel(0)), move |last| {
            (last.end < self.width).then(|| self.panel(last.end))
        })
    }

    /// Returns the index of element `column` of row `j`.
    pub(crate) fn at(self, j: usize, column: usize) -> usize {
        self.at_in(&self.panel(column), j, column)
    }

    /// Returns the index as [`Self::at`] does, of a column of this panel.
    fn at_in(self, panel: &Range<usize>, j: usize, column: usize) -> usize {
        panel.start * self.rows + j * panel.len() + column - panel.start
    }
}

/// Values of a block in panels.
#[derive(Clone, Copy)]
pub(crate) struct ValuePanels<T> {
    /// Rows of the first panel. If they are scattered, all panels are equally wide.
    pub(crate) first: Rows<T>,
    pub(crate) layout: ValueLayout,
}

impl<T: Copy> ValuePanels<T> {
    /// Makes the panels of a whole block that starts at an address.
    pub(crate) fn together(first: *const T, layout: ValueLayout) -> Self {
        Self { first: Rows::strided(first, layout.panel(0).len() as isize, 1), layout }
    }

    /// Returns the rows from a column on, to the end of its panel, and the number of columns up to there.
    ///
    /// # Safety
    /// The column exists.
    #[inline]
    pub(crate) unsafe fn from(self, column: usize) -> (Rows<T>, usize) {
        debug_assert!(column < self.layout.width, "column {column} of {}", self.layout.width);
        let panel = self.layout.panel(column);
        // SAFETY: the caller guarantees that the column exists: all panels of a block lie in the memory that starts with
        // the first.
        let rows = unsafe { self.first.columns_from(self.layout.at_in(&panel, 0, column)) };
        (rows.with_step(panel.len() as isize), panel.end - column)
    }

    /// Returns the rows of panel `n`, where panels are [vectors](ValueOrder::Vectors).
    ///
    /// # Safety
    /// The panel exists.
    #[inline(always)]
    pub(crate) unsafe fn vector(self, n: usize) -> Rows<T> {
        debug_assert!(self.layout.order == ValueOrder::Vectors && n * LANES < self.layout.width, "vector {n}");
        // SAFETY: the caller guarantees that the panel exists: all panels of a block lie in the memory that starts with the first.
        unsafe { self.first.columns_from(n * LANES * self.layout.rows) }
    }

    /// Iterates over the panels: their columns, and their rows.
    #[cfg(any(test, feature = "_probe"))]
    pub(crate) fn panels(self) -> impl Iterator<Item = (Range<usize>, Rows<T>)> {
        // SAFETY: the panel exists.
        self.layout.panels().map(move |columns| (columns.clone(), unsafe { self.from(columns.start).0 }))
    }
}

/// Value panels of any element type.
pub(crate) type AnyValuePanels = Typed<ValuePanels<f32>, ValuePanels<Bf16>, ValuePanels<F16>>;

impl AnyValuePanels {
    /// Returns the layout of the values.
    #[inline]
    pub(crate) fn layout(self) -> ValueLayout {
        by_type!(Typed, self, |value_panels| value_panels.layout)
    }

    /// Returns the rows of the first panel.
    #[inline]
    pub(crate) fn first(self) -> AnyRows {
        by_type!(Typed => Typed, self, |value_panels| value_panels.first)
    }

    /// Returns the rows from a column on, and the number of columns, as [`ValuePanels::from`] does.
    ///
    /// # Safety
    /// The column exists.
    #[inline]
    pub(crate) unsafe fn from(self, column: usize) -> (AnyRows, usize) {
        let together;
        let rows = by_type!(Typed => Typed, self, |value_panels| {
            // SAFETY: the caller guarantees that the column exists.
            let (rows, columns) = unsafe { value_panels.from(column) };
            together = columns;
            rows
        });
        (rows, together)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::rows::KEY_BLOCK;

    #[test]
    fn every_element_has_its_own_place() {
        for width in (LANES..=3 * VALUE_COLS + VALUE_PANEL).step_by(LANES) {
            let mut seen = vec![false; KEY_BLOCK * width];
            for j in [0, 1, KEY_BLOCK - 1] {
                for column in 0..width {
                    let value_panel = value_panel(column, width);
                    assert!(
                        value_panel.contains(&column)
                            && value_panel.len() <= VALUE_PANEL
                            && value_panel.len().is_multiple_of(LANES)
                    );
                    assert!(value_panel.start / VALUE_COLS == (value_panel.end - 1) / VALUE_COLS);
                    let layout = ValueLayout { order: ValueOrder::Panels, rows: KEY_BLOCK, width };
                    assert!(!core::mem::replace(&mut seen[layout.at(j, column)], true));
                }
            }
        }
    }
}
