//! P·V of a row block and a block: values where they lie, or packed; elements, pairs or bytes.

use crate::attention::forward::key_block::Block;
use crate::attention::forward::nonfinite::VisibleBits;
use crate::attention::forward::scores::Spans;
use crate::attention::forward::task::AttentionTask;
use crate::attention::mods::{MaskMod, Mods, ProbMod, ScoreMod};
use crate::attention::steps::by_isa::Steps;
use crate::attention::steps::epilogue::RowBlockEnds;
use crate::attention::steps::infinite;
use crate::attention::steps::pv::Values;
use crate::attention::steps::score_passes::ScoreBlock;
use crate::attention::steps::span::SCORE_STRIDE;
use crate::attention::tiling::Regions;
use crate::kv::key_block::{BlockValues, Run};
use crate::kv::value_panels::WINDOW;
use crate::kv::value_panels::{self, ValuePanels};
use crate::matmul::bf16_pairs;
use crate::matmul::pack::NonFinite;
use crate::matmul::prefetch::READING_ROWS;
use crate::matmul::tile_shape::MAX_TILE_ROWS;
use crate::matmul::value_operand::RowPairs;
use crate::simd::LANES;
use crate::tensor::any::{AnyRows, Typed};
use crate::tensor::rows::Rows;
use core::ops::Range;

/// How a row block's values are added.
#[derive(Clone, Copy)]
pub(crate) enum Manner<'a> {
    /// As they are.
    Plain,
    /// As they are, and the rows written: nothing is added to them after it.
    Ending(&'a RowBlockEnds),
    /// With nonfinite: this block alone, what is not finite of it marked for the rows that see it, and then taken in. Nobody sees
    /// anything of the kind where nothing is said.
    Handled(Option<&'a VisibleBits>),
}

impl<'a> Manner<'a> {
    fn ends(self) -> Option<&'a RowBlockEnds> {
        if let Self::Ending(ends) = self { Some(ends) } else { None }
    }
}

