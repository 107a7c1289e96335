//! Checked calls: an attention call bound to its outputs. Once a [`Problem`] exists, only a mask function may refuse it, or
//! [`Run::until`](crate::Run::until) stop it.

use crate::plan::call_time;
use crate::shape::Shape;
use crate::threads::exec::Exec;
use sdpa_kernels::{Call, CheckedCall};

/// Checked call, bound to its inputs and outputs: nothing is checked again when it runs. Only a mask function may not fit it, or it
/// may be told to stop.
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
    pub(crate) checked: CheckedCall<'a>,
    pub(crate) shape: Shape,
}

impl<'a> Problem<'a> {
    pub(crate) fn call(&self) -> &Call<'a> {
        self.checked.call()
    }

    /// Returns true if blocks of keys may be divided among workers: no output needs whole rows, and no window keeps first keys,
    /// behind which most blocks are hidden.
    pub(crate) fn may_be_split(&self) -> bool {
        let outputs = self.checked.outputs();
        let whole = outputs.state.is_some() || outputs.points.iter().any(Option::is_some);
        !whole && self.call().visible.window.is_none_or(|window| window.kept_first() == 0)
    }

    /// Largest number of rows of a sequence that share a key/value head.
    pub(crate) fn longest_rows(&self) -> usize {
        self.call().group_size().saturating_mul(self.call().longest().0)
    }

    /// Returns the number of workers that are worth waking.
    ///
    /// Complexity: the number of sequences, if there are several threads and lengths may differ.
    pub(crate) fn workers(&self, exec: Exec<'_>) -> usize {
        call_time::workers(exec, 1.0, &self.checked)
    }

    /// Sizes of the call.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// Takes the call apart, for the unfused baseline of this repository alone.
    #[cfg(feature = "_probe")]
    #[doc(hidden)]
    pub fn into_parts(self) -> (Call<'a>, sdpa_kernels::Outputs<'a>) {
        self.checked.into_parts()
    }
}
