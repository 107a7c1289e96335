//! Register tile shapes as constants.
//!
//! Compile time grows with the square of the number of shapes in one function. So a step is compiled once for each number
//! of vectors, as a separate function (`by_tile_vecs!` around [`Simd::vectorize`](crate::simd::Simd::vectorize)), which
//! computes all tiles that are so wide, one after the other, and holds one shape for each number of rows
//! (`by_tile_rows!`). Loops over its rows and vectors count: they are unrolled in every shape, and iterators take longer.

use crate::simd::Simd;

/// Number of rows of a full register tile of the instruction set where it has fewest.
pub(crate) const MIN_TILE_ROWS: usize = 2;

/// Number of rows of the largest register tile of any instruction set.
pub(crate) const MAX_TILE_ROWS: usize = 6;

/// Number of vectors of the widest register tile of any instruction set.
pub(crate) const MAX_TILE_VECS: usize = 4;

/// Returns how many of `left` rows or vectors the next tile takes, if it takes at most `most`: they are cut into as few parts
/// as that allows, and these are as equal as can be, 5 with at most 4 into 3 and 2.
#[inline(always)]
pub(crate) const fn next_part(left: usize, most: usize) -> usize {
    // First what takes no division.
    if left <= most {
        left
    } else if left.is_multiple_of(most) {
        most
    } else {
        left.div_ceil(left.div_ceil(most))
    }
}

/// Returns how many of `left` rows the next tile takes, if registers hold at most `most`: the rows of a tile of the row block,
/// or, if that is too many, [a part](next_part) of what is left.
#[inline(always)]
pub(crate) const fn next_rows<S: Simd>(left: usize, most: usize) -> usize {
    if most < S::TILE_ROWS {
        next_part(left, most)
    } else if left < S::TILE_ROWS {
        left
    } else {
        S::TILE_ROWS
    }
}

/// Evaluates a call with a tile's number of vectors as a constant, at most `most`, so that no wider tile is compiled than
/// the backend's registers hold.
macro_rules! by_tile_vecs {
    ($vecs:expr, most $most:expr, |$NV:ident| $call:expr) => {
        by_number!($vecs, 1, $most, $NV, $call, "vectors", 1 2 3 4)
    };
}

/// Evaluates a call with a tile's number of rows as a constant, at most `most`, and at least `from` where that is given:
/// tiles of half vectors have twice the rows of the largest tile, never fewer. Every called function is inlined: so each
/// tile function has one call in one place.
macro_rules! by_tile_rows {
    ($rows:expr, most $most:expr, |$MR:ident| $call:expr) => {
        by_number!($rows, 1, $most, $MR, $call, "rows", 1 2 3 4 5 6)
    };
    ($rows:expr, from $least:expr, most $most:expr, |$MR:ident| $call:expr) => {
        by_number!($rows, $least, $most, $MR, $call, "rows", 1 2 3 4 5 6 12)
    };
}

/// Evaluates a call with one of some numbers, from `least` to `most`, as a constant.
macro_rules! by_number {
    ($number:expr, $least:expr, $most:expr, $N:ident, $call:expr, $what:literal, $($n:literal)*) => {
        match $number {
            // A constant condition, not a guard: the call is then not compiled at all where it is false.
            $($n => if const { $least <= $n && $n <= $most } {
                const $N: usize = $n;
                $call
            } else {
                no_tile!($n, $what)
            },)*
            number => no_tile!(number, $what),
        }
    };
}

/// Panics because a tile has a shape that never occurs.
macro_rules! no_tile {
    ($number:expr, $what:literal) => {
        unreachable!("a tile of {} {}", $number, $what)
    };
}
