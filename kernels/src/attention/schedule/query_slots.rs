//! Queries that a worker keeps from unit to unit of split-KV, in the form that the keys need: the blocks of a head meet the same
//! ones.

use crate::attention::scratch::{QueryMemory, Regions};
use crate::simd::LANES;
use core::ops::Range;

/// Record of the queries in a worker's memory for queries: those of some entries (see `split_sequences.rs`), each head's in a
/// separate slot, since units are often a block of every head, then the next block.
pub(crate) struct QuerySlots {
    entries: Range<usize>,
    /// Bit `h` is set if the slot of head `h` is filled.
    filled: u64,
}

/// Number of slots, one for each key/value head, the number of floats of each, and the slot that is wanted.
#[derive(Clone, Copy)]
pub(crate) struct Slot {
    pub(crate) heads: usize,
    pub(crate) floats: usize,
    pub(crate) head: usize,
}

impl QuerySlots {
    /// No queries.
    pub(crate) const NONE: Self = Self { entries: 0..0, filled: 0 };

    /// Leaves of the regions' memory for queries the slot of a head for the queries of some entries, and says if it is filled. If
    /// it is not, the caller fills it. Leaves all the memory, and keeps nothing of it, if it has no room for a slot of each head.
    pub(crate) fn choose_slot(&mut self, entries: Range<usize>, slot: Slot, regions: &mut Regions<'_>) {
        let (memory, state) = self.take(entries, slot, core::mem::take(&mut regions.queries));
        (regions.queries, regions.query_memory) = (memory, state);
    }

    /// Returns the slot and what it holds.
    fn take<'r>(
        &mut self,
        entries: Range<usize>,
        Slot { heads, floats, head }: Slot,
        memory: &'r mut [f32],
    ) -> (&'r mut [f32], QueryMemory) {
        let floats = floats.next_multiple_of(LANES);
        if self.entries != entries {
            *self = Self { entries, filled: 0 };
        }
        if heads > u64::BITS as usize || heads * floats > memory.len() {
            self.filled = 0;
            return (memory, QueryMemory::Free);
        }
        let bit = 1 << head;
        let state = if self.filled & bit == 0 { QueryMemory::Free } else { QueryMemory::Filled };
        self.filled |= bit;
        (&mut memory[head * floats..][..floats], state)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slot_is_filled_until_other_places_come() {
        let (mut slots, mut memory) = (QuerySlots::NONE, [0.0; 100]);
        let mut take = |heads, floats, head, entries| {
            let (slot, state) = slots.take(entries, Slot { heads, floats, head }, &mut memory);
            slot[0] = head as f32 + 1.0;
            (slot.len(), state == QueryMemory::Filled)
        };
        // Three slots of two vectors.
        for filled in [false, true] {
            for head in [0, 2, 1] {
                assert_eq!(take(3, 20, head, 5..6), (32, filled), "head {head}");
            }
        }
        assert_eq!([take(3, 20, 2, 6..7), take(3, 20, 2, 6..7)], [(32, false), (32, true)]);
        assert_eq!([take(3, 20, 1, 5..6), take(3, 20, 2, 5..6)], [(32, false); 2], "forgotten");
        // No room for seven slots, or for the second of two.
        assert_eq!([take(7, 16, 1, 5..6), take(7, 16, 1, 5..6)], [(100, false); 2]);
        assert_eq!([take(2, 60, 1, 5..6), take(2, 60, 1, 5..6)], [(100, false); 2]);
        assert_eq!(take(3, 20, 1, 5..6), (32, false), "overwritten");
        // More heads than bits, and no queries.
        assert_eq!([take(65, 0, 64, 5..6), take(65, 0, 64, 5..6)], [(100, false); 2]);
        let [first, second] = [0, 1].map(|head| memory[head * 32]);
        assert_eq!([first, second], [65.0, 2.0]);
    }
}
