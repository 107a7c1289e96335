//! QKᵀ of many rows: the scores of a row block of more than
//! [`READING_ROWS`](crate::matmul::prefetch::READING_ROWS) rows against packed f32 keys.
//!
//! ```text
//! for each group of panels, 16 KiB of keys or one tile, which stay in the first-level cache:
//!     for each run of panels of the group that the same tiles of rows need:
//!         for each of these tiles, whose queries are read once:
//!             for each NV panels of the run:
//!                 scores[rows][panels] = scale · (Σ chain 0 + Σ chain 1 + …)
//! ```

use crate::attention::call::tiling::SCORE_STRIDE;
use crate::attention::steps::qk::{Scores, prefetch_bias};
use crate::attention::steps::span::Span;
use crate::matmul::float_tile::{Chains, Columns};
use crate::matmul::tile_rows::TileRows;
use crate::matmul::tile_shape::next_part;
use crate::simd::{LANES, Simd};
use crate::tensor::panels::{panel_bits, runs};
use crate::tensor::rows::Rows;
use core::ops::Range;

/// Number of bytes of the keys of a group of panels: half of a first-level cache of 32 KiB.
const GROUP_BYTES: usize = 16 << 10;

/// Computes the scores of a row block against packed keys.
///
/// # Safety
/// Every query is readable for `head_dim` floats, and the panels of keys lie one after the other.
#[inline(always)]
pub(crate) unsafe fn scores<S: Simd>(s: S, a: &mut Scores<'_, Rows<f32>>) {
    let rows = a.queries.len();
    assert!(a.out.len() >= rows * SCORE_STRIDE && a.panels.end * LANES <= SCORE_STRIDE);
    assert!(a.spans.len() == rows.div_ceil(S::TILE_ROWS) && !a.panels.is_empty() && !a.keys.are_scattered());
    assert!(a.next_bias.is_none_or(|next| next.len() >= rows));
    clear_holes::<S>(a);
    let panels = a.panels.clone();
    let group = (GROUP_BYTES / size_of::<f32>() / (a.head_dim * LANES).max(1)).max(S::TILE_VECS);
    for first in panels.clone().step_by(group) {
        let here = panel_bits(first..panels.end.min(first + group));
        let needed = |span: &Span| span.panels & here;
        let mut tile = 0;
        while tile < a.spans.len() {
            let bits = needed(&a.spans[tile]);
            let tiles = tile..tile + a.spans[tile..].iter().take_while(|span| needed(span) == bits).count();
            tile = tiles.end;
            for mut run in runs(bits) {
                while !run.is_empty() {
                    let vecs = next_part(run.len(), S::TILE_VECS);
                    let panels = run.start..run.start + if run.len().is_multiple_of(vecs) { run.len() } else { vecs };
                    run.start = panels.end;
                    let strip = Strip { tiles: tiles.clone(), panels };
                    by_tile_vecs!(vecs, most S::TILE_VECS, |NV| s.vectorize(
                        #[inline(always)]
                        // SAFETY: tiles and panels of `a`, `NV` panels or a multiple; the caller guarantees the rest.
                        || unsafe { strip_scores::<S, NV>(s, a, strip) }
                    ));
                }
            }
        }
    }
}

/// Writes zeros for the panels inside the tiles' spans that these do not need: what follows reads whole spans.
#[inline(always)]
fn clear_holes<S: Simd>(a: &mut Scores<'_, Rows<f32>>) {
    for (tile, span) in a.spans.iter().enumerate() {
        let inside = panel_bits(span.first_panel()..span.end_panel()) & panel_bits(a.panels.clone());
        for hole in runs(inside & !span.panels) {
            for row in tile * S::TILE_ROWS..a.queries.len().min((tile + 1) * S::TILE_ROWS) {
                a.out[row * SCORE_STRIDE..][hole.start * LANES..hole.end * LANES].fill(0.0);
            }
        }
    }
}

/// Tiles of rows, and neighbouring panels that all of them need.
struct Strip {
    tiles: Range<usize>,
    panels: Range<usize>,
}

/// Computes the scores of a strip, `NV` panels at a time.
///
/// # Safety
/// Same contract as [`scores`], whose assertions hold; the strip is part of `a`, and the number of its panels a multiple of
/// `NV`.
#[inline(always)]
unsafe fn strip_scores<S: Simd, const NV: usize>(s: S, a: &mut Scores<'_, Rows<f32>>, strip: Strip) {
    let size = a.head_dim * LANES;
    let (chains, scale) = (Chains::new::<S>(a.head_dim), s.splat(a.scale));
    for tile in strip.tiles {
        let first_row = tile * S::TILE_ROWS;
        let here = S::TILE_ROWS.min(a.queries.len() - first_row);
        // SAFETY: `here` rows from `first_row` on, and the panels, exist; their scores are inside `a.out`, as asserted.
        by_tile_rows!(here, most S::TILE_ROWS, |MR| unsafe {
            let queries = a.queries.as_ptr().add(first_row).cast::<[*const f32; MR]>().read();
            for panel in strip.panels.clone().step_by(NV) {
                prefetch_bias(s, a.next_bias, first_row..first_row + MR, panel..panel + NV);
                let first = a.keys.at(0).add((panel - a.panels.start) * size);
                let mut sums = [[s.splat(0.0); NV]; MR];
                chains.dot_products(s, &queries, Columns { first, step: LANES as isize, apart: size }, &mut sums);
                let out = a.out.as_mut_ptr().add(first_row * SCORE_STRIDE + panel * LANES);
                TileRows { out, stride: SCORE_STRIDE }.store(
                    s,
                    &sums,
                    #[inline(always)]
                    |_, sum| s.mul(sum, scale),
                );
                a.prefetch.fetch(s);
            }
        });
    }
}
