//! Final scores of a row block against a key block: QKᵀ, the options in their fixed order, −∞ where hidden.
//!
//! Each option is a separate pass over the score block, made only if it is set. The whole panels that range rules,
//! masks and mask functions hide are known before anything is computed: a tile computes the span of keys that are
//! visible to its rows, a block without a visible key is skipped, and one whose keys are all visible to all rows is not
//! masked.

use crate::attention::forward::key_block::Block;
use crate::attention::forward::queries::Queries;
use crate::attention::forward::task::{AttentionTask, Row};
use crate::attention::mods::{BlockClass, BlockPosition};
use crate::attention::options::Mask;
use crate::attention::outputs::Point;
use crate::attention::steps::by_isa::Steps;
use crate::attention::steps::score_passes::{Columns, ScoreBlock};
use crate::attention::steps::span::{KeyRange, SCORE_STRIDE, Span};
use crate::attention::tiling::{MAX_ROW_BLOCK, Regions};
use crate::simd::LANES;
use crate::tensor::rows::KEY_BLOCK;
use crate::tensor::view::View;
use core::ops::{Deref, Range};

/// Spans: the keys of a block that each tile of a row block needs. A backend's tile has at least one row.
pub(crate) struct Spans {
    tiles: [Span; MAX_ROW_BLOCK],
    len: usize,
}

/// Mask, and the mask's rows that belong to a row block.
type MaskRows<'a> = (Mask<'a>, &'a [Columns<u8>]);

/// Further inputs of QKᵀ: the keys each tile needs, and the bias that the next pass adds.
#[derive(Clone, Copy)]
pub(crate) struct After<'a> {
    pub(crate) spans: &'a [Span],
    pub(crate) bias: Option<&'a [Columns<f32>]>,
}

impl Spans {
    /// No spans. A constant to copy: constructing it was 3 % of a tiny call.
    pub(crate) const NONE: Self = Self { tiles: [Span::EMPTY; MAX_ROW_BLOCK], len: 0 };
}

impl Deref for Spans {
    type Target = [Span];
    #[inline]
    fn deref(&self) -> &[Span] {
        &self.tiles[..self.len]
    }
}

impl<S: Steps> AttentionTask<'_, '_, S> {
    /// Computes the row block's final scores into `regions.scores`, and the keys each tile needs into `spans`. Returns
    /// false if no key of the block is visible to any row.
    ///
    /// # Safety
    /// Same contract as [`AttentionTask::run`]; `row_block` lies inside the task.
    pub(crate) unsafe fn compute_scores(
        &self,
        block: &mut Block,
        queries: Queries<'_>,
        row_block: Range<usize>,
        spans: &mut Spans,
        regions: &mut Regions<'_>,
    ) -> bool {
        // SAFETY: the caller guarantees the contract of `run` and a row block inside the task; bias and mask are the
        // call's.
        unsafe {
            let mask = self.call.options.mask.map(|mask| {
                let columns = self.all_columns(&mask.view(), block, row_block.clone());
                (mask, columns)
            });
            let mask = mask.as_ref().map(|(mask, columns)| (*mask, &columns[..]));
            self.find_spans(block, row_block.clone(), mask, spans);
            let spans = &*spans;
            if spans.iter().all(|span| span.is_empty()) {
                return false;
            }
            let bias = self.call.options.bias.map(|bias| self.all_columns(&bias, block, row_block.clone()));
            let bias = bias.as_ref().map(|rows| &rows[..]);
            self.compute_qk(block, queries, row_block.clone(), After { spans, bias }, regions);
            self.write_scores(Point::Raw, block, row_block.clone(), regions.scores);
            if let Some(cap) = self.call.options.softcap {
                let (scores, rows) = (&mut *regions.scores, row_block.len());
                self.s.softcap(ScoreBlock { scores, spans, rows }, cap);
            }
            self.write_scores(Point::Softcapped, block, row_block.clone(), regions.scores);
            if let Some(columns) = bias {
                let (scores, rows) = (&mut *regions.scores, row_block.len());
                self.s.bias(ScoreBlock { scores, spans, rows }, columns);
            }
            self.add_positional_terms(block, row_block.clone(), spans, regions.scores);
            self.apply_mask(block, row_block, spans, mask, regions.scores);
            true
        }
    }

