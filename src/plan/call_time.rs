//! Time of a call on one core, about, by which plans wake workers.

use crate::threads::exec::{Exec, FLOPS_PER_BYTE};
use sdpa_kernels::{CheckedCall, Isa, Sequence, Tensor};

/// Returns the number of workers that are worth waking for `times` the time of a call: one on one thread.
///
/// Complexity: the number of sequences, if there are several threads and lengths may differ.
pub(crate) fn workers(exec: Exec<'_>, times: f64, checked: &CheckedCall<'_>) -> usize {
    if exec.threads > 1 { exec.workers(times * time(checked, exec.isa)) } else { 1 }
}

/// Time of a call on one core, about, in floating-point operations.
fn time(checked: &CheckedCall<'_>, isa: Isa) -> f64 {
    let (call, rate) = (checked.call(), checked.call().rates(isa).time);
    let lens_differ = call.options.ragged.is_some() || call.options.kv_lens.is_some() || call.kv.lens().is_some();
    let differ = lens_differ || call.options.selected.is_some();
    match call.sequence_count() {
        0 => 0.0,
        n if differ => (0..n).map(|sequence| time_of(checked, rate, sequence)).sum(),
        n => n as f64 * time_of(checked, rate, 0),
    }
}

/// Time of one sequence: of QKᵀ and PV over the ranges of keys that its rows see, or, with few rows, of reading these keys
/// and values. Rows that select keys count those of a mean list. Sequences that share tensors read them together. `rate` is the
/// call's time as a part of that with floats.
fn time_of(checked: &CheckedCall<'_>, rate: f64, index: usize) -> f64 {
    let (call, dims) = (checked.call(), checked.call().kv.dims());
    let Sequence { q_len, kv_len, offset, .. } = call.sequence(index);
    if q_len == 0 {
        return 0.0;
    }
    let all = call.options.own_positions().is_some() || checked.outputs().points.iter().any(Option::is_some);
    let last = offset.saturating_add_unsigned(q_len - 1);
    let keys = match call.keys_of_list(index) {
        Some(listed) => listed,
        None if all => kv_len as f64,
        None => call.visible.keys_of_rows(offset, last, kv_len).count() as f64,
    };
    let shared = |tensors: [Tensor<'_>; 2]| tensors.iter().all(|x| x.strides()[0] == 0);
    let shared = call.options.ragged.is_none() && call.kv.tensors().is_some_and(shared);
    let readers = if shared { call.sequence_count() as f64 } else { 1.0 };
    let flops = rate * 2.0 * q_len as f64 * call.q.shape()[1] as f64 * (dims[0] + dims[1]) as f64;
    let bytes = call.kv.kv_heads() as f64 * call.kv.token_bytes() as f64;
    keys * flops.max(FLOPS_PER_BYTE * bytes / readers)
}
