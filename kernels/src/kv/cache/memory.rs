//! Memory of a cache's sequences: evicted, allocated, copied.

use super::blocks::{Packed, is_shared};
use super::spare::{Counts, SpareBlocks, rows_for, size_for};
use super::{Cache, NewTokens, Sliding};
use crate::simd::aligned::AlignedBuf;
use crate::tensor::rows::KEY_BLOCK;
use core::ops::Range;
use std::sync::Arc;

impl Cache {
    /// Returns the number of bytes held, shared blocks counted once, spare ones included.
    pub fn bytes(&self) -> usize {
        let blocks = self.blocks.iter().flat_map(|blocks| blocks.held()).chain(self.spare.iter());
        let mut held: Vec<_> = blocks.map(|block| (Arc::as_ptr(block), block.rows)).collect();
        held.sort_unstable();
        held.dedup();
        let blocks = held.into_iter().map(|(_, rows)| self.store.sizes.with_rows(rows).floats() * size_of::<f32>());
        let mut exact: Vec<_> = self.exact.iter().flatten().map(|rows| (Arc::as_ptr(rows), rows.bytes())).collect();
        exact.sort_unstable();
        exact.dedup();
        blocks.chain(exact.into_iter().map(|(_, bytes)| bytes)).sum::<usize>() + self.spare.exact_bytes()
    }

    /// Gives back the memory that no key is in: spare blocks, scratch, and room behind the keys of short sequences.
    pub fn shrink(&mut self) {
        self.spare = SpareBlocks::default();
        if let Some(int8) = &mut self.store.int8 {
            (int8.row, int8.bytes) = (Vec::new(), Vec::new());
        }
        for (blocks, &len) in self.blocks.iter_mut().zip(&self.lens) {
            let rows = Self::rows_up_to(0, len);
            if let Some(block) = blocks.get_mut(0).filter(|block| block.rows > rows && !is_shared(block)) {
                // Without memory for a copy, the block stays as it is.
                if let Some(mut copy) = self.store.sizes.try_block(rows) {
                    self.store.sizes.copy_keys(block, &mut copy);
                    *block = Arc::new(copy);
                }
            }
            blocks.shrink();
        }
    }

    /// Returns the number of bytes that a sequence of `len` tokens holds which came one by one, if it shares no block;
    /// `usize::MAX` if that overflows.
    pub fn bytes_for(&self, len: usize) -> usize {
        let sizes = self.store.sizes;
        let bytes = |rows| sizes.with_rows(rows).floats() * size_of::<f32>();
        // The last token evicted what it did not see itself.
        let evicted = self.evictable_at(len.saturating_sub(1));
        let (blocks, first) = (len.div_ceil(KEY_BLOCK) - evicted.len(), Self::rows_up_to(0, len));
        if blocks == 0 {
            return 0;
        }
        let has_first = evicted.is_empty() || evicted.start > 0;
        let exact = if has_first && sizes.exact > 0 { AlignedBuf::bytes_for(sizes.exact_floats()) } else { 0 };
        let first = if has_first { bytes(first) } else { bytes(KEY_BLOCK) };
        bytes(KEY_BLOCK).saturating_mul(blocks - 1).saturating_add(first + exact)
    }

    /// Returns the blocks of a sequence of `len` tokens, evicted ones included, that no later row will see.
    fn evictable_at(&self, len: usize) -> Range<usize> {
        let Some(Sliding { last, first, rollback }) = self.sliding else { return 0..0 };
        // The next row is its own last key, which is not in the cache yet.
        let from = first.div_ceil(KEY_BLOCK);
        let to = len.saturating_add(1).saturating_sub(last.saturating_add(rollback)) / KEY_BLOCK;
        from..to.min(len.div_ceil(KEY_BLOCK)).max(from)
    }

    /// Returns the blocks of a sequence, evicted ones included, that no later row will see.
    fn evictable(&self, sequence: usize) -> Range<usize> {
        self.evictable_at(self.lens[sequence])
    }

    /// Evicts the keys that no later row will see.
    pub(super) fn evict(&mut self, sequence: usize) {
        let evictable = self.evictable(sequence);
        if evictable.start == 0 && !evictable.is_empty() {
            self.spare_exact(sequence);
        }
        self.blocks[sequence].evict(evictable).for_each(|block| self.spare.push(block));
    }

    /// Returns the number of keys that a block of a sequence must have room for, once the sequence has keys up to
    /// `end`. Only the first block may be smaller than a key block.
    pub(super) fn rows_up_to(block: usize, end: usize) -> usize {
        if block == 0 { rows_for(end.min(KEY_BLOCK)) } else { KEY_BLOCK }
    }

    /// Allocates the memory that appending tokens to several sequences lacks; each sequence occurs at most once. `None`
    /// if there is not enough memory.
    pub fn try_allocate(&mut self, tokens: impl Iterator<Item = NewTokens>) -> Option<SpareBlocks> {
        let (mut needed, mut freed, mut exact) = (Counts::default(), Counts::default(), 0);
        for NewTokens { sequence, rows, .. } in tokens.filter(|tokens| !tokens.rows.is_empty()) {
            let (len, there) = (self.lens[sequence], &self.blocks[sequence]);
            let end = len.checked_add(rows.len())?;
            let first = len / KEY_BLOCK;
            exact += usize::from(len < self.store.sizes.exact && self.lacks_exact(sequence));
            // The block that is written to first may be there; those behind it are new.
            let rows = Self::rows_up_to(first, end);
            if !there.get(first).is_some_and(|block| block.rows >= rows && !is_shared(block)) {
                needed[size_for(rows)] += 1;
            }
            let behind = &mut needed[size_for(KEY_BLOCK)];
            *behind = behind.saturating_add(end.div_ceil(KEY_BLOCK) - first - 1);
            let evicted = there.held_in(self.evictable(sequence)).iter();
            evicted.filter(|block| !is_shared(block)).for_each(|block| freed[size_for(block.rows)] += 1);
        }
        self.spare.try_allocate(self.store.sizes, needed, freed, exact)
    }

    /// Returns a block to write to, which exists, has room for `rows` keys and is not shared.
    pub(super) fn block_mut(&mut self, sequence: usize, block: usize, rows: usize) -> &mut Packed {
        let (sizes, spare, blocks) = (self.store.sizes, &mut self.spare, &mut self.blocks[sequence]);
        let mut fresh =
            || spare.pop(rows).unwrap_or_else(|| Arc::new(sizes.try_block(rows).expect("memory for a block")));
        if block == blocks.len() {
            blocks.push(fresh());
        }
        let block = blocks.get_mut(block).expect("keys are appended behind the last one, which is never evicted");
        if block.rows < rows || is_shared(block) {
            let mut copy = fresh();
            sizes.copy_keys(block, Arc::get_mut(&mut copy).expect("a spare block has one owner"));
            *block = copy;
        }
        Arc::get_mut(block).expect("the block has one owner")
    }
}
