//! Forward pass: the loop of one task over its key blocks, and what it writes.

pub(crate) mod epilogue;
pub(crate) mod index_scores;
pub(crate) mod key_weight_sums;
pub(crate) mod mainloop;
pub(crate) mod nonfinite;
pub(crate) mod pv;
pub(crate) mod score_outputs;
pub(crate) mod short;
pub(crate) mod state;
