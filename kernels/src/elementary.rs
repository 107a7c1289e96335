//! Elementary functions of `f64` whose bits are the same on every platform: those of the standard library are the
//! platform's own. For numbers taken once a row, or once a table; scores have the exponential of `simd/exp.rs`.

#[cfg(feature = "nn")]
pub use libm::{cos, pow, sin};
pub(crate) use libm::{exp, exp2, log as ln};
