//! Key/value cache: keys and values kept from call to call.

use crate::error::same;
use crate::error::{Bound, Error};
use core::num::NonZeroUsize;
use core::ops::Range;
use sdpa_kernels::{Cache, Call, Dtype, Isa, Keep, MAX_DIM, MAX_INT8_HEAD_DIM, Tensor};

/// Scales of the keys of an int8 cache: see [`KvCache::int8`].
///
/// ```
/// use sdpa::{KeyScales, KvCache};
/// // Largest magnitude of each channel among some keys of the model: two heads of four.
/// let largest = [0.5, 0.5, 9.0, 0.5, 0.5, 0.5, 0.5, 12.0];
/// let scales = KeyScales::PerChannel(largest.map(|x| x / 127.0).to_vec());
/// let cache = KvCache::new(1, 2, [4, 4])?.int8(scales)?;
/// # Ok::<(), sdpa::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub enum KeyScales {
    /// One scale per key and head: 1/127 of the key's largest magnitude.
    PerToken,
    /// One fixed scale per channel, `[kv_heads × head_dim]`, positive and finite: for keys with some channels much
    /// larger than others. An element beyond ±127 scales is clamped to ±127 scales.
    PerChannel(Vec<f32>),
}

/// Key/value cache of one layer for a batch of sequences, each with its own length, for decoding. Keys are packed when
/// they are appended, so a decode step reads every byte once and copies none.
///
/// Memory is allocated in blocks of 256 keys and grows without copying existing keys. [`Self::fork`] shares blocks
/// until one of the two sequences writes to them. Once warm, a decode step (append, attend) allocates only when a
/// sequence crosses a 256-token boundary: one block, and, each time the number of blocks has doubled, twice the
/// workspace for accumulation.
///
/// ```
/// use sdpa::{Alignment, Attention, Inputs, KvCache, Outputs, View, ViewMut};
/// # let (q, k, v) = (vec![0.5; 4 * 8], vec![0.25; 2 * 3 * 8], vec![1.0; 2 * 3 * 8]);
/// let mut cache = KvCache::new(1, 2, [8, 8])?; // one sequence, two key/value heads, keys and values of eight
/// cache.append(View::bhld(&k, [1, 2, 3, 8])?, View::bhld(&v, [1, 2, 3, 8])?)?;
/// let mut out = vec![0.0; 4 * 8];
/// let shape = [1, 4, 1, 8]; // four query heads, one row
/// let inputs = Inputs::cached(View::bhld(&q, shape)?, &cache);
/// let attention = Attention::new().causal().align(Alignment::BottomRight);
/// sdpa::attention(&attention, inputs, Outputs::new(ViewMut::bhld(&mut out, shape)?))?;
/// # Ok::<(), sdpa::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct KvCache {
    cache: Cache,
    isa: Isa,
}

impl KvCache {
    /// Creates an empty `f32` cache for `sequences` sequences and `kv_heads` key/value heads; `dims` is
    /// `[head_dim, value_dim]`.
    ///
    /// # Errors
    /// [`Error::Empty`] for a length of 0, [`Error::Mismatch`] for lengths beyond the largest possible,
    /// [`Error::TooLarge`] or [`Error::Memory`].
    pub fn new(sequences: usize, kv_heads: usize, dims: [usize; 2]) -> Result<Self, Error> {
        Self::with([sequences, kv_heads], dims, None)
    }

    /// Sets the element type. Appended keys and values are rounded to it once and widened again in registers. 16-bit
    /// elements take half the memory of `f32` and half the time to read.
    ///
    /// # Errors
    /// [`Error::Needs`] if something was appended already or the cache is an int8 cache.
    pub fn dtype(self, dtype: Dtype) -> Result<Self, Error> {
        if self.bytes() > 0 {
            return Err(Error::Needs { argument: "dtype", needs: "an empty cache" });
        }
        if self.cache.is_int8() {
            return Err(Error::Needs { argument: "dtype", needs: "a cache without int8, which is set" });
        }
        Ok(Self { cache: self.cache.with_dtype(dtype), ..self })
    }

