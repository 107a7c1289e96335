//! Masks made of other masks.

use crate::attention::call::mods::{BlockClass, BlockPosition, CallFacts, MaskError, MaskMod, Position};

/// Mask that keeps what both masks keep: [`MaskMod::and`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct And<A, B>(pub(super) A, pub(super) B);

/// Mask that keeps what at least one of the masks keeps: [`MaskMod::or`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Or<A, B>(pub(super) A, pub(super) B);

/// Mask that keeps what another hides: [`MaskMod::not`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Not<A>(pub(super) A);

impl<A: MaskMod, B: MaskMod> MaskMod for And<A, B> {
    #[inline(always)]
    fn keep(&self, at: Position) -> bool {
        self.0.keep(at) && self.1.keep(at)
    }

    fn fits(&self, call: &CallFacts) -> Result<(), MaskError> {
        self.0.fits(call)?;
        self.1.fits(call)
    }

    fn fits_rows(&self, rows: &BlockPosition) -> Result<(), MaskError> {
        self.0.fits_rows(rows)?;
        self.1.fits_rows(rows)
    }

    #[inline]
    fn class(&self, block: BlockPosition) -> BlockClass {
        match self.0.class(block.clone()) {
            BlockClass::All => self.1.class(block),
            BlockClass::None => BlockClass::None,
            BlockClass::Mixed if self.1.class(block) == BlockClass::None => BlockClass::None,
            BlockClass::Mixed => BlockClass::Mixed,
        }
    }
}

impl<A: MaskMod, B: MaskMod> MaskMod for Or<A, B> {
    #[inline(always)]
    fn keep(&self, at: Position) -> bool {
        self.0.keep(at) || self.1.keep(at)
    }

    fn fits(&self, call: &CallFacts) -> Result<(), MaskError> {
        self.0.fits(call)?;
        self.1.fits(call)
    }

    fn fits_rows(&self, rows: &BlockPosition) -> Result<(), MaskError> {
        self.0.fits_rows(rows)?;
        self.1.fits_rows(rows)
    }

    #[inline]
    fn class(&self, block: BlockPosition) -> BlockClass {
        match self.0.class(block.clone()) {
            BlockClass::None => self.1.class(block),
            BlockClass::All => BlockClass::All,
            BlockClass::Mixed if self.1.class(block) == BlockClass::All => BlockClass::All,
            BlockClass::Mixed => BlockClass::Mixed,
        }
    }
}

impl<A: MaskMod> MaskMod for Not<A> {
    #[inline(always)]
    fn keep(&self, at: Position) -> bool {
        !self.0.keep(at)
    }

    fn fits(&self, call: &CallFacts) -> Result<(), MaskError> {
        self.0.fits(call)
    }

    fn fits_rows(&self, rows: &BlockPosition) -> Result<(), MaskError> {
        self.0.fits_rows(rows)
    }

    #[inline]
    fn class(&self, block: BlockPosition) -> BlockClass {
        match self.0.class(block) {
            BlockClass::All => BlockClass::None,
            BlockClass::None => BlockClass::All,
            BlockClass::Mixed => BlockClass::Mixed,
        }
    }
}