impl<S: Steps, A: ScoreMod, B: MaskMod, C: ProbMod> AttentionTask<'_, '_, S, Mods<A, B, C>> {
    /// out ← rescale_prev · out + rescale_block · P V for a row block and a block.
    ///
    /// # Safety
    /// As for [`Self::run`]; `row_block` lies inside the task.
    pub(crate) unsafe fn accumulate_pv(
        &self,
        block: &mut Block,
        manner: Manner<'_>,
        row_block: Range<usize>,
        spans: &Spans,
        regions: &mut Regions<'_>,
    ) {
        if let BlockValues::Int8 { value_panels, scales } = block.values {
            // SAFETY: passed on.
            return unsafe { self.accumulate_pv_int8(block, (value_panels, scales), row_block, spans, regions) };
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
                // More rows share one widened copy.
                let ready = native || matches!(run.rows, Typed::F32(_)) || row_block.len() <= READING_ROWS;
                nonfinite == NonFinite::Ignored && run.rows.element() == 1 && whole && ready
            };
            // SAFETY: the values have these columns.
            for run in unsafe { values.runs(window..end) } {
                let rows = if in_place(&run) {
                    run.rows
                } else {
                    // Runs are packed one behind the other.
                    let room = &mut regions.values[(run.first - window) * block.len..];
                    let ready = block.packed_values == Some((window, nonfinite));
                    if run.first + run.cols == end {
                        block.packed_values = Some((window, nonfinite));
                    }
                    // SAFETY: the run has so many columns for every key of the block.
                    unsafe { self.pack_values(&run, block.len, nonfinite, (room, ready)) }
                };
                // SAFETY: the rows are those of the run, in whole vectors.
                unsafe {
                    match manner {
                        Manner::Handled(seen) => {
                            self.accumulate_run_alone(block, (&run, rows), seen, row_block.clone(), (spans, regions));
                        }
                        _ => {
                            self.accumulate_run(block, (&run, rows), manner.ends(), row_block.clone(), (spans, regions))
                        }
                    }
                }
            }
        }
    }

    /// The same for a run of columns, its rows where they lie or as packed.
    ///
    /// # Safety
    /// As for [`Self::accumulate_pv`]; the rows are whole vectors wide.
    #[inline(always)]
    unsafe fn accumulate_run(
        &self,
        block: &mut Block,
        (run, rows): (&Run, AnyRows),
        ends: Option<&RowBlockEnds>,
        row_block: Range<usize>,
        (spans, regions): (&Spans, &mut Regions<'_>),
    ) {
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

    /// The same with nonfinite, a tile of rows at a time: what the block gives alone, what is not finite of it marked, then taken in.
    ///
    /// # Safety
    /// As for [`Self::accumulate_run`].
    unsafe fn accumulate_run_alone(
        &self,
        block: &mut Block,
        (run, rows): (&Run, AnyRows),
        seen: Option<&VisibleBits>,
        row_block: Range<usize>,
        (spans, regions): (&Spans, &mut Regions<'_>),
    ) {
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
            // SAFETY: passed on.
            unsafe { self.values(values, rows, block.len) }
            // Here NaN comes from weights; in the running outputs, from what overflows.
            part.iter_mut().filter(|x| x.is_nan()).for_each(|x| *x = infinite::mark(*x));
            if let Some(seen) = seen {
                // SAFETY: passed on.
                unsafe { self.mark_infinite((run, block.len), seen, here.clone(), (regions.scores, part)) };
            }
            for (r, part) in here.zip(part.chunks_exact(width)) {
                let factors = [&regions.rescale_prev[r..=r], &regions.rescale_block[r..=r]];
                let out = &mut regions.out[(row_block.start + r) * stride + run.first..][..width];
                self.s.merge_marked(factors, out, part, width);
            }
        }
    }

    /// The step, by the type of the rows.
    ///
    /// # Safety
    /// As for the step; the block has so many keys.
    #[inline(always)]
    unsafe fn values(&self, mut values: Values<'_, ()>, rows: AnyRows, len: usize) {
        let [_, native] = self.native();
        // SAFETY: passed on.
        unsafe {
            match rows {
                Typed::Bf16(rows) if native => self.s.values_pairs(values.of(RowPairs { rows, last: len - 1 })),
                rows => self.s.values(values.of(rows)),
            }
        }
    }

    /// Columns of values into scratch, filled up to whole vectors: as floats, or as they are if they are to be paired. Returns
    /// them there.
    ///
    /// # Safety
    /// The run has these columns for so many keys. With `ready`, they are there already.
    unsafe fn pack_values(
        &self,
        run: &Run,
        len: usize,
        nonfinite: NonFinite,
        (out, ready): (&mut [f32], bool),
    ) -> AnyRows {
        let (size, stride) = ([len, run.cols], run.cols.next_multiple_of(LANES) as isize);
        let [_, native] = self.native();
        // SAFETY: passed on.
        unsafe {
            if native {
                let out = bf16_pairs::as_halves(out);
                if !ready {
                    self.s.round_rows(run.rows, size, nonfinite, out);
                }
                Typed::Bf16(Rows::strided(out.as_ptr(), stride, 1))
            } else {
                if !ready {
                    self.s.pack_rows(run.rows, size, nonfinite, out);
                }
                Typed::F32(Rows::strided(out.as_ptr(), stride, 1))
            }
        }
    }

    /// The same with values of bytes: their scales go into the weights, which nobody reads afterwards.
    ///
    /// # Safety
    /// As for [`Self::run`]; `row_block` lies inside the task, and value panels and scales are the block's.
    unsafe fn accumulate_pv_int8(
        &self,
        block: &mut Block,
        (value_panels, scales): (ValuePanels<i8>, *const [f32]),
        row_block: Range<usize>,
        spans: &Spans,
        regions: &mut Regions<'_>,
    ) {
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
