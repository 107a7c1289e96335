//! P·V: the weighted sum of a block's values, accumulated into the rows' running output.
//!
//! An output column is one chain of FMAs over the block's keys, or pairs of keys, in order; the block's sum is then
//! merged into the running output with two factors, `o ← o·rescale_prev + sum·rescale_block`, once per block. Keys
//! hidden from a row have weight exactly 0 and add exactly nothing, so it does not matter how many of them a tile
//! covers.
//!
//! Rows that end with the block are not accumulated but normalised and written by the tile that has their sums.
//!
//! Few rows read wide values a run of keys at a time. Between runs their sums are stored in the running outputs, which
//! hold nothing else yet.

use crate::attention::products::pv_tile::{RunningRows, Terms, prefetch_distance, row_floats, tile};
use crate::attention::scratch::SCORE_STRIDE;
use crate::attention::steps::epilogue::ColumnEnds;
use crate::attention::steps::span::{Span, for_each_register_tile};
use crate::matmul::operands::{MulAdd, Operand};
use crate::matmul::prefetch::{MEMORY_BOUND_ROWS, PrefetchQueue, tile_prefetches};
use crate::matmul::tile_rows::TileRows;
use crate::matmul::tile_shape::next_part;
use crate::matmul::value_terms::ValueTerms;
use crate::simd::{LANES, Simd};
use crate::tensor::rows::{KEY_BLOCK, Rows};
use core::hint::black_box;
use core::ops::Range;

/// Values of a key block, and the sums that they are added to.
pub(crate) struct Values<'a, 'b, R> {
    /// Values from key 0 of the block and the first column of the run on, with contiguous columns.
    pub(crate) values: R,
    pub(crate) sums: &'b mut ValueSums<'a>,
}

/// Operands of P·V but the values: a row block's weights for one key block, and the running outputs.
pub(crate) struct ValueSums<'a> {
    /// Weights, zero where hidden, [`row_floats`] a row.
    pub(crate) weights: &'a [f32],
    /// Number of columns of the run.
    pub(crate) cols: usize,
    /// Keys that each tile of rows needs.
    pub(crate) spans: &'a [Span],
    pub(crate) rows: usize,
    /// Factor of each row's running output.
    pub(crate) rescale_prev: &'a [f32],
    /// Factor of each row's sum over this block.
    pub(crate) rescale_block: &'a [f32],
    /// True if nothing was accumulated before and every tile of rows has a nonempty span: the running outputs are not
    /// read.
    pub(crate) fresh: bool,
    /// Running outputs from the run's first column on, rows `out_stride` apart.
    pub(crate) out: &'a mut [f32],
    pub(crate) out_stride: usize,
    /// Factors and addresses of the rows, if all of them end with this block: they are written there instead of to the
    /// running outputs.
    pub(crate) ends: Option<ColumnEnds<'a>>,
    /// Signs that weights may have.
    pub(crate) signs: WeightSigns,
    /// Memory to prefetch meanwhile.
    pub(crate) prefetch: &'a mut PrefetchQueue,
}

/// Signs that weights may have. Bytes have none.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum WeightSigns {
    /// None is below 0.
    NonNegative,
    /// Any: they come from a weight function.
    Any,
}

/// Number of keys in a run: few rows read all its columns before the next run, if a tile does not cover all
/// columns: otherwise half of each row would be read first and the other half later, which is slower.
const RUN: usize = 4 * LANES;
const _: () = assert!(KEY_BLOCK.is_multiple_of(RUN) && RUN.is_multiple_of(LANES));

/// Order in which tiles read values, and the distance at which few rows prefetch them.
#[derive(Clone, Copy)]
struct Reading {
    /// Number of keys of a run.
    run: usize,
    /// [Distance](prefetch_distance) in terms, if all columns are here; whole runs.
    far: usize,
    /// True if the tiles of a run prefetch, together, all of a later one in the order of memory.
    in_order: bool,
}

