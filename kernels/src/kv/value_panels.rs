//! Value panels: a block's values by panels of columns, `[value panel][256 keys][columns of the value panel]`.
//!
//! A register tile covers 64 columns at most. Where rows are wider, a tile of few rows would read a piece of each, skip
//! the rest, and come back for it: a pattern that the core's prefetcher follows badly. A value panel is what one tile
//! reads, from front to back.

use crate::simd::LANES;
use crate::tensor::any::{AnyRows, Typed};
use crate::tensor::element::{Bf16, F16, Load};
use crate::tensor::rows::KEY_BLOCK;
use crate::tensor::rows::Rows;
use core::ops::Range;

/// Largest number of columns of a value panel: that of the widest register tile. Part of a cache's memory layout, so it
/// is the same for every instruction set.
pub(crate) const VALUE_PANEL: usize = 4 * LANES;

/// Number of columns that are split into value panels of about equal width: 80 make 48 + 32. As many as are packed at
/// once.
pub(crate) const WINDOW: usize = 256;

/// Returns the columns of the value panel that holds `column`, in rows of `width`, a whole number of vectors.
pub(crate) fn value_panel(column: usize, width: usize) -> Range<usize> {
    let mut first = column / WINDOW * WINDOW;
    let end = width.min(first + WINDOW);
    loop {
        let vecs = (end - first) / LANES;
        let next = first + vecs.div_ceil(vecs.div_ceil(VALUE_PANEL / LANES)) * LANES;
        if column < next {
            return first..next;
        }
        first = next;
    }
}

/// Returns the index of element `column` of row `j` in the value panels.
pub(crate) fn at(j: usize, column: usize, width: usize) -> usize {
    let value_panel = value_panel(column, width);
    value_panel.start * KEY_BLOCK + j * value_panel.len() + column - value_panel.start
}

/// Value panels of a block.
#[derive(Clone, Copy)]
pub(crate) struct ValuePanels<T> {
    pub(crate) first: *const T,
    /// Number of columns in all panels: whole vectors.
    pub(crate) width: usize,
}

impl<T> ValuePanels<T> {
    /// Returns the panels as bytes, and the number of bytes of an element.
    pub(crate) fn bytes(self) -> (ValuePanels<u8>, usize) {
        (ValuePanels { first: self.first.cast(), width: self.width }, size_of::<T>())
    }
}

impl<T: Load> ValuePanels<T> {
    /// Returns the rows from a column on, to the end of its value panel.
    ///
    /// # Safety
    /// The column exists, with 256 rows.
    pub(crate) unsafe fn from(self, column: usize) -> Rows<T> {
        debug_assert!(column < self.width, "column {column} of {}", self.width);
        // SAFETY: the caller guarantees that the column exists.
        let first = unsafe { self.first.add(at(0, column, self.width)) };
        Rows::strided(first, value_panel(column, self.width).len() as isize, 1)
    }
}

/// Value panels of any element type.
pub(crate) type AnyValuePanels = Typed<ValuePanels<f32>, ValuePanels<Bf16>, ValuePanels<F16>>;

impl AnyValuePanels {
    /// Returns the rows from a column on, to the end of its value panel.
    ///
    /// # Safety
    /// The column exists, with 256 rows.
    pub(crate) unsafe fn from(self, column: usize) -> AnyRows {
        // SAFETY: the caller guarantees that the column exists.
        by_type!(Typed => Typed, self, |value_panels| unsafe { value_panels.from(column) })
    }

    /// Returns the panels as bytes, and the number of bytes of an element.
    pub(crate) fn bytes(self) -> (ValuePanels<u8>, usize) {
        by_type!(Typed, self, |value_panels| value_panels.bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_element_has_its_own_place() {
        for width in (LANES..=3 * WINDOW + VALUE_PANEL).step_by(LANES) {
            let mut seen = vec![false; KEY_BLOCK * width];
            for j in [0, 1, KEY_BLOCK - 1] {
                for column in 0..width {
                    let value_panel = value_panel(column, width);
                    assert!(
                        value_panel.contains(&column)
                            && value_panel.len() <= VALUE_PANEL
                            && value_panel.len().is_multiple_of(LANES)
                    );
                    assert!(value_panel.start / WINDOW == (value_panel.end - 1) / WINDOW);
                    assert!(!core::mem::replace(&mut seen[at(j, column, width)], true));
                }
            }
        }
    }
}
