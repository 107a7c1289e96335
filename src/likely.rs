//! Search for the likely cause of an error in the sizes of a call.

use crate::cause::Cause;
use crate::error::Error;
use crate::inputs::Inputs;
use crate::outputs::Outputs;

/// Adds the likely cause to the error of a call, if its sizes give one away.
pub(crate) fn of_call(error: Error, inputs: &Inputs<'_>, outputs: &Outputs<'_>) -> Error {
    let [q, k, v] = inputs.shapes();
    let shape_of = |argument: &str| inputs.shape_of(argument).or_else(|| outputs.shape_of(argument));
    let exchanged = |[_, heads, rows, _]: [usize; 4], [_, of_heads, of_rows, _]: [usize; 4]| {
        heads != rows && [heads, rows] == [of_rows, of_heads]
    };
    let cause = match error {
        Error::Heads { .. } => exchanged_heads(q, k),
        // Grouped heads in place of rows: as many "heads" as there are rows, and more "rows" than "keys".
        Error::Unaligned { q_len, kv_len, .. } => {
            let grouped = q[1] == k[1] && q[1] > q_len && kv_len > 0 && q_len > kv_len && q_len.is_multiple_of(kv_len);
            grouped.then_some(Cause::Exchanged { argument: "q, k and v" })
        }
        Error::Mismatch { argument: "v", what: "heads" | "rows", .. } => {
            exchanged(v, k).then_some(Cause::Exchanged { argument: "v" })
        }
        Error::Mismatch { argument: "out", what: "value_dim", got, .. } => (got == q[3]).then_some(Cause::HeadDim),
        Error::Mismatch { argument: "bias" | "mask", what: "columns", got, expected, .. } => {
            (got < expected).then_some(Cause::FirstKeys)
        }
        Error::Mismatch { argument: "alibi slopes" | "sinks", got, .. } => (got == k[1]).then_some(Cause::KeyHeads),
        // A mask or bias of rows and keys, and tensors of which heads are taken for rows.
        Error::Mismatch { argument: argument @ ("bias" | "mask"), what: "rows", got, .. }
            if got == q[1] && shape_of(argument).is_some_and(|shape| shape[3] == k[1]) =>
        {
            Some(Cause::Exchanged { argument: "q, k and v" })
        }
        Error::Mismatch { argument, what: "heads" | "rows", .. }
            if shape_of(argument).is_some_and(|shape| exchanged(shape, q)) =>
        {
            Some(Cause::Exchanged { argument })
        }
        Error::Mismatch { what: "heads", got, expected, .. } if expected == q[1] => {
            (got == k[1]).then_some(Cause::KeyHeads)
        }
        Error::Entry { argument: "ragged q" | "ragged queries", index, .. } => {
            inputs.ragged.and_then(|ragged| of_ends(ragged.q, index, ("q", q[2])))
        }
        Error::Entry { argument: "ragged k", index, .. } => {
            inputs.ragged.and_then(|ragged| of_ends(ragged.k?, index, ("k", k[2])))
        }
        _ => None,
    };
    error.likely(cause)
}

/// Returns the likely cause of a refused entry of cumulative lengths, of a tensor of so many rows.
fn of_ends(ends: &[usize], index: usize, (of, rows): (&'static str, usize)) -> Option<Cause> {
    let sum = ends.iter().try_fold(0usize, |sum, &len| sum.checked_add(len));
    // An end that falls is refused for that, even if it is the last.
    let last = index > 0 && index + 1 == ends.len() && ends.is_sorted();
    if sum == Some(rows) { Some(Cause::Lengths) } else { last.then_some(Cause::End { of, rows }) }
}

/// Returns the tensors that would fit with heads and rows exchanged, if any: q alone or keys alone in self-attention,
/// where the others' rows show which is which; or all, where heads then divide and are fewer than rows.
fn exchanged_heads([_, heads, rows, _]: [usize; 4], [_, kv_heads, keys, _]: [usize; 4]) -> Option<Cause> {
    let divide = |heads: usize, kv_heads: usize| heads > 0 && kv_heads > 0 && heads.is_multiple_of(kv_heads);
    let argument = if heads == keys && divide(rows, kv_heads) {
        "q"
    } else if kv_heads == rows && divide(heads, keys) {
        "k and v"
    } else if divide(rows, keys) && heads > rows && kv_heads > keys {
        "q, k and v"
    } else {
        return None;
    };
    Some(Cause::Exchanged { argument })
}
