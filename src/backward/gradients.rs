//! Tensors of a backward call: saved results of the forward call, and the gradients to compute.

use crate::error::{Error, ONE_A_ROW, one, same};
use crate::inputs::Inputs;
use crate::shape::Shape;
use sdpa_kernels::{Tensor, TensorMut, View, ViewMut};

/// Results of a forward call, and the gradients of the loss in them.
///
/// ```
/// use sdpa::{Saved, View};
/// let (out, lse, d_out) = ([0.5f32; 3 * 8], [1.0; 3], [1.0f32; 3 * 8]);
/// let shape = [1, 1, 3, 8]; // batch, heads, rows, value_dim
/// let rows = |x| View::bhld(x, shape);
/// let saved = Saved::new(rows(&out)?, View::bhld(&lse, [1, 1, 3, 1])?, rows(&d_out)?);
/// # Ok::<(), sdpa::Error>(())
/// ```
#[derive(Debug, Clone, Copy)]
pub struct Saved<'a>(sdpa_kernels::Saved<'a>);

impl<'a> Saved<'a> {
    /// Takes the forward call's output `out`, `[batch, heads, q_len, value_dim]`, and its log-sum-exp `lse`, `[batch,
    /// heads, q_len, 1]`, both as that call wrote them; and `d_out`, the gradient of the loss in the output.
    pub fn new(out: impl Into<Tensor<'a>>, lse: View<'a>, d_out: impl Into<Tensor<'a>>) -> Self {
        Self(sdpa_kernels::Saved { out: out.into(), lse, d_out: d_out.into(), d_lse: None })
    }

    /// Adds the gradient of the loss in the log-sum-exp, `[batch, heads, q_len, 1]`: 0 by default.
    #[must_use]
    pub fn d_lse(self, d_lse: View<'a>) -> Self {
        Self(sdpa_kernels::Saved { d_lse: Some(d_lse), ..self.0 })
    }

    pub(crate) fn check(&self, inputs: &Inputs<'_>, shape: &Shape) -> Result<(), Error> {
        let (q, sdpa_kernels::Saved { out, lse, d_out, d_lse }) = (inputs.q.shape(), &self.0);
        has_rows("out", out.shape(), q, shape.value_dim)?;
        has_values("lse", lse.shape(), q)?;
        has_rows("d_out", d_out.shape(), q, shape.value_dim)?;
        d_lse.map_or(Ok(()), |d_lse| has_values("d_lse", d_lse.shape(), q))
    }

    /// Shape of a tensor, by its name in error messages.
    pub(crate) fn shape_of(&self, argument: &str) -> Option<[usize; 4]> {
        let sdpa_kernels::Saved { out, lse, d_out, d_lse } = &self.0;
        match argument {
            "out" => Some(out.shape()),
            "lse" => Some(lse.shape()),
            "d_out" => Some(d_out.shape()),
            "d_lse" => d_lse.map(|d_lse| d_lse.shape()),
            _ => None,
        }
    }

    pub(crate) fn into_kernel(self) -> sdpa_kernels::Saved<'a> {
        self.0
    }
}

/// Gradients that a backward call computes: only those that are added here.
///
/// ```
/// use sdpa::{Gradients, ViewMut};
/// let (mut dq, mut dk, mut dv) = ([0.0f32; 4 * 8], [0.0f32; 6 * 8], [0.0f32; 6 * 8]);
/// let gradients = Gradients::new()
///     .q(ViewMut::bhld(&mut dq, [1, 1, 4, 8])?)
///     .k(ViewMut::bhld(&mut dk, [1, 1, 6, 8])?)
///     .v(ViewMut::bhld(&mut dv, [1, 1, 6, 8])?);
/// # Ok::<(), sdpa::Error>(())
/// ```
#[derive(Debug, Default)]
pub struct Gradients<'a>(sdpa_kernels::Gradients<'a>);

impl<'a> Gradients<'a> {
    /// Creates a set without gradients.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds the gradient in the queries, in the shape of q and of any element type: sums are `f32`, rounded once when
    /// they are written. Queries that see no key get 0.
    #[must_use]
    pub fn q(self, dq: impl Into<TensorMut<'a>>) -> Self {
        Self(sdpa_kernels::Gradients { q: Some(dq.into()), ..self.0 })
    }

    /// Adds the gradient in the keys, in the shape of k and of any element type, summed over the query heads that share
    /// a key/value head. Keys that no row sees get 0.
    #[must_use]
    pub fn k(self, dk: impl Into<TensorMut<'a>>) -> Self {
        Self(sdpa_kernels::Gradients { k: Some(dk.into()), ..self.0 })
    }

