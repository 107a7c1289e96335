//! Products of matrices: queries by keys, weights by values. An [`Arithmetic`] owns how the four lie in memory, and both loops. It
//! is decided once for a worker of a launch ([`Products`]).
//!
//! A new one, of a matrix unit for example, is a file of this room that implements [`Multiply`], a variant of [`Arithmetic`] and an
//! arm of [`by_arithmetic!`]; [`native`] says where it is used.

use crate::attention::call::Call;
use crate::attention::call::row_mods::Given;
use crate::attention::products::operands::{KeySource, KeysToPack, QueryRow, QueryRows, RunKeys, ValuesToPack};
use crate::attention::products::pv::ValueSums;
use crate::attention::products::score_run::ScoreRun;
use crate::attention::steps::score_passes::ScoreBlock;
use crate::attention::steps::softmax::{SoftmaxState, softmax};
use crate::kv::key_block::{BlockValues, ColumnValues, Columns, Keys};
use crate::matmul::operands::Floats;
use crate::simd::Simd;
use crate::simd::isa::Isa;
use crate::tensor::element::{Dtype, Precision};

mod floats;
mod int4;
pub(crate) mod int8;
#[cfg(matrix_unit_model)]
pub(crate) mod matrix_unit;
pub(crate) mod operands;
mod pairs;
pub(crate) mod pv;
pub(crate) mod pv_int4;
pub(crate) mod pv_many;
pub(crate) mod pv_tile;
pub(crate) mod qk;
pub(crate) mod qk_int8;
pub(crate) mod qk_many;
pub(crate) mod score_run;

/// Arithmetic of products: how queries and keys, weights and values lie in memory, and the loops that multiply them.
///
/// Queries become rows of [`Self::query_floats`] floats of scratch. Keys are [`Keys`], packed by [`Self::pack_keys`] where they
/// cannot be [read in place](Self::reads_keys). Weights lie in rows of scores. Values are [`Columns`] of a block, likewise packed
/// or read in place.
pub(crate) trait Multiply {
    /// Number of neighbouring elements that are multiplied at once.
    const GROUP: usize;
    /// True if values are always finite, and read where they lie.
    const FINITE: bool = false;
    /// True if the [softmax](Self::softmax) stores weights as they are multiplied.
    const ROUNDS_IN_SOFTMAX: bool = false;

    /// Returns the number of rows of a tile: rows whose keys one span describes.
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

    /// Returns true if a task of `rows` rows reads these keys where they lie.
    fn reads_keys(keys: Keys, rows: usize, head_dim: usize) -> bool;
    /// Returns the number of floats of scratch that sixteen packed keys take.
    fn panel_floats(source: KeySource, head_dim: usize) -> usize;
    /// Packs keys into `out`, unless that is done, and returns them as they lie there.
    ///
    /// # Safety
    /// The keys are readable. The result is used while `out` holds them.
    unsafe fn pack_keys<S: Simd>(s: S, keys: KeysToPack, out: &mut [f32]) -> Keys;
    /// Computes the scores of a row block against a run of keys.
    ///
    /// # Safety
    /// Every query and all keys of the run are readable, in the forms that this arithmetic reads; queries in scratch lie one
    /// after the other.
    unsafe fn scores<S: Simd>(s: S, run: &mut ScoreRun<'_>, queries: QueryRows<'_>, keys: RunKeys);

