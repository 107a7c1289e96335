//! QKᵀ of many rows: the scores of a row block of more than
//! [`MEMORY_BOUND_ROWS`](crate::matmul::prefetch::MEMORY_BOUND_ROWS) rows against packed f32 keys.
//!
//! ```text
//! for each group of panels, 16 KiB of keys or one tile, which stay in the first-level cache:
//!     for each run of panels of the group that the same tiles of rows need:
//!         for each of these tiles, whose queries are read once:
//!             for each NV panels of the run:
//!                 scores[rows][panels] = scale · (Σ chain 0 + Σ chain 1 + …)
//! ```

use crate::attention::call::tiling::SCORE_STRIDE;
use crate::attention::steps::qk::FloatQueries;
use crate::attention::steps::score_run::{ScoreRun, Strip};
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
/// Every query is readable for `depth` floats, and the panels of keys lie one after the other.
#[inline(always)]
pub(crate) unsafe fn scores<S: Simd>(s: S, run: &mut ScoreRun<'_>, queries: FloatQueries<'_>, keys: Rows<f32>) {
    assert!(queries.rows.len() == run.rows && !keys.are_scattered());
    let group = (GROUP_BYTES / size_of::<f32>() / (queries.depth * LANES).max(1)).max(S::TILE_VECS);
    run.for_each_strip::<S>(group, S::TILE_VECS, |run, strip| {
        by_tile_vecs!(strip.vecs, most S::TILE_VECS, |NV| s.vectorize(
            #[inline(always)]
            // SAFETY: tiles and panels of `run`, `NV` panels or a multiple; the caller guarantees the rest.
            || unsafe { strip_scores::<S, NV>(s, run, strip, queries, keys) }
        ));
    });
}

/// Computes the scores of a strip, `NV` panels at a time.
///
/// # Safety
/// Same contract as [`scores`], whose assertions hold; the strip is part of `run`, and the number of its panels a multiple of
/// `NV`.
#[inline(always)]
unsafe fn strip_scores<S: Simd, const NV: usize>(
    s: S,
    run: &mut ScoreRun<'_>,
    strip: Strip,
    queries: FloatQueries<'_>,
    keys: Rows<f32>,
) {
    let size = queries.depth * LANES;
    let (chains, scale) = (Chains::new::<S>(queries.depth), s.splat(queries.scale));
    for tile in strip.tiles {
        let first_row = tile * S::TILE_ROWS;
        let here = S::TILE_ROWS.min(run.rows - first_row);
        // SAFETY: `here` rows from `first_row` on, and the panels, exist; their scores are inside `run.out`, as asserted.
        by_tile_rows!(here, most S::TILE_ROWS, |MR| unsafe {
            let queries = queries.rows.as_ptr().add(first_row).cast::<[*const f32; MR]>().read();
            for panel in strip.panels.clone().step_by(NV) {
                run.prefetch_bias(s, first_row..first_row + MR, panel..panel + NV);
                let first = keys.at(0).add((panel - run.panels.start) * size);
                let mut sums = [[s.splat(0.0); NV]; MR];
                chains.dot_products(s, &queries, Columns { first, step: LANES as isize, apart: size }, &mut sums);
                let out = run.out.as_mut_ptr().add(first_row * SCORE_STRIDE + panel * LANES);
                TileRows { out, stride: SCORE_STRIDE }.store_as(
                    s,
                    &sums,
                    #[inline(always)]
                    |_, sum| s.mul(sum, scale),
                );
                run.prefetch.fetch(s);
            }
        });
    }
}
