//! Final scores of a task, row block by row block and key block by key block: what every pass over the keys begins with.

pub(crate) mod block_positions;
pub(crate) mod exact;
pub(crate) mod key_block;
pub(crate) mod key_numbers;
pub(crate) mod prefetch;
pub(crate) mod qk;
pub(crate) mod queries;
pub(crate) mod scores;
pub(crate) mod task;
