//! Checked calls: an attention call bound to its outputs. Once a [`Problem`] exists, nothing can fail.

use crate::shape::Shape;
use sdpa_kernels::Call;

/// Checked call, bound to its inputs and outputs: running it cannot fail.
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
