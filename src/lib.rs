//! Scaled-dot-product attention for CPUs.
#![forbid(unsafe_code)]

mod attention;
mod error;
mod explain;
mod inputs;
pub mod naive;
mod plan;
mod problem;
mod schedule;
mod state;
pub mod unfused;

pub use attention::Attention;
pub use error::{Bound, Error};
pub use explain::{Explanation, Machine};
pub use inputs::Inputs;
pub use plan::{Exec, Plan};
pub use problem::{Outputs, Problem, Shape};
pub use schedule::Workspace;
pub use sdpa_kernels::{
    Alignment, BlockClass, BlockPosition, Causality, Isa, LayoutError, Mask, MaskMod, Mods, NoMod, Point, Position,
    ProbMod, ScoreMod, View, ViewMut, Window, alibi_slopes, probe,
};
pub use state::{AttnState, merge};

/// Computes attention, planned on the spot: all threads of the current rayon pool, the widest instruction set.
///
/// # Errors
/// Any [`Error`]; outputs are then untouched.
pub fn attention(attention: &Attention, inputs: Inputs<'_>, outputs: Outputs<'_>) -> Result<(), Error> {
    attention.problem(inputs, outputs)?.run_once(Exec::default());
    Ok(())
}

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct ReadmeDoctests;
