//! P·V of a group and a block: values where they lie, or packed; elements, pairs or bytes.

use crate::attention::forward::key_block::Block;
use crate::attention::forward::nonfinite::Seen;
use crate::attention::forward::scores::Spans;
use crate::attention::forward::task::Fused;
use crate::attention::mods::{MaskMod, Mods, ProbMod, ScoreMod};
use crate::attention::steps::by_isa::Steps;
use crate::attention::steps::epilogue::GroupEnds;
use crate::attention::steps::infinite;
use crate::attention::steps::pv::Values;
use crate::attention::steps::score_passes::Group;
use crate::attention::steps::span::SCORE_STRIDE;
use crate::attention::tiling::Regions;
use crate::kv::key_block::{BlockValues, Run};
use crate::kv::value_panels::WINDOW;
use crate::kv::value_panels::{self, Strips};
use crate::matmul::bf16_pairs;
use crate::matmul::pack::Care;
use crate::matmul::prefetch::READING_ROWS;
use crate::matmul::tile_shape::MAX_TILE_ROWS;
use crate::matmul::value_operand::RowPairs;
use crate::simd::LANES;
use crate::tensor::any::{AnyRows, Typed};
use crate::tensor::rows::Rows;
use core::ops::Range;

/// How a group's values are added.
#[derive(Clone, Copy)]
pub(crate) enum Manner<'a> {
    /// As they are.
    Plain,
    /// As they are, and the rows written: nothing is added to them after it.
    Ending(&'a GroupEnds),
    /// With care: this block alone, what is not finite of it marked for the rows that see it, and then taken in. Nobody sees
    /// anything of the kind where nothing is said.
    Careful(Option<&'a Seen>),
}

impl<'a> Manner<'a> {
    fn ends(self) -> Option<&'a GroupEnds> {
        if let Self::Ending(ends) = self { Some(ends) } else { None }
    }
}

impl<S: Steps, A: ScoreMod, B: MaskMod, C: ProbMod> Fused<'_, '_, S, Mods<A, B, C>> {
    /// out ← keep · out + join · P V for a group and a block.
    ///
    /// # Safety
    /// As for [`Self::run`]; `group` lies inside the task.
    pub(crate) unsafe fn add_values(
        &self,
        block: &mut Block,
        manner: Manner<'_>,
        group: Range<usize>,
        spans: &Spans,
        regions: &mut Regions<'_>,
    ) {
        if let BlockValues::Int8 { strips, scales } = block.values {
            // SAFETY: passed on.
            return unsafe { self.add_bytes(block, (strips, scales), group, spans, regions) };
        }
        let care = if matches!(manner, Manner::Careful(Some(_))) { Care::Careful } else { Care::Fast };
        let (values, stride) = (block.values, self.geometry.width());
        let [_, native] = self.native();
        if native {
            self.s.round_weights(Group { scores: regions.scores, spans, rows: group.len() });
        }
        if block.fresh && matches!(manner, Manner::Careful(_)) {
            regions.out[group.start * stride..group.end * stride].fill(0.0);
        }
        for window in (0..stride).step_by(self.geometry.pack_cols) {
            let end = self.geometry.value_dim.min(window + self.geometry.pack_cols);
            let in_place = |run: &Run| {
                let whole = end.next_multiple_of(LANES) <= values.readable();
                // More rows share one widened copy.
                let ready = native || matches!(run.rows, Typed::F32(_)) || group.len() <= READING_ROWS;
                care == Care::Fast && run.rows.element() == 1 && whole && ready
            };
            // SAFETY: the values have these columns.
            for run in unsafe { values.runs(window..end) } {
                let rows = if in_place(&run) {
                    run.rows
                } else {
                    // Runs are packed one behind the other.
                    let room = &mut regions.values[(run.first - window) * block.len..];
                    let ready = block.packed_values == Some((window, care));
                    if run.first + run.cols == end {
                        block.packed_values = Some((window, care));
                    }
                    // SAFETY: the run has so many columns for every key of the block.
                    unsafe { self.pack_values(&run, block.len, care, (room, ready)) }
                };
                // SAFETY: the rows are those of the run, in whole vectors.
                unsafe {
                    match manner {
                        Manner::Careful(seen) => {
                            self.add_run_alone(block, (&run, rows), seen, group.clone(), (spans, regions));
                        }
                        _ => self.add_run(block, (&run, rows), manner.ends(), group.clone(), (spans, regions)),
                    }
                }
            }
        }
    }