    /// Finds the keys of the block that each tile of the row block needs.
    ///
    /// # Safety
    /// Same contract as [`Self::compute_scores`].
    unsafe fn find_spans(&self, block: &Block, row_block: Range<usize>, mask: Option<MaskRows<'_>>, spans: &mut Spans) {
        spans.len = row_block.len().div_ceil(S::TILE_ROWS);
        let whole = Span::new(0, block.len, false);
        let ruled = self.call.visible.uses_position() || self.call.options.mask.is_some() || self.given.mask;
        if !ruled || self.outputs.wants_all_keys() {
            let whole = Span { needs_mask: ruled, ..whole };
            spans.tiles[..spans.len].fill(whole);
            return;
        }
        let mut ranges = [KeyRange::EMPTY; MAX_ROW_BLOCK];
        let ranges = &mut ranges[..row_block.len()];
        for row in self.rows(row_block.clone()) {
            let keys = self.keys_of(block, row);
            let (from, to) = keys.key_range();
            ranges[row.n] = KeyRange { from, to, all: keys.prefix == 0 };
        }
        if let Some((mask, columns)) = mask {
            // SAFETY: the mask has the row block's rows.
            unsafe { self.s.narrow_by_mask(columns, mask, ranges) };
        }
        if self.given.mask {
            for (row, range) in self.rows(row_block).zip(&mut *ranges) {
                if !range.is_empty() {
                    *range = self.narrow(block, row, *range);
                }
            }
        }
        for (span, ranges) in spans.tiles.iter_mut().zip(ranges.chunks(S::TILE_ROWS)) {
            let seen = ranges.iter().filter(|range| !range.is_empty());
            let (lo, hi) = seen.fold((KEY_BLOCK, 0), |(lo, hi), range| (lo.min(range.from), hi.max(range.to)));
            let alike = ranges.iter().all(|range| range.all && (range.from, range.to) == (lo, hi));
            *span = Span::new(lo, hi, !alike);
        }
    }

    /// Drops panels at both ends of a row's range that the mask function says are hidden.
    fn narrow(&self, block: &Block, row: Row, range: KeyRange) -> KeyRange {
        let class = |keys: Range<usize>| self.class(block, row, keys);
        match class(range.from..range.to) {
            BlockClass::All => range,
            BlockClass::None => KeyRange::EMPTY,
            BlockClass::Mixed => {
                let panel = |at: usize| (at / LANES * LANES).max(range.from)..((at / LANES + 1) * LANES).min(range.to);
                let (mut from, mut to) = (range.from, range.to);
                while from < to && class(panel(from)) == BlockClass::None {
                    from = panel(from).end;
                }
                while from < to && class(panel(to - 1)) == BlockClass::None {
                    to = panel(to - 1).start;
                }
                KeyRange { from, to, all: false }
            }
        }
    }

    /// Returns the mask function's class of one row and some of the block's keys.
    fn class(&self, block: &Block, row: Row, keys: Range<usize>) -> BlockClass {
        self.mods.class(BlockPosition {
            batch: self.task.index,
            head: row.head,
            rows: row.i..row.i + 1,
            keys: block.first + keys.start..block.first + keys.end,
        })
    }

    /// Returns the keys of the block that the range rules make visible to a row.
    fn keys_of(&self, block: &Block, row: Row) -> crate::attention::visibility::Keys {
        let position = self.seq.offset.saturating_add_unsigned(row.i);
        self.call.visible.keys(position, self.seq.kv_len).within(block.first, block.len)
    }

