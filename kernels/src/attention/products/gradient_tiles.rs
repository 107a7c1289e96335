//! Products of the backward pass by a matrix unit, of numbers in parts (`matmul/bf16_parts.rs`).
//!
//! ```text
//! dP ← dO Vᵀ                        rows by keys, as scores are: `bf16_tiles.rs`
//! dV ← dV + Pᵀ dO;  dK ← dK + dSᵀ Q     a row of the left operand for each key, 32 query rows a step
//! dQ ← dQ + dS K                    a row for each query row, 32 keys a step
//! ```
//! Steps begin at multiples of 32 of the row block's rows and of the key block's keys, and each is added to the sums that are there.

use crate::attention::products::bf16_tiles::Bf16Tiles;
#[cfg(matrix_unit_model)]
use crate::attention::products::bf16_tiles::model;
use crate::attention::products::multiply::{Arithmetic, Multiply};
use crate::attention::products::operands::{QueryRows, RunKeys};
use crate::attention::products::score_run::ScoreRun;
use crate::attention::scratch::SCORE_STRIDE;
use crate::attention::steps::softmax::WeightForm;
use crate::matmul::bf16_parts::{self, MAX_PARTS, PartPairs, Parts, evenly};
#[cfg(not(matrix_unit_model))]
use crate::matmul::operands::Bf16Pairs;
use crate::simd::tiles::{BLOCK, Product, Start, TILE, TileBlock, Tiles};
#[cfg(not(matrix_unit_model))]
use crate::simd::{Bf16Dot, Bf16DotWork};
use crate::simd::{Bf16x2, LANES, Simd, unit};
use crate::tensor::rows::KEY_BLOCK;
use core::ops::Range;

/// Number of panels of a step.
const STEP_PANELS: usize = 2 * TILE / LANES;

/// Computes products of rows and keys, as [`Multiply::scores`] does.
///
/// # Safety
/// As [`Multiply::scores`], for an arithmetic of parts.
pub(crate) unsafe fn scores<S: Simd>(s: S, by: Arithmetic, run: &mut ScoreRun<'_>, rows: QueryRows<'_>, keys: RunKeys) {
    // SAFETY: same contract.
    unsafe {
        match by {
            Arithmetic::PartTiles => Bf16Tiles::<3>::scores(s, run, rows, keys),
            _ => Bf16Tiles::<1>::scores(s, run, rows, keys),
        }
    }
}

/// Block of numbers, `[row][SCORE_STRIDE]`, of which some panels of sixteen columns are not 0.
#[derive(Clone)]
pub(crate) struct Block<'a> {
    pub(crate) numbers: &'a [f32],
    pub(crate) rows: usize,
    pub(crate) panels: Range<usize>,
}

/// Returns the panels of the steps that have some of these.
fn steps(panels: &Range<usize>) -> Range<usize> {
    panels.start / STEP_PANELS * STEP_PANELS..panels.end.next_multiple_of(STEP_PANELS)
}

/// Left operand: rows of numbers, `[row][part][pair]`.
pub(crate) struct Left<'a> {
    floats: &'a [f32],
    parts: usize,
    /// Number of pairs of a part of a row.
    pairs: usize,
    /// Rows, and panels of each, that are there.
    rows: Range<usize>,
    panels: Range<usize>,
}

/// Makes a row of each key of a block, whose elements are its numbers of the query rows.
pub(crate) fn columns<'a, S: Simd>(s: S, block: Block<'_>, parts: usize, out: &'a mut [f32]) -> Left<'a> {
    let pairs = bf16_parts::pairs(block.rows);
    let rows = block.panels.start * LANES..block.panels.end * LANES;
    split(s, Split { block, parts, lie: Lie::Columns, out: &mut *out });
    Left { floats: out, parts, pairs, rows, panels: 0..pairs / PANEL_PAIRS }
}

