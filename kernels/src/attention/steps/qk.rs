//! QKᵀ: the scores of a row block against a block of packed keys, computed with the register tiles of `dot_tile.rs`.
//!
//! The outer loop is over panels, the inner one over rows: a tile's 16 to 64 keys stay in the first-level cache for all
//! rows.

#[cfg(all(test, target_arch = "x86_64"))]
mod tests;

use crate::attention::steps::score_passes::AnyColumns;
use crate::attention::steps::span::Span;
use crate::attention::tiling::SCORE_STRIDE;
use crate::matmul::dot_tile::{self, KeyOperand, Later, Tile};
use crate::matmul::prefetch::{PrefetchQueue, PrefetchStream};
use crate::matmul::prefetch::{READING_ROWS, tile_prefetches};
use crate::simd::{LANES, Simd};
use crate::tensor::any::AnyPanels;
use core::ops::Range;

/// Operands of QKᵀ: a row block's queries, a run of packed keys, and the score block to write.
pub(crate) struct Scores<'a, K = AnyPanels> {
    /// Query rows of the row block, each `head_dim` contiguous floats, or pairs if keys are pairs. All tiles of rows
    /// are full but the last.
    pub(crate) queries: &'a [*const f32],
    /// Packed keys, `[panel][head_dim][16]`, floats or pairs.
    pub(crate) keys: K,
    /// Panels of the block that `keys` points at.
    pub(crate) panels: Range<usize>,
    /// Keys that each tile of rows needs.
    pub(crate) spans: &'a [Span],
    /// Length of a query, in floats or pairs.
    pub(crate) head_dim: usize,
    pub(crate) scale: f32,
    /// Row of a bias for each query, from the block's first key on: the next pass reads it, and this one prefetches it.
    pub(crate) next_bias: Option<AnyColumns<'a>>,
    /// Keys that few rows prefetch while they compute the first panel, and so on: their address, and the bytes of an
    /// element of a panel.
    pub(crate) later: Option<(*const u8, usize)>,
    /// Memory to prefetch meanwhile.
    pub(crate) prefetch: &'a mut PrefetchQueue,
    /// Scores, `[row][SCORE_STRIDE]`; only the panels in each tile's span are written.
    pub(crate) out: &'a mut [f32],
}

/// Loop over the tiles of a row block and a run of panels.
pub(crate) struct Walk<'a> {
    pub(crate) rows: usize,
    /// Panels of the run: see [`Scores`], also for the fields not described here.
    pub(crate) panels: Range<usize>,
    pub(crate) spans: &'a [Span],
    /// Number of panels of a tile; with more than [`READING_ROWS`] rows, the last may have one more.
    pub(crate) vecs: usize,
    pub(crate) next_bias: Option<AnyColumns<'a>>,
    pub(crate) prefetch: &'a mut PrefetchQueue,
    /// Number of lines that a full tile prefetches from `prefetch`.
    pub(crate) lines: usize,
}

impl Walk<'_> {
    /// Calls `tile(first row, rows, panels, stream)` for each tile: the first row is a multiple of the tile's rows, the
    /// panels are those that the rows' span needs, and the stream is the memory that a full tile prefetches.
    #[inline(always)]
    pub(crate) fn for_each_tile<S: Simd>(self, s: S, mut tile: impl FnMut(usize, usize, Range<usize>, PrefetchStream)) {
        assert!(self.spans.len() == self.rows.div_ceil(S::TILE_ROWS));
        assert!(self.next_bias.is_none_or(|next| next.len() >= self.rows));
        let mut panel = self.panels.start;
        while panel < self.panels.end {
            // A single panel left over is added to the last tile, if registers hold that: alone it takes more loads
            // than multiplications. Few rows wait for memory, and prefetch it with tiles of the planned size.
            let left = self.panels.end - panel;
            let wider = if self.rows > READING_ROWS { dot_tile::widest::<S>(self.vecs) } else { self.vecs };
            let vecs = if left <= wider { left } else { self.vecs };
            for (index, span) in self.spans.iter().enumerate() {
                let (from, to) = (panel.max(span.first_panel()), (panel + vecs).min(span.end_panel()));
                if from >= to {
                    continue;
                }
                let row = index * S::TILE_ROWS;
                let rows = S::TILE_ROWS.min(self.rows - row);
                for (first, bytes) in
                    self.next_bias.iter().flat_map(|next| (row..row + rows).map(|row| next.panels(row)))
                {
                    for panel in from..to {
                        s.prefetch(first.wrapping_add(panel * bytes).cast());
                    }
                }
                let full = rows == S::TILE_ROWS && to - from == self.vecs;
                self.prefetch.beside(
                    s,
                    if full { self.lines } else { 0 },
                    #[inline(always)]
                    |stream| tile(row, rows, from..to, stream),
                );
            }
            panel += vecs;
        }
    }
}

