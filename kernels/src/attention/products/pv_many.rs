//! P·V of many rows: the weighted sums of a row block of more than
//! [`MEMORY_BOUND_ROWS`](crate::matmul::prefetch::MEMORY_BOUND_ROWS) rows over f32 values, accumulated into the
//! rows' running outputs.
//!
//! ```text
//! for each NV vectors of columns:
//!     for each tile of rows:
//!         sum = Σ weights[row][key] · values[key]     keys of the panels that the tile needs, in order
//!         out = out · rescale_prev + sum · rescale_block, or its rows are normalised and written
//! ```
//!
//! Last columns that fill at most half a vector are computed as one, two tiles of rows at a time, since one has too few
//! sums to keep the machine busy: lane by lane the same operations, so the same bits.

use crate::attention::products::pv::ValueSums;
use crate::attention::products::pv_tile::end_rows;
use crate::attention::scratch::SCORE_STRIDE;
use crate::attention::steps::span::Span;
use crate::matmul::float_tile::add_products;
use crate::matmul::tile_shape::next_part;
use crate::simd::terms::{Columns, TermRows};
use crate::simd::{LANES, Simd, Vector};
use crate::tensor::rows::Rows;

/// Accumulates P·V of a row block, `S::TILE_VECS` vectors of columns after the other.
///
/// # Safety
/// For every key of every span, the row of values is readable to the end of the vector that holds its last column. If rows
/// end, each row's pointer is writable for its columns, which no other worker writes.
#[inline(always)]
pub(crate) unsafe fn values<S: Simd>(s: S, a: &mut ValueSums<'_>, values: Rows<f32>) {
    a.check::<S>(S::TILE_ROWS, SCORE_STRIDE);
    assert!(!values.are_scattered(), "many rows read values that are evenly spaced");
    let half = if (1..=S::Half::LANES).contains(&(a.cols % LANES)) { s.half() } else { None };
    if half.is_some() {
        a.clear_beside();
    }
    let mut vec = 0;
    while vec < a.vecs() {
        let vecs = next_part(a.vecs() - vec, S::TILE_VECS);
        by_tile_vecs!(vecs, most S::TILE_VECS, |NV| s.vectorize(
            #[inline(always)]
            // SAFETY: `NV` vectors from `vec` on have columns; the caller guarantees the rest.
            || unsafe { strip_values::<S, NV>(s, half.filter(|_| vec == a.cols / LANES), a, values, vec) }
        ));
        vec += vecs;
    }
}

impl ValueSums<'_> {
    /// Writes zeros beside the columns of outputs that hold nothing yet: the epilogue finds nothing there that is not finite.
    fn clear_beside(&mut self) {
        let beside = self.cols..self.vecs() * LANES;
        if self.fresh && self.ends.is_none() {
            for row in 0..self.rows {
                self.out[row * self.out_stride..][beside.clone()].fill(0.0);
            }
        }
    }

    /// Returns true if `tile` and the next one have all their rows, which are not apart, and need the same keys.
    #[inline(always)]
    fn is_pair<S: Simd>(&self, tile: usize) -> bool {
        let full = &self.spans[..self.rows / S::TILE_ROWS];
        let needs = |span: &Span| (span.keys(), span.panels, span.apart);
        matches!(full.get(tile..tile + 2), Some([a, b]) if a.apart.is_none() && needs(a) == needs(b))
    }
}

/// Accumulates `NV` vectors of columns, or half of the last, two tiles of rows at a time, if `half` is given.
///
/// # Safety
/// Same contract as [`values`]; its assertions hold; `a` has the vectors.
#[inline(always)]
unsafe fn strip_values<S: Simd, const NV: usize>(
    s: S,
    half: Option<S::Half>,
    a: &mut ValueSums<'_>,
    values: Rows<f32>,
    vec: usize,
) {
    let mut tile = 0;
    while tile < a.spans.len() {
        let half = half.filter(|_| a.is_pair::<S>(tile));
        let tiles = if half.is_some() { 2 } else { 1 };
        let rows = tile * S::TILE_ROWS..a.rows.min((tile + tiles) * S::TILE_ROWS);
        let span = a.spans[tile];
        tile += tiles;
        if span.is_empty() {
            continue;
        }
        let (together, mut first) = (if span.apart.is_some() { 1 } else { rows.len() }, rows.start);
        // Terms that all of the tile's rows have together.
        let terms = if span.apart.is_some() { 0 } else { span.panels.count_ones() as usize * LANES };
        let mut stream = a.prefetch.stream::<S, NV>(s, terms);
        let streams = !stream.is_empty();
        // Not by `step_by`, which divides.
        while first < rows.end {
            let span = span.of_row(first - rows.start);
            // SAFETY: the rows are some of those of `a`, the vectors have columns; the caller guarantees the rest.
            unsafe {
                match half {
                    Some(half) => by_tile_rows!(together, from 2 * S::TILE_ROWS, most 2 * S::TILE_ROWS, |MR| {
                        accumulate::<S, _, MR, 1>(half, a, values, [first, vec], span, || ())
                    }),
                    None => by_tile_rows!(together, most S::TILE_ROWS, |MR| {
                        accumulate::<S, _, MR, NV>(
                            s,
                            a,
                            values,
                            [first, vec],
                            span,
                            #[inline(always)]
                            || stream.fetch::<S, NV>(s),
                        )
                    }),
                }
            }
            first += together;
        }
        if !streams {
            a.prefetch.fetch(s);
        }
    }
}

/// Accumulates `NV` vectors of columns of `MR` rows, from a row and a vector on.
///
/// # Safety
/// The rows and the vectors are some of those of `a`, which was checked; the span is theirs. For the rest, same contract as
/// [`values`].
#[inline(always)]
unsafe fn accumulate<S: Simd, W: Vector, const MR: usize, const NV: usize>(
    w: W,
    a: &mut ValueSums<'_>,
    values: Rows<f32>,
    [row, vec]: [usize; 2],
    span: Span,
    mut beside: impl FnMut(),
) {
    // SAFETY: checked: weights, factors, outputs and ends hold every row; the caller guarantees values and ends.
    unsafe {
        let weights = a.weights.as_ptr().add(row * SCORE_STRIDE);
        let rows = TermRows::<MR>::strided(weights, SCORE_STRIDE, 1);
        let first = values.at(0).wrapping_add(vec * LANES);
        let columns = Columns { first, step: values.step(), apart: W::LANES };
        let mut sums = [[w.splat(0.0); NV]; MR];
        for keys in span.runs() {
            add_products(w, rows, columns, keys, &mut sums, &mut beside);
        }
        let running = a.running(row, vec);
        running.merge(w, &mut sums);
        match running.ends {
            Some(ends) if S::ENDS_ROWS => end_rows(w, &mut sums, ends),
            _ => running.rows.store(w, &sums),
        }
    }
}