    /// Adds the gradient in the values, in the shape of v and of any element type, summed as for [`Self::k`].
    #[must_use]
    pub fn v(self, dv: impl Into<TensorMut<'a>>) -> Self {
        Self(sdpa_kernels::Gradients { v: Some(dv.into()), ..self.0 })
    }

    /// Adds the gradient in the bias, in the shape of the bias: summed over the dimensions along which the bias is
    /// broadcast.
    #[must_use]
    pub fn bias(self, dbias: ViewMut<'a>) -> Self {
        Self(sdpa_kernels::Gradients { bias: Some(dbias), ..self.0 })
    }

    /// Adds the gradients in the sinks, one per query head.
    #[must_use]
    pub fn sinks(self, dsinks: &'a mut [f32]) -> Self {
        Self(sdpa_kernels::Gradients { sinks: Some(dsinks), ..self.0 })
    }

    /// Adds the gradients in the ALiBi slopes, one per query head.
    #[must_use]
    pub fn alibi(self, dslopes: &'a mut [f32]) -> Self {
        Self(sdpa_kernels::Gradients { slopes: Some(dslopes), ..self.0 })
    }

    /// Adds the gradient in the scale.
    #[must_use]
    pub fn scale(self, dscale: &'a mut f32) -> Self {
        Self(sdpa_kernels::Gradients { scale: Some(dscale), ..self.0 })
    }

    pub(crate) fn check(&self, inputs: &Inputs<'_>, shape: &Shape) -> Result<(), Error> {
        let kv = inputs.key_values()?;
        let tensors = [
            ("dq", &self.0.q, inputs.q.shape(), "q"),
            ("dk", &self.0.k, kv.k_shape(), "k"),
            ("dv", &self.0.v, kv.v_shape(), "v"),
        ];
        for (argument, gradient, expected, of) in tensors {
            let Some(gradient) = gradient else { continue };
            fits(argument, gradient.shape(), expected, of)?;
        }
        if let Some(gradient) = &self.0.bias {
            let needed = Error::Needs { argument: "dbias", needs: "a bias, which the call does not have" };
            fits("dbias", gradient.shape(), inputs.bias.ok_or(needed)?.of.shape(), "bias")?;
        }
        let lists = [
            ("dsinks", &self.0.sinks, inputs.sinks, "sinks, which the call does not have"),
            ("dslopes", &self.0.slopes, inputs.alibi, "ALiBi slopes, which the call does not have"),
        ];
        for (argument, gradient, option, needs) in lists {
            let Some(gradient) = gradient else { continue };
            option.ok_or(Error::Needs { argument, needs })?;
            same(argument, "length", gradient.len(), shape.heads, "q (heads)")?;
        }
        Ok(())
    }

    /// Shape of a gradient, by its name in error messages.
    pub(crate) fn shape_of(&self, argument: &str) -> Option<[usize; 4]> {
        let sdpa_kernels::Gradients { q, k, v, .. } = &self.0;
        let gradient = match argument {
            "dq" => q,
            "dk" => k,
            "dv" => v,
            _ => return None,
        };
        gradient.as_ref().map(|gradient| gradient.shape())
    }

    pub(crate) fn into_kernel(self) -> sdpa_kernels::Gradients<'a> {
        self.0
    }
}

/// Checks that a gradient has the shape of what it is a gradient in.
fn fits(argument: &'static str, shape: [usize; 4], expected: [usize; 4], of: &'static str) -> Result<(), Error> {
    let names = ["batch", "heads", "rows", "last dimension"];
    names
        .into_iter()
        .zip(shape)
        .zip(expected)
        .try_for_each(|((what, got), expected)| same(argument, what, got, expected, of))
}

/// Checks that a tensor has a row for each of the queries, of `dim` elements.
fn has_rows(argument: &'static str, shape: [usize; 4], q: [usize; 4], dim: usize) -> Result<(), Error> {
    each_row(argument, shape, q)?;
    same(argument, "value_dim", shape[3], dim, "v")
}

/// Checks that a tensor has one value for each row of the queries.
fn has_values(argument: &'static str, shape: [usize; 4], q: [usize; 4]) -> Result<(), Error> {
    each_row(argument, shape, q)?;
    one(argument, shape[3], ONE_A_ROW)
}

fn each_row(argument: &'static str, shape: [usize; 4], q: [usize; 4]) -> Result<(), Error> {
    same(argument, "batch", shape[0], q[0], "q")?;
    same(argument, "heads", shape[1], q[1], "q")?;
    same(argument, "rows", shape[2], q[2], "q")
}