/// Makes a row of each query row of a block, whose elements are its numbers of the keys.
pub(crate) fn rows<'a, S: Simd>(s: S, block: Block<'_>, parts: usize, out: &'a mut [f32]) -> Left<'a> {
    let (rows, panels) = (0..block.rows, steps(&block.panels));
    split(s, Split { block, parts, lie: Lie::Rows, out: &mut *out });
    Left { floats: out, parts, pairs: bf16_parts::pairs(KEY_BLOCK), rows, panels }
}

/// Number of pairs of a panel.
const PANEL_PAIRS: usize = LANES / 2;

/// How the numbers of a block are to lie: in rows as they are, or a row for each of its columns.
#[derive(Clone, Copy)]
enum Lie {
    Rows,
    Columns,
}

/// Numbers to be written in parts.
struct Split<'a, 'b> {
    block: Block<'a>,
    parts: usize,
    lie: Lie,
    out: &'b mut [f32],
}

fn split<S: Simd>(s: S, split: Split<'_, '_>) {
    #[cfg(not(matrix_unit_model))]
    // SAFETY: the work has no contract.
    unsafe {
        s.with_bf16_dot(split);
    }
    #[cfg(matrix_unit_model)]
    split.run_as::<S, model::Rounded>(s);
}

/// Has no contract: it is safe for any block.
#[cfg(not(matrix_unit_model))]
impl Bf16DotWork for Split<'_, '_> {
    type Output = ();
    #[inline(always)]
    unsafe fn run<S: Bf16Dot>(self, s: S) {
        self.run_as::<S, Bf16Pairs>(s);
    }
}

impl Split<'_, '_> {
    /// Writes the numbers; `W` rounds to bfloat16.
    #[inline(always)]
    fn run_as<S: Simd, W: WeightForm<S>>(self, s: S) {
        assert!(self.block.numbers.len() >= self.block.rows * SCORE_STRIDE && self.parts <= MAX_PARTS);
        assert!(self.block.panels.end <= KEY_BLOCK / LANES);
        s.vectorize(
            #[inline(always)]
            || match self.lie {
                Lie::Rows => self.rows::<S, W>(s),
                Lie::Columns => self.columns::<S, W>(s),
            },
        );
    }

    /// Writes rows as they are: zeros in panels of steps beside those that are there.
    #[inline(always)]
    fn rows<S: Simd, W: WeightForm<S>>(self, s: S) {
        let Self { block: Block { numbers, rows, panels }, parts, out, .. } = self;
        let pairs = bf16_parts::pairs(KEY_BLOCK);
        for (numbers, out) in numbers.chunks_exact(SCORE_STRIDE).zip(out.chunks_exact_mut(parts * pairs)).take(rows) {
            for panel in steps(&panels) {
                let there = panels.contains(&panel);
                // SAFETY: a panel of the row; its parts lie inside those of the row.
                unsafe {
                    let x = if there { s.load(numbers[panel * LANES..][..LANES].as_ptr()) } else { s.splat(0.0) };
                    store::<S, W>(s, x, out.as_mut_ptr(), panel, [parts, pairs]);
                }
            }
        }
    }

    /// Writes a row for each column: zeros for rows that fill up the last step.
    #[inline(always)]
    fn columns<S: Simd, W: WeightForm<S>>(self, s: S) {
        let Self { block: Block { numbers, rows, panels }, parts, out, .. } = self;
        let pairs = bf16_parts::pairs(rows);
        assert!(out.len() >= panels.end * LANES * parts * pairs);
        for panel in panels {
            for group in 0..pairs / PANEL_PAIRS {
                let (mut square, mut copy) = ([[0.0; LANES]; LANES], [[0.0; LANES]; LANES]);
                let from = &numbers[(group * LANES).min(rows) * SCORE_STRIDE..];
                let here = rows.saturating_sub(group * LANES).min(LANES);
                for (row, to) in from.chunks(SCORE_STRIDE).take(here).zip(&mut copy) {
                    to.copy_from_slice(&row[panel * LANES..][..LANES]);
                }
                // SAFETY: both squares have sixteen rows of sixteen floats; the parts of a column lie inside its row of `out`.
                unsafe {
                    s.transpose(copy.as_ptr().cast(), size_of_val(&copy[0]) as isize, square.as_mut_ptr().cast());
                    for (lane, column) in square.iter().enumerate() {
                        let row = out.as_mut_ptr().add((panel * LANES + lane) * parts * pairs);
                        store::<S, W>(s, s.load(column.as_ptr()), row, group, [parts, pairs]);
                    }
                }
            }
        }
    }
}

