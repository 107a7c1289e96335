//! States of linear attention of many sequences, with those after their last tokens.
//!
//! Each head of a sequence has a ring of slots, one state each: the first slot is the current state, the last ones are those
//! before it. A token reads the first slot and writes the next one; then the ring is turned. Going back turns it the other way.
//! Forks share slots, since no call writes the slot that it begins with; one that it writes is replaced first if it is shared.

#[cfg(feature = "safetensors")]
mod file;

use super::LinearState;
use super::state::StateShape;
use crate::error::{self, LONGEST_DIM, at_least, at_most, same, zeros};
use sdpa::Error;
use std::collections::HashSet;
use std::sync::Arc;

/// State of one head after some token, `[head_dim, columns]`; empty until it is reserved.
pub(super) type Slot = Arc<Vec<f32>>;

/// States of one layer of linear attention for many sequences, each with its own number of tokens, for decoding
/// ([`LinearAttention::decode`](super::LinearAttention::decode)): what a [`KvCache`](sdpa::KvCache) is for attention. A
/// [`HybridCaches`](crate::HybridCaches) changes those of all layers together.
///
/// A state cannot be computed backwards. A cache with room for `n` tokens keeps the states after each of the last `n`, and the one
/// before the last call: `n` tokens can be taken back one by one, and the last call as a whole, however long
/// ([`Self::truncate`]). A rollback chooses another state; it copies and computes nothing. The tokens' keys and values would take
/// less memory than states, but a rollback would then update an older state, token by token.
///
/// Memory: a state has `kv_heads · head_dim · value_dim` floats (`value_dim + 1` with a normaliser). A sequence holds at most `n +
/// 2`, allocated as tokens come; 32 heads of 128 by 128 take 2 MiB a state, so 10 MiB with room for three drafts. Forks share
/// states until they write over them, and so do sequences without tokens.
///
/// ```
/// use sdpa_layers::{LinearState, StateCache};
/// let state = LinearState::new([1, 32, 128, 128])?; // with which each sequence begins
/// let mut cache = StateCache::new(16, &state, 3)?; // sixteen sequences, room for three drafts
/// cache.remove_sequence(5)?;
/// assert_eq!((cache.add_sequence(), cache.len(5)?, cache.bytes()), (5, 0, 2 << 20));
/// # Ok::<(), sdpa::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct StateCache {
    /// Shape of the states of a sequence.
    pub(super) shape: StateShape,
    /// Sequence without tokens.
    empty: Kept,
    /// `None` for removed ones.
    sequences: Vec<Option<Kept>>,
}

/// States of one sequence.
#[derive(Debug, Clone)]
pub(super) struct Kept {
    /// `[kv_heads, slots]`; there are two slots more than tokens that can be taken back one by one.
    rings: Vec<Slot>,
    slots: usize,
    /// Number of tokens.
    len: usize,
    /// Number of slots before the current one, at the end of the ring, that hold the states of one token less each.
    back: usize,
    /// Number of tokens of the state in the slot before these, if it is the one before a long call.
    start: Option<usize>,
}

impl StateCache {
    /// Creates states for `sequences` sequences without tokens, each `initial`: `[1, kv_heads, head_dim, value_dim]`, zeros for most
    /// models. The last `room` tokens of each can be taken back one by one: of speculative decoding, the largest number of drafts.
    ///
    /// # Errors
    /// [`Error::Mismatch`] for a batch other than 1, [`Error::Range`] for a room beyond any length, [`Error::Memory`].
    pub fn new(sequences: usize, initial: &LinearState, room: usize) -> Result<Self, Error> {
        same("initial", "batch", initial.shape.sizes[0], 1, "a sequence")?;
        LONGEST_DIM.check("room", "number of tokens", room)?;
        let mut empty = Kept { rings: Vec::new(), slots: room + 2, len: 0, back: 0, start: None };
        let heads = initial.shape.sizes[1];
        empty.rings = error::room("states", heads.saturating_mul(empty.slots))?;
        for head in initial.data.chunks_exact((initial.data.len() / heads.max(1)).max(1)) {
            let mut own = zeros("states", head.len())?;
            own.copy_from_slice(head);
            empty.rings.push(Slot::new(own));
            empty.rings.resize(empty.rings.len() + room + 1, Slot::default());
        }
        let mut all = error::room("states", sequences)?;
        all.resize(sequences, Some(empty.clone()));
        Ok(Self { shape: initial.shape, empty, sequences: all })
    }

