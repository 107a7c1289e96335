//! QKᵀ of int8 queries and packed keys of eight or four bits.
//!
//! A tile is that of `dot_tile.rs` with four elements at a time and integer sums, so one chain is enough. Keys of four bits
//! have a scale for each block of their elements: their sums are taken block by block, and added up as floats.

use crate::attention::call::tiling::SCORE_STRIDE;
use crate::attention::steps::qk::{Strip, StripTile, Walk};
use crate::attention::steps::score_passes::AnyColumns;
use crate::attention::steps::span::Span;
use crate::matmul::dot_tile::{self, Later};
use crate::matmul::int8::{MAX_HEAD_DIM, QUAD, QuerySize, Row};
use crate::matmul::key_code::{BlockAt, KeyCode};
use crate::matmul::prefetch::{PrefetchQueue, tile_prefetches};
use crate::matmul::tile_shape::next_part;
use crate::simd::{FIRST, Int8Dot, Int8DotWork, LANES, Level, NO_LEVEL, Query4, SECOND};
use crate::tensor::rows::Rows;

/// Operands of integer QKᵀ: a row block's queries, a run of packed keys, and the score block to write. To run them requires
/// that all panels of keys, and the numbers that belong to them, are readable.
pub(crate) struct Scores<'a, C> {
    /// Query rows of the row block, `[row][quads]`, without gaps.
    pub(crate) queries: &'a [Query4],
    /// Sum and factor of each block of each query row; a row is one block for int8 keys.
    pub(crate) rows: &'a [Row],
    /// Panels of packed keys: see `int8.rs` and `int4.rs`.
    pub(crate) keys: Rows<i8>,
    /// Numbers that belong to the keys.
    pub(crate) code: C,
    /// Panels of the block that `keys` holds.
    pub(crate) panels: core::ops::Range<usize>,
    /// Keys that each tile of rows needs.
    pub(crate) spans: &'a [Span],
    pub(crate) size: QuerySize,
    /// Bias rows to prefetch: see [`crate::attention::steps::qk::Scores`].
    pub(crate) next_bias: Option<AnyColumns<'a>>,
    /// Memory to prefetch meanwhile.
    pub(crate) prefetch: &'a mut PrefetchQueue,
    /// Scores, `[row][SCORE_STRIDE]`; only the panels in each tile's span are written.
    pub(crate) out: &'a mut [f32],
}

/// Number of panels of a tile of many rows: fewer with float sums over blocks beside the integer ones.
const fn tile_vecs<S: Int8Dot, C: KeyCode>() -> usize {
    if C::BLOCK_LOADS.is_some() { S::DOT_VECS } else { S::TILE_VECS }
}

/// The contract is that of [`Scores`].
impl<C: KeyCode> Int8DotWork for Scores<'_, C> {
    type Output = ();
    #[inline(always)]
    unsafe fn run<S: Int8Dot>(self, s: S) {
        let a = self;
        let (first, panels, QuerySize { quads, sums }) = (a.panels.start, a.panels.len(), a.size);
        let all = a.rows.len() / sums.max(1);
        a.code.check(a.size, panels);
        assert!(quads <= MAX_HEAD_DIM / QUAD && a.queries.len() >= all * quads && a.rows.len() == all * sums);
        assert!(a.out.len() >= all * SCORE_STRIDE && a.panels.end * LANES <= SCORE_STRIDE);
        let out = a.out.as_mut_ptr();
        let vecs = match a.keys.are_scattered() {
            true => 1,
            false => dot_tile::panels(s, all, [S::DOT_VECS, const { tile_vecs::<S, C>() }]),
        };
        let mut walk =
            Walk { rows: all, panels: a.panels, spans: a.spans, vecs, next_bias: a.next_bias, prefetch: a.prefetch };
        // SAFETY: rows and panels of a strip are those of the operands, so by the assertions above all addresses are inside the
        // slices; the caller guarantees the keys.
        walk.for_each_strip::<S>(|walk, strip| unsafe {
            let operands = Operands {
                queries: a.queries.as_ptr(),
                rows: a.rows.as_ptr(),
                keys: a.keys,
                panels,
                code: a.code,
                size: a.size,
                out: out.add(first * LANES),
            };
            match dot_tile::level(s, all) {
                FIRST if const { S::MAY_HAVE_LARGE_L1 } => by_tile_vecs!(strip.vecs, most const { S::DOT_VECS }, |NV| s
                .vectorize(
                    #[inline(always)]
                    || operands.run_strip::<S, NV, FIRST>(s, walk, strip)
                )),
                SECOND => s.vectorize(
                    #[inline(always)]
                    || operands.run_strip::<S, 1, SECOND>(s, walk, strip),
                ),
                _ => by_tile_vecs!(strip.vecs, most const { tile_vecs::<S, C>() }, |NV| s.vectorize(
                    #[inline(always)]
                    || operands.run_strip::<S, NV, NO_LEVEL>(s, walk, strip)
                )),
            }
        });
        // All blocks of a row have its factor.
        if a.rows.iter().step_by(sums.max(1)).any(|row| row.factor.abs() > SAFE_FACTOR) {
            correct_zero_sums(a.rows.chunks_exact(sums), a.code, first, a.out);
        }
    }
}

