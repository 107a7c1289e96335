//! States of linear attention of many sequences, with those after their last tokens.
//!
//! Each head of a sequence has a ring of slots, one state each; a token reads the current slot and writes the next one. Going
//! back only moves the number of the current slot. Forks share slots, since no call writes the slot that it begins with; one
//! that it writes is replaced first if it is shared.

use super::LinearState;
use super::settings::Normaliser;
use super::state::StateShape;
use crate::error::{at_least, floats, room, same, zeros};
use sdpa::{Bound, Error, KvShape};
use std::collections::{BTreeSet, HashSet};
use std::sync::Arc;

/// State of one head after some token, `[head_dim, columns]`; empty until a call writes it.
pub(super) type Slot = Arc<Vec<f32>>;

/// Slots of one head, and the current one.
pub(super) struct Ring<'a> {
    pub(super) slots: &'a mut [Slot],
    pub(super) at: usize,
}

/// States of one layer of linear attention for a batch of sequences, each with its own number of tokens, for decoding: beside
/// the [`KvCache`](sdpa::KvCache)s of a hybrid model's other layers, with which a [`HybridCaches`](crate::HybridCaches) changes
/// it together.
///
/// [`LinearAttention::decode`](super::LinearAttention::decode) updates the states. The last `n` tokens of a sequence can be taken
/// back, one by one ([`Self::truncate`]), for `n` of [`Self::rollback_room`], and its last call as a whole, however long. For
/// this, whole states are kept: going back only chooses another one, and copies and computes nothing. To keep the tokens' keys
/// and values would take less memory, but a rollback would then update an older state with all tokens up to the one that it
/// goes to.
///
/// Memory: a state has `kv_heads · head_dim · value_dim` floats (`value_dim + 1` with a normaliser). A sequence holds at most `n +
/// 2` states, allocated as tokens come; 32 heads of 128 by 128 take 2 MiB each, so 10 MiB with room for three drafts. Forks
/// share states until one of them writes over its own.
///
/// ```
/// use sdpa::KvShape;
/// use sdpa_layers::StateCache;
/// let shape = KvShape { kv_heads: 32, head_dim: 128, value_dim: 128 };
/// let cache = StateCache::new(16, shape)?.rollback_room(3)?; // sixteen sequences
/// assert_eq!((cache.lens(), cache.bytes()), (&[0; 16][..], 0));
/// # Ok::<(), sdpa::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct StateCache {
    /// Of one sequence.
    pub(super) shape: StateShape,
    /// Slots of a ring: two more than the tokens that can be taken back one by one.
    pub(super) slots: usize,
    pub(super) lens: Vec<usize>,
    pub(super) kept: Vec<Kept>,
    pub(super) removed: BTreeSet<usize>,
}

/// States of one sequence.
#[derive(Debug, Clone, Default)]
pub(super) struct Kept {
    /// `[kv_heads, slots]`; empty before the first call.
    pub(super) rings: Vec<Slot>,
    /// Current slot.
    pub(super) at: usize,
    /// Number of slots before it that hold the states of one token less each.
    pub(super) back: usize,
    /// Number of tokens of the state in the slot before these, if that is the one before a long call.
    pub(super) start: Option<usize>,
}

impl StateCache {
    /// Creates states of zeros for `sequences` sequences. Only the last call can be taken back: see [`Self::rollback_room`].
    ///
    /// # Errors
    /// [`Error::Empty`] for a head_dim or value_dim of 0, [`Error::TooLarge`] or [`Error::Memory`].
    pub fn new(sequences: usize, shape: KvShape) -> Result<Self, Error> {
        let KvShape { kv_heads, head_dim, value_dim } = shape;
        // Of no heads, only to check the others.
        LinearState::new([1, 0, head_dim, value_dim])?;
        let shape = StateShape { sizes: [1, kv_heads, head_dim, value_dim], normaliser: Normaliser::None };
        let (mut lens, mut kept) = (room("states", sequences)?, room("states", sequences)?);
        lens.resize(sequences, 0);
        kept.resize(sequences, Kept::default());
        Self { shape, slots: 2, lens, kept, removed: BTreeSet::new() }.checked("states")
    }

    /// Sets the states to be those of [`Normaliser::KeySum`].
    ///
    /// # Errors
    /// [`Error::Needs`] unless the cache is empty; [`Error::TooLarge`].
    pub fn normalised(mut self) -> Result<Self, Error> {
        self.shape.normaliser = Normaliser::KeySum;
        self.checked("normalised")
    }