    /// Number of sequences, removed ones included.
    pub fn sequences(&self) -> usize {
        self.sequences.len()
    }

    /// Returns true if there is such a sequence, and it was not removed.
    pub fn has_sequence(&self, sequence: usize) -> bool {
        self.sequences.get(sequence).is_some_and(Option::is_some)
    }

    /// Number of tokens of a sequence.
    ///
    /// # Errors
    /// [`Error::Sequence`] if there is no such sequence, [`Error::Removed`] if it was removed.
    pub fn len(&self, sequence: usize) -> Result<usize, Error> {
        Ok(self.kept("sequence", sequence)?.len)
    }

    /// Bytes held; states that sequences share are counted once.
    pub fn bytes(&self) -> usize {
        let all = self.sequences.iter().flatten().chain([&self.empty]);
        let slots: HashSet<_> = all.flat_map(|kept| &kept.rings).map(|slot| slot.as_ptr_range()).collect();
        slots.into_iter().map(|slot| slot.end as usize - slot.start as usize).sum()
    }

    /// Returns a copy of the state of a sequence, `[1, kv_heads, head_dim, value_dim]`.
    ///
    /// # Errors
    /// [`Error::Sequence`] if there is no such sequence, [`Error::Removed`] if it was removed; [`Error::Memory`].
    pub fn state(&self, sequence: usize) -> Result<LinearState, Error> {
        let kept = self.kept("sequence", sequence)?;
        let heads = kept.rings.iter().step_by(kept.slots);
        let mut data = error::room("states", heads.clone().map(|slot| slot.len()).sum())?;
        heads.for_each(|slot| data.extend_from_slice(slot));
        Ok(LinearState { data, shape: self.shape })
    }

    /// Removes the tokens of a sequence from position `len` on: a rollback, in O(kv_heads · room), which moves no state. The state has
    /// the bits that it had after `len` tokens.
    ///
    /// # Errors
    /// As [`Self::check_truncate`]; the cache is then unchanged.
    pub fn truncate(&mut self, sequence: usize, len: usize) -> Result<(), Error> {
        self.check_truncate(sequence, len)?;
        let kept = self.sequences[sequence].as_mut().expect("checked");
        match kept.slots_back(len) {
            Some(slots) => {
                kept.turn(kept.slots - slots);
                (kept.back, kept.len) = (kept.back.saturating_sub(slots), len);
            }
            None => *kept = self.empty.clone(),
        }
        Ok(())
    }

    /// Returns the error that [`Self::truncate`] would give.
    ///
    /// # Errors
    /// [`Error::Sequence`] if there is no such sequence, [`Error::Removed`] if it was removed; [`Error::Range`] if it is shorter
    /// than `len`, or if its state after `len` tokens is not kept. 0 and the length before the last call are always possible.
    pub fn check_truncate(&self, sequence: usize, len: usize) -> Result<(), Error> {
        let kept = self.kept("sequence", sequence)?;
        at_most(kept.len, "those of the sequence").check("length", "number of tokens", len)?;
        let possible = len == 0 || kept.slots_back(len).is_some();
        let of = "as earlier states of the sequence are not kept (the room of StateCache::new)";
        let first = if possible { len } else { kept.len - kept.back };
        at_least(first, of).check("length", "number of tokens", len)
    }

