//! Backward pass: gradients of attention, in one fused pass over the keys.

pub(crate) mod functions;
pub(crate) mod problem;
pub(crate) mod run;

pub(crate) use functions::{NO_DERIVATIVE, WEIGHT_FUNCTION};
pub use problem::BackwardProblem;
pub use run::BackwardPlan;

use crate::attention::{Attention, scratch_of};
use crate::error::Error;
use crate::inputs::Inputs;
use crate::shape::Shape;
use crate::threads::run::Run;
use sdpa_kernels::{
    BackwardScratch, CheckedCall, Gradients, Isa, MAX_PARTS, MaskMod, Part, Saved, ScoreMod, Tiling, WeightMod,
};

/// Computes the gradients of attention with a plan made on the spot, on all threads of the current rayon pool and the
/// widest instruction set.
///
/// `inputs` are those of the forward call. `saved` has its output and log-sum-exp, and the gradients of the loss in
/// them. Scores and weights are computed again, so memory is O(rows · head_dim) and time 2.5 times the forward pass's
/// (Dao 2023, arXiv:2307.08691). Gradients have the same bits for any number of threads.
///
/// Weights are computed from the log-sum-exp, an `f32`, with a relative error of up to 2⁻¹⁷ by its rounding. Where it is 256 or
/// more (a row that a finite mask hides wholly, scores of thousands), its rounding error counts too: from a second
/// column of `lse` ([`Outputs::lse`](crate::Outputs::lse)), or by one more product of queries and keys for the 96 rows around. A
/// call over some of the keys, with results over all, needs the second column there.
///
/// ```
/// use sdpa::{Attention, Gradients, Inputs, Outputs, Saved, View, ViewMut};
/// let shape = [1, 2, 4, 8]; // batch, heads, rows, head_dim
/// let n = 2 * 4 * 8;
/// let (q, k, v, d_out) = (vec![0.5f32; n], vec![0.25f32; n], vec![1.0f32; n], vec![1.0f32; n]);
/// let inputs = Inputs::new(View::bhld(&q, shape)?, View::bhld(&k, shape)?, View::bhld(&v, shape)?);
/// let attention = Attention::new().causal();
/// let (mut out, mut lse) = (vec![0.0f32; n], vec![0.0f32; 2 * 4]);
/// let outputs = Outputs::new(ViewMut::bhld(&mut out, shape)?).lse(ViewMut::bhl(&mut lse, [1, 2, 4])?);
/// sdpa::attention(&attention, inputs, outputs)?;
///
/// let saved = Saved::new(View::bhld(&out, shape)?, View::bhl(&lse, [1, 2, 4])?, View::bhld(&d_out, shape)?);
/// let mut dv = vec![0.0f32; n];
/// let gradients = Gradients::new().v(ViewMut::bhld(&mut dv, shape)?);
/// sdpa::attention_backward(&attention, inputs, saved, gradients)?;
/// // The first value has weight 1 in the first row, 1/2 in the second, 1/3 and 1/4 in the others.
/// assert!((dv[0] - (1.0 + 1.0 / 2.0 + 1.0 / 3.0 + 1.0 / 4.0)).abs() < 1e-6);
/// # Ok::<(), sdpa::Error>(())
/// ```
///
/// # Errors
/// Any [`Error`] of [`Attention::backward`]; gradients are then untouched. [`Error::Memory`].
pub fn attention_backward(
    attention: &Attention,
    inputs: Inputs<'_>,
    saved: Saved<'_>,
    gradients: Gradients<'_>,
) -> Result<(), Error> {
    attention_backward_with(attention, inputs, saved, gradients, Run::new())
}

