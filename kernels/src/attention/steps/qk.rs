//! QKᵀ: the scores of a row block against a block of packed keys, computed with the register tiles of `dot_tile.rs`.
//!
//! The outer loop is over panels, the inner one over rows: a tile's 16 to 64 keys stay in the first-level cache for all
//! rows.

#[cfg(all(test, target_arch = "x86_64"))]
mod tests;

use crate::attention::call::tiling::SCORE_STRIDE;
use crate::attention::steps::score_passes::AnyColumns;
use crate::attention::steps::span::Span;
use crate::matmul::dot_tile::{self, KeyOperand, Later, Tile};
use crate::matmul::operands::MulAdd;
use crate::matmul::prefetch::{PrefetchQueue, READING_ROWS, tile_prefetches};
use crate::simd::{FIRST, LANES, NO_LEVEL, SECOND, SECOND_OR_NONE, Simd};
use crate::tensor::any::AnyPanels;
use crate::tensor::rows::Rows;
use core::hint::black_box;
use core::ops::Range;

/// Operands of QKᵀ: a row block's queries, a run of packed keys, and the score block to write.
pub(crate) struct Scores<'a, K = AnyPanels> {
    /// Query rows of the row block, each `head_dim` contiguous floats, or pairs if keys are pairs. All tiles of rows
    /// are full but the last.
    pub(crate) queries: &'a [*const f32],
    /// Panels of packed keys, floats or pairs. Only those of few rows may be scattered; the run is then all that the table
    /// has.
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
    /// Keys that few rows prefetch meanwhile.
    pub(crate) later: Option<LaterKeys>,
    /// Memory to prefetch meanwhile.
    pub(crate) prefetch: &'a mut PrefetchQueue,
    /// Scores, `[row][SCORE_STRIDE]`; only the panels in each tile's span are written.
    pub(crate) out: &'a mut [f32],
}

/// Keys that few rows prefetch while they compute others.
#[derive(Clone, Copy)]
pub(crate) enum LaterKeys {
    /// Memory from `at` on, which is prefetched as the keys are read; an element of a panel takes `bytes`.
    InOrder { at: *const u8, bytes: usize },
    /// Panels of the run itself, so many after the one that is computed, and what follows them in the table; of elements of
    /// `bytes`.
    Panels { ahead: usize, bytes: usize },
}

/// Loop over the tiles of a row block and a run of panels.
pub(crate) struct Walk<'a> {
    pub(crate) rows: usize,
    /// Panels of the run: see [`Scores`], also for the fields not described here.
    pub(crate) panels: Range<usize>,
    pub(crate) spans: &'a [Span],
    /// Number of panels of a tile.
    pub(crate) vecs: usize,
    pub(crate) next_bias: Option<AnyColumns<'a>>,
    pub(crate) prefetch: &'a mut PrefetchQueue,
}

/// Neighbouring tiles of rows that need the same panels, of which each tile takes `vecs` at a time.
pub(crate) struct Strip {
    tiles: Range<usize>,
    pub(crate) panels: Range<usize>,
    pub(crate) vecs: usize,
}

/// Tile of a [`Strip`].
pub(crate) struct StripTile {
    pub(crate) first_row: usize,
    pub(crate) rows: usize,
    pub(crate) panel: usize,
}

