//! Checked calls: an attention call bound to its outputs. Once a [`Problem`] exists, nothing can fail.

use crate::shape::Shape;
use sdpa_kernels::Call;

/// Checked call, bound to its inputs and outputs: running it cannot fail.
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
    pub(crate) outputs: sdpa_kernels::Outputs<'a>,
    pub(crate) shape: Shape,
}

impl Problem<'_> {
    /// Returns true if blocks of keys cannot be divided among workers: an output needs whole rows, or the rows are
    /// ragged.
    pub(crate) fn needs_whole_rows(&self) -> bool {
        let outputs = self.outputs.state.is_some() || self.outputs.points.iter().any(Option::is_some);
        outputs || self.call.options.ragged.is_some()
    }

    /// Sizes of the call.
    pub fn shape(&self) -> Shape {
        self.shape
    }
}