/// Computes the gradients of attention with your own functions or threads, otherwise as [`attention_backward`].
///
/// The functions are those of the forward call. A score function needs its derivative: [`ScoreMod::derivative`], or
/// [`WithDerivative`](crate::WithDerivative); and may have parameters to learn: [`ScoreMod::parameter_derivatives`]. Mask functions
/// need none.
///
/// ```
/// use sdpa::{Attention, Gradients, Inputs, Mods, Outputs, Position, Run, Saved, View, ViewMut, WithDerivative};
/// let (q, k, v) = ([1.0f32], [1.0f32, 2.0], [0.0f32, 1.0]); // one row, two keys of one number, two values
/// let (row, keys) = ([1, 1, 1, 1], [1, 1, 2, 1]);
/// let inputs = Inputs::new(View::bhld(&q, row)?, View::bhld(&k, keys)?, View::bhld(&v, keys)?);
/// // Scores are squared: d s² / d s = 2s.
/// let mods = Mods::new().score(WithDerivative::new(|s: f32, _: Position| s * s, |s: f32, _: Position| 2.0 * s));
/// let (attention, mut out, mut lse) = (Attention::new(), [0.0f32], [0.0f32]);
/// let outputs = Outputs::new(ViewMut::bhld(&mut out, row)?).lse(ViewMut::bhl(&mut lse, [1, 1, 1])?);
/// sdpa::attention_with(&attention, inputs, outputs, Run::new().mods(&mods))?;
///
/// let (d_out, mut dq) = ([1.0f32], [0.0f32]);
/// let saved = Saved::new(View::bhld(&out, row)?, View::bhld(&lse, row)?, View::bhld(&d_out, row)?);
/// let gradients = Gradients::new().q(ViewMut::bhld(&mut dq, row)?);
/// sdpa::attention_backward_with(&attention, inputs, saved, gradients, Run::new().mods(&mods))?;
/// // The output is the second key's weight w = 1 / (1 + exp((k₀q)² − (k₁q)²)): d w / d q = w (1 − w) · 2 (k₁² − k₀²) q.
/// let w = 1.0 / (1.0 + (1.0f32 - 4.0).exp());
/// assert!((dq[0] - w * (1.0 - w) * 6.0).abs() < 1e-6);
/// # Ok::<(), sdpa::Error>(())
/// ```
///
/// # Errors
/// As [`attention_backward`]; [`Error::Needs`] for a score function without a derivative and for a weight function;
/// [`Error::Mismatch`] for gradients in other than all parameters of the score function; [`Error::Mask`] if the mask function
/// does not fit the call. Gradients are then untouched.
///
/// # Panics
/// If one of the functions does: see [`BackwardProblem::run_with`].
pub fn attention_backward_with<S: ScoreMod, M: MaskMod, P: WeightMod>(
    attention: &Attention,
    inputs: Inputs<'_>,
    saved: Saved<'_>,
    gradients: Gradients<'_>,
    run: Run<'_, S, M, P>,
) -> Result<(), Error> {
    attention.backward(inputs, saved, gradients)?.run_once_with(run.exec(), run)
}

impl Attention {
    /// Binds inputs, saved results and gradients of a backward call, and checks everything that can be wrong with it.
    ///
    /// Every option of the forward pass has its derivative here. Keys and values must be tensors: those of caches and
    /// pages have no gradients. [`Precision::Native`](crate::Precision::Native) and [`Precision::Accurate`](crate::Precision::Accurate)
    /// multiply as in the forward call, if keys and values take the same products there; otherwise gradients are those of
    /// [`Precision::Exact`](crate::Precision::Exact). With `Native`, weights and gradients of scores are rounded to bfloat16 before they
    /// are multiplied, by up to 2⁻⁸ of themselves, and queries and output gradients where they are not bfloat16; results saved from a
    /// native call keep their error. [`BackwardProblem::run_with`] takes your own functions.
    ///
    /// # Errors
    /// Any [`Error`] of [`Self::problem`] that concerns inputs; [`Error::Mismatch`] for saved results or gradients of
    /// other shapes; [`Error::Needs`] for caches and pages, and for gradients of options that the call does not have.
    /// Gradients are then untouched.
    pub fn backward<'a>(
        &self,
        inputs: Inputs<'a>,
        saved: Saved<'a>,
        gradients: Gradients<'a>,
    ) -> Result<BackwardProblem<'a>, Error> {
        let checked = self.checked_backward(&inputs, &saved, &gradients)?;
        let shape = Shape::of(checked.call());
        let tiling =
            Tiling::for_backward(shape.head_dim, shape.value_dim, Isa::detect().tile().0).with_parts(MAX_PARTS);
        scratch_of(BackwardScratch::bytes_for(&tiling))?;
        Ok(BackwardProblem { checked, saved, gradients, part: Part::Whole, shape })
    }

    /// Returns the call, if everything fits together.
    pub(crate) fn checked_backward<'a>(
        &self,
        inputs: &Inputs<'a>,
        saved: &Saved<'_>,
        gradients: &Gradients<'_>,
    ) -> Result<CheckedCall<'a>, Error> {
        let checked = self.checked(inputs)?;
        saved.fits(checked.call())?;
        gradients.fits(&checked.with_given_bias())?;
        Ok(checked)
    }
}
