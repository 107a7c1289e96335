//! QKᵀ of many rows: the scores of a row block of more than [`READING_ROWS`] rows against packed f32 keys.
//!
//! ```text
//! for each group of panels, 16 KiB of keys, which stay in the first-level cache:
//!     for each tile of rows, whose queries are read once for the group:
//!         for each panel of the group that the tile's span has:
//!             scores[rows][panel] = scale · (Σ chain 0 + Σ chain 1 + …)
//! ```

use crate::attention::steps::qk::Scores;
use crate::attention::tiling::SCORE_STRIDE;
use crate::matmul::dot_tile::KeyOperand;
use crate::matmul::float_tile::{Columns, add_products};
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
    let dots = Dots { depth, chain: <f32 as KeyOperand<S>>::chain(depth).max(1), scale: a.scale };
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
                    a.prefetch_bias(s, first_row..first_row + MR, panel);
                    let out = a.out.as_mut_ptr().add(first_row * SCORE_STRIDE + panel * LANES);
                    let keys = keys.add((panel - panels.start) * size);
                    dots.tile::<S, MR, 1>(s, &queries, keys, TileRows { out, stride: SCORE_STRIDE });
                    a.prefetch.fetch(s);
                }
            });
        }
    }
}

/// Dot products of queries and keys.
#[derive(Clone, Copy)]
struct Dots {
    depth: usize,
    /// Number of elements of a chain of FMAs.
    chain: usize,
    scale: f32,
}

impl Dots {
    /// Computes a tile of `MR` queries and `NV` panels side by side.
    ///
    /// # Safety
    /// Queries and panels have `depth` elements; `out` has `MR` writable rows of `NV` vectors.
    #[inline(always)]
    unsafe fn tile<S: Simd, const MR: usize, const NV: usize>(
        self,
        s: S,
        queries: &[*const f32; MR],
        keys: *const f32,
        out: TileRows,
    ) {
        let mut totals = [[s.splat(0.0); NV]; MR];
        let mut first = 0;
        loop {
            let last = self.depth.min(first + self.chain);
            let mut sums = [[s.splat(0.0); NV]; MR];
            // SAFETY: `last ≤ depth`, which the caller guarantees.
            unsafe { add_products(s, queries, Columns { first: keys, step: LANES as isize }, first..last, &mut sums) };
            if first > 0 {
                for r in 0..MR {
                    for n in 0..NV {
                        sums[r][n] = s.add(totals[r][n], sums[r][n]);
                    }
                }
            }
            if last == self.depth {
                let scale = s.splat(self.scale);
                // SAFETY: the caller guarantees `out`.
                return unsafe {
                    out.store(
                        s,
                        &sums,
                        #[inline(always)]
                        |_, sum| s.mul(sum, scale),
                    )
                };
            }
            totals = sums;
            first = last;
        }
    }
}
