//! Projections: y = f(x·Wᵀ + b).

use crate::compute::Compute;
use crate::error::{at_most, exactly, floats, multiple_of, same};
use crate::share;
use sdpa::{Error, Precision};
use sdpa_kernels::{Activation, Packed};

/// Number of outputs in a panel of packed weights.
const PANEL: usize = 16;

/// Weight matrix as a model file stores it, with an optional bias: the source of a [`Linear`].
///
/// ```
/// use sdpa_layers::{Linear, Weights};
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
    /// Takes weights `[outputs, inputs]`, row-major: a row for each output, as PyTorch's `nn.Linear` stores them.
    ///
    /// # Errors
    /// [`Error::Range`] if the slice does not have that size, [`Error::Empty`] if a row is empty,
    /// [`Error::TooLarge`] if weights of that shape cannot be packed.
    pub fn rows(data: &'a [f32], [outputs, inputs]: [usize; 2]) -> Result<Self, Error> {
        Self::new(data, [outputs, inputs], (inputs, 1))
    }

    /// Takes weights `[inputs, outputs]`, row-major: a column for each output, as GPT-2's `Conv1D` stores them.
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
        // At least one panel, even without outputs: the length of a row of x is then bounded too.
        let Some(padded) = outputs.max(1).checked_next_multiple_of(PANEL) else {
            return Err(Error::TooLarge { what: "weights", sizes });
        };
        floats("weights", [padded, inputs, 1, 1]).map_err(|_| Error::TooLarge { what: "weights", sizes })?;
        exactly(outputs * inputs, "outputs × inputs").check("weights", "length", data.len())?;
        Ok(Self { data, shape, strides, bias: None })
    }

    /// Sets the bias, `[outputs]`, which is added to each row of results.
    ///
    /// # Errors
    /// [`Error::Mismatch`] unless there is one number for each output.
    pub fn bias(self, bias: &'a [f32]) -> Result<Self, Error> {
        same("bias", "length", bias.len(), self.shape[0], "the weights (outputs)")?;
        Ok(Self { bias: Some(bias), ..self })
    }

    /// Selects some of the outputs and their biases: many models store the projections of q, k and v as one.
    ///
    /// # Errors
    /// [`Error::Range`] if the weights have fewer outputs.
    pub fn part(self, outputs: core::ops::Range<usize>) -> Result<Self, Error> {
        let [all, inputs] = self.shape;
        at_most(all, "the outputs of the weights").check("part", "end", outputs.end)?;
        at_most(outputs.end, "its end").check("part", "start", outputs.start)?;
        let data = if outputs.is_empty() { &[] } else { &self.data[outputs.start * self.strides.0..] };
        let bias = self.bias.map(|bias| &bias[outputs.clone()]);
        Ok(Self { data, shape: [outputs.len(), inputs], bias, ..self })
    }
}

/// Linear projection, y = f(x·Wᵀ + b), with weights packed once: x has rows of `inputs` numbers, y rows of `outputs`.
///
/// Takes 2·rows·inputs·outputs operations. The threads of the current rayon pool share the rows, or the columns if rows
/// are few. A row's results depend only on that row and the weights, to the bit. Sums are computed like those of
/// attention scores: in chains of at most 32 FMAs, added up in order, or as [`Self::precision`] says.
///
/// ```
/// use sdpa_layers::{Activation, Compute, Linear, Weights};
/// let linear = Linear::new(Weights::rows(&[1.0, 2.0, -1.0, -2.0], [2, 2])?).then(Activation::Relu);
/// let mut out = [0.0; 4];
/// linear.forward(&[1.0, 1.0, 0.0, -1.0], &mut out, &mut Compute::default())?; // two rows
/// assert_eq!(out, [3.0, 0.0, 0.0, 2.0]);
/// # Ok::<(), sdpa::Error>(())
/// ```
#[derive(Debug)]
pub struct Linear {
    packed: Packed,
}

impl Linear {
    /// Packs the weights: one copy, in another order.
    pub fn new(weights: Weights<'_>) -> Self {
        Self { packed: Packed::new(weights.data, weights.shape, weights.strides, weights.bias) }
    }

    /// Applies an activation to each result before it leaves the cache.
    #[must_use]
    pub fn then(self, activation: Activation) -> Self {
        Self { packed: self.packed.then(activation) }
    }

    /// Sets the precision of the products: [`Precision::Accurate`] multiplies on a matrix unit, for any number of rows, with the
    /// errors of the naive loop or smaller. If this machine has a unit, the weights are packed once more, in parts: 10 bytes a weight
    /// in place of 4, so that instruction sets without a unit stay exact. Few rows are memory-bound, and read 6 of these bytes. An
    /// infinite number makes NaN of its sums. Weights are `f32`, so other precisions are exact.
    ///
    /// ```
    /// use sdpa::Precision;
    /// use sdpa_layers::{Compute, Linear, Weights};
    /// let linear = Linear::new(Weights::rows(&[1.0, 2.0], [1, 2])?).precision(Precision::Accurate);
    /// let mut out = [0.0];
    /// linear.forward(&[3.0, 4.0], &mut out, &mut Compute::default())?;
    /// assert_eq!(out, [11.0]);
    /// # Ok::<(), sdpa::Error>(())
    /// ```
    ///
    /// # Panics
    /// If there is no memory for the parts.
    #[must_use]
    pub fn precision(self, precision: Precision) -> Self {
        Self { packed: self.packed.precision(precision) }
    }

    /// Width of the rows of x.
    pub fn inputs(&self) -> usize {
        self.packed.inputs()
    }

    /// Width of the rows of y.
    pub fn outputs(&self) -> usize {
        self.packed.outputs()
    }

    /// Writes a row of `out`, `[rows, outputs]`, for each row of `x`, `[rows, inputs]`.
    ///
    /// # Errors
    /// [`Error::Range`] if `x` is not whole rows or `out` does not have the same number of rows; `out` is then untouched.
    pub fn forward(&self, x: &[f32], out: &mut [f32], compute: &mut Compute) -> Result<(), Error> {
        let rows = rows_of("x", x, self.inputs())?;
        check_rows("out", out, rows, self.outputs())?;
        share::multiply(compute.exec(), [self.product(x, out)]);
        Ok(())
    }

    /// Returns the product in the form that [`share::multiply`] takes; the sizes must have been checked.
    pub(crate) fn product<'a>(&'a self, x: &'a [f32], out: &'a mut [f32]) -> (&'a [f32], &'a Packed, &'a mut [f32]) {
        (x, &self.packed, out)
    }
}

/// Returns the number of rows of this width, or [`Error::Range`] if they are not whole.
pub(crate) fn rows_of(argument: &'static str, x: &[f32], width: usize) -> Result<usize, Error> {
    let rows = x.len().checked_div(width).unwrap_or(0);
    multiple_of(width, "the width of a row").check(argument, "length", x.len())?;
    Ok(rows)
}

/// Returns [`Error::Range`] unless `x` has `rows` rows of this width.
pub(crate) fn check_rows(argument: &'static str, x: &[f32], rows: usize, width: usize) -> Result<(), Error> {
    let Some(size) = rows.checked_mul(width) else {
        return Err(Error::TooLarge { what: argument, sizes: [rows, width, 1, 1] });
    };
    exactly(size, "the number of rows × their width").check(argument, "length", x.len())
}
