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
//! | task | items |
//! |---|---|
//! | layout of tensors | [`View`], [`ViewMut`]: any strides, checked once |
//! | element types | `f32`, [`Bf16`], [`F16`]: [`Tensor`], [`TensorMut`]; with the feature `half`, that crate's types |
//! | settings | [`Attention`]: scale, softcap, causal, [`Window`], [`Alignment`] |
//! | inputs | [`Inputs`]: q, k, v; bias, [`Mask`], ALiBi slopes, sinks, lengths, ragged sequences |
//! | outputs | [`Outputs`]: output, LSE, scores at any [`Point`], weights, key weight sums |
//! | functions of the caller | [`Mods`]: of scores ([`ScoreMod`]), positions ([`MaskMod`]), weights ([`ProbMod`]) |
//! | execution | [`Exec`]: an [`Isa`], threads; reusable [`Plan`] and [`Workspace`] |
//! | layers around attention | [`layers`]: projections, multi-head attention, norms, positions, transformers |
//! | keys in several parts | [`AttnState`], [`merge`] |
//! | cached keys and values | [`KvCache`], with elements `f32`, 16 bits or int8 ([`KeyScales`]); [`Pages`] of the caller's by a [`BlockTable`] |
//! | references | [`naive`]: the oracle; [`unfused`]: the baseline |
//!
//! Order of operations for one score: scale·(q·k) → softcap → bias → ALiBi → score function → masks set −∞ → sink added
//! to the denominator → softmax over keys → weight function → Σ weight·v. Time is B·H·Lq·Lk·(D + Dv) over the visible
//! pairs; memory beyond the tensors is at most a megabyte per thread. Special cases (NaN, ∞, nothing visible) are
//! listed in [`ieee`].
#![forbid(unsafe_code)]

mod attention;
mod cache;
mod error;
mod exec;
mod explain;
#[doc = include_str!("ieee.md")]
pub mod ieee {}
mod inputs;
pub mod layers;
pub mod naive;
mod outputs;
mod plan;
mod problem;
mod run;
mod shape;
mod share;
mod state;
mod threads;
pub mod unfused;

pub use attention::Attention;
pub use cache::{KeyScales, KvCache};
pub use error::{Bound, Error};
pub use exec::Exec;
pub use explain::{Explanation, Machine};
pub use inputs::Inputs;
pub use outputs::Outputs;
pub use plan::Plan;
pub use problem::Problem;
pub use run::Workspace;
/// Instruction set to run on: the widest available by default, another by [`Exec::isa`].
///
/// ```
/// use sdpa::Isa;
/// for isa in Isa::available() {
///     assert_eq!(Isa::from_name(isa.name()), Some(isa));
/// }
/// assert_eq!(Isa::detect(), Isa::available().last().unwrap());
/// ```
pub use sdpa_kernels::Isa;
/// Caller's functions of scores, positions and weights, for [`Problem::run_with`].
///
/// ```
/// use sdpa::{Attention, Exec, Inputs, Mods, Outputs, Position, View, ViewMut};
/// let (q, k, v) = ([0.0; 2], [1.0; 4 * 2], [0.0, 1.0, 2.0, 3.0]); // one row, four keys
/// let (q, k) = (View::bhld(&q, [1, 1, 1, 2])?, View::bhld(&k, [1, 1, 4, 2])?);
/// let inputs = Inputs::new(q, k, View::bhld(&v, [1, 1, 4, 1])?);
/// let mut out = [0.0];
/// let problem = Attention::new().problem(inputs, Outputs::new(ViewMut::bhld(&mut out, [1, 1, 1, 1])?))?;
/// let odd = Mods::new().mask(|at: Position| at.key % 2 == 1);
/// problem.run_once_with(Exec::default(), &odd.prob(|weight: f32, _: Position| 10.0 * weight));
/// assert_eq!(out, [20.0]); // ten times the mean of 1 and 3
/// # Ok::<(), sdpa::Error>(())
/// ```
pub use sdpa_kernels::Mods;
/// Read-only tensor view with any layout in memory.
///
/// ```
/// use sdpa::View;
/// let data = vec![0.0f32; 2 * 3 * 5 * 8];
/// let view = View::bhld(&data, [2, 3, 5, 8])?; // batch, heads, rows, dim
/// let other = View::blhd(&data, [2, 5, 3, 8])?; // batch, rows, heads, dim
/// assert_eq!(view.shape(), other.shape());
/// # Ok::<(), sdpa::LayoutError>(())
/// ```
pub use sdpa_kernels::View;
/// Returns the ALiBi slopes of `heads` query heads, for [`Inputs::alibi`].
///
/// ```
/// let slopes = sdpa::alibi_slopes(12);
/// assert_eq!(slopes[..8], sdpa::alibi_slopes(8));
/// assert_eq!(slopes[8], 2f32.powf(-0.5));
/// ```
pub use sdpa_kernels::alibi_slopes;
#[cfg(feature = "_probe")]
#[doc(hidden)]
pub use sdpa_kernels::probe;
pub use sdpa_kernels::{
    Alignment, Bf16, BlockClass, BlockPosition, BlockTable, Causality, Dtype, F16, KeyValues, LayoutError, Mask,
    MaskMod, NoMod, PageError, Pages, Point, Position, Precision, ProbMod, ScoreMod, Tensor, TensorMut, ViewMut,
    Window,
};
pub use shape::Shape;
pub use state::{AttnState, merge};

/// Computes attention with a plan made on the spot, on all threads of the current rayon pool and the widest instruction
/// set.
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