    /// Sets int8 elements: about a quarter of the memory of `f32` and of the time to read it. Every value has a scale
    /// `s`, and so has every key, or every channel of the keys; an element `x` is stored as the integer nearest to
    /// `x / s`, at most ±127. A query row is quantised in the same way, once for all keys, after it is multiplied by
    /// the scales of the channels if there are any; int8 products are accumulated exactly. Everything else, the softmax
    /// included, is computed in `f32`.
    ///
    /// **Accuracy.** Apart from `f32` rounding, the error of an element is at most half its scale: for a value or key,
    /// 1/254 of the largest magnitude in its row. The error of an output is therefore at most half the largest scale of
    /// the values it sees, and that of a score `c·Σ q·k`, with scales `s` of the query row and `t` of the key, at most
    /// `|c|·(s/2·Σ|k| + t/2·Σ|q| + s·t·head_dim/4)`. That is the worst case: the signs of such errors vary, so the
    /// common error has a factor near √head_dim in place of head_dim. With scales `tᵢ` of channels the query row is
    /// `qᵢ·tᵢ`, and the bound is `|c|·(s/2·Σ|kᵢ|/tᵢ + Σ|qᵢ|·tᵢ/2 + s·head_dim/4)`, provided that no key is beyond 127
    /// scales. The error of a score changes the weight by a factor `exp(±error)`.
    ///
    /// The bits are the same on every instruction set with FMA, for any number of threads, for rows computed together
    /// or one by one, and whatever the cache held before. Non-finite keys and values are refused when they are
    /// appended; a query row that is non-finite, or becomes so when multiplied by the scales of the channels, has NaN
    /// scores.
    ///
    /// ```
    /// use sdpa::{KeyScales, KvCache};
    /// let cache = KvCache::new(1, 8, [128, 128])?.int8(KeyScales::PerToken)?;
    /// # Ok::<(), sdpa::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Needs`] if something was appended already or another element type was set, [`Error::Mismatch`] for keys
    /// longer than 131,072 or if there are not `kv_heads × head_dim` scales, [`Error::Number`] for a scale that is not
    /// positive and finite.
    pub fn int8(self, keys: KeyScales) -> Result<Self, Error> {
        if self.bytes() > 0 {
            return Err(Error::Needs { argument: "int8", needs: "an empty cache" });
        }
        if self.cache.dtype().is_some_and(|dtype| dtype != Dtype::F32) {
            return Err(Error::Needs { argument: "int8", needs: "a cache without dtype, which is set" });
        }
        let [_, kv_heads, _, head_dim] = self.cache.shapes()[0];
        if head_dim > MAX_INT8_HEAD_DIM {
            let (what, of) = ("head_dim", "the largest possible of bytes");
            return Err(Error::Mismatch { argument: "int8", what, got: head_dim, expected: MAX_INT8_HEAD_DIM, of });
        }
        let channels = match keys {
            KeyScales::PerToken => None,
            KeyScales::PerChannel(scales) => {
                let all = kv_heads.saturating_mul(head_dim);
                same("key scales", "length", scales.len(), all, "the cache (kv_heads × head_dim)")?;
                if let Some(&got) = scales.iter().find(|scale| !(**scale > 0.0 && scale.is_finite())) {
                    return Err(Error::Number { argument: "key scales", got, expected: "positive and finite" });
                }
                Some(scales.into_boxed_slice())
            }
        };
        Ok(Self { cache: self.cache.with_int8(channels), ..self })
    }

    /// Creates an empty cache for a sliding window: keys that no later row can see are evicted, a block of 256 at a
    /// time. Rows may see the last `last` keys, their own included, and the first `first`. Other arguments as for
    /// [`Self::new`].
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn sliding(
        sequences: usize,
        kv_heads: usize,
        dims: [usize; 2],
        last: NonZeroUsize,
        first: usize,
    ) -> Result<Self, Error> {
        Self::with([sequences, kv_heads], dims, Some(Keep { last: last.get(), first, rollback: 0 }))
    }

    /// Keeps `tokens` more of the last keys than rows may see, so that [`Self::truncate`] can always take back that
    /// many tokens, counted from before the last append. For sliding caches.
    ///
    /// # Errors
    /// [`Error::Needs`] if something was appended already or the cache is not a sliding one.
    pub fn rollback(self, tokens: usize) -> Result<Self, Error> {
        if self.bytes() > 0 {
            return Err(Error::Needs { argument: "rollback", needs: "an empty cache" });
        }
        let cache = self.cache.with_rollback(tokens);
        Ok(Self { cache: cache.ok_or(Error::Needs { argument: "rollback", needs: "a sliding cache" })?, ..self })
    }