impl Reading {
    #[inline(always)]
    fn new<S: Simd, T: Operand<S>>(s: S, a: &ValueSums<'_>, values: Rows<T>) -> Self {
        let in_runs = const { T::By::RESUMES && S::TILE_VECS > 1 }
            && a.rows <= MEMORY_BOUND_ROWS
            && a.vecs() > S::TILE_VECS
            && a.fresh;
        let row_bytes = a.vecs().max(1) * LANES * T::ROWS * T::COLUMN_BYTES;
        let far = prefetch_distance(s, values, a.rows, row_bytes);
        // The distance between rows may be any number if there is one.
        let dense = values.step().checked_mul(size_of::<T>() as isize) == Some(row_bytes as isize);
        Self {
            run: if in_runs { RUN } else { KEY_BLOCK },
            far: if in_runs { far.next_multiple_of(RUN / T::By::PRODUCTS) } else { far },
            in_order: in_runs && T::ROWS == 1 && dense,
        }
    }
}

impl<'a> ValueSums<'a> {
    /// Number of whole vectors that hold the columns.
    #[inline(always)]
    pub(crate) fn vecs(&self) -> usize {
        self.cols.div_ceil(LANES)
    }

    /// Panics unless spans (`tile_rows` a tile), weights (`row_floats` a row), factors and outputs cover all rows and columns.
    #[inline(always)]
    pub(crate) fn check<S: Simd>(&self, tile_rows: usize, row_floats: usize) {
        assert!(self.spans.len() == self.rows.div_ceil(tile_rows));
        assert!(self.weights.len() >= self.rows * row_floats);
        assert!(self.rescale_prev.len() >= self.rows && self.rescale_block.len() >= self.rows);
        assert!(self.ends.is_none_or(|ends| {
            S::ENDS_ROWS && ends.factors.len().min(ends.rows.len()) >= self.rows && ends.columns() == self.cols
        }));
        assert!(self.rows == 0 || self.out.len() >= (self.rows - 1) * self.out_stride + self.vecs() * LANES);
        debug_assert!(!self.fresh || !self.spans.iter().any(|span| span.is_empty()));
    }

    /// Returns the operands of a tile of `tile_rows` rows, or what is left; none of its rows ends.
    pub(crate) fn of_tile(&mut self, tile: usize, tile_rows: usize) -> ValueSums<'_> {
        let rows = tile * tile_rows..self.rows.min((tile + 1) * tile_rows);
        ValueSums {
            weights: &self.weights[rows.start * SCORE_STRIDE..],
            spans: &self.spans[tile..=tile],
            rows: rows.len(),
            rescale_prev: &self.rescale_prev[rows.start..],
            rescale_block: &self.rescale_block[rows.start..],
            out: &mut self.out[rows.start * self.out_stride..],
            ends: None,
            prefetch: &mut *self.prefetch,
            ..*self
        }
    }

    /// Returns the running outputs of the rows from `row` on, from the vector `vec` on.
    ///
    /// # Safety
    /// The operands were [checked](Self::check), and have the row and the vector.
    #[inline(always)]
    pub(crate) unsafe fn running(&mut self, row: usize, vec: usize) -> RunningRows<'a> {
        // SAFETY: factors, outputs and ends hold the row, as was checked.
        unsafe {
            RunningRows {
                rescale_prev: self.rescale_prev.as_ptr().add(row),
                rescale_block: self.rescale_block.as_ptr().add(row),
                rows: TileRows {
                    out: self.out.as_mut_ptr().add(row * self.out_stride + vec * LANES),
                    stride: self.out_stride,
                },
                fresh: self.fresh,
                ends: self.ends.map(|ends| ends.from(row, vec * LANES)),
            }
        }
    }
}

/// Values of a tile's vectors of columns, and a run of keys.
struct Strip<T> {
    values: Rows<T>,
    first_vec: usize,
    keys: Range<usize>,
    reading: Reading,
}

