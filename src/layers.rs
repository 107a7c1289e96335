//! What is built around attention: projections, multi-head attention, positions, norms, transformer layers.
//!
//! Plain f32 on slices. A matrix is a row-major slice, one row a token, and its number of rows is its length over its
//! width. Layers hold their weights, take rows in, and write rows to a slice the caller gives; what they compute with
//! (threads, instruction set, memory that is used again) is a [`Compute`].

mod compute;
mod dictionary;
mod steps;

pub use compute::Compute;
pub use dictionary::{Dictionary, Found, Weighable};
pub use steps::{Steps, StepsRow};
