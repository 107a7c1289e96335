//! Checked calls: an attention call bound to its outputs. Once a [`Problem`] exists, only a mask function may refuse it, or
//! [`Run::until`](crate::Run::until) stop it.

use crate::shape::Shape;
use crate::threads::exec::{Exec, FLOPS_PER_BYTE};
use sdpa_kernels::{Call, Outputs, Sequence, Tensor};

/// Checked call, bound to its inputs and outputs: running it cannot fail, unless a mask function does not fit it or it is
/// told to stop.
///
/// ```
/// use sdpa::{Attention, Exec, Inputs, Outputs, View, ViewMut};
/// let (x, mut out) = ([0.5; 3 * 4], [0.0; 3 * 4]);
/// let x = View::bhld(&x, [1, 1, 3, 4])?;
/// let outputs = Outputs::new(ViewMut::bhld(&mut out, [1, 1, 3, 4])?);
/// let problem = Attention::new().problem(Inputs::new(x, x, x), outputs)?; // whatever is wrong is an error here
/// assert_eq!(problem.shape().kv_len, 3);
/// problem.run_once(Exec::serial()); // and nothing can fail here
/// assert_eq!(out, [0.5; 3 * 4]);
/// # Ok::<(), sdpa::Error>(())
/// ```
#[derive(Debug)]
pub struct Problem<'a> {
    pub(crate) call: Call<'a>,
    pub(crate) outputs: Outputs<'a>,
    pub(crate) shape: Shape,
}

impl<'a> Problem<'a> {
    /// Returns true if blocks of keys cannot be divided among workers: an output needs whole rows.
    pub(crate) fn needs_whole_rows(&self) -> bool {
        self.outputs.state.is_some() || self.outputs.points.iter().any(Option::is_some)
    }

    /// Largest number of rows of a sequence that share a key/value head.
    pub(crate) fn longest_rows(&self) -> usize {
        self.call.group_size().saturating_mul(self.call.longest().0)
    }

    /// Returns the number of workers that are worth waking.
    ///
    /// Complexity: the number of sequences, if there are several threads and lengths may differ.
    pub(crate) fn workers(&self, exec: Exec<'_>) -> usize {
        if exec.threads > 1 { exec.workers(self.work()) } else { 1 }
    }

    /// Time on one core, about, in floating-point operations.
    fn work(&self) -> f64 {
        let call = &self.call;
        let differ = call.options.ragged.is_some() || call.options.kv_lens.is_some() || call.kv.lens().is_some();
        match call.sequence_count() {
            0 => 0.0,
            n if differ => (0..n).map(|sequence| self.work_of(&call.sequence(sequence))).sum(),
            n => n as f64 * self.work_of(&call.sequence(0)),
        }
    }

    /// Time of one sequence: of QKᵀ and PV over the ranges of keys that its rows see, or, with few rows, of reading these keys
    /// and values. Sequences that share tensors read them together.
    fn work_of(&self, &Sequence { q_len, kv_len, offset, .. }: &Sequence) -> f64 {
        let (call, shape) = (&self.call, self.shape);
        if q_len == 0 {
            return 0.0;
        }
        let all = call.options.own_positions().is_some() || self.outputs.points.iter().any(Option::is_some);
        let last = offset.saturating_add_unsigned(q_len - 1);
        let [kept, others] = if all { [0..0, 0..kv_len] } else { call.visible.key_ranges(offset, last, kv_len) };
        let shared = |tensors: [Tensor<'_>; 2]| tensors.iter().all(|x| x.strides()[0] == 0);
        let shared = call.options.ragged.is_none() && call.kv.tensors().is_some_and(shared);
        let readers = if shared { call.sequence_count() as f64 } else { 1.0 };
        let flops = 2.0 * q_len as f64 * shape.heads as f64 * (shape.head_dim + shape.value_dim) as f64;
        let bytes = shape.kv_heads as f64 * call.kv.token_bytes() as f64;
        (kept.len() + others.len()) as f64 * flops.max(FLOPS_PER_BYTE * bytes / readers)
    }

    /// Sizes of the call.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// Takes the call apart, for the unfused baseline of this repository alone.
    #[cfg(feature = "_probe")]
    #[doc(hidden)]
    pub fn into_parts(self) -> (Call<'a>, Outputs<'a>) {
        (self.call, self.outputs)
    }
}
