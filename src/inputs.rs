//! The tensors that a call reads, and whether they fit together.

use crate::cache::KvCache;
use crate::error::{Bound, Error};
use crate::problem::Shape;
use sdpa_kernels::{KeyValues, MAX_DIM, Mask, Options, Pages, Ragged, Tensor, View};

/// The tensors that a call reads: queries, keys, values, and whatever options bring along.
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
    pub(crate) kv: KeyValues<'a>,
    pub(crate) bias: Option<View<'a>>,
    pub(crate) mask: Option<Mask<'a>>,
    pub(crate) alibi: Option<&'a [f32]>,
    pub(crate) sinks: Option<&'a [f32]>,
    pub(crate) kv_lens: Option<&'a [usize]>,
    pub(crate) ragged: Option<Ragged<'a>>,
}

impl<'a> Inputs<'a> {
    /// Queries `[batch, heads, q_len, head_dim]`, keys `[batch, kv_heads, kv_len, head_dim]` and values
    /// `[batch, kv_heads, kv_len, value_dim]`; `heads` is a multiple of `kv_heads`.
    pub fn new(q: View<'a>, k: View<'a>, v: View<'a>) -> Self {
        Self::of(q, k, v)
    }

    /// The same of any element types, in any mix: `f32`, [`Bf16`](crate::Bf16), [`F16`](crate::F16). Shorter elements are
    /// widened in registers, and everything is computed as if all were `f32`: to the bit. With the feature `half`, views of
    /// `half::bf16` and `half::f16` do as well.
    ///
    /// ```
    /// use sdpa::{Attention, Bf16, F16, Inputs, Outputs, View, ViewMut};
    /// let (q, kv, mut out) = ([Bf16::from_f32(0.5); 2 * 8], [F16::from_f32(0.25); 3 * 8], [F16::default(); 2 * 8]);
    /// let (q, kv) = (View::bhld(&q, [1, 1, 2, 8])?, View::bhld(&kv, [1, 1, 3, 8])?);
    /// let outputs = Outputs::of(ViewMut::bhld(&mut out, [1, 1, 2, 8])?);
    /// sdpa::attention(&Attention::new(), Inputs::of(q, kv, kv), outputs)?;
    /// assert_eq!(out[0].to_f32(), 0.25);
    /// # Ok::<(), sdpa::Error>(())
    /// ```
    pub fn of(q: impl Into<Tensor<'a>>, k: impl Into<Tensor<'a>>, v: impl Into<Tensor<'a>>) -> Self {
        Self::with(q.into(), KeyValues::Tensors { k: k.into(), v: v.into() })
    }

    /// Queries `[sequences, heads, q_len, head_dim]` against the keys and values of a cache, which has the lengths of its
    /// sequences.
    pub fn cached(q: impl Into<Tensor<'a>>, cache: &'a KvCache) -> Self {
        Self::with(q.into(), KeyValues::Cache(cache.kernel()))
    }

    /// Queries `[sequences, heads, q_len, head_dim]` against keys and values in pages, by a table that has the lengths of
    /// the sequences.
    pub fn paged(q: impl Into<Tensor<'a>>, pages: Pages<'a>) -> Self {
        Self::with(q.into(), KeyValues::Pages(pages))
    }

    fn with(q: Tensor<'a>, kv: KeyValues<'a>) -> Self {
        Self { q, kv, bias: None, mask: None, alibi: None, sinks: None, kv_lens: None, ragged: None }
    }

