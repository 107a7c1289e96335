//! Checked call: inputs, options and outputs that fit together.

use crate::attention::call::Call;
use crate::attention::call::options::{Covered, Options};
use crate::attention::call::outputs::Outputs;
use crate::attention::call::visibility::Alignment;
use crate::attention::scratch::Tiling;
use crate::tensor::any::Tensor;
use crate::tensor::misfit::Misfit;

/// Call with outputs that fit together; its bias and mask are broadcast. It is made by checks alone ([`Self::new`],
/// [`Self::writing`]): the unsafe code of both passes relies on that.
#[derive(Debug)]
pub struct CheckedCall<'a> {
    call: Call<'a>,
    outputs: Outputs<'a>,
    /// Bias as it was given.
    bias: Option<Covered<Tensor<'a>>>,
}

impl<'a> CheckedCall<'a> {
    /// Checks the inputs and options of a call. The result has no outputs.
    ///
    /// # Errors
    /// The first misfit.
    pub fn new(call: Call<'a>) -> Result<Self, Misfit> {
        call.inputs_fit()?;
        call.head_options_fit()?;
        call.kv_lens_fit()?;
        call.positions_fit()?;
        call.selected_fit()?;
        Ok(Self { call: call.broadcast()?, outputs: Outputs::NONE, bias: call.options.bias })
    }

    /// Takes outputs, if they fit; otherwise they stay where they are.
    ///
    /// # Errors
    /// The first misfit.
    pub fn writing(mut self, outputs: &mut Outputs<'a>) -> Result<Self, Misfit> {
        outputs.fits(&self.call)?;
        self.outputs = core::mem::replace(outputs, Outputs::NONE);
        Ok(self)
    }

    /// Sets the positions of rows among keys. Any alignment fits: it says what rows see, not where anything lies.
    #[must_use]
    pub fn aligned(mut self, alignment: Alignment) -> Self {
        self.call.alignment = alignment;
        self
    }

    /// Sets the number of neighbouring rows whose heads follow one another. Any number fits: it says in which order rows are
    /// computed.
    pub(crate) fn with_rows_together(mut self, rows: usize) -> Self {
        self.call.options.together = Some(rows);
        self
    }

    /// Inputs and options.
    #[inline(always)]
    pub fn call(&self) -> &Call<'a> {
        &self.call
    }

    /// Inputs and options, the bias as it was given: gradients in it have its shape.
    pub fn with_given_bias(&self) -> Call<'a> {
        Call { options: Options { bias: self.bias, ..self.call.options }, ..self.call }
    }

    /// Outputs, if there are any.
    #[inline(always)]
    pub fn outputs(&self) -> &Outputs<'a> {
        &self.outputs
    }

    /// Takes the call apart.
    pub fn into_parts(self) -> (Call<'a>, Outputs<'a>) {
        (self.call, self.outputs)
    }

    /// Asserts that tasks of a tiling hold the call's rows and key blocks.
    ///
    /// # Panics
    /// If they do not.
    pub(crate) fn assert_held_by(&self, tiling: &Tiling) {
        let dims = [tiling.head_dim, tiling.value_dim] == self.call.kv.dims();
        let fits = dims && tiling.holds(self.call.longest().1) && tiling.has_gathered(self.call.gathered_floats());
        assert!(fits, "the tiling is for other sizes");
    }
}
