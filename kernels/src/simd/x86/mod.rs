//! Backends of x86-64: AVX2 and AVX-512, which share half a vector. A file `…_dot` has the dot products of integers and
//! of pairs, a file `…_token` the proofs that the machine has them; `amx` is a matrix unit.

#[cfg_attr(matrix_unit_model, allow(dead_code, reason = "the model takes its place"))]
pub(crate) mod amx;
pub(crate) mod avx2;
pub(crate) mod avx2_dot;
pub(crate) mod avx2_half;
pub(crate) mod avx512;
pub(crate) mod avx512_dot;
pub(crate) mod avx512_token;
