//! Sums over query rows for each key: Pᵀ·X, where P holds a weight for each row of a row block and each key of a block, and
//! X a vector for each row. The backward pass adds them to the gradients of keys and values.
//!
//! ```text
//! for each 64 columns:                               registers (AVX-512): 24 sums, 4 columns, 1 weight
//!     for each tile of 6 keys:
//!         for each row: sum[key] += P[row][key] · X[row]      six neighbouring weights, broadcast: nothing is transposed
//!         keys' sums += sum
//! ```
//! A sum is one chain of FMAs over the row block's rows in order. A row that does not see a key has weight 0 and adds
//! nothing, so it does not matter how many such rows a tile covers.

use crate::attention::scratch::SCORE_STRIDE;
use crate::attention::steps::span::Span;
use crate::matmul::float_tile::add_products;
use crate::matmul::prefetch::PrefetchQueue;
use crate::matmul::tile_rows::TileRows;
use crate::matmul::tile_shape::next_part;
use crate::simd::terms::{Columns, TermRows};
use crate::simd::{LANES, Simd};
use crate::tensor::rows::Rows;
use core::ops::Range;

/// Chain of FMAs that a row block's rows belong to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Chain {
    /// Chain of the row block alone, from zero, which is added to the keys' sums.
    OfBlock,
    /// Chain that the keys' sums are: rows before these, of the same row block, are done.
    Continued,
}

/// Operands of Pᵀ·X.
pub(crate) struct KeySums<'a> {
    /// Weights P, `[row][SCORE_STRIDE]`, 0 between the first and the last key of all spans where a row sees nothing.
    pub(crate) weights: &'a [f32],
    /// Keys that each tile of rows sees.
    pub(crate) spans: &'a [Span],
    /// Rows of X, evenly spaced, each readable for `16 · vecs` floats, and their number.
    pub(crate) rows: (Rows<f32>, usize),
    /// Number of vectors (16 columns each) of a row.
    pub(crate) vecs: usize,
    /// Sums, `[key][16 · vecs]`, which are added to.
    pub(crate) sums: &'a mut [f32],
    pub(crate) chain: Chain,
    /// Memory to prefetch meanwhile.
    pub(crate) prefetch: &'a mut PrefetchQueue,
}

/// Returns the range of keys that some tile of rows sees.
pub(crate) fn all_keys(spans: &[Span]) -> Range<usize> {
    let seen = spans.iter().filter(|span| !span.is_empty()).map(|span| span.keys());
    seen.reduce(|all, keys| all.start.min(keys.start)..all.end.max(keys.end)).unwrap_or(0..0)
}

/// Adds Pᵀ·X to the keys' sums.
///
/// # Safety
/// The rows are evenly spaced, and each is readable for `16 · vecs` floats.
#[inline(always)]
pub(crate) unsafe fn key_sums<S: Simd>(s: S, mut a: KeySums<'_>) {
    let (keys, (_, rows)) = (all_keys(a.spans), a.rows);
    assert!(a.spans.len() == rows.div_ceil(S::TILE_ROWS) && a.weights.len() >= rows * SCORE_STRIDE);
    assert!(a.sums.len() >= keys.end * a.vecs * LANES && keys.end <= SCORE_STRIDE);
    let mut vec = 0;
    // Columns outside, keys inside: the rows' part of a tile stays in the first-level cache for all keys.
    while vec < a.vecs {
        let vecs = next_part(a.vecs - vec, S::TILE_VECS);
        by_tile_vecs!(vecs, most S::TILE_VECS, |NV| s.vectorize(
            #[inline(always)]
            // SAFETY: `NV` vectors from `vec` on are some of `a`'s; the caller guarantees the rows.
            || unsafe {
                match a.chain {
                    Chain::OfBlock => strip_sums::<S, NV, false>(s, &mut a, keys.clone(), vec),
                    Chain::Continued => strip_sums::<S, NV, true>(s, &mut a, keys.clone(), vec),
                }
            }
        ));
        vec += vecs;
    }
}

/// Adds `NV` vectors of columns of Pᵀ·X, from a vector on, to the sums of some keys, which are one chain with them if it is
/// `CONTINUED`.
///
/// # Safety
/// Same contract as [`key_sums`]; its assertions hold; the rows have the vectors.
#[inline(always)]
unsafe fn strip_sums<S: Simd, const NV: usize, const CONTINUED: bool>(
    s: S,
    a: &mut KeySums<'_>,
    keys: Range<usize>,
    vec: usize,
) {
    let (x, stride, mut key) = (a.rows.0, a.vecs * LANES, keys.start);
    while key < keys.end {
        let here = next_part(keys.end - key, S::TILE_ROWS);
        let rows = rows_that_see::<S>(a, key..key + here);
        if !rows.is_empty() {
            // SAFETY: `here` keys from `key` on lie below `keys.end`, so by the assertions of `key_sums` weights and sums lie
            // inside their slices; the caller guarantees the rows and vectors.
            by_tile_rows!(here, most S::TILE_ROWS, |MK| unsafe {
                let weights = TermRows::<MK>::strided(a.weights.as_ptr().add(key), 1, SCORE_STRIDE);
                let columns = Columns { first: x.at(0).add(vec * LANES), step: x.step(), apart: LANES };
                let mut sums = [[s.splat(0.0); NV]; MK];
                let of_keys = TileRows { out: a.sums.as_mut_ptr().add(key * stride + vec * LANES), stride };
                if CONTINUED {
                    of_keys.add_to(s, &mut sums);
                }
                add_products(s, weights, columns, rows, &mut sums, || ());
                if !CONTINUED {
                    of_keys.add_to(s, &mut sums);
                }
                of_keys.store(s, &sums);
            });
            a.prefetch.fetch(s);
        }
        key += here;
    }
}

/// Returns the rows from the first to the last tile that sees one of some keys.
#[inline(always)]
fn rows_that_see<S: Simd>(a: &KeySums<'_>, keys: Range<usize>) -> Range<usize> {
    let sees = |span: &Span| !span.is_empty() && span.keys().start < keys.end && span.keys().end > keys.start;
    let Some(first) = a.spans.iter().position(sees) else { return 0..0 };
    let last = a.spans.iter().rposition(sees).unwrap_or(first);
    first * S::TILE_ROWS..a.rows.1.min((last + 1) * S::TILE_ROWS)
}