/// Largest query factor that no key scale makes infinite: key scales are at most `f32::MAX / 127`.
const SAFE_FACTOR: f32 = 126.0;

/// Sets the scores of sums of 0 to 0 where the factor overflowed: they were computed as 0 · ∞, which is NaN. Any other sum
/// times such a factor overflows, too, and its score is ±∞ rightly.
#[cold]
#[inline(never)]
fn correct_zero_sums<'a>(
    rows: impl Iterator<Item = &'a [Row]>,
    code: impl KeyCode,
    first_panel: usize,
    out: &mut [f32],
) {
    for (row, scores) in rows.zip(out.chunks_mut(SCORE_STRIDE)) {
        if row[0].factor.is_nan() {
            continue; // The query is not finite.
        }
        for (key, score) in scores[first_panel * LANES..].iter_mut().enumerate() {
            if score.is_nan() && !code.scale(key).is_some_and(f32::is_nan) {
                *score = 0.0;
            }
        }
    }
}

/// Addresses of the operands and of the scores.
#[derive(Clone, Copy)]
struct Operands<C> {
    queries: *const Query4,
    rows: *const Row,
    keys: Rows<i8>,
    /// Number of panels of keys.
    panels: usize,
    code: C,
    size: QuerySize,
    out: *mut f32,
}

/// Addresses of a tile's operands and of its scores.
#[derive(Clone, Copy)]
struct Tile<C> {
    queries: *const Query4,
    rows: *const Row,
    keys: *const i8,
    /// Keys to prefetch, in the order in which these are read: these themselves, if later ones are not this tile's to prefetch.
    later: *const i8,
    code: C,
    size: QuerySize,
    out: *mut f32,
}

impl<C: KeyCode> Operands<C> {
    /// Computes the scores of a strip, `NV` panels at a time.
    ///
    /// # Safety
    /// The strip's tiles have the contract of [`Tile::run`].
    #[inline(always)]
    unsafe fn run_strip<S: Int8Dot, const NV: usize, const LEVEL: u8>(self, s: S, walk: &mut Walk<'_>, strip: Strip) {
        let (all, first_panel) = (walk.rows, walk.panels.start);
        walk.for_each_tile::<S, NV>(
            s,
            &strip,
            #[inline(always)]
            |StripTile { first_row, rows, panel }| {
                // Registers may hold fewer rows than a tile of the row block has.
                let mut done = 0;
                while done < rows {
                    let here = next_part(rows - done, S::INT8_DOT_ROWS);
                    let row = first_row + done;
                    // SAFETY: `row + here` is at most the end of the tile's rows; the caller guarantees those and the
                    // panels.
                    unsafe {
                        let far = tile_prefetches::<S>(row, here, all).then(|| Later::far(s, all));
                        let tile = self.at(row, panel - first_panel, far);
                        by_tile_rows!(here, most dot_tile::most_rows(S::INT8_DOT_ROWS, LEVEL), |MR| tile.run::<S, MR, NV, LEVEL>(s));
                    }
                    done += here;
                }
            },
        );
    }

    /// Returns the tile of rows and panels from these on, which prefetches keys `far` bytes ahead, if it does.
    ///
    /// # Safety
    /// Row and panel are some of the operands'.
    #[inline(always)]
    unsafe fn at(self, row: usize, panel: usize, far: Option<usize>) -> Tile<C> {
        let bytes = (self.size.quads / C::HALVES * 4 * LANES).max(1);
        // SAFETY: the caller guarantees the row and the panel; a table has twice as many entries as panels.
        unsafe {
            let keys = self.keys.at(panel);
            Tile {
                queries: self.queries.add(row * self.size.quads),
                rows: self.rows.add(row * self.size.sums),
                keys,
                later: match far {
                    None => keys,
                    Some(far) if self.keys.are_scattered() => {
                        self.keys.at((panel + far.div_ceil(bytes)).min(2 * self.panels - 1))
                    }
                    Some(far) => keys.wrapping_add(far),
                },
                code: self.code.panel(panel),
                size: self.size,
                out: self.out.add(row * SCORE_STRIDE + panel * LANES),
            }
        }
    }
}