    fn with(heads: [usize; 2], dims: [usize; 2], keep: Option<Keep>) -> Result<Self, Error> {
        for (what, got) in ["head_dim", "value_dim"].into_iter().zip(dims) {
            if got == 0 {
                return Err(Error::Empty { argument: "cache", what });
            }
            if got > MAX_DIM {
                return Err(Error::Mismatch {
                    argument: "cache",
                    what,
                    got,
                    expected: MAX_DIM,
                    of: "the largest possible",
                });
            }
        }
        let [sequences, kv_heads] = heads;
        let [head_dim, value_dim] = dims;
        // Size of a block of 256 keys and values in floats, rows padded to whole vectors.
        let row = head_dim.next_multiple_of(16) + value_dim.next_multiple_of(16);
        if kv_heads.checked_mul(row * 256 * 4).is_none_or(|bytes| bytes > isize::MAX as usize) {
            return Err(Error::TooLarge { what: "cache", sizes: [sequences, kv_heads, head_dim, value_dim] });
        }
        let cache = Cache::new(Dtype::F32, heads, dims, keep);
        let bytes = sequences.saturating_mul(Cache::SEQUENCE_BYTES);
        Ok(Self { cache: cache.ok_or(Error::Memory { what: "cache", bytes })?, isa: Isa::detect() })
    }

