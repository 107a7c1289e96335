//! Calls that inputs make, if queries, keys, values and sequences fit together.

use crate::error::Error;
use crate::inputs::{Inputs, Source};
use crate::shape::Shape;
use sdpa_kernels::{Alignment, Bound, Call, Options, Precision, Ragged, Visible, tensors_fit};

impl<'a> Inputs<'a> {
    /// Returns the call with default settings. Nothing of it is checked but that keys fit values.
    pub(crate) fn call(&self) -> Result<Call<'a>, Error> {
        if let Source::Tensors { k, v } = self.source {
            tensors_fit(self.q.shape(), k.shape(), v.shape())?;
        }
        let Self { q, bias, mask, period, alibi, sinks, kv_lens, ragged, row_positions, key_positions, .. } = *self;
        let sequences = self.sequences;
        let lists = Options { kv_lens, ragged, sources: sequences, row_positions, key_positions, ..Options::default() };
        let options = Options { bias, alibi, mask, period, sinks, selected: self.selected, ..lists };
        let (kv, scale, visible, alignment) = (self.key_values()?, 1.0, Visible::default(), Alignment::TopLeft);
        Ok(Call { q, kv, scale, visible, alignment, options, precision: Precision::Exact })
    }

    /// Refuses sequences that a cache has removed; others are there.
    pub(crate) fn check_sequences(&self) -> Result<(), Error> {
        let (Some(sequences), Source::Cache(cache)) = (self.sequences, self.source) else { return Ok(()) };
        sequences.iter().try_for_each(|&sequence| cache.there("sequences", sequence))
    }

    /// Returns the index of a sequence's keys and values: its batch index in the tensors, or its number in the cache or
    /// pages.
    pub(crate) fn source_of(&self, sequence: usize) -> usize {
        match (self.sequences, self.ragged) {
            (Some(sequences), _) => sequences[sequence],
            (None, Some(Ragged { k: Some(_), .. })) => 0,
            (None, _) => sequence,
        }
    }

    /// Returns the number of query rows and of keys of one sequence.
    pub(crate) fn lengths(&self, shape: &Shape, sequence: usize) -> (usize, usize) {
        let between = |ends: &[usize]| ends[sequence + 1] - ends[sequence];
        let q_len = self.ragged.map_or(shape.q_len, |ragged| between(ragged.q));
        let kv_len = match (self.kv_lens, self.source_lens(), self.ragged) {
            (Some(lens), ..) => lens[sequence],
            (_, Some(lens), _) => lens[self.source_of(sequence)],
            (_, _, Some(Ragged { k: Some(k), .. })) => between(k),
            _ => shape.kv_len,
        };
        (q_len, kv_len)
    }
}

/// Refuses a number of sequences that is no multiple of the period after which biases and masks repeat.
pub(crate) fn check_period(period: Option<usize>, got: usize) -> Result<(), Error> {
    let Some(limit) = period.filter(|&period| !got.is_multiple_of(period)) else { return Ok(()) };
    let (argument, what, bound, of) = ("batch period", "number of sequences", Bound::MultipleOf, "the period");
    Err(Error::Range { argument, what, got, bound, limit, of })
}
