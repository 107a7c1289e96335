//! Calls in parts that lie on several machines: states of rows, and sums over rows, as numbers that can be sent.
//!
//! These are what the crate `sdpa-mpi` is made of. They are for messages other than those of MPI; keys that arrive in parts on one
//! machine need only [`AttnState`](crate::AttnState). Needs the feature `parts`.
//!
//! | part | items |
//! |---|---|
//! | a few rows, keys in blocks on several machines | [`BlockStates`] of each machine, folded into [`RowStates`] |
//! | gradients of rows, keys in parts | [`BackwardState`] |
//! | gradients of keys, rows in parts | [`KeyGradientSums`], of the sizes of a [`KeyGradientShape`] |
//! | some heads of a call | [`Inputs::of_heads`](crate::Inputs::of_heads) |
//! | what a call's options are, to compare | [`Attention::settings`](crate::Attention::settings) and [`Inputs::options`](crate::Inputs::options), each a [`Datum`] |
//! | what a call's inputs are, to cut | `bias_and_mask`, `with_bias_and_mask`, `ragged_ends`, `key_lens` of [`Inputs`](crate::Inputs) |
//! | some rows of a sequence | [`Inputs::of_sequence`](crate::Inputs::of_sequence) |

mod backward_state;
mod block_states;
mod datum;
mod inputs;
mod key_gradient_sums;
mod options;

pub use backward_state::BackwardState;
pub use block_states::{BlockStates, RowStates};
pub use datum::Datum;
pub use key_gradient_sums::{KeyGradientShape, KeyGradientSums};
