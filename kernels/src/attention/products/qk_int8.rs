//! QKᵀ of int8 queries and packed keys of eight or four bits.
//!
//! A tile is that of `dot_tile.rs` with four elements at a time and integer sums, so one chain is enough. Keys of four bits
//! have a scale for each block of their elements: their sums are taken block by block, and added up as floats.

use crate::attention::products::score_run::{ScoreRun, Strip};
use crate::attention::scratch::SCORE_STRIDE;
use crate::matmul::dot_tile::{self, Later};
use crate::matmul::int8::{MAX_HEAD_DIM, QUAD, QuerySize, Row};
use crate::matmul::key_code::{BlockAt, KeyCode};
use crate::matmul::prefetch::tile_prefetches;
use crate::simd::{FIRST, Int8Dot, Int8DotWork, LANES, Level, NO_LEVEL, Query4, SECOND};
use crate::tensor::rows::Rows;

/// Queries as bytes, one after the other: quads, then the [`Row`] of each integer sum of a score.
#[derive(Clone, Copy)]
pub(crate) struct Int8Queries<'a> {
    /// Address of each query.
    pub(crate) rows: &'a [*const f32],
    /// Sizes of a row.
    pub(crate) size: QuerySize,
}

impl Int8Queries<'_> {
    /// Returns the factor of a row's first sum.
    ///
    /// # Safety
    /// The row is readable.
    #[inline(always)]
    pub(crate) unsafe fn factor(self, row: usize) -> f32 {
        // SAFETY: the caller guarantees the row, with at least one sum.
        unsafe { (*self.at(row).1).factor }
    }

    /// Returns the addresses of a row's quads and of its sums. They wrap.
    #[inline(always)]
    fn at(self, row: usize) -> (*const Query4, *const Row) {
        let quads = self.rows[row].cast::<Query4>();
        (quads, quads.wrapping_add(self.size.quads).cast())
    }
}

/// Scores to compute of queries as bytes. To compute them requires that the queries are readable, one after the other, and the keys
/// too.
pub(crate) struct IntegerScores<'a, 'b, C> {
    pub(crate) run: &'b mut ScoreRun<'a>,
    pub(crate) queries: Int8Queries<'b>,
    pub(crate) keys: IntegerKeys<C>,
}

/// Packed keys of a run, and the numbers that belong to them. To compute scores requires that all panels, and their numbers, are
/// readable.
#[derive(Clone, Copy)]
pub(crate) struct IntegerKeys<C> {
    /// Panels: see `int8.rs` and `int4.rs`.
    pub(crate) panels: Rows<i8>,
    pub(crate) code: C,
}

/// Number of panels of a tile of many rows: fewer with float sums over blocks beside the integer ones.
const fn tile_vecs<S: Int8Dot, C: KeyCode>() -> usize {
    if C::BLOCK_LOADS.is_some() { S::DOT_VECS } else { S::TILE_VECS }
}

/// The contract is that of [`IntegerScores`].
impl<C: KeyCode> Int8DotWork for IntegerScores<'_, '_, C> {
    type Output = ();
    #[inline(always)]
    unsafe fn run<S: Int8Dot>(self, s: S) {
        let Self { run, queries, keys } = self;
        let (all, QuerySize { quads, sums }) = (run.rows, queries.size);
        keys.code.check(queries.size, run.panels.len());
        assert!(quads <= MAX_HEAD_DIM / QUAD && sums > 0 && queries.rows.len() == all);
        let vecs = match keys.panels.are_scattered() {
            true => 1,
            false => dot_tile::panels(s, all, [S::DOT_VECS, const { tile_vecs::<S, C>() }]),
        };
        // SAFETY: rows and panels of a strip are those of the run, so by the assertions above, and its own, all addresses are inside
        // the slices; the caller guarantees the keys.
        run.for_each_strip::<S>(run.group_in_order(vecs), vecs, |run, strip| unsafe {
            match dot_tile::level(s, all) {
                FIRST if const { S::MAY_HAVE_LARGE_L1 } => {
                    by_tile_vecs!(strip.vecs, most S::DOT_VECS, |NV| s.vectorize(
                        #[inline(always)]
                        || strip_scores::<S, C, NV, FIRST>(s, run, strip, queries, keys)
                    ))
                }
                SECOND if const { S::PREFETCHES } => s.vectorize(
                    #[inline(always)]
                    || strip_scores::<S, C, 1, SECOND>(s, run, strip, queries, keys),
                ),
                _ => by_tile_vecs!(strip.vecs, most const { tile_vecs::<S, C>() }, |NV| s.vectorize(
                    #[inline(always)]
                    || strip_scores::<S, C, NV, NO_LEVEL>(s, run, strip, queries, keys)
                )),
            }
        });
        // All blocks of a row have its factor.
        // SAFETY: the caller guarantees the queries, each with a sum.
        let factors = (0..all).map(|row| unsafe { queries.factor(row) });
        if factors_overflow(factors.clone()) {
            correct_zero_sums(factors, keys.code, run.panels.start, run.out);
        }
    }
}

/// Largest query factor that no key scale makes infinite: key scales are at most `f32::MAX / 127`.
const SAFE_FACTOR: f32 = 126.0;

/// Returns true if some query's factor may make a key's scale infinite.
#[inline(always)]
pub(crate) fn factors_overflow(mut factors: impl Iterator<Item = f32>) -> bool {
    factors.any(|factor| factor.abs() > SAFE_FACTOR)
}

