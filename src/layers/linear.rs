//! Projections: y = f(x·Wᵀ + b).

use super::{Activation, Compute};
use crate::error::same;
use crate::error::{Error, floats};
use crate::share;
use sdpa_kernels::Packed;

/// Packed weights come in panels of so many outputs.
const PANEL: usize = 16;

/// A matrix of weights as a model file has it, and perhaps a bias: what a [`Linear`] is made of.
///
/// ```
/// use sdpa::layers::{Linear, Weights};
/// let (weight, bias) = ([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [0.5, -0.5]);
/// let linear = Linear::new(Weights::rows(&weight, [2, 3])?.bias(&bias)?);
/// assert_eq!((linear.inputs(), linear.outputs()), (3, 2));
/// # Ok::<(), sdpa::Error>(())
/// ```
#[derive(Debug, Clone, Copy)]
pub struct Weights<'a> {
    data: &'a [f32],
    /// Outputs, inputs.
    shape: [usize; 2],
    strides: (usize, usize),
    bias: Option<&'a [f32]>,
}

impl<'a> Weights<'a> {
    /// `[outputs, inputs]`, row-major: a row for each output, as PyTorch's `nn.Linear` stores it.
    ///
    /// # Errors
    /// [`Error::Mismatch`] if the slice is not of that size, [`Error::Empty`] if a row is, [`Error::TooLarge`] if weights of
    /// that shape cannot be packed.
    pub fn rows(data: &'a [f32], [outputs, inputs]: [usize; 2]) -> Result<Self, Error> {
        Self::new(data, [outputs, inputs], (inputs, 1))
    }

    /// `[inputs, outputs]`, row-major: a column for each output, as GPT-2's `Conv1D` stores it.
    ///
    /// # Errors
    /// As for [`Self::rows`].
    pub fn columns(data: &'a [f32], [inputs, outputs]: [usize; 2]) -> Result<Self, Error> {
        Self::new(data, [outputs, inputs], (1, outputs))
    }

    fn new(data: &'a [f32], shape: [usize; 2], strides: (usize, usize)) -> Result<Self, Error> {
        let [outputs, inputs] = shape;
        if inputs == 0 {
            return Err(Error::Empty { argument: "weights", what: "inputs" });
        }
        let sizes = [outputs, inputs, 1, 1];
        // One panel at least, for those without outputs: then rows of x have a size too.
        let Some(padded) = outputs.max(1).checked_next_multiple_of(PANEL) else {
            return Err(Error::TooLarge { what: "weights", sizes });
        };
        floats("weights", [padded, inputs, 1, 1]).map_err(|_| Error::TooLarge { what: "weights", sizes })?;
        same("weights", "length", data.len(), outputs * inputs, "their shape")?;
        Ok(Self { data, shape, strides, bias: None })
    }

    /// Added to each row of results.
    ///
    /// # Errors
    /// [`Error::Mismatch`] unless there is one for each output.
    pub fn bias(self, bias: &'a [f32]) -> Result<Self, Error> {
        same("bias", "length", bias.len(), self.shape[0], "the weights (outputs)")?;
        Ok(Self { bias: Some(bias), ..self })
    }

    /// Some of the outputs, with their part of the bias: models store the projections of q, k and v as one.
    ///
    /// # Errors
    /// [`Error::Mismatch`] if there are not so many outputs.
    pub fn part(self, outputs: core::ops::Range<usize>) -> Result<Self, Error> {
        let [all, inputs] = self.shape;
        if outputs.start > outputs.end || outputs.end > all {
            let got = outputs.start.max(outputs.end);
            return Err(Error::Mismatch { argument: "part", what: "outputs", got, expected: all, of: "the weights" });
        }
        let data = if outputs.is_empty() { &[] } else { &self.data[outputs.start * self.strides.0..] };
        let bias = self.bias.map(|bias| &bias[outputs.clone()]);
        Ok(Self { data, shape: [outputs.len(), inputs], bias, ..self })
    }
}

/// A projection, y = f(x·Wᵀ + b), with its weights packed once: x is rows of `inputs`, y rows of `outputs`.
///
/// Takes 2·rows·inputs·outputs operations. Rows, or columns where rows are few, are shared out over the current rayon
/// pool; a row's results depend on that row and the weights alone, to the bit. The sums are those of the attention
/// scores: chains of at most 32 FMAs, added up in order.
#[derive(Debug)]
pub struct Linear {
    packed: Packed,
}

impl Linear {
    /// Packs the weights: one copy, in another order.
    pub fn new(weights: Weights<'_>) -> Self {
        Self { packed: Packed::new(weights.data, weights.shape, weights.strides, weights.bias) }
    }

    /// Applies a function to each result, before it leaves the cache.
    #[must_use]
    pub fn then(self, activation: Activation) -> Self {
        Self { packed: self.packed.then(activation) }
    }

    /// Length of a row of x.
    pub fn inputs(&self) -> usize {
        self.packed.inputs()
    }

    /// Length of a row of y.
    pub fn outputs(&self) -> usize {
        self.packed.outputs()
    }

    /// Writes y for each row of x.
    ///
    /// # Errors
    /// [`Error::Mismatch`] if `x` is not whole rows or `out` has not as many; `out` is then untouched.
    pub fn forward(&self, x: &[f32], out: &mut [f32], compute: &mut Compute) -> Result<(), Error> {
        let rows = rows_of("x", x, self.inputs())?;
        check_rows("out", out, rows, self.outputs())?;
        share::multiply(compute.exec(), [self.product(x, out)]);
        Ok(())
    }

    /// What [`share::multiply`] takes; sizes have been checked.
    pub(crate) fn product<'a>(&'a self, x: &'a [f32], out: &'a mut [f32]) -> (&'a [f32], &'a Packed, &'a mut [f32]) {
        (x, &self.packed, out)
    }
}

/// How many rows of this width there are, if they are whole.
pub(crate) fn rows_of(argument: &'static str, x: &[f32], width: usize) -> Result<usize, Error> {
    let rows = x.len().checked_div(width).unwrap_or(0);
    same(argument, "length", x.len(), rows * width, "whole rows")?;
    Ok(rows)
}

/// Whether there are as many rows of this width.
pub(crate) fn check_rows(argument: &'static str, x: &[f32], rows: usize, width: usize) -> Result<(), Error> {
    let Some(size) = rows.checked_mul(width) else {
        return Err(Error::TooLarge { what: argument, sizes: [rows, width, 1, 1] });
    };
    same(argument, "length", x.len(), size, "its rows times their width")
}