/// Accumulates P·V of a row block, one register tile after the other.
///
/// # Safety
/// For every key of every span, the contiguous elements that hold `cols` columns of its row of values are readable, and those up to
/// the next multiple of 16. If rows end, each row's pointer is writable for its columns, which no other worker writes.
#[inline(always)]
pub(crate) unsafe fn values<S: Simd, T: Operand<S>>(s: S, a: &mut ValueSums<'_>, values: Rows<T>) {
    assert!(T::ENDS || a.ends.is_none());
    a.check::<S>(S::TILE_ROWS, row_floats::<S, T>());
    let reading = Reading::new(s, a, values);
    for first in (0..KEY_BLOCK).step_by(reading.run) {
        // Columns outside, rows inside: all the rows read a tile of values before the next columns are touched.
        let mut first_vec = 0;
        while first_vec < a.vecs() {
            let vecs = next_part(a.vecs() - first_vec, T::By::TILE_VECS);
            // SAFETY: the vectors are some of the values'.
            let values = unsafe { values.columns_from(first_vec * LANES) };
            let strip = Strip { values, first_vec, keys: first..first + reading.run, reading };
            by_tile_vecs!(vecs, most T::By::TILE_VECS, |NV| s.vectorize(
                #[inline(always)]
                // SAFETY: checked; `NV = vecs` vectors from `first_vec` on are some of those of `a`; the caller guarantees values
                // and rows that end.
                || unsafe { accumulate_strip::<S, T, NV>(s, a, strip) }
            ));
            first_vec += vecs;
        }
    }
}

/// Accumulates P·V for `NV` vectors of columns and a run of keys.
///
/// # Safety
/// Same contract as [`values`]; `a` was [checked](ValueSums::check), and the vectors are some of these.
#[inline(always)]
unsafe fn accumulate_strip<S: Simd, T: Operand<S>, const NV: usize>(s: S, a: &mut ValueSums<'_>, strip: Strip<T>) {
    for_each_register_tile::<S>(
        a.spans,
        a.rows,
        T::TILE_ROWS,
        #[inline(always)]
        |rows, span| {
            let values = ValueTerms::new(s, strip.values, &span.keys(), &strip.keys);
            if !values.terms.is_empty() {
                // SAFETY: these rows are at most a register tile's; the caller guarantees the rest.
                unsafe { accumulate_tile::<S, T, NV>(a, rows, values, &strip) }
            }
        },
    );
}

/// Accumulates a part of P·V for a tile of rows and `NV` vectors of columns.
///
/// # Safety
/// Same contract as [`accumulate_strip`]; the rows are at most those of a register tile.
#[inline(always)]
unsafe fn accumulate_tile<S: Simd, T: Operand<S>, const NV: usize>(
    a: &mut ValueSums<'_>,
    rows: Range<usize>,
    values: ValueTerms<S, T>,
    strip: &Strip<T>,
) {
    // Opaque, as in `ScoreRun::for_each_tile`.
    let (s, row, rows) = (values.s, black_box(rows.start), rows.len());
    let Strip { first_vec, reading, .. } = *strip;
    // SAFETY: `row + rows ≤ a.rows`, the vectors are some of those of `a`, and spans end inside a block, so what was checked
    // puts weights, factors and outputs inside their slices; the caller guarantees that the values are readable.
    unsafe {
        let running = a.running(row, first_vec);
        let weights = a.weights.as_ptr().add(row * row_floats::<S, T>());
        let far = tile_prefetches::<S>(row, rows, a.rows).then_some(reading.far);
        let next = far.filter(|_| reading.in_order).and_then(|far| values.next_in_order(far, first_vec));
        let terms = Terms { values, weights, far, next };
        by_tile_rows!(rows, most T::TILE_ROWS, |MR| tile::<S, T, MR, NV>(s, terms, running));
    }
    a.prefetch.fetch(s);
}
