#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod attend;
mod cache;
mod gradients;
mod padding;
mod selected;
mod settings;
mod views;

pub use cache::KvCache;
pub use sdpa;
pub use sdpa::{Alignment, Attention, Int4, KeyScales, KvShape, Precision, Window, alibi_slopes};
pub use selected::ListShape;
pub use settings::Sdpa;
