//! Next rows of sequences; their earlier rows are in a cache.

use crate::error::same;
use crate::sequences::Sequences;
use sdpa::{Error, Inputs, KvCache, View};

/// Next rows of some sequences of a cache, laid end to end: prompts, parts of prompts and single rows, side by side.
///
/// ```
/// use sdpa_layers::NextRows;
/// let x = [0.0; 31 * 8]; // rows of width 8: a prompt of 30 rows for sequence 4 of the cache, one more row of sequence 0
/// let next = NextRows::new(&x, &[4, 0], &[0, 30, 31]);
/// # let _ = next;
/// ```
#[derive(Debug, Clone, Copy)]
pub struct NextRows<'a> {
    pub(crate) rows: &'a [f32],
    pub(crate) parts: Parts<'a>,
}

impl<'a> NextRows<'a> {
    /// Takes rows, `[rows, width]`: rows `ends[i]..ends[i + 1]` continue sequence `sequences[i]` of the cache. `ends` has one
    /// entry more than `sequences`, from 0 to the number of rows. Layers check all of them.
    pub fn new(rows: &'a [f32], sequences: &'a [usize], ends: &'a [usize]) -> Self {
        Self { rows, parts: Parts { division: Sequences::Ragged(ends), named: Some(sequences) } }
    }

    /// Takes rows, `[sequences, n, width]`, of all sequences of a cache.
    pub(crate) fn of_all(rows: &'a [f32], width: usize, sequences: usize) -> Result<Self, Error> {
        let division = Sequences::even(rows.len() / width, sequences)?;
        Ok(Self { rows, parts: Parts { division, named: None } })
    }
}

/// Sequences of a cache that rows continue, and the rows of each.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Parts<'a> {
    pub(crate) division: Sequences<'a>,
    /// Sequence of each part; without them part `i` is sequence `i`.
    named: Option<&'a [usize]>,
}

/// Length of a sequence before a call, by which [`Parts::take_back`] sees if the call has appended.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Mark {
    sequence: usize,
    len: usize,
}

impl<'a> Parts<'a> {
    /// Checks that there are `rows` rows and that the cache has the sequences.
    pub(crate) fn check(&self, rows: usize, cache: &KvCache) -> Result<(), Error> {
        self.division.check("x", rows)?;
        let Some(named) = self.named else { return Ok(()) };
        same("ends", "number of sequences", self.division.count(), named.len(), "sequences")?;
        let argument = "sequences";
        match named.iter().find(|&&sequence| !cache.has_sequence(sequence)) {
            None => Ok(()),
            Some(&sequence) if sequence < cache.sequences() => Err(Error::Removed { argument, sequence }),
            Some(&got) => Err(Error::Sequence { argument, got, sequences: cache.sequences() }),
        }
    }

    /// Sequences of the cache, and the number of rows of each.
    fn rows(self) -> impl Iterator<Item = (usize, usize)> {
        let sequence = move |part: usize| self.named.map_or(part, |named| named[part]);
        (0..self.division.count()).map(move |part| (sequence(part), self.division.rows(part).len()))
    }

    /// Number of keys that each part's sequence has in a cache.
    pub(crate) fn lens(self, cache: &KvCache) -> impl Iterator<Item = usize> {
        self.rows().map(|(sequence, _)| cache.lens()[sequence])
    }

    /// Appends keys and values of all rows.
    pub(crate) fn append(self, cache: &mut KvCache, k: View<'_>, v: View<'_>) -> Result<(), Error> {
        match (self.named, self.division) {
            (Some(named), Sequences::Ragged(ends)) => cache.append_ragged(named, ends, k, v),
            _ => cache.append(k, v),
        }
    }

    /// Says of inputs which sequences their rows belong to.
    pub(crate) fn of(self, inputs: Inputs<'a>) -> Inputs<'a> {
        match (self.named, self.division) {
            (Some(named), Sequences::Ragged(ends)) => inputs.sequences(named).ragged_queries(ends),
            _ => inputs,
        }
    }

    /// Length of the first sequence that has rows, if any has.
    pub(crate) fn mark(self, cache: &KvCache) -> Option<Mark> {
        let (sequence, _) = self.rows().find(|&(_, rows)| rows > 0)?;
        Some(Mark { sequence, len: cache.lens()[sequence] })
    }

    /// Takes back the rows of a failed call from a cache, if they have been appended. A call appends to all sequences or none.
    pub(crate) fn take_back(self, cache: &mut KvCache, mark: Option<Mark>) {
        if mark.is_some_and(|mark| cache.lens()[mark.sequence] != mark.len) {
            for (sequence, rows) in self.rows() {
                // A sliding cache may refuse: evicted keys cannot be restored.
                let _ = cache.truncate(sequence, cache.lens()[sequence] - rows);
            }
        }
    }
}
