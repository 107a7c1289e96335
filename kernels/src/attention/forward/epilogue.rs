//! Epilogue of a task: each row's normalisation factor, its lse, and the address it is written to.

use crate::attention::blocks::task::{AttentionTask, Row};
use crate::attention::forward::state::StateTransfer;
use crate::attention::scratch::{MAX_ROW_BLOCK, MAX_TASK, Regions};
use crate::attention::steps::epilogue::{self, END_ROWS, Finish, RowBlockEnds, RowSum};
use crate::matmul::finite;
use crate::matmul::hadamard::Basis;
use crate::matmul::pack::NonFinite;
use crate::simd::Simd;
use crate::tensor::any::{TensorMut, Typed};
use crate::tensor::element::Element;
use crate::tensor::rows::Rows;
use crate::tensor::view_mut::ViewMut;
use core::ops::Range;

/// Row blocks of a task that have ended: already normalised and written by P·V tiles.
#[derive(Clone, Copy)]
pub(crate) struct EndedRowBlocks {
    row_blocks: [bool; MAX_TASK.div_ceil(MAX_ROW_BLOCK)],
    /// True if everything the ended row blocks accumulated is finite.
    finite: bool,
}

// Rows finished together belong to one row block.
const _: () = assert!(MAX_ROW_BLOCK.is_multiple_of(END_ROWS));

impl EndedRowBlocks {
    pub(crate) const NONE: Self = Self { row_blocks: [false; MAX_TASK.div_ceil(MAX_ROW_BLOCK)], finite: true };

    fn has(&self, row_block: usize) -> bool {
        self.row_blocks[row_block]
    }

    /// Records that a row block has ended.
    pub(crate) fn add(&mut self, row_block: usize, ends: &RowBlockEnds) {
        self.row_blocks[row_block] = true;
        self.finite &= ends.is_finite();
    }
}

