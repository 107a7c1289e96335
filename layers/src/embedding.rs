//! Embeddings, tables of rows looked up by index: tokens, and learned or sinusoidal positions.

use crate::compute::Compute;
use crate::error::{floats, room};
use crate::linear::{check_rows, rows_of};
use crate::sequences::{Places, Sequences, Start};
use crate::share::{self, RowSlice};
use sdpa::{Bound, Error};
use sdpa_kernels::{cos, pow, sin};

/// Cost of copying or adding a number, in the operations that [`sdpa::Exec`] counts: 0.13 ns, measured, at 117
/// GFLOP/s.
const COST: f64 = 16.0;

/// Embedding table: one row for each token of a vocabulary, or for each position in a sequence.
///
/// ```
/// use sdpa_layers::{Compute, Embedding, Sequences};
/// let (tokens, positions) = (Embedding::new([0.0, 1.0, 2.0, 3.0], 2)?, Embedding::sinusoidal(512, 2)?);
/// let (mut x, mut compute) = ([0.0; 4], Compute::default());
/// tokens.look_up(&[1, 0], &mut x, &mut compute)?;
/// positions.add_positions(&mut x, Sequences::one(2), 0, &mut compute)?;
/// assert_eq!(x, [2.0, 3.0 + 1.0, 0.0 + 1f32.sin(), 1.0 + 1f32.cos()]);
/// # Ok::<(), sdpa::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Embedding {
    table: Vec<f32>,
    width: usize,
}

impl Embedding {
    /// Takes a learned table, `[entries, width]`, row-major.
    ///
    /// # Errors
    /// [`Error::Range`] if the table is not whole rows, [`Error::Empty`] if it has no rows or `width` is 0.
    pub fn new(table: impl Into<Vec<f32>>, width: usize) -> Result<Self, Error> {
        let table = table.into();
        check_sizes(table.len(), width)?;
        rows_of("embedding", &table, width)?;
        Ok(Self { table, width })
    }

    /// Creates sinusoidal positions (Vaswani et al. 2017, arXiv:1706.03762): column 2i of row p is sin(p / 10000^(2i /
    /// width)), column 2i + 1 the cosine. Computed in f64.
    ///
    /// # Errors
    /// [`Error::Empty`] if a size is 0, [`Error::TooLarge`] if their product does not fit the address space,
    /// [`Error::Memory`] if the table cannot be allocated.
    pub fn sinusoidal(positions: usize, width: usize) -> Result<Self, Error> {
        check_sizes(positions, width)?;
        let mut table = room("embedding", floats("embedding", [positions, width, 1, 1])?)?;
        for position in 0..positions {
            for column in 0..width {
                let frequency = pow(10_000.0, -((column - column % 2) as f64) / width as f64);
                let angle = position as f64 * frequency;
                table.push(if column % 2 == 0 { sin(angle) } else { cos(angle) } as f32);
            }
        }
        Self::new(table, width)
    }

    /// Number of rows of the table.
    pub fn entries(&self) -> usize {
        self.table.len() / self.width
    }

    /// Width of a row.
    pub fn width(&self) -> usize {
        self.width
    }

    /// Copies the row of each token to `out`, `[tokens, width]`.
    ///
    /// # Errors
    /// [`Error::Entry`] for a token beyond the table, with its index and the last valid token; [`Error::Range`] if
    /// `out` does not have one row per token. `out` is then untouched.
    pub fn look_up(&self, tokens: &[u32], out: &mut [f32], compute: &mut Compute) -> Result<(), Error> {
        check_rows("out", out, tokens.len(), self.width)?;
        let limit = self.entries() - 1;
        if let Some(index) = tokens.iter().position(|&token| token as usize > limit) {
            let got = tokens[index] as usize;
            let (bound, of) = (Bound::AtMost, "the last row of the table");
            return Err(Error::Entry { argument: "tokens", index, got, bound, limit, of });
        }
        let (cost, out) = (COST * out.len() as f64, RowSlice(out, self.width));
        share::rows(compute.exec(), tokens.len(), cost, out, |first, out| {
            for (row, &token) in out.0.chunks_exact_mut(self.width).zip(&tokens[first..]) {
                row.copy_from_slice(self.row(token as usize));
            }
        });
        Ok(())
    }

    /// Adds to each row of `x`, `[rows, width]`, the row of its position. Positions count from `start`: one number, or
    /// one for each sequence.
    ///
    /// # Errors
    /// [`Error::Entry`] for a position beyond the table, with the index of its row and the last valid position;
    /// [`Error::Range`] if `x` does not have the rows of the sequences, [`Error::Mismatch`] if there is not one start for each
    /// sequence. `x` is then untouched.
    pub fn add_positions<'a>(
        &self,
        x: &mut [f32],
        sequences: Sequences<'a>,
        start: impl Into<Start<'a>>,
        compute: &mut Compute,
    ) -> Result<(), Error> {
        let count = rows_of("x", x, self.width)?;
        let places = Places::new(sequences, count, start.into(), self.entries())?;
        let (cost, x) = (COST * x.len() as f64, RowSlice(x, self.width));
        share::rows(compute.exec(), count, cost, x, |first, x| {
            for (row, x) in x.0.chunks_exact_mut(self.width).enumerate() {
                let add = self.row(places.of(first + row));
                x.iter_mut().zip(add).for_each(|(x, add)| *x += add);
            }
        });
        Ok(())
    }

    fn row(&self, entry: usize) -> &[f32] {
        &self.table[entry * self.width..][..self.width]
    }
}

fn check_sizes(entries: usize, width: usize) -> Result<(), Error> {
    for (what, size) in [("width", width), ("number of entries", entries)] {
        if size == 0 {
            return Err(Error::Empty { argument: "embedding", what });
        }
    }
    Ok(())
}
