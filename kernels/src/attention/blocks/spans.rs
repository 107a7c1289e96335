//! Spans: the keys of a block that each tile of a row block needs.

use crate::attention::call::tiling::MAX_ROW_BLOCK;
use crate::attention::steps::span::Span;
use core::ops::Deref;

/// Spans of a row block, one for each tile of rows. A backend's tile has at least one row.
pub(crate) struct Spans {
    tiles: [Span; MAX_ROW_BLOCK],
    len: usize,
}

impl Spans {
    /// No spans. A constant to copy: constructing it was 3 % of a tiny call.
    pub(crate) const NONE: Self = Self { tiles: [Span::EMPTY; MAX_ROW_BLOCK], len: 0 };

    /// Returns the spans of `tiles` tiles, to be set.
    #[inline]
    pub(crate) fn of_tiles(&mut self, tiles: usize) -> &mut [Span] {
        self.len = tiles;
        &mut self.tiles[..tiles]
    }
}

impl Deref for Spans {
    type Target = [Span];
    #[inline]
    fn deref(&self) -> &[Span] {
        &self.tiles[..self.len]
    }
}