    /// Returns a row of a bias or mask, from the block's first key on.
    ///
    /// # Safety
    /// The view is as large as the call's bias or mask.
    unsafe fn columns<T: Copy>(&self, view: &View<'_, T>, block: &Block, row: Row) -> Columns<T> {
        let len = view.shape()[3].saturating_sub(block.first);
        if len == 0 {
            return Columns::NONE;
        }
        // SAFETY: the row is inside the view, and its column `block.first` exists.
        unsafe {
            let (first, element) = view.row(self.task.index, row.head, row.i);
            Columns { first: first.offset(block.first as isize * element), element, len }
        }
    }

    /// Returns the rows of a bias or mask that belong to a row block.
    ///
    /// # Safety
    /// The view is as large as the call's bias or mask.
    unsafe fn all_columns<T: Copy>(
        &self,
        view: &View<'_, T>,
        block: &Block,
        row_block: Range<usize>,
    ) -> [Columns<T>; MAX_ROW_BLOCK] {
        let mut columns = [Columns::NONE; MAX_ROW_BLOCK];
        for row in self.rows(row_block) {
            // SAFETY: the caller guarantees that the view is as large as the call's bias or mask.
            columns[row.n] = unsafe { self.columns(view, block, row) };
        }
        columns
    }

    /// Adds ALiBi to the scores, and applies the caller's score function.
    fn add_positional_terms(&self, block: &Block, row_block: Range<usize>, spans: &[Span], scores: &mut [f32]) {
        let rows = row_block.len();
        if let Some(slopes) = self.call.options.alibi {
            let mut lines = [(0.0, 0.0); MAX_ROW_BLOCK];
            for row in self.rows(row_block.clone()) {
                let position = self.seq.offset.saturating_add_unsigned(row.i).saturating_sub_unsigned(block.first);
                lines[row.n] = (slopes[row.head], position as f32);
            }
            self.s.alibi(ScoreBlock { scores, spans, rows }, &lines);
        }
        if self.given.score {
            for row in self.rows(row_block) {
                let keys = spans[row.n / S::TILE_ROWS].keys();
                let first = self.position(row, block.first + keys.start);
                self.mods.apply_score(self.s, first, &mut scores[row.n * SCORE_STRIDE..][keys]);
            }
        }
    }

    /// Sets the scores of keys hidden from a row, and of the padding after the last key, to −∞.
    ///
    /// # Safety
    /// Same contract as [`Self::compute_scores`].
    unsafe fn apply_mask(
        &self,
        block: &Block,
        row_block: Range<usize>,
        spans: &[Span],
        mask: Option<MaskRows<'_>>,
        scores: &mut [f32],
    ) {
        let rows = row_block.len();
        if let Some((mask, columns)) = mask {
            let mut mixed = Spans { len: spans.len(), ..Spans::NONE };
            for (to, &span) in mixed.tiles.iter_mut().zip(spans).filter(|(_, span)| span.needs_mask) {
                *to = span;
            }
            // SAFETY: the columns of every row in a span are readable.
            unsafe { self.s.mask(ScoreBlock { scores, spans: &mixed, rows }, columns, mask) };
        }
        if spans.iter().any(|span| !span.keys().end.is_multiple_of(LANES)) {
            self.s.mask_padding(ScoreBlock { scores, spans, rows });
        }
        if !spans.iter().any(|span| span.needs_mask) {
            return;
        }
        for row in self.rows(row_block) {
            let span = spans[row.n / S::TILE_ROWS];
            if !span.needs_mask || span.is_empty() {
                continue;
            }
            let (lo, hi) = (span.keys().start, span.keys().end);
            let scores = &mut scores[row.n * SCORE_STRIDE..][..hi];
            let keys = self.keys_of(block, row);
            let (prefix, start) = (keys.prefix.clamp(lo, hi), keys.start.clamp(lo, hi));
            if prefix < start {
                scores[prefix..start].fill(f32::NEG_INFINITY);
            }
            scores[keys.end.clamp(start, hi)..hi].fill(f32::NEG_INFINITY);
            if self.given.mask {
                self.mods.apply_mask(self.s, self.position(row, block.first + lo), &mut scores[lo..]);
            }
        }
    }
}
