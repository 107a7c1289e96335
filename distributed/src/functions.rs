//! Functions of the caller over a stretch of rows or some heads: rows and heads count from the first of all.

use sdpa::masks::MaskError;
use sdpa::{BlockClass, BlockPosition, CallFacts, MaskMod, Mods, Position, ScoreMod, WeightMod};

/// Tells whether there are a score, a mask and a weight function.
pub(crate) fn given<S: ScoreMod, M: MaskMod, P: WeightMod>(mods: &Mods<S, M, P>) -> [bool; 3] {
    [mods.score.is_given(), mods.mask.is_given(), mods.weight.is_given()]
}

/// Place of some rows among all: their sequence, and the first of them in it.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Place {
    /// Number of the sequence, and how many there are, if sequences are ragged.
    pub(crate) sequence: Option<(usize, usize)>,
    pub(crate) row: usize,
}

/// Returns score and mask functions for some rows.
pub(crate) fn from_row<S: ScoreMod, M: MaskMod, P: WeightMod>(
    mods: &Mods<S, M, P>,
    place: Place,
) -> Mods<FromRow<'_, S>, FromRow<'_, M>> {
    Mods::new().score(FromRow(&mods.score, place)).mask(FromRow(&mods.mask, place))
}

/// Function that is told which sequence and row of all those of a state are.
#[derive(Debug)]
pub(crate) struct FromRow<'m, F>(&'m F, Place);

impl<F> FromRow<'_, F> {
    fn batch(&self, batch: usize) -> usize {
        self.1.sequence.map_or(batch, |(sequence, _)| sequence)
    }

    fn at(&self, at: Position) -> Position {
        Position { batch: self.batch(at.batch), row: at.row + self.1.row, ..at }
    }

    fn block(&self, block: BlockPosition) -> BlockPosition {
        let rows = block.rows.start + self.1.row..block.rows.end + self.1.row;
        BlockPosition { batch: self.batch(block.batch), rows, ..block }
    }
}

impl<F: ScoreMod> ScoreMod for FromRow<'_, F> {
    #[inline]
    fn score(&self, score: f32, at: Position) -> f32 {
        self.0.score(score, self.at(at))
    }

    #[inline]
    fn derivative(&self, score: f32, at: Position) -> Option<f32> {
        self.0.derivative(score, self.at(at))
    }

    fn is_given(&self) -> bool {
        self.0.is_given()
    }
}

impl<F: MaskMod> MaskMod for FromRow<'_, F> {
    #[inline]
    fn keep(&self, at: Position) -> bool {
        self.0.keep(self.at(at))
    }

    fn class(&self, block: BlockPosition) -> BlockClass {
        self.0.class(self.block(block))
    }

    fn next_kept(&self, block: BlockPosition) -> Option<usize> {
        self.0.next_kept(self.block(block))
    }

    fn fits(&self, call: &CallFacts) -> Result<(), MaskError> {
        let mut facts = *call;
        facts.sequences = self.1.sequence.map_or(call.sequences, |(_, all)| all);
        self.0.fits(&facts)
    }

    fn fits_rows(&self, rows: &BlockPosition) -> Result<(), MaskError> {
        self.0.fits_rows(&self.block(rows.clone()))
    }

    fn is_given(&self) -> bool {
        self.0.is_given()
    }
}

/// Function that is told which head of all a head of the call is.
#[derive(Debug)]
pub(crate) struct FromHead<'m, F>(pub(crate) &'m F, pub(crate) usize);

impl<F> FromHead<'_, F> {
    fn at(&self, at: Position) -> Position {
        Position { head: at.head + self.1, ..at }
    }
}

impl<F: ScoreMod> ScoreMod for FromHead<'_, F> {
    #[inline]
    fn score(&self, score: f32, at: Position) -> f32 {
        self.0.score(score, self.at(at))
    }

    fn is_given(&self) -> bool {
        self.0.is_given()
    }
}

impl<F: MaskMod> MaskMod for FromHead<'_, F> {
    #[inline]
    fn keep(&self, at: Position) -> bool {
        self.0.keep(self.at(at))
    }

    fn class(&self, block: BlockPosition) -> BlockClass {
        self.0.class(BlockPosition { head: block.head + self.1, ..block })
    }

    fn next_kept(&self, block: BlockPosition) -> Option<usize> {
        self.0.next_kept(BlockPosition { head: block.head + self.1, ..block })
    }

    fn fits(&self, call: &CallFacts) -> Result<(), MaskError> {
        self.0.fits(call)
    }

    fn fits_rows(&self, rows: &BlockPosition) -> Result<(), MaskError> {
        self.0.fits_rows(rows)
    }

    fn is_given(&self) -> bool {
        self.0.is_given()
    }
}

impl<F: WeightMod> WeightMod for FromHead<'_, F> {
    #[inline]
    fn weight(&self, weight: f32, at: Position) -> f32 {
        self.0.weight(weight, self.at(at))
    }

    fn is_given(&self) -> bool {
        self.0.is_given()
    }
}
