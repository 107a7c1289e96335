//! Spans: the part of a key block that a tile of rows needs.

use crate::attention::call::row_mods::PanelClasses;
use crate::simd::LANES;
use crate::tensor::panels::{panel_bits, runs};
use crate::tensor::rows::KEY_BLOCK;
use core::ops::Range;

/// Keys of a block that a tile of rows needs: the smallest range `lo..hi` that holds every key visible to one of its
/// rows, with `lo` moved down to the start of a panel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Span {
    pub(crate) lo: u16,
    pub(crate) hi: u16,
    /// True if some key of `lo..hi` is hidden from some row of the tile.
    pub(crate) needs_mask: bool,
    /// A bit for each panel of the block with a key that a row of the tile may see. Those between that have none are not
    /// computed where rows are many; their scores are then 0.
    pub(crate) panels: u16,
}

impl Span {
    pub(crate) const EMPTY: Self = Self { lo: 0, hi: 0, needs_mask: false, panels: 0 };

    /// Creates the span of keys `lo..hi`, counted from the start of the block.
    #[inline]
    pub(crate) fn new(lo: usize, hi: usize, needs_mask: bool) -> Self {
        assert!(hi <= KEY_BLOCK);
        if lo >= hi {
            return Self::EMPTY;
        }
        let down = lo / LANES * LANES;
        let panels = panel_bits(lo / LANES..hi.div_ceil(LANES));
        Self { lo: down as u16, hi: hi as u16, needs_mask: needs_mask || down != lo, panels }
    }

    #[inline]
    pub(crate) fn is_empty(self) -> bool {
        self.lo >= self.hi
    }

    /// Returns the range of keys.
    #[inline]
    pub(crate) fn keys(self) -> Range<usize> {
        self.lo as usize..self.hi as usize
    }

    /// Returns the keys of the panels that have one that a row may see, in runs, in order.
    #[inline(always)]
    pub(crate) fn runs(self) -> impl Iterator<Item = Range<usize>> {
        runs(self.panels).map(move |run| run.start * LANES..(run.end * LANES).min(self.hi as usize))
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

/// Keys of a block that are visible to one row: the smallest range that holds them, whether all of it is visible, and the
/// panels that have one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RowKeys {
    pub(crate) from: usize,
    pub(crate) to: usize,
    pub(crate) all: bool,
    /// A bit for each panel.
    pub(crate) panels: u16,
}

impl RowKeys {
    pub(crate) const EMPTY: Self = Self { from: 0, to: 0, all: true, panels: 0 };

    /// Returns a range of which all is visible, or not.
    #[inline(always)]
    pub(crate) fn new(from: usize, to: usize, all: bool) -> Self {
        Self { from, to, all, panels: if from < to { panel_bits(from / LANES..to.div_ceil(LANES)) } else { 0 } }
    }

    pub(crate) fn is_empty(self) -> bool {
        self.from >= self.to
    }

    /// Returns the range without the panels that a mask function hides.
    pub(crate) fn narrowed(self, classes: PanelClasses) -> Self {
        let panels = self.panels & !classes.hidden;
        if panels == 0 {
            return Self::EMPTY;
        }
        let [first, past] = [panels.trailing_zeros(), u16::BITS - panels.leading_zeros()].map(|n| n as usize * LANES);
        let all = self.all && self.panels & (classes.hidden | classes.mixed) == 0;
        Self { from: self.from.max(first), to: self.to.min(past), all, panels }
    }
}
