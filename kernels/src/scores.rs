//! QKᵀ: the scores of a group of rows against a block of packed keys, made of the register tiles of `dots.rs`.
//!
//! Panels outside, rows inside: a tile's 16 to 64 keys stay in the first-level cache while the rows pass by.

use crate::ahead::Ahead;
use crate::block::{SCORE_STRIDE, Span};
use crate::dots::{self, Fetch, Tile};
use crate::passes::Columns;
use crate::simd::{LANES, Simd};

/// A group of rows, a run of packed keys, and where the scores go.
pub(crate) struct Scores<'a> {
    /// The group's query rows, each `head_dim` contiguous floats. All tiles of rows are full but the last.
    pub(crate) queries: &'a [*const f32],
    /// Packed keys, `[panel][head_dim][16]`.
    pub(crate) keys: &'a [f32],
    /// Which of the block's panels `keys` holds.
    pub(crate) panels: core::ops::Range<usize>,
    /// The keys each tile of rows needs.
    pub(crate) spans: &'a [Span],
    pub(crate) head_dim: usize,
    pub(crate) scale: f32,
    /// A row of a bias for each query, from the block's first key on: read by the pass after this one, and fetched from
    /// memory while this one computes.
    pub(crate) next: Option<&'a [Columns<f32>]>,
    /// What comes later.
    pub(crate) ahead: &'a mut Ahead,
    /// `[row][SCORE_STRIDE]`; only the panels in each tile's span are written.
    pub(crate) out: &'a mut [f32],
}

/// # Safety
/// Every query is readable for `head_dim` floats.
#[inline(always)]
pub(crate) unsafe fn scores<S: Simd>(s: S, a: Scores<'_>) {
    let (d, all) = (a.head_dim, a.queries.len());
    assert!(a.spans.len() == all.div_ceil(S::TILE_ROWS) && a.keys.len() >= a.panels.len() * d * LANES);
    assert!(a.next.is_none_or(|next| next.len() >= all));
    assert!(a.out.len() >= all * SCORE_STRIDE && a.panels.end * LANES <= SCORE_STRIDE);
    let scale = s.splat(a.scale);
    let most = if all <= dots::FEW_ROWS { 1 } else { S::DOT_VECS };
    let mut panel = a.panels.start;
    while panel < a.panels.end {
        let vecs = most.min(a.panels.end - panel);
        for (index, span) in a.spans.iter().enumerate() {
            let (from, to) = (panel.max(span.first_panel()), (panel + vecs).min(span.end_panel()));
            if from >= to {
                continue;
            }
            let row = index * S::TILE_ROWS;
            let rows = S::TILE_ROWS.min(all - row);
            for columns in a.next.iter().flat_map(|next| &next[row..row + rows]) {
                for panel in from..to {
                    s.prefetch(columns.first.wrapping_add(panel * LANES));
                }
            }
            // SAFETY: `row + rows ≤ all` and `from..to` lies in `a.panels`, so by the assertions above the panels and
            // the rows of `out` are inside their slices; the caller vouches for the queries.
            unsafe {
                let tile = Tile {
                    rows: a.queries.as_ptr().add(row),
                    panels: a.keys.as_ptr().add((from - a.panels.start) * d * LANES),
                    depth: d,
                    out: a.out.as_mut_ptr().add(row * SCORE_STRIDE + from * LANES),
                    stride: SCORE_STRIDE,
                    fetch: Fetch::Far,
                };
                by_tile_shape!(S, rows, to - from, |MR, NV| dots::tile::<S, MR, NV>(
                    s,
                    tile,
                    #[inline(always)]
                    |_, total| s.mul(total, scale),
                ));
            }
            a.ahead.fetch(s);
        }
        panel += vecs;
    }
}
