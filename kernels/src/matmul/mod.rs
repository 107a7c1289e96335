//! Matrix products: the register tile of dot products, its operands, packing, prefetching.

#[macro_use]
pub(crate) mod tile_shape;
pub(crate) mod bf16_pairs;
pub(crate) mod bf16_parts;
pub(crate) mod byte_weights;
pub(crate) mod dot_tile;
pub(crate) mod e4m3;
pub(crate) mod finite;
pub(crate) mod float_tile;
pub(crate) mod hadamard;
pub(crate) mod int4;
pub(crate) mod int8;
pub(crate) mod key_code;
pub(crate) mod operands;
pub(crate) mod pack;
pub(crate) mod prefetch;
pub(crate) mod tile_rows;
pub(crate) mod value_terms;
