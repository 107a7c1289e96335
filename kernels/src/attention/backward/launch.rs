//! Launch of the backward pass: a call, what was saved of it, and its gradients, handed out to workers key block by key
//! block.
//!
//! A worker that takes a key block of a key/value head adds up the gradients of its keys and values over all query rows,
//! in order, in its scratch. The gradients of queries are added up over the key blocks, in order, in shared memory: a row
//! block of one key block waits for the same row block of the key block before. Key blocks are taken in order, the same
//! one of all heads before the next, so a worker waits only for what another is at, and seldom. So every sum is taken in
//! one order, whoever takes it: gradients have the same bits for any number of threads.
//!
//! If rows are far from 0 and the rounding errors of their log-sum-exps are not there, workers first take row blocks and sum
//! their exponentials over all keys. Key blocks begin when all of these are done.

use crate::attention::backward::call::{Gradients, Saved};
use crate::attention::backward::column::Column;
use crate::attention::backward::memory::{BackwardMemory, BackwardScratch};
use crate::attention::backward::parts::{Part, SharedPart};
use crate::attention::backward::pass::{BackwardPass, BlockAt};
use crate::attention::blocks::task::BoundCall;
use crate::attention::call::Call;
use crate::attention::call::checked::CheckedCall;
use crate::attention::call::row_mods::{AnyMods, RowMods};
use crate::attention::scratch::{MAX_ROW_BLOCK, Tiling};
use crate::simd::Simd;
use crate::simd::isa::Isa;
use crate::tensor::element::Precision;
use crate::tensor::rows::KEY_BLOCK;
use crate::work_queue::{Queue, Stop};

/// Backward pass bound to its gradients: queues of row blocks and key blocks that workers take until they are empty.
pub struct BackwardLaunch<'a> {
    pass: BackwardPass<'a>,
    tiling: Tiling,
    /// Row blocks to be summed first, if some rows are far from 0 and what rounding leaves of their log-sum-exps is not there.
    row_blocks: Queue,
    columns: Queue,
}

/// Stage of a launch: a worker begins one when all have done with the one before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// Sums of exponentials of rows that need them.
    Rows,
    /// Gradients, key block by key block.
    Keys,
}

/// Returns the number of key blocks of a call: of each key/value head, and of all.
fn count_columns(call: &Call<'_>) -> Option<(usize, usize)> {
    let longest = call.longest().1.div_ceil(KEY_BLOCK).max(1);
    let heads = call.sequence_count().checked_mul(call.kv.kv_heads())?;
    Some((longest, heads.checked_mul(longest)?))
}

/// Returns the number of row blocks of a call, if each query head has those of the longest sequence.
fn count_row_blocks(call: &Call<'_>) -> Option<usize> {
    let of_head = call.longest().0.div_ceil(MAX_ROW_BLOCK);
    call.sequence_count().checked_mul(call.q.shape()[1])?.checked_mul(of_head)
}

impl<'a> BackwardLaunch<'a> {
    /// Binds a call, or the part of one that this launch computes, to its gradients. `None` if there is no memory for what workers
    /// share, or for a part: memory that [`BackwardMemory::try_begin`] has begun.
    ///
    /// # Panics
    /// If the tiling, saved results or gradients are for other sizes, or the precision of a pass in parts is not
    /// exact.
    pub fn new(
        checked: CheckedCall<'a>,
        saved: Saved<'a>,
        gradients: Gradients<'a>,
        part: Part<'a>,
        tiling: Tiling,
        memory: &'a mut BackwardMemory,
    ) -> Option<Self> {
        checked.assert_held_by(&tiling);
        let call = checked.with_given_bias();
        let whole = matches!(part, Part::Whole);
        assert!(whole || call.precision == Precision::Exact, "a pass in parts takes no precision shortcuts");
        let fit = saved.fits(&call).and_then(|()| gradients.fits(&call));
        fit.unwrap_or_else(|misfit| panic!("saved results or gradients of another call: {misfit:?}"));
        let (columns_per_head, columns) = count_columns(&call)?;
        let row_blocks = if whole && saved.lacks_rests() { count_row_blocks(&call)? } else { 0 };
        let parameters = gradients.parameter_count();
        if !memory.try_reserve(&call, columns, parameters) {
            return None;
        }
        let (gradients, reduced) = gradients.split(&call, &part);
        let part = SharedPart::new(part, &call);
        if let Some(bias) = &gradients.bias {
            bias.clear();
        }
        let (rows, progress, parameter_sums) = memory.parts(&call, parameters);
        let stop = Stop::when(None);
        let pass = BackwardPass {
            checked,
            saved,
            gradients,
            reduced,
            parameter_sums,
            part,
            rows,
            columns_per_head,
            progress,
            stop,
        };
        // Without query heads, too: gradients of keys and values are then zeros.
        Some(Self { pass, tiling, row_blocks: Queue::new(row_blocks), columns: Queue::new(columns) })
    }

    /// Sets a function that is asked before each key block: if it returns true, the rest is left undone.
    #[must_use]
    pub fn until(mut self, stop: Option<&'a (dyn Fn() -> bool + Sync)>) -> Self {
        self.pass.stop = Stop::when(stop);
        self
    }

