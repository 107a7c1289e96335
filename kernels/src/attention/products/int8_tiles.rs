//! Products of int8 by a matrix unit: loops of `tiles.rs`. Sums are exact integers, so results are those of `int8.rs`.
//!
//! The unit multiplies bytes by bytes. A weight of 16 bits is two: 256 · upper + lower, the upper byte with the weight's sign.

use crate::attention::products::int8;
use crate::attention::products::multiply::{Arithmetic, Multiply};
use crate::attention::products::operands::{
    KeySource, KeysToPack, Packing, QueryRow, QueryRows, RunKeys, ValuesToPack,
};
use crate::attention::products::pv::ValueSums;
use crate::attention::products::qk_int8::{Int8Queries, correct_zero_sums, factors_overflow};
use crate::attention::products::score_run::ScoreRun;
use crate::attention::products::tiles::{self, Part, ScoreOperands, WeightPlane};
use crate::attention::scratch::SCORE_STRIDE;
use crate::attention::steps::score_passes::ScoreBlock;
use crate::kv::key_block::{BlockValues, ColumnValues, Columns, Keys};
use crate::matmul::int8::{LARGEST_WEIGHT, QUAD, QuerySize, ValueQuad, WEIGHT_UNIT, quads};
use crate::matmul::key_code::Int8Keys;
use crate::matmul::operands::Int8Fours;
use crate::simd::aligned::elements_mut;
use crate::simd::tiles::{BLOCK, Product, TILE, WHOLE};
use crate::simd::{LANES, Query4, Simd, Words4};
use crate::tensor::rows::{KEY_BLOCK, Rows};
use core::ops::Range;

/// Products of int8 by a matrix unit.
pub(crate) struct Int8Tiles;

/// Number of fours of keys of a panel.
const PANEL_FOURS: usize = LANES / QUAD;

/// Weights of a row by bytes, in floats: behind the words that they are made of, a byte for each key of a block.
const LOWER: WeightPlane<'_> = WeightPlane { product: Product::UnsignedBytes, first: KEY_BLOCK / 2, pairs: WHOLE };
const UPPER: WeightPlane<'_> =
    WeightPlane { product: Product::Bytes, first: LOWER.first + KEY_BLOCK / QUAD, pairs: WHOLE };
const _: () = assert!(UPPER.first + KEY_BLOCK / QUAD <= LARGEST_WEIGHT);

/// Returns true if the unit multiplies keys of this length: in whole steps. The emulator of `.ci/emulated` takes all bytes for
/// unsigned ones.
pub(crate) fn takes(head_dim: usize) -> bool {
    quads(head_dim).is_multiple_of(TILE) && !cfg!(matrix_unit_emulated)
}

impl Multiply for Int8Tiles {
    const FINITE: bool = true;
    // Two for each of pairs; a weight of 16 bits takes two.
    const PRODUCTS: [f64; 2] = [32.0, 16.0];
    const TIME: f64 = 0.3;
    const ROW_BLOCK: usize = BLOCK;

    fn tile_rows<S: Simd>() -> usize {
        TILE
    }

    fn query_floats(head_dim: usize) -> usize {
        Int8Fours::query_floats(head_dim)
    }

    unsafe fn store_query<S: Simd>(s: S, query: QueryRow<'_>, room: &mut [f32], to: &mut [f32]) {
        let quads = quads(query.head_dim);
        // SAFETY: same contract.
        unsafe { Int8Fours::store_query(s, query, room, to) }
        // The bytes of the quads together; behind them, the factor stays where it was.
        for quad in 0..quads {
            to[quad] = to[quad * (size_of::<Query4>() / size_of::<f32>())];
        }
    }

    fn reads_keys(keys: &Keys, rows: usize, head_dim: usize) -> bool {
        Int8Fours::reads_keys(keys, rows, head_dim)
    }

    fn panel_floats(source: KeySource<'_>, head_dim: usize) -> usize {
        Int8Fours::panel_floats(source, head_dim)
    }

    fn depth(head_dim: usize) -> usize {
        quads(head_dim)
    }

    unsafe fn pack_keys<S: Simd>(s: S, to_pack: KeysToPack<'_>, out: &mut [f32]) -> Keys {
        // SAFETY: same contract.
        unsafe { Int8Fours::pack_keys(s, to_pack, out) }
    }

    unsafe fn scores<S: Simd>(s: S, run: &mut ScoreRun<'_>, queries: QueryRows<'_>, RunKeys { keys, later }: RunKeys) {
        // SAFETY: the caller guarantees the keys' scales.
        let (panels, code) = unsafe { int8::panels_of(s, run.rows, keys, later) };
        let size = QuerySize::int8(queries.head_dim);
        let queries = Int8Queries { rows: queries.rows, size };
        let operands = ScoreOperands {
            product: Product::Bytes,
            pairs: WHOLE,
            queries: queries.rows,
            query_bytes: size.floats() * size_of::<f32>(),
            depth: size.quads,
            later: later.filter(|_| !panels.are_scattered()),
        };
        let (first, all) = (run.panels.start, run.rows);
        s.vectorize(
            #[inline(always)]
            // SAFETY: the caller guarantees the queries, each with a factor, the panels, and their scales; sums are those of rows of
            // scores.
            || unsafe {
                let panel_at = |n| panels.at(n).cast();
                tiles::scores(s, run, operands, panel_at, |sums, rows, panels| {
                    for (n, row) in rows.enumerate() {
                        let factor = queries.factor(row);
                        for (place, panel) in panels.clone().enumerate() {
                            let sums = sums.add(n * SCORE_STRIDE + place * LANES).cast::<[f32; LANES]>();
                            *sums = score(*sums, factor, code, panel - first);
                        }
                    }
                });
            },
        );
        // SAFETY: the caller guarantees the queries, each with a factor.
        let factors = (0..all).map(|row| unsafe { queries.factor(row) });
        if factors_overflow(factors.clone()) {
            correct_zero_sums(factors, code, first, run.out);
        }
    }

