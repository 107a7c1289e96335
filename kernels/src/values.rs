//! AV: the weighted sum of a block's values, folded into the rows' running output.
//!
//! An output column is one chain of FMAs over the block's keys, in order; the block's sum then joins the running
//! output with two factors, `o ← o·keep + sum·join`, once per block. Keys hidden from a row have weight exactly 0 and
//! add exactly nothing, so it does not matter how many of them a tile runs over.

use crate::ahead::Ahead;
use crate::block::{READING_ROWS, SCORE_STRIDE, Span};
use crate::dots::FAR;
use crate::element::Load;
use crate::lines::LINE_BYTES;
use crate::pack::Rows;
use crate::simd::{LANES, Simd};
use crate::strips::STRIP;
use crate::tensor::AnyRows;

/// A group of rows, their weights for one block, and the running outputs.
pub(crate) struct Values<'a, R = AnyRows> {
    /// `[row][SCORE_STRIDE]`, zero where hidden.
    pub(crate) weights: &'a [f32],
    /// From key 0 of the block and the first column of the run on, contiguous.
    pub(crate) values: R,
    /// Vectors (16 columns each) of the run.
    pub(crate) vecs: usize,
    /// The keys each tile of rows needs.
    pub(crate) spans: &'a [Span],
    pub(crate) rows: usize,
    /// Per row: factor of the running output, and of this block's sum.
    pub(crate) keep: &'a [f32],
    pub(crate) join: &'a [f32],
    /// Running outputs from the run's first column on, rows `out_stride` apart.
    pub(crate) out: &'a mut [f32],
    pub(crate) out_stride: usize,
    /// What comes later.
    pub(crate) ahead: &'a mut Ahead,
}

impl<'a> Values<'a> {
    /// With rows of a type.
    pub(crate) fn of<T>(self, values: Rows<T>) -> Values<'a, Rows<T>> {
        let Values { weights, vecs, spans, rows, keep, join, out, out_stride, ahead, .. } = self;
        Values { weights, values, vecs, spans, rows, keep, join, out, out_stride, ahead }
    }
}

/// # Safety
/// For every key of every span, `16 · vecs` contiguous elements of its row of values are readable.
#[inline(always)]
pub(crate) unsafe fn values<S: Simd, T: Load>(s: S, a: Values<'_, Rows<T>>) {
    assert!(a.spans.len() == a.rows.div_ceil(S::TILE_ROWS));
    assert!(a.weights.len() >= a.rows * SCORE_STRIDE && a.keep.len() >= a.rows && a.join.len() >= a.rows);
    assert!(a.rows == 0 || a.out.len() >= (a.rows - 1) * a.out_stride + a.vecs * LANES);
    let fetch = Fetch::new(&a);
    // Columns outside: a tile of values is read by all the rows before the next columns are touched.
    let mut vec = 0;
    while vec < a.vecs {
        // Remainders are shared out evenly: 5 vectors as 3 + 2, not 4 + 1.
        let tiles_left = (a.vecs - vec).div_ceil(S::TILE_VECS);
        let vecs = (a.vecs - vec).div_ceil(tiles_left);
        for (index, span) in a.spans.iter().enumerate() {
            if span.is_empty() {
                continue;
            }
            let row = index * S::TILE_ROWS;
            let rows = S::TILE_ROWS.min(a.rows - row);
            // SAFETY: `row + rows ≤ a.rows`, `vec + vecs ≤ a.vecs`, and spans end inside a block, so the assertions
            // above put weights, factors and outputs inside their slices; the caller vouches for the values.
            unsafe {
                let fold = Fold {
                    keep: a.keep.as_ptr().add(row),
                    join: a.join.as_ptr().add(row),
                    out: a.out.as_mut_ptr().add(row * a.out_stride + vec * LANES),
                    out_stride: a.out_stride,
                };
                let w = a.weights.as_ptr().add(row * SCORE_STRIDE);
                let values = a.values.columns_from(vec * LANES);
                let fetch = if index == 0 { fetch } else { Fetch::Nothing };
                by_tile_shape!(S, rows, vecs, |MR, NV| tile::<S, T, MR, NV>(s, w, (values, fetch), *span, fold));
            }
            a.ahead.fetch(s);
        }
        vec += vecs;
    }
}

/// How a few rows ask for values to come.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Fetch {
    /// Not at all: wide rows of which a tile reads a part are better left to the core.
    Nothing,
    /// [`FAR`] ahead: short rows without gaps.
    Strip,
    /// [`SCATTERED`] keys ahead: the core does not foresee them.
    Scattered,
}

impl Fetch {
    fn new<T>(a: &Values<'_, Rows<T>>) -> Self {
        let cols = a.vecs * LANES;
        match a.values.stride() {
            _ if a.rows > READING_ROWS => Self::Nothing,
            Some(stride) if stride == cols as isize && cols <= STRIP => Self::Strip,
            Some(_) => Self::Nothing,
            None => Self::Scattered,
        }
    }
}

/// 16 KiB at 128 columns.
const SCATTERED: usize = 32;

/// Where a tile's sums go: the running outputs of its rows, and their factors.
#[derive(Clone, Copy)]
struct Fold {
    keep: *const f32,
    join: *const f32,
    out: *mut f32,
    out_stride: usize,
}

/// `MR` rows by `NV` vectors of columns.
///
/// # Safety
/// For `MR` rows: weights up to the span's end, two factors, and `16 · NV` outputs; values as for [`values`].
#[inline(always)]
unsafe fn tile<S: Simd, T: Load, const MR: usize, const NV: usize>(
    s: S,
    weights: *const f32,
    (values, fetch): (Rows<T>, Fetch),
    span: Span,
    fold: Fold,
) {
    let mut sum = [[s.splat(0.0); NV]; MR];
    for j in span.keys() {
        // SAFETY: the caller vouches for key `j`.
        let row = unsafe { values.at(j) };
        let later = match fetch {
            Fetch::Nothing => None,
            Fetch::Strip => Some(row.wrapping_byte_add(FAR)),
            // SAFETY: a key of the span.
            Fetch::Scattered => Some(unsafe { values.at((j + SCATTERED).min(span.keys().end - 1)) }),
        };
        if let Some(later) = later {
            for byte in (0..NV * LANES * size_of::<T>()).step_by(LINE_BYTES) {
                // Wrapping: a hint may point anywhere.
                s.prefetch_far(later.wrapping_byte_add(byte).cast());
            }
        }
        let mut value = [s.splat(0.0); NV];
        for (n, value) in value.iter_mut().enumerate() {
            // SAFETY: vector `n < NV` of the row.
            *value = unsafe { T::load(s, row.add(n * LANES)) };
        }
        for (r, sum) in sum.iter_mut().enumerate() {
            // SAFETY: row `r < MR`, key `j` inside the span.
            let weight = s.splat(unsafe { *weights.add(r * SCORE_STRIDE + j) });
            for (sum, &value) in sum.iter_mut().zip(&value) {
                *sum = s.fma(weight, value, *sum);
            }
        }
    }
    for (r, sum) in sum.iter().enumerate() {
        // SAFETY: row `r < MR` has two factors and `16 · NV` outputs.
        unsafe {
            let (keep, join) = (s.splat(*fold.keep.add(r)), s.splat(*fold.join.add(r)));
            for (n, &sum) in sum.iter().enumerate() {
                let out = fold.out.add(r * fold.out_stride + n * LANES);
                s.store(out, s.fma(sum, join, s.mul(s.load(out), keep)));
            }
        }
    }
}
