//! Pooling of sequences to one row each, and scaling to length 1.

use crate::linear::{check_rows, rows_of};
use crate::sequences::Sequences;
use sdpa::Error;

/// Reduction of the rows of a sequence to one.
///
/// ```
/// use sdpa_layers::{Pooling, Sequences};
/// let x = [1.0, 2.0, 3.0, 4.0, 10.0, 20.0]; // a sequence of two rows, and one of one row
/// let (mut mean, mut first, sequences) = ([0.0; 4], [0.0; 4], Sequences::Ragged(&[0, 2, 3]));
/// Pooling::Mean.forward(&x, 2, sequences, &mut mean)?;
/// Pooling::First.forward(&x, 2, sequences, &mut first)?;
/// assert_eq!((mean, first), ([2.0, 3.0, 10.0, 20.0], [1.0, 2.0, 10.0, 20.0]));
/// # Ok::<(), sdpa::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Pooling {
    /// Mean of the rows; 0 for a sequence without rows.
    #[default]
    Mean,
    /// First row, which is that of the `[CLS]` token; 0 for a sequence without rows.
    First,
}

impl Pooling {
    /// Writes to `out`, `[sequences, width]`, one row for each sequence of rows of `x`, `[rows, width]`.
    ///
    /// # Errors
    /// [`Error::Range`], [`Error::Entry`] and other [`Error`]s if `x` does not have the rows of the sequences, or
    /// `out` does not have one row per sequence; `out` is then untouched.
    pub fn forward(self, x: &[f32], width: usize, sequences: Sequences<'_>, out: &mut [f32]) -> Result<(), Error> {
        if width == 0 {
            return Err(Error::Empty { argument: "pooling", what: "width" });
        }
        sequences.check("x", rows_of("x", x, width)?)?;
        check_rows("out", out, sequences.count(), width)?;
        for (s, out) in out.chunks_exact_mut(width).enumerate() {
            let rows = sequences.rows(s);
            self.row(x[rows.start * width..rows.end * width].chunks_exact(width), out);
        }
        Ok(())
    }

    fn row<'a>(self, mut rows: impl ExactSizeIterator<Item = &'a [f32]>, out: &mut [f32]) {
        let count = rows.len() as f32;
        match rows.next() {
            None => out.fill(0.0),
            Some(first) => out.copy_from_slice(first),
        }
        if self == Self::Mean && count > 1.0 {
            rows.for_each(|row| out.iter_mut().zip(row).for_each(|(sum, x)| *sum += x));
            out.iter_mut().for_each(|sum| *sum /= count);
        }
    }
}

/// Scales each row of `x`, `[rows, width]`, to length 1 in the Euclidean norm; rows of zeros are unchanged.
///
/// ```
/// let mut x = [3.0, 4.0, 0.0, 0.0]; // two rows of two
/// sdpa_layers::normalise(&mut x, 2)?;
/// assert_eq!(x, [0.6, 0.8, 0.0, 0.0]);
/// # Ok::<(), sdpa::Error>(())
/// ```
///
/// # Errors
/// [`Error::Range`] if `x` is not whole rows; it is then untouched.
pub fn normalise(x: &mut [f32], width: usize) -> Result<(), Error> {
    rows_of("x", x, width)?;
    for row in x.chunks_exact_mut(width.max(1)) {
        // In f64 neither the squares nor their sum can overflow or underflow.
        let length = row.iter().map(|&x| f64::from(x) * f64::from(x)).sum::<f64>().sqrt();
        if length != 0.0 {
            row.iter_mut().for_each(|x| *x = (f64::from(*x) / length) as f32);
        }
    }
    Ok(())
}