    unsafe fn prepare_weights<S: Simd>(s: S, mut row_block: ScoreBlock<'_>, values: BlockValues, from: Arithmetic) {
        let words = ScoreBlock { scores: row_block.scores, ..row_block };
        // SAFETY: same contract.
        unsafe { Int8Fours::prepare_weights(s, words, values, from) }
        s.vectorize(
            #[inline(always)]
            || {
                row_block.for_each_row(
                    #[inline(always)]
                    // SAFETY: panels lie inside the row, which has words for them.
                    |_, panels, weights| unsafe { part_words(weights, panels) },
                );
            },
        );
        for plane in [LOWER, UPPER] {
            tiles::clear_beside_spans(&mut row_block, PANEL_FOURS, plane.first);
        }
    }

    fn reads_values(columns: &Columns, _: usize) -> bool {
        matches!(columns.values, ColumnValues::Int8(fours) if !fours.are_scattered())
    }

    fn value_floats(keys: usize) -> usize {
        keys.div_ceil(QUAD)
    }

    unsafe fn pack_values<S: Simd>(_: S, values: ValuesToPack, out: &mut [f32]) -> ColumnValues {
        let ValuesToPack { values: ColumnValues::Int8(fours), size: [n, cols], packing, .. } = values else {
            unreachable!("values are bytes")
        };
        let (width, out) = (cols.next_multiple_of(LANES), elements_mut::<ValueQuad>(out));
        if packing == Packing::Needed {
            for (four, out) in out[..n.div_ceil(QUAD) * width].chunks_exact_mut(width).enumerate() {
                // SAFETY: a four of keys, which the caller guarantees, in whole vectors of columns.
                out.copy_from_slice(unsafe { core::slice::from_raw_parts(fours.at(four), width) });
            }
        }
        ColumnValues::Int8(Rows::strided(out.as_ptr(), width as isize, 1))
    }

    unsafe fn sums<S: Simd>(s: S, sums: &mut ValueSums<'_>, values: ColumnValues) {
        let ColumnValues::Int8(values) = values else { unreachable!("values are bytes") };
        let mut lower: Part = [[0.0; BLOCK]; BLOCK];
        s.vectorize(
            #[inline(always)]
            // SAFETY: the caller guarantees the values and the outputs; weights beside spans were cleared.
            || unsafe {
                tiles::sums(s, sums, values, PANEL_FOURS, |tiles, steps, vecs, sums| {
                    steps.multiply(s, tiles, LOWER, vecs.clone(), &mut lower);
                    steps.multiply(s, tiles, UPPER, vecs, sums);
                    let rows = steps.weights.chunks_exact(SCORE_STRIDE).take(steps.rows);
                    let largest = rows.map(|row| row[LARGEST_WEIGHT]);
                    for ((sums, lower), largest) in sums.iter_mut().zip(&lower).zip(largest) {
                        for (sum, lower) in sums.iter_mut().zip(lower) {
                            let total = (sum.to_bits() << 8).wrapping_add(lower.to_bits()).cast_signed();
                            // Two products, as in `Int8Fours`.
                            *sum = total as f32 * WEIGHT_UNIT * largest;
                        }
                    }
                });
            },
        );
    }
}

/// Returns the scores of a panel's integer sums.
#[inline(always)]
fn score(sums: [f32; LANES], factor: f32, code: Int8Keys<'_>, panel: usize) -> [f32; LANES] {
    let sums = sums.map(|sum| sum.to_bits().cast_signed() as f32);
    match code.0 {
        Some(scales) => {
            let scales = &scales[panel * LANES..][..LANES];
            core::array::from_fn(|lane| factor * scales[lane] * sums[lane])
        }
        None => sums.map(|sum| factor * sum),
    }
}

/// Parts the 16-bit weights of some panels of a row into their bytes, in the order of keys.
///
/// # Safety
/// The panels lie inside the row, of [`SCORE_STRIDE`] floats, which has [`Words4`] for them.
#[inline(always)]
unsafe fn part_words(row: *mut f32, panels: Range<usize>) {
    for four in panels.start * PANEL_FOURS..panels.end * PANEL_FOURS {
        // SAFETY: the caller guarantees the words; bytes lie behind all words of a block, inside the row.
        unsafe {
            let Words4 { even, odd } = *row.cast::<Words4>().add(four);
            let (even, odd) = (even.cast_unsigned(), odd.cast_unsigned());
            *row.add(LOWER.first + four).cast::<u32>() = even & 0x00FF_00FF | (odd & 0x00FF_00FF) << 8;
            *row.add(UPPER.first + four).cast::<u32>() = even >> 8 & 0x00FF_00FF | odd & 0xFF00_FF00;
        }
    }
}
