//! Forward pass: the fused loop of one task over its key blocks.

pub(crate) mod epilogue;
pub(crate) mod key_block;
pub(crate) mod key_range;
pub(crate) mod key_weight_sums;
pub(crate) mod mainloop;
pub(crate) mod nonfinite;
pub(crate) mod prefetch;
pub(crate) mod pv;
pub(crate) mod qk;
pub(crate) mod queries;
pub(crate) mod score_outputs;
pub(crate) mod scores;
pub(crate) mod spans;
pub(crate) mod state;
pub(crate) mod task;
