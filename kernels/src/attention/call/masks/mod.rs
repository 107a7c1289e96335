//! Stock mask functions: documents in one sequence, a prefix that all rows see, trees of drafted tokens.
//!
//! All use the positions of rows, so a prompt, its chunks and single rows give the same. Their classes are exact:
//! `Mixed` only if a block has both visible and hidden pairs.

mod documents;
mod tree;

pub use documents::Documents;
pub use tree::Tree;

use crate::attention::call::mods::{BlockClass, BlockPosition, CallFacts, MaskError, MaskMod, Position};

/// Mask of a prefix language model: the first keys are visible to every row, the others to rows at their position or
/// later.
///
/// `PrefixLm::new(0)` is the causal mask. It uses [`Position::position`]: name the call's alignment if rows and keys
/// differ in number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PrefixLm {
    prefix: usize,
}

impl PrefixLm {
    /// Creates the mask for a prefix of `prefix` keys.
    pub const fn new(prefix: usize) -> Self {
        Self { prefix }
    }

    /// Returns one past the last key that a row at `position` sees.
    #[inline(always)]
    fn end(self, position: isize) -> usize {
        usize::try_from(position).map_or(self.prefix, |position| self.prefix.max(position.saturating_add(1)))
    }
}

impl MaskMod for PrefixLm {
    #[inline(always)]
    fn keep(&self, at: Position) -> bool {
        at.key < self.end(at.position)
    }

    fn class(&self, block: BlockPosition) -> BlockClass {
        let positions = block.positions();
        if block.keys.end <= self.end(*positions.start()) {
            BlockClass::All
        } else if block.keys.start >= self.end(*positions.end()) {
            BlockClass::None
        } else {
            BlockClass::Mixed
        }
    }
}

/// One mask for each sequence of a batch. The masks have one type: with `Option`, sequences without a mask have `None`; with
/// `Box<dyn MaskMod>`, each has any.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PerSequence<M> {
    masks: Vec<M>,
}

impl<M> PerSequence<M> {
    /// Creates the mask of a batch: `masks[b]` is the mask of sequence `b` of the call. A call with another number of
    /// sequences is refused. [`MaskMod::keep`] called directly panics if there is no such mask.
    pub fn new(masks: impl Into<Vec<M>>) -> Self {
        Self { masks: masks.into() }
    }

    #[inline(always)]
    fn of(&self, sequence: usize) -> &M {
        let masks = self.masks.len();
        self.masks.get(sequence).unwrap_or_else(|| panic!("sequence {sequence} of a batch with masks for {masks}"))
    }
}

impl<M: MaskMod> MaskMod for PerSequence<M> {
    #[inline(always)]
    fn keep(&self, at: Position) -> bool {
        self.of(at.batch).keep(at)
    }

    fn class(&self, block: BlockPosition) -> BlockClass {
        self.of(block.batch).class(block)
    }

    fn next_kept(&self, block: BlockPosition) -> Option<usize> {
        self.of(block.batch).next_kept(block)
    }

    fn fits(&self, call: &CallFacts) -> Result<(), MaskError> {
        let masks = self.masks.len();
        if masks != call.sequences {
            return Err(MaskError::Sequences { masks, sequences: call.sequences });
        }
        self.masks.iter().try_for_each(|mask| mask.fits(call))
    }

    fn fits_rows(&self, rows: &BlockPosition) -> Result<(), MaskError> {
        self.of(rows.batch).fits_rows(rows)
    }
}
