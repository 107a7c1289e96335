//! Time of a call on one core, about, by which plans wake workers.

use crate::shape::Shape;
use crate::threads::exec::{Exec, FLOPS_PER_BYTE};
use sdpa_kernels::{Call, Outputs, Sequence, Tensor};

/// Call, what it writes, and its sizes.
pub(crate) struct CallTime<'w> {
    pub(crate) call: &'w Call<'w>,
    pub(crate) outputs: &'w Outputs<'w>,
    pub(crate) shape: Shape,
}

/// Returns the number of workers that are worth waking for `times` the time of a call: one on one thread.
///
/// Complexity: the number of sequences, if there are several threads and lengths may differ.
pub(crate) fn workers(exec: Exec<'_>, times: f64, call: &CallTime<'_>) -> usize {
    if exec.threads > 1 { exec.workers(times * call.time()) } else { 1 }
}

impl CallTime<'_> {
    /// Time on one core, about, in floating-point operations.
    fn time(&self) -> f64 {
        let call = self.call;
        let differ = call.options.ragged.is_some() || call.options.kv_lens.is_some() || call.kv.lens().is_some();
        match call.sequence_count() {
            0 => 0.0,
            n if differ => (0..n).map(|sequence| self.time_of(&call.sequence(sequence))).sum(),
            n => n as f64 * self.time_of(&call.sequence(0)),
        }
    }

    /// Time of one sequence: of QKᵀ and PV over the ranges of keys that its rows see, or, with few rows, of reading these keys
    /// and values. Sequences that share tensors read them together.
    fn time_of(&self, &Sequence { q_len, kv_len, offset, .. }: &Sequence) -> f64 {
        let (call, shape) = (self.call, self.shape);
        if q_len == 0 {
            return 0.0;
        }
        let all = call.options.own_positions().is_some() || self.outputs.points.iter().any(Option::is_some);
        let last = offset.saturating_add_unsigned(q_len - 1);
        let keys = if all { kv_len } else { call.visible.keys_of_rows(offset, last, kv_len).count() };
        let shared = |tensors: [Tensor<'_>; 2]| tensors.iter().all(|x| x.strides()[0] == 0);
        let shared = call.options.ragged.is_none() && call.kv.tensors().is_some_and(shared);
        let readers = if shared { call.sequence_count() as f64 } else { 1.0 };
        let flops = 2.0 * q_len as f64 * shape.heads as f64 * (shape.head_dim + shape.value_dim) as f64;
        let bytes = shape.kv_heads as f64 * call.kv.token_bytes() as f64;
        keys as f64 * flops.max(FLOPS_PER_BYTE * bytes / readers)
    }
}
