//! Layers around the attention of [`sdpa`]: projections, multi-head attention, positions, norms, transformer layers, BERT.
//!
//! ```
//! use sdpa_layers::{Compute, Linear, MultiHeadAttention, MultiHeadInput, Sequences, Weights};
//! # let weights = vec![0.01; 64 * 64];
//! let linear = || Weights::rows(&weights, [64, 64]).map(Linear::new); // as a model file stores it: [outputs, inputs]
//! let layer = MultiHeadAttention::new([4, 4], [linear()?, linear()?, linear()?, linear()?])?
//!     .attention(sdpa::Attention::new().causal());
//! let (x, mut out) = (vec![0.5; 10 * 64], vec![0.0; 10 * 64]); // ten tokens
//! layer.forward(MultiHeadInput::new(&x, Sequences::one(10)), &mut out, &mut Compute::default())?;
//! # Ok::<(), sdpa::Error>(())
//! ```
//!
//! Plain f32 on slices. A matrix is a row-major slice with one row per token; its number of rows is its length divided
//! by its width. Layers own their weights, read rows from one of your slices and write rows to another; a [`Compute`]
//! holds threads, instruction set and reusable memory.
//!
//! | task | items |
//! |---|---|
//! | scores, weights and output of each step | [`Steps`] |
//! | look-up by similarity | [`Dictionary`] of any [`Weighable`] |
//! | y = f(x·Wᵀ + b) | [`Linear`], made from [`Weights`] as model files store them |
//! | attention between projections | [`MultiHeadAttention`], on [`Sequences`] |
//! | attention without a softmax | [`LinearAttention`], with an [`Update`] rule and a [`LinearState`] |
//! | decoding of hybrid models, with rollbacks and forks | [`LinearAttention::decode`], [`StateCache`], [`HybridCaches`] |
//! | tokens, positions | [`Embedding`] (learned, sinusoidal), [`Rope`], [`alibi_slopes`](sdpa::alibi_slopes) |
//! | normalisation | [`Norm`]: layer norm, RMS norm |
//! | nonlinearity | [`Activation`], in a [`FeedForward`], plain or gated |
//! | complete layers | [`TransformerLayer`]: encoder, decoder, GPT-2, Llama; [`Transformer`] |
//! | decoding token by token | [`Transformer::caches`] and [`Transformer::decode`], for a causal [`Transformer`] |
//! | steps of a server | [`Transformer::decode_ragged`] of [`NextRows`], [`Compute::until`] |
//! | models | [`Bert`], from a [`TensorSource`]: a map, or with the feature `safetensors` a file; [`Pooling`] |
//!
//! Errors are [`sdpa::Error`]s; a call that is refused has written nothing. A row has the same bits on any number of
//! threads, and whatever rows are beside it.
#![forbid(unsafe_code)]
#![cfg_attr(docsrs, feature(doc_cfg))]

mod bert;
#[cfg(feature = "safetensors")]
mod cache_file;
mod compute;
mod decoder;
mod dictionary;
mod embedding;
mod error;
mod feed_forward;
mod hybrid_caches;
mod layer_input;
mod linear;
mod linear_attention;
mod model;
mod multi_head;
mod next_rows;
mod norm;
mod pool;
mod positions;
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
mod readme {}
mod sequences;
mod share;
mod steps;
mod transformer;

pub use bert::{Bert, BertConfig, BertInput};
pub use compute::Compute;
pub use dictionary::{Dictionary, Found, Weighable};
pub use embedding::Embedding;
pub use feed_forward::FeedForward;
pub use hybrid_caches::{HybridCaches, LayerCache};
pub use layer_input::LayerInput;
pub use linear::{Linear, Weights};
pub use linear_attention::{
    FeatureMap, Form, LinearAttention, LinearInputs, LinearState, Normaliser, Reach, StateCache, Update,
};
#[cfg(feature = "safetensors")]
pub use model::SafeTensorsFile;
pub use model::{ModelError, Tensor, TensorSource};
pub use multi_head::{MultiHeadAttention, MultiHeadInput};
pub use next_rows::NextRows;
pub use norm::Norm;
pub use pool::{Pooling, normalise};
pub use positions::{Rope, RopePairs};
/// Function applied to each number, in a [`FeedForward`] or after a [`Linear`].
///
/// ```
/// use sdpa::Isa;
/// use sdpa_layers::Activation;
/// let mut x = [-1.0, 0.0, 2.0];
/// Activation::Relu.apply(Isa::detect(), &mut x);
/// assert_eq!(x, [0.0, 0.0, 2.0]);
/// ```
pub use sdpa_kernels::Activation;
pub use sequences::{Sequences, Start};
pub use steps::{Steps, StepsRow};
pub use transformer::{NormOrder, Transformer, TransformerLayer};