    /// Makes sequence `to` a copy of `from`, which can go back as far. The two share each state until one of them writes over it.
    ///
    /// # Errors
    /// [`Error::Sequence`] if either sequence does not exist, [`Error::Removed`] if it was removed.
    pub fn fork(&mut self, from: usize, to: usize) -> Result<(), Error> {
        let copy = self.kept("from", from)?.clone();
        self.kept("to", to)?;
        self.sequences[to] = Some(copy);
        Ok(())
    }

    /// Removes a sequence and gives back its memory. [`Self::add_sequence`] gives out its index again, the lowest removed index
    /// first. Until then every call that names it is refused.
    ///
    /// # Errors
    /// [`Error::Sequence`] if there is no such sequence, [`Error::Removed`] if it was removed before.
    pub fn remove_sequence(&mut self, sequence: usize) -> Result<(), Error> {
        self.kept("sequence", sequence)?;
        self.sequences[sequence] = None;
        Ok(())
    }

    /// Adds a sequence without tokens and returns its index: the lowest of the removed sequences', otherwise one more than the last.
    pub fn add_sequence(&mut self) -> usize {
        let index = self.sequences.iter().position(Option::is_none).unwrap_or(self.sequences.len());
        self.sequences.resize(self.sequences.len().max(index + 1), None);
        self.sequences[index] = Some(self.empty.clone());
        index
    }

    /// Returns the states of the named sequences, in this order.
    pub(super) fn choose(&mut self, names: &[usize]) -> Result<Vec<&mut Kept>, Error> {
        names.iter().try_for_each(|&name| self.kept("sequences", name).map(drop))?;
        let mut all: Vec<_> = self.sequences.iter_mut().map(Option::as_mut).collect();
        let twice = |sequence| Error::Repeated { argument: "sequences", sequence };
        names.iter().map(|&name| all[name].take().ok_or(twice(name))).collect()
    }

    /// Returns the states of a sequence, if it is there.
    fn kept(&self, argument: &'static str, sequence: usize) -> Result<&Kept, Error> {
        let kept = self.sequences.get(sequence);
        let kept = kept.ok_or(Error::Sequence { argument, got: sequence, sequences: self.sequences() })?;
        kept.as_ref().ok_or(Error::Removed { argument, sequence })
    }
}

impl Kept {
    /// Returns how many slots before the current one the state after `len` tokens is, if it is kept.
    fn slots_back(&self, len: usize) -> Option<usize> {
        let gone = self.len.checked_sub(len)?;
        if gone <= self.back { Some(gone) } else { (self.start == Some(len)).then_some(self.back + 1) }
    }

    /// Makes the slot that is `slots` behind the current one the current one.
    fn turn(&mut self, slots: usize) {
        self.rings().for_each(|ring| ring.rotate_left(slots));
    }

    /// Iterates over the rings of the heads.
    pub(super) fn rings(&mut self) -> impl Iterator<Item = &mut [Slot]> + Send {
        self.rings.chunks_exact_mut(self.slots)
    }

    /// Forgets the states in the slots that a call of `tokens` tokens writes, and makes these slots the sequence's own.
    pub(super) fn reserve(&mut self, tokens: usize) -> Result<(), Error> {
        let most = self.slots - 1;
        let written = tokens.min(most);
        self.start = self.start.filter(|_| self.back + written < most);
        self.back = self.back.min(most - written);
        for ring in self.rings() {
            let len = ring[0].len();
            for slot in &mut ring[1..=written] {
                if Slot::get_mut(slot).is_none_or(|own| own.is_empty()) {
                    *slot = Slot::new(zeros("states", len)?);
                }
            }
        }
        Ok(())
    }

    /// Counts tokens whose states are written.
    pub(super) fn advance(&mut self, tokens: usize) {
        let most = self.slots - 1;
        self.turn(tokens.min(most));
        (self.back, self.start) =
            if tokens > most { (most - 1, Some(self.len)) } else { (self.back + tokens, self.start) };
        self.len = self.len.saturating_add(tokens);
    }
}