impl Walk<'_> {
    /// Calls `compute` for each strip, in the order of panels, then of rows.
    #[inline(always)]
    pub(crate) fn for_each_strip<S: Simd>(&mut self, mut compute: impl FnMut(&mut Self, Strip)) {
        assert!(self.spans.len() == self.rows.div_ceil(S::TILE_ROWS));
        assert!(self.next_bias.is_none_or(|next| next.len() >= self.rows));
        let all = self
            .spans
            .iter()
            .fold(self.panels.clone(), |all, span| all.start.max(span.first_panel())..all.end.min(span.end_panel()));
        let mut panel = self.panels.start;
        while panel < self.panels.end {
            let left = self.panels.end - panel;
            // Planned tiles of panels that all rows need make one strip.
            let common = if panel < all.start { 0 } else { all.end.saturating_sub(panel) };
            let planned = common / self.vecs * self.vecs;
            if planned > 0 {
                let (tiles, panels) = (0..self.spans.len(), panel..panel + planned);
                compute(self, Strip { tiles, panels, vecs: self.vecs });
                panel += planned;
                continue;
            }
            let vecs = left.min(self.vecs);
            let needed = |span: &Span| panel.max(span.first_panel())..(panel + vecs).min(span.end_panel());
            let mut index = 0;
            for spans in self.spans.chunk_by(|a, b| needed(a) == needed(b)) {
                let (tiles, panels) = (index..index + spans.len(), needed(&spans[0]));
                index = tiles.end;
                if !panels.is_empty() {
                    let vecs = panels.len();
                    compute(self, Strip { tiles, panels, vecs });
                }
            }
            panel += vecs;
        }
    }

    /// Calls `tile` for each tile of a strip of `NV` panels at a time; the first row is a multiple of a tile's rows.
    #[inline(always)]
    pub(crate) fn for_each_tile<S: Simd, const NV: usize>(
        &mut self,
        s: S,
        strip: &Strip,
        mut tile: impl FnMut(StripTile),
    ) {
        assert!(strip.panels.len().is_multiple_of(NV), "a strip of another width");
        let mut panel = strip.panels.start;
        while panel < strip.panels.end {
            for index in strip.tiles.clone() {
                let first_row = index * S::TILE_ROWS;
                let rows = S::TILE_ROWS.min(self.rows - first_row);
                prefetch_bias(s, self.next_bias, first_row..first_row + rows, panel..panel + NV);
                // Opaque: else the compiler counts the addresses of every tile shape from tile to tile, in memory.
                let (first_row, panel) = (black_box(first_row), black_box(panel));
                tile(StripTile { first_row, rows, panel });
                self.prefetch.fetch(s);
            }
            panel += NV;
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

/// Prefetches what some rows' bias has for some panels, if there is one.
#[inline(always)]
pub(crate) fn prefetch_bias<S: Simd>(s: S, bias: Option<AnyColumns<'_>>, rows: Range<usize>, panels: Range<usize>) {
    let Some(bias) = bias else { return };
    for row in rows {
        let (first, bytes) = bias.panels(row);
        for panel in panels.clone() {
            s.prefetch(first.wrapping_add(panel * bytes).cast());
        }
    }
}

/// Computes the scores of a row block against a run of packed keys.
///
/// # Safety
/// Every query is readable for `head_dim` floats, or pairs where keys are, and so are all panels of keys.
#[inline(always)]
pub(crate) unsafe fn scores<S: Simd, T: KeyOperand<S>>(s: S, a: &mut Scores<'_, Rows<T>>) {
    let rows = a.queries.len();
    assert!(a.out.len() >= rows * SCORE_STRIDE && a.panels.end * LANES <= SCORE_STRIDE);
    assert!(!a.keys.are_scattered() || rows <= READING_ROWS, "many rows read panels side by side");
    // Rows of pages, which tiles do not prefetch, are read more slowly two panels at a time; scattered panels are read one
    // by one.
    let few = if matches!(a.later, Some(LaterKeys::InOrder { .. })) { T::By::DOT_VECS[0] } else { 1 };
    let vecs = dot_tile::panels(s, rows, [few, T::By::DOT_VECS[1]]);
    let Scores { queries, keys, ref panels, spans, head_dim, scale, next_bias, later, .. } = *a;
    let out = a.out.as_mut_ptr();
    let (first_panel, panels_of_keys) = (panels.start, panels.len());
    let operands = Operands { queries, keys, first_panel, panels: panels_of_keys, depth: head_dim, later, scale, out };
    let prefetch = &mut *a.prefetch;
    let mut walk = Walk { rows, panels: panels.clone(), spans, vecs, next_bias, prefetch };
    let level = match later.map_or(NO_LEVEL, |_| dot_tile::level(s, rows)) {
        SECOND if spans.len() > 1 => SECOND_OR_NONE,
        level => level,
    };
    // SAFETY: rows and panels of a strip are those of `a`, so by the assertion above their scores are inside `a.out`; the
    // caller guarantees that queries and keys are readable.
    walk.for_each_strip::<S>(|walk, strip| unsafe {
        match level {
            NO_LEVEL => by_tile_vecs!(strip.vecs, most const { T::By::DOT_VECS[1] }, |NV| s.vectorize(
                #[inline(always)]
                || strip_scores::<S, T, NV, NO_LEVEL>(s, walk, strip, operands)
            )),
            FIRST if const { S::MAY_HAVE_LARGE_L1 } => {
                by_tile_vecs!(strip.vecs, most const { T::By::DOT_VECS[0] }, |NV| s
                .vectorize(
                    #[inline(always)]
                    || strip_scores::<S, T, NV, FIRST>(s, walk, strip, operands)
                ))
            }
            SECOND => s.vectorize(
                #[inline(always)]
                || strip_scores::<S, T, 1, SECOND>(s, walk, strip, operands),
            ),
            _ => s.vectorize(
                #[inline(always)]
                || strip_scores::<S, T, 1, SECOND_OR_NONE>(s, walk, strip, operands),
            ),
        }
    });
}

/// Addresses of the operands and results of [`scores`].
#[derive(Clone, Copy)]
struct Operands<'a, T> {
    queries: &'a [*const f32],
    keys: Rows<T>,
    /// First panel of the block that `keys` are, and their number.
    first_panel: usize,
    panels: usize,
    depth: usize,
    later: Option<LaterKeys>,
    scale: f32,
    out: *mut f32,
}

impl<T> Operands<'_, T> {
    /// Returns what a tile of `vecs` panels, the first of which is panel `n` of the run, prefetches.
    ///
    /// # Safety
    /// The run has such a panel.
    #[inline(always)]
    unsafe fn later(&self, later: LaterKeys, n: usize, vecs: usize) -> Later {
        match later {
            LaterKeys::InOrder { at, bytes } => Later::in_order(at.wrapping_add(n * self.depth * bytes), bytes, vecs),
            LaterKeys::Panels { ahead, bytes } => {
                // SAFETY: the caller guarantees that the run is not empty, and the table has twice as many entries.
                let at = unsafe { self.keys.at((n + ahead).min(2 * self.panels - 1)) };
                Later::in_order(at.cast(), bytes, vecs)
            }
        }
    }
}

