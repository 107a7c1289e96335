//! Models as files store them: named tensors, and their errors.

mod error;
#[cfg(feature = "safetensors")]
mod json;
#[cfg(feature = "safetensors")]
mod safetensors;
mod source;

pub use error::ModelError;
#[cfg(feature = "safetensors")]
pub(crate) use json::Json;
#[cfg(feature = "safetensors")]
pub use safetensors::SafeTensorsFile;
pub(crate) use source::Named;
pub use source::{Tensor, TensorSource};
