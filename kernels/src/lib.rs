//! Kernels of `sdpa`: one fused attention loop, its steps, and the instruction sets to run them on.
//!
//! An implementation detail of the `sdpa` crate, which re-exports what users need. All the unsafe code of the project
//! is here. Kernels start no threads, but for a [`ThreadPool`], and, once scratch has grown, allocate nothing.
//!
//! Control flow: a [`Call`] (views and options) and its outputs, if they fit together, make a [`CheckedCall`]; a [`Launch`] of
//! it hands out tasks, each once; a task runs the fused loop of `attention/forward/mainloop.rs`. Its steps (`scores`,
//! `softmax`, `values`) are written on the sixteen-lane vector of `simd/mod.rs`.

#![cfg_attr(docsrs, feature(doc_cfg))]
#![allow(
    clippy::needless_range_loop,
    reason = "loops over the rows and vectors of a register tile count: iterators take a seventh more compile time to unroll"
)]

#[macro_use]
mod simd;
#[macro_use]
mod tensor;
#[macro_use]
mod matmul;
mod attention;
mod elementary;
mod kv;
mod machine;
#[cfg(any(feature = "nn", feature = "unfused"))]
mod nn;
#[cfg(any(test, feature = "_probe"))]
#[doc(hidden)]
pub mod probe;
mod sync;
mod thread_pool;
mod work_queue;

pub use attention::backward::call::{Gradients, Saved};
pub use attention::backward::launch::{BackwardLaunch, Stage};
pub use attention::backward::memory::{BackwardMemory, BackwardScratch};
pub use attention::backward::parts::{HeadSums, Part, write_head_sums};
pub use attention::call::checked::CheckedCall;
pub use attention::call::dropout::Dropout;
pub use attention::call::fit::tensors_fit;
pub use attention::call::masks::{Documents, PerSequence, PrefixLm, Tree};
pub use attention::call::mods::{
    And, BlockClass, BlockPosition, CallFacts, MaskError, MaskMod, Mods, Not, Or, Position, ScoreMod, WeightMod,
    WithDerivative,
};
pub use attention::call::options::{Cover, Covered, Mask, Options, Ragged, alibi_slopes};
pub use attention::call::outputs::{Outputs, Point, Seen, State};
pub use attention::call::row_mods::AnyMods;
pub use attention::call::selection::top_k::TopK;
pub use attention::call::selection::{ListPlace, Rectangle, SelectedKeys, SelectionError, SelectionShape};
pub use attention::call::visibility::{Alignment, Causality, Visible, VisibleKeys, Window};
pub use attention::call::{Call, Sequence};
pub use attention::products::Rates;
pub use attention::schedule::accumulation::Accumulation;
pub use attention::schedule::block_states::BlockStates;
pub use attention::schedule::choice_launch::ChoiceLaunch;
pub use attention::schedule::index_launch::{IndexCall, IndexLaunch, first_list};
pub use attention::schedule::launch::Launch;
pub use attention::schedule::merge::{merge_results, merge_states};
pub use attention::schedule::partials::Partials;
pub use attention::schedule::split_sequences::{SplitRows, Then};
pub use attention::scratch::{MAX_ROW_BLOCK, MAX_SPLIT_ROWS, MAX_TASK, Scratch, Tiling};
pub use attention::steps::choose::Chooser;
#[cfg(feature = "nn")]
pub use elementary::{cos, pow, sin};
pub use kv::block_table::{BlockTable, PageError};
pub use kv::cache::{Cache, CacheFormat, KvFormat, MAX_EXACT, NewTokens, PackedPool, Sliding, SpareBlocks, TokenPart};
pub use kv::key_block::FAR_ROWS;
pub use kv::pages::Pages;
pub use kv::slot_index::SlotIndex;
pub use kv::source::KeyValues;
pub use machine::{OPT_LEVEL, peak_flops, read_bandwidth};
pub use matmul::bf16_parts::MAX_PARTS;
pub use matmul::e4m3::{e4m3, is_e4m3_scale};
pub use matmul::finite::first_not_finite;
pub use matmul::hadamard::Basis;
pub use matmul::int4::Int4;
pub use matmul::int8::{MAX_HEAD_DIM as MAX_INT8_HEAD_DIM, is_int8_scale};
pub use matmul::prefetch::MEMORY_BOUND_ROWS;
#[cfg(feature = "nn")]
pub use nn::activation::Activation;
#[cfg(any(feature = "nn", feature = "unfused"))]
pub use nn::elementwise::exp_in_place;
#[cfg(feature = "nn")]
pub use nn::linear::{Packed, Product};
#[cfg(feature = "nn")]
pub use nn::norm::{Center, Norm};
#[cfg(feature = "unfused")]
pub use nn::sgemm as gemm;
pub use simd::aligned::{floats, has_memory, zeros};
pub use simd::isa::{Isa, vectorized};
pub use simd::tiles::NoMatrixUnit;
pub use tensor::any::{Tensor, TensorMut, first_beyond};
pub use tensor::element::{Bf16, Dtype, F16, Precision, narrow, widen};
#[cfg(feature = "nn")]
pub use tensor::head_writer::HeadsMut;
pub use tensor::layout::LayoutError;
pub use tensor::misfit::{Bound, Fault, Misfit, cumulative, one_or_two_a_row, same};
pub use tensor::rows::{KEY_BLOCK, MAX_DIM};
pub use tensor::view::View;
pub use tensor::view_mut::ViewMut;
pub use thread_pool::ThreadPool;
