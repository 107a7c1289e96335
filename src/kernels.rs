//! Types and functions of the kernels that are part of this crate's interface, each with an example.
//!
//! The kernels' own comments hold no examples: those would name a crate that users do not import.

mod calls;
mod functions;
mod tensors;

pub use calls::*;
pub use functions::*;
pub use tensors::*;
