#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod call;
mod error;
mod gradients;
mod operands;
mod views;

pub use call::{attention, attention_with};
pub use error::Error;
pub use sdpa;
