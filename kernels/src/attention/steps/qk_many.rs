//! QKᵀ of many rows: the scores of a row block of more than [`READING_ROWS`] rows against packed f32 keys.
//!
//! ```text
//! for each group of panels, 16 KiB of keys, which stay in the first-level cache:
//!     for each tile of rows, whose queries are read once for the group:
//!         for each panel of the group that the tile's span has:
//!             scores[rows][panel] = scale · (Σ chain 0 + Σ chain 1 + …)
//! ```

use crate::attention::steps::qk::{Scores, prefetch_bias};
use crate::attention::tiling::SCORE_STRIDE;
use crate::matmul::float_tile::{Chains, Columns};
use crate::matmul::tile_rows::TileRows;
use crate::simd::{LANES, Simd};
use crate::tensor::rows::Rows;

/// Number of bytes of the keys of a group of panels: half of a first-level cache of 32 KiB.
const GROUP_BYTES: usize = 16 << 10;

/// Computes the scores of a row block against packed keys, one panel after the other.
///
/// # Safety
/// Every query is readable for `head_dim` floats, and the panels of keys lie one after the other.
#[inline(always)]
pub(crate) unsafe fn scores<S: Simd>(s: S, a: &mut Scores<'_, Rows<f32>>) {
    let rows = a.queries.len();
    assert!(a.out.len() >= rows * SCORE_STRIDE && a.panels.end * LANES <= SCORE_STRIDE);
    assert!(a.spans.len() == rows.div_ceil(S::TILE_ROWS) && !a.panels.is_empty() && !a.keys.are_scattered());
    assert!(a.next_bias.is_none_or(|next| next.len() >= rows));
    let (depth, panels) = (a.head_dim, a.panels.clone());
    let size = depth * LANES;
    let group = (GROUP_BYTES / size_of::<f32>() / size.max(1)).max(1);
    let (chains, scale) = (Chains::new::<S>(depth), s.splat(a.scale));
    // SAFETY: there is a panel.
    let keys = unsafe { a.keys.at(0) };
    for first in panels.clone().step_by(group) {
        for (tile, span) in a.spans.iter().enumerate() {
            let (from, to) = (first.max(span.first_panel()), panels.end.min(first + group).min(span.end_panel()));
            let first_row = tile * S::TILE_ROWS;
            let here = S::TILE_ROWS.min(rows - first_row);
            // SAFETY: `here` rows from `first_row` on, and the panels of the block from `from` to `to`, exist; their scores are
            // inside `a.out`, as asserted.
            by_tile_rows!(here, most S::TILE_ROWS, |MR| unsafe {
                let queries = a.queries.as_ptr().add(first_row).cast::<[*const f32; MR]>().read();
                for panel in from..to {
                    prefetch_bias(s, a.next_bias, first_row..first_row + MR, panel..panel + 1);
                    let keys = Columns { first: keys.add((panel - panels.start) * size), step: LANES as isize };
                    let mut sums = [[s.splat(0.0); 1]; MR];
                    chains.dot_products(s, &queries, keys, &mut sums);
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
}
