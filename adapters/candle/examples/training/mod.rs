//! Parts that both examples share: layers, optimiser, loop, checkpoints, the curve of the loss, the command line.
#![allow(dead_code, unused_imports, reason = "every program compiles this module and uses its part of it")]

mod adamw;
mod arguments;
mod curve;
mod export;
mod layers;
#[path = "../../../../examples/pictures/mod.rs"]
pub(crate) mod pictures;
mod trainer;

pub(crate) use arguments::{Arguments, Extent};
pub(crate) use curve::curve;
pub(crate) use export::export;
pub(crate) use layers::{Attend, FeedForward, MultiHead, Norm, Visible, positions, projection};
pub(crate) use trainer::{Batch, Schedule, Trainer};

pub(crate) type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;
