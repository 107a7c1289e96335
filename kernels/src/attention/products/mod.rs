//! Products of matrices: queries by keys, weights by values. An [`Arithmetic`] owns how the four lie in memory, and both loops. It
//! is decided once for a worker of a launch ([`Products`]).
//!
//! A new one is a file of this room that implements [`Multiply`], a variant of [`Arithmetic`] and an arm of [`by_arithmetic!`];
//! [`native`] says where it is used.

use crate::attention::call::Call;
use crate::attention::call::row_mods::Given;
use crate::attention::products::multiply::{Arithmetic, Multiply};
use crate::kv::cache::CacheFormat;
use crate::matmul::operands::Floats;
use crate::simd::Simd;
use crate::simd::isa::Isa;
use crate::simd::tiles::BLOCK;
use crate::tensor::element::{Dtype, Precision};

pub(crate) mod bf16_tiles;
mod floats;
mod int4;
pub(crate) mod int8;
pub(crate) mod int8_tiles;
pub(crate) mod multiply;
pub(crate) mod operands;
pub(crate) mod pairs;
pub(crate) mod pv;
pub(crate) mod pv_int4;
pub(crate) mod pv_many;
pub(crate) mod pv_tile;
pub(crate) mod qk;
pub(crate) mod qk_int8;
pub(crate) mod qk_many;
pub(crate) mod score_run;
mod tiles;

/// Evaluates an expression with the type of an [`Arithmetic`]. With `S:` first, arithmetic that the instruction set `S` never has is
/// not compiled.
macro_rules! by_arithmetic {
    ($S:ident: $arithmetic:expr, |$A:ident| $work:expr) => {
        by_arithmetic!(@match [const { $S::MAY_HAVE_BF16_DOT }, const { $S::MAY_HAVE_UNIT }], $arithmetic, |$A| $work)
    };
    ($arithmetic:expr, |$A:ident| $work:expr) => {
        by_arithmetic!(@match [true, true], $arithmetic, |$A| $work)
    };
    (@match [$pairs:expr, $unit:expr], $arithmetic:expr, |$A:ident| $work:expr) => {
        match $arithmetic {
            $crate::attention::products::multiply::Arithmetic::Floats => {
                by_arithmetic!(@arm true, $A = $crate::matmul::operands::Floats, $work)
            }
            $crate::attention::products::multiply::Arithmetic::Bf16Pairs => {
                by_arithmetic!(@arm $pairs, $A = $crate::matmul::operands::Bf16Pairs, $work)
            }
            $crate::attention::products::multiply::Arithmetic::Int8 => {
                by_arithmetic!(@arm true, $A = $crate::matmul::operands::Int8Fours, $work)
            }
            $crate::attention::products::multiply::Arithmetic::Int8Tiles => {
                by_arithmetic!(@arm $unit, $A = $crate::attention::products::int8_tiles::Int8Tiles, $work)
            }
            $crate::attention::products::multiply::Arithmetic::Int4 => {
                by_arithmetic!(@arm true, $A = $crate::matmul::operands::Int4Fours, $work)
            }
            $crate::attention::products::multiply::Arithmetic::Bf16Tiles => {
                by_arithmetic!(@arm $unit, $A = $crate::attention::products::bf16_tiles::Bf16Tiles<1>, $work)
            }
            $crate::attention::products::multiply::Arithmetic::PartTiles => {
                by_arithmetic!(@arm $unit, $A = $crate::attention::products::bf16_tiles::Bf16Tiles<3>, $work)
            }
        }
    };
    (@arm $may:expr, $A:ident = $of:ty, $work:expr) => {
        if $may {
            type $A = $of;
            $work
        } else {
            unreachable!("an arithmetic of another instruction set")
        }
    };
}
pub(crate) use by_arithmetic;

/// Arithmetic of the products of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Products {
    /// Arithmetic of queries and keys.
    pub(crate) keys: Arithmetic,
    /// Arithmetic of weights and values.
    pub(crate) values: Arithmetic,
    /// Arithmetic of the softmax: that of `values`, which stores weights as they are multiplied, or floats if something changes
    /// weights first.
    pub(crate) weights: Arithmetic,
}

impl Products {
    /// Decides on the arithmetic of a call.
    pub(crate) fn of<S: Simd>(s: S, call: &Call<'_>, given: Given) -> Self {
        let formats = call.kv.format().map(|format| [format.keys, format.values]);
        let [keys, values] = [0, 1].map(|part| match (call.kv.dtypes()[part], formats.map(|formats| formats[part])) {
            (Some(Dtype::Bf16), _) if call.precision == Precision::Native => native(s).unwrap_or(Arithmetic::Floats),
            (Some(_), _) if call.precision == Precision::Accurate && s.has_matrix_unit() => Arithmetic::PartTiles,
            (Some(_), _) => Arithmetic::Floats,
            (None, Some(CacheFormat::E4m3PerToken | CacheFormat::E4m3PerHead(_))) => Arithmetic::Floats,
            (None, Some(CacheFormat::Int4(_))) => Arithmetic::Int4,
            (None, _) if s.has_matrix_unit() && int8_tiles::takes(call.kv.dims()[0]) => Arithmetic::Int8Tiles,
            (None, _) => Arithmetic::Int8,
        });
        // One span describes the rows of both, and one row block.
        let rows = |arithmetic| by_arithmetic!(S: arithmetic, |A| (A::tile_rows::<S>(), A::ROW_BLOCK));
        let alike = rows(keys) == rows(values);
        let [keys, values] = [keys, values].map(|own| if alike { own } else { own.without_unit() });
        let kept = !given.weight && call.options.dropout.is_none();
        let rounds = kept && by_arithmetic!(values, |A| A::ROUNDS_IN_SOFTMAX);
        Self { keys, values, weights: if rounds { values } else { Arithmetic::Floats } }
    }

