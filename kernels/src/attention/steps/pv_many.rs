//! P·V of many rows: the weighted sums of a row block of more than [`READING_ROWS`] rows over f32 values, accumulated into the
//! rows' running outputs.
//!
//! ```text
//! for each vector of columns:
//!     for each tile of rows:
//!         sum = Σ weights[row][key] · values[key]     keys of the tile's span, in order
//!         out = out · rescale_prev + sum · rescale_block, or its rows are normalised and written
//! ```

use crate::attention::steps::pv::Values;
use crate::attention::steps::pv_tile::end_rows;
use crate::attention::tiling::SCORE_STRIDE;
use crate::matmul::float_tile::{Columns, add_products};
use crate::simd::{LANES, Simd, Vector};
use crate::tensor::rows::Rows;
use core::ops::Range;

/// Accumulates P·V of a row block, one vector of columns after the other.
///
/// # Safety
/// For every key of every span, the row of values is readable to the end of the vector that holds its last column. If rows
/// end, each row's pointer is writable for its columns, which no other worker writes.
#[inline(always)]
pub(crate) unsafe fn values<S: Simd>(s: S, a: &mut Values<'_, Rows<f32>>) {
    a.check_rows::<S>(SCORE_STRIDE);
    assert!(!a.values.are_scattered(), "many rows read values that are evenly spaced");
    let half = if (1..=S::Half::LANES).contains(&(a.cols % LANES)) { s.half() } else { None };
    if half.is_some() {
        a.clear_beside();
    }
    for vec in 0..a.vecs() {
        let mut tile = 0;
        while tile < a.spans.len() {
            let half = half.filter(|_| vec == a.cols / LANES && a.pairs::<S>(tile) > 0);
            let tiles = if half.is_some() { 2 } else { 1 };
            let rows = tile * S::TILE_ROWS..a.rows.min((tile + tiles) * S::TILE_ROWS);
            let keys = a.spans[tile].keys();
            tile += tiles;
            if keys.is_empty() {
                continue;
            }
            let first = rows.start;
            // SAFETY: the rows are some of those of `a`, the vector has columns; the caller guarantees the rest.
            unsafe {
                match half {
                    Some(half) => by_tile_rows!(rows.len(), from 2 * S::TILE_ROWS, most 2 * S::TILE_ROWS, |MR| {
                        accumulate::<S, _, MR>(half, a, first, vec, keys)
                    }),
                    None => by_tile_rows!(rows.len(), most S::TILE_ROWS, |MR| {
                        accumulate::<S, _, MR>(s, a, first, vec, keys)
                    }),
                }
            }
            a.prefetch.fetch(s);
        }
    }
}

/// Accumulates a vector of columns of `MR` rows from `row` on.
///
/// # Safety
/// The rows and the vector are some of those of `a`, which was checked; the keys are those of their span. For the rest, same
/// contract as [`values`].
#[inline(always)]
unsafe fn accumulate<S: Simd, W: Vector, const MR: usize>(
    w: W,
    a: &mut Values<'_, Rows<f32>>,
    row: usize,
    vec: usize,
    keys: Range<usize>,
) {
    // SAFETY: checked: weights, factors, outputs and ends hold every row; the caller guarantees values and ends.
    unsafe {
        let weights = a.weights.as_ptr().add(row * SCORE_STRIDE);
        let rows: [*const f32; MR] = core::array::from_fn(
            #[inline(always)]
            |r| weights.add(r * SCORE_STRIDE),
        );
        let columns = Columns { first: a.values.at(0).wrapping_add(vec * LANES), step: a.values.step() };
        let mut sums = [[w.splat(0.0); 1]; MR];
        add_products(w, &rows, columns, keys, &mut sums);
        let running = a.running(row, vec);
        running.merge(w, &mut sums);
        match running.ends {
            Some(ends) if S::ENDS_ROWS => end_rows(w, &mut sums, ends),
            _ => running.rows.store(
                w,
                &sums,
                #[inline(always)]
                |_, sum| sum,
            ),
        }
    }
}
