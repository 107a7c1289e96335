//! Appending tokens.

use crate::cache::{KvCache, check_elements, check_tokens};
use crate::error::{Error, same};
use crate::shape::KvShape;
use sdpa_kernels::{Bound, NewTokens, Tensor};

impl KvCache {
    /// Appends `n` tokens to every sequence: keys `[sequences, kv_heads, n, head_dim]` and values
    /// `[sequences, kv_heads, n, value_dim]`.
    ///
    /// # Errors
    /// [`Error::Mismatch`] for shapes that do not fit; [`Error::Needs`] in a latent cache for values that are not the
    /// first columns of `k`; [`Error::Removed`] if a sequence was removed ([`Self::append_ragged`] appends to chosen
    /// ones); [`Error::Memory`]; [`Error::Row`] for elements that the cache cannot store: an int8 cache refuses
    /// non-finite ones, an f16 cache finite ones of magnitude 65520 and more, which would become ∞, an int4 cache both.
    /// The cache is then unchanged.
    pub fn append<'t>(&mut self, k: impl Into<Tensor<'t>>, v: impl Into<Tensor<'t>>) -> Result<(), Error> {
        let (k, v) = (k.into(), v.into());
        let sequences = self.sequences();
        same("k", "batch", k.shape()[0], sequences, "the cache")?;
        if let Some(&sequence) = self.removed.first() {
            return Err(Error::Removed { argument: "append", sequence });
        }
        self.check(k, v)?;
        let rows = 0..k.shape()[2];
        self.write([k, v], (0..sequences).map(|sequence| NewTokens { sequence, b: sequence, rows: rows.clone() }))
    }

    /// Appends `n` tokens to one sequence: keys `[1, kv_heads, n, head_dim]` and values `[1, kv_heads, n, value_dim]`.
    ///
    /// # Errors
    /// As [`Self::append`], and [`Error::Range`] unless k has batch 1, [`Error::Sequence`] if there is no such sequence,
    /// [`Error::Removed`] if it was removed.
    /// The cache is then unchanged.
    pub fn append_to<'t>(
        &mut self,
        sequence: usize,
        k: impl Into<Tensor<'t>>,
        v: impl Into<Tensor<'t>>,
    ) -> Result<(), Error> {
        let (k, v) = (k.into(), v.into());
        self.check_one(sequence, k.shape()[0])?;
        self.check(k, v)?;
        self.write([k, v], [NewTokens { sequence, b: 0, rows: 0..k.shape()[2] }].into_iter())
    }

    /// Appends tokens of different numbers to some of the sequences, in any order: keys `[1, kv_heads, total,
    /// head_dim]` and values `[1, kv_heads, total, value_dim]`, laid end to end. Rows `ends[i]..ends[i + 1]` go to
    /// sequence `sequences[i]`: `ends` has one entry more than `sequences`, from 0 to the number of rows.
    /// [`Inputs::ragged_queries`](crate::Inputs::ragged_queries) takes rows in the same way.
    ///
    /// ```
    /// use sdpa::{KvCache, KvShape, View};
    /// let mut cache = KvCache::new(3, KvShape { kv_heads: 1, head_dim: 2, value_dim: 2 })?;
    /// let rows = [0.5; 5 * 2]; // four tokens for sequence 2, one for sequence 0
    /// let rows = View::bhld(&rows, [1, 1, 5, 2])?;
    /// cache.append_ragged(&[2, 0], &[0, 4, 5], rows, rows)?;
    /// assert_eq!(cache.lens(), [1, 0, 4]);
    /// # Ok::<(), sdpa::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Self::append_to`] for every sequence; [`Error::Repeated`] for one that is named twice; [`Error::Mismatch`],
    /// [`Error::Empty`] or [`Error::Entry`] for ends that do not fit. The cache is then unchanged.
    pub fn append_ragged<'t>(
        &mut self,
        sequences: &[usize],
        ends: &[usize],
        k: impl Into<Tensor<'t>>,
        v: impl Into<Tensor<'t>>,
    ) -> Result<(), Error> {
        let (k, v) = (k.into(), v.into());
        sequences.iter().try_for_each(|&sequence| self.there("sequences", sequence))?;
        self.refuse_repeated(sequences)?;
        same("k", "batch", k.shape()[0], 1, "a ragged append")?;
        let parts = sdpa_kernels::cumulative("ends", ends, k.shape()[2])?;
        same("ends", "number of sequences", parts, sequences.len(), "sequences")?;
        self.check(k, v)?;
        let parts = sequences.iter().zip(ends.windows(2));
        self.write([k, v], parts.map(|(&sequence, at)| NewTokens { sequence, b: 0, rows: at[0]..at[1] }))
    }

    /// Refuses a sequence that is not there, and keys of another number of sequences than one.
    pub(super) fn check_one(&self, sequence: usize, batch: usize) -> Result<(), Error> {
        self.there("sequence", sequence)?;
        let (got, of) = (batch, "as tokens of one sequence are appended");
        if got != 1 {
            return Err(Error::Range { argument: "k", what: "batch", got, bound: Bound::Exactly, limit: 1, of });
        }
        Ok(())
    }

    fn refuse_repeated(&mut self, sequences: &[usize]) -> Result<(), Error> {
        self.sorted.clear();
        self.sorted.extend_from_slice(sequences);
        self.sorted.sort_unstable();
        match self.sorted.windows(2).find(|pair| pair[0] == pair[1]) {
            Some(pair) => Err(Error::Repeated { argument: "sequences", sequence: pair[0] }),
            None => Ok(()),
        }
    }

    /// Writes tokens of checked sizes, if there is memory for them and the cache can store their elements.
    /// Elements are looked at last, because views may be huge. A sliding cache reuses the blocks it evicts.
    fn write(&mut self, kv: [Tensor<'_>; 2], tokens: impl Iterator<Item = NewTokens> + Clone) -> Result<(), Error> {
        let Some(new) = self.cache.try_allocate(tokens.clone()) else {
            let rows = tokens.fold(0usize, |rows, tokens| rows.saturating_add(tokens.rows.len()));
            return Err(self.no_memory(rows));
        };
        check_elements(self.format(), self.isa, kv)?;
        self.cache.append(self.isa, tokens, kv, new);
        Ok(())
    }

    /// Returns the error for a number of tokens that there is no memory for.
    pub(super) fn no_memory(&self, tokens: usize) -> Error {
        let KvShape { kv_heads, head_dim, value_dim } = self.shape();
        let token = [kv_heads, head_dim + value_dim, size_of::<f32>()];
        Error::Memory { what: "cache", bytes: token.into_iter().fold(tokens, usize::saturating_mul) }
    }

    /// Refuses keys and values of sizes that do not fit, and values of a latent cache that are not in its keys.
    fn check(&self, k: Tensor<'_>, v: Tensor<'_>) -> Result<(), Error> {
        check_tokens(self.shape(), "the cache", [k.shape(), v.shape()])?;
        if self.is_latent() && !v.is_start_of(&k) {
            let needs = "the first columns of k (View::columns), which are the values of a latent cache";
            return Err(Error::Needs { argument: "v", needs });
        }
        Ok(())
    }
}
