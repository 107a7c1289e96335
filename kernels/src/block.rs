//! The unit of streaming: a block of keys, and the part of it that a tile of rows needs.

use crate::simd::{LANES, Simd};

/// Keys in a block. Blocks start at key multiples of this, always: it is part of what a result's bits mean, so it is
/// one constant for every machine. 256 keys make the fold (`value_dim` multiplications and FMAs a row) less than 1 %
/// of the block's work, and 48 rows of scores fit the second-level cache many times over; 128 measured 2–3 % slower.
pub const KEY_BLOCK: usize = 256;

/// Rows of a group up to which time is that of reading keys and values, which tiles then do from front to back.
pub(crate) const READING_ROWS: usize = 16;

/// Keys that a task of so few rows packs before it meets them: 16 KiB of floats at head_dim 128, in the first-level cache.
/// A whole block would go out to the second and come back: 5 to 10 % of the time.
pub(crate) const READING_KEYS: usize = 2 * LANES;

/// Whether a tile of such a group asks ahead for all of its rows: the first, where full tiles can afford to; where they
/// have one vector, the last, which may be a small one.
#[inline(always)]
pub(crate) fn asks_ahead<S: Simd>(row: usize, rows: usize, all: usize) -> bool {
    all <= READING_ROWS && if S::DOT_VECS > 1 { row == 0 } else { row + rows == all }
}

/// Floats from one row of scores to the next. A vector more than the block, so that the rows of a tile, read side by
/// side, do not all fall into the same few sets of the first-level cache.
pub(crate) const SCORE_STRIDE: usize = KEY_BLOCK + LANES;

/// The keys of a block that a tile of rows needs: the hull of what its rows see. `lo..hi`, `lo` at the start of a
/// panel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Span {
    pub(crate) lo: u16,
    pub(crate) hi: u16,
    /// Some row of the tile does not see all of `lo..hi`.
    pub(crate) partial: bool,
}

impl Span {
    pub(crate) const EMPTY: Self = Self { lo: 0, hi: 0, partial: false };

    /// The hull of `lo..hi`, counted from the start of the block.
    #[inline]
    pub(crate) fn new(lo: usize, hi: usize, partial: bool) -> Self {
        assert!(hi <= KEY_BLOCK);
        if lo >= hi {
            return Self::EMPTY;
        }
        let down = lo / LANES * LANES;
        Self { lo: down as u16, hi: hi as u16, partial: partial || down != lo }
    }

    #[inline]
    pub(crate) fn is_empty(self) -> bool {
        self.lo >= self.hi
    }

    /// The keys, in order.
    #[inline]
    pub(crate) fn keys(self) -> core::ops::Range<usize> {
        self.lo as usize..self.hi as usize
    }

    #[inline]
    pub(crate) fn first_panel(self) -> usize {
        self.lo as usize / LANES
    }

    /// One past the last panel.
    #[inline]
    pub(crate) fn end_panel(self) -> usize {
        (self.hi as usize).div_ceil(LANES)
    }
}

/// The keys of a block that one row sees: the smallest range that holds them, and whether it sees all of that.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Hull {
    pub(crate) from: usize,
    pub(crate) to: usize,
    pub(crate) all: bool,
}

impl Hull {
    pub(crate) const EMPTY: Self = Self { from: 0, to: 0, all: true };

    pub(crate) fn is_empty(self) -> bool {
        self.from >= self.to
    }
}

/// Rows of the largest register tile of any instruction set.
pub(crate) const MAX_TILE_ROWS: usize = 6;

/// Calls a tile function with its shape as constants: up to 6 rows, up to 4 vectors, bounded by what the backend's
/// registers hold (`most` rows and vectors, if not the usual numbers) so that no larger tile is compiled for it. The one place
/// where shapes become const generics. Everything that is called is inlined, and compiling it takes longer than in proportion
/// to how much that is: one call in one place, and of no shape that never comes.
macro_rules! by_tile_shape {
    ($S:ty, $rows:expr, $vecs:expr, |$MR:ident, $NV:ident| $call:expr) => {
        by_tile_shape!($rows, $vecs, most [<$S as Simd>::TILE_ROWS, <$S as Simd>::TILE_VECS], |$MR, $NV| $call)
    };
    ($rows:expr, $vecs:expr, most $most:expr, |$MR:ident, $NV:ident| $call:expr) => {
        by_tile_shape!(@rows $rows, $vecs, $most, $MR, $NV, $call, 1 2 3 4 5 6)
    };
    (@rows $rows:expr, $vecs:expr, $most:expr, $MR:ident, $NV:ident, $call:expr, $($mr:literal)*) => {
        match $rows {
            $($mr if $mr <= $most[0] => {
                const $MR: usize = $mr;
                by_tile_shape!(@vecs $vecs, $most, $NV, $call, 1 2 3 4)
            })*
            rows => unreachable!("a tile of {rows} rows"),
        }
    };
    (@vecs $vecs:expr, $most:expr, $NV:ident, $call:expr, $($nv:literal)*) => {
        match $vecs {
            $($nv if $nv <= $most[1] => {
                const $NV: usize = $nv;
                $call
            })*
            vecs => unreachable!("a tile of {vecs} vectors"),
        }
    };
}
