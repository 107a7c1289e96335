//! Checks that queries, keys, values and options fit together.

use crate::cause::Cause;
use crate::error::{Bound, Error, LONGEST_DIM, same};
use crate::inputs::{Cover, Covered, Inputs, Source};
use crate::shape::Shape;
use sdpa_kernels::{KeyValues, Options, Ragged};

impl<'a> Inputs<'a> {
    /// Returns the sizes of the call, and its keys and values; errors as for [`Self::shape`].
    pub(crate) fn checked(&self) -> Result<(Shape, KeyValues<'a>), Error> {
        let ([batch, heads, q_len, head_dim], [k_name, v_name]) = (self.q.shape(), self.names());
        if let Source::Tensors { k, v } = self.source {
            same("k", "batch", k.shape()[0], batch, "q")?;
            same("v", "batch", v.shape()[0], batch, "q")?;
            same("k", "head_dim", k.shape()[3], head_dim, "q")?;
        }
        let kv = self.key_values()?;
        let ([_, kv_heads, kv_len, kd], [.., value_dim]) = (kv.k_shape(), kv.v_shape());
        same(k_name, "head_dim", kd, head_dim, "q")?;
        if head_dim == 0 {
            return Err(Error::Empty { argument: "q", what: "head_dim" });
        }
        if value_dim == 0 {
            return Err(Error::Empty { argument: v_name, what: "value_dim" });
        }
        for (argument, what, got) in [("q", "head_dim", head_dim), (v_name, "value_dim", value_dim)] {
            LONGEST_DIM.check(argument, what, got)?;
        }
        if !(heads == kv_heads || kv_heads > 0 && heads.is_multiple_of(kv_heads)) {
            return Err(Error::Heads { q_heads: heads, kv_heads, of: k_name });
        }
        let sizes = [batch, heads, q_len, value_dim];
        if sizes.iter().try_fold(1usize, |n, &s| n.checked_mul(s)).is_none_or(|n| n > isize::MAX as usize) {
            return Err(Error::TooLarge { what: "out", sizes });
        }
        let shape = Shape { batch, heads, kv_heads, q_len, kv_len, head_dim, value_dim };
        Ok((self.sequences_of(shape, &kv)?, kv))
    }

    /// Returns the sizes of a call whose tensors are `shape`, with the number and the lengths of its sequences.
    fn sequences_of(&self, shape: Shape, kv: &KeyValues<'_>) -> Result<Shape, Error> {
        let lens = self.source_lens();
        self.suits_source(lens.is_some())?;
        let rows = match self.ragged {
            Some(Ragged { q, k }) => {
                same("q", "batch", shape.batch, 1, "a ragged call")?;
                let name = if k.is_some() { "ragged q" } else { "ragged queries" };
                Shape { batch: cumulative(name, q, ("q", shape.q_len))?, q_len: longest(q), ..shape }
            }
            None => shape,
        };
        if let Some(Ragged { k: Some(k), .. }) = self.ragged {
            let sequences = cumulative("ragged k", k, ("k", shape.kv_len))?;
            same("ragged k", "number of sequences", sequences, rows.batch, "ragged q")?;
            return Ok(Shape { kv_len: longest(k), ..rows });
        }
        let queries = if self.ragged.is_some() { "ragged queries" } else { "q (batch)" };
        let (Some(sequences), Some(lens)) = (self.sequences, lens) else {
            same(self.names()[0], "number of sequences", kv.k_shape()[0], rows.batch, queries)?;
            return Ok(rows);
        };
        same("sequences", "length", sequences.len(), rows.batch, queries)?;
        if let Some(&got) = sequences.iter().find(|&&sequence| sequence >= lens.len()) {
            return Err(Error::Sequence { argument: "sequences", got, sequences: lens.len() });
        }
        if let Source::Cache(cache) = self.source {
            sequences.iter().try_for_each(|&sequence| cache.there("sequences", sequence))?;
        }
        let kv_len = sequences.iter().map(|&sequence| lens[sequence]).max().unwrap_or(0);
        Ok(Shape { kv_len, ..rows })
    }

