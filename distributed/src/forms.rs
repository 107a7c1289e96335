//! Forms of biases and masks: what ranks agree on, so that rows of them can travel.

use crate::description::{Description, Value, dtype, is_given, said};
use crate::share::Rows;
use core::ops::Range;
use sdpa::Dtype;

/// Names of both in errors and agreements.
const NAMES: [&str; 2] = ["bias", "mask"];
/// Names of what ranks agree on for each of them: sizes of all but rows, and which rows there are.
const SIZES: [&str; 2] = ["batch, heads and columns of the bias", "batch, heads and columns of the mask"];
/// Name of the element type of a bias.
const TYPE: &str = "element type of the bias";
const ROWS: [&str; 2] = ["rows of the bias", "rows of the mask"];
const ONE_EACH: &str = "one for each row";
const ONE: &str = "one for all rows";

/// Form of a bias or mask, which all ranks agree on.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Form {
    pub(crate) batch: usize,
    /// Its heads: of all query heads, or one for all.
    pub(crate) heads: usize,
    pub(crate) columns: usize,
    /// Type of a bias; a mask is of bytes.
    pub(crate) dtype: Option<Dtype>,
    /// False if one row stands for all: every rank has it.
    pub(crate) travels: bool,
}

/// Says what form the bias and the mask of a stretch of rows have, if both fit the stretch.
pub(crate) fn describe(rows: &Rows<'_>, description: &mut Description) -> Result<(), sdpa::Error> {
    let ([batch, heads, n, _], ragged) = (rows.inputs.queries().shape(), rows.inputs.ragged_ends());
    let (bias, mask) = rows.inputs.bias_and_mask();
    bias.iter().for_each(|bias| description.fact(TYPE, bias.dtype()));
    for (which, shape) in [bias.map(|bias| bias.shape()), mask.map(|mask| mask.shape())].into_iter().enumerate() {
        let Some([b, h, l, columns]) = shape else { continue };
        let batch = match ragged {
            Some([ends, _]) if l == 1 => ends.len().saturating_sub(1),
            _ => batch,
        };
        for (what, got, expected) in [("batch", b, batch), ("heads", h, heads), ("rows", l, n)] {
            if got != 1 && got != expected {
                let (argument, of) = (NAMES[which], "the stretch of rows");
                return Err(sdpa::Error::Mismatch { argument, what, got, expected, of });
            }
        }
        description.fact(SIZES[which], [b, h, columns]);
        // A single row may be either.
        if n != 1 {
            description.fact(ROWS[which], if l == 1 { ONE } else { ONE_EACH });
        }
    }
    Ok(())
}

/// Reads the forms of bias and mask, as far as there are any.
pub(crate) fn forms(ranks: &[Description]) -> [Option<Form>; 2] {
    [0, 1].map(|which| {
        let Some(&Value::Sizes([batch, heads, columns])) = said(ranks, SIZES[which]) else { return None };
        let dtype = dtype(ranks, TYPE).filter(|_| which == 0);
        // Rows of ragged sequences lie end to end, in a batch of one.
        let of_sequences = batch != 1 && is_given(ranks, "ragged");
        Some(Form {
            batch,
            heads,
            columns,
            dtype,
            travels: said(ranks, ROWS[which]) != Some(&ONE.into()) && !of_sequences,
        })
    })
}

impl Form {
    /// Returns its heads for some query heads: none for none.
    pub(crate) fn heads(&self, heads: Range<usize>) -> Range<usize> {
        if self.heads == 1 { 0..heads.len().min(1) } else { heads }
    }

    /// Bytes of `n` rows, for some number of query heads.
    pub(crate) fn bytes(&self, n: usize, heads: usize) -> usize {
        if self.travels {
            self.batch * self.heads(0..heads).len() * n * self.columns * self.dtype.map_or(1, Dtype::bytes)
        } else {
            0
        }
    }

    /// Returns true if all query heads share it.
    pub(crate) fn is_shared(&self) -> bool {
        self.heads == 1
    }
}