    /// Decides on the arithmetic of a call's backward pass: bfloat16 as in the forward pass, or floats.
    pub(crate) fn of_backward<S: Simd>(s: S, call: &Call<'_>) -> Self {
        let products = Self::of(s, call, Given::default());
        let alike = products.parts() > 0 && products.keys == products.values;
        let arithmetic = if alike { products.keys } else { Arithmetic::Floats };
        Self { keys: arithmetic, values: arithmetic, weights: Arithmetic::Floats }
    }

    /// Returns the number of rows of a tile.
    #[inline(always)]
    pub(crate) fn tile_rows<S: Simd>(self) -> usize {
        by_arithmetic!(S: self.keys, |A| A::tile_rows::<S>())
    }

    /// Returns the largest number of bfloat16 [parts](crate::matmul::bf16_parts) of an operand; 0 if operands have none.
    #[inline(always)]
    pub(crate) fn parts(self) -> usize {
        by_arithmetic!(self.keys, |A| A::PARTS).max(by_arithmetic!(self.values, |A| A::PARTS))
    }

    /// Returns the largest number of rows of a row block.
    #[inline(always)]
    pub(crate) fn row_block(self) -> usize {
        by_arithmetic!(self.keys, |A| A::ROW_BLOCK)
    }

    /// Returns true if the loops take rows [apart](crate::attention::steps::span::Span::apart).
    #[inline(always)]
    pub(crate) fn takes_rows_apart(self) -> bool {
        [self.keys, self.weights] == [Arithmetic::Floats; 2]
    }
}

impl Isa {
    /// Returns true if [`Precision::Native`] multiplies bfloat16 pairs on this instruction set: if it has a matrix unit, or products
    /// of such pairs that take less time than FMAs. Intel's AVX512_BF16 takes more.
    pub fn has_native_bf16(self) -> bool {
        dispatch!(self, |s| native(s).is_some())
    }
}

impl Call<'_> {
    /// Returns how the call multiplies on this instruction set.
    pub fn rates(&self, isa: Isa) -> Rates {
        let (rows, keys) = isa.tile();
        let (products, packing, row_block) = ([1.0; 2], Floats::PACKING, Floats::ROW_BLOCK);
        let floats = Rates { tile: (rows, keys), products, time: 1.0, packing, row_block, parts: 0, unit: false };
        let plain = self.precision == Precision::Exact && !self.kv.dtypes().contains(&None);
        if plain { floats } else { dispatch!(isa, |s| Products::of(s, self, Given::default()).rates(floats)) }
    }

    /// Returns the largest number of bfloat16 parts that the backward pass multiplies numbers in; 0 if it does not.
    pub fn backward_parts(&self, isa: Isa) -> usize {
        match self.precision {
            Precision::Exact => 0,
            _ => dispatch!(isa, |s| Products::of_backward(s, self).parts()),
        }
    }
}

/// How a call multiplies: what plans are made by.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rates {
    /// Numbers of rows and of keys that are multiplied together.
    pub tile: (usize, usize),
    /// Numbers of products with keys, and with values, in the time of an FMA, at peak.
    pub products: [f64; 2],
    /// Time of a call of many rows, as a part of that with products of floats.
    pub time: f64,
    /// Number of rows whose time packing a key block takes.
    pub packing: usize,
    /// Largest number of rows of a row block.
    pub row_block: usize,
    /// Largest number of bfloat16 parts that a number is multiplied in; 0 if it is not.
    pub parts: usize,
    /// True if a matrix unit multiplies.
    pub unit: bool,
}

impl Products {
    /// Returns the rates, which are `floats` for products of floats.
    fn rates(self, floats: Rates) -> Rates {
        let [keys, values] = [self.keys, self.values].map(|arithmetic| by_arithmetic!(arithmetic, |A| A::PRODUCTS));
        let products = [keys[0], values[1]];
        let unit = matches!(self.keys, Arithmetic::Bf16Tiles | Arithmetic::PartTiles | Arithmetic::Int8Tiles);
        let tile = if unit { (BLOCK, BLOCK) } else { floats.tile };
        by_arithmetic!(self.keys, |A| Rates {
            tile,
            products,
            time: A::TIME,
            packing: A::PACKING,
            row_block: A::ROW_BLOCK,
            parts: self.parts(),
            unit
        })
    }
}

/// Returns the arithmetic of [`Precision::Native`] for bfloat16, if the machine has one that is faster than floats.
fn native<S: Simd>(s: S) -> Option<Arithmetic> {
    let unit = s.has_matrix_unit().then_some(Arithmetic::Bf16Tiles);
    unit.or(s.has_bf16_dot().then_some(Arithmetic::Bf16Pairs))
}