    /// The queries.
    pub fn queries(&self) -> Tensor<'a> {
        self.q
    }

    /// Where keys and values come from.
    pub fn key_values(&self) -> KeyValues<'a> {
        self.kv
    }

    /// Added to the scores, after softcap; −∞ hides. `[batch, heads, q_len, kv_len]`; each of the first three may be 1,
    /// and fewer columns than keys hide the rest.
    #[must_use]
    pub fn bias(self, bias: View<'a>) -> Self {
        Self { bias: Some(bias), ..self }
    }

    /// Which keys each row may attend to; shapes as for [`Self::bias`].
    #[must_use]
    pub fn mask(self, mask: Mask<'a>) -> Self {
        Self { mask: Some(mask), ..self }
    }

    /// ALiBi: −slope·|p − j| is added to the scores, one slope per query head. See [`crate::alibi_slopes`].
    #[must_use]
    pub fn alibi(self, slopes: &'a [f32]) -> Self {
        Self { alibi: Some(slopes), ..self }
    }

    /// Attention sinks: one more logit per query head, which joins the denominator (and the LSE) with value 0.
    #[must_use]
    pub fn sinks(self, logits: &'a [f32]) -> Self {
        Self { sinks: Some(logits), ..self }
    }

    /// How many keys of each sequence exist; the memory behind them is never seen.
    #[must_use]
    pub fn kv_lens(self, lens: &'a [usize]) -> Self {
        Self { kv_lens: Some(lens), ..self }
    }

    /// Sequences of different lengths laid end to end, batch 1: sequence `s` has rows `q[s]..q[s + 1]` of the queries
    /// (and outputs) and `k[s]..k[s + 1]` of keys and values. Biases, masks and score outputs are
    /// `[sequences, heads, longest q, longest k]`.
    #[must_use]
    pub fn ragged(self, q: &'a [usize], k: &'a [usize]) -> Self {
        Self { ragged: Some(Ragged { q, k }), ..self }
    }

    /// The sizes, if q, k, v (and cumulative lengths) fit together.
    ///
    /// # Errors
    /// [`Error::Mismatch`], [`Error::Heads`], [`Error::Empty`], [`Error::TooLarge`] or [`Error::Entry`].
    pub fn shape(&self) -> Result<Shape, Error> {
        let ([batch, heads, q_len, head_dim], [kb, kv_heads, kv_len, kd], [vb, vh, vl, value_dim]) =
            (self.q.shape(), self.kv.k_shape(), self.kv.v_shape());
        same("k", "batch", kb, batch, "q")?;
        same("v", "batch", vb, batch, "q")?;
        same("k", "head_dim", kd, head_dim, "q")?;
        same("v", "heads", vh, kv_heads, "k")?;
        same("v", "rows", vl, kv_len, "k")?;
        if head_dim == 0 {
            return Err(Error::Empty { argument: "q", what: "head_dim" });
        }
        if value_dim == 0 {
            return Err(Error::Empty { argument: "v", what: "value_dim" });
        }
        for (argument, what, got) in [("q", "head_dim", head_dim), ("v", "value_dim", value_dim)] {
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
        let Some(Ragged { q, k }) = self.ragged else { return Ok(shape) };
        same("q", "batch", batch, 1, "a ragged call")?;
        let sequences = cumulative("ragged q", q, q_len)?;
        same("ragged k", "number of sequences", cumulative("ragged k", k, kv_len)?, sequences, "ragged q")?;
        let longest = |ends: &[usize]| ends.windows(2).map(|w| w[1] - w[0]).max().unwrap_or(0);
        Ok(Shape { batch: sequences, q_len: longest(q), kv_len: longest(k), ..shape })
    }

    /// Rows and keys of one sequence.
    pub(crate) fn lengths(&self, shape: &Shape, sequence: usize) -> (usize, usize) {
        let (q_len, kv_len) = match self.ragged {
            Some(Ragged { q, k }) => (q[sequence + 1] - q[sequence], k[sequence + 1] - k[sequence]),
            None => (shape.q_len, shape.kv_len),
        };
        (q_len, self.kv_lens.or_else(|| self.kv.lens()).map_or(kv_len, |lens| lens[sequence]))
    }

    /// The options, if they fit the shape.
    pub(crate) fn options(&self, shape: &Shape, softcap: Option<f32>) -> Result<Options<'a>, Error> {
        for (argument, values) in [("alibi slopes", self.alibi), ("sinks", self.sinks)] {
            if let Some(values) = values {
                same(argument, "length", values.len(), shape.heads, "q (heads)")?;
            }
        }
        if let Some(slope) = self.alibi.and_then(|slopes| slopes.iter().find(|slope| !slope.is_finite())) {
            return Err(Error::Number { argument: "alibi slopes", got: *slope, expected: "finite" });
        }
        if self.kv.lens().is_some() {
            for (argument, given) in [("kv_lens", self.kv_lens.is_some()), ("ragged", self.ragged.is_some())] {
                if given {
                    return Err(Error::Needs {
                        argument,
                        needs: "tensors; caches and pages have lengths of their own",
                    });
                }
            }
        }
        if let Some(lens) = self.kv_lens {
            same("kv_lens", "length", lens.len(), shape.batch, "the batch")?;
            for (index, &got) in lens.iter().enumerate() {
                let limit = match self.ragged {
                    Some(Ragged { k, .. }) => k[index + 1] - k[index],
                    None => shape.kv_len,
                };
                if got > limit {
                    return Err(Error::Entry { argument: "kv_lens", index, got, bound: Bound::AtMost, limit });
                }
            }
        }
        let bias = self.bias.map(|bias| broadcast("bias", bias, shape)).transpose()?;
        let mask = match self.mask {
            Some(mask) => Some(mask.with_view(broadcast("mask", mask.view(), shape)?)),
            None => None,
        };
        let Self { alibi, sinks, kv_lens, ragged, .. } = *self;
        Ok(Options { softcap, bias, alibi, mask, sinks, kv_lens, ragged })
    }
}

/// The number of sequences, if these are cumulative lengths that end at `total`.
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

/// A bias or mask repeated to the batch, heads and rows of the call.
fn broadcast<'a, T>(argument: &'static str, view: View<'a, T>, shape: &Shape) -> Result<View<'a, T>, Error> {
    let to = [shape.batch, shape.heads, shape.q_len];
    for ((what, got), expected) in ["batch", "heads", "rows"].into_iter().zip(view.shape()).zip(to) {
        if got != 1 && got != expected {
            return Err(Error::Mismatch { argument, what, got, expected, of: "the call" });
        }
    }
    let [.., columns] = view.shape();
    if columns > shape.kv_len {
        return Err(Error::Mismatch { argument, what: "columns", got: columns, expected: shape.kv_len, of: "k" });
    }
    let sizes = [to[0], to[1], to[2], columns];
    view.broadcast(to).ok_or(Error::TooLarge { what: argument, sizes })
}

pub(crate) fn same(
    argument: &'static str,
    what: &'static str,
    got: usize,
    expected: usize,
    of: &'static str,
) -> Result<(), Error> {
    if got == expected { Ok(()) } else { Err(Error::Mismatch { argument, what, got, expected, of }) }
}
