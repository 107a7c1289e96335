//! What an arithmetic of products is.

use crate::attention::products::operands::{KeySource, KeysToPack, QueryRow, QueryRows, RunKeys, ValuesToPack};
use crate::attention::products::pv::ValueSums;
use crate::attention::products::score_run::ScoreRun;
use crate::attention::scratch::MAX_ROW_BLOCK;
use crate::attention::steps::score_passes::ScoreBlock;
use crate::attention::steps::softmax::softmax;
use crate::attention::steps::softmax_merge::SoftmaxState;
use crate::kv::key_block::{BlockValues, ColumnValues, Columns, Keys};
use crate::matmul::operands::Floats;
use crate::simd::Simd;

/// Arithmetic of products: how queries and keys, weights and values lie in memory, and the loops that multiply them.
///
/// Queries become rows of [`Self::query_floats`] floats of scratch. Keys are [`Keys`], packed by [`Self::pack_keys`] where they
/// cannot be [read in place](Self::reads_keys). Weights lie in rows of scores. Values are [`Columns`] of a block, packed or read in
/// place as keys are.
pub(crate) trait Multiply {
    /// True if values are always finite.
    const FINITE: bool = false;
    /// True if contiguous `f32` queries are read where they lie.
    const READS_QUERIES: bool = false;
    /// True if the [softmax](Self::softmax) stores weights as they are multiplied.
    const ROUNDS_IN_SOFTMAX: bool = false;
    /// True if that softmax multiplies scores by a positive factor. Otherwise [`Self::scores`] does.
    const SCALES_IN_SOFTMAX: bool = false;
    /// Numbers of products with keys, and with values, in the time of an FMA, at peak.
    const PRODUCTS: [f64; 2] = [1.0; 2];
    /// Time of scores, softmax and sums of many rows, as a part of that with products of floats.
    const TIME: f64 = 1.0;
    /// Number of rows whose time packing a key block takes.
    const PACKING: usize = 3;
    /// Largest number of bfloat16 [parts](crate::matmul::bf16_parts) of an operand; 0 if operands have none.
    const PARTS: usize = 0;
    /// Largest number of rows of a row block.
    const ROW_BLOCK: usize = MAX_ROW_BLOCK;

    /// Returns the number of rows of a tile, which one span describes.
    fn tile_rows<S: Simd>() -> usize {
        S::TILE_ROWS
    }

    /// Returns the number of floats of scratch that a query takes.
    fn query_floats(head_dim: usize) -> usize;
    /// Writes a query to scratch. `room` is scratch for a row.
    ///
    /// # Safety
    /// The query is readable.
    unsafe fn store_query<S: Simd>(s: S, query: QueryRow<'_>, room: &mut [f32], to: &mut [f32]);

    /// Returns true if a task of `rows` rows reads these keys, of `head_dim` elements, where they lie.
    fn reads_keys(keys: &Keys, rows: usize, head_dim: usize) -> bool;
    /// Returns the number of floats of scratch that sixteen packed keys take.
    fn panel_floats(source: KeySource<'_>, head_dim: usize) -> usize;
    /// Returns the number of steps in which a packed panel is read.
    fn depth(head_dim: usize) -> usize;
    /// Packs keys into `out`, unless that is done, and returns them as they lie there.
    ///
    /// # Safety
    /// [`KeysToPack::all`] keys from the first on are readable; those of a cache in whole panels, with their numbers. The result is used
    /// while `out` holds them.
    unsafe fn pack_keys<S: Simd>(s: S, keys: KeysToPack<'_>, out: &mut [f32]) -> Keys;
    /// Computes the scores of a row block against a run of keys.
    ///
    /// # Safety
    /// Every query and all keys of the run are readable, in the forms that this arithmetic reads; queries in scratch lie one
    /// after the other.
    unsafe fn scores<S: Simd>(s: S, run: &mut ScoreRun<'_>, queries: QueryRows<'_>, keys: RunKeys);

    /// Turns scores into weights, and merges them into the rows' state. `factor` is 1 unless the softmax
    /// [scales](Self::SCALES_IN_SOFTMAX).
    fn softmax<S: Simd>(s: S, row_block: ScoreBlock<'_>, factor: f32, state: SoftmaxState<'_>) {
        softmax::<S, Floats>(s, row_block, factor, state);
    }
    /// Brings weights into the form in which they meet these values; `from` is the arithmetic of the softmax that stored them.
    ///
    /// # Safety
    /// The values' scales are readable.
    unsafe fn prepare_weights<S: Simd>(s: S, row_block: ScoreBlock<'_>, values: BlockValues, from: Arithmetic);
    /// Returns the weight of a key in a row of prepared weights, which is the first of these.
    fn weight(weights: &[f32], key: usize) -> f32 {
        weights[key]
    }

    /// Returns true if a row block of `rows` rows reads these values where they lie, if all of them are finite.
    fn reads_values(columns: &Columns, rows: usize) -> bool;
    /// Returns the number of floats of scratch that one column of the packed values of some keys takes.
    fn value_floats(keys: usize) -> usize {
        keys
    }
    /// Packs values into `out`, unless that is done, and returns them as they lie there, filled up to whole vectors of columns.
    ///
    /// # Safety
    /// The values are readable. The result is used while `out` holds them.
    unsafe fn pack_values<S: Simd>(s: S, values: ValuesToPack, out: &mut [f32]) -> ColumnValues;
    /// Adds weighted sums of values to running outputs.
    ///
    /// # Safety
    /// For every key of the block up to the end of the last span, in whole groups of keys, the values of the columns of `sums` are
    /// readable, to the end of the vector that holds the last, in the form that this arithmetic reads; weights of keys of a group
    /// beyond the span are 0. If rows end, each row's pointer is writable for these columns, which no other worker writes.
    unsafe fn sums<S: Simd>(s: S, sums: &mut ValueSums<'_>, values: ColumnValues);
}

/// Arithmetic of products, as a value: see [`Multiply`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Arithmetic {
    /// Floats; elements that are shorter are widened.
    Floats,
    /// Pairs of bfloat16, by the machine's own dot product.
    Bf16Pairs,
    /// Fours of bytes; weights of 16 bits.
    Int8,
    /// The same, by a matrix unit: the same bits.
    Int8Tiles,
    /// Eights of half bytes; weights of eight bits.
    Int4,
    /// Pairs of bfloat16, by a matrix unit.
    Bf16Tiles,
    /// Bfloat16 parts of numbers of any type, by a matrix unit: errors are those of floats.
    PartTiles,
}

impl Arithmetic {
    /// Returns the arithmetic that takes its place where keys and values do not both suit the matrix unit.
    pub(crate) fn without_unit(self) -> Self {
        match self {
            Self::Bf16Tiles | Self::PartTiles => Self::Floats,
            Self::Int8Tiles => Self::Int8,
            Self::Floats | Self::Bf16Pairs | Self::Int8 | Self::Int4 => self,
        }
    }
}
