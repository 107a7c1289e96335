//! Spans: the keys of a block that each tile of a row block needs.

use crate::attention::scratch::MAX_ROW_BLOCK;
use crate::attention::steps::span::Span;
use crate::matmul::tile_shape::MIN_TILE_ROWS;
use core::ops::Deref;

/// Number of tiles of the largest row block.
const MAX_TILES: usize = MAX_ROW_BLOCK.div_ceil(MIN_TILE_ROWS);

/// Spans of a row block, one for each tile of rows.
pub(crate) struct Spans {
    tiles: [Span; MAX_TILES],
    len: usize,
}

impl Spans {
    /// No spans. A constant to copy: constructing it was 3 % of a tiny call.
    pub(crate) const NONE: Self = Self { tiles: [Span::EMPTY; MAX_TILES], len: 0 };

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
