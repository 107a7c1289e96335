//! Division of rows into sequences, and positions of rows in them.

use crate::error::{exactly, multiple_of, same};
use sdpa::{Bound, Error};

/// Division of rows into sequences.
///
/// ```
/// use sdpa_layers::Sequences;
/// let (even, ragged) = (Sequences::Even { batch: 2, len: 3 }, Sequences::Ragged(&[0, 3, 5]));
/// assert_eq!((even.count(), even.rows(1)), (2, 3..6));
/// assert_eq!((ragged.count(), ragged.rows(1)), (2, 3..5));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Sequences<'a> {
    /// A batch of sequences of one length.
    Even {
        /// Number of sequences.
        batch: usize,
        /// Number of rows of each.
        len: usize,
    },
    /// Sequences of any lengths, laid end to end: sequence `s` is rows `ends[s]..ends[s + 1]`; the first entry is 0 and
    /// the last the number of rows. No padding rows are needed.
    Ragged(&'a [usize]),
}

impl Sequences<'_> {
    /// One sequence of this length.
    pub const fn one(len: usize) -> Self {
        Self::Even { batch: 1, len }
    }

    /// Divides `rows` rows into `sequences` sequences of one length.
    pub(crate) fn even(rows: usize, sequences: usize) -> Result<Self, Error> {
        let len = rows.checked_div(sequences).unwrap_or(0);
        multiple_of(sequences, "the number of sequences").check("x", "rows", rows)?;
        Ok(Self::Even { batch: sequences, len })
    }

    /// Number of sequences.
    pub fn count(&self) -> usize {
        match self {
            Self::Even { batch, .. } => *batch,
            Self::Ragged(ends) => ends.len().saturating_sub(1),
        }
    }

    /// Returns the rows of a sequence. Cumulative lengths are not checked here; layers check them.
    ///
    /// # Panics
    /// Panics if cumulative lengths have no such sequence.
    pub fn rows(&self, sequence: usize) -> core::ops::Range<usize> {
        match self {
            Self::Even { len, .. } => sequence.saturating_mul(*len)..sequence.saturating_add(1).saturating_mul(*len),
            Self::Ragged(ends) => ends[sequence]..ends[sequence + 1],
        }
    }

    /// Checks that there are `rows` rows, each in one sequence.
    pub(crate) fn check(&self, argument: &'static str, rows: usize) -> Result<(), Error> {
        match self {
            Self::Even { batch, len } => match batch.checked_mul(*len) {
                Some(all) => exactly(all, "the tokens of all sequences").check(argument, "rows", rows),
                None => Err(Error::TooLarge { what: "sequences", sizes: [*batch, *len, 1, 1] }),
            },
            Self::Ragged(ends) => sdpa_kernels::cumulative("sequences", ends, rows).map(drop).map_err(Error::from),
        }
    }

    /// Returns `[batch, rows, heads, dim]` of a tensor with `rows` rows in all.
    pub(super) fn stored(&self, rows: usize, [heads, dim]: [usize; 2]) -> [usize; 4] {
        match self {
            Self::Even { batch, len } => [*batch, *len, heads, dim],
            Self::Ragged(_) => [1, rows, heads, dim],
        }
    }
}

/// Position of the first row of each sequence: `0` for whole sequences, the number of earlier rows for sequences that
/// began in an earlier call.
///
/// ```
/// use sdpa_layers::{Compute, Embedding, Sequences, Start};
/// let positions = Embedding::new([0.0, 0.1, 0.2, 0.3], 1)?;
/// let mut x = [5.0, 6.0]; // one new row of each of two sequences, which stand at 3 and at 1
/// let one_each = Sequences::Even { batch: 2, len: 1 };
/// positions.add_positions(&mut x, one_each, Start::Each(&[3, 1]), &mut Compute::default())?;
/// assert_eq!(x, [5.3, 6.1]);
/// # Ok::<(), sdpa::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Start<'a> {
    /// One position for all sequences.
    At(usize),
    /// One position for each sequence, such as the lengths of a cache.
    Each(&'a [usize]),
}

impl Start<'_> {
    fn of(&self, sequence: usize) -> usize {
        match self {
            Self::At(first) => *first,
            Self::Each(firsts) => firsts[sequence],
        }
    }
}

impl From<usize> for Start<'_> {
    fn from(first: usize) -> Self {
        Self::At(first)
    }
}

impl<'a> From<&'a [usize]> for Start<'a> {
    fn from(firsts: &'a [usize]) -> Self {
        Self::Each(firsts)
    }
}

/// Position of each row in its sequence, made from checked sequences and starts.
#[derive(Clone, Copy)]
pub(crate) struct Places<'a> {
    sequences: Sequences<'a>,
    start: Start<'a>,
}

impl<'a> Places<'a> {
    /// Checks that there are `rows` rows in these sequences, and that all positions, counted from `start`, are below
    /// `limit`.
    pub(crate) fn new(sequences: Sequences<'a>, rows: usize, start: Start<'a>, limit: usize) -> Result<Self, Error> {
        sequences.check("x", rows)?;
        if let Start::Each(firsts) = start {
            same("starts", "length", firsts.len(), sequences.count(), "the sequences")?;
        }
        let room = |sequence: usize| limit.saturating_sub(start.of(sequence));
        // First sequence that is too long for the table.
        let long = (0..if rows > 0 { sequences.count() } else { 0 }).find(|&s| sequences.rows(s).len() > room(s));
        match long {
            None => Ok(Self { sequences, start }),
            Some(s) => {
                let (index, got) = (sequences.rows(s).start + room(s), start.of(s).saturating_add(room(s)));
                let (bound, limit, of) = (Bound::AtMost, limit - 1, "the last row of the table");
                Err(Error::Entry { argument: "positions", index, got, bound, limit, of })
            }
        }
    }

    /// Returns the position of a row.
    pub(crate) fn of(&self, row: usize) -> usize {
        let (sequence, place) = match self.sequences {
            Sequences::Even { len, .. } => (row / len, row % len),
            Sequences::Ragged(ends) => {
                let sequence = ends.partition_point(|&end| end <= row) - 1;
                (sequence, row - ends[sequence])
            }
        };
        self.start.of(sequence) + place
    }
}
