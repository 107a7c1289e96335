//! The end of a task's rows: where each goes, and by which factor.

use crate::attention::forward::state::StateTransfer;
use crate::attention::forward::task::{AttentionTask, Row};
use crate::attention::mods::{MaskMod, Mods, ProbMod, ScoreMod};
use crate::attention::steps::by_isa::Steps;
use crate::attention::steps::epilogue::{Finish, RowBlockEnds, RowEnd};
use crate::attention::tiling::{MAX_ROW_BLOCK, MAX_TASK, Regions};
use crate::matmul::pack::NonFinite;
use crate::tensor::any::{Output, Typed};
use crate::tensor::rows::Rows;
use crate::tensor::view::SharedMut;
use core::ops::Range;

/// Rows that are finished together: few, so that a task of few rows does not set up many.
const END_ROWS: usize = 16;

/// Which row blocks of a task have ended.
#[derive(Clone, Copy)]
pub(crate) struct EndedRowBlocks {
    row_blocks: [bool; MAX_TASK.div_ceil(MAX_ROW_BLOCK)],
    /// Whether what they accumulated was finite.
    finite: bool,
}

// Rows are finished so many at a time, all of one row block.
const _: () = assert!(MAX_ROW_BLOCK.is_multiple_of(END_ROWS));

impl EndedRowBlocks {
    pub(crate) const NONE: Self = Self { row_blocks: [false; MAX_TASK.div_ceil(MAX_ROW_BLOCK)], finite: true };

    fn has(&self, row_block: usize) -> bool {
        self.row_blocks[row_block]
    }

    /// Notes that a row block has ended.
    pub(crate) fn add(&mut self, row_block: usize, ends: &RowBlockEnds) {
        self.row_blocks[row_block] = true;
        self.finite &= ends.is_finite();
    }
}

impl<S: Steps, A: ScoreMod, B: MaskMod, C: ProbMod> AttentionTask<'_, '_, S, Mods<A, B, C>> {
    /// Per row of a row block: what to subtract from its scores, and the factor that makes weights of their exponentials.
    pub(crate) fn references(&self, row_block: Range<usize>, max: &[f32], sum: &[f32]) -> [(f32, f32); MAX_ROW_BLOCK] {
        let mut references = [(0.0, 0.0); MAX_ROW_BLOCK];
        for row in self.rows(row_block.clone()) {
            let r = row_block.start + row.n;
            let end = self.row_end(row, max[r], sum[r]);
            references[row.n] = (if max[r] == f32::NEG_INFINITY { 0.0 } else { max[r] }, end.factor.0);
        }
        references
    }

    fn row_end(&self, row: Row, max: f32, sum: f32) -> RowEnd {
        RowEnd::new(max, sum, self.call.options.sinks.map(|sinks| sinks[row.head]))
    }

    /// True if all that was accumulated is: if not, it has to be accumulated with nonfinite.
    pub(crate) fn accumulated_is_finite(&self, regions: &Regions<'_>) -> bool {
        let accumulated = &regions.out[..self.task.rows.len() * self.tiling.width()];
        let row = Typed::F32(Rows::strided(accumulated.as_ptr(), 0, 1));
        // SAFETY: one row of so many floats.
        unsafe { self.s.all_finite(row, 1, accumulated.len()) }
    }

    /// Where the rows of a row block go, and by which factors they end, if tiles can write them: contiguous floats. Writes their
    /// log-sum-exp. Nothing may be added to them after the block at hand.
    ///
    /// # Safety
    /// As for [`Self::run`]; the row block has met its last scores.
    pub(crate) unsafe fn end_group(
        &self,
        row_block: Range<usize>,
        ends: &mut RowBlockEnds,
        regions: &Regions<'_>,
    ) -> bool {
        let Some(Typed::F32(out)) = &self.outputs.out else { return false };
        let [.., step, element] = out.strides();
        if element != 1 {
            return false;
        }
        for (row, n) in self.stretches(row_block.clone()) {
            // SAFETY: the rows are inside the output, and this task's alone.
            let (first, _) = unsafe { out.row(self.seq.batch, row.head, self.seq.first_row + row.i) };
            for (k, to) in ends.rows[row.n..row.n + n].iter_mut().enumerate() {
                *to = first.wrapping_offset(k as isize * step);
            }
        }
        for row in self.rows(row_block.clone()) {
            // SAFETY: passed on.
            ends.factors[row.n] = unsafe { self.end_row(row, row_block.start + row.n, regions) }.factor;
        }
        true
    }

    /// How a row ends. Writes its log-sum-exp.
    ///
    /// # Safety
    /// As for [`Self::run`]; the row is row `r` of the task.
    #[inline(always)]
    unsafe fn end_row(&self, row: Row, r: usize, regions: &Regions<'_>) -> RowEnd {
        let end = self.row_end(row, regions.max[r], regions.sum[r]);
        if let Some(lse) = &self.outputs.lse {
            // SAFETY: the row is inside the output, and this task's alone.
            unsafe { *lse.row(self.seq.batch, row.head, self.seq.first_row + row.i).0 = end.lse() };
        }
        end
    }

    /// Normalises and writes the task's rows, or keeps them as they are for more keys to come. False if something accumulated
    /// was not finite.
    ///
    /// # Safety
    /// As for [`Self::run`].
    pub(crate) unsafe fn finish(&self, nonfinite: NonFinite, ended: EndedRowBlocks, regions: &mut Regions<'_>) -> bool {
        let Some(output) = &self.outputs.out else {
            let finite = self.accumulated_is_finite(regions);
            if finite || nonfinite == NonFinite::Handled {
                // SAFETY: passed on.
                unsafe { self.transfer_state(regions, StateTransfer::Save) };
            }
            return finite;
        };
        // SAFETY: passed on.
        by_type!(Typed, output, |out| unsafe { self.finish_into(out, nonfinite, ended, regions) })
    }

    /// The same, to an output of a type.
    ///
    /// # Safety
    /// As for [`Self::run`].
    unsafe fn finish_into<T: Output>(
        &self,
        output: &SharedMut<'_, T>,
        nonfinite: NonFinite,
        ended: EndedRowBlocks,
        regions: &mut Regions<'_>,
    ) -> bool {
        let mut finite = ended.finite;
        let rows = self.task.rows.len();
        let row_blocks = (0..rows).step_by(END_ROWS).map(|first| first..rows.min(first + END_ROWS));
        for row_block in row_blocks.filter(|row_block| !ended.has(row_block.start / self.tiling.row_block_rows)) {
            let mut ends = [RowEnd::EMPTY; END_ROWS];
            let mut out = [core::ptr::null_mut::<T>(); END_ROWS];
            let mut element = 1;
            for row in self.rows(row_block.clone()) {
                // SAFETY: passed on.
                unsafe {
                    ends[row.n] = self.end_row(row, row_block.start + row.n, regions);
                    (out[row.n], element) = output.row(self.seq.batch, row.head, self.seq.first_row + row.i);
                }
                if C::ACTIVE {
                    ends[row.n].factor = (1.0, 0.0);
                }
            }
            let stride = self.tiling.width();
            // SAFETY: every row has `value_dim` elements, and they are this task's alone.
            finite &= unsafe {
                let finish = Finish {
                    accumulated: &regions.out[row_block.start * stride..row_block.end * stride],
                    stride,
                    ends: &ends[..row_block.len()],
                    cols: self.tiling.value_dim,
                    element,
                    nonfinite,
                };
                self.s.finish(finish, T::rows(&out[..row_block.len()]))
            };
        }
        finite
    }
}