/// Writes the parts of a panel of a row, `pairs` floats apart.
///
/// # Safety
/// The row has the parts, and each the panel.
#[inline(always)]
unsafe fn store<S: Simd, W: WeightForm<S>>(s: S, x: S::V, row: *mut f32, panel: usize, [parts, pairs]: [usize; 2]) {
    let mut rest = x;
    for part in 0..parts {
        // SAFETY: the caller guarantees the part of the row.
        rest = s.sub(rest, unsafe { W::store(s, row.add(part * pairs), panel, rest) });
    }
}

/// Sums that products are added to: a row for each of the left operand.
pub(crate) struct Sums<'a> {
    pub(crate) floats: &'a mut [f32],
    /// Floats from one row to the next, and vectors of a row that have sums.
    pub(crate) stride: usize,
    pub(crate) vecs: usize,
    pub(crate) start: Added,
}

/// What a product is added to.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Added {
    ToNothing,
    ToSums,
}

/// Adds the product of rows by values, pairs of elements of which are pairs of the rows.
///
/// # Safety
/// There are values for each pair of a step, in whole vectors of `16 · vecs` columns, of every part.
pub(crate) unsafe fn add_product<S: Simd>(s: S, left: Left<'_>, values: Parts, sums: Sums<'_>) {
    let Left { floats, parts, pairs, rows, panels } = left;
    let (row_floats, first) = (parts * pairs, panels.start * PANEL_PAIRS);
    assert!(first.is_multiple_of(TILE) && panels.end * PANEL_PAIRS <= pairs && floats.len() >= rows.end * row_floats);
    let least = rows.end.saturating_sub(1) * sums.stride + sums.vecs * LANES;
    assert!(rows.is_empty() || sums.floats.len() >= least, "no room for the sums");
    let [of_rows, of_values] = [pairs * size_of::<Bf16x2>(), values.bytes].map(evenly);
    let part_pairs = PartPairs::of(&of_rows[..parts], &of_values[..values.count]);
    let mut tiles = unit::tiles(s);
    for row in rows.clone().step_by(BLOCK) {
        for vec in (0..sums.vecs).step_by(2) {
            // SAFETY: the rows and their pairs lie inside `floats`, as asserted, and so do sums; the caller guarantees
            // values.
            unsafe {
                let b = values.first.at(first).add(vec * LANES);
                let block = TileBlock {
                    rows: BLOCK.min(rows.end - row),
                    pairs: part_pairs.as_slice(),
                    a: floats.as_ptr().add(row * row_floats + first).cast(),
                    a_stride: row_floats * size_of::<f32>(),
                    b: [Some(b.cast()), (vec + 1 < sums.vecs).then(|| b.add(LANES).cast())],
                    b_stride: values.first.step() as usize * size_of::<Bf16x2>(),
                    steps: panels.len() / STEP_PANELS,
                    start: if sums.start == Added::ToSums { Start::There } else { Start::Zero },
                    c: sums.floats.as_mut_ptr().add(row * sums.stride + vec * LANES).cast(),
                    c_stride: sums.stride * size_of::<f32>(),
                };
                tiles.multiply(s, Product::Bf16, block);
            }
        }
    }
}