impl<C: KeyCode> Tile<C> {
    /// Computes the scores of `MR` rows against `NV` panels.
    ///
    /// # Safety
    /// There are `MR` rows of quads and their sums, `NV` panels and their numbers, and in `out` `MR` rows of `NV × 16`
    /// writable floats, `SCORE_STRIDE` apart.
    #[inline(always)]
    unsafe fn run<S: Int8Dot, const MR: usize, const NV: usize, const LEVEL: u8>(self, s: S) {
        let QuerySize { quads, sums } = self.size;
        let loads = quads / C::HALVES;
        let (blocks, block_loads) = match C::BLOCK_LOADS {
            Some(block_loads) => (sums, block_loads),
            None => (1, loads),
        };
        let later = Later::in_order(self.later.cast(), 4 * LANES, NV);
        if LEVEL != NO_LEVEL {
            s.prefetch_pages(const { Level::of(LEVEL) }, later.of(0, 0), NV * loads * 4 * LANES);
        }
        let mut scores = [[C::none(s); NV]; MR];
        for block in 0..blocks {
            let mut sums = [[s.start(0); NV]; MR];
            for r in 0..MR {
                // SAFETY: row `r < MR` has a sum for each block.
                sums[r] = [C::start(s, unsafe { (*self.rows.add(r * blocks + block)).total }); NV];
            }
            for load in block * block_loads..(block + 1) * block_loads {
                if LEVEL != NO_LEVEL {
                    for n in 0..NV {
                        s.prefetch_line(const { Level::of(LEVEL) }, later.of(load, n));
                    }
                }
                // The halves of a load are quads of either half of the block.
                let quad = load + block * block_loads * (C::HALVES - 1);
                // SAFETY: the panels have `loads` times 64 bytes, and the rows as many quads, or twice as many.
                unsafe { self.multiply::<S, MR, NV>(s, load, quad, &mut sums) };
            }
            for r in 0..MR {
                // SAFETY: row `r < MR` has a sum for each block.
                let total = unsafe { (*self.rows.add(r * blocks + block)).total };
                for n in 0..NV {
                    // SAFETY: the caller guarantees the numbers of panel `n < NV`.
                    scores[r][n] = unsafe { self.code.add(s, BlockAt { n, block, total }, sums[r][n], scores[r][n]) };
                }
            }
        }
        for r in 0..MR {
            // SAFETY: row `r < MR`.
            let factor = s.splat(unsafe { (*self.rows.add(r * blocks)).factor });
            for n in 0..NV {
                // SAFETY: the caller guarantees the numbers of panel `n < NV` and sixteen scores of row `r < MR`.
                unsafe {
                    let score = self.code.score(s, factor, n, scores[r][n]);
                    s.store(self.out.add(r * SCORE_STRIDE + n * LANES), score);
                }
            }
        }
    }

    /// Adds the products of quad `quad` of `MR` rows, and its other one if there are two, and load `load` of `NV` panels.
    ///
    /// # Safety
    /// There are `NV` panels of more loads, and `MR` rows with these quads.
    #[inline(always)]
    unsafe fn multiply<S: Int8Dot, const MR: usize, const NV: usize>(
        self,
        s: S,
        load: usize,
        quad: usize,
        sums: &mut [[S::Sums; NV]; MR],
    ) {
        let QuerySize { quads, .. } = self.size;
        // SAFETY: the caller guarantees load `load` of panel `n < NV`.
        let keys = |n: usize| unsafe { C::keys(s, self.keys.add((n * (quads / C::HALVES) + load) * 4 * LANES)) };
        let mut four = [keys(0); NV];
        for n in 1..NV {
            four[n] = keys(n);
        }
        for r in 0..MR {
            let query = self.queries.wrapping_add(r * quads + quad);
            for n in 0..NV {
                // SAFETY: the caller guarantees the quads of row `r < MR`.
                sums[r][n] = unsafe { C::dot(s, sums[r][n], query, four[n]) };
            }
        }
    }
}
