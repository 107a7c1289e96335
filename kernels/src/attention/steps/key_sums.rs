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
        let tiles_left = (a.vecs - vec).div_ceil(S::TILE_VECS);
        let vecs = (a.vecs - vec).div_ceil(tiles_left);
        for key in keys.clone().step_by(S::TILE_ROWS) {
            let here = S::TILE_ROWS.min(keys.end - key);
            let sees = |span: &Span| !span.is_empty() && span.keys().start < key + here && span.keys().end > key;
            let Some(first) = a.spans.iter().position(sees) else { continue };
            let last = a.spans.iter().rposition(sees).unwrap_or(first);
            let rows = first * S::TILE_ROWS..a.rows.len().min((last + 1) * S::TILE_ROWS);
            let weighted = WeightedRows {
                weights: a.weights[rows.start * SCORE_STRIDE + key..].as_ptr(),
                rows: &a.rows[rows],
                column: vec * LANES,
            };
            let sums = TileRows { out: a.sums[key * stride + vec * LANES..].as_mut_ptr(), stride };
            // SAFETY: `here` keys from `key` on lie below `keys.end`, so by the assertions above weights and sums lie
            // inside their slices; `vec + vecs ≤ a.vecs`; the caller guarantees the rows.
            unsafe { by_tile_shape!(S, here, vecs, |MK, NV| tile::<S, MK, NV>(s, weighted, sums)) }
        }
        vec += vecs;
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
        for (n, x) in x.iter_mut().enumerate() {
            // SAFETY: the caller guarantees `16 · NV` columns of the row from `column` on.
            *x = unsafe { s.load(row.add(a.column + n * LANES)) };
        }
        for (k, sum) in sum.iter_mut().enumerate() {
            // SAFETY: the caller guarantees `MK` weights of the row.
            let weight = s.splat(unsafe { *weights.add(k) });
            for (sum, &x) in sum.iter_mut().zip(&x) {
                *sum = s.fma(weight, x, *sum);
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
