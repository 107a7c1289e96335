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
//! | layout of tensors | [`View`], [`ViewMut`]: any strides, checked once; with the feature `ndarray`, that crate's arrays |
//! | element types | `f32`, [`Bf16`], [`F16`]: [`Tensor`], [`TensorMut`]; with the feature `half`, that crate's types |
//! | settings | [`Attention`]: scale, softcap, causal, [`Window`], [`Alignment`] |
//! | inputs | [`Inputs`]: q, k, v; bias, [`Mask`], ALiBi slopes, sinks, lengths, ragged sequences |
//! | outputs | [`Outputs`]: output, LSE, scores at any [`Point`], weights, key weight sums |
//! | your own functions | [`attention_with`] a [`Run`] of [`Mods`]: of scores ([`ScoreMod`]), positions ([`MaskMod`]; stock ones in [`masks`]), weights ([`WeightMod`]) |
//! | gradients | [`attention_backward()`], [`attention_backward_with`]: [`Saved`] results to [`Gradients`] |
//! | execution | [`Exec`]: an [`Isa`], threads; reusable [`Plan`] and [`Workspace`] |
//! | threads other than rayon's, deadlines | [`ThreadPool`], or an [`Executor`] of your own; [`Run`], for [`Problem::run_with`] |
//! | keys in several parts | [`AttnState`], [`merge`]; on several machines: the module `parts`, with the feature of that name |
//! | cached keys and values | [`KvCache`], with elements `f32`, 16 bits, int8 ([`KeyScales`]), [`Int4`] or E4M3, keys and values in a [`KvFormat`]; [`widen_latent_e4m3()`] and [`widen_latent_page()`] for tokens of other engines; pages by a [`BlockTable`]: of a [`PagePool`], or of your own pool ([`Pages`]); those of a model's layers: [`LayerCaches`] |
//! | rows that choose their keys | [`Inputs::selected`] of [`SelectedKeys`], made of starts and numbers or of a [`Rectangle`]; an [`Indexer`] scores keys and selects by [`TopK`], [`top_k()`] by your own scores; [`widen_e4m3()`] |
//! | reference | [`naive`]: the oracle |
//! | layers around attention, whole models | the crate `sdpa-layers` |
//!
//! Order of operations for one score: scale·(q·k) → softcap → bias → ALiBi → score function → masks set −∞ → sink added
//! to the denominator → softmax over keys → weight function → Σ weight·v. Time is B·H·Lq·Lk·(D + Dv) over the visible
//! pairs; memory beyond the tensors is at most 1.25 MiB per thread for head dimensions up to 4096, plus
//! [`Plan::partials_bytes`]. Special cases (NaN, ∞, nothing visible) are listed in [`ieee`].
#![forbid(unsafe_code)]
#![cfg_attr(docsrs, feature(doc_cfg))]

mod attention;
mod backward;
mod cache;
mod choosing;
mod error;
#[doc = include_str!("ieee.md")]
pub mod ieee {}
mod inputs;
mod kernels;
mod layer_caches;
pub mod masks;
pub mod naive;
mod page_pool;
#[cfg(feature = "parts")]
pub mod parts;
mod plan;
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
mod readme {}
mod shape;
mod state;
#[cfg(feature = "safetensors")]
#[doc(hidden)] // for `sdpa-layers`
pub mod tensor_file;
mod threads;

pub use attention::Attention;
pub use backward::{BackwardPlan, BackwardProblem, attention_backward, attention_backward_with};
pub use cache::{KeyScales, KvCache, SlidingWindow, widen_latent_e4m3, widen_latent_page};
pub use choosing::e4m3::widen_e4m3;
pub use choosing::{Indexer, top_k};
pub use error::Error;
pub use inputs::Inputs;
pub use kernels::*;
pub use layer_caches::LayerCaches;
pub use page_pool::PagePool;
pub use plan::Plan;
pub use plan::explain::{Explanation, Machine};
pub use plan::problem::Problem;
#[cfg(feature = "_probe")]
#[doc(hidden)]
pub use sdpa_kernels::probe;
pub use shape::{KvShape, Shape};
pub use state::{AttnState, merge};
pub use threads::CurrentPool;
pub use threads::exec::Exec;
pub use threads::executor::Executor;
pub use threads::run::Run;
pub use threads::workspace::Workspace;

/// Computes attention with a plan made on the spot, on all threads of the current rayon pool and the widest instruction
/// set.
///
/// ```
/// use sdpa::{Attention, Inputs, Outputs, View, ViewMut};
/// let (q, k, v) = ([1.0], [0.0, 3f32.ln()], [10.0, 20.0]); // one row, two keys of one number, two values
/// let inputs = Inputs::new(
///     View::bhld(&q, [1, 1, 1, 1])?,
///     View::bhld(&k, [1, 1, 2, 1])?,
///     View::bhld(&v, [1, 1, 2, 1])?,
/// );
/// let mut out = [0.0];
/// sdpa::attention(&Attention::new(), inputs, Outputs::new(ViewMut::bhld(&mut out, [1, 1, 1, 1])?))?;
/// assert!((out[0] - 17.5).abs() < 1e-5); // scores 0 and ln 3, so weights 1/4 and 3/4
/// # Ok::<(), sdpa::Error>(())
/// ```
///
/// # Errors
/// Any [`Error`]; outputs are then untouched.
pub fn attention(attention: &Attention, inputs: Inputs<'_>, outputs: Outputs<'_>) -> Result<(), Error> {
    attention_with(attention, inputs, outputs, Run::new())
}

/// Computes attention with your own functions or threads, otherwise as [`attention()`].
///
/// ```
/// use sdpa::{Attention, Inputs, Mods, Outputs, Position, Run, View, ViewMut};
/// let (q, k, v) = ([0.0; 2], [1.0; 4 * 2], [0.0, 1.0, 2.0, 3.0]); // one row, four keys
/// let (q, k) = (View::bhld(&q, [1, 1, 1, 2])?, View::bhld(&k, [1, 1, 4, 2])?);
/// let inputs = Inputs::new(q, k, View::bhld(&v, [1, 1, 4, 1])?);
/// let mut out = [0.0];
/// let odd = Mods::new().mask(|at: Position| at.key % 2 == 1);
/// let outputs = Outputs::new(ViewMut::bhld(&mut out, [1, 1, 1, 1])?);
/// sdpa::attention_with(&Attention::new(), inputs, outputs, Run::new().mods(&odd))?;
/// assert_eq!(out, [2.0]); // the mean of 1 and 3
/// # Ok::<(), sdpa::Error>(())
/// ```
///
/// **Cost.** A closure as a mask is called for every pair of a row and a key, and hidden pairs are computed all the
/// same: however few keys it keeps, the call takes as long as one without a mask, plus the closure's time. Use the
/// options of [`Attention`] or the stock functions of [`masks`] if one of them does the same, or give the function a
/// [`MaskMod::class`], so that hidden blocks are skipped.
///
/// # Errors
/// Any [`Error`]; [`Error::Mask`] if the mask function does not fit the call ([`MaskMod::fits`]). Outputs are then
/// untouched, but for [`Error::Stopped`].
///
/// # Panics
/// If one of the functions does: see [`Problem::run_with`].
pub fn attention_with<S: ScoreMod, M: MaskMod, P: WeightMod>(
    attention: &Attention,
    inputs: Inputs<'_>,
    outputs: Outputs<'_>,
    run: Run<'_, S, M, P>,
) -> Result<(), Error> {
    attention.problem(inputs, outputs)?.run_once_with(run.exec(), run)
}