    /// Sets the number of tokens of each sequence that can be taken back one by one, counted from its last one, 0 by default: in
    /// speculative decoding the largest number of drafts.
    ///
    /// # Errors
    /// [`Error::Needs`] unless the cache is empty; [`Error::TooLarge`].
    pub fn rollback_room(mut self, tokens: usize) -> Result<Self, Error> {
        self.slots = tokens.saturating_add(2);
        self.checked("rollback_room")
    }

    fn checked(self, argument: &'static str) -> Result<Self, Error> {
        if self.lens.iter().any(|&len| len > 0) || self.kept.iter().any(|kept| !kept.rings.is_empty()) {
            return Err(Error::Needs { argument, needs: "an empty cache" });
        }
        let [_, heads, head_dim, value_dim] = self.shape.sizes;
        let columns = value_dim.saturating_add(self.shape.normaliser.columns());
        floats("states", [self.slots, heads.max(1), head_dim, columns])?;
        Ok(self)
    }

    /// Number of sequences, removed ones included.
    pub fn sequences(&self) -> usize {
        self.lens.len()
    }

    /// Returns true if there is such a sequence, and it was not removed.
    pub fn has_sequence(&self, sequence: usize) -> bool {
        sequence < self.sequences() && !self.removed.contains(&sequence)
    }

    /// Sizes of the keys and values of a token.
    pub fn shape(&self) -> KvShape {
        let [_, kv_heads, head_dim, value_dim] = self.shape.sizes;
        KvShape { kv_heads, head_dim, value_dim }
    }

    /// Number of tokens of each sequence. 0 for removed sequences.
    pub fn lens(&self) -> &[usize] {
        &self.lens
    }

    /// Bytes held; states that sequences share are counted once.
    pub fn bytes(&self) -> usize {
        let slots: HashSet<_> = self.kept.iter().flat_map(|kept| &kept.rings).map(|slot| slot.as_ptr_range()).collect();
        slots.into_iter().map(|slot| slot.end as usize - slot.start as usize).sum()
    }

    /// Returns a copy of the state of a sequence, `[1, kv_heads, head_dim, value_dim]`: to look at, or to save with its number of
    /// tokens for [`Self::set_state`].
    ///
    /// # Errors
    /// [`Error::Sequence`] if there is no such sequence, [`Error::Removed`] if it was removed; [`Error::Memory`].
    pub fn state(&self, sequence: usize) -> Result<LinearState, Error> {
        self.there("sequence", sequence)?;
        let (mut state, kept) = (LinearState::zeros(self.shape)?, &self.kept[sequence]);
        let heads = state.data.chunks_exact_mut(self.shape.head_floats());
        for (to, ring) in heads.zip(kept.rings.chunks_exact(self.slots)) {
            to[..ring[kept.at].len()].copy_from_slice(&ring[kept.at]);
        }
        Ok(state)
    }

    /// Gives a sequence a state, `[1, kv_heads, head_dim, value_dim]`, as that after `len` tokens. None of these can be taken back,
    /// but for all of them.
    ///
    /// # Errors
    /// [`Error::Sequence`] if there is no such sequence, [`Error::Removed`] if it was removed; [`Error::Mismatch`] for another
    /// shape; [`Error::Memory`]. The cache is then unchanged.
    pub fn set_state(&mut self, sequence: usize, len: usize, state: &LinearState) -> Result<(), Error> {
        self.there("sequence", sequence)?;
        for (i, what) in ["batch", "heads", "head_dim", "value_dim"].into_iter().enumerate() {
            same("state", what, state.shape.sizes[i], self.shape.sizes[i], "a sequence of the cache")?;
        }
        let [of_state, of_cache] = [state.shape, self.shape].map(|shape| shape.normaliser.columns());
        same("state", "number of sums of keys", of_state, of_cache, "the cache")?;
        let mut rings = self.empty_rings()?;
        for (ring, from) in rings.chunks_exact_mut(self.slots).zip(state.data.chunks_exact(self.shape.head_floats())) {
            let mut own = zeros("states", from.len())?;
            own.copy_from_slice(from);
            ring[0] = Arc::new(own);
        }
        (self.kept[sequence], self.lens[sequence]) = (Kept { rings, ..Kept::default() }, len);
        Ok(())
    }

