//! Spans: the part of a key block that a tile of rows needs.

use crate::attention::call::row_mods::PanelClasses;
use crate::attention::scratch::MAX_ROW_BLOCK;
use crate::matmul::tile_shape::{MAX_TILE_ROWS, MIN_TILE_ROWS, next_rows};
use crate::simd::{LANES, Simd};
use crate::tensor::panels::{panel_bits, runs};
use crate::tensor::rows::KEY_BLOCK;
use core::ops::{Deref, Range};

/// Number of panels that a tile computes for a row in the time of one that the row computes alone.
const APART: u32 = 2;

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
    /// Panels of each row, where rows see so few of the tile's that many rows compute one row at a time.
    pub(crate) apart: Option<[u16; MAX_TILE_ROWS]>,
}

impl Span {
    pub(crate) const EMPTY: Self = Self { lo: 0, hi: 0, needs_mask: false, panels: 0, apart: None };

    /// Creates the span of keys `lo..hi`, counted from the start of the block.
    #[inline]
    pub(crate) fn new(lo: usize, hi: usize, needs_mask: bool) -> Self {
        assert!(hi <= KEY_BLOCK);
        if lo >= hi {
            return Self::EMPTY;
        }
        let down = lo / LANES * LANES;
        let panels = panel_bits(lo / LANES..hi.div_ceil(LANES));
        Self { lo: down as u16, hi: hi as u16, needs_mask: needs_mask || down != lo, panels, apart: None }
    }

    /// Returns the span of a tile of rows that see these keys.
    pub(crate) fn of_rows(rows: &[RowKeys]) -> Self {
        let (lo, hi) = union(rows);
        let alike = rows.iter().all(|row| row.all && (row.from, row.to) == (lo, hi));
        let panels = rows.iter().fold(0, |panels, row| panels | row.panels);
        Self { panels, ..Self::new(lo, hi, !alike) }
    }

    /// Takes the tile's rows apart, which see these keys, if each computed alone takes less time.
    pub(crate) fn apart_if_faster(self, rows: &[RowKeys]) -> Self {
        let (mut apart, mut number) = ([0; MAX_TILE_ROWS], 0);
        for (of_row, row) in apart.iter_mut().zip(rows) {
            (*of_row, number) = (row.panels, number + row.panels.count_ones());
        }
        let of_tile = self.panels.count_ones() * rows.len() as u32;
        Self { apart: (APART * number < of_tile).then_some(apart), ..self }
    }

    /// Returns the span with the panels of one of its rows, or with all if rows are not apart.
    #[inline(always)]
    pub(crate) fn of_row(self, row: usize) -> Self {
        Self { panels: self.apart.map_or(self.panels, |rows| rows[row]), apart: None, ..self }
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

/// Largest number of rows that one span describes.
pub(crate) const MAX_SPAN_ROWS: usize = 16;
const _: () = assert!(MAX_SPAN_ROWS >= MAX_TILE_ROWS);

/// Number of tiles of the largest row block.
const MAX_TILES: usize = MAX_ROW_BLOCK.div_ceil(MIN_TILE_ROWS);

/// Spans of a row block, one for each tile of `tile_rows` rows; the last may have fewer.
pub(crate) struct Spans {
    tiles: [Span; MAX_TILES],
    len: usize,
    tile_rows: usize,
    /// [`UNIT`] divided by the rows of a tile, rounded up: a row's tile is found without a division.
    inverse: usize,
}

/// Unit of the inverse of a number of rows. The inverse gives the tile of each row of a row block, as it is off by less than one.
const UNIT: usize = 1 << 16;
const _: () = assert!((MAX_ROW_BLOCK + MAX_SPAN_ROWS) * MAX_SPAN_ROWS < UNIT);

impl Spans {
    /// No spans. A constant to copy: constructing it was 3 % of a tiny call.
    pub(crate) const NONE: Self = Self { tiles: [Span::EMPTY; MAX_TILES], len: 0, tile_rows: 1, inverse: UNIT };

    /// Makes spans of tiles of `tile_rows` rows.
    pub(crate) fn of(spans: &[Span], tile_rows: usize) -> Self {
        let mut all = Self::NONE;
        all.of_rows(spans.len() * tile_rows, tile_rows).copy_from_slice(spans);
        all
    }

    /// Makes room for the spans of `rows` rows, and returns it.
    #[inline]
    pub(crate) fn of_rows(&mut self, rows: usize, tile_rows: usize) -> &mut [Span] {
        if tile_rows != self.tile_rows {
            (self.tile_rows, self.inverse) = (tile_rows, UNIT.div_ceil(tile_rows));
        }
        self.len = self.tile_of(rows + tile_rows - 1);
        &mut self.tiles[..self.len]
    }

    /// Returns the number of rows of a tile.
    #[inline(always)]
    pub(crate) fn tile_rows(&self) -> usize {
        self.tile_rows
    }

    /// Returns the span of a row.
    #[inline]
    pub(crate) fn of_row(&self, row: usize) -> Span {
        self[self.tile_of(row)]
    }

    /// Returns the tile of a row.
    #[inline(always)]
    fn tile_of(&self, row: usize) -> usize {
        row * self.inverse / UNIT
    }

    /// Sets the span of a tile.
    #[inline]
    pub(crate) fn set(&mut self, tile: usize, span: Span) {
        self.tiles[tile] = span;
    }

    /// Returns true if they are those of a row block of `rows` rows.
    #[inline]
    pub(crate) fn are_of(&self, rows: usize) -> bool {
        self.len == self.tile_of(rows + self.tile_rows - 1)
    }
}

impl Deref for Spans {
    type Target = [Span];
    #[inline]
    fn deref(&self) -> &[Span] {
        &self.tiles[..self.len]
    }
}

/// Calls `tile(rows, span)` for each register tile of at most `most` rows that needs keys. Tiles of the row block that need the same
/// are cut together, where registers hold fewer rows than these have.
#[inline(always)]
pub(crate) fn for_each_register_tile<S: Simd>(
    spans: &[Span],
    rows: usize,
    most: usize,
    mut tile: impl FnMut(Range<usize>, Span),
) {
    let mut row = 0;
    for alike in spans.chunk_by(|a, b| a.keys() == b.keys()) {
        let end = rows.min(row + alike.len() * S::TILE_ROWS);
        while row < end {
            let past = row + next_rows::<S>(end - row, most);
            if !alike[0].is_empty() {
                tile(row..past, alike[0]);
            }
            row = past;
        }
    }
}

/// Returns the smallest range that holds the keys of all rows; one that ends before it starts if there are none.
pub(crate) fn union(rows: &[RowKeys]) -> (usize, usize) {
    let visible = rows.iter().filter(|row| !row.is_empty());
    visible.fold((KEY_BLOCK, 0), |(lo, hi), row| (lo.min(row.from), hi.max(row.to)))
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

    /// Returns a range that is all visible, or not.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_in_their_tiles() {
        for tile_rows in 1..=MAX_SPAN_ROWS {
            for rows in (0..=MAX_ROW_BLOCK).filter(|rows| rows.div_ceil(tile_rows) <= MAX_TILES) {
                let mut spans = Spans::NONE;
                assert_eq!(
                    spans.of_rows(rows, tile_rows).len(),
                    rows.div_ceil(tile_rows),
                    "{rows} rows by {tile_rows}"
                );
                assert!(spans.are_of(rows) && (0..rows).all(|row| spans.tile_of(row) == row / tile_rows));
            }
        }
    }
}