impl<K> Scores<'_, K> {
    /// Returns these operands with `keys` as the packed keys. By reference: passed by value, the whole struct would be
    /// copied.
    #[inline(always)]
    pub(crate) fn of<T>(&mut self, keys: T) -> Scores<'_, T> {
        let Scores {
            queries, ref panels, spans, head_dim, scale, next_bias, later, ref mut prefetch, ref mut out, ..
        } = *self;
        Scores { queries, keys, panels: panels.clone(), spans, head_dim, scale, next_bias, later, prefetch, out }
    }
}

/// Computes the scores of a row block against a run of packed keys.
///
/// # Safety
/// Every query is readable for `head_dim` floats, or pairs where keys are, and so are all panels of keys.
#[inline(always)]
pub(crate) unsafe fn scores<S: Simd, T: KeyOperand<S>>(s: S, a: Scores<'_, *const T>) {
    let (d, all) = (a.head_dim, a.queries.len());
    assert!(a.out.len() >= all * SCORE_STRIDE && a.panels.end * LANES <= SCORE_STRIDE);
    let scale = s.splat(a.scale);
    let (first, out) = (a.panels.start, a.out.as_mut_ptr());
    // Rows of pages, which tiles do not prefetch, are read more slowly two panels at a time.
    let few = if a.later.is_some() { T::FEW_VECS } else { 1 };
    let vecs = dot_tile::panels(s, all, [few, T::VECS]);
    let lines = dot_tile::prefetched_lines::<S, T>(vecs, d);
    let walk =
        Walk { rows: all, panels: a.panels, spans: a.spans, vecs, next_bias: a.next_bias, prefetch: a.prefetch, lines };
    walk.for_each_tile(
        s,
        #[inline(always)]
        |row, rows, panels, stream| {
            // SAFETY: `row + rows ≤ all` and `panels` lies in `a.panels`, so by the assertions above the rows
            // of `out` are inside their slice; the caller guarantees that queries and keys are readable.
            unsafe {
                let n = panels.start - first;
                let later = a.later.filter(|_| tile_prefetches::<S>(row, rows, all));
                let tile = Tile {
                    rows: a.queries.as_ptr().add(row),
                    panels: a.keys.add(n * d * LANES),
                    depth: d,
                    out: out.add(row * SCORE_STRIDE + panels.start * LANES),
                    stride: SCORE_STRIDE,
                    later: later
                        .map(|(at, bytes)| Later::in_order(s, at.wrapping_add(n * d * bytes), bytes, panels.len())),
                    stream,
                };
                let most = const { [S::TILE_ROWS, dot_tile::widest::<S>(T::VECS)] };
                by_tile_shape!(rows, panels.len(), most most, |MR, NV| dot_tile::tile::<S, T, MR, NV>(
                    s,
                    tile,
                    #[inline(always)]
                    |_, total| s.mul(total, scale),
                ));
            }
        },
    );
}

/// Runs [`scores`], with these keys, compiled for the instruction set. Here and not beside the other steps, so that it is
/// a unit of its own to the compiler.
///
/// # Safety
/// Same contract as [`scores`].
#[inline(always)]
pub(crate) unsafe fn compiled<S: Simd, T: KeyOperand<S>, K>(s: S, a: &mut Scores<'_, K>, keys: *const T) {
    s.vectorize(
        #[inline(always)]
        // SAFETY: the caller guarantees the contract of `scores`.
        || unsafe { scores(s, a.of(keys)) },
    )
}