    /// Refuses ways to name sequences that the source of the keys does not have; `has_lens` is true for a cache and
    /// pages.
    fn suits_source(&self, has_lens: bool) -> Result<(), Error> {
        let cumulative_keys = self.ragged.map(|ragged| ragged.k.is_some());
        let refused = match has_lens {
            true => [("kv_lens", self.kv_lens.is_some()), ("ragged", cumulative_keys == Some(true))],
            false => [("sequences", self.sequences.is_some()), ("ragged queries", cumulative_keys == Some(false))],
        };
        let needs = match has_lens {
            true => "tensors; caches and pages have lengths of their own",
            false => "a cache or pages; tensors laid end to end take `ragged`",
        };
        match refused.into_iter().find(|&(_, given)| given) {
            Some((argument, _)) => Err(Error::Needs { argument, needs }),
            None => Ok(()),
        }
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

    /// Returns true if sequences may differ in rows or keys.
    pub(crate) fn lengths_differ(&self) -> bool {
        self.ragged.is_some() || self.kv_lens.is_some() || self.source_lens().is_some()
    }

    /// Returns the options, if they fit the shape.
    pub(crate) fn options(&self, shape: &Shape, softcap: Option<f32>) -> Result<Options<'a>, Error> {
        for (argument, values) in [("alibi slopes", self.alibi), ("sinks", self.sinks)] {
            if let Some(values) = values {
                same(argument, "length", values.len(), shape.heads, "q (heads)")?;
            }
        }
        if let Some(slope) = self.alibi.and_then(|slopes| slopes.iter().find(|slope| !slope.is_finite())) {
            return Err(Error::Number { argument: "alibi slopes", got: *slope, expected: "finite" });
        }
        if let Some(lens) = self.kv_lens {
            same("kv_lens", "length", lens.len(), shape.batch, "the batch")?;
            for (index, &got) in lens.iter().enumerate() {
                let limit = match self.ragged {
                    Some(Ragged { k: Some(k), .. }) => k[index + 1] - k[index],
                    _ => shape.kv_len,
                };
                if got > limit {
                    let (bound, of) = (Bound::AtMost, Some("the keys of that sequence"));
                    return Err(Error::Entry { argument: "kv_lens", index, got, bound, limit, of });
                }
            }
        }
        let keys = self.columns_of();
        let too_large = |what, sizes| Error::TooLarge { what, sizes };
        let bias = match self.bias {
            Some(Covered { of, cover }) => {
                let to = broadcast_shape("bias", of.shape(), cover, shape, keys)?;
                Some(of.broadcast(to).ok_or(too_large("bias", to))?)
            }
            None => None,
        };
        let mask = match self.mask {
            Some(Covered { of, cover }) => {
                let to = broadcast_shape("mask", of.view().shape(), cover, shape, keys)?;
                Some(of.with_view(of.view().broadcast(to).ok_or(too_large("mask", to))?))
            }
            None => None,
        };
        let Self { alibi, sinks, kv_lens, ragged, sequences, .. } = *self;
        Ok(Options { softcap, bias, alibi, mask, sinks, kv_lens, ragged, sequences, dropout: None })
    }
}

/// Returns the largest of the lengths whose running totals are `ends`.
fn longest(ends: &[usize]) -> usize {
    ends.windows(2).map(|w| w[1] - w[0]).max().unwrap_or(0)
}

/// Returns the number of sequences, if `ends` are cumulative lengths from 0 to the number of rows of a tensor.
pub(crate) fn cumulative(
    argument: &'static str,
    ends: &[usize],
    (of, rows): (&'static str, usize),
) -> Result<usize, Error> {
    let sum = || ends.iter().try_fold(0usize, |sum, &len| sum.checked_add(len));
    let lengths = || (sum() == Some(rows)).then_some(Cause::Lengths);
    let entry = |index: usize, bound, limit, of| Error::Entry { argument, index, got: ends[index], bound, limit, of };
    let Some(last) = ends.len().checked_sub(1) else {
        return Err(Error::Empty { argument, what: "the list of cumulative lengths" });
    };
    if ends[0] != 0 {
        return Err(entry(0, Bound::Exactly, 0, None).likely(lengths().or(Some(Cause::Begin))));
    }
    if let Some(index) = (1..ends.len()).find(|&i| ends[i] < ends[i - 1]) {
        return Err(entry(index, Bound::AtLeast, ends[index - 1], Some("the entry before it")).likely(lengths()));
    }
    if ends[last] != rows {
        return Err(entry(last, Bound::Exactly, rows, None).likely(Some(Cause::End { of, rows })));
    }
    Ok(last)
}

/// Returns the batch, heads, rows and columns that a bias or mask is broadcast to; `keys` names what the
/// columns are.
fn broadcast_shape(
    argument: &'static str,
    given: [usize; 4],
    cover: Cover,
    shape: &Shape,
    keys: &'static str,
) -> Result<[usize; 4], Error> {
    let columns = match cover {
        Cover::FirstKeys => given[3].min(shape.kv_len),
        Cover::AllKeys => shape.kv_len,
    };
    let to = [shape.batch, shape.heads, shape.q_len, columns];
    for ((what, got), expected) in ["batch", "heads", "rows", "columns"].into_iter().zip(given).zip(to) {
        let repeats = got == 1 && (what != "columns" || cover == Cover::AllKeys);
        if got != expected && !repeats {
            let of = if what == "columns" { keys } else { "the call" };
            return Err(Error::Mismatch { argument, what, got, expected, of });
        }
    }
    Ok(to)
}
