//! Keys and values kept from call to call.

use crate::error::{Bound, Error};
use crate::inputs::same;
use core::num::NonZeroUsize;
use sdpa_kernels::{Cache, Call, Dtype, Isa, Keep, MAX_DIM, Tensor};

/// The keys and values of one layer for a batch of sequences, each of its own length, as decoding wants them: keys are
/// packed when they are appended, so that a step reads every byte once and copies none.
///
/// Memory comes in blocks of 256 keys and grows without copying what is there. [`Self::fork`] shares blocks until one of
/// the two writes to them. Once warm, a step (append, attend) allocates nothing but, every 256th time, a block; and the
/// workspace doubles what it has for gathering when the number of blocks does.
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
    /// [`Error::Empty`], or [`Error::Mismatch`] for lengths beyond the largest possible.
    pub fn new(sequences: usize, kv_heads: usize, dims: [usize; 2]) -> Result<Self, Error> {
        Self::with([sequences, kv_heads], dims, None)
    }

    /// The same, its elements of this type: what is appended is rounded to it once, and widened again in registers. Half the
    /// memory of `f32`, and half the time of reading it.
    ///
    /// # Errors
    /// [`Error::Needs`] if something was appended already.
    pub fn dtype(self, dtype: Dtype) -> Result<Self, Error> {
        if self.bytes() > 0 {
            return Err(Error::Needs { argument: "dtype", needs: "an empty cache" });
        }
        Ok(Self { cache: self.cache.with_dtype(dtype), ..self })
    }

    /// The same for a sliding window: keys that no row to come can see are let go, a block of 256 at a time. Rows may see
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
        Self::with([sequences, kv_heads], dims, Some(Keep { last: last.get(), first }))
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
        Ok(Self { cache: Cache::new(Dtype::F32, heads, dims, keep), isa: Isa::detect() })
    }

    /// Appends as many tokens to every sequence: `[sequences, kv_heads, n, head_dim]` and `[…, value_dim]`.
    ///
    /// # Errors
    /// [`Error::Mismatch`]; the cache is then as it was.
    pub fn append<'t>(&mut self, k: impl Into<Tensor<'t>>, v: impl Into<Tensor<'t>>) -> Result<(), Error> {
        let (k, v) = (k.into(), v.into());
        let sequences = self.lens().len();
        same("k", "batch", k.shape()[0], sequences, "the cache")?;
        self.check(k, v)?;
        for sequence in 0..sequences {
            self.cache.append(self.isa, sequence, sequence, [k, v]);
        }
        Ok(())
    }

    /// Appends tokens to one sequence: `[1, kv_heads, n, head_dim]` and `[1, kv_heads, n, value_dim]`.
    ///
    /// # Errors
    /// [`Error::Mismatch`], [`Error::Entry`]; the cache is then as it was.
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
        self.cache.append(self.isa, sequence, 0, [k, v]);
        Ok(())
    }

    fn check(&self, k: Tensor<'_>, v: Tensor<'_>) -> Result<(), Error> {
        let ([batch, _, rows, _], [_, kv_heads, _, head_dim]) = (k.shape(), self.cache.shapes()[0]);
        same("k", "heads", k.shape()[1], kv_heads, "the cache")?;
        same("k", "head_dim", k.shape()[3], head_dim, "the cache")?;
        same("v", "batch", v.shape()[0], batch, "k")?;
        same("v", "heads", v.shape()[1], kv_heads, "the cache")?;
        same("v", "rows", v.shape()[2], rows, "k")?;
        same("v", "value_dim", v.shape()[3], self.cache.shapes()[1][3], "the cache")
    }

    fn there(&self, argument: &'static str, sequence: usize) -> Result<(), Error> {
        let (got, sequences) = (sequence, self.lens().len());
        if got >= sequences {
            let limit = sequences.saturating_sub(1);
            return Err(Error::Entry { argument, index: 0, got, bound: Bound::AtMost, limit });
        }
        Ok(())
    }

    /// Forgets the keys of a sequence from `len` on: a rollback. Memory stays, for tokens to come.
    ///
    /// # Errors
    /// [`Error::Entry`] if there is no such sequence, it is shorter, or the keys before `len` were let go.
    pub fn truncate(&mut self, sequence: usize, len: usize) -> Result<(), Error> {
        self.there("sequence", sequence)?;
        let (had, gone) = (self.lens()[sequence], self.cache.gone(sequence));
        let (bound, limit) = if len > had {
            (Bound::AtMost, had)
        } else if len > gone.start && len <= gone.end {
            (Bound::AtLeast, gone.end + 1)
        } else {
            self.cache.truncate(sequence, len);
            return Ok(());
        };
        Err(Error::Entry { argument: "length", index: sequence, got: len, bound, limit })
    }

    /// Forgets all keys of a sequence. Memory stays, for tokens to come.
    ///
    /// # Errors
    /// [`Error::Entry`] if there is no such sequence.
    pub fn clear(&mut self, sequence: usize) -> Result<(), Error> {
        self.there("sequence", sequence)?;
        self.cache.truncate(sequence, 0);
        Ok(())
    }

    /// Makes sequence `to` a copy of `from`. Their memory is shared, block by block, until one of them writes to it.
    ///
    /// # Errors
    /// [`Error::Entry`] if there is no such sequence.
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

    /// Keys of each sequence, those that a sliding cache has let go included: the next token's position.
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

/// Refuses calls that would see what a sliding cache has let go.
pub(crate) fn check_kept(cache: &Cache, call: &Call<'_>, wants_all_keys: bool) -> Result<(), Error> {
    for index in 0..call.sequences() {
        let (gone, sequence) = (cache.gone(index), call.sequence(index));
        if gone.is_empty() || sequence.q_len == 0 || call.q.shape()[1] == 0 {
            continue;
        }
        if wants_all_keys {
            return Err(Error::Needs { argument: "scores or key mass", needs: "a cache that keeps all keys" });
        }
        // Every row: those in the middle may be the only ones whose windows lie where keys were let go.
        for row in 0..sequence.q_len {
            let keys = call.visible.keys(sequence.offset.saturating_add_unsigned(row), sequence.kv_len);
            let seen = [(0, keys.prefix), (keys.start, keys.end)]
                .into_iter()
                .map(|(from, to)| (from.max(gone.start), to.min(gone.end)))
                .find(|(from, to)| from < to);
            if let Some((key, _)) = seen {
                return Err(Error::Gone { sequence: index, row, key, end: gone.end });
            }
        }
    }
    Ok(())
}
