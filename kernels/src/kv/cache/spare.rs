//! Blocks that no sequence uses, by size.

use super::blocks::{Block, is_shared};
use super::layout::Sizes;
use crate::simd::aligned::{AlignedBuf, has_memory};
use crate::tensor::rows::KEY_BLOCK;
use std::sync::Arc;

/// Sizes of blocks, in keys. The first block of a sequence grows from one size to the next.
const ROWS: [usize; 5] = [16, 32, 64, 128, KEY_BLOCK];

/// Number of blocks of each size.
pub(super) type Counts = [usize; ROWS.len()];

/// Smallest number of floats for which the cache checks that all can be allocated together.
const MUCH: usize = 64 << 20;

/// Returns the index of the smallest size that has room for `rows` keys.
pub(super) fn size_for(rows: usize) -> usize {
    ROWS.iter().position(|&most| rows <= most).expect("no block has more keys")
}

/// Returns the size of the smallest block that has room for `rows` keys.
pub(super) fn rows_for(rows: usize) -> usize {
    ROWS[size_for(rows)]
}

/// Blocks that no sequence uses, by size.
#[derive(Debug, Default)]
pub struct SpareBlocks {
    blocks: [Vec<Block>; ROWS.len()],
    /// Exact rows of sequences.
    exact: Vec<Arc<AlignedBuf>>,
}

impl SpareBlocks {
    /// Keeps a block for later, if it is not shared.
    pub(super) fn push(&mut self, block: Block) {
        if !is_shared(&block) {
            self.blocks[size_for(block.rows)].push(block);
        }
    }

    /// Takes the smallest block that has room for `rows` keys.
    pub(super) fn pop(&mut self, rows: usize) -> Option<Block> {
        self.blocks[size_for(rows)..].iter_mut().find_map(Vec::pop)
    }

    /// Takes all blocks of others.
    pub(super) fn append(&mut self, mut others: Self) {
        for (blocks, others) in self.blocks.iter_mut().zip(&mut others.blocks) {
            // Without a longer list, where this one is empty.
            if blocks.is_empty() && !others.is_empty() {
                core::mem::swap(blocks, others);
            }
            blocks.append(others);
        }
        self.exact.append(&mut others.exact);
    }

    /// Takes exact rows.
    pub(super) fn pop_exact(&mut self) -> Option<Arc<AlignedBuf>> {
        self.exact.pop()
    }

    /// Keeps exact rows for later, if they are not shared.
    pub(super) fn push_exact(&mut self, rows: Arc<AlignedBuf>) {
        if !is_shared(&rows) {
            self.exact.push(rows);
        }
    }

    /// Number of bytes of spare exact rows.
    pub(super) fn exact_bytes(&self) -> usize {
        self.exact.iter().map(|rows| rows.bytes()).sum()
    }

    /// Iterates over all blocks.
    pub(super) fn iter(&self) -> impl Iterator<Item = &Block> {
        self.blocks.iter().flatten()
    }

    /// Frees all blocks.
    pub(super) fn clear(&mut self) {
        self.blocks.iter_mut().for_each(Vec::clear);
        self.exact.clear();
    }

    /// Allocates the needed blocks, and the exact rows of a number of sequences, that are missing even once `freed` blocks are freed.
    /// `None` if there is not enough memory.
    pub(super) fn try_allocate(&mut self, sizes: Sizes, needed: Counts, freed: Counts, exact: usize) -> Option<Self> {
        let mut there = freed;
        there.iter_mut().zip(&self.blocks).for_each(|(there, blocks)| *there += blocks.len());
        let (missing, mut new) = (missing(needed, there), Self::default());
        // Requested at once first: block by block, the system would grant more than it has.
        let each =
            missing.iter().zip(ROWS).map(|(&blocks, rows)| blocks.saturating_mul(sizes.with_rows(rows).floats()));
        let exact = exact.saturating_sub(self.exact.len());
        let all = each.fold(exact.saturating_mul(sizes.exact_floats()), usize::saturating_add);
        if all > MUCH && !has_memory(all) {
            return None;
        }
        for (size, blocks) in missing.into_iter().enumerate() {
            if blocks > 0 && self.blocks[size].is_empty() {
                // Room that is there already.
                new.blocks[size] = core::mem::take(&mut self.blocks[size]);
            }
            new.blocks[size].try_reserve_exact(blocks).ok()?;
            for _ in 0..blocks {
                new.blocks[size].push(Arc::new(sizes.try_block(ROWS[size])?));
            }
        }
        new.exact.try_reserve_exact(exact).ok()?;
        for _ in 0..exact {
            new.exact.push(Arc::new(AlignedBuf::try_new(sizes.exact_floats())?));
        }
        Some(new)
    }
}

/// Returns how many blocks of each size are missing; a larger block may replace a smaller one. Large sizes are served
/// first, so that small ones take only what is left.
fn missing(needed: Counts, mut there: Counts) -> Counts {
    let mut missing = needed;
    for size in (0..ROWS.len()).rev() {
        for there in &mut there[size..] {
            let taken = missing[size].min(*there);
            missing[size] -= taken;
            *there -= taken;
        }
    }
    missing
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn larger_blocks_stand_in_for_smaller_ones_only_where_they_are_left() {
        assert_eq!(missing([2, 0, 0, 0, 1], [0, 0, 0, 0, 1]), [2, 0, 0, 0, 0]);
        assert_eq!(missing([2, 0, 0, 0, 1], [1, 0, 1, 0, 1]), [0; 5]);
        assert_eq!(missing([0, 0, 3, 0, 2], [9, 9, 1, 1, 1]), [0, 0, 1, 0, 1]);
        assert_eq!([1, 16, 17, 129, 256].map(rows_for), [16, 16, 32, 256, 256]);
    }
}
