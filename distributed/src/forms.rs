//! Forms of biases and masks: what ranks agree on, so that rows of them can travel.

use crate::description::{Description, dtype, is_given, number};
use crate::share::Rows;
use core::ops::Range;
use sdpa::Dtype;

/// Names of both in errors and agreements.
const NAMES: [&str; 2] = ["bias", "mask"];
/// Names of what ranks agree on for each of them, besides the columns; the last if one row stands for all.
const BATCH: [&str; 2] = ["bias batch", "mask batch"];
const HEADS: [&str; 2] = ["bias heads", "mask heads"];
const ONE_ROW: [&str; 2] = ["one row of the bias for all", "one row of the mask for all"];

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
    for (which, shape) in [bias.map(|bias| bias.shape()), mask.map(|mask| mask.shape())].into_iter().enumerate() {
        let Some([b, h, l, _]) = shape else { continue };
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
        description.fact(BATCH[which], b);
        description.fact(HEADS[which], h);
        // A single row may be either.
        if n != 1 {
            description.fact(ONE_ROW[which], l == 1);
        }
    }
    Ok(())
}

/// Reads the forms of bias and mask, as far as there are any.
pub(crate) fn forms(ranks: &[Description]) -> [Option<Form>; 2] {
    [0, 1].map(|which| {
        let batch = number(ranks, BATCH[which])?;
        // Rows of ragged sequences lie end to end, in a batch of one.
        let of_sequences = batch != 1 && is_given(ranks, "ragged q");
        Some(Form {
            batch,
            heads: number(ranks, HEADS[which])?,
            columns: number(ranks, ["bias columns", "mask columns"][which])?,
            dtype: dtype(ranks, NAMES[which]),
            travels: !is_given(ranks, ONE_ROW[which]) && !of_sequences,
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
