//! QKᵀ of int8 queries and packed int8 keys.
//!
//! A tile is that of `dot_tile.rs` with four elements at a time and integer sums, so one chain is enough.

use crate::attention::steps::qk::Walk;
use crate::attention::steps::score_passes::AnyColumns;
use crate::attention::steps::span::Span;
use crate::attention::tiling::SCORE_STRIDE;
use crate::matmul::dot_tile::{self, FAR, FEW_ROWS, Later};
use crate::matmul::int8::{MAX_HEAD_DIM, Row, panel_bytes, quads};
use crate::matmul::prefetch::PrefetchQueue;
use crate::matmul::prefetch::tile_prefetches;
use crate::simd::{Int8Dot, Int8DotWork, LANES, Query4};

/// Operands of int8 QKᵀ: a row block's queries, a run of packed keys, and the score block to write.
pub(crate) struct Scores<'a> {
    /// Query rows of the row block, `[row][quads]`, without gaps.
    pub(crate) queries: &'a [Query4],
    /// Sum and factor of each query row.
    pub(crate) rows: &'a [Row],
    /// Packed keys: see `int8.rs`.
    pub(crate) keys: &'a [i8],
    /// Scales of these keys in whole panels, if keys have scales.
    pub(crate) scales: Option<&'a [f32]>,
    /// Panels of the block that `keys` holds.
    pub(crate) panels: core::ops::Range<usize>,
    /// Keys that each tile of rows needs.
    pub(crate) spans: &'a [Span],
    pub(crate) head_dim: usize,
    /// Bias rows to prefetch: see [`crate::attention::steps::qk::Scores`].
    pub(crate) next_bias: Option<AnyColumns<'a>>,
    /// Memory to prefetch meanwhile.
    pub(crate) prefetch: &'a mut PrefetchQueue,
    /// Scores, `[row][SCORE_STRIDE]`; only the panels in each tile's span are written.
    pub(crate) out: &'a mut [f32],
}

impl Int8DotWork for Scores<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Int8Dot>(self, s: S) {
        let a = self;
        let (all, quads, first) = (a.rows.len(), quads(a.head_dim), a.panels.start);
        assert!(a.head_dim <= MAX_HEAD_DIM && a.queries.len() >= all * quads);
        assert!(a.keys.len() >= a.panels.len() * panel_bytes(a.head_dim));
        assert!(a.scales.is_none_or(|scales| scales.len() >= a.panels.len() * LANES));
        assert!(a.out.len() >= all * SCORE_STRIDE && a.panels.end * LANES <= SCORE_STRIDE);
        let out = a.out.as_mut_ptr();
        let vecs = dot_tile::panels(s, all, [S::DOT_VECS, S::TILE_VECS]);
        let walk = Walk {
            rows: all,
            panels: a.panels,
            spans: a.spans,
            vecs,
            next_bias: a.next_bias,
            prefetch: a.prefetch,
            lines: 0,
        };
        walk.for_each_tile(
            s,
            #[inline(always)]
            |row, rows, panels, _| {
                // If registers hold fewer rows than a tile of the row block has, it is computed in equal parts.
                let parts = rows.div_ceil(S::INT8_DOT_ROWS);
                let mut done = 0;
                for part in 0..parts {
                    let here = (rows - done).div_ceil(parts - part);
                    let row = row + done;
                    // SAFETY: `row + here ≤ all` and `panels` lies in `a.panels`, so by the assertions above all
                    // addresses are inside the slices.
                    unsafe {
                        let tile = Tile {
                            queries: a.queries.as_ptr().add(row * quads),
                            rows: a.rows.as_ptr().add(row),
                            keys: a.keys.as_ptr().add((panels.start - first) * panel_bytes(a.head_dim)),
                            scales: a.scales.map(|scales| scales.as_ptr().add((panels.start - first) * LANES)),
                            quads,
                            fetch: tile_prefetches::<S>(row, here, all),
                            out: out.add(row * SCORE_STRIDE + panels.start * LANES),
                        };
                        let most = const { [S::INT8_DOT_ROWS, S::TILE_VECS] };
                        by_tile_shape!(here, panels.len(), most most, |MR, NV| tile.run::<S, MR, NV>(s));
                    }
                    done += here;
                }
            },
        );
        if a.rows.iter().any(|row| row.factor.abs() > SAFE_FACTOR) {
            correct_zero_sums(a.rows, a.scales, first, a.out);
        }
    }
}

