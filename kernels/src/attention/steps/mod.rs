//! Steps of attention: passes over the scores of one row block and one key block.

pub(crate) mod choose;
pub(crate) mod dropout;
pub(crate) mod epilogue;
pub(crate) mod exact_rows;
pub(crate) mod index_sums;
pub(crate) mod infinite;
pub(crate) mod key_sums;
pub(crate) mod mask_passes;
pub(crate) mod score_passes;
pub(crate) mod short;
pub(crate) mod softmax;
pub(crate) mod softmax_backward;
pub(crate) mod softmax_merge;
pub(crate) mod span;
