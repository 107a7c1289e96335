//! Layers around attention in a network: linear layers, activations, norms.

pub(crate) mod activation;
pub(crate) mod elementwise;
pub(crate) mod linear;
pub(crate) mod norm;
#[cfg(feature = "unfused")]
pub mod sgemm;
