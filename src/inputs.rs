//! Tensors that a call reads, and checks that they fit together.

use crate::cache::KvCache;
use crate::error::{Bound, Error, same};
use crate::shape::Shape;
use sdpa_kernels::{KeyValues, MAX_DIM, Mask, Options, Pages, Ragged, Tensor};

/// Tensors that a call reads: queries, keys and values, and those that options add.
///
/// ```
/// # use sdpa::{Inputs, Mask, View};
/// # let (q, k, v) = (vec![0.0; 4 * 8], vec![0.0; 6 * 8], vec![0.0; 6 * 8]);
/// let (q, k, v) = (View::bhld(&q, [1, 1, 4, 8])?, View::bhld(&k, [1, 1, 6, 8])?, View::bhld(&v, [1, 1, 6, 8])?);
/// let padding = [true, true, true, true, true, false]; // one row of keys, for all batches, heads and rows
/// let inputs = Inputs::new(q, k, v).mask(Mask::keep(View::bhld(&padding, [1, 1, 1, 6])?));
/// # Ok::<(), sdpa::Error>(())
/// ```
#[derive(Debug, Clone, Copy)]
pub struct Inputs<'a> {
    pub(crate) q: Tensor<'a>,
    source: Source<'a>,
    pub(crate) bias: Option<Covered<Tensor<'a>>>,
    pub(crate) mask: Option<Covered<Mask<'a>>>,
    pub(crate) alibi: Option<&'a [f32]>,
    pub(crate) sinks: Option<&'a [f32]>,
    pub(crate) kv_lens: Option<&'a [usize]>,
    pub(crate) ragged: Option<Ragged<'a>>,
    pub(crate) sequences: Option<&'a [usize]>,
}

/// Source of keys and values. Two separate tensors are not yet checked against each other.
#[derive(Debug, Clone, Copy)]
enum Source<'a> {
    Tensors { k: Tensor<'a>, v: Tensor<'a> },
    Pages(Pages<'a>),
    Cache(&'a KvCache),
}

/// A bias or mask, and the keys that it has columns for.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Covered<T> {
    pub(crate) of: T,
    pub(crate) cover: Cover,
}

/// Keys that a bias or mask has columns for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Cover {
    /// Every key; a single column is broadcast to all.
    AllKeys,
    /// The first keys; the others are hidden.
    FirstKeys,
}

impl<'a> Inputs<'a> {
    /// Takes queries `[batch, heads, q_len, head_dim]`, keys `[batch, kv_heads, kv_len, head_dim]` and values
    /// `[batch, kv_heads, kv_len, value_dim]`; `heads` must be a multiple of `kv_heads`. Elements are of any types, in
    /// any mix: `f32`, [`Bf16`](crate::Bf16), [`F16`](crate::F16) and, with the feature `half`, that crate's types.
    /// 16-bit elements are widened in registers, and results have the bits that `f32` tensors of the same numbers give.
    ///
    /// ```
    /// use sdpa::{Attention, Bf16, F16, Inputs, Outputs, View, ViewMut};
    /// let (q, kv, mut out) = ([Bf16::from_f32(0.5); 2 * 8], [F16::from_f32(0.25); 3 * 8], [F16::default(); 2 * 8]);
    /// let (q, kv) = (View::bhld(&q, [1, 1, 2, 8])?, View::bhld(&kv, [1, 1, 3, 8])?);
    /// let outputs = Outputs::new(ViewMut::bhld(&mut out, [1, 1, 2, 8])?);
    /// sdpa::attention(&Attention::new(), Inputs::new(q, kv, kv), outputs)?;
    /// assert_eq!(out[0].to_f32(), 0.25);
    /// # Ok::<(), sdpa::Error>(())
    /// ```
    pub fn new(q: impl Into<Tensor<'a>>, k: impl Into<Tensor<'a>>, v: impl Into<Tensor<'a>>) -> Self {
        Self::with(q.into(), Source::Tensors { k: k.into(), v: v.into() })
    }

    /// Takes queries `[sequences, heads, q_len, head_dim]`, and the keys and values of a cache, which holds the lengths
    /// of its sequences.
    pub fn cached(q: impl Into<Tensor<'a>>, cache: &'a KvCache) -> Self {
        Self::with(q.into(), Source::Cache(cache))
    }

    /// Takes queries `[sequences, heads, q_len, head_dim]`, and keys and values in pages, whose block table holds the
    /// lengths of the sequences.
    pub fn paged(q: impl Into<Tensor<'a>>, pages: Pages<'a>) -> Self {
        Self::with(q.into(), Source::Pages(pages))
    }

    fn with(q: Tensor<'a>, source: Source<'a>) -> Self {
        Self {
            q,
            source,
            bias: None,
            mask: None,
            alibi: None,
            sinks: None,
            kv_lens: None,
            ragged: None,
            sequences: None,
        }
    }

