//! Scores of a row block and a run of panels of keys, and the order in which they are computed.

use crate::attention::scratch::SCORE_STRIDE;
use crate::attention::steps::score_passes::AnyColumns;
use crate::attention::steps::span::Span;
use crate::matmul::prefetch::PrefetchQueue;
use crate::matmul::tile_shape::{next_part, next_rows};
use crate::simd::{LANES, Simd};
use crate::tensor::panels::{panel_bits, runs};
use core::hint::black_box;
use core::ops::Range;

/// Scores to compute: those of a row block and a run of packed keys.
pub(crate) struct ScoreRun<'a> {
    /// Number of rows. All tiles of rows are full but the last.
    pub(crate) rows: usize,
    /// Panels of the block that the keys are, at least one.
    pub(crate) panels: Range<usize>,
    /// Keys that each tile of rows needs.
    pub(crate) spans: &'a [Span],
    /// Row of a bias for each query, from the block's first key on: the next pass reads it, and this one prefetches it.
    pub(crate) next_bias: Option<AnyColumns<'a>>,
    /// Memory to prefetch meanwhile.
    pub(crate) prefetch: &'a mut PrefetchQueue,
    /// Scores, `[row][SCORE_STRIDE]`; panels in each tile's span are written, others may be.
    pub(crate) out: &'a mut [f32],
}

/// Neighbouring tiles of rows that need the same neighbouring panels; each tile takes `vecs` of them at a time.
pub(crate) struct Strip {
    pub(crate) tiles: Range<usize>,
    pub(crate) panels: Range<usize>,
    pub(crate) vecs: usize,
}

impl ScoreRun<'_> {
    /// Returns how many panels make a group where tiles take `vecs` at a time and read keys in the order of memory: all of them
    /// if all rows need the same.
    #[inline(always)]
    pub(crate) fn group_in_order(&self, vecs: usize) -> usize {
        if self.spans.windows(2).all(|two| two[0].panels == two[1].panels) { self.panels.len() } else { vecs }
    }

    /// Calls `compute` for each strip of each group of `group` panels, at most `vecs` a tile, leaving out rows that are
    /// [apart](Span::apart). Panels inside the tiles' spans that their rows do not need become zeros: what follows reads whole
    /// spans.
    ///
    /// # Panics
    /// If spans, bias or scores are not those of the rows and panels.
    #[inline(always)]
    pub(crate) fn for_each_strip<S: Simd>(
        &mut self,
        group: usize,
        vecs: usize,
        mut compute: impl FnMut(&mut Self, Strip),
    ) {
        let (rows, spans, all) = (self.rows, self.spans, self.panels.clone());
        assert!(spans.len() == rows.div_ceil(S::TILE_ROWS) && !all.is_empty());
        assert!(self.out.len() >= rows * SCORE_STRIDE && all.end * LANES <= SCORE_STRIDE);
        assert!(self.next_bias.is_none_or(|next| next.len() >= rows));
        for (tile, span) in spans.iter().enumerate() {
            let inside = panel_bits(span.first_panel()..span.end_panel()) & panel_bits(all.clone());
            if inside & !span.panels == 0 && span.apart.is_none() {
                continue;
            }
            for row in 0..S::TILE_ROWS.min(rows - tile * S::TILE_ROWS) {
                for hole in runs(inside & !span.of_row(row).panels) {
                    let scores = &mut self.out[(tile * S::TILE_ROWS + row) * SCORE_STRIDE..];
                    scores[hole.start * LANES..hole.end * LANES].fill(0.0);
                }
            }
        }
        for first in all.clone().step_by(group) {
            let here = panel_bits(first..all.end.min(first + group));
            let needed = |span: &Span| if span.apart.is_some() { 0 } else { span.panels & here };
            let mut tile = 0;
            for alike in spans.chunk_by(|a, b| needed(a) == needed(b)) {
                let tiles = tile..tile + alike.len();
                tile = tiles.end;
                for mut run in runs(needed(&alike[0])) {
                    while !run.is_empty() {
                        let vecs = next_part(run.len(), vecs);
                        let end = if run.len().is_multiple_of(vecs) { run.end } else { run.start + vecs };
                        let panels = core::mem::replace(&mut run.start, end)..end;
                        compute(self, Strip { tiles: tiles.clone(), panels, vecs });
                    }
                }
            }
        }
    }

    /// Calls `tile(rows, panel)` for each tile of a strip, of at most `most` rows and `NV` panels, panel after panel.
    #[inline(always)]
    pub(crate) fn for_each_tile<S: Simd, const NV: usize>(
        &mut self,
        s: S,
        strip: &Strip,
        most: usize,
        mut tile: impl FnMut(Range<usize>, usize),
    ) {
        assert!(strip.panels.len().is_multiple_of(NV), "a strip of another width");
        for panel in strip.panels.clone().step_by(NV) {
            // Tiles of a strip need the same panels, so a register tile may have rows of two.
            let (mut row, end) = (strip.tiles.start * S::TILE_ROWS, self.rows.min(strip.tiles.end * S::TILE_ROWS));
            while row < end {
                let rows = next_rows::<S>(end - row, most);
                self.prefetch_bias(s, row..row + rows, panel..panel + NV);
                // Opaque: otherwise the compiler counts the addresses of every tile shape from tile to tile, in memory.
                let (first_row, panel) = (black_box(row), black_box(panel));
                tile(first_row..first_row + rows, panel);
                self.prefetch.fetch(s);
                row += rows;
            }
        }
    }

    /// Prefetches what some rows' bias has for some panels, if there is one.
    #[inline(always)]
    pub(crate) fn prefetch_bias<S: Simd>(&self, s: S, rows: Range<usize>, panels: Range<usize>) {
        let Some(bias) = self.next_bias else { return };
        for row in rows {
            let (first, bytes) = bias.panels(row);
            for panel in panels.clone() {
                s.prefetch(first.wrapping_add(panel * bytes).cast());
            }
        }
    }
}