    /// The same for a run of columns, its rows where they lie or as packed.
    ///
    /// # Safety
    /// As for [`Self::add_values`]; the rows are whole vectors wide.
    #[inline(always)]
    unsafe fn add_run(
        &self,
        block: &mut Block,
        (run, rows): (&Run, AnyRows),
        ends: Option<&GroupEnds>,
        group: Range<usize>,
        (spans, regions): (&Spans, &mut Regions<'_>),
    ) {
        let stride = self.geometry.width();
        let values = Values {
            weights: regions.scores,
            values: (),
            vecs: run.cols.div_ceil(LANES),
            spans,
            rows: group.len(),
            keep: regions.keep,
            join: regions.join,
            fresh: block.fresh,
            out: &mut regions.out[group.start * stride + run.first..],
            out_stride: stride,
            ends: ends.map(|ends| ends.of(run.first..run.first + run.cols)),
            ahead: &mut block.ahead,
        };
        // SAFETY: spans end inside the block; rows that end are this group's.
        unsafe { self.values(values, rows, block.len) }
    }

    /// The same with care, a tile of rows at a time: what the block gives alone, what is not finite of it marked, then taken in.
    ///
    /// # Safety
    /// As for [`Self::add_run`].
    unsafe fn add_run_alone(
        &self,
        block: &mut Block,
        (run, rows): (&Run, AnyRows),
        seen: Option<&Seen>,
        group: Range<usize>,
        (spans, regions): (&Spans, &mut Regions<'_>),
    ) {
        let (stride, width) = (self.geometry.width(), run.cols.next_multiple_of(LANES));
        const { assert!(S::TILE_ROWS <= MAX_TILE_ROWS) };
        let (ones, mut part) = ([1.0; MAX_TILE_ROWS], [0.0; MAX_TILE_ROWS * WINDOW]);
        for (tile, span) in spans.iter().enumerate() {
            let here = tile * S::TILE_ROWS..group.len().min((tile + 1) * S::TILE_ROWS);
            let part = &mut part[..here.len() * width];
            part.fill(0.0);
            let scores = &regions.scores[here.start * SCORE_STRIDE..];
            let values = Values {
                weights: scores,
                values: (),
                vecs: width / LANES,
                spans: core::slice::from_ref(span),
                rows: here.len(),
                keep: &ones,
                join: &ones,
                fresh: false,
                out: part,
                out_stride: width,
                ends: None,
                ahead: &mut block.ahead,
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
                let factors = [&regions.keep[r..=r], &regions.join[r..=r]];
                let out = &mut regions.out[(group.start + r) * stride + run.first..][..width];
                self.s.fold_marked(factors, out, part, width);
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
    unsafe fn pack_values(&self, run: &Run, len: usize, care: Care, (out, ready): (&mut [f32], bool)) -> AnyRows {
        let (size, stride) = ([len, run.cols], run.cols.next_multiple_of(LANES) as isize);
        let [_, native] = self.native();
        // SAFETY: passed on.
        unsafe {
            if native {
                let out = bf16_pairs::as_halves(out);
                if !ready {
                    self.s.round_rows(run.rows, size, care, out);
                }
                Typed::Bf16(Rows::strided(out.as_ptr(), stride, 1))
            } else {
                if !ready {
                    self.s.pack_rows(run.rows, size, care, out);
                }
                Typed::F32(Rows::strided(out.as_ptr(), stride, 1))
            }
        }
    }

    /// The same with values of bytes: their scales go into the weights, which nobody reads afterwards.
    ///
    /// # Safety
    /// As for [`Self::run`]; `group` lies inside the task, and strips and scales are the block's.
    unsafe fn add_bytes(
        &self,
        block: &mut Block,
        (strips, scales): (Strips<i8>, *const [f32]),
        group: Range<usize>,
        spans: &Spans,
        regions: &mut Regions<'_>,
    ) {
        let (stride, rows) = (self.geometry.width(), group.len());
        // SAFETY: the cache outlives the call; its strips are whole vectors.
        unsafe {
            self.s.scale_columns(Group { scores: regions.scores, spans, rows }, &*scales);
            for strip in value_panels::strips(stride) {
                self.s.values_int8(Values {
                    weights: regions.scores,
                    values: strips.from(strip.start),
                    vecs: strip.len() / LANES,
                    spans,
                    rows,
                    keep: regions.keep,
                    join: regions.join,
                    fresh: block.fresh,
                    out: &mut regions.out[group.start * stride + strip.start..],
                    out_stride: stride,
                    ends: None,
                    ahead: &mut block.ahead,
                });
            }
        }
    }
}
