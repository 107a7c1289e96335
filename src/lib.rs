//! Scaled-dot-product attention for CPUs: softmax(scale·Q·Kᵀ + mask)·V in one fused pass over the keys.
//!
//! ```
//! use sdpa::{Attention, Inputs, Outputs, View, ViewMut};
//! # let (q, k, v) = (vec![0.5f32; 2 * 4 * 8], vec![0.25; 2 * 4 * 8], vec![1.0; 2 * 4 * 8]);
//! let shape = [1, 2, 4, 8]; // batch, heads, rows, head_dim
//! let inputs = Inputs::new(View::bhld(&q, shape)?, View::bhld(&k, shape)?, View::bhld(&v, shape)?);
//! let mut out = vec![0.0; 2 * 4 * 8];
//! sdpa::attention(&Attention::new().causal(), inputs, Outputs::new(ViewMut::bhld(&mut out, shape)?))?;
//! # Ok::<(), sdpa::Error>(())
//! ```
//!
//! | to say | there is |
//! |---|---|
//! | where tensors lie | [`View`], [`ViewMut`]: any strides, checked once |
//! | of which elements | `f32`, [`Bf16`], [`F16`]: [`Tensor`], [`TensorMut`]; with the feature `half`, that crate's types |
//! | what to compute | [`Attention`]: scale, softcap, causal, [`Window`], [`Alignment`] |
//! | on what | [`Inputs`]: q, k, v; bias, [`Mask`], ALiBi slopes, sinks, lengths, ragged sequences |
//! | what to write | [`Outputs`]: output, LSE, scores at any [`Point`], weights, key mass |
//! | your own functions | [`Mods`]: of scores ([`ScoreMod`]), positions ([`MaskMod`]), weights ([`ProbMod`]) |
//! | with what | [`Exec`]: an [`Isa`], threads; [`Plan`] and [`Workspace`] to be used again |
//! | what is around attention | [`layers`]: projections, multi-head attention, norms, positions, transformers |
//! | keys in pieces | [`AttnState`], [`merge`] |
//! | keys kept from call to call | [`KvCache`], its elements `f32`, 16 bits or int8 ([`KeyScales`]); [`Pages`] of the caller's by a [`BlockTable`] |
//! | the truth | [`naive`]: the oracle; [`unfused`]: the baseline |
//!
//! Order of operations for one score: scale·(q·k) → softcap → bias → ALiBi → score function → masks set −∞ → sink joins
//! the denominator → softmax over keys → weight function → Σ weight·v. Time is B·H·Lq·Lk·(D + Dv) for the pairs that are
//! visible; memory beyond the tensors is at most a megabyte a thread. The corners (NaN, ∞, nothing visible) are in
//! [`ieee`].
#![forbid(unsafe_code)]

mod attention;
mod cache;
mod error;
mod explain;
#[doc = include_str!("ieee.md")]
pub mod ieee {}
mod inputs;
pub mod layers;
pub mod naive;
mod plan;
mod problem;
mod schedule;
mod state;
pub mod unfused;

pub use attention::Attention;
pub use cache::{KeyScales, KvCache};
pub use error::{Bound, Error};
pub use explain::{Explanation, Machine};
pub use inputs::Inputs;
pub use plan::{Exec, Plan};
pub use problem::{Outputs, Problem, Shape};
pub use schedule::Workspace;
#[cfg(feature = "_probe")]
#[doc(hidden)]
pub use sdpa_kernels::probe;
pub use sdpa_kernels::{
    Alignment, Bf16, BlockClass, BlockPosition, BlockTable, Causality, Dtype, F16, Isa, KeyValues, LayoutError, Mask,
    MaskMod, Mods, NoMod, PageError, Pages, Point, Position, Precision, ProbMod, ScoreMod, Tensor, TensorMut, View,
    ViewMut, Window, alibi_slopes,
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