    /// Turns scores into weights, and merges them into the rows' state.
    fn softmax<S: Simd>(s: S, row_block: ScoreBlock<'_>, state: SoftmaxState<'_>) {
        softmax::<S, Floats>(s, row_block, state);
    }
    /// Brings weights into the form in which they meet these values; `from` is the arithmetic of the softmax that stored them.
    ///
    /// # Safety
    /// The values' scales are readable.
    unsafe fn prepare_weights<S: Simd>(s: S, row_block: ScoreBlock<'_>, values: BlockValues, from: Arithmetic);
    /// Returns the weight of a key in a row of prepared weights.
    fn weight(weights: &[f32], key: usize) -> f32 {
        weights[key]
    }

    /// Returns true if a row block of `rows` rows reads these values where they lie, if all of them are finite.
    fn reads_values(columns: &Columns, rows: usize) -> bool;
    /// Packs values into `out`, unless that is done, and returns them as they lie there, filled up to whole vectors of columns.
    ///
    /// # Safety
    /// The values are readable. The result is used while `out` holds them.
    unsafe fn pack_values<S: Simd>(s: S, values: ValuesToPack, out: &mut [f32]) -> ColumnValues;
    /// Adds weighted sums of values to running outputs.
    ///
    /// # Safety
    /// For every key of every span, the values of the columns of `sums` are readable, to the end of the vector that holds the
    /// last, in the form that this arithmetic reads. If rows end, each row's pointer is writable for these columns, which no
    /// other worker writes.
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
    /// Eights of half bytes; weights of eight bits.
    Int4,
    /// Pairs of bfloat16, by a model of a matrix unit.
    #[cfg(matrix_unit_model)]
    MatrixUnit,
}

/// Evaluates an expression with the type of an [`Arithmetic`].
macro_rules! by_arithmetic {
    ($arithmetic:expr, |$A:ident| $work:expr) => {
        match $arithmetic {
            $crate::attention::products::Arithmetic::Floats => {
                type $A = $crate::matmul::operands::Floats;
                $work
            }
            $crate::attention::products::Arithmetic::Bf16Pairs => {
                type $A = $crate::matmul::operands::Bf16Pairs;
                $work
            }
            $crate::attention::products::Arithmetic::Int8 => {
                type $A = $crate::matmul::operands::Int8Fours;
                $work
            }
            $crate::attention::products::Arithmetic::Int4 => {
                type $A = $crate::matmul::operands::Int4Fours;
                $work
            }
            #[cfg(matrix_unit_model)]
            $crate::attention::products::Arithmetic::MatrixUnit => {
                type $A = $crate::attention::products::matrix_unit::MatrixUnit;
                $work
            }
        }
    };
}
pub(crate) use by_arithmetic;

/// Arithmetic of the products of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Products {
    /// Of queries and keys.
    pub(crate) keys: Arithmetic,
    /// Of weights and values.
    pub(crate) values: Arithmetic,
    /// Whose form of weights the softmax stores: that of `values`, or floats if something changes weights before they meet values.
    pub(crate) weights: Arithmetic,
}

impl Products {
    /// Decides on the arithmetic of a call.
    pub(crate) fn of<S: Simd>(s: S, call: &Call<'_>, given: Given) -> Self {
        let [keys, values] = call.kv.dtypes().map(|dtype| match dtype {
            Some(Dtype::Bf16) if call.precision == Precision::Native => native(s).unwrap_or(Arithmetic::Floats),
            Some(_) => Arithmetic::Floats,
            None if call.kv.int4().is_some() => Arithmetic::Int4,
            None => Arithmetic::Int8,
        });
        // One span describes the rows of both.
        let rows = |arithmetic| by_arithmetic!(arithmetic, |A| A::tile_rows::<S>());
        let [keys, values] = if rows(keys) == rows(values) { [keys, values] } else { [Arithmetic::Floats; 2] };
        let kept = !given.weight && call.options.dropout.is_none();
        let rounds = kept && by_arithmetic!(values, |A| A::ROUNDS_IN_SOFTMAX);
        Self { keys, values, weights: if rounds { values } else { Arithmetic::Floats } }
    }

    /// Returns the number of rows of a tile.
    #[inline(always)]
    pub(crate) fn tile_rows<S: Simd>(self) -> usize {
        by_arithmetic!(self.keys, |A| A::tile_rows::<S>())
    }

    /// Returns true if the loops take rows [apart](crate::attention::steps::span::Span::apart).
    #[inline(always)]
    pub(crate) fn takes_rows_apart(self) -> bool {
        [self.keys, self.weights] == [Arithmetic::Floats; 2]
    }
}

impl Isa {
    /// Returns true if [`Precision::Native`] multiplies bfloat16 pairs on this instruction set: if the machine has products of such
    /// pairs, and they take less time than FMAs. Intel's AVX512_BF16 takes more.
    pub fn has_native_bf16(self) -> bool {
        dispatch!(self, |s| native(s).is_some())
    }
}

impl Call<'_> {
    /// Returns, for keys and for values, true if they are multiplied as bfloat16 on this instruction set.
    pub fn native(&self, isa: Isa) -> [bool; 2] {
        let Products { keys, values, .. } = dispatch!(isa, |s| Products::of(s, self, Given::default()));
        [keys, values].map(|arithmetic| by_arithmetic!(arithmetic, |A| A::ROUNDS_IN_SOFTMAX))
    }
}

/// Returns the arithmetic of [`Precision::Native`] for bfloat16, if the machine has one that is faster than floats.
fn native<S: Simd>(s: S) -> Option<Arithmetic> {
    #[cfg(matrix_unit_model)]
    let native = Some(Arithmetic::MatrixUnit);
    #[cfg(not(matrix_unit_model))]
    let native = None;
    native.or(s.has_bf16_dot().then_some(Arithmetic::Bf16Pairs))
}
