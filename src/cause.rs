//! Likely causes of errors: mistakes that the sizes of a call give away.

use crate::error::Error;
use crate::inputs::Inputs;
use crate::outputs::Outputs;
use core::fmt;

/// Likely cause of an [`Error`], part of its message.
///
/// ```
/// use sdpa::{Attention, Cause, Error, Inputs, Outputs, View, ViewMut};
/// let (x, mut out) = ([0.0; 2 * 3 * 4], [0.0; 2 * 3 * 4]);
/// let x = View::bhld(&x, [1, 2, 3, 4])?; // 2 heads, 3 rows
/// let outputs = Outputs::new(ViewMut::bhld(&mut out, [1, 3, 2, 4])?); // should be `blhd`
/// let error = sdpa::attention(&Attention::new(), Inputs::new(x, x, x), outputs).unwrap_err();
/// assert!(matches!(error, Error::Likely { cause: Cause::Exchanged { argument: "out" }, .. }));
/// assert!(error.to_string().starts_with("out: heads is 3, but q has 2; heads and rows of out look exchanged"));
/// # Ok::<(), Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Cause {
    /// Heads and rows of arguments are exchanged: they would fit the other way round.
    Exchanged {
        /// Names of the arguments.
        argument: &'static str,
    },
    /// The size is the number of key/value heads, where query heads count.
    KeyHeads,
    /// The size is the `head_dim` of q, where `value_dim` counts.
    HeadDim,
    /// A bias or mask covers the first keys only, which has methods of its own.
    FirstKeys,
    /// Lengths are given where cumulative lengths are expected.
    Lengths,
    /// Cumulative lengths do not end with the last row.
    End {
        /// Name of the tensor.
        of: &'static str,
        /// Number of its rows.
        rows: usize,
    },
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exchanged { argument } => write!(
                f,
                "heads and rows of {argument} look exchanged (View::bhld takes batch, heads, rows, dim; View::blhd \
                 batch, rows, heads, dim)"
            ),
            Self::KeyHeads => f.write_str("that is the number of key/value heads, and query heads count here"),
            Self::HeadDim => f.write_str("that is the head_dim of q, and results are as long as values"),
            Self::FirstKeys => f.write_str("mask_prefix and bias_prefix take fewer columns and hide the other keys"),
            Self::End { of, rows } => write!(f, "the last one is the number of rows of {of}, {rows}"),
            Self::Lengths => {
                f.write_str("these look like lengths; cumulative lengths are their running sums, from 0 on")
            }
        }
    }
}

impl Error {
    /// Adds a cause, if there is one.
    fn likely(self, cause: Option<Cause>) -> Self {
        match cause {
            Some(cause) => Self::Likely { error: Box::new(self), cause },
            None => self,
        }
    }

    /// Adds that heads and rows of keys or values look exchanged, if their number of heads is refused and `[heads, rows]`
    /// would have the expected number of heads the other way round.
    pub(crate) fn or_exchanged(self, argument: &'static str, [heads, rows]: [usize; 2]) -> Self {
        let looks = matches!(self, Self::Mismatch { argument: at, what: "heads", expected, .. }
            if at == argument && expected == rows && rows > 1 && heads != rows);
        self.likely(looks.then_some(Cause::Exchanged { argument }))
    }
}

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
