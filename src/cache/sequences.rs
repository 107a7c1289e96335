//! Sequences of a cache: rolled back, forked, removed, added.

use crate::cache::KvCache;
use crate::error::{Error, at_most};
use sdpa_kernels::Bound;

impl KvCache {
    /// Returns an error unless there is such a sequence.
    pub(crate) fn there(&self, argument: &'static str, sequence: usize) -> Result<(), Error> {
        let (got, sequences) = (sequence, self.lens().len());
        if got >= sequences {
            return Err(Error::Sequence { argument, got, sequences });
        }
        if self.removed.contains(&sequence) { Err(Error::Removed { argument, sequence }) } else { Ok(()) }
    }

    /// Removes the keys of a sequence from position `len` on: a rollback. Memory is kept for later tokens.
    ///
    /// # Errors
    /// [`Error::Sequence`] if there is no such sequence, [`Error::Removed`] if it was removed; [`Error::Length`] if it is
    /// shorter than `len`, or if a sliding cache has evicted keys that the next row would see: see [`Self::rollback_room`].
    pub fn truncate(&mut self, sequence: usize, len: usize) -> Result<(), Error> {
        self.check_truncate(sequence, len)?;
        self.cache.truncate(sequence, len);
        Ok(())
    }

    /// Returns the error that [`Self::truncate`] would give, without a change: for what truncates several caches, or none.
    ///
    /// # Errors
    /// As there.
    pub fn check_truncate(&self, sequence: usize, len: usize) -> Result<(), Error> {
        self.there("sequence", sequence)?;
        let (had, shortest) = (self.lens()[sequence], self.cache.shortest(sequence));
        let (bound, limit) = if len > had {
            (Bound::AtMost, had)
        } else if len > self.cache.evicted(sequence).start && len < shortest {
            (Bound::AtLeast, shortest)
        } else {
            return Ok(());
        };
        Err(Error::Length { argument: "length", sequence, got: len, bound, limit })
    }

    /// Keeps the first `from` tokens of a sequence and, of the later ones, only the accepted, moved up: for a tree of
    /// draft tokens appended after `from` committed ones, when one path of the tree is accepted. `accepted` are
    /// increasing indices, counted from `from`: token `from + accepted[i]` becomes token `from + i`, with its stored
    /// bits. The cache is then as if only these tokens had been appended, but for a later token that becomes one of the exact first
    /// ([`Self::with_format`]): it stays as inexact as it was. In a sliding cache this always works if
    /// `from` is the length before the last append.
    ///
    /// Keys are moved as they are. If you rotate keys by position (rotary embeddings), rotate them by the position that
    /// they have once accepted: in a tree, `from` plus their depth, not `from` plus their index. [`Self::change_keys`] rotates
    /// stored ones.
    ///
    /// Takes time in proportion to the tokens that move, and memory only for shared blocks that they move to.
    ///
    /// ```
    /// use sdpa::{KvCache, KvShape, View};
    /// let mut cache = KvCache::new(1, KvShape { kv_heads: 1, head_dim: 2, value_dim: 2 })?;
    /// let (prompt, draft) = ([0.5; 7 * 2], [0.25; 5 * 2]);
    /// let (prompt, draft) = (View::bhld(&prompt, [1, 1, 7, 2])?, View::bhld(&draft, [1, 1, 5, 2])?);
    /// cache.append(prompt, prompt)?;
    /// cache.append(draft, draft)?; // a tree of five tokens
    /// cache.keep(0, 7, &[0, 2, 4])?; // one path was accepted
    /// assert_eq!(cache.lens(), [10]);
    /// # Ok::<(), sdpa::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Sequence`] if there is no such sequence, [`Error::Removed`] if it was removed; [`Error::Length`] if it
    /// is shorter than `from`, or if a sliding cache has evicted keys that the next row would see, or a block to which
    /// a token would move; [`Error::Entry`] if `accepted` does not increase, or names a token beyond the end or an
    /// evicted one; [`Error::Range`] for more tokens than there are after `from`; [`Error::Memory`]. The cache is then
    /// unchanged.
    pub fn keep(&mut self, sequence: usize, from: usize, accepted: &[usize]) -> Result<(), Error> {
        self.prepare_keep(sequence, from, accepted)?;
        if self.cache.keep(sequence, from, accepted) { Ok(()) } else { Err(self.no_memory(accepted.len())) }
    }

    /// Checks a [`Self::keep`], and allocates what it takes: it then succeeds.
    pub(crate) fn prepare_keep(&mut self, sequence: usize, from: usize, accepted: &[usize]) -> Result<(), Error> {
        self.there("sequence", sequence)?;
        check_accepted(sequence, self.lens()[sequence], from, accepted)?;
        self.check_moves(sequence, from, accepted)?;
        self.check_truncate(sequence, from + accepted.len())?;
        let reserved = self.cache.reserve_to_keep(sequence, from, accepted);
        if reserved { Ok(()) } else { Err(self.no_memory(accepted.len())) }
    }

