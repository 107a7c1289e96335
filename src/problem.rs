//! A call with its outputs, checked once. After a [`Problem`] exists nothing can fail.

use crate::shape::Shape;
use sdpa_kernels::Call;

/// A call that has been checked: running it cannot fail.
#[derive(Debug)]
pub struct Problem<'a> {
    pub(crate) call: Call<'a>,
    pub(crate) outputs: sdpa_kernels::Outputs<'a>,
    pub(crate) shape: Shape,
}

impl Problem<'_> {
    /// True if blocks of keys cannot be shared out: outputs want rows whole, or rows are not those of a batch.
    pub(crate) fn needs_whole_rows(&self) -> bool {
        let outputs = self.outputs.state.is_some() || self.outputs.points.iter().any(Option::is_some);
        outputs || self.call.options.ragged.is_some()
    }

    /// The sizes.
    pub fn shape(&self) -> Shape {
        self.shape
    }
}
