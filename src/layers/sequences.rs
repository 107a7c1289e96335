//! How rows make sequences, and where they stand in them.

use crate::error::same;
use crate::error::{Bound, Error};
use crate::inputs::cumulative;

/// How rows make sequences.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sequences<'a> {
    /// A batch of sequences of one length.
    Even {
        /// How many.
        batch: usize,
        /// Rows of each.
        len: usize,
    },
    /// Sequences of any lengths, end to end: sequence `s` is rows `ends[s]..ends[s + 1]`, from 0 to the number of rows.
    /// No row is spent on padding.
    Ragged(&'a [usize]),
}

impl Sequences<'_> {
    /// One sequence of this length.
    pub const fn one(len: usize) -> Self {
        Self::Even { batch: 1, len }
    }

    /// So many rows as this many sequences of one length.
    pub(crate) fn even(rows: usize, sequences: usize) -> Result<Self, Error> {
        let len = rows.checked_div(sequences).unwrap_or(0);
        same("x", "rows", rows, sequences * len, "the sequences")?;
        Ok(Self::Even { batch: sequences, len })
    }

    /// How many sequences there are.
    pub fn count(&self) -> usize {
        match self {
            Self::Even { batch, .. } => *batch,
            Self::Ragged(ends) => ends.len().saturating_sub(1),
        }
    }

    /// The rows of the sequence with this number. What cumulative lengths say is taken as it is: layers check it.
    ///
    /// # Panics
    /// If cumulative lengths have no such sequence.
    pub fn rows(&self, sequence: usize) -> core::ops::Range<usize> {
        match self {
            Self::Even { len, .. } => sequence.saturating_mul(*len)..sequence.saturating_add(1).saturating_mul(*len),
            Self::Ragged(ends) => ends[sequence]..ends[sequence + 1],
        }
    }

    /// Whether there are so many rows, each in one sequence.
    pub(crate) fn check(&self, argument: &'static str, rows: usize) -> Result<(), Error> {
        match self {
            Self::Even { batch, len } => match batch.checked_mul(*len) {
                Some(all) => same(argument, "rows", rows, all, "the sequences"),
                None => Err(Error::TooLarge { what: "sequences", sizes: [*batch, *len, 1, 1] }),
            },
            Self::Ragged(ends) => cumulative("sequences", ends, rows).map(|_| ()),
        }
    }

    /// `[batch, rows, heads, dim]` of a tensor with so many rows in all.
    pub(super) fn stored(&self, rows: usize, [heads, dim]: [usize; 2]) -> [usize; 4] {
        match self {
            Self::Even { batch, len } => [*batch, *len, heads, dim],
            Self::Ragged(_) => [1, rows, heads, dim],
        }
    }
}

/// The position of the first row of each sequence: `0` for whole sequences, the number of rows before where some were
/// seen in an earlier call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Start<'a> {
    /// The same for all.
    At(usize),
    /// One for each sequence, such as the lengths of a cache.
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

/// Where each row stands in its sequence. Made once everything about it has been checked.
#[derive(Clone, Copy)]
pub(crate) struct Places<'a> {
    sequences: Sequences<'a>,
    start: Start<'a>,
}

impl<'a> Places<'a> {
    /// `rows` rows in these sequences, which count from `start`; all positions are below `limit`.
    pub(crate) fn new(sequences: Sequences<'a>, rows: usize, start: Start<'a>, limit: usize) -> Result<Self, Error> {
        sequences.check("x", rows)?;
        if let Start::Each(firsts) = start {
            same("starts", "length", firsts.len(), sequences.count(), "the sequences")?;
        }
        let room = |sequence: usize| limit.saturating_sub(start.of(sequence));
        // The first sequence too long for the table.
        let long = (0..if rows > 0 { sequences.count() } else { 0 }).find(|&s| sequences.rows(s).len() > room(s));
        match long {
            None => Ok(Self { sequences, start }),
            Some(s) => {
                let (index, got) = (sequences.rows(s).start + room(s), start.of(s).saturating_add(room(s)));
                Err(Error::Entry { argument: "positions", index, got, bound: Bound::AtMost, limit: limit - 1 })
            }
        }
    }

    /// The position of a row.
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