/// Sets the scores of sums of 0 to 0 where the factor overflowed: they were computed as 0 · ∞, which is NaN. Any other sum
/// times such a factor overflows, too, and its score is ±∞ rightly.
#[cold]
#[inline(never)]
pub(crate) fn correct_zero_sums(
    factors: impl Iterator<Item = f32>,
    code: impl KeyCode,
    first_panel: usize,
    out: &mut [f32],
) {
    for (factor, scores) in factors.zip(out.chunks_mut(SCORE_STRIDE)) {
        if factor.is_nan() {
            continue; // The query is not finite.
        }
        for (key, score) in scores[first_panel * LANES..].iter_mut().enumerate() {
            if score.is_nan() && !code.scale(key).is_some_and(f32::is_nan) {
                *score = 0.0;
            }
        }
    }
}

/// Addresses of a tile's operands and of its scores.
#[derive(Clone, Copy)]
struct Tile<C> {
    /// First query, and its sums.
    query: *const Query4,
    sums: *const Row,
    keys: *const i8,
    /// Keys to prefetch, in the order in which these are read: these themselves, if later ones are not this tile's to prefetch.
    later: *const i8,
    code: C,
    size: QuerySize,
    out: *mut f32,
}

/// Computes the scores of a strip, `NV` panels at a time.
///
/// # Safety
/// The strip's tiles have the contract of [`Tile::run`].
#[inline(always)]
unsafe fn strip_scores<S: Int8Dot, C: KeyCode, const NV: usize, const LEVEL: u8>(
    s: S,
    run: &mut ScoreRun<'_>,
    strip: Strip,
    queries: Int8Queries<'_>,
    keys: IntegerKeys<C>,
) {
    let (all, panels, size) = (run.rows, run.panels.clone(), queries.size);
    let out = run.out.as_mut_ptr();
    run.for_each_tile::<S, NV>(
        s,
        &strip,
        S::INT8_DOT_ROWS,
        #[inline(always)]
        |rows, panel| {
            let (row, here) = (rows.start, rows.len());
            // SAFETY: the caller guarantees the tile's rows and panels.
            unsafe {
                let (n, bytes) = (panel - panels.start, size.quads / C::HALVES * 4 * LANES);
                let at = keys.panels.at(n);
                let prefetches = tile_prefetches::<S>(row, here, all);
                let (query, sums) = queries.at(row);
                let tile = Tile {
                    query,
                    sums,
                    keys: at,
                    later: match prefetches {
                        true => dot_tile::behind(keys.panels, [n, panels.len()], bytes, Later::far(s, all)),
                        false => at,
                    },
                    code: keys.code.panel(n),
                    size,
                    out: out.add(row * SCORE_STRIDE + panel * LANES),
                };
                by_tile_rows!(here, most dot_tile::most_rows(S::INT8_DOT_ROWS, LEVEL), |MR| tile.run::<S, MR, NV, LEVEL>(s));
            }
        },
    );
}

impl<C: KeyCode> Tile<C> {
    /// Returns the address of the sums of query `r`. It wraps.
    #[inline(always)]
    fn sums_of(&self, r: usize) -> *const Row {
        self.sums.cast::<f32>().wrapping_add(r * self.size.floats()).cast()
    }

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
        let mut scores = [[s.splat(0.0); NV]; MR];
        for block in 0..blocks {
            let mut sums = [[s.start(0); NV]; MR];
            for r in 0..MR {
                // SAFETY: row `r < MR` has a sum for each block.
                sums[r] = [C::start(s, unsafe { (*self.sums_of(r).add(block)).total }); NV];
            }
            for load in block * block_loads..(block + 1) * block_loads {
                if LEVEL != NO_LEVEL {
                    for n in 0..NV {
                        s.prefetch_line(const { Level::of(LEVEL) }, later.of(load, n));
                    }
                }
                // The halves of a load are quads of either half of the block.
                let quad = load + block * block_loads * (C::HALVES - 1);
                // SAFETY: the panels have `loads` times 64 bytes, and the rows a quad or two for each.
                unsafe { self.multiply::<S, MR, NV>(s, load, quad, &mut sums) };
            }
            for r in 0..MR {
                // SAFETY: row `r < MR` has a sum for each block.
                let total = unsafe { (*self.sums_of(r).add(block)).total };
                for n in 0..NV {
                    // SAFETY: the caller guarantees the numbers of panel `n < NV`.
                    scores[r][n] = unsafe { self.code.add(s, BlockAt { n, block, total }, sums[r][n], scores[r][n]) };
                }
            }
        }
        for r in 0..MR {
            // SAFETY: row `r < MR`.
            let factor = s.splat(unsafe { (*self.sums_of(r)).factor });
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
        let size @ QuerySize { quads, .. } = self.size;
        // SAFETY: the caller guarantees load `load` of panel `n < NV`.
        let keys = |n: usize| unsafe { C::keys(s, self.keys.add((n * (quads / C::HALVES) + load) * 4 * LANES)) };
        let mut four = [keys(0); NV];
        for n in 1..NV {
            four[n] = keys(n);
        }
        for r in 0..MR {
            let query = self.query.cast::<f32>().wrapping_add(r * size.floats()).cast::<Query4>().wrapping_add(quad);
            for n in 0..NV {
                // SAFETY: the caller guarantees the quads of row `r < MR`.
                sums[r][n] = unsafe { C::dot(s, sums[r][n], query, four[n]) };
            }
        }
    }
}
