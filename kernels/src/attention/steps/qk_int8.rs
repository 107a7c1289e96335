//! QKᵀ of int8 queries and packed int8 keys.
//!
//! A tile is that of `dot_tile.rs` with four elements at a time and integer sums, so one chain is enough.

use crate::attention::steps::qk::{Strip, StripTile, Walk};
use crate::attention::steps::score_passes::AnyColumns;
use crate::attention::steps::span::Span;
use crate::attention::tiling::SCORE_STRIDE;
use crate::matmul::dot_tile::{self, FAR, FEW_ROWS, Later};
use crate::matmul::int8::{MAX_HEAD_DIM, Row, quads};
use crate::matmul::prefetch::PrefetchQueue;
use crate::matmul::prefetch::tile_prefetches;
use crate::simd::{Int8Dot, Int8DotWork, LANES, Query4};
use crate::tensor::rows::Rows;

/// Operands of int8 QKᵀ: a row block's queries, a run of packed keys, and the score block to write. To run them requires
/// that all panels of keys are readable.
pub(crate) struct Scores<'a> {
    /// Query rows of the row block, `[row][quads]`, without gaps.
    pub(crate) queries: &'a [Query4],
    /// Sum and factor of each query row.
    pub(crate) rows: &'a [Row],
    /// Panels of packed keys: see `int8.rs`.
    pub(crate) keys: Rows<i8>,
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

