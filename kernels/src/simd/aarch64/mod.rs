//! Backend of AArch64: NEON. `neon_dot` has the dot products of integers and of pairs, `neon_vector` what vectors of four
//! registers and of two share.

pub(crate) mod neon;
pub(crate) mod neon_dot;
pub(crate) mod neon_vector;