impl<S: Simd> AttentionTask<'_, S> {
    /// Returns, for each row of a row block, the reference to subtract from its scores and the factor that turns their
    /// exponentials into weights.
    pub(crate) fn references(&self, row_block: Range<usize>, max: &[f32], sum: &[f32]) -> [(f32, f32); MAX_ROW_BLOCK] {
        let mut references = [(0.0, 0.0); MAX_ROW_BLOCK];
        for row in self.rows(row_block.clone()) {
            let r = row_block.start + row.n;
            let (factor, _) = self.row_sum(row, max[r], sum[r]).factor();
            references[row.n] = (if max[r] == f32::NEG_INFINITY { 0.0 } else { max[r] }, factor);
        }
        references
    }

    /// Returns the sum of a row with this maximum and sum over its keys.
    #[inline(always)]
    pub(crate) fn row_sum(&self, row: Row, max: f32, sum: f32) -> RowSum {
        RowSum::new(max, sum, self.call.options.sinks.map(|sinks| sinks[row.head]))
    }

    /// Returns true if everything accumulated is finite: if not, the task is accumulated again with
    /// [`NonFinite::Handled`].
    pub(crate) fn accumulated_is_finite(&self, regions: &Regions<'_>) -> bool {
        let accumulated = &regions.out[..self.set.rows.len() * self.tiling.width()];
        let row = Typed::F32(Rows::strided(accumulated.as_ptr(), 0, 1));
        // SAFETY: the row is `accumulated`, a slice of that many floats.
        unsafe { finite::all_finite(self.s, row, 1, accumulated.len()) }
    }

    /// Sets in `ends` the addresses and factors of a row block's rows, if P·V tiles can write them: if the output is
    /// contiguous floats. Returns true if so, and then writes their log-sum-exp. The row block's running maxima and sums
    /// include its last scores, and nothing may be accumulated into its rows after the current key block.
    pub(crate) fn prepare_ends(&self, row_block: Range<usize>, ends: &mut RowBlockEnds, regions: &Regions<'_>) -> bool {
        let Some(TensorMut::F32(out)) = &self.outputs.out else { return false };
        let [.., step, element] = out.strides();
        if element != 1 {
            return false;
        }
        for (row, n) in self.stretches(row_block.clone()) {
            // SAFETY: the task's rows are inside the output. Addresses alone: nothing is accessed yet.
            let (first, _) = unsafe { out.row(row.q_batch, row.head, row.at) };
            for (k, to) in ends.rows[row.n..row.n + n].iter_mut().enumerate() {
                *to = first.wrapping_offset(k as isize * step);
            }
        }
        self.end_rows(row_block, regions, &mut ends.factors);
        true
    }

    /// Sets the [factor](RowSum::factor) of each of some rows (their running maxima and sums are complete), and writes their
    /// log-sum-exps.
    #[inline(always)]
    fn end_rows(&self, rows: Range<usize>, regions: &Regions<'_>, factors: &mut [(f32, f32)]) {
        // Many rows together, if each has a single number and no sink.
        let one_by_one = self.call.options.sinks.is_some() || self.outputs.wants_lse_rests();
        for row in self.rows(rows.clone()) {
            let (max, sum) = (regions.max[rows.start + row.n], regions.sum[rows.start + row.n]);
            factors[row.n] = if one_by_one {
                // SAFETY: a row of the task.
                unsafe { self.end_row(row, max, sum) }
            } else {
                self.row_sum(row, max, sum).factor()
            };
        }
        if !one_by_one {
            self.write_lses(rows, regions);
        }
    }

    /// Writes the log-sum-exps of some rows without sinks, if they are wanted.
    fn write_lses(&self, rows: Range<usize>, regions: &Regions<'_>) {
        let Some(lse) = &self.outputs.lse else { return };
        for first in rows.clone().step_by(END_ROWS) {
            let group = first..rows.end.min(first + END_ROWS);
            let (max, sum) = (&regions.max[group.clone()], &regions.sum[group.clone()]);
            let mut lses = [0.0; END_ROWS];
            match (max.try_into(), sum.try_into()) {
                (Ok(max), Ok(sum)) => lses = epilogue::lses(self.s, max, sum),
                _ => self.rows(group.clone()).for_each(|row| {
                    lses[row.n] = self.row_sum(row, max[row.n], sum[row.n]).lse();
                }),
            }
            for (row, len) in self.stretches(group) {
                // SAFETY: the task's rows are inside the output, and this worker's alone.
                unsafe {
                    let (to, _) = lse.row(row.q_batch, row.head, row.at);
                    for (k, &x) in lses[row.n..][..len].iter().enumerate() {
                        *to.wrapping_offset(k as isize * lse.strides()[2]) = x;
                    }
                }
            }
        }
    }

    /// Returns the [factor](RowSum::factor) of a row with this maximum and sum, and writes its log-sum-exp.
    ///
    /// # Safety
    /// The row is one of the task's.
    #[inline(always)]
    pub(crate) unsafe fn end_row(&self, row: Row, max: f32, sum: f32) -> (f32, f32) {
        let end = self.row_sum(row, max, sum);
        if let Some(lse) = &self.outputs.lse {
            let rounded = end.lse();
            // SAFETY: the task's rows are inside the output, and this worker's alone; a second column is asked for.
            unsafe {
                let (to, element) = lse.row(row.q_batch, row.head, row.at);
                *to = rounded;
                if self.outputs.wants_lse_rests() {
                    *to.offset(element) = end.lse_rest(rounded);
                }
            }
        }
        end.factor()
    }

    /// Normalises and writes the task's rows, in the basis of their channels, or saves them unnormalised as a state for more keys to
    /// come. What the regions hold is of no further use. Returns
    /// false if something accumulated was not finite.
    pub(crate) fn finish(&self, nonfinite: NonFinite, ended: EndedRowBlocks, regions: &mut Regions<'_>) -> bool {
        let [_, basis] = self.call.kv.bases();
        if basis != Basis::Channels {
            let rows = regions.out.chunks_exact_mut(self.tiling.width()).take(self.set.rows.len());
            rows.for_each(|row| basis.transform(self.s, &mut row[..self.tiling.value_dim]));
        }
        let Some(output) = &self.outputs.out else {
            let finite = self.accumulated_is_finite(regions);
            if finite || nonfinite == NonFinite::Handled {
                StateTransfer::Save.run(self, regions);
            }
            return finite;
        };
        // SAFETY: the call's output.
        by_type!(TensorMut, output, |out| unsafe { self.finish_into(out, nonfinite, ended, regions) })
    }

    /// Normalises and writes the task's rows to an output of element type `T`.
    ///
    /// # Safety
    /// The output is the call's.
    unsafe fn finish_into<T: Element>(
        &self,
        output: &ViewMut<'_, T>,
        nonfinite: NonFinite,
        ended: EndedRowBlocks,
        regions: &mut Regions<'_>,
    ) -> bool {
        let mut finite = ended.finite;
        let rows = self.set.rows.len();
        let groups = (0..rows).step_by(END_ROWS).map(|first| first..rows.min(first + END_ROWS));
        for group in groups.filter(|group| !ended.has(group.start / MAX_ROW_BLOCK)) {
            let mut factors = [(0.0, 0.0); END_ROWS];
            let mut out = [core::ptr::null_mut::<T>(); END_ROWS];
            let mut element = 1;
            for row in self.rows(group.clone()) {
                // SAFETY: a row of the task, inside the output.
                (out[row.n], element) = unsafe { output.row(row.q_batch, row.head, row.at) };
            }
            self.end_rows(group.clone(), regions, &mut factors);
            if self.given.weight {
                // Weights that a weight function was given are normalised already.
                factors.fill((1.0, 0.0));
            }
            let stride = self.tiling.width();
            // SAFETY: every row of the output has `value_dim` elements, and the task's are this worker's alone.
            finite &= unsafe {
                let finish = Finish {
                    accumulated: &regions.out[group.start * stride..group.end * stride],
                    stride,
                    factors: &factors[..group.len()],
                    cols: self.tiling.value_dim,
                    element,
                    nonfinite,
                };
                epilogue::finish(self.s, finish, &out[..group.len()])
            };
        }
        finite
    }
}