    /// Refuses moves of evicted tokens, or to where there are such.
    fn check_moves(&self, sequence: usize, from: usize, accepted: &[usize]) -> Result<(), Error> {
        let (evicted, bound) = (self.cache.evicted(sequence), Bound::AtLeast);
        let in_place = accepted.iter().enumerate().take_while(|&(i, &token)| i == token).count();
        let mut moved = accepted.iter().enumerate().skip(in_place);
        if let Some((index, &got)) = moved.clone().find(|&(_, token)| evicted.contains(&(from + token))) {
            let (limit, of) = (evicted.end - from, "the first token that is not evicted, counted from `from`");
            return Err(Error::Entry { argument: "accepted", index, got, bound, limit, of });
        }
        if moved.any(|(i, _)| evicted.contains(&(from + i))) {
            return Err(Error::Length { argument: "from", sequence, got: from, bound, limit: evicted.end });
        }
        Ok(())
    }

    /// Removes all keys of a sequence. Memory is kept for later tokens.
    ///
    /// # Errors
    /// [`Error::Sequence`] if there is no such sequence, [`Error::Removed`] if it was removed.
    pub fn clear(&mut self, sequence: usize) -> Result<(), Error> {
        self.there("sequence", sequence)?;
        self.cache.truncate(sequence, 0);
        Ok(())
    }

    /// Makes sequence `to` a copy of `from`. The two share memory, block by block, until one of them writes to it. A
    /// call over both with few rows of each (decoding) reads the blocks they share once.
    ///
    /// # Errors
    /// [`Error::Sequence`] if either sequence does not exist, [`Error::Removed`] if it was removed.
    pub fn fork(&mut self, from: usize, to: usize) -> Result<(), Error> {
        self.there("from", from)?;
        self.there("to", to)?;
        self.cache.fork(from, to);
        Ok(())
    }

    /// Removes a sequence. Its memory is kept for later tokens of any sequence. [`Self::add_sequence`] gives out its
    /// index again, the lowest removed index first.
    ///
    /// Other sequences keep their indices. In a call over the whole cache, a removed sequence has length 0: its query
    /// rows see nothing, and give 0. Until it is added again, every call that names it is refused, and so is
    /// [`Self::append`], which appends to every sequence.
    ///
    /// ```
    /// use sdpa::{KvCache, KvShape};
    /// let mut cache = KvCache::new(3, KvShape { kv_heads: 1, head_dim: 8, value_dim: 8 })?;
    /// cache.remove_sequence(1)?;
    /// assert!(cache.clear(1).is_err());
    /// assert_eq!([cache.add_sequence(), cache.add_sequence()], [1, 3]);
    /// # Ok::<(), sdpa::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Sequence`] if there is no such sequence, [`Error::Removed`] if it was removed before.
    pub fn remove_sequence(&mut self, sequence: usize) -> Result<(), Error> {
        self.clear(sequence)?;
        self.removed.insert(sequence);
        Ok(())
    }

    /// Gives back memory that holds no key: what [`Self::truncate`], [`Self::clear`] and [`Self::remove_sequence`] kept for
    /// later tokens, what appending computes in, and room for keys to come in sequences of fewer than 129. Blocks that are
    /// shared stay as they are. Later appends allocate anew.
    ///
    /// ```
    /// use sdpa::{KvCache, KvShape, View};
    /// let mut cache = KvCache::new(1, KvShape { kv_heads: 1, head_dim: 8, value_dim: 8 })?;
    /// let rows = [0.5; 1000 * 8];
    /// let rows = View::bhld(&rows, [1, 1, 1000, 8])?;
    /// cache.append(rows, rows)?;
    /// cache.truncate(0, 16)?;
    /// cache.shrink();
    /// assert_eq!(cache.bytes(), 16 * (8 + 16) * 4); // sixteen keys of 8, and values of 8 filled up to 16
    /// # Ok::<(), sdpa::Error>(())
    /// ```
    pub fn shrink(&mut self) {
        self.cache.shrink();
        self.sorted = Vec::new();
    }

    /// Adds an empty sequence and returns its index: the lowest of the removed sequences', otherwise one more than the last.
    pub fn add_sequence(&mut self) -> usize {
        self.removed.pop_first().unwrap_or_else(|| self.cache.add_sequence())
    }
}

/// Refuses accepted tokens that do not increase, or that a sequence of `len` tokens does not have behind `from`.
pub(crate) fn check_accepted(sequence: usize, len: usize, from: usize, accepted: &[usize]) -> Result<(), Error> {
    let Some(behind) = len.checked_sub(from) else {
        let bound = Bound::AtMost;
        return Err(Error::Length { argument: "from", sequence, got: from, bound, limit: len });
    };
    at_most("accepted", "length", accepted.len(), behind, "the tokens that the sequence has behind `from`")?;
    let mut least = 0;
    for (index, &got) in accepted.iter().enumerate() {
        let (bound, limit, of) = match got < least {
            true => (Bound::AtLeast, least, "one more than the entry before it"),
            false => (Bound::AtMost, behind - 1, "the last token of the sequence, counted from `from`"),
        };
        if got < least || got > limit {
            return Err(Error::Entry { argument: "accepted", index, got, bound, limit, of });
        }
        least = got + 1;
    }
    Ok(())
}
