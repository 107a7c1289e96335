//! Blocks of a sequence: those that are held, and the gap that eviction left among them.

use crate::simd::aligned::AlignedBuf;
use core::ops::Range;
use std::sync::Arc;

/// Packed keys and values of a block.
#[derive(Debug)]
pub(super) struct Packed {
    /// Number of keys that the block has room for: a key block, or fewer in the first block of a short sequence.
    pub(super) rows: usize,
    pub(super) memory: AlignedBuf,
}

/// Block that sequences and caches may share.
pub(super) type Block = Arc<Packed>;

/// Returns true if another sequence or cache shares the block.
pub(super) fn is_shared<T>(block: &Arc<T>) -> bool {
    Arc::strong_count(block) > 1
}

/// Blocks of a sequence, in order. Evicted blocks take no memory, however many there are.
#[derive(Debug, Clone, Default)]
pub(super) struct Blocks {
    held: Vec<Block>,
    /// Blocks that were evicted; `0..0` if none were.
    gap: Range<usize>,
}

impl Blocks {
    /// Makes a list of the held blocks, with a gap in place of the evicted ones.
    pub(super) fn with_gap(held: Vec<Block>, gap: Range<usize>) -> Self {
        Self { held, gap }
    }

    /// Returns the number of blocks, evicted ones included.
    pub(super) fn len(&self) -> usize {
        self.held.len() + self.gap.len()
    }

    /// Returns the blocks that were evicted.
    pub(super) fn evicted(&self) -> Range<usize> {
        self.gap.clone()
    }

    /// Returns the blocks that are held.
    pub(super) fn held(&self) -> &[Block] {
        &self.held
    }

    /// Returns the index of a block among those that are held; `None` if it was evicted.
    fn index(&self, block: usize) -> Option<usize> {
        if block < self.gap.start { Some(block) } else { block.checked_sub(self.gap.end).map(|i| self.gap.start + i) }
    }

    /// Returns a block, if it exists and is held.
    pub(super) fn get(&self, block: usize) -> Option<&Block> {
        self.held.get(self.index(block)?)
    }

    /// Returns a block to replace or write to, if it exists and is held.
    pub(super) fn get_mut(&mut self, block: usize) -> Option<&mut Block> {
        let index = self.index(block)?;
        self.held.get_mut(index)
    }

    /// Returns two blocks that are held, if they differ.
    pub(super) fn get_two(&mut self, blocks: [usize; 2]) -> Option<[&mut Block; 2]> {
        let [a, b] = blocks.map(|block| self.index(block));
        self.held.get_disjoint_mut([a?, b?]).ok()
    }

    /// Adds a block after the last one.
    pub(super) fn push(&mut self, block: Block) {
        self.held.push(block);
    }

    /// Removes and returns all blocks but the first `len`.
    pub(super) fn truncate(&mut self, len: usize) -> impl Iterator<Item = Block> {
        self.gap.end = self.gap.end.min(len.max(self.gap.start));
        let kept = len.saturating_sub(self.gap.len());
        if self.gap.is_empty() {
            self.gap = 0..0;
        }
        self.held.drain(kept.min(self.held.len())..)
    }

    /// Gives back room for more blocks.
    pub(super) fn shrink(&mut self) {
        self.held.shrink_to_fit();
    }

    /// Makes these blocks shared copies of others.
    pub(super) fn share(&mut self, others: &Self) {
        self.held.clear();
        self.held.extend_from_slice(&others.held);
        self.gap = others.gap.clone();
    }

    /// Returns the held blocks of a range, which starts at the same block in every call.
    pub(super) fn held_in(&self, blocks: Range<usize>) -> &[Block] {
        &self.held[self.held_range(&blocks)]
    }

    /// Evicts a range of blocks, and returns those that were held. The range starts at the same block in every call.
    pub(super) fn evict(&mut self, blocks: Range<usize>) -> impl Iterator<Item = Block> {
        let held = self.held_range(&blocks);
        if !held.is_empty() {
            self.gap = blocks;
        }
        self.held.drain(held)
    }

    /// Returns the indices of the held blocks of a range.
    fn held_range(&self, blocks: &Range<usize>) -> Range<usize> {
        debug_assert!(self.gap.is_empty() || self.gap.start == blocks.start, "{:?} beside {blocks:?}", self.gap);
        let new = blocks.end.saturating_sub(blocks.start.max(self.gap.end));
        let start = if new > 0 { blocks.start } else { 0 };
        start..start + new
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Blocks by number, `None` where they were evicted.
    fn list(blocks: &Blocks, all: &[Block]) -> Vec<Option<usize>> {
        let number = |block: &Block| all.iter().position(|other| Arc::ptr_eq(block, other)).expect("one of them");
        (0..blocks.len()).map(|i| blocks.get(i).map(number)).collect()
    }

    #[test]
    fn gaps_are_where_blocks_were_evicted() {
        let all: Vec<Block> = (0..8).map(|_| Arc::new(Packed { rows: 0, memory: AlignedBuf::new() })).collect();
        for first in 0..4 {
            for end in 0..=8 {
                for more in end..=8 {
                    for len in 0..=8 {
                        let mut model: Vec<_> = (0..8).map(Some).collect();
                        let mut blocks = Blocks::default();
                        all.iter().for_each(|block| blocks.push(block.clone()));
                        for to in [end, more] {
                            let range = first.min(to)..to;
                            if range.is_empty() {
                                continue;
                            }
                            let held = blocks.held_in(range.clone()).len();
                            assert_eq!(held, model[range.clone()].iter().flatten().count());
                            assert_eq!(blocks.evict(range.clone()).count(), held);
                            model[range].fill(None);
                            assert_eq!(list(&blocks, &all), model);
                        }
                        let gone = model.drain(len..).flatten().count();
                        assert_eq!(blocks.truncate(len).count(), gone);
                        assert_eq!(list(&blocks, &all), model, "{first}, {end}, {more}, {len}");
                        let mut copy = Blocks::default();
                        copy.share(&blocks);
                        assert_eq!(list(&copy, &all), model);
                    }
                }
            }
        }
    }
}
