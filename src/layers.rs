//! What is built around attention: projections, multi-head attention, positions, norms, transformer layers.
//!
//! Plain f32 on slices. A matrix is a row-major slice, one row a token, and its number of rows is its length over its
//! width. Layers hold their weights, take rows in, and write rows to a slice the caller gives; what they compute with
//! (threads, instruction set, memory that is used again) is a [`Compute`].
//!
//! | to say | there is |
//! |---|---|
//! | scores, weights, output, one by one | [`Steps`] |
//! | look-up by likeness | [`Dictionary`] of anything [`Weighable`] |
//! | y = f(x·Wᵀ + b) | [`Linear`], of [`Weights`] as model files have them |
//! | attention between projections | [`MultiHeadAttention`], on [`Sequences`] |
//! | attention without a softmax | [`LinearAttention`], with an [`Update`] rule and a [`LinearState`] |
//! | tokens, positions | [`Embedding`] (learned, sinusoidal), [`Rope`], [`alibi_slopes`](crate::alibi_slopes) |
//! | what keeps numbers in size | [`Norm`]: layer norm, RMS norm |
//! | what is not linear | [`Activation`], in a [`FeedForward`], plain or gated |
//! | all of it together | [`TransformerLayer`]: encoder, decoder, GPT-2, Llama; [`Transformer`] |
//! | token after token | [`DecoderState`]: what a causal [`Transformer`] remembers, for [`Transformer::decode`] |
//! | a model | [`Bert`], of a [`TensorSource`]: a map, or with the feature `safetensors` a file; [`Pooling`] |

mod bert;
mod compute;
mod decoder;
mod dictionary;
mod embedding;
mod feed_forward;
mod linear;
mod linear_attention;
mod model;
mod multi_head;
mod norm;
mod pool;
mod positions;
mod sequences;
mod steps;
mod transformer;

pub use bert::{Bert, BertConfig, BertInput};
pub use compute::Compute;
pub use decoder::DecoderState;
pub use dictionary::{Dictionary, Found, Weighable};
pub use embedding::Embedding;
pub use feed_forward::FeedForward;
pub use linear::{Linear, Weights};
pub use linear_attention::{FeatureMap, Form, LinearAttention, LinearInputs, LinearState, Normaliser, Reach, Update};
#[cfg(feature = "safetensors")]
pub use model::SafeTensorsFile;
pub use model::{ModelError, Tensor, TensorSource};
pub use multi_head::{MultiHeadAttention, MultiHeadInput};
pub use norm::Norm;
pub use pool::{Pooling, normalize};
pub use positions::{Rope, RopePairs};
pub use sdpa_kernels::Activation;
pub use sequences::{Sequences, Start};
pub use steps::{Steps, StepsRow};
pub use transformer::{LayerInput, NormOrder, Transformer, TransformerLayer};
