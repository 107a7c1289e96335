//! Checked backward calls.

use crate::shape::Shape;
#[cfg(feature = "_probe")]
use sdpa_kernels::Call;
use sdpa_kernels::{CheckedCall, Gradients, Part, Saved};

/// Checked backward call, bound to its inputs and gradients: [`Attention::backward`](crate::Attention::backward) makes it.
///
/// ```
/// # use sdpa::{Attention, Gradients, Inputs, Saved, View};
/// # let (x, lse) = ([0.5f32; 3 * 8], [1.0f32; 3]);
/// # let (x, rows) = (View::bhld(&x, [1, 1, 3, 8])?, View::bhl(&lse, [1, 1, 3])?);
/// let problem = Attention::new().backward(Inputs::new(x, x, x), Saved::new(x, rows, x), Gradients::new())?;
/// assert_eq!(problem.shape().q_len, 3);
/// # Ok::<(), sdpa::Error>(())
/// ```
#[derive(Debug)]
pub struct BackwardProblem<'a> {
    pub(crate) checked: CheckedCall<'a>,
    pub(crate) saved: Saved<'a>,
    pub(crate) gradients: Gradients<'a>,
    pub(crate) part: Part<'a>,
    pub(crate) shape: Shape,
}

impl<'a> BackwardProblem<'a> {
    /// Sizes of the call.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// Takes the call apart, for the unfused baseline of this repository alone.
    #[cfg(feature = "_probe")]
    #[doc(hidden)]
    pub fn into_parts(self) -> (Call<'a>, Saved<'a>, Gradients<'a>) {
        (self.checked.with_given_bias(), self.saved, self.gradients)
    }
}
