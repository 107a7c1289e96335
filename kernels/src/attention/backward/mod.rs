//! Backward pass: gradients of queries, keys, values and options, from the saved output and log-sum-exp. Nothing else of
//! the forward pass is kept: scores and weights are computed again, block by block.

pub(crate) mod call;
pub(crate) mod column;
pub(crate) mod gradient_products;
pub(crate) mod launch;
pub(crate) mod memory;
pub(crate) mod parameters;
pub(crate) mod parts;
pub(crate) mod pass;
pub(crate) mod prefetch;
pub(crate) mod reductions;
pub(crate) mod row_block;
pub(crate) mod rows;
pub(crate) mod tile;
pub(crate) mod written;
