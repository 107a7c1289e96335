//! Layers around attention in a network: linear layers, activations, norms; and what the unfused baseline needs.

#[cfg(feature = "nn")]
pub(crate) mod activation;
pub(crate) mod elementwise;
#[cfg(feature = "nn")]
pub(crate) mod linear;
#[cfg(feature = "nn")]
pub(crate) mod linear_tiles;
#[cfg(feature = "nn")]
pub(crate) mod norm;
#[cfg(feature = "unfused")]
pub mod sgemm;
