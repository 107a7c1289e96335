//! Rotary positions.

use crate::compute::Compute;
use crate::error::{at_least, floats, room, same};
use crate::linear::rows_of;
use crate::sequences::{Places, Sequences, Start};
use crate::share::{self, RowSlice};
use sdpa::{Bound, Error};
use sdpa_kernels::{cos, pow, sin};
use std::sync::Arc;

/// Cost of rotating a number, in the operations that [`sdpa::Exec`] counts: 0.13 ns, measured, at 117 GFLOP/s.
const COST: f64 = 16.0;

/// Pairs of columns of a head that are rotated together.
///
/// ```
/// use sdpa_layers::{Compute, Rope, RopePairs, Sequences};
/// let rope = Rope::new(8, 4, 1.0, RopePairs::Interleaved)?; // θ = 1: both pairs by one radian a position
/// let mut x = [1.0, 0.0, 0.0, 1.0];
/// rope.rotate(&mut x, [1, 4], Sequences::one(1), 1, &mut Compute::default())?; // one row, at position 1
/// let (cos, sin) = (1f32.cos(), 1f32.sin());
/// assert_eq!(x, [cos, sin, -sin, cos]);
/// # Ok::<(), sdpa::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum RopePairs {
    /// Column i with i + dim/2: GPT-NeoX, and Llama as Hugging Face stores it ("rotate half").
    Half,
    /// Column 2i with 2i + 1: RoFormer itself, GPT-J, and Llama as Meta stores it.
    Interleaved,
}

/// Rotary positions (Su et al. 2021, arXiv:2104.09864): pair i of a head's columns is rotated by position · θ^(−2i /
/// dim) radians, so that a query's product with a key depends on the distance between their positions.
///
/// Sines and cosines are computed in f64 and stored, `dim` floats per position; clones share them. Rotating takes three
/// operations per number.
///
/// ```
/// use sdpa_layers::{Compute, Rope, RopePairs, Sequences};
/// let rope = Rope::new(2048, 4, 10_000.0, RopePairs::Half)?;
/// let mut x = [1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0]; // two rows of one head
/// rope.rotate(&mut x, [1, 4], Sequences::one(2), 0, &mut Compute::default())?;
/// assert_eq!(x, [1.0, 0.0, 0.0, 0.0, 1f32.cos(), 0.0, 1f32.sin(), 0.0]);
/// # Ok::<(), sdpa::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Rope {
    pairs: RopePairs,
    /// Number of columns that are rotated.
    dim: usize,
    /// Table with, for each position, the cosine of every pair, then the sine of every pair.
    table: Arc<Vec<f32>>,
}

impl Rope {
    /// Creates the table for positions below `positions`; the first `dim` columns of a head are rotated.
    ///
    /// # Errors
    /// [`Error::Number`] unless `dim` is even and θ positive and finite, [`Error::Empty`] if a size is 0,
    /// [`Error::TooLarge`] if `positions × dim` does not fit the address space, [`Error::Memory`] if the table cannot
    /// be allocated.
    pub fn new(positions: usize, dim: usize, theta: f32, pairs: RopePairs) -> Result<Self, Error> {
        if !(theta > 0.0 && theta.is_finite()) {
            return Err(Error::Number { argument: "rope theta", got: theta, expected: "positive and finite" });
        }
        if !dim.is_multiple_of(2) {
            return Err(Error::Number { argument: "rope dim", got: dim as f32, expected: "even" });
        }
        table_size(positions, dim)?;
        let mut frequencies = room("rope", dim / 2)?;
        frequencies.extend((0..dim / 2).map(|pair| pow(theta.into(), -((2 * pair) as f64) / dim as f64)));
        Self::from_frequencies(positions, &frequencies, pairs)
    }

