//! Spans: the part of a key block that a tile of rows needs.

use crate::simd::LANES;
use crate::tensor::rows::KEY_BLOCK;

/// Keys of a block that a tile of rows needs: the smallest range `lo..hi` that holds every key visible to one of its
/// rows, with `lo` moved down to the start of a panel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Span {
    pub(crate) lo: u16,
    pub(crate) hi: u16,
    /// True if some key of `lo..hi` is hidden from some row of the tile.
    pub(crate) needs_mask: bool,
}

impl Span {
    pub(crate) const EMPTY: Self = Self { lo: 0, hi: 0, needs_mask: false };

    /// Creates the span of keys `lo..hi`, counted from the start of the block.
    #[inline]
    pub(crate) fn new(lo: usize, hi: usize, needs_mask: bool) -> Self {
        assert!(hi <= KEY_BLOCK);
        if lo >= hi {
            return Self::EMPTY;
        }
        let down = lo / LANES * LANES;
        Self { lo: down as u16, hi: hi as u16, needs_mask: needs_mask || down != lo }
    }

    #[inline]
    pub(crate) fn is_empty(self) -> bool {
        self.lo >= self.hi
    }

    /// Returns the range of keys.
    #[inline]
    pub(crate) fn keys(self) -> core::ops::Range<usize> {
        self.lo as usize..self.hi as usize
    }

    #[inline]
    pub(crate) fn first_panel(self) -> usize {
        self.lo as usize / LANES
    }

    /// Returns one past the last panel.
    #[inline]
    pub(crate) fn end_panel(self) -> usize {
        (self.hi as usize).div_ceil(LANES)
    }
}

/// Keys of a block that are visible to one row: the smallest range that holds them, and whether all of it is visible.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RowKeys {
    pub(crate) from: usize,
    pub(crate) to: usize,
    pub(crate) all: bool,
}

impl RowKeys {
    pub(crate) const EMPTY: Self = Self { from: 0, to: 0, all: true };

    pub(crate) fn is_empty(self) -> bool {
        self.from >= self.to
    }
}
