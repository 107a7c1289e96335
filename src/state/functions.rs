//! Functions of the caller over rows and keys that come in parts: positions count from the first of all rows and keys.

#[cfg(feature = "parts")]
use crate::backward::{BackwardPlan, BackwardProblem};
#[cfg(feature = "parts")]
use crate::error::Error;
use crate::plan::Plan;
use crate::plan::problem::Problem;
use crate::threads::exec::Exec;
use crate::threads::run::Run;
use crate::threads::workspace::Workspace;
use core::fmt;
use core::ops::Range;
use sdpa_kernels::{
    BlockClass, BlockPosition, Call, CallFacts, MaskError, MaskMod, Mods, Position, ScoreMod, WeightMod,
};

/// Distance from positions that a call over some of the keys knows to those that the functions see.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Shift {
    /// Number of the call's first row.
    pub(crate) rows: usize,
    /// Position of the call's first key.
    pub(crate) keys: usize,
    /// Distance of the rows' positions; `None` if positions of keys are given: these are among all keys.
    pub(crate) positions: Option<usize>,
}

/// Functions without their types.
pub(crate) trait Functions: Send + Sync {
    /// Returns true if there are any.
    fn are_given(&self) -> bool;
    /// Asks the mask function whether it fits a call and its rows, which lie where the shift says.
    fn fit(&self, call: &Call<'_>, shift: Shift) -> Result<(), MaskError>;
    /// Returns false if the mask function hides a block. Its positions count from the first of all rows and keys.
    fn shows(&self, block: BlockPosition) -> bool;
    /// Computes a problem over some of the keys.
    fn run(&self, problem: Problem<'_>, exec: Exec<'_>, workspace: &mut Workspace, shift: Shift);
    /// Computes the gradients of a problem over some of the keys.
    #[cfg(feature = "parts")]
    fn run_backward(
        &self,
        problem: BackwardProblem<'_>,
        exec: Exec<'_>,
        workspace: &mut Workspace,
        shift: Shift,
    ) -> Result<(), Error>;
}

impl fmt::Debug for dyn Functions + '_ {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Functions")
    }
}

impl<S: ScoreMod, M: MaskMod, P: WeightMod> Functions for Mods<S, M, P> {
    fn are_given(&self) -> bool {
        self.score.is_given() || self.mask.is_given()
    }

    fn fit(&self, call: &Call<'_>, shift: Shift) -> Result<(), MaskError> {
        call.check_mask(&Shifted(&self.mask, shift))
    }

    fn shows(&self, block: BlockPosition) -> bool {
        self.mask.class(block) != BlockClass::None
    }

    fn run(&self, problem: Problem<'_>, exec: Exec<'_>, workspace: &mut Workspace, shift: Shift) {
        let (plan, mods) = (Plan::new(&problem, exec), shifted(self, shift));
        // The state asked whether the mask fits, and nothing says stop.
        let _ = problem.run_with(&plan, workspace, Run::new().mods(&mods).on(exec));
    }

    #[cfg(feature = "parts")]
    fn run_backward(
        &self,
        problem: BackwardProblem<'_>,
        exec: Exec<'_>,
        workspace: &mut Workspace,
        shift: Shift,
    ) -> Result<(), Error> {
        let plan = BackwardPlan::new(&problem, exec);
        problem.run_with(&plan, workspace, Run::new().mods(&shifted(self, shift)).on(exec))
    }
}

/// Returns functions that are told where the keys and rows lie among all.
fn shifted<S: ScoreMod, M: MaskMod, P: WeightMod>(
    mods: &Mods<S, M, P>,
    shift: Shift,
) -> Mods<Shifted<'_, S>, Shifted<'_, M>> {
    Mods::new().score(Shifted(&mods.score, shift)).mask(Shifted(&mods.mask, shift))
}

/// Function that is told where the keys and rows lie among all.
struct Shifted<'m, F>(&'m F, Shift);

impl<F> Shifted<'_, F> {
    #[inline(always)]
    fn at(&self, at: Position) -> Position {
        let (row, key) = (at.row + self.1.rows, at.key + self.1.keys);
        let Some(by) = self.1.positions else { return Position { row, key, ..at } };
        let position = at.position.saturating_add_unsigned(by);
        Position { row, key, position, distance: position.saturating_sub_unsigned(key), ..at }
    }

    /// Returns a block where the whole call has it.
    fn block(&self, block: BlockPosition) -> BlockPosition {
        let moved = |range: Range<usize>, by| range.start + by..range.end + by;
        let (rows, keys) = (moved(block.rows, self.1.rows), moved(block.keys, self.1.keys));
        let position = block.position.saturating_add_unsigned(self.1.positions.unwrap_or(0));
        BlockPosition { rows, keys, position, ..block }
    }
}

impl<F: ScoreMod> ScoreMod for Shifted<'_, F> {
    #[inline(always)]
    fn score(&self, score: f32, at: Position) -> f32 {
        self.0.score(score, self.at(at))
    }

    #[inline(always)]
    fn derivative(&self, score: f32, at: Position) -> Option<f32> {
        self.0.derivative(score, self.at(at))
    }

    fn is_given(&self) -> bool {
        self.0.is_given()
    }
}

impl<F: MaskMod> MaskMod for Shifted<'_, F> {
    #[inline(always)]
    fn keep(&self, at: Position) -> bool {
        self.0.keep(self.at(at))
    }

    fn class(&self, block: BlockPosition) -> BlockClass {
        self.0.class(self.block(block))
    }

    fn next_kept(&self, block: BlockPosition) -> Option<usize> {
        let key = self.0.next_kept(self.block(block))?;
        Some(key.saturating_sub(self.1.keys))
    }

    fn fits(&self, call: &CallFacts) -> Result<(), MaskError> {
        self.0.fits(call)
    }

    fn fits_rows(&self, rows: &BlockPosition) -> Result<(), MaskError> {
        self.0.fits_rows(&self.block(rows.clone()))
    }

    fn is_given(&self) -> bool {
        self.0.is_given()
    }
}