    /// Creates the table for the given frequencies, one for each pair, in radians per position: models for long
    /// contexts change some.
    ///
    /// # Errors
    /// [`Error::Empty`] if there are no frequencies or no positions, [`Error::Number`] if a frequency is not finite,
    /// [`Error::TooLarge`] if the table does not fit the address space, [`Error::Memory`] if it cannot be allocated.
    pub fn from_frequencies(positions: usize, frequencies: &[f64], pairs: RopePairs) -> Result<Self, Error> {
        let dim = 2 * frequencies.len();
        let size = table_size(positions, dim)?;
        if let Some(&wrong) = frequencies.iter().find(|f| !f.is_finite()) {
            return Err(Error::Number { argument: "rope frequencies", got: wrong as f32, expected: "finite" });
        }
        let row = |position: usize| {
            let angles = frequencies.iter().map(move |frequency| position as f64 * frequency);
            angles.clone().map(cos).chain(angles.map(sin)).map(|x| x as f32)
        };
        let mut table = room("rope", size)?;
        table.extend((0..positions).flat_map(row));
        Ok(Self { pairs, dim, table: Arc::new(table) })
    }

    /// Number of positions of the table.
    pub fn positions(&self) -> usize {
        self.table.len() / self.dim
    }

    /// Number of columns of a head that are rotated, from the first on.
    pub fn dim(&self) -> usize {
        self.dim
    }

