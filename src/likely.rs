//! Search for the likely cause of an error in the sizes of a call.

mod exchanged;

use crate::cause::Cause;
use crate::error::Error;
use crate::inputs::Inputs;
use exchanged::Sizes;

/// Adds the likely cause to the error of a call, if its sizes give one away. `shape_of` returns the shapes of tensors that
/// the call has besides its inputs, by their names in error messages.
pub(crate) fn of_call(error: Error, inputs: &Inputs<'_>, shape_of: impl Fn(&str) -> Option<[usize; 4]>) -> Error {
    let [q, k, v] = inputs.shapes();
    let sizes = || Sizes::new(inputs, shape_of("out"));
    let shape_of = |argument: &str| inputs.shape_of(argument).or_else(|| shape_of(argument));
    let cause = match error {
        Error::Heads { .. } => sizes().of_heads(),
        Error::Unaligned { q_len, kv_len, .. } if [q_len, kv_len] == [q[2], k[2]] => sizes().of_unaligned(),
        Error::Mismatch { argument: "v", what: "heads" | "rows", .. } => sizes().of_values(),
        Error::Mismatch { argument: "out", what: "heads" | "rows", .. } if sizes().out_is_exchanged() => {
            sizes().of_out()
        }
        Error::Mismatch { argument: "out" | "d_out", what: "value_dim", got, .. } => {
            (got == q[3]).then_some(Cause::HeadDim)
        }
        Error::Mismatch { argument: "bias" | "mask", what: "columns", got, expected, .. } => {
            (got < expected).then_some(Cause::FirstKeys)
        }
        Error::Mismatch { argument: "alibi slopes" | "sinks" | "dslopes" | "dsinks", got, .. } => {
            (got == k[1]).then_some(Cause::KeyHeads)
        }
        // A mask or bias of rows and keys, and tensors of which heads are taken for rows.
        Error::Mismatch { argument: argument @ ("bias" | "mask"), what: "rows", got, .. }
            if inputs.has_tensors() && got == q[1] && shape_of(argument).is_some_and(|shape| shape[3] == k[1]) =>
        {
            Some(Cause::Exchanged { argument: "q, k and v" })
        }
        Error::Mismatch { argument, what: "heads" | "rows", of, .. }
            if shape_of(argument).is_some_and(|shape| {
                let [_, heads, rows, _] = match of {
                    "k" => k,
                    "v" => v,
                    _ => q,
                };
                heads != rows && [shape[1], shape[2]] == [rows, heads]
            }) =>
        {
            Some(Cause::Exchanged { argument })
        }
        Error::Mismatch { what: "heads", got, expected, .. } if expected == q[1] => {
            (got == k[1]).then_some(Cause::KeyHeads)
        }
        _ => None,
    };
    error.likely(cause)
}
