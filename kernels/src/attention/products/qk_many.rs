//! QKᵀ of many rows: the scores of a row block of more than
//! [`MEMORY_BOUND_ROWS`](crate::matmul::prefetch::MEMORY_BOUND_ROWS) rows against packed f32 keys.
//!
//! ```text
//! for each group of panels, 16 KiB of keys or one tile, which stay in the first-level cache:
//!     for each run of panels of the group that the same tiles of rows need:
//!         for each of these tiles; its queries are read once:
//!             for each NV panels of the run:
//!                 scores[rows][panels] = scale · (Σ chain 0 + Σ chain 1 + …)
//! ```
//!
//! Rows that are [apart](Span::apart) make other tiles, of one panel each and the next rows that need it.

use crate::attention::products::operands::QueryRows;
use crate::attention::products::score_run::{ScoreRun, Strip};
use crate::attention::scratch::{MAX_ROW_BLOCK, SCORE_STRIDE};
#[cfg(doc)]
use crate::attention::steps::span::Span;
use crate::matmul::float_tile::Chains;
use crate::matmul::tile_rows::TileRows;
use crate::simd::terms::Columns;
use crate::simd::{LANES, Simd};
use crate::tensor::rows::Rows;

/// Number of bytes of the keys of a group of panels: half of a first-level cache of 32 KiB.
const GROUP_BYTES: usize = 16 << 10;

/// Computes the scores of a row block against packed keys.
///
/// # Safety
/// Every query is readable for `head_dim` floats, and the panels of keys lie one after the other.
#[inline(always)]
pub(crate) unsafe fn scores<S: Simd>(s: S, run: &mut ScoreRun<'_>, queries: QueryRows<'_>, keys: Rows<f32>) {
    assert!(queries.rows.len() == run.rows && !keys.are_scattered());
    let group = (GROUP_BYTES / size_of::<f32>() / (queries.head_dim * LANES).max(1)).max(S::TILE_VECS);
    run.for_each_strip::<S>(group, S::TILE_VECS, |run, strip| {
        by_tile_vecs!(strip.vecs, most S::TILE_VECS, |NV| s.vectorize(
            #[inline(always)]
            // SAFETY: tiles and panels of `run`, `NV` panels or a multiple; the caller guarantees the rest.
            || unsafe { strip_scores::<S, NV>(s, run, strip, queries, keys) }
        ));
    });
    if run.spans.iter().any(|span| span.apart.is_some()) {
        s.vectorize(
            #[inline(always)]
            // SAFETY: same contract.
            || unsafe { scores_apart(s, run, queries, keys) },
        );
    }
}

/// Computes the scores of rows that are apart.
///
/// # Safety
/// Same contract as [`scores`]; its assertions hold, and those of [`ScoreRun::for_each_strip`].
#[inline(always)]
unsafe fn scores_apart<S: Simd>(s: S, run: &mut ScoreRun<'_>, queries: QueryRows<'_>, keys: Rows<f32>) {
    let mut panels = [0; MAX_ROW_BLOCK];
    for (tile, span) in run.spans.iter().enumerate().filter(|(_, span)| span.apart.is_some()) {
        for row in 0..S::TILE_ROWS.min(run.rows - tile * S::TILE_ROWS) {
            panels[tile * S::TILE_ROWS + row] = span.of_row(row).panels;
        }
    }
    for panel in run.panels.clone() {
        // SAFETY: the panel is one of the run's.
        let keys = unsafe { keys.at(0).add((panel - run.panels.start) * queries.head_dim * LANES) };
        // Not by branches, which the core can't foretell.
        let (mut rows, mut n) = ([0; MAX_ROW_BLOCK + 1], 0);
        for (row, panels) in panels[..run.rows].iter().enumerate() {
            rows[n] = row;
            n += usize::from(panels >> panel & 1);
        }
        for rows in rows[..n].chunks(S::TILE_ROWS) {
            // SAFETY: these rows and the panel exist; their scores are inside `run.out`, as asserted.
            by_tile_rows!(rows.len(), most S::TILE_ROWS, |MR| unsafe {
                panel_scores::<S, MR>(s, queries, rows, keys, run.out.as_mut_ptr().add(panel * LANES));
            });
        }
    }
}

/// Computes the scores of `MR` rows and one panel of keys; those of the row block's first row lie at `out`.
///
/// # Safety
/// There are `MR` rows, with queries, and scores that are writable; the panel is readable.
#[inline(always)]
unsafe fn panel_scores<S: Simd, const MR: usize>(
    s: S,
    queries: QueryRows<'_>,
    rows: &[usize],
    panel: *const f32,
    out: *mut f32,
) {
    let (mut at, mut kept, scale) = ([core::ptr::null(); MR], [[0.0; LANES]; MR], s.splat(queries.scale));
    for (at, &row) in at.iter_mut().zip(rows) {
        *at = queries.rows[row];
    }
    let columns = Columns { first: panel, step: LANES as isize, apart: 0 };
    let kept = TileRows::over(&mut kept);
    // SAFETY: the caller guarantees the queries, the panel and the scores.
    unsafe {
        let sums: [_; MR] = Chains::new::<S>(queries.head_dim).dot_products(s, &at, columns, kept, || ());
        for (&row, [sum]) in rows.iter().zip(sums) {
            s.store(out.add(row * SCORE_STRIDE), s.mul(sum, scale));
        }
    }
}

/// Computes the scores of a strip, `NV` panels at a time.
///
/// # Safety
/// Same contract as [`scores`]; its assertions hold; the strip is part of `run`, and the number of its panels a multiple of
/// `NV`.
#[inline(always)]
unsafe fn strip_scores<S: Simd, const NV: usize>(
    s: S,
    run: &mut ScoreRun<'_>,
    strip: Strip,
    queries: QueryRows<'_>,
    keys: Rows<f32>,
) {
    let QueryRows { rows: queries, head_dim: depth, scale, .. } = queries;
    let (size, chains, scale) = (depth * LANES, Chains::new::<S>(depth), s.splat(scale));
    let lines = chains.in_fours();
    for tile in strip.tiles {
        let first_row = tile * S::TILE_ROWS;
        let here = S::TILE_ROWS.min(run.rows - first_row);
        // SAFETY: `here` rows from `first_row` on, and the panels, exist; their scores are inside `run.out`, as asserted.
        by_tile_rows!(here, most S::TILE_ROWS, |MR| unsafe {
            let rows = queries.as_ptr().add(first_row).cast::<[*const f32; MR]>().read();
            for panel in strip.panels.clone().step_by(NV) {
                run.prefetch_bias(s, first_row..first_row + MR, panel..panel + NV);
                let first = keys.at(0).add((panel - run.panels.start) * size);
                let columns = Columns { first, step: LANES as isize, apart: size };
                let out = run.out.as_mut_ptr().add(first_row * SCORE_STRIDE + panel * LANES);
                let to = TileRows { out, stride: SCORE_STRIDE };
                let mut stream = run.prefetch.stream::<S, NV>(s, lines);
                let streams = !stream.is_empty();
                let sums: [[S::V; NV]; MR] = chains.dot_products(
                    s,
                    &rows,
                    columns,
                    to,
                    #[inline(always)]
                    || stream.fetch::<S, NV>(s),
                );
                to.store_as(
                    s,
                    &sums,
                    #[inline(always)]
                    |_, sum| s.mul(sum, scale),
                );
                if !streams {
                    run.prefetch.fetch(s);
                }
            }
        });
    }
}
