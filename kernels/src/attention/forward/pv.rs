//! P·V of a row block and a key block. Values are read in place or packed, as elements, pairs or bytes.

use crate::attention::forward::key_block::Block;
use crate::attention::forward::nonfinite::{TileSums, VisibleBits};
use crate::attention::forward::scores::Spans;
use crate::attention::forward::task::AttentionTask;
use crate::attention::steps::by_isa::Steps;
use crate::attention::steps::epilogue::RowBlockEnds;
use crate::attention::steps::infinite;
use crate::attention::steps::pv::Values;
use crate::attention::steps::score_passes::ScoreBlock;
use crate::attention::steps::span::SCORE_STRIDE;
use crate::attention::tiling::Regions;
use crate::kv::key_block::{BlockValues, Run};
use crate::kv::value_panels;
use crate::kv::value_panels::WINDOW;
use crate::matmul::bf16_pairs;
use crate::matmul::pack::NonFinite;
use crate::matmul::prefetch::READING_ROWS;
use crate::matmul::tile_shape::MAX_TILE_ROWS;
use crate::matmul::value_operand::RowPairs;
use crate::simd::LANES;
use crate::tensor::any::{AnyRows, Typed};
use crate::tensor::rows::Rows;
use core::ops::Range;

/// Way in which the P·V of a row block and a key block is accumulated.
#[derive(Clone, Copy)]
pub(crate) enum Manner<'a> {
    /// Values as they are.
    Plain,
    /// Values as they are, and the rows are normalised and written: nothing is accumulated into them afterwards.
    Ending(&'a RowBlockEnds),
    /// Non-finite values handled: the block is computed alone, its non-finite values are marked in the rows they
    /// are visible to, and then it is merged. `None`: all the block's values are finite.
    Handled(Option<&'a VisibleBits>),
}

impl<'a> Manner<'a> {
    fn ends(self) -> Option<&'a RowBlockEnds> {
        if let Self::Ending(ends) = self { Some(ends) } else { None }
    }
}

/// Run of columns, and its rows as P·V reads them: in place or packed.
struct ReadyRun<'a> {
    run: &'a Run,
    rows: AnyRows,
}

/// Row block of the task, and the keys that each tile of its rows needs.
struct RowSpans<'a> {
    rows: Range<usize>,
    spans: &'a Spans,
}

impl<S: Steps> AttentionTask<'_, '_, S> {
    /// Computes `out ← rescale_prev · out + rescale_block · P V` for a row block and a key block.
    ///
    /// # Safety
    /// Same contract as [`Self::run`]; `row_block` lies inside the task.
    pub(crate) unsafe fn accumulate_pv(
        &self,
        block: &mut Block,
        manner: Manner<'_>,
        row_block: Range<usize>,
        spans: &Spans,
        regions: &mut Regions<'_>,
    ) {
        if let BlockValues::Int8 { .. } = block.values {
            // SAFETY: the caller guarantees the contract of `run` and a row block inside the task.
            return unsafe { self.accumulate_pv_int8(block, row_block, spans, regions) };
        }
        let nonfinite =
            if matches!(manner, Manner::Handled(Some(_))) { NonFinite::Handled } else { NonFinite::Ignored };
        let (values, stride) = (block.values, self.tiling.width());
        let [_, native] = self.native();
        if native {
            self.s.round_weights(ScoreBlock { scores: regions.scores, spans, rows: row_block.len() });
        }
        if block.fresh && matches!(manner, Manner::Handled(_)) {
            regions.out[row_block.start * stride..row_block.end * stride].fill(0.0);
        }
        for window in (0..stride).step_by(self.tiling.pack_cols) {
            let end = self.tiling.value_dim.min(window + self.tiling.pack_cols);
            let in_place = |run: &Run| {
                let whole = end.next_multiple_of(LANES) <= values.readable();
                // Larger row blocks share one widened copy.
                let ready = native || matches!(run.rows, Typed::F32(_)) || row_block.len() <= READING_ROWS;
                nonfinite == NonFinite::Ignored && run.rows.element() == 1 && whole && ready
            };
            // SAFETY: the values have these columns.
            for run in unsafe { values.runs(window..end) } {
                let rows = if in_place(&run) {
                    run.rows
                } else {
                    // Runs are packed one after the other.
                    let room = &mut regions.values[(run.first - window) * block.len..];
                    let ready = block.packed_values == Some((window, nonfinite));
                    if run.first + run.cols == end {
                        block.packed_values = Some((window, nonfinite));
                    }
                    if !ready {
                        // SAFETY: the run has its columns for every key of the block.
                        unsafe { self.pack_values(&run, block.len, nonfinite, room) }
                    }
                    self.packed_rows(run.cols, room)
                };
                let (run, row_block) = (ReadyRun { run: &run, rows }, RowSpans { rows: row_block.clone(), spans });
                // SAFETY: the rows are those of the run, in whole vectors; the caller guarantees the rest.
                unsafe {
                    match manner {
                        Manner::Handled(visible) => {
                            self.accumulate_run_alone(block, run, visible, row_block, regions);
                        }
                        _ => self.accumulate_run(block, run, manner.ends(), row_block, regions),
                    }
                }
            }
        }
    }

