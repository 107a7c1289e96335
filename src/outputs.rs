//! Checks that tensors that a call writes fit its inputs.

use crate::error::{Error, ONE_A_ROW, one, same};
use crate::inputs::Inputs;
use crate::shape::Shape;
use sdpa_kernels::{KeyValues, Outputs, Ragged};

/// Names of the scores at each point, in error messages.
const POINTS: [&str; 4] = ["raw scores", "softcapped scores", "masked scores", "weights"];

/// Returns the name of the first output, if any, that has an element for every key, hidden or not.
pub(crate) fn of_all_keys(outputs: &Outputs<'_>) -> Option<&'static str> {
    let point = POINTS.into_iter().zip(&outputs.points).find(|(_, given)| given.is_some());
    point.map(|(name, _)| name).or(outputs.key_weight_sums.as_ref().map(|_| "key weight sums"))
}

/// Refuses outputs that need all keys at once.
pub(crate) fn check_for_state(outputs: &Outputs<'_>) -> Result<(), Error> {
    let needs = "a call over all keys, not a state";
    of_all_keys(outputs).map_or(Ok(()), |argument| Err(Error::Needs { argument, needs }))
}

pub(crate) fn check(
    outputs: &Outputs<'_>,
    inputs: &Inputs<'_>,
    shape: &Shape,
    kv: &KeyValues<'_>,
) -> Result<(), Error> {
    if let Some(argument) = outputs.twice {
        return Err(Error::Twice { argument });
    }
    let ([batch, _, q_rows, _], [keys, values]) = (inputs.q.shape(), inputs.names());
    // Tensors laid end to end have the sums of all sequences end to end, too.
    let (sums_batch, sums_keys, keys_of) = match inputs.ragged {
        Some(Ragged { k: Some(_), .. }) => (1, kv.k_shape()[2], keys),
        Some(Ragged { k: None, .. }) => (shape.batch, shape.kv_len, "the call"),
        None => (shape.batch, shape.kv_len, keys),
    };
    let rows = |argument: &'static str, [b, h, l, _]: [usize; 4]| {
        same(argument, "batch", b, batch, "q")?;
        same(argument, "heads", h, shape.heads, "q")?;
        same(argument, "rows", l, q_rows, "q")
    };
    if let Some(out) = &outputs.out {
        rows("out", out.shape())?;
        same("out", "value_dim", out.shape()[3], shape.value_dim, values)?;
    }
    if let Some(lse) = &outputs.lse {
        rows("lse", lse.shape())?;
        one("lse", lse.shape()[3], ONE_A_ROW)?;
    }
    for (argument, view) in POINTS.into_iter().zip(&outputs.points) {
        let Some(view) = view else { continue };
        let [b, h, l, columns] = view.shape();
        same(argument, "batch", b, shape.batch, "the call")?;
        same(argument, "heads", h, shape.heads, "q")?;
        same(argument, "rows", l, shape.q_len, "q")?;
        same(argument, "columns", columns, shape.kv_len, inputs.columns_of())?;
    }
    if let Some(sums) = &outputs.key_weight_sums {
        let [b, h, l, last] = sums.shape();
        same("key weight sums", "batch", b, sums_batch, keys_of)?;
        same("key weight sums", "heads", h, shape.kv_heads, keys)?;
        same("key weight sums", "rows", l, sums_keys, keys_of)?;
        one("key weight sums", last, "1 (one value a key)")?;
    }
    Ok(())
}

/// Shape of an output, by its name in error messages.
pub(crate) fn shape_of(outputs: &Outputs<'_>, argument: &str) -> Option<[usize; 4]> {
    match argument {
        "out" => outputs.out.as_ref().map(|out| out.shape()),
        "lse" => outputs.lse.as_ref().map(|lse| lse.shape()),
        _ => {
            let point = POINTS.iter().position(|&point| point == argument)?;
            outputs.points[point].as_ref().map(|view| view.shape())
        }
    }
}
