//! Checks of the tensors of a backward call: saved results of the forward call, and the gradients to compute.

use crate::error::{Error, ONE_A_ROW, one, same};
use crate::inputs::Inputs;
use crate::shape::Shape;
use sdpa_kernels::{Gradients, Saved};

pub(crate) fn check_saved(saved: &Saved<'_>, inputs: &Inputs<'_>, shape: &Shape) -> Result<(), Error> {
    let (q, Saved { out, lse, d_out, d_lse }) = (inputs.q.shape(), saved);
    has_rows("out", out.shape(), q, shape.value_dim)?;
    has_values("lse", lse.shape(), q)?;
    has_rows("d_out", d_out.shape(), q, shape.value_dim)?;
    d_lse.map_or(Ok(()), |d_lse| has_values("d_lse", d_lse.shape(), q))
}

/// Shape of a tensor, by its name in error messages.
pub(crate) fn shape_of_saved(saved: &Saved<'_>, argument: &str) -> Option<[usize; 4]> {
    let Saved { out, lse, d_out, d_lse } = saved;
    match argument {
        "out" => Some(out.shape()),
        "lse" => Some(lse.shape()),
        "d_out" => Some(d_out.shape()),
        "d_lse" => d_lse.map(|d_lse| d_lse.shape()),
        _ => None,
    }
}

pub(crate) fn check_gradients(gradients: &Gradients<'_>, inputs: &Inputs<'_>, shape: &Shape) -> Result<(), Error> {
    let kv = inputs.key_values()?;
    let tensors = [
        ("dq", &gradients.q, inputs.q.shape(), "q"),
        ("dk", &gradients.k, kv.k_shape(), "k"),
        ("dv", &gradients.v, kv.v_shape(), "v"),
    ];
    for (argument, gradient, expected, of) in tensors {
        let Some(gradient) = gradient else { continue };
        fits(argument, gradient.shape(), expected, of)?;
    }
    if let Some(gradient) = &gradients.bias {
        let needed = Error::Needs { argument: "dbias", needs: "a bias, which the call does not have" };
        fits("dbias", gradient.shape(), inputs.bias.ok_or(needed)?.of.shape(), "bias")?;
    }
    let lists = [
        ("dsinks", &gradients.sinks, inputs.sinks, "sinks, which the call does not have"),
        ("dslopes", &gradients.slopes, inputs.alibi, "ALiBi slopes, which the call does not have"),
    ];
    for (argument, gradient, option, needs) in lists {
        let Some(gradient) = gradient else { continue };
        option.ok_or(Error::Needs { argument, needs })?;
        same(argument, "length", gradient.len(), shape.heads, "q (heads)")?;
    }
    Ok(())
}

/// Shape of a gradient, by its name in error messages.
pub(crate) fn shape_of_gradient(gradients: &Gradients<'_>, argument: &str) -> Option<[usize; 4]> {
    let Gradients { q, k, v, .. } = gradients;
    let gradient = match argument {
        "dq" => q,
        "dk" => k,
        "dv" => v,
        _ => return None,
    };
    gradient.as_ref().map(|gradient| gradient.shape())
}

/// Checks that a gradient has the shape of what it is a gradient in.
pub(crate) fn fits(
    argument: &'static str,
    shape: [usize; 4],
    expected: [usize; 4],
    of: &'static str,
) -> Result<(), Error> {
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