/// Computes the scores of a strip, `NV` panels at a time.
///
/// # Safety
/// The strip's rows and panels are readable; their scores lie inside `operands.out`.
#[inline(always)]
unsafe fn strip_scores<S: Simd, T: KeyOperand<S>, const NV: usize, const LEVEL: u8>(
    s: S,
    walk: &mut Walk<'_>,
    strip: Strip,
    a: Operands<'_, T>,
) {
    let (d, all, scale, scattered) = (a.depth, walk.rows, s.splat(a.scale), a.keys.are_scattered());
    // SAFETY: the run has a panel.
    let keys = unsafe { a.keys.at(0) };
    walk.for_each_tile::<S, NV>(
        s,
        &strip,
        #[inline(always)]
        |StripTile { first_row, rows, panel }| {
            // SAFETY: the caller guarantees rows and panels of the strip.
            unsafe {
                let n = panel - a.first_panel;
                let later = a.later.filter(|_| tile_prefetches::<S>(first_row, rows, all));
                let tile = Tile {
                    rows: a.queries.as_ptr().add(first_row),
                    panels: if scattered { a.keys.at(n) } else { keys.add(n * d * T::ROWS * LANES) },
                    depth: d,
                    out: a.out.add(first_row * SCORE_STRIDE + panel * LANES),
                    stride: SCORE_STRIDE,
                    later: later.map(|later| a.later(later, n, NV)),
                };
                by_tile_rows!(rows, most dot_tile::most_rows(S::TILE_ROWS, LEVEL), |MR| dot_tile::tile::<S, T, MR, NV, LEVEL>(
                    s,
                    tile,
                    #[inline(always)]
                    |_, total| s.mul(total, scale),
                ));
            }
        },
    );
}
