//! QKᵀ: the scores of a group of rows against a block of packed keys.
//!
//! A score is a sum over `head_dim` in one fixed order, whatever the tile: chains of up to 32 FMAs, added up first to
//! last. Lanes run over keys, so no sum is ever taken across lanes, and neither the tile's shape nor the register width
//! can show in the bits. The short chains are for accuracy: rounding errors grow with the size of the running sum, and
//! those of large scores are what an attention output's worst error is made of. One chain would do no better than the
//! naive loop; chains of 32 nearly halve the error at head_dim 64. Chains of 16 would do a little better still, for 3 % of
//! the time.
//!
//! ```text
//! for each 6 × 64 tile:                 registers (AVX-512): 24 sums, 4 keys, 1 query
//!     for each chain of dimensions:
//!         sum[6][4] = 0
//!         for each dimension i:
//!             key[4] = panels[..][i]    16 keys each, contiguous
//!             for each row: sum[row] += q[row][i] · key
//!         total += sum                  in the score block, in first-level cache
//!     score = scale · total
//! ```

use crate::block::{SCORE_STRIDE, Span};
use crate::passes::Columns;
use crate::simd::{LANES, Simd};

/// Dimensions that one chain runs over: at least two chains, of about equal length, none longer than 32. Half of that
/// where products are rounded before they are added, which makes up for it. Part of what a result's bits mean.
const fn chain<S: Simd>(head_dim: usize) -> usize {
    let chains = head_dim.div_ceil(32);
    let chains = if chains < 2 { 2 } else { chains };
    head_dim.div_ceil(if S::FUSED { chains } else { 2 * chains })
}

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
    // Panels outside, rows inside: a tile's 16 to 64 keys stay in the first-level cache while the rows pass by.
    let mut panel = a.panels.start;
    while panel < a.panels.end {
        let vecs = S::TILE_VECS.min(a.panels.end - panel);
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
                let q = a.queries.as_ptr().add(row);
                let k = a.keys.as_ptr().add((from - a.panels.start) * d * LANES);
                let out = a.out.as_mut_ptr().add(row * SCORE_STRIDE + from * LANES);
                by_tile_shape!(S, rows, to - from, |MR, NV| tile::<S, MR, NV>(s, q, k, d, scale, out));
            }
        }
        panel += vecs;
    }
}

/// `MR` rows against `NV` panels.
///
/// # Safety
/// `q..` holds `MR` pointers to `d` floats each, `k..` holds `NV × d × 16`, and `out` has `MR` rows of `NV × 16` writable floats,
/// `SCORE_STRIDE` apart.
#[inline(always)]
unsafe fn tile<S: Simd, const MR: usize, const NV: usize>(
    s: S,
    q: *const *const f32,
    k: *const f32,
    d: usize,
    scale: S::V,
    out: *mut f32,
) {
    // SAFETY: the caller vouches for `MR` pointers.
    let q: [*const f32; MR] = unsafe { q.cast::<[*const f32; MR]>().read() };
    let (mut first, chain) = (0, chain::<S>(d));
    loop {
        let last = d.min(first + chain);
        let mut sum = [[s.splat(0.0); NV]; MR];
        for i in first..last {
            let mut key = [s.splat(0.0); NV];
            for (n, key) in key.iter_mut().enumerate() {
                // SAFETY: panel `n` is `d × 16` floats; `i < d`.
                *key = unsafe { s.load(k.add((n * d + i) * LANES)) };
            }
            for (r, sum) in sum.iter_mut().enumerate() {
                // SAFETY: `i < d`.
                let query = s.splat(unsafe { *q[r].add(i) });
                for (sum, &key) in sum.iter_mut().zip(&key) {
                    *sum = s.fma(query, key, *sum);
                }
            }
        }
        for (r, sum) in sum.iter().enumerate() {
            for (n, &sum) in sum.iter().enumerate() {
                // SAFETY: row `r < MR`, vector `n < NV` of the tile.
                unsafe {
                    let at = out.add(r * SCORE_STRIDE + n * LANES);
                    let total = if first == 0 { sum } else { s.add(s.load(at), sum) };
                    s.store(at, if last == d { s.mul(total, scale) } else { total });
                }
            }
        }
        if last == d {
            return;
        }
        first = last;
    }
}