    /// Removes the tokens of a sequence from position `len` on: a rollback, in O(1). The state has the bits that it had after
    /// `len` tokens.
    ///
    /// # Errors
    /// As [`Self::check_truncate`]; the cache is then unchanged.
    pub fn truncate(&mut self, sequence: usize, len: usize) -> Result<(), Error> {
        self.check_truncate(sequence, len)?;
        let (kept, gone) = (&mut self.kept[sequence], self.lens[sequence] - len);
        if gone <= kept.back {
            kept.at = (kept.at + self.slots - gone) % self.slots;
            kept.back -= gone;
        } else if kept.start == Some(len) {
            let at = (kept.at + self.slots - kept.back - 1) % self.slots;
            *kept = Kept { rings: core::mem::take(&mut kept.rings), at, back: 0, start: None };
        } else {
            *kept = Kept::default();
        }
        self.lens[sequence] = len;
        Ok(())
    }

    /// Returns the error that [`Self::truncate`] would give.
    ///
    /// # Errors
    /// [`Error::Sequence`] if there is no such sequence, [`Error::Removed`] if it was removed; [`Error::Length`] if it is shorter
    /// than `len`, [`Error::Range`] if its state after `len` tokens is not kept: see [`Self::rollback_room`]. 0 and the length
    /// before the last call are always possible.
    pub fn check_truncate(&self, sequence: usize, len: usize) -> Result<(), Error> {
        self.there("sequence", sequence)?;
        let had = self.lens[sequence];
        if len > had {
            return Err(Error::Length { argument: "length", sequence, got: len, bound: Bound::AtMost, limit: had });
        }
        let kept = &self.kept[sequence];
        if len == 0 || kept.start == Some(len) {
            return Ok(());
        }
        let of = "as earlier states of the sequence are not kept (StateCache::rollback_room keeps more)";
        at_least(had - kept.back, of).check("length", "number of tokens", len)
    }

    /// Removes all tokens of a sequence, and gives back the memory of its states.
    ///
    /// # Errors
    /// [`Error::Sequence`] if there is no such sequence, [`Error::Removed`] if it was removed.
    pub fn clear(&mut self, sequence: usize) -> Result<(), Error> {
        self.there("sequence", sequence)?;
        (self.kept[sequence], self.lens[sequence]) = (Kept::default(), 0);
        Ok(())
    }

    /// Makes sequence `to` a copy of `from`, which can go back as far. The two share each state until one of them writes over it.
    ///
    /// # Errors
    /// [`Error::Sequence`] if either sequence does not exist, [`Error::Removed`] if it was removed.
    pub fn fork(&mut self, from: usize, to: usize) -> Result<(), Error> {
        self.there("from", from)?;
        self.there("to", to)?;
        (self.kept[to], self.lens[to]) = (self.kept[from].clone(), self.lens[from]);
        Ok(())
    }

    /// Removes a sequence, and gives back the memory of its states. [`Self::add_sequence`] gives out its index again, the lowest
    /// removed index first. Until then every call that names it is refused.
    ///
    /// # Errors
    /// [`Error::Sequence`] if there is no such sequence, [`Error::Removed`] if it was removed before.
    pub fn remove_sequence(&mut self, sequence: usize) -> Result<(), Error> {
        self.clear(sequence)?;
        self.removed.insert(sequence);
        Ok(())
    }

    /// Adds an empty sequence and returns its index: the lowest of the removed sequences', otherwise one more than the last.
    pub fn add_sequence(&mut self) -> usize {
        self.removed.pop_first().unwrap_or_else(|| {
            self.lens.push(0);
            self.kept.push(Kept::default());
            self.lens.len() - 1
        })
    }

    /// Returns an error unless there is such a sequence.
    pub(super) fn there(&self, argument: &'static str, sequence: usize) -> Result<(), Error> {
        let (got, sequences) = (sequence, self.sequences());
        if got >= sequences {
            return Err(Error::Sequence { argument, got, sequences });
        }
        if self.removed.contains(&sequence) { Err(Error::Removed { argument, sequence }) } else { Ok(()) }
    }

    /// Returns slots for a sequence that has none, without memory of their own.
    pub(super) fn empty_rings(&self) -> Result<Vec<Slot>, Error> {
        let slots = self.slots * self.shape.sizes[1];
        let mut rings = room("states", slots)?;
        rings.resize(slots, Slot::default());
        Ok(rings)
    }
}
