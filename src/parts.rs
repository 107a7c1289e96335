//! Calls in parts that lie on several machines: states of rows, and sums over them, as numbers to be sent.

mod backward_state;
mod block_states;
mod inputs;
mod key_gradient_sums;

pub use backward_state::BackwardState;
pub use block_states::{BlockStates, RowStates};
pub use key_gradient_sums::{KeyGradientShape, KeyGradientSums};
