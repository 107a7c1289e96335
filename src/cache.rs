//! Keys and values kept from call to call.

use crate::error::same;
use crate::error::{Bound, Error};
use core::num::NonZeroUsize;
use core::ops::Range;
use sdpa_kernels::{Cache, Call, Dtype, Isa, Keep, MAX_DIM, MAX_INT8_HEAD_DIM, Tensor};

/// Where the scales of an int8 cache's keys come from: see [`KvCache::int8`].
#[derive(Debug, Clone, PartialEq)]
pub enum KeyScales {
    /// Every key of every head has its own: a 127th of its largest magnitude.
    PerToken,
    /// Every channel has its own, `[kv_heads × head_dim]`, positive and finite, known beforehand: for keys some of whose
    /// channels are much larger than others. Elements beyond 127 scales are cut off there.
    PerChannel(Vec<f32>),
}

/// The keys and values of one layer for a batch of sequences, each of its own length, as decoding wants them: keys are
/// packed when they are appended, so that a step reads every byte once and copies none.
///
/// Memory comes in blocks of 256 keys and grows without copying what is there. [`Self::fork`] shares blocks until one of
/// the two writes to them. Once warm, a step (append, attend) allocates nothing but, every 256th time, a block; and the
/// workspace doubles what it has for accumulation when the number of blocks does.
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
    /// An empty cache: so many sequences and key/value heads, keys and values of these lengths.
    ///
    /// # Errors
    /// [`Error::Empty`], [`Error::Mismatch`] for lengths beyond the largest possible, [`Error::TooLarge`] or [`Error::Memory`].
    pub fn new(sequences: usize, kv_heads: usize, dims: [usize; 2]) -> Result<Self, Error> {
        Self::with([sequences, kv_heads], dims, None)
    }

    /// The same, its elements of this type: what is appended is rounded to it once, and widened again in registers. Half the
    /// memory of `f32`, and half the time of reading it.
    ///
    /// # Errors
    /// [`Error::Needs`] if something was appended already, or the cache is to keep bytes.
    pub fn dtype(self, dtype: Dtype) -> Result<Self, Error> {
        if self.bytes() > 0 {
            return Err(Error::Needs { argument: "dtype", needs: "an empty cache" });
        }
        if self.cache.is_int8() {
            return Err(Error::Needs {
                argument: "dtype",
                needs: "a cache that does not keep bytes: int8 was asked for",
            });
        }
        Ok(Self { cache: self.cache.with_dtype(dtype), ..self })
    }

    /// The same, its elements bytes: about a quarter of the memory of `f32`, and of the time of reading it. Every value has a
    /// scale `s`, and so has every key, or every channel of the keys; an element `x` is kept as the integer nearest to `x / s`,
    /// ±127 at most. A query row becomes bytes in the same way, once for all keys, with the scales of channels taken into it
    /// before; products of bytes are added up exactly. All else is computed as ever, the softmax in `f32`.
    ///
    /// **What it costs.** Rounding of `f32` apart, an element is off by no more than half its scale: a value or key by a 254th
    /// of the largest magnitude in its row. So an output is off by half the largest scale of the values it sees, at most, and
    /// a score `c·Σ q·k`, with scales `s` of the query row and `t` of the key, by
    /// `|c|·(s/2·Σ|k| + t/2·Σ|q| + s·t·head_dim/4)`; that is at worst: such errors are as often up as down, and what is
    /// common is near the square root of `head_dim` instead. With scales `tᵢ` of channels the query row is `qᵢ·tᵢ`, and the
    /// bound `|c|·(s/2·Σ|kᵢ|/tᵢ + Σ|qᵢ|·tᵢ/2 + s·head_dim/4)`, as long as no key is beyond 127 scales. A weight is off by its
    /// score's error as a factor `exp(±error)`.
    ///
    /// The bits are the same on every instruction set with FMA, for any number of threads, whether rows come together or
    /// one by one, and whatever the cache held before. Keys and values that are not finite are refused when they are
    /// appended; a query row that is not finite (or times the scales of channels is not) has scores of NaN.
    ///
    /// ```
    /// use sdpa::{KeyScales, KvCache};
    /// let cache = KvCache::new(1, 8, [128, 128])?.int8(KeyScales::PerToken)?;
    /// # Ok::<(), sdpa::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Needs`] if something was appended already or another type was asked for, [`Error::Mismatch`] for keys longer than 131,072 or another number
    /// of scales than `kv_heads × head_dim`, [`Error::Number`] for a scale that is not positive and finite.
    pub fn int8(self, keys: KeyScales) -> Result<Self, Error> {
        if self.bytes() > 0 {
            return Err(Error::Needs { argument: "int8", needs: "an empty cache" });
        }
        if self.cache.dtype().is_some_and(|dtype| dtype != Dtype::F32) {
            return Err(Error::Needs { argument: "int8", needs: "a cache of no other type: dtype was asked for" });
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

    /// The same for a sliding window: keys that no row to come can see are evicted, a block of 256 at a time. Rows may see
    /// the last `last` keys, their own included, and the first `first`.
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

    /// The same for a sliding window, with room for rollbacks: so many more of the last keys stay than rows may see. Then
    /// [`Self::truncate`] may always take back that many tokens, counted from before the last append.
    ///
    /// # Errors
    /// [`Error::Needs`] if something was appended already, or the cache keeps all keys.
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
        // A block of 256, in floats, its rows in whole vectors.
        let row = head_dim.next_multiple_of(16) + value_dim.next_multiple_of(16);
        if kv_heads.checked_mul(row * 256 * 4).is_none_or(|bytes| bytes > isize::MAX as usize) {
            return Err(Error::TooLarge { what: "cache", sizes: [sequences, kv_heads, head_dim, value_dim] });
        }
        let cache = Cache::new(Dtype::F32, heads, dims, keep);
        let bytes = sequences.saturating_mul(Cache::SEQUENCE_BYTES);
        Ok(Self { cache: cache.ok_or(Error::Memory { what: "cache", bytes })?, isa: Isa::detect() })
    }

    /// Appends as many tokens to every sequence: `[sequences, kv_heads, n, head_dim]` and `[…, value_dim]`.
    ///
    /// # Errors
    /// [`Error::Mismatch`]; [`Error::Row`] for what the cache cannot keep: in bytes what is not finite, in f16 finite numbers of
    /// 65520 and more, which would become ∞. The cache is then as it was.
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

    /// Appends tokens to one sequence: `[1, kv_heads, n, head_dim]` and `[1, kv_heads, n, value_dim]`.
    ///
    /// # Errors
    /// As [`Self::append`], and [`Error::Sequence`]; the cache is then as it was.
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

    /// Gets the memory that appending takes. A sliding cache takes what it evicts meanwhile.
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
                // Bytes cannot say that something is not finite.
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

    /// Forgets the keys of a sequence from `len` on: a rollback. Memory stays, for tokens to come.
    ///
    /// # Errors
    /// [`Error::Sequence`] if there is no such sequence; [`Error::Entry`] if it is shorter, or if a sliding cache has evicted
    /// keys that the next row would see: see [`Self::rollback`].
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

    /// Forgets all keys of a sequence. Memory stays, for tokens to come.
    ///
    /// # Errors
    /// [`Error::Sequence`] if there is no such sequence.
    pub fn clear(&mut self, sequence: usize) -> Result<(), Error> {
        self.there("sequence", sequence)?;
        self.cache.truncate(sequence, 0);
        Ok(())
    }

    /// Makes sequence `to` a copy of `from`. Their memory is shared, block by block, until one of them writes to it.
    ///
    /// # Errors
    /// [`Error::Sequence`] if there is no such sequence.
    pub fn fork(&mut self, from: usize, to: usize) -> Result<(), Error> {
        self.there("from", from)?;
        self.there("to", to)?;
        self.cache.fork(from, to);
        Ok(())
    }

    /// One more sequence, empty. Its number.
    pub fn add_sequence(&mut self) -> usize {
        self.cache.add_sequence()
    }

    /// Keys of each sequence, those that a sliding cache has evicted included: the next token's position.
    pub fn lens(&self) -> &[usize] {
        self.cache.lens()
    }

    /// Bytes held; what sequences share is counted once.
    pub fn bytes(&self) -> usize {
        self.cache.bytes()
    }

    pub(crate) fn kernel(&self) -> &Cache {
        &self.cache
    }
}

/// Refuses calls that would see what a sliding cache has evicted.
pub(crate) fn check_kept(cache: &Cache, call: &Call<'_>, wants_all_keys: bool) -> Result<(), Error> {
    for index in 0..call.sequences() {
        let (evicted, sequence) = (cache.evicted(index), call.sequence(index));
        if evicted.is_empty() || sequence.q_len == 0 || call.q.shape()[1] == 0 {
            continue;
        }
        if wants_all_keys {
            return Err(Error::Needs { argument: "scores or key weight sums", needs: "a cache that keeps all keys" });
        }
        // Every row: those in the middle may be the only ones whose windows lie where keys were evicted.
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
