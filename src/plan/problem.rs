//! Checked calls: an attention call bound to its outputs. Once a [`Problem`] exists, only a mask function may refuse it, or
//! [`Run::until`](crate::Run::until) stop it.

use crate::shape::Shape;
use sdpa_kernels::{Call, Outputs};

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

    /// Floating-point operations of QKᵀ and PV with every key of a row's own sequence visible.
    pub(crate) fn flops(&self) -> f64 {
        if self.call.options.ragged.is_none() {
            return self.shape.flops();
        }
        let sequences = (0..self.call.sequence_count()).map(|index| self.call.sequence(index));
        let pairs: f64 = sequences.map(|sequence| sequence.q_len as f64 * sequence.kv_len as f64).sum();
        2.0 * pairs * self.shape.heads as f64 * (self.shape.head_dim + self.shape.value_dim) as f64
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
