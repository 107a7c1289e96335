//! Tensors that a call reads, and checks that they fit together.

mod check;
mod parts;

use crate::cache::KvCache;
use crate::error::Error;
use crate::shape::Shape;
pub(crate) use check::check_period;
pub(crate) use parts::{KeyLists, WHOLE};
use sdpa_kernels::{Cover, Covered, KeyValues, Mask, Pages, Ragged, SelectedKeys, Tensor};

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
    pub(crate) source: Source<'a>,
    pub(crate) bias: Option<Covered<Tensor<'a>>>,
    pub(crate) mask: Option<Covered<Mask<'a>>>,
    pub(crate) period: Option<usize>,
    pub(crate) alibi: Option<&'a [f32]>,
    pub(crate) sinks: Option<&'a [f32]>,
    pub(crate) kv_lens: Option<&'a [usize]>,
    pub(crate) ragged: Option<Ragged<'a>>,
    pub(crate) sequences: Option<&'a [usize]>,
    pub(crate) row_positions: Option<&'a [&'a [i32]]>,
    pub(crate) key_positions: Option<&'a [&'a [i32]]>,
    pub(crate) selected: Option<&'a SelectedKeys>,
}

/// Source of keys and values. Two separate tensors are not yet checked against each other.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Source<'a> {
    Tensors { k: Tensor<'a>, v: Tensor<'a> },
    Pages(Pages<'a>),
    Cache(&'a KvCache),
}

impl<'a> Inputs<'a> {
    /// Takes queries `[batch, heads, q_len, head_dim]`, keys `[batch, kv_heads, kv_len, head_dim]` and values `[batch,
    /// kv_heads, kv_len, value_dim]`; `heads` must be a multiple of `kv_heads`. Elements may be of any types, also
    /// mixed: `f32`, [`Bf16`](crate::Bf16), [`F16`](crate::F16) and, with the feature `half`, that crate's types.
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

    /// Takes queries `[sequences, heads, q_len, head_dim]`, and keys and values in pages; their block table holds the
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
            period: None,
            alibi: None,
            sinks: None,
            kv_lens: None,
            ragged: None,
            sequences: None,
            row_positions: None,
            key_positions: None,
            selected: None,
        }
    }

    /// Queries.
    pub fn queries(&self) -> Tensor<'a> {
        self.q
    }

    /// Keys and values, from tensors, a cache or pages.
    ///
    /// # Errors
    /// [`Error::Mismatch`] if values differ from keys in batch, heads or number.
    pub fn key_values(&self) -> Result<KeyValues<'a>, Error> {
        Ok(match self.source {
            Source::Tensors { k, v } => KeyValues::checked(k, v)?,
            Source::Pages(pages) => pages.into(),
            Source::Cache(cache) => cache.kernel().into(),
        })
    }

    /// Shapes of queries, keys and values, which may not fit together.
    pub(crate) fn shapes(&self) -> [[usize; 4]; 3] {
        let kv = match self.source {
            Source::Tensors { k, v } => return [self.q, k, v].map(|x| x.shape()),
            Source::Pages(pages) => KeyValues::from(pages),
            Source::Cache(cache) => KeyValues::from(cache.kernel()),
        };
        [self.q.shape(), kv.k_shape(), kv.v_shape()]
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
    /// `[batch, heads, q_len, kv_len]`; dimensions of 1 are broadcast. If a bias has a head for each key/value head, the query
    /// heads that share one use its head. 16-bit elements are widened in registers: results have the bits that an `f32` bias of
    /// the same numbers gives.
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

    /// Adds a bias with columns for the last keys of each sequence only, by its own length: its last column is for the last key.
    /// Keys before those of its first column have no bias; columns before the first key are not used. No more columns than keys;
    /// batch, heads and rows as for [`Self::bias`]. States refuse it.
    #[must_use]
    pub fn bias_suffix(self, bias: impl Into<Tensor<'a>>) -> Self {
        Self { bias: Some(Covered { of: bias.into(), cover: Cover::LastKeys }), ..self }
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

    /// Sets a mask with columns for the last keys of each sequence only, as [`Self::bias_suffix`] takes a bias: keys before are
    /// visible, as far as other rules show them.
    ///
    /// ```
    /// use sdpa::{Attention, Inputs, Mask, Outputs, View, ViewMut};
    /// // A context of three keys that both rows see, then two drafted tokens that see themselves alone.
    /// let (q, k, v, own) = ([0.0; 2], [0.0; 5], [1.0, 2.0, 3.0, 6.0, 10.0], [true, false, false, true]);
    /// let (k, v) = (View::bhld(&k, [1, 1, 5, 1])?, View::bhld(&v, [1, 1, 5, 1])?);
    /// let mut out = [0.0; 2];
    /// let inputs = Inputs::new(View::bhld(&q, [1, 1, 2, 1])?, k, v);
    /// let inputs = inputs.mask_suffix(Mask::keep(View::bhld(&own, [1, 1, 2, 2])?));
    /// sdpa::attention(&Attention::new(), inputs, Outputs::new(ViewMut::bhld(&mut out, [1, 1, 2, 1])?))?;
    /// assert_eq!(out, [3.0, 4.0]); // means of 1 2 3 6, and of 1 2 3 10
    /// # Ok::<(), sdpa::Error>(())
    /// ```
    #[must_use]
    pub fn mask_suffix(self, mask: Mask<'a>) -> Self {
        Self { mask: Some(Covered { of: mask, cover: Cover::LastKeys }), ..self }
    }

    /// Sets the number of sequences after which biases and masks repeat: of those with a batch of `period`, sequence `b` uses
    /// entry `b` mod `period`. The batch, or number of sequences, must be a multiple of it.
    ///
    /// ```
    /// use sdpa::{Attention, Inputs, Mask, Outputs, View, ViewMut};
    /// // Two images of two windows each, with a mask for each window (as in a Swin transformer).
    /// let (x, v) = ([0.0; 8], [1.0, 3.0, 1.0, 3.0, 5.0, 7.0, 5.0, 7.0]);
    /// let (x, v) = (View::bhld(&x, [4, 1, 2, 1])?, View::bhld(&v, [4, 1, 2, 1])?);
    /// let (windows, mut out) = ([true, true, false, true], [0.0; 8]);
    /// let inputs = Inputs::new(x, x, v).mask(Mask::keep(View::bhld(&windows, [2, 1, 1, 2])?)).batch_period(2);
    /// sdpa::attention(&Attention::new(), inputs, Outputs::new(ViewMut::bhld(&mut out, [4, 1, 2, 1])?))?;
    /// assert_eq!(out, [2.0, 2.0, 3.0, 3.0, 6.0, 6.0, 7.0, 7.0]);
    /// # Ok::<(), sdpa::Error>(())
    /// ```
    #[must_use]
    pub fn batch_period(self, period: usize) -> Self {
        Self { period: Some(period), ..self }
    }

    /// Sets ALiBi slopes, `[heads]`, one per query head: −slope·|p − j| is added to the score of a row at position p
    /// and key j. See [`crate::alibi_slopes`].
    #[must_use]
    pub fn alibi(self, slopes: &'a [f32]) -> Self {
        Self { alibi: Some(slopes), ..self }
    }

    /// Sets attention sinks, `[heads]`, one logit per query head. A sink counts in the softmax (and the LSE) as a key
    /// with this score and the value 0.
    #[must_use]
    pub fn sinks(self, logits: &'a [f32]) -> Self {
        Self { sinks: Some(logits), ..self }
    }

    /// Sets the number of valid keys of each sequence, one number a sequence, at most the rows of k that it has; keys beyond
    /// are never visible. For tensors: caches and pages have their own lengths, and calls over them refuse these.
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
    /// `q[s]..q[s + 1]` of the queries and outputs. So one plan computes prompts and single steps together; a sequence
    /// may also have no rows. Biases, masks and score outputs are `[sequences, heads, longest q, longest k]`.
    ///
    /// ```
    /// use sdpa::{Alignment, Attention, Inputs, KvCache, KvShape, Outputs, View, ViewMut};
    /// let mut cache = KvCache::new(3, KvShape { kv_heads: 2, head_dim: 8, value_dim: 8 })?; // three sequences
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
    /// sequences, in their own order. The list may name a sequence more than once.
    #[must_use]
    pub fn sequences(self, sequences: &'a [usize]) -> Self {
        Self { sequences: Some(sequences), ..self }
    }

    /// Sets the positions of the rows, in any order: for each sequence of the call a list with one for each of its rows.
    /// Causal masks, windows, ALiBi and functions' [`Position::distance`](crate::Position::distance) measure from them, and
    /// no alignment is needed for these. For keys see [`Self::key_positions`].
    #[must_use]
    pub fn row_positions(self, positions: &'a [&'a [i32]]) -> Self {
        Self { row_positions: Some(positions), ..self }
    }

    /// Sets the positions of the keys, in any order: for each sequence of the call a list with one for each of its keys, by
    /// default 0, 1, 2, …. Beside [`Self::kv_lens`] a list may also have one for each row of k; those of padding are not read.
    /// Causal masks, windows, ALiBi and functions' [`Position::distance`](crate::Position::distance)
    /// measure to them. First keys that a window keeps are those at positions 0 ≤ p < m.
    ///
    /// A causal mask or window is then no range of keys: each pair of a row and a key is tested in blocks of 256 keys that are
    /// partly hidden; blocks are skipped if their least and greatest positions show that no row sees a key. A plan counts
    /// all keys as visible, and few rows under a causal mask do not share the reading of a common prefix. Rows or keys with
    /// positions are refused by a sliding cache that has evicted keys; states take positions of all keys that will come, and
    /// refuse those of rows alone. Padding by a multiple of 256 keys, or packing behind a multiple of 256 keys, changes no bit of
    /// a text; any other number changes the order of sums.
    ///
    /// ```
    /// use sdpa::{Attention, Inputs, Outputs, View, ViewMut};
    /// // Left padding: two keys that no row sees, then a text of three tokens.
    /// let positions: [&[i32]; 1] = [&[i32::MAX, i32::MAX, 0, 1, 2]];
    /// let (q, k, v, mut out) = ([0.0; 1], [0.0; 5], [9.0, 9.0, 1.0, 2.0, 3.0], [0.0; 1]);
    /// let (q, k, v) = (View::bhld(&q, [1, 1, 1, 1])?, View::bhld(&k, [1, 1, 5, 1])?, View::bhld(&v, [1, 1, 5, 1])?);
    /// let inputs = Inputs::new(q, k, v).row_positions(&[&[2]]).key_positions(&positions);
    /// sdpa::attention(&Attention::new().causal(), inputs, Outputs::new(ViewMut::bhld(&mut out, [1, 1, 1, 1])?))?;
    /// assert_eq!(out, [2.0]);
    /// # Ok::<(), sdpa::Error>(())
    /// ```
    #[must_use]
    pub fn key_positions(self, positions: &'a [&'a [i32]]) -> Self {
        Self { key_positions: Some(positions), ..self }
    }

    /// Sets the keys that rows select: each row sees the keys of its list as far as other rules show them, and no others.
    ///
    /// A row has the bits of a call whose source, of the same format, holds the keys of its list alone, in ascending order, with
    /// [`Self::key_positions`] that are the positions of these keys here. Keys keep their own numbers and positions for every rule,
    /// bias, mask and function. Keys that are not listed are as keys beyond the sequence: they have no effect, weights and key weight
    /// sums of them are 0, and [scores](crate::Outputs::scores) −∞. An empty list is a row that sees nothing. Gradients, states and
    /// pieces of ranks refuse lists.
    ///
    /// Complexity: rows times their lists; listed keys are packed once for all rows and heads that share a list.
    ///
    /// ```
    /// use sdpa::{Attention, Inputs, Outputs, SelectedKeys, SelectionShape, View, ViewMut};
    /// let (q, k, v, mut out) = ([0.0; 2], [0.0; 5], [1.0, 2.0, 4.0, 8.0, 16.0], [0.0; 2]);
    /// let (q, k, v) = (View::bhld(&q, [1, 1, 2, 1])?, View::bhld(&k, [1, 1, 5, 1])?, View::bhld(&v, [1, 1, 5, 1])?);
    /// let mut selected = SelectedKeys::new(); // row 0 selects keys 0 and 3, row 1 keys 1, 2 and 4
    /// let shape = SelectionShape { q_lens: &[2], heads: 1, rows: 1, unit: 1 };
    /// selected.fill(shape, &[0, 2, 5], &[0, 3, 1, 2, 4], None)?;
    /// let outputs = Outputs::new(ViewMut::bhld(&mut out, [1, 1, 2, 1])?);
    /// sdpa::attention(&Attention::new(), Inputs::new(q, k, v).selected(&selected), outputs)?;
    /// assert_eq!(out, [4.5, 22.0 / 3.0]);
    /// # Ok::<(), sdpa::Error>(())
    /// ```
    #[must_use]
    pub fn selected(self, selected: &'a SelectedKeys) -> Self {
        Self { selected: Some(selected), ..self }
    }

    /// Returns the sizes of the call, if queries, keys and values (and cumulative lengths) fit together.
    ///
    /// # Errors
    /// Any [`Error`] of [`Attention::problem`](crate::Attention::problem) that concerns queries, keys, values or sequences.
    pub fn shape(&self) -> Result<Shape, Error> {
        let call = self.call()?;
        call.inputs_fit()?;
        self.check_sequences()?;
        Ok(Shape::of(&call))
    }
}