/// Largest query factor that no key scale makes infinite: key scales are at most `f32::MAX / 127`.
const SAFE_FACTOR: f32 = 126.0;

/// Sets the scores of integer sums of 0 to 0 where the factor overflowed: they were computed as 0 · ∞, which is NaN. Any
/// other sum times such a factor overflows, too, and its score is ±∞ rightly.
#[cold]
#[inline(never)]
fn correct_zero_sums(rows: &[Row], scales: Option<&[f32]>, first_panel: usize, out: &mut [f32]) {
    for (row, scores) in rows.iter().zip(out.chunks_mut(SCORE_STRIDE)) {
        if row.factor.is_nan() {
            continue; // The query is not finite.
        }
        for (key, score) in scores[first_panel * LANES..].iter_mut().enumerate() {
            let scale = scales.map_or(0.0, |scales| scales.get(key).copied().unwrap_or(0.0));
            if score.is_nan() && !scale.is_nan() {
                *score = 0.0;
            }
        }
    }
}

/// Addresses of a tile's operands and of its scores.
#[derive(Clone, Copy)]
struct Tile {
    queries: *const Query4,
    rows: *const Row,
    keys: *const i8,
    scales: Option<*const f32>,
    quads: usize,
    /// True to prefetch later keys.
    fetch: bool,
    out: *mut f32,
}

impl Tile {
    /// Computes the scores of `MR` rows against `NV` panels.
    ///
    /// # Safety
    /// There are `MR` rows of `quads` and their factors, `NV` panels and their scales, and in `out` `MR` rows of
    /// `NV × 16` writable floats, `SCORE_STRIDE` apart.
    #[inline(always)]
    unsafe fn run<S: Int8Dot, const MR: usize, const NV: usize>(self, s: S) {
        let Self { queries, rows, keys, scales, quads, fetch, out } = self;
        let mut sums = [[s.start(0); NV]; MR];
        for (r, sums) in sums.iter_mut().enumerate() {
            // SAFETY: row `r < MR`.
            *sums = [s.start(unsafe { (*rows.add(r)).total }); NV];
        }
        // Other tiles are those of many rows: they do not prefetch, and do not test for it either.
        let fetch = (NV == 1 || NV == 2 && MR <= FEW_ROWS) && fetch;
        let later = Later::in_order(s, keys.wrapping_add(FAR).cast(), 4 * LANES, NV);
        if fetch {
            s.prefetch_pages(later.level(MR), later.of(0, 0), NV * quads * 4 * LANES);
        }
        for i in 0..quads {
            // SAFETY: panel `n < NV` is `quads × 64` bytes; `i < quads`.
            let at = |n: usize| unsafe { keys.add((n * quads + i) * 4 * LANES) };
            // SAFETY: panel 0 is `quads × 64` bytes; `i < quads`.
            let mut four = [unsafe { s.keys(at(0)) }; NV];
            for (n, four) in four.iter_mut().enumerate() {
                if fetch {
                    s.prefetch_line(later.level(MR), later.of(i, n));
                }
                // SAFETY: panel `n < NV` is `quads × 64` bytes; `i < quads`.
                *four = unsafe { s.keys(at(n)) };
            }
            for (r, sums) in sums.iter_mut().enumerate() {
                // SAFETY: row `r < MR`, `i < quads`.
                let q = unsafe { &*queries.add(r * quads + i) };
                for (sum, &four) in sums.iter_mut().zip(&four) {
                    *sum = s.dot4(*sum, q, four);
                }
            }
        }
        for (r, sums) in sums.iter().enumerate() {
            // SAFETY: row `r < MR`.
            let factor = s.splat(unsafe { (*rows.add(r)).factor });
            for (n, &sum) in sums.iter().enumerate() {
                // SAFETY: the caller guarantees sixteen scales of panel `n < NV` and sixteen scores of row `r < MR`.
                unsafe {
                    let factor = match scales {
                        Some(scales) => s.mul(factor, s.load(scales.add(n * LANES))),
                        None => factor,
                    };
                    s.store(out.add(r * SCORE_STRIDE + n * LANES), s.mul(factor, s.to_f32(sum)));
                }
            }
        }
    }
}