    /// Leaves undone what no worker has begun.
    pub fn stop(&self) {
        self.pass.stop.now();
    }

    /// Returns true if work was left undone.
    pub fn is_stopped(&self) -> bool {
        self.pass.stop.is_stopped()
    }

    /// Completes the gradients. Call it when every call of [`Self::work`] has returned.
    ///
    /// # Panics
    /// If the work was stopped: then some gradients were not computed.
    pub fn finish(self) {
        assert!(!self.is_stopped(), "stopped before the gradients were complete");
        self.pass.reduce();
    }

    /// Returns the stages that there are, in order.
    pub fn stages(&self) -> &'static [Stage] {
        if self.row_blocks.len() > 0 { &[Stage::Rows, Stage::Keys] } else { &[Stage::Keys] }
    }

    /// Takes row blocks or key blocks, as the stage says, and computes them until none is left. Any number of workers may call this
    /// at once, each with its own scratch; when all calls for all [stages](Self::stages) have returned, [`Self::finish`] completes
    /// the gradients. A score function without a derivative makes NaN of them.
    ///
    /// # Panics
    /// If there is a weight function, or the tiling has no scratch for [parts](Call::backward_parts) of numbers. `sdpa` reports such calls, and a missing derivative, as errors.
    pub fn work(&self, stage: Stage, isa: Isa, scratch: &mut BackwardScratch, mods: AnyMods<'_>) {
        dispatch!(isa, |s| self.work_on(s, stage, scratch, mods.0));
    }

    /// Returns the place of a column by its number, if there is such a column.
    fn column(&self, number: usize) -> Option<BlockAt> {
        let (pass, all, kv_heads) = (&self.pass, self.columns.len(), self.pass.checked.call().kv.kv_heads());
        if number >= all {
            return None;
        }
        let heads = all / pass.columns_per_head;
        let (head, number) = (number % heads, number / heads);
        let at = BlockAt { sequence: head / kv_heads, kv_head: head % kv_heads, number };
        (number < pass.columns_of(at.sequence)).then_some(at)
    }

    /// Does the work of [`Self::work`] with the steps of one instruction set.
    fn work_on<S: Simd>(&self, s: S, stage: Stage, scratch: &mut BackwardScratch, mods: &dyn RowMods<S>) {
        assert!(!mods.given().weight, "a weight function has no backward pass");
        let bound = BoundCall::backward(s, mods, &self.pass.checked, &self.tiling);
        match stage {
            Stage::Rows => self.sum_rows(bound, scratch),
            Stage::Keys => self.work_on_columns(bound, scratch),
        }
    }

    /// Takes row blocks and sums the exponentials of rows that are far from 0.
    fn sum_rows<S: Simd>(&self, bound: BoundCall<'_, S>, scratch: &mut BackwardScratch) {
        let (pass, heads) = (&self.pass, self.columns.len() / self.pass.columns_per_head);
        let (call, tiling) = (pass.checked.call(), &self.tiling);
        let blocks_of_head = self.row_blocks.len() / heads.max(1) / call.group_size().max(1);
        while let Some(number) = self.row_blocks.take_unless(&pass.stop) {
            let (head, number) = (number % heads, number / heads);
            let (sequence, kv_head) = (head / call.kv.kv_heads(), head % call.kv.kv_heads());
            let column = Column { bound, pass, at: BlockAt { sequence, kv_head, number: 0 }, next: None };
            let Some(task) = column.row_blocks(number / blocks_of_head).nth(number % blocks_of_head) else { continue };
            let (scores, _) = scratch.parts(tiling, 0);
            // SAFETY: every number is taken once, so the row block is this worker's; key blocks begin when all are done.
            unsafe { column.sum_far_rows(&task, &mut scores.scratch.regions(tiling)) };
        }
    }

    /// Takes key blocks and computes their gradients.
    fn work_on_columns<S: Simd>(&self, bound: BoundCall<'_, S>, scratch: &mut BackwardScratch) {
        let pass = &self.pass;
        let mut before = None;
        while let Some(number) = self.columns.take_unless(&pass.stop) {
            // As many further as this one was, since workers take turns.
            let next = number + before.map_or(1, |before| number - before);
            before = Some(number);
            let Some(at) = self.column(number) else { continue };
            let column = Column { bound, pass, at, next: self.column(next) };
            // A worker that panics does not leave others waiting.
            let guard = StopOnUnwind(&pass.stop);
            // SAFETY: every number is taken once, so the key block's gradients are this worker's.
            unsafe { if pass.part.is_end { column.end(scratch) } else { column.run(scratch) } };
            core::mem::forget(guard);
        }
    }
}

/// Stops the work when it is dropped.
struct StopOnUnwind<'a>(&'a Stop<'a>);

impl Drop for StopOnUnwind<'_> {
    fn drop(&mut self) {
        self.0.now();
    }
}

impl core::fmt::Debug for BackwardLaunch<'_> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("BackwardLaunch")
            .field("call", self.pass.checked.call())
            .field("columns", &self.columns.len())
            .finish_non_exhaustive()
    }
}