    /// Queries.
    pub fn queries(&self) -> Tensor<'a> {
        self.q
    }

    /// Keys and values, from tensors, a cache or pages.
    ///
    /// # Errors
    /// [`Error::Mismatch`] if there are not as many values as keys.
    pub fn key_values(&self) -> Result<KeyValues<'a>, Error> {
        Ok(match self.source {
            Source::Tensors { k, v } => {
                let ([kb, kh, kl, _], [vb, vh, vl, _]) = (k.shape(), v.shape());
                same("v", "batch", vb, kb, "k")?;
                same("v", "heads", vh, kh, "k")?;
                same("v", "rows", vl, kl, "k")?;
                KeyValues::of_tensors(k, v).expect("batch, heads and rows are equal")
            }
            Source::Pages(pages) => pages.into(),
            Source::Cache(cache) => cache.kernel().into(),
        })
    }

    /// Names of the keys and values in error messages.
    fn names(&self) -> [&'static str; 2] {
        match self.source {
            Source::Tensors { .. } => ["k", "v"],
            Source::Pages(_) => ["pages"; 2],
            Source::Cache(_) => ["cache"; 2],
        }
    }

    /// Key lengths of the sequences, if the source has them.
    fn source_lens(&self) -> Option<&'a [usize]> {
        match self.source {
            Source::Tensors { .. } => None,
            Source::Pages(pages) => Some(pages.lens()),
            Source::Cache(cache) => Some(cache.lens()),
        }
    }

    /// Adds a bias of any element type to the scores, after softcap; −∞ hides the key. Shape
    /// `[batch, heads, q_len, kv_len]`; dimensions of 1 are broadcast. 16-bit elements are widened in registers: results
    /// have the bits that an `f32` bias of the same numbers gives.
    #[must_use]
    pub fn bias(self, bias: impl Into<Tensor<'a>>) -> Self {
        Self { bias: Some(Covered { of: bias.into(), cover: Cover::AllKeys }), ..self }
    }

    /// Adds a bias with columns for the first keys only: keys beyond its last column are hidden (as in ONNX). Batch,
    /// heads and rows of 1 are broadcast.
    #[must_use]
    pub fn bias_prefix(self, bias: impl Into<Tensor<'a>>) -> Self {
        Self { bias: Some(Covered { of: bias.into(), cover: Cover::FirstKeys }), ..self }
    }

    /// Sets a mask of the keys that each row may see; shapes as for [`Self::bias`].
    #[must_use]
    pub fn mask(self, mask: Mask<'a>) -> Self {
        Self { mask: Some(Covered { of: mask, cover: Cover::AllKeys }), ..self }
    }

    /// Sets a mask with columns for the first keys only: keys beyond its last column are hidden (as in ONNX). Batch,
    /// heads and rows of 1 are broadcast.
    #[must_use]
    pub fn mask_prefix(self, mask: Mask<'a>) -> Self {
        Self { mask: Some(Covered { of: mask, cover: Cover::FirstKeys }), ..self }
    }

    /// Sets ALiBi slopes, `[heads]`, one per query head: −slope·|p − j| is added to the score of a row at position p
    /// and key j. See [`crate::alibi_slopes`].
    #[must_use]
    pub fn alibi(self, slopes: &'a [f32]) -> Self {
        Self { alibi: Some(slopes), ..self }
    }

    /// Sets attention sinks, `[heads]`, one logit per query head: it is added to the denominator of the softmax (and to
    /// the LSE) with value 0.
    #[must_use]
    pub fn sinks(self, logits: &'a [f32]) -> Self {
        Self { sinks: Some(logits), ..self }
    }

    /// Sets the number of valid keys of each sequence, `[batch]`; keys beyond it are never visible.
    #[must_use]
    pub fn kv_lens(self, lens: &'a [usize]) -> Self {
        Self { kv_lens: Some(lens), ..self }
    }

    /// Sets ragged sequences, of different lengths and laid end to end, with batch 1: sequence `s` has rows
    /// `q[s]..q[s + 1]` of the queries (and outputs) and rows `k[s]..k[s + 1]` of keys and values. Biases, masks and
    /// score outputs are `[sequences, heads, longest q, longest k]`.
    #[must_use]
    pub fn ragged(self, q: &'a [usize], k: &'a [usize]) -> Self {
        Self { ragged: Some(Ragged { q, k: Some(k) }), ..self }
    }

    /// Sets ragged queries over a cache or pages, laid end to end, with batch 1: sequence `s` of the call has rows
    /// `q[s]..q[s + 1]` of the queries and outputs. Prompts and single steps are thus computed together, in one plan;
    /// a sequence may also have no rows. Biases, masks and score outputs are `[sequences, heads, longest q, longest k]`.
    ///
    /// ```
    /// use sdpa::{Alignment, Attention, Inputs, KvCache, Outputs, View, ViewMut};
    /// let mut cache = KvCache::new(3, 2, [8, 8])?; // three sequences
    /// for (sequence, tokens) in [(0, 40), (2, 5)] {
    ///     let (k, v) = (vec![0.5; 2 * tokens * 8], vec![0.25; 2 * tokens * 8]);
    ///     let shape = [1, 2, tokens, 8];
    ///     cache.append_to(sequence, View::bhld(&k, shape)?, View::bhld(&v, shape)?)?;
    /// }
    /// // The last 30 rows of sequence 0 and the last row of sequence 2, laid end to end; four query heads.
    /// let (q, mut out) = (vec![0.5; 4 * 31 * 8], vec![0.0; 4 * 31 * 8]);
    /// let inputs = Inputs::cached(View::bhld(&q, [1, 4, 31, 8])?, &cache).sequences(&[0, 2]).ragged_queries(&[0, 30, 31]);
    /// let attention = Attention::new().causal().align(Alignment::BottomRight);
    /// sdpa::attention(&attention, inputs, Outputs::new(ViewMut::bhld(&mut out, [1, 4, 31, 8])?))?;
    /// assert_eq!(out, vec![0.25; 4 * 31 * 8]);
    /// # Ok::<(), sdpa::Error>(())
    /// ```
    #[must_use]
    pub fn ragged_queries(self, q: &'a [usize]) -> Self {
        Self { ragged: Some(Ragged { q, k: None }), ..self }
    }

    /// Sets the sequences of the cache or pages that the queries belong to, in the order of the queries: by default all
    /// of them, in their own order. A sequence may stand in the list more than once.
    #[must_use]
    pub fn sequences(self, sequences: &'a [usize]) -> Self {
        Self { sequences: Some(sequences), ..self }
    }

    /// Returns the sizes of the call, if queries, keys and values (and cumulative lengths) fit together.
    ///
    /// # Errors
    /// [`Error::Mismatch`], [`Error::Heads`], [`Error::Empty`], [`Error::TooLarge`] or [`Error::Entry`].
    pub fn shape(&self) -> Result<Shape, Error> {
        Ok(self.checked()?.0)
    }

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
            if got > MAX_DIM {
                return Err(Error::Mismatch { argument, what, got, expected: MAX_DIM, of: "the largest possible" });
            }
        }
        if !(heads == kv_heads || kv_heads > 0 && heads.is_multiple_of(kv_heads)) {
            return Err(Error::Heads { q_heads: heads, kv_heads });
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
                Shape { batch: cumulative(name, q, shape.q_len)?, q_len: longest(q), ..shape }
            }
            None => shape,
        };
        if let Some(Ragged { k: Some(k), .. }) = self.ragged {
            let sequences = cumulative("ragged k", k, shape.kv_len)?;
            same("ragged k", "number of sequences", sequences, rows.batch, "ragged q")?;
            return Ok(Shape { kv_len: longest(k), ..rows });
        }
        let queries = if self.ragged.is_some() { "ragged queries" } else { "q" };
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
                    return Err(Error::Entry { argument: "kv_lens", index, got, bound: Bound::AtMost, limit });
                }
            }
        }
        let [keys, _] = self.names();
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
        Ok(Options { softcap, bias, alibi, mask, sinks, kv_lens, ragged, sequences })
    }
}

/// Returns the largest of the lengths whose running totals are `ends`.
fn longest(ends: &[usize]) -> usize {
    ends.windows(2).map(|w| w[1] - w[0]).max().unwrap_or(0)
}

/// Returns the number of sequences, if `ends` are cumulative lengths from 0 to `total`.
pub(crate) fn cumulative(argument: &'static str, ends: &[usize], total: usize) -> Result<usize, Error> {
    let entry =
        |index: usize, bound: Bound, limit: usize| Error::Entry { argument, index, got: ends[index], bound, limit };
    let Some(last) = ends.len().checked_sub(1) else {
        return Err(Error::Empty { argument, what: "the list of cumulative lengths" });
    };
    if ends[0] != 0 {
        return Err(entry(0, Bound::Exactly, 0));
    }
    if let Some(index) = (1..ends.len()).find(|&i| ends[i] < ends[i - 1]) {
        return Err(entry(index, Bound::AtLeast, ends[index - 1]));
    }
    if ends[last] != total {
        return Err(entry(last, Bound::Exactly, total));
    }
    Ok(last)
}

/// Returns the batch, heads, rows and columns that a bias or mask is broadcast to; `keys` is the caller's name for the
/// keys.
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
