//! Steps of attention: kernels for one row block and one key block.

pub(crate) mod bf16;
pub(crate) mod dropout;
pub(crate) mod epilogue;
pub(crate) mod float_loops;
pub(crate) mod infinite;
pub(crate) mod key_sums;
pub(crate) mod mask_passes;
pub(crate) mod pv;
pub(crate) mod pv_int4;
pub(crate) mod pv_int8;
pub(crate) mod pv_many;
pub(crate) mod pv_tile;
pub(crate) mod qk;
pub(crate) mod qk_int8;
pub(crate) mod qk_many;
pub(crate) mod score_passes;
pub(crate) mod score_run;
pub(crate) mod short;
pub(crate) mod softmax;
pub(crate) mod softmax_backward;
pub(crate) mod span;