    /// Accumulates the P·V of a run of columns, whose rows are in place or packed.
    ///
    /// # Safety
    /// Same contract as [`Self::accumulate_pv`]; the rows are whole vectors wide.
    #[inline(always)]
    unsafe fn accumulate_run(
        &self,
        block: &mut Block,
        ReadyRun { run, rows }: ReadyRun<'_>,
        ends: Option<&RowBlockEnds>,
        row_block: RowSpans<'_>,
        regions: &mut Regions<'_>,
    ) {
        let RowSpans { rows: row_block, spans } = row_block;
        let stride = self.tiling.width();
        let values = Values {
            weights: regions.scores,
            values: (),
            vecs: run.cols.div_ceil(LANES),
            spans,
            rows: row_block.len(),
            rescale_prev: regions.rescale_prev,
            rescale_block: regions.rescale_block,
            fresh: block.fresh,
            out: &mut regions.out[row_block.start * stride + run.first..],
            out_stride: stride,
            ends: ends.map(|ends| ends.of(run.first..run.first + run.cols)),
            prefetch: &mut block.prefetch,
        };
        // SAFETY: spans end inside the block; rows that end are this row block's.
        unsafe { self.values(values, rows, block.len) }
    }

    /// Accumulates the P·V of a run of columns with non-finite values handled, a tile of rows at a time: computes the
    /// block alone, marks its non-finite values, then merges it.
    ///
    /// # Safety
    /// Same contract as [`Self::accumulate_run`].
    unsafe fn accumulate_run_alone(
        &self,
        block: &mut Block,
        ReadyRun { run, rows }: ReadyRun<'_>,
        visible: Option<&VisibleBits>,
        row_block: RowSpans<'_>,
        regions: &mut Regions<'_>,
    ) {
        let RowSpans { rows: row_block, spans } = row_block;
        let (stride, width) = (self.tiling.width(), run.cols.next_multiple_of(LANES));
        const { assert!(S::TILE_ROWS <= MAX_TILE_ROWS) };
        let (ones, mut part) = ([1.0; MAX_TILE_ROWS], [0.0; MAX_TILE_ROWS * WINDOW]);
        for (tile, span) in spans.iter().enumerate() {
            let here = tile * S::TILE_ROWS..row_block.len().min((tile + 1) * S::TILE_ROWS);
            let part = &mut part[..here.len() * width];
            part.fill(0.0);
            let scores = &regions.scores[here.start * SCORE_STRIDE..];
            let values = Values {
                weights: scores,
                values: (),
                vecs: width / LANES,
                spans: core::slice::from_ref(span),
                rows: here.len(),
                rescale_prev: &ones,
                rescale_block: &ones,
                fresh: false,
                out: part,
                out_stride: width,
                ends: None,
                prefetch: &mut block.prefetch,
            };
            // SAFETY: the caller guarantees whole vectors for the rows of the block; the span ends inside the block,
            // and no row ends here.
            unsafe { self.values(values, rows, block.len) }
            // Here NaN comes from weights; in the running outputs, from overflow.
            part.iter_mut().filter(|x| x.is_nan()).for_each(|x| *x = infinite::mark(*x));
            if let Some(visible) = visible {
                let tile = TileSums { rows: here.clone(), weights: regions.scores, sums: part };
                // SAFETY: the caller guarantees the contract of `run` and that the run is the block's.
                unsafe { self.mark_infinite(run, block.len, visible, tile) };
            }
            for (r, part) in here.zip(part.chunks_exact(width)) {
                let factors = [&regions.rescale_prev[r..=r], &regions.rescale_block[r..=r]];
                let out = &mut regions.out[(row_block.start + r) * stride + run.first..][..width];
                self.s.merge_marked(factors, out, part, width);
            }
        }
    }

