//! Sums over query rows for each key: Pᵀ·X, where P holds a weight for each row of a row block and each key of a block, and
//! X a vector for each row. The backward pass adds them to the gradients of keys and values.
//!
//! ```text
//! for each tile of 6 keys × 64 columns:          registers (AVX-512): 24 sums, 4 columns, 1 weight
//!     for each row: sum[key] += P[row][key] · X[row]      six neighbouring weights, broadcast: nothing is transposed
//!     keys' sums += sum
//! ```
//! A sum is one chain of FMAs over the row block's rows in order. A row that does not see a key has weight 0 and adds
//! nothing, so it does not matter how many such rows a tile covers.

use crate::attention::steps::span::Span;
use crate::attention::tiling::SCORE_STRIDE;
use crate::matmul::tile_rows::TileRows;
use crate::matmul::tile_shape::{MAX_TILE_ROWS, MAX_TILE_VECS};
use crate::simd::{LANES, Simd};
use core::ops::Range;

/// Operands of Pᵀ·X.
pub(crate) struct KeySums<'a> {
    /// Weights P, `[row][SCORE_STRIDE]`, 0 between the first and the last key of all spans where a row sees nothing.
    pub(crate) weights: &'a [f32],
    /// Keys that each tile of rows sees.
    pub(crate) spans: &'a [Span],
    /// Rows of X, each readable for `16 · vecs` floats.
    pub(crate) rows: &'a [*const f32],
    /// Number of vectors (16 columns each) of a row.
    pub(crate) vecs: usize,
    /// Sums, `[key][16 · vecs]`, which are added to.
    pub(crate) sums: &'a mut [f32],
}

/// Returns the range of keys that some tile of rows sees.
pub(crate) fn all_keys(spans: &[Span]) -> Range<usize> {
    let seen = spans.iter().filter(|span| !span.is_empty()).map(|span| span.keys());
    seen.reduce(|all, keys| all.start.min(keys.start)..all.end.max(keys.end)).unwrap_or(0..0)
}

/// Adds Pᵀ·X to the keys' sums.
///
/// # Safety
/// Every row is readable for `16 · vecs` floats.
#[inline(always)]
pub(crate) unsafe fn key_sums<S: Simd>(s: S, a: KeySums<'_>) {
    let (keys, stride) = (all_keys(a.spans), a.vecs * LANES);
    assert!(a.spans.len() == a.rows.len().div_ceil(S::TILE_ROWS) && a.weights.len() >= a.rows.len() * SCORE_STRIDE);
    assert!(a.sums.len() >= keys.end * stride && keys.end <= SCORE_STRIDE);
    let mut vec = 0;
    // Columns outside, keys inside: the rows' part of a tile stays in the first-level cache for all keys.
    while vec < a.vecs {
        // Whole tiles, then remainders of a few shapes: each shape is compiled for each instruction set.
        let vecs = if a.vecs - vec >= S::TILE_VECS { S::TILE_VECS } else { 1 };
        let mut key = keys.start;
        while key < keys.end {
            let left = keys.end - key;
            let here =
                [S::TILE_ROWS, REMAINDER.min(S::TILE_ROWS), 1].into_iter().find(|&here| here <= left).unwrap_or(1);
            let at = key;
            key += here;
            let sees = |span: &Span| !span.is_empty() && span.keys().start < at + here && span.keys().end > at;
            let Some(first) = a.spans.iter().position(sees) else { continue };
            let last = a.spans.iter().rposition(sees).unwrap_or(first);
            let rows = first * S::TILE_ROWS..a.rows.len().min((last + 1) * S::TILE_ROWS);
            let weighted = WeightedRows {
                weights: a.weights[rows.start * SCORE_STRIDE + at..].as_ptr(),
                rows: &a.rows[rows],
                column: vec * LANES,
            };
            let sums = TileRows { out: a.sums[at * stride + vec * LANES..].as_mut_ptr(), stride };
            // SAFETY: `here` keys from `at` on lie below `keys.end`, so by the assertions above weights and sums lie
            // inside their slices; `vec + vecs ≤ a.vecs`; the caller guarantees the rows.
            unsafe { tile_of(s, [here, vecs], weighted, sums) }
        }
        vec += vecs;
    }
}

/// Keys of a tile for what whole tiles of six leave of a block of 256.
const REMAINDER: usize = 4;

/// Adds the sums of a tile of `keys` keys, [`Simd::TILE_ROWS`], [`REMAINDER`] or 1, in `vecs` vectors, [`Simd::TILE_VECS`]
/// or 1.
///
/// # Safety
/// Same contract as [`tile`], for this shape.
#[inline(always)]
unsafe fn tile_of<S: Simd>(s: S, [keys, vecs]: [usize; 2], weighted: WeightedRows<'_>, sums: TileRows) {
    // SAFETY: the caller guarantees the contract for the shape.
    unsafe {
        match (keys, vecs) {
            (6, 4) if S::TILE_ROWS >= 6 && S::TILE_VECS >= 4 => tile::<S, 6, 4>(s, weighted, sums),
            (4, 4) if S::TILE_ROWS >= 4 && S::TILE_VECS >= 4 => tile::<S, 4, 4>(s, weighted, sums),
            (1, 4) if S::TILE_VECS >= 4 => tile::<S, 1, 4>(s, weighted, sums),
            (6, 1) if S::TILE_ROWS >= 6 => tile::<S, 6, 1>(s, weighted, sums),
            (4, 1) if S::TILE_ROWS >= 4 => tile::<S, 4, 1>(s, weighted, sums),
            (2, 1) if S::TILE_ROWS == 2 => tile::<S, 2, 1>(s, weighted, sums),
            (1, 1) => tile::<S, 1, 1>(s, weighted, sums),
            shape => unreachable!("a tile of {shape:?}"),
        }
    }
}

/// Rows of X from a column on, and each row's weights from a key on.
#[derive(Clone, Copy)]
struct WeightedRows<'a> {
    /// Weight of the first row and the tile's first key; rows are [`SCORE_STRIDE`] apart.
    weights: *const f32,
    rows: &'a [*const f32],
    column: usize,
}

/// Adds the sums of `MK` keys in `NV` vectors of columns.
///
/// # Safety
/// Each row has `MK` weights and `16 · NV` columns from `column` on; `sums` has `MK` rows of `16 · NV` writable floats.
#[inline(always)]
unsafe fn tile<S: Simd, const MK: usize, const NV: usize>(s: S, a: WeightedRows<'_>, sums: TileRows) {
    const { assert!(MK <= MAX_TILE_ROWS && NV <= MAX_TILE_VECS) };
    debug_assert!(!a.weights.is_null() && !sums.out.is_null(), "an operand is missing");
    let mut sum = [[s.splat(0.0); NV]; MK];
    let mut weights = a.weights;
    for row in a.rows {
        let mut x = [s.splat(0.0); NV];
        for n in 0..NV {
            // SAFETY: the caller guarantees `16 · NV` columns of the row from `column` on.
            x[n] = unsafe { s.load(row.add(a.column + n * LANES)) };
        }
        for k in 0..MK {
            // SAFETY: the caller guarantees `MK` weights of the row.
            let weight = s.splat(unsafe { *weights.add(k) });
            for n in 0..NV {
                sum[k][n] = s.fma(weight, x[n], sum[k][n]);
            }
        }
        weights = weights.wrapping_add(SCORE_STRIDE);
    }
    // SAFETY: the caller guarantees `MK` rows of sums.
    unsafe {
        sums.add_to(s, &mut sum);
        sums.store(s, &sum, |_, sum| sum);
    }
}