    /// Rotates rows of `x`, `[rows, heads × head_dim]`, in place. Positions count from `start`: one number, or one for
    /// each sequence.
    ///
    /// # Errors
    /// [`Error::Entry`] for a position beyond the table, with the index of its row and the last valid position;
    /// [`Error::Range`] if heads are narrower than [`Self::dim`] or `x` does not have the rows of the sequences,
    /// [`Error::Mismatch`] if there is not one start for each sequence; [`Error::Empty`] if there are no heads. `x` is then
    /// untouched.
    pub fn rotate<'a>(
        &self,
        x: &mut [f32],
        [heads, head_dim]: [usize; 2],
        sequences: Sequences<'a>,
        start: impl Into<Start<'a>>,
        compute: &mut Compute,
    ) -> Result<(), Error> {
        let width = self.width(heads, head_dim)?;
        let count = rows_of("x", x, width)?;
        let places = Places::new(sequences, count, start.into(), self.positions())?;
        self.turn_rows(x, [width, head_dim], compute, |row| places.of(row));
        Ok(())
    }

    /// Rotates rows of `x`, `[rows, heads × head_dim]`, in place. Each row has its position, in any order: for trees of drafted
    /// tokens, packed documents and rows behind padding (`sdpa::Inputs::row_positions`).
    ///
    /// ```
    /// use sdpa_layers::{Compute, Rope, RopePairs};
    /// let rope = Rope::new(8, 2, 1.0, RopePairs::Half)?;
    /// let mut x = [1.0, 0.0, 1.0, 0.0]; // two rows of one head, siblings in a tree
    /// rope.rotate_by(&mut x, [1, 2], &[3, 3], &mut Compute::default())?;
    /// assert_eq!(x, [3f32.cos(), 3f32.sin(), 3f32.cos(), 3f32.sin()]);
    /// # Ok::<(), sdpa::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Self::rotate`]; [`Error::Number`] for a negative position; [`Error::Mismatch`] if there is not one position for each
    /// row. `x` is then untouched.
    pub fn rotate_by(
        &self,
        x: &mut [f32],
        [heads, head_dim]: [usize; 2],
        positions: &[i32],
        compute: &mut Compute,
    ) -> Result<(), Error> {
        let width = self.width(heads, head_dim)?;
        let count = rows_of("x", x, width)?;
        same("positions", "length", positions.len(), count, "x (rows)")?;
        let limit = self.positions() - 1;
        for (index, &position) in positions.iter().enumerate() {
            let Ok(got) = usize::try_from(position) else {
                return Err(Error::Number { argument: "positions", got: position as f32, expected: "at least 0" });
            };
            if got > limit {
                let of = "the last position of the rope";
                return Err(Error::Entry { argument: "positions", index, got, bound: Bound::AtMost, limit, of });
            }
        }
        self.turn_rows(x, [width, head_dim], compute, |row| positions[row] as usize);
        Ok(())
    }

    /// Returns the number of numbers of a row, if heads can be rotated.
    fn width(&self, heads: usize, head_dim: usize) -> Result<usize, Error> {
        self.check("x", head_dim)?;
        if heads == 0 {
            return Err(Error::Empty { argument: "x", what: "heads" });
        }
        heads.checked_mul(head_dim).ok_or(Error::TooLarge { what: "x", sizes: [heads, head_dim, 1, 1] })
    }

    /// Rotates rows of `width` numbers, by their places in the table.
    fn turn_rows(
        &self,
        x: &mut [f32],
        [width, head_dim]: [usize; 2],
        compute: &mut Compute,
        place: impl Fn(usize) -> usize + Sync,
    ) {
        let (count, cost, x) = (x.len() / width, COST * x.len() as f64, RowSlice(x, width));
        share::rows(compute.exec(), count, cost, x, |first, x| {
            for (row, x) in x.0.chunks_exact_mut(width).enumerate() {
                let (cos, sin) = self.table[place(first + row) * self.dim..][..self.dim].split_at(self.dim / 2);
                for head in x.chunks_exact_mut(head_dim) {
                    self.turn(&mut head[..self.dim], cos, sin);
                }
            }
        });
    }

    /// Returns the rope that multiplies rotated columns by `factor`, too: the attention factor of YaRN (arXiv:2309.00071, its
    /// mscale) and LongRoPE (arXiv:2402.13753). Columns behind [`Self::dim`] stay as they are. Factors of several calls
    /// multiply. The table is copied.
    ///
    /// ```
    /// use sdpa_layers::{Compute, Rope, RopePairs, Sequences};
    /// let factor = 0.1 * 4f32.ln() + 1.0; // YaRN, for texts four times as long
    /// let yarn = Rope::new(8, 2, 1.0, RopePairs::Half)?.attention_factor(factor)?;
    /// let mut x = [1.0, 0.0];
    /// yarn.rotate(&mut x, [1, 2], Sequences::one(1), 0, &mut Compute::default())?;
    /// assert_eq!(x, [factor, 0.0]);
    /// # Ok::<(), sdpa::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Number`] if the factor is not finite; [`Error::Memory`] if the table cannot be allocated.
    pub fn attention_factor(self, factor: f32) -> Result<Self, Error> {
        if !factor.is_finite() {
            return Err(Error::Number { argument: "rope attention factor", got: factor, expected: "finite" });
        }
        let mut table = room("rope", self.table.len())?;
        table.extend(self.table.iter().map(|x| x * factor));
        Ok(Self { table: Arc::new(table), ..self })
    }

    /// Checks that heads are at least [`Self::dim`] wide.
    pub(crate) fn check(&self, argument: &'static str, head_dim: usize) -> Result<(), Error> {
        at_least(self.dim, "the dim of the rope").check(argument, "head_dim", head_dim)
    }

    fn turn(&self, head: &mut [f32], cos: &[f32], sin: &[f32]) {
        let turns = cos.iter().zip(sin);
        let turn = |a: &mut f32, b: &mut f32, cos: f32, sin: f32| (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
        match self.pairs {
            RopePairs::Half => {
                let (a, b) = head.split_at_mut(cos.len());
                a.iter_mut().zip(b).zip(turns).for_each(|((a, b), (&cos, &sin))| turn(a, b, cos, sin));
            }
            RopePairs::Interleaved => {
                let pairs = head.as_chunks_mut::<2>().0;
                pairs.iter_mut().zip(turns).for_each(|([a, b], (&cos, &sin))| turn(a, b, cos, sin));
            }
        }
    }
}

/// Returns the number of floats of a table, which is not empty.
fn table_size(positions: usize, dim: usize) -> Result<usize, Error> {
    for (what, size) in [("dim", dim), ("number of positions", positions)] {
        if size == 0 {
            return Err(Error::Empty { argument: "rope", what });
        }
    }
    floats("rope", [positions, dim, 1, 1])
}
