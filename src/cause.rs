//! Likely causes of errors: mistakes that the sizes of a call give away.

use core::fmt;

/// Likely cause of an [`Error`](crate::Error), part of its message.
///
/// ```
/// use sdpa::{Attention, Cause, Error, Inputs, Outputs, View, ViewMut};
/// let (x, mut out) = ([0.0; 2 * 3 * 4], [0.0; 2 * 3 * 4]);
/// let x = View::bhld(&x, [1, 2, 3, 4])?; // 2 heads, 3 rows
/// let outputs = Outputs::new(ViewMut::bhld(&mut out, [1, 3, 2, 4])?); // should be `blhd`
/// let error = sdpa::attention(&Attention::new(), Inputs::new(x, x, x), outputs).unwrap_err();
/// assert!(matches!(error, Error::Likely { cause: Cause::Exchanged { .. }, .. }));
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
    /// The size is the number of key/value heads; it should be that of query heads.
    KeyHeads,
    /// The size is the `head_dim` of q; it should be `value_dim`.
    HeadDim,
    /// A bias or mask covers fewer keys; `bias_prefix` and `mask_prefix` take those of the first, `bias_suffix` and
    /// `mask_suffix` of the last.
    FirstKeys,
    /// Lengths are given where cumulative lengths are expected.
    Lengths,
    /// Cumulative lengths do not begin with 0.
    Begin,
    /// The last cumulative length is not the number of rows of the tensor.
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
            Self::FirstKeys => f.write_str(
                "mask_prefix and bias_prefix take fewer columns and hide the other keys; mask_suffix and bias_suffix \
                 take the columns of the last keys",
            ),
            Self::Begin => f.write_str("cumulative lengths begin with 0"),
            Self::End { of, rows } => write!(f, "the last one is the number of rows of {of}, {rows}"),
            Self::Lengths => {
                f.write_str("these look like lengths; cumulative lengths are their running sums, from 0 on")
            }
        }
    }
}
