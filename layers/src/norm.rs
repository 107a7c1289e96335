//! Layer norm and RMS norm.

use crate::compute::Compute;
use crate::error::same;
use crate::linear::rows_of;
use crate::share::{self, RowSlice};
use sdpa::Error;
use sdpa_kernels::Center;

/// Cost of normalising a number, in the operations that [`sdpa::Exec`] counts: 0.2 ns, measured, at 117 GFLOP/s.
const COST: f64 = 24.0;

/// Layer norm or RMS norm of each row.
///
/// ```text
/// y = (x − mean) / √(variance + eps) · gain + bias          layer norm (Ba, Kiros, Hinton 2016, arXiv:1607.06450)
/// y = x / √(mean of x² + eps) · gain + bias                 RMS norm (Zhang, Sennrich 2019, arXiv:1910.07467)
/// ```
///
/// The variance is that of the row itself (divided by its width). The error is at most 1e-6, relative to the larger of
/// the exact result and gain·y, however large the mean is compared to the spread; squares that overflow f32 are not
/// handled. A row's result depends on that row alone, to the bit; a NaN or an infinity makes its row NaN. Takes three
/// passes over a row in first-level cache; threads of the current rayon pool share many rows.
///
/// ```
/// use sdpa_layers::{Compute, Norm};
/// let norm = Norm::layer([1.0, 1.0, 1.0], 1e-5)?.bias([0.0, 0.0, 1.0])?;
/// let mut out = [0.0; 3];
/// norm.forward(&[1.0, 2.0, 3.0], &mut out, &mut Compute::default())?;
/// assert!((out[2] - (1.5f32.sqrt() + 1.0)).abs() < 1e-4);
/// # Ok::<(), sdpa::Error>(())
/// ```
#[derive(Debug, Clone)]
#[doc(alias = "LayerNorm", alias = "RMSNorm")]
pub struct Norm {
    center: Center,
    gain: Vec<f32>,
    bias: Option<Vec<f32>>,
    eps: f32,
}

impl Norm {
    /// Layer norm of rows as wide as the gain, `[width]`, without a bias.
    ///
    /// # Errors
    /// [`Error::Empty`] if the width is 0, [`Error::Number`] unless `eps` is finite and not negative.
    pub fn layer(gain: impl Into<Vec<f32>>, eps: f32) -> Result<Self, Error> {
        Self::new(Center::Mean, gain.into(), eps)
    }

    /// RMS norm of rows as wide as the gain, `[width]`, without a bias.
    ///
    /// # Errors
    /// As for [`Self::layer`].
    pub fn rms(gain: impl Into<Vec<f32>>, eps: f32) -> Result<Self, Error> {
        Self::new(Center::Zero, gain.into(), eps)
    }

    fn new(center: Center, gain: Vec<f32>, eps: f32) -> Result<Self, Error> {
        if gain.is_empty() {
            return Err(Error::Empty { argument: "norm", what: "width" });
        }
        if !(eps >= 0.0 && eps.is_finite()) {
            return Err(Error::Number { argument: "norm eps", got: eps, expected: "finite and not negative" });
        }
        Ok(Self { center, gain, bias: None, eps })
    }

    /// Sets the bias, `[width]`, which is added to each row of results.
    ///
    /// # Errors
    /// [`Error::Mismatch`] unless it is as wide as the gain.
    pub fn bias(self, bias: impl Into<Vec<f32>>) -> Result<Self, Error> {
        let bias = bias.into();
        same("norm bias", "length", bias.len(), self.width(), "the gain")?;
        Ok(Self { bias: Some(bias), ..self })
    }

    /// Width of a row.
    pub fn width(&self) -> usize {
        self.gain.len()
    }

    /// Writes the norm of each row of `x` to `out`, `[rows, width]` both.
    ///
    /// # Errors
    /// [`Error::Range`] if `x` is not whole rows, [`Error::Mismatch`] if `out` is not as long; `out` is then untouched.
    pub fn forward(&self, x: &[f32], out: &mut [f32], compute: &mut Compute) -> Result<(), Error> {
        let rows = rows_of("x", x, self.width())?;
        same("out", "length", out.len(), x.len(), "x")?;
        let (norm, exec) = (self.kernel(), compute.exec());
        let operands = (RowSlice(x, self.width()), RowSlice(out, self.width()));
        share::rows(exec, rows, COST * x.len() as f64, operands, |_, (x, out)| {
            norm.apply(exec.instruction_set(), x.0, out.0)
        });
        Ok(())
    }

    /// Computes `x ← x + add`, then writes the norm of each row of `x` to `out`, `[rows, width]` all three: the end of
    /// a residual branch and the norm that follows it.
    ///
    /// # Errors
    /// As for [`Self::forward`]; `x` is then untouched too.
    pub fn add_and_forward(
        &self,
        x: &mut [f32],
        add: &[f32],
        out: &mut [f32],
        compute: &mut Compute,
    ) -> Result<(), Error> {
        let rows = rows_of("x", x, self.width())?;
        same("add", "length", add.len(), x.len(), "x")?;
        same("out", "length", out.len(), x.len(), "x")?;
        let (norm, exec, width) = (self.kernel(), compute.exec(), self.width());
        let cost = COST * x.len() as f64;
        let operands = ((RowSlice(x, width), RowSlice(add, width)), RowSlice(out, width));
        share::rows(exec, rows, cost, operands, |_, ((x, add), out)| {
            norm.add_and_apply(exec.instruction_set(), x.0, add.0, out.0);
        });
        Ok(())
    }

    fn kernel(&self) -> sdpa_kernels::Norm<'_> {
        sdpa_kernels::Norm { center: self.center, gain: &self.gain, bias: self.bias.as_deref(), eps: self.eps }
    }
}
