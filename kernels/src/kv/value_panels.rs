//! Values of a block in strips of columns: `[strip][256 keys][columns of the strip]`.
//!
//! A register tile covers 64 columns at most. Where rows are wider, a tile of few rows would read a piece of each, skip the
//! rest, and come back for it: a pattern that the core foresees badly. A strip is what one tile reads, from front to back.

use crate::simd::LANES;
use crate::tensor::any::{AnyRows, Typed};
use crate::tensor::element::{Bf16, F16, Load};
use crate::tensor::rows::KEY_BLOCK;
use crate::tensor::rows::Rows;
use core::ops::Range;

/// Columns of a strip, at most: those of the widest register tile. Part of how a cache's memory lies, so it is the same for
/// every instruction set.
pub(crate) const STRIP: usize = 4 * LANES;

/// Columns that are cut into strips of about equal width: 80 make 48 + 32. As many as are packed at once.
pub(crate) const WINDOW: usize = 256;

/// The columns of the strip that holds `column`, of rows of `width`, which is whole vectors.
pub(crate) fn strip(column: usize, width: usize) -> Range<usize> {
    let mut first = column / WINDOW * WINDOW;
    let end = width.min(first + WINDOW);
    loop {
        let vecs = (end - first) / LANES;
        let next = first + vecs.div_ceil(vecs.div_ceil(STRIP / LANES)) * LANES;
        if column < next {
            return first..next;
        }
        first = next;
    }
}

/// The columns of each strip.
pub(crate) fn strips(width: usize) -> impl Iterator<Item = Range<usize>> {
    core::iter::successors((width > 0).then(|| strip(0, width)), move |last| {
        (last.end < width).then(|| strip(last.end, width))
    })
}

/// Where element `column` of row `j` lies among the strips.
pub(crate) fn at(j: usize, column: usize, width: usize) -> usize {
    let strip = strip(column, width);
    strip.start * KEY_BLOCK + j * strip.len() + column - strip.start
}

/// A block's strips.
#[derive(Clone, Copy)]
pub(crate) struct Strips<T> {
    pub(crate) first: *const T,
    /// Columns altogether: whole vectors.
    pub(crate) width: usize,
}

impl<T> Strips<T> {
    /// As bytes, and the bytes of an element.
    pub(crate) fn bytes(self) -> (Strips<u8>, usize) {
        (Strips { first: self.first.cast(), width: self.width }, size_of::<T>())
    }
}

impl<T: Load> Strips<T> {
    /// Rows from a column on, to the end of its strip.
    ///
    /// # Safety
    /// There is such a column, of 256 rows.
    pub(crate) unsafe fn from(self, column: usize) -> Rows<T> {
        // SAFETY: the caller's promise.
        let first = unsafe { self.first.add(at(0, column, self.width)) };
        Rows::strided(first, strip(column, self.width).len() as isize, 1)
    }
}

/// Strips of values, of elements of any type.
pub(crate) type AnyStrips = Typed<Strips<f32>, Strips<Bf16>, Strips<F16>>;

impl AnyStrips {
    /// Rows from a column on, to the end of its strip.
    ///
    /// # Safety
    /// There is such a column, of 256 rows.
    pub(crate) unsafe fn from(self, column: usize) -> AnyRows {
        // SAFETY: the caller's promise.
        by_type!(Typed => Typed, self, |strips| unsafe { strips.from(column) })
    }

    /// As bytes, and the bytes of an element.
    pub(crate) fn bytes(self) -> (Strips<u8>, usize) {
        by_type!(Typed, self, |strips| strips.bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_element_has_its_own_place() {
        for width in (LANES..=3 * WINDOW + STRIP).step_by(LANES) {
            let mut seen = vec![false; KEY_BLOCK * width];
            for j in [0, 1, KEY_BLOCK - 1] {
                for column in 0..width {
                    let strip = strip(column, width);
                    assert!(strip.contains(&column) && strip.len() <= STRIP && strip.len().is_multiple_of(LANES));
                    assert!(strip.start / WINDOW == (strip.end - 1) / WINDOW);
                    assert!(!core::mem::replace(&mut seen[at(j, column, width)], true));
                }
            }
        }
    }
}
