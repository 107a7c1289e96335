//! Feed-forward part of a transformer layer.

use crate::compute::Compute;
use crate::error::same;
use crate::linear::{Linear, check_rows, rows_of};
use crate::share::{self, RowSlice};
use sdpa::{Error, Precision};
use sdpa_kernels::Activation;

/// Number of rows per thread that are processed at once: four tasks of a projection. So hidden rows stay in cache, and
/// memory does not grow with the number of rows.
const CHUNK_ROWS: usize = 384;

/// Cost of gating a number, in the operations that [`sdpa::Exec`] counts: at most 0.5 ns, measured, at 117 GFLOP/s.
const COST: f64 = 60.0;

/// Feed-forward network, two projections with an activation between them, applied to each row: down(f(up(x))), or
/// gated, down(f(gate(x)) · up(x)) (Shazeer 2020, arXiv:2002.05202; SwiGLU with [`Activation::Silu`]).
///
/// Each projection takes 2·rows·width·hidden operations. A row's result depends on that row alone, to the bit. Memory
/// is at most 384 hidden rows per thread (twice that if gated), however many rows there are.
///
/// ```
/// use sdpa_layers::{Activation, Compute, FeedForward, Linear, Weights};
/// let up = Linear::new(Weights::rows(&[1.0, -1.0], [2, 1])?);
/// let down = Linear::new(Weights::rows(&[1.0, 1.0], [1, 2])?);
/// let size = FeedForward::new(Activation::Relu, up, down)?;
/// let mut out = [0.0; 3];
/// size.forward(&[3.0, 0.0, -2.0], &mut out, &mut Compute::default())?;
/// assert_eq!(out, [3.0, 0.0, 2.0]);
/// # Ok::<(), sdpa::Error>(())
/// ```
#[derive(Debug)]
#[doc(alias = "MLP", alias = "SwiGLU")]
pub struct FeedForward {
    /// Gate projection, and the activation of its result.
    gate: Option<(Linear, Activation)>,
    up: Linear,
    down: Linear,
}

impl FeedForward {
    /// Takes the projections of down(f(up(x))).
    ///
    /// # Errors
    /// [`Error::Mismatch`] if the projections do not fit together, [`Error::Empty`] if `down` has no outputs.
    pub fn new(activation: Activation, up: Linear, down: Linear) -> Result<Self, Error> {
        same("down projection", "inputs", down.inputs(), up.outputs(), "the up projection (outputs)")?;
        if down.outputs() == 0 {
            return Err(Error::Empty { argument: "down projection", what: "outputs" });
        }
        Ok(Self { gate: None, up: up.then(activation), down })
    }

    /// Takes the projections of down(f(gate(x)) · up(x)).
    ///
    /// # Errors
    /// As for [`Self::new`].
    pub fn gated(activation: Activation, gate: Linear, up: Linear, down: Linear) -> Result<Self, Error> {
        same("gate projection", "inputs", gate.inputs(), up.inputs(), "the up projection")?;
        same("gate projection", "outputs", gate.outputs(), up.outputs(), "the up projection")?;
        Ok(Self { gate: Some((gate, activation)), ..Self::new(Activation::Identity, up, down)? })
    }

    /// Sets the precision of the projections, as [`Linear::precision`] does.
    #[must_use]
    pub fn precision(self, precision: Precision) -> Self {
        let gate = self.gate.map(|(gate, activation)| (gate.precision(precision), activation));
        Self { gate, up: self.up.precision(precision), down: self.down.precision(precision) }
    }

    /// Width of the rows of x.
    pub fn inputs(&self) -> usize {
        self.up.inputs()
    }

    /// Width of the rows between the projections.
    pub fn hidden(&self) -> usize {
        self.up.outputs()
    }

    /// Width of the rows of `out`.
    pub fn outputs(&self) -> usize {
        self.down.outputs()
    }

    /// Writes a row of `out`, `[rows, outputs]`, for each row of `x`, `[rows, inputs]`.
    ///
    /// # Errors
    /// [`Error::Range`] if `x` is not whole rows or `out` does not have the same number of rows; [`Error::Memory`]. `out` is then
    /// untouched.
    pub fn forward(&self, x: &[f32], out: &mut [f32], compute: &mut Compute) -> Result<(), Error> {
        let rows = rows_of("x", x, self.inputs())?;
        check_rows("out", out, rows, self.outputs())?;
        let exec = compute.exec();
        let chunk = CHUNK_ROWS.saturating_mul(compute.threads()).min(rows);
        let (most, factors) = (chunk.max(1), if self.gate.is_some() { chunk } else { 0 });
        let [mut hidden, mut factor] =
            compute.buffers("hidden rows", [[chunk, self.hidden()], [factors, self.hidden()]])?;
        for (x, out) in x.chunks(most * self.inputs()).zip(out.chunks_mut(most * self.outputs())) {
            let (rows, width) = (x.len() / self.inputs(), self.hidden());
            let hidden = &mut hidden[..rows * width];
            match &self.gate {
                None => share::multiply(exec, [self.up.product(x, hidden)]),
                Some((gate, activation)) => {
                    let factor = &mut factor[..rows * width];
                    share::multiply(exec, [gate.product(x, hidden), self.up.product(x, factor)]);
                    let pair = (RowSlice(&mut *hidden, width), RowSlice(&*factor, width));
                    share::rows(exec, rows, COST * (rows * width) as f64, pair, |_, (gate, up)| {
                        activation.gate(exec.instruction_set(), gate.0, up.0);
                    });
                }
            }
            share::multiply(exec, [self.down.product(hidden, out)]);
        }
        compute.recycle(hidden);
        compute.recycle(factor);
        Ok(())
    }
}
