//! Checked call: inputs, outputs and tiling that fit together.

use crate::attention::call::Call;
use crate::attention::call::outputs::Outputs;
use crate::attention::call::tiling::Tiling;
use crate::tensor::misfit::Misfit;

/// Call with outputs and tiling that fit together; its bias and mask are broadcast. It is made only by a check ([`Self::new`],
/// [`Self::reading`]): the unsafe code of the forward pass relies on that.
pub(crate) struct CheckedCall<'a> {
    call: Call<'a>,
    outputs: Outputs<'a>,
    tiling: Tiling,
}

impl<'a> CheckedCall<'a> {
    /// Checks a call.
    ///
    /// # Panics
    /// If shapes do not fit together. `sdpa` makes the same checks, for errors, before it makes a launch.
    pub(crate) fn new(call: Call<'a>, outputs: Outputs<'a>, tiling: Tiling) -> Self {
        let reading = Self::reading(call, tiling);
        fitting(outputs.fits(&call));
        Self { outputs, ..reading }
    }

    /// Checks a call without outputs: only its inputs are read.
    ///
    /// # Panics
    /// As [`Self::new`].
    pub(crate) fn reading(call: Call<'a>, tiling: Tiling) -> Self {
        fitting(call.inputs_fit());
        fitting(call.head_options_fit());
        fitting(call.kv_lens_fit());
        let call = fitting(call.broadcast());
        let fits = [tiling.head_dim, tiling.value_dim] == call.kv.dims() && tiling.holds(call.longest().1);
        assert!(fits, "the tiling is for other sizes");
        Self { call, outputs: Outputs::NONE, tiling }
    }

    #[inline(always)]
    pub(crate) fn call(&self) -> &Call<'a> {
        &self.call
    }

    #[inline(always)]
    pub(crate) fn outputs(&self) -> &Outputs<'a> {
        &self.outputs
    }

    #[inline(always)]
    pub(crate) fn tiling(&self) -> &Tiling {
        &self.tiling
    }
}

/// Returns what fits.
///
/// # Panics
/// If it does not.
pub(crate) fn fitting<T>(checked: Result<T, Misfit>) -> T {
    checked.unwrap_or_else(|misfit| panic!("the call does not fit together: {misfit:?}"))
}