    /// Appends `n` tokens to every sequence: keys `[sequences, kv_heads, n, head_dim]` and values
    /// `[sequences, kv_heads, n, value_dim]`.
    ///
    /// # Errors
    /// [`Error::Mismatch`] for shapes that do not fit; [`Error::Row`] for elements that the cache cannot store:
    /// non-finite ones in an int8 cache, finite ones of magnitude 65520 and more, which would become ∞, in an f16
    /// cache; [`Error::Memory`]. The cache is then unchanged.
    pub fn append<'t>(&mut self, k: impl Into<Tensor<'t>>, v: impl Into<Tensor<'t>>) -> Result<(), Error> {
        let (k, v) = (k.into(), v.into());
        let sequences = self.lens().len();
        same("k", "batch", k.shape()[0], sequences, "the cache")?;
        self.check(k, v)?;
        self.reserve(0..sequences, k.shape()[2])?;
        for sequence in 0..sequences {
            self.cache.append(self.isa, sequence, sequence, [k, v]);
        }
        Ok(())
    }

    /// Appends `n` tokens to one sequence: keys `[1, kv_heads, n, head_dim]` and values `[1, kv_heads, n, value_dim]`.
    ///
    /// # Errors
    /// As [`Self::append`], and [`Error::Sequence`] if there is no such sequence. The cache is then unchanged.
    pub fn append_to<'t>(
        &mut self,
        sequence: usize,
        k: impl Into<Tensor<'t>>,
        v: impl Into<Tensor<'t>>,
    ) -> Result<(), Error> {
        let (k, v) = (k.into(), v.into());
        self.there("sequence", sequence)?;
        same("k", "batch", k.shape()[0], 1, "one sequence")?;
        self.check(k, v)?;
        self.reserve(sequence..sequence + 1, k.shape()[2])?;
        self.cache.append(self.isa, sequence, 0, [k, v]);
        Ok(())
    }

    /// Reserves the memory that appending `tokens` takes. A sliding cache reuses the blocks it evicts meanwhile.
    fn reserve(&mut self, sequences: Range<usize>, tokens: usize) -> Result<(), Error> {
        let [[_, kv_heads, _, head_dim], [.., value_dim]] = self.cache.shapes();
        let sizes = [sequences.len(), kv_heads, head_dim + value_dim, size_of::<f32>()];
        let bytes = sizes.into_iter().fold(tokens, usize::saturating_mul);
        let done = self.cache.try_reserve(sequences, tokens);
        if done { Ok(()) } else { Err(Error::Memory { what: "cache", bytes }) }
    }

    fn check(&self, k: Tensor<'_>, v: Tensor<'_>) -> Result<(), Error> {
        let ([batch, _, rows, _], [_, kv_heads, _, head_dim]) = (k.shape(), self.cache.shapes()[0]);
        same("k", "heads", k.shape()[1], kv_heads, "the cache")?;
        same("k", "head_dim", k.shape()[3], head_dim, "the cache")?;
        same("v", "batch", v.shape()[0], batch, "k")?;
        same("v", "heads", v.shape()[1], kv_heads, "the cache")?;
        same("v", "rows", v.shape()[2], rows, "k")?;
        same("v", "value_dim", v.shape()[3], self.cache.shapes()[1][3], "the cache")?;
        for (argument, x) in [("k", k), ("v", v)] {
            let (unfit, expected) = match self.cache.dtype() {
                // An int8 element cannot represent a non-finite number.
                None => (x.not_finite(self.isa), "finite"),
                Some(Dtype::F16) => (x.beyond_f16(self.isa), "below 65520 in size, as f16 is"),
                Some(_) => continue,
            };
            if let Some(([_, _, row, _], got)) = unfit {
                return Err(Error::Row { argument, what: "an element", row, got, expected });
            }
        }
        Ok(())
    }

    fn there(&self, argument: &'static str, sequence: usize) -> Result<(), Error> {
        let (got, sequences) = (sequence, self.lens().len());
        if got >= sequences {
            return Err(Error::Sequence { argument, got, sequences });
        }
        Ok(())
    }

    /// Removes the keys of a sequence from position `len` on: a rollback. Memory is kept for later tokens.
    ///
    /// # Errors
    /// [`Error::Sequence`] if there is no such sequence; [`Error::Entry`] if it is shorter than `len`, or if a sliding
    /// cache has evicted keys that the next row would see: see [`Self::rollback`].
    pub fn truncate(&mut self, sequence: usize, len: usize) -> Result<(), Error> {
        self.there("sequence", sequence)?;
        let (had, shortest) = (self.lens()[sequence], self.cache.shortest(sequence));
        let (bound, limit) = if len > had {
            (Bound::AtMost, had)
        } else if len > self.cache.evicted(sequence).start && len < shortest {
            (Bound::AtLeast, shortest)
        } else {
            self.cache.truncate(sequence, len);
            return Ok(());
        };
        Err(Error::Entry { argument: "length", index: sequence, got: len, bound, limit })
    }

    /// Removes all keys of a sequence. Memory is kept for later tokens.
    ///
    /// # Errors
    /// [`Error::Sequence`] if there is no such sequence.
    pub fn clear(&mut self, sequence: usize) -> Result<(), Error> {
        self.there("sequence", sequence)?;
        self.cache.truncate(sequence, 0);
        Ok(())
    }

    /// Makes sequence `to` a copy of `from`. The two share memory, block by block, until one of them writes to it.
    ///
    /// # Errors
    /// [`Error::Sequence`] if either sequence does not exist.
    pub fn fork(&mut self, from: usize, to: usize) -> Result<(), Error> {
        self.there("from", from)?;
        self.there("to", to)?;
        self.cache.fork(from, to);
        Ok(())
    }

    /// Adds an empty sequence and returns its index.
    pub fn add_sequence(&mut self) -> usize {
        self.cache.add_sequence()
    }

    /// Number of keys of each sequence, evicted keys of a sliding cache included: the position of the next token.
    pub fn lens(&self) -> &[usize] {
        self.cache.lens()
    }

    /// Bytes held; blocks that sequences share are counted once.
    pub fn bytes(&self) -> usize {
        self.cache.bytes()
    }

    pub(crate) fn kernel(&self) -> &Cache {
        &self.cache
    }
}

/// Refuses calls whose rows would see keys that a sliding cache has evicted.
pub(crate) fn check_kept(cache: &Cache, call: &Call<'_>, wants_all_keys: bool) -> Result<(), Error> {
    for index in 0..call.sequences() {
        let sequence = call.sequence(index);
        let evicted = cache.evicted(sequence.source);
        if evicted.is_empty() || sequence.q_len == 0 || call.q.shape()[1] == 0 {
            continue;
        }
        if wants_all_keys {
            return Err(Error::Needs { argument: "scores or key weight sums", needs: "a cache that keeps all keys" });
        }
        // Check every row: rows in the middle may be the only ones whose windows reach evicted keys.
        for row in 0..sequence.q_len {
            let keys = call.visible.keys(sequence.offset.saturating_add_unsigned(row), sequence.kv_len);
            let seen = [(0, keys.prefix), (keys.start, keys.end)]
                .into_iter()
                .map(|(from, to)| (from.max(evicted.start), to.min(evicted.end)))
                .find(|(from, to)| from < to);
            if let Some((key, _)) = seen {
                return Err(Error::Evicted { sequence: index, row, key, end: evicted.end });
            }
        }
    }
    Ok(())
}
