//! QKᵀ: the scores of a row block against a block of packed keys, computed with the register tiles of `dot_tile.rs`.
//!
//! The outer loop is over panels, the inner one over rows: a tile's 16 to 64 keys stay in the first-level cache for all
//! rows.

#[cfg(all(test, target_arch = "x86_64"))]
mod tests;

use crate::attention::products::operands::{LaterKeys, QueryRows};
use crate::attention::products::score_run::{ScoreRun, Strip};
use crate::attention::scratch::SCORE_STRIDE;
use crate::matmul::dot_tile::{self, KeyOperand, Later, Tile};
use crate::matmul::operands::{MulAdd, Operand};
use crate::matmul::prefetch::{MEMORY_BOUND_ROWS, tile_prefetches};
use crate::simd::{FIRST, LANES, NO_LEVEL, SECOND, SECOND_OR_NONE, Simd};
use crate::tensor::rows::Rows;

/// Computes the scores of a row block against a run of packed keys.
///
/// Only panels of few rows may be scattered; the run is then all that the table has. Few rows prefetch `later` meanwhile.
///
/// # Safety
/// Every query is readable for `head_dim` floats, or in pairs where keys are pairs, and so are all panels of keys.
#[inline(always)]
pub(crate) unsafe fn scores<S: Simd, T: KeyOperand<S>>(
    s: S,
    run: &mut ScoreRun<'_>,
    queries: QueryRows<'_>,
    panels: Rows<T>,
    later: Option<LaterKeys>,
) {
    let (rows, keys) = (run.rows, RunPanels { all: panels, depth: queries.head_dim.div_ceil(T::By::PRODUCTS), later });
    assert!(queries.rows.len() == rows && (rows <= MEMORY_BOUND_ROWS || !panels.are_scattered()));
    // Rows of pages, which tiles do not prefetch, are read more slowly two panels at a time; scattered panels are read one
    // by one.
    let in_first = if later.is_some() && !panels.are_scattered() { T::By::DOT_VECS[0] } else { 1 };
    let vecs = dot_tile::panels(s, rows, [in_first, T::By::DOT_VECS[1]]);
    let level = match later.map_or(NO_LEVEL, |_| dot_tile::level(s, rows)) {
        // Rows of elements are few, so those that prefetch nothing need no code of their own.
        NO_LEVEL if const { T::By::PRODUCTS == 1 && S::PREFETCHES } => SECOND_OR_NONE,
        SECOND if rows > T::TILE_ROWS => SECOND_OR_NONE,
        level => level,
    };
    // SAFETY: rows and panels of a strip are those of `run`; their scores are inside `run.out`, as it asserts; the caller
    // guarantees that queries and keys are readable.
    run.for_each_strip::<S>(run.group_in_order(vecs), vecs, |run, strip| unsafe {
        match level {
            NO_LEVEL if const { T::By::PRODUCTS > 1 || !S::PREFETCHES } => {
                by_tile_vecs!(strip.vecs, most const { T::By::DOT_VECS[1] }, |NV| s.vectorize(
                    #[inline(always)]
                    || strip_scores::<S, T, NV, NO_LEVEL>(s, run, strip, queries, keys)
                ))
            }
            FIRST if const { S::MAY_HAVE_LARGE_L1 } => {
                by_tile_vecs!(strip.vecs, most const { T::By::DOT_VECS[0] }, |NV| s.vectorize(
                    #[inline(always)]
                    || strip_scores::<S, T, NV, FIRST>(s, run, strip, queries, keys)
                ))
            }
            SECOND if const { S::PREFETCHES } => s.vectorize(
                #[inline(always)]
                || strip_scores::<S, T, 1, SECOND>(s, run, strip, queries, keys),
            ),
            SECOND_OR_NONE if const { S::PREFETCHES } => s.vectorize(
                #[inline(always)]
                || strip_scores::<S, T, 1, SECOND_OR_NONE>(s, run, strip, queries, keys),
            ),
            level => unreachable!("level {level}"),
        }
    });
}

/// Panels of a run, and what few rows prefetch meanwhile.
#[derive(Clone, Copy)]
struct RunPanels<T> {
    all: Rows<T>,
    /// Number of elements of a panel in each lane, or of pairs.
    depth: usize,
    later: Option<LaterKeys>,
}

impl LaterKeys {
    /// Returns what a tile of `vecs` panels prefetches. It begins with panel `of[0]` of the `of[1]` panels of `keys`, each
    /// `depth` deep.
    ///
    /// # Safety
    /// There is such a panel.
    #[inline(always)]
    unsafe fn of_tile<S: Simd, T: Operand<S>>(self, keys: Rows<T>, of: [usize; 2], depth: usize, vecs: usize) -> Later {
        match self {
            Self::Panels { far } => {
                // SAFETY: the caller guarantees the panel.
                let at = unsafe { dot_tile::behind(keys, of, T::panel(depth) * size_of::<T>(), far) };
                Later::in_order(at.cast(), LANES * T::TERMS * size_of::<T>(), vecs)
            }
            Self::Rows { at, bytes } => Later::in_order(at.wrapping_add(of[0] * depth * bytes), bytes, vecs),
        }
    }
}

/// Computes the scores of a strip, `NV` panels at a time.
///
/// # Safety
/// The strip's rows and panels are readable; their scores lie inside `run.out`.
#[inline(always)]
unsafe fn strip_scores<S: Simd, T: KeyOperand<S>, const NV: usize, const LEVEL: u8>(
    s: S,
    run: &mut ScoreRun<'_>,
    strip: Strip,
    QueryRows { rows: queries, scale, .. }: QueryRows<'_>,
    RunPanels { all: keys, depth: d, later }: RunPanels<T>,
) {
    let (all, scale, scattered) = ([run.rows, run.panels.len()], s.splat(scale), keys.are_scattered());
    let (first_panel, out) = (run.panels.start, run.out.as_mut_ptr());
    // SAFETY: the run has a panel.
    let first = unsafe { keys.at(0) };
    run.for_each_tile::<S, NV>(
        s,
        &strip,
        T::TILE_ROWS,
        #[inline(always)]
        |rows, panel| {
            // SAFETY: the caller guarantees rows and panels of the strip.
            unsafe {
                let n = panel - first_panel;
                let later = later.filter(|_| tile_prefetches::<S>(rows.start, rows.len(), all[0]));
                let tile = Tile {
                    rows: queries.as_ptr().add(rows.start),
                    panels: if scattered { keys.at(n) } else { first.add(n * T::panel(d)) },
                    depth: d,
                    out: out.add(rows.start * SCORE_STRIDE + panel * LANES),
                    stride: SCORE_STRIDE,
                    later: later.map(|later| later.of_tile::<S, T>(keys, [n, all[1]], d, NV)),
                };
                by_tile_rows!(rows.len(), most dot_tile::most_rows(T::TILE_ROWS, LEVEL), |MR| dot_tile::tile::<S, T, MR, NV, LEVEL>(
                    s,
                    tile,
                    #[inline(always)]
                    |_, total| s.mul(total, scale),
                ));
            }
        },
    );
}