/// The contract is that of [`Scores`].
impl Int8DotWork for Scores<'_> {
    type Output = ();
    #[inline(always)]
    unsafe fn run<S: Int8Dot>(self, s: S) {
        let a = self;
        let (all, quads, first, panels) = (a.rows.len(), quads(a.head_dim), a.panels.start, a.panels.len());
        assert!(a.head_dim <= MAX_HEAD_DIM && a.queries.len() >= all * quads);
        assert!(a.scales.is_none_or(|scales| scales.len() >= a.panels.len() * LANES));
        assert!(a.out.len() >= all * SCORE_STRIDE && a.panels.end * LANES <= SCORE_STRIDE);
        let out = a.out.as_mut_ptr();
        let vecs = match a.keys.are_scattered() {
            true => 1,
            false => dot_tile::panels(s, all, [S::DOT_VECS, S::TILE_VECS]),
        };
        let mut walk = Walk {
            rows: all,
            panels: a.panels,
            spans: a.spans,
            vecs,
            next_bias: a.next_bias,
            prefetch: a.prefetch,
            lines: 0,
        };
        walk.for_each_strip::<S>(|walk, strip| {
            // SAFETY: rows and panels of a strip are those of the operands, so by the assertions above all addresses
            // are inside the slices; the caller guarantees the keys.
            unsafe {
                let operands = Operands {
                    queries: a.queries.as_ptr(),
                    rows: a.rows.as_ptr(),
                    keys: a.keys,
                    panels,
                    scales: a.scales.map(<[f32]>::as_ptr),
                    quads,
                    out: out.add(first * LANES),
                };
                by_tile_vecs!(strip.vecs, most S::TILE_VECS, |NV| s.vectorize(
                    #[inline(always)]
                    || operands.run_strip::<S, NV>(s, walk, strip)
                ));
            }
        });
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

/// Addresses of the operands and of the scores.
#[derive(Clone, Copy)]
struct Operands {
    queries: *const Query4,
    rows: *const Row,
    keys: Rows<i8>,
    /// Number of panels of keys.
    panels: usize,
    scales: Option<*const f32>,
    quads: usize,
    out: *mut f32,
}

/// Addresses of a tile's operands and of its scores.
#[derive(Clone, Copy)]
struct Tile {
    queries: *const Query4,
    rows: *const Row,
    keys: *const i8,
    /// Keys to prefetch, in the order in which these are read.
    later: Option<*const i8>,
    scales: Option<*const f32>,
    quads: usize,
    out: *mut f32,
}

impl Operands {
    /// Computes the scores of a strip, `NV` panels at a time.
    ///
    /// # Safety
    /// The strip's tiles have the contract of [`Tile::run`].
    #[inline(always)]
    unsafe fn run_strip<S: Int8Dot, const NV: usize>(self, s: S, walk: &mut Walk<'_>, strip: Strip) {
        let (all, first_panel) = (walk.rows, walk.panels.start);
        walk.for_each_tile::<S, NV>(
            s,
            &strip,
            #[inline(always)]
            |StripTile { first_row, rows, panel, .. }| {
                // If registers hold fewer rows than a tile of the row block has, it is computed in equal parts.
                let parts = rows.div_ceil(S::INT8_DOT_ROWS);
                let mut done = 0;
                for part in 0..parts {
                    let here = (rows - done).div_ceil(parts - part);
                    let row = first_row + done;
                    // SAFETY: `row + here` is at most the end of the tile's rows; the caller guarantees those and the
                    // panels.
                    unsafe {
                        let tile = self.at(row, panel - first_panel, tile_prefetches::<S>(row, here, all));
                        by_tile_rows!(here, most S::INT8_DOT_ROWS, |MR| tile.run::<S, MR, NV>(s));
                    }
                    done += here;
                }
            },
        );
    }

    /// Returns the tile of rows and panels from these on.
    ///
    /// # Safety
    /// Row and panel are some of the operands'.
    #[inline(always)]
    unsafe fn at(self, row: usize, panel: usize, fetch: bool) -> Tile {
        let bytes = (self.quads * 4 * LANES).max(1);
        // SAFETY: the caller guarantees the row and the panel; a table has twice as many entries as panels.
        unsafe {
            let keys = self.keys.at(panel);
            Tile {
                queries: self.queries.add(row * self.quads),
                rows: self.rows.add(row),
                keys,
                later: fetch.then(|| match self.keys.are_scattered() {
                    true => self.keys.at((panel + FAR.div_ceil(bytes)).min(2 * self.panels - 1)),
                    false => keys.wrapping_add(FAR),
                }),
                scales: self.scales.map(|scales| scales.add(panel * LANES)),
                quads: self.quads,
                out: self.out.add(row * SCORE_STRIDE + panel * LANES),
            }
        }
    }
}

impl Tile {
    /// Computes the scores of `MR` rows against `NV` panels.
    ///
    /// # Safety
    /// There are `MR` rows of `quads` and their factors, `NV` panels and their scales, and in `out` `MR` rows of
    /// `NV × 16` writable floats, `SCORE_STRIDE` apart.
    #[inline(always)]
    unsafe fn run<S: Int8Dot, const MR: usize, const NV: usize>(self, s: S) {
        let Self { queries, rows, keys, later, scales, quads, out } = self;
        let mut sums = [[s.start(0); NV]; MR];
        for r in 0..MR {
            // SAFETY: row `r < MR`.
            sums[r] = [s.start(unsafe { (*rows.add(r)).total }); NV];
        }
        // Other tiles are those of many rows: they do not prefetch, and do not test for it either.
        let later =
            later.filter(|_| NV == 1 || NV == 2 && MR <= FEW_ROWS).map(|at| Later::in_order(at.cast(), 4 * LANES, NV));
        let level = Later::level(s, MR);
        if let Some(later) = later {
            s.prefetch_pages(level, later.of(0, 0), NV * quads * 4 * LANES);
        }
        for i in 0..quads {
            // SAFETY: panel `n < NV` is `quads × 64` bytes; `i < quads`.
            let at = |n: usize| unsafe { keys.add((n * quads + i) * 4 * LANES) };
            // SAFETY: panel 0 is `quads × 64` bytes; `i < quads`.
            let mut four = [unsafe { s.keys(at(0)) }; NV];
            for n in 0..NV {
                if let Some(later) = later {
                    s.prefetch_line(level, later.of(i, n));
                }
                // SAFETY: panel `n < NV` is `quads × 64` bytes; `i < quads`.
                four[n] = unsafe { s.keys(at(n)) };
            }
            for r in 0..MR {
                // SAFETY: row `r < MR`, `i < quads`.
                let q = unsafe { &*queries.add(r * quads + i) };
                for n in 0..NV {
                    sums[r][n] = s.dot4(sums[r][n], q, four[n]);
                }
            }
        }
        for r in 0..MR {
            // SAFETY: row `r < MR`.
            let factor = s.splat(unsafe { (*rows.add(r)).factor });
            for n in 0..NV {
                // SAFETY: the caller guarantees sixteen scales of panel `n < NV` and sixteen scores of row `r < MR`.
                unsafe {
                    let factor = match scales {
                        Some(scales) => s.mul(factor, s.load(scales.add(n * LANES))),
                        None => factor,
                    };
                    s.store(out.add(r * SCORE_STRIDE + n * LANES), s.mul(factor, s.to_f32(sums[r][n])));
                }
            }
        }
    }
}
