//! Calls over the states of a cache: their sequences, and the slots that they write.

use super::state::StateShape;
use super::state_cache::{Kept, Ring, Slot, StateCache};
use crate::error::{same, zeros};
use sdpa::Error;
use std::sync::Arc;

impl StateCache {
    /// Returns the shape of the states of `batch` sequences.
    pub(super) fn shape_of(&self, batch: usize) -> StateShape {
        let [_, heads, head_dim, value_dim] = self.shape.sizes;
        StateShape { sizes: [batch, heads, head_dim, value_dim], ..self.shape }
    }

    /// Checks the sequences of a batch: those listed, or all.
    pub(super) fn check_sequences(&self, batch: usize, listed: Option<&[usize]>) -> Result<(), Error> {
        let Some(listed) = listed else {
            same("q", "batch", batch, self.sequences(), "the cache")?;
            let removed = self.removed.first();
            return removed.map_or(Ok(()), |&sequence| Err(Error::Removed { argument: "decoding", sequence }));
        };
        same("sequences", "length", listed.len(), batch, "the batch")?;
        listed.iter().try_for_each(|&sequence| self.there("sequences", sequence))?;
        let mut seen = vec![0u8; self.sequences()];
        for &sequence in listed {
            if core::mem::replace(&mut seen[sequence], 1) > 0 {
                return Err(Error::Repeated { argument: "sequences", sequence });
            }
        }
        Ok(())
    }

    /// Makes the slots that calls write their sequences' own, with memory; `calls` are sequences and their numbers of tokens.
    /// If that fails, all states are as they were.
    pub(super) fn reserve(&mut self, calls: impl Iterator<Item = (usize, usize)> + Clone) -> Result<(), Error> {
        let (slots, len) = (self.slots, self.shape.head_floats());
        let mut fresh = Vec::new();
        for (sequence, tokens) in calls.clone() {
            if self.kept[sequence].rings.is_empty() {
                self.kept[sequence].rings = self.empty_rings()?;
            }
            for _ in self.kept[sequence].without_memory([slots, len], tokens) {
                fresh.push(zeros("states", len)?);
            }
        }
        for (sequence, tokens) in calls {
            for slot in self.kept[sequence].without_memory([slots, len], tokens) {
                *slot = Arc::new(fresh.pop().expect("one for each"));
            }
        }
        Ok(())
    }

    /// Iterates over the rings of all heads of the calls' sequences, which are named once each.
    pub(super) fn rings(
        &mut self,
        calls: impl Iterator<Item = (usize, usize)> + Send,
    ) -> impl Iterator<Item = Ring<'_>> + Send {
        let slots = self.slots;
        let mut kept: Vec<Option<&mut Kept>> = self.kept.iter_mut().map(Some).collect();
        calls.flat_map(move |(sequence, _)| {
            let Kept { rings, at, .. } = kept[sequence].take().expect("named once");
            rings.chunks_exact_mut(slots).map(|slots| Ring { slots, at: *at })
        })
    }

    /// Counts the tokens of calls whose slots are written.
    pub(super) fn advance(&mut self, calls: impl Iterator<Item = (usize, usize)>) {
        for (sequence, tokens) in calls {
            let (kept, len, most) = (&mut self.kept[sequence], &mut self.lens[sequence], self.slots - 1);
            kept.at = (kept.at + tokens.min(most)) % self.slots;
            (kept.back, kept.start) = if tokens > most {
                (most - 1, Some(*len))
            } else {
                let back = kept.back.saturating_add(tokens);
                (back.min(most), kept.start.filter(|_| back < most))
            };
            *len = len.saturating_add(tokens);
        }
    }
}

impl Kept {
    /// Iterates over the slots that a call of `tokens` tokens writes, and those that hold its first state of zeros, if they have no
    /// memory of their own, in rings of `slots` slots of `len` floats.
    fn without_memory(&mut self, [slots, len]: [usize; 2], tokens: usize) -> impl Iterator<Item = &mut Slot> {
        let at = self.at;
        let places = self.rings.iter_mut().enumerate().map(move |(i, slot)| ((i % slots + slots - at) % slots, slot));
        let used =
            places.filter(move |(place, slot)| tokens > 0 && *place <= tokens && (*place > 0 || slot.is_empty()));
        used.map(|(_, slot)| slot).filter_map(move |slot| match Arc::get_mut(slot) {
            Some(own) if own.len() == len => None,
            _ => Some(slot),
        })
    }
}