    /// Runs the P·V step for the element type of the rows.
    ///
    /// # Safety
    /// Same contract as [`Steps::values`] or [`Steps::values_pairs`], for these rows; the block has `len` keys, at
    /// least one.
    #[inline(always)]
    unsafe fn values(&self, mut values: Values<'_, ()>, rows: AnyRows, len: usize) {
        let [_, native] = self.native();
        // SAFETY: the caller guarantees the step's contract; the last row of pairs is the block's last key.
        unsafe {
            match rows {
                Typed::Bf16(rows) if native => self.s.values_pairs(values.of(RowPairs { rows, last: len - 1 })),
                rows => self.s.values(values.of(rows)),
            }
        }
    }

    /// Packs columns of values into scratch, padded to whole vectors: as floats, or as bfloat16 if they are multiplied
    /// as pairs.
    ///
    /// # Safety
    /// The run has its columns for `len` keys.
    unsafe fn pack_values(&self, run: &Run, len: usize, nonfinite: NonFinite, out: &mut [f32]) {
        let (size, [_, native]) = ([len, run.cols], self.native());
        // SAFETY: the caller guarantees `len` keys of the run's columns.
        unsafe {
            if native {
                self.s.round_rows(run.rows, size, nonfinite, bf16_pairs::as_halves(out));
            } else {
                self.s.pack_rows(run.rows, size, nonfinite, out);
            }
        }
    }

    /// Returns the rows that [`Self::pack_values`] left in scratch.
    fn packed_rows(&self, cols: usize, out: &mut [f32]) -> AnyRows {
        let (stride, [_, native]) = (cols.next_multiple_of(LANES) as isize, self.native());
        if native {
            Typed::Bf16(Rows::strided(bf16_pairs::as_halves(out).as_ptr(), stride, 1))
        } else {
            Typed::F32(Rows::strided(out.as_ptr(), stride, 1))
        }
    }

    /// Accumulates the P·V of int8 values: their scales are multiplied into the weights, which are not read afterwards.
    ///
    /// # Safety
    /// Same contract as [`Self::run`]; `row_block` lies inside the task, and the block's values are int8.
    unsafe fn accumulate_pv_int8(
        &self,
        block: &mut Block,
        row_block: Range<usize>,
        spans: &Spans,
        regions: &mut Regions<'_>,
    ) {
        let BlockValues::Int8 { value_panels, scales } = block.values else { unreachable!("values of bytes") };
        let (stride, rows) = (self.tiling.width(), row_block.len());
        // SAFETY: the cache outlives the call; its value panels are whole vectors.
        unsafe {
            self.s.scale_columns(ScoreBlock { scores: regions.scores, spans, rows }, &*scales);
            for value_panel in value_panels::value_panels(stride) {
                self.s.values_int8(Values {
                    weights: regions.scores,
                    values: value_panels.from(value_panel.start),
                    vecs: value_panel.len() / LANES,
                    spans,
                    rows,
                    rescale_prev: regions.rescale_prev,
                    rescale_block: regions.rescale_block,
                    fresh: block.fresh,
                    out: &mut regions.out[row_block.start * stride + value_panel.start..],
                    out_stride: stride,
                    ends: None,
                    prefetch: &mut block.prefetch,
                });
            }
        }
    }
}
