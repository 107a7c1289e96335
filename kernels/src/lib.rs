//! The kernels of `sdpa`: one fused attention loop, its steps, and three instruction sets to run them on.
//!
//! An implementation detail of the `sdpa` crate, which re-exports what users need. All the unsafe code of the project
//! is here; there are no threads and, once scratch has grown, no allocations.
//!
//! The way through: a [`Call`] (views and options, consistent by assertion) and its outputs make a [`Launch`]; the
//! launch hands out tasks, each once; a task runs the fused loop of `tile.rs`, whose steps (`scores`, `softmax`,
//! `values`) are written on the sixteen-lane vector of `simd.rs`.

#[macro_use]
mod tensor;
mod activation;
mod ahead;
#[macro_use]
mod block;
mod cache;
mod compare;
mod dots;
mod element;
mod elementwise;
mod emit;
mod exp;
mod finish;
pub mod gemm;
mod geometry;
#[cfg(feature = "half")]
mod halves;
mod heads;
mod infinite;
mod int8;
mod isa;
mod lanes;
mod launch;
mod layout;
mod lines;
mod machine;
mod mass;
mod norm;
mod operands;
mod options;
mod outputs;
mod pack;
mod pages;
mod pairs;
mod passes;
mod poison;
mod prepare;
#[cfg(feature = "_probe")]
#[doc(hidden)]
pub mod probe;
mod product;
mod queries;
mod queue;
mod rows;
mod scores;
mod simd;
mod softmax;
mod source;
mod split;
mod state;
mod steps;
mod strips;
mod terms;
mod tile;
mod values;
mod view;
mod visible;
mod weigh;

pub use activation::Activation;
pub use block::KEY_BLOCK;
pub use cache::{Cache, Keep};
pub use element::{Bf16, Dtype, F16, Precision, narrow, widen};
pub use elementwise::exp_in_place;
pub use geometry::{Geometry, MAX_DIM, MAX_GROUP, MAX_TASK, Scratch};
pub use heads::HeadsMut;
pub use int8::MAX_HEAD_DIM as MAX_INT8_HEAD_DIM;
pub use isa::{Isa, vectorized};
pub use launch::{Call, Launch, Sequence};
pub use layout::LayoutError;
pub use lines::{has_memory, zeros};
pub use machine::{peak_flops, read_bandwidth};
pub use norm::{Center, Norm};
pub use options::{
    BlockClass, BlockPosition, Mask, MaskMod, Mods, NoMod, Options, Position, ProbMod, Ragged, ScoreMod, alibi_slopes,
};
pub use outputs::{Outputs, Point, State};
pub use pages::{BlockTable, PageError, Pages};
pub use product::{Packed, Product};
pub use source::KeyValues;
pub use split::{Gathering, Partials};
pub use state::fold_states;
pub use tensor::{Tensor, TensorMut};
pub use view::{View, ViewMut};
pub use visible::{Alignment, Causality, Keys, Visible, Window};
