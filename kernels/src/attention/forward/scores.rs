//! The final scores of a group of rows against a block: QKᵀ, the options in their fixed order, −∞ where hidden.
//!
//! Each option is a pass of its own over the score block, made only if asked for. What range rules, masks and mask
//! functions hide is known before anything is computed, as far as whole panels go: a tile computes the hull of what
//! its rows see, a block that nobody sees is skipped, and one that everybody sees wholly is not masked.

use crate::attention::forward::key_block::Block;
use crate::attention::forward::queries::Queries;
use crate::attention::forward::task::{Fused, Row};
use crate::attention::mods::{BlockClass, BlockPosition, MaskMod, Mods, ProbMod, ScoreMod};
use crate::attention::options::Mask;
use crate::attention::outputs::Point;
use crate::attention::steps::by_isa::Steps;
use crate::attention::steps::score_passes::{Columns, Group};
use crate::attention::steps::span::{Hull, SCORE_STRIDE, Span};
use crate::attention::tiling::{MAX_GROUP, Regions};
use crate::simd::LANES;
use crate::tensor::rows::KEY_BLOCK;
use crate::tensor::view::View;
use core::ops::{Deref, Range};

/// What each tile of a group needs of a block. A backend's tile has at least one row.
pub(crate) struct Spans {
    tiles: [Span; MAX_GROUP],
    len: usize,
}

/// A mask, and its rows that belong to a group.
type MaskRows<'a> = (Mask<'a>, &'a [Columns<u8>]);

/// What comes after the scores: the keys each tile needs, and the bias they will meet.
#[derive(Clone, Copy)]
pub(crate) struct After<'a> {
    pub(crate) spans: &'a [Span],
    pub(crate) bias: Option<&'a [Columns<f32>]>,
}

impl Spans {
    /// Of nothing. Copied, not made: that was 3 % of a tiny call.
    pub(crate) const NONE: Self = Self { tiles: [Span::EMPTY; MAX_GROUP], len: 0 };
}

impl Deref for Spans {
    type Target = [Span];
    #[inline]
    fn deref(&self) -> &[Span] {
        &self.tiles[..self.len]
    }
}

impl<S: Steps, A: ScoreMod, B: MaskMod, C: ProbMod> Fused<'_, '_, S, Mods<A, B, C>> {
    /// Leaves the group's final scores in `regions.scores`, and in `spans` what each tile needs of the block. False if nobody
    /// sees anything of it.
    ///
    /// # Safety
    /// As for [`Fused::run`]; `group` lies inside the task.
    pub(crate) unsafe fn prepare(
        &self,
        block: &mut Block,
        queries: Queries<'_>,
        group: Range<usize>,
        spans: &mut Spans,
        regions: &mut Regions<'_>,
    ) -> bool {
        // SAFETY: passed on.
        unsafe {
            let mask = self.call.options.mask.map(|mask| {
                let columns = self.all_columns(&mask.view(), block, group.clone());
                (mask, columns)
            });
            let mask = mask.as_ref().map(|(mask, columns)| (*mask, &columns[..]));
            self.find_spans(block, group.clone(), mask, spans);
            let spans = &*spans;
            if spans.iter().all(|span| span.is_empty()) {
                return false;
            }
            let bias = self.call.options.bias.map(|bias| self.all_columns(&bias, block, group.clone()));
            let bias = bias.as_ref().map(|rows| &rows[..]);
            self.compare(block, queries, group.clone(), After { spans, bias }, regions);
            self.emit(Point::Raw, block, group.clone(), regions.scores);
            if let Some(cap) = self.call.options.softcap {
                let (scores, rows) = (&mut *regions.scores, group.len());
                self.s.softcap(Group { scores, spans, rows }, cap);
            }
            self.emit(Point::Softcapped, block, group.clone(), regions.scores);
            if let Some(columns) = bias {
                let (scores, rows) = (&mut *regions.scores, group.len());
                self.s.bias(Group { scores, spans, rows }, columns);
            }
            self.shift(block, group.clone(), spans, regions.scores);
            self.hide(block, group, (spans, mask), regions.scores);
            true
        }
    }

    /// What each tile of the group needs of the block.
    ///
    /// # Safety
    /// As for [`Self::prepare`].
    unsafe fn find_spans(&self, block: &Block, group: Range<usize>, mask: Option<MaskRows<'_>>, spans: &mut Spans) {
        spans.len = group.len().div_ceil(S::TILE_ROWS);
        let whole = Span::new(0, block.len, false);
        let ruled = self.call.visible.uses_position() || self.call.options.mask.is_some() || B::ACTIVE;
        if !ruled || self.outputs.wants_all_keys() {
            let whole = Span { partial: ruled, ..whole };
            spans.tiles[..spans.len].fill(whole);
            return;
        }
        let mut hulls = [Hull::EMPTY; MAX_GROUP];
        let hulls = &mut hulls[..group.len()];
        for row in self.rows(group.clone()) {
            let keys = self.keys_of(block, row);
            let (from, to) = keys.hull();
            hulls[row.n] = Hull { from, to, all: keys.prefix == 0 };
        }
        if let Some((mask, columns)) = mask {
            // SAFETY: the mask has the group's rows.
            unsafe { self.s.kept(columns, mask, hulls) };
        }
        if B::ACTIVE {
            for (row, hull) in self.rows(group).zip(&mut *hulls) {
                if !hull.is_empty() {
                    *hull = self.narrow(block, row, *hull);
                }
            }
        }
        for (span, hulls) in spans.tiles.iter_mut().zip(hulls.chunks(S::TILE_ROWS)) {
            let seen = hulls.iter().filter(|hull| !hull.is_empty());
            let (lo, hi) = seen.fold((KEY_BLOCK, 0), |(lo, hi), hull| (lo.min(hull.from), hi.max(hull.to)));
            let alike = hulls.iter().all(|hull| hull.all && (hull.from, hull.to) == (lo, hi));
            *span = Span::new(lo, hi, !alike);
        }
    }

    /// Drops panels at both ends of a row's hull that the mask function says it does not see.
    fn narrow(&self, block: &Block, row: Row, hull: Hull) -> Hull {
        let class = |keys: Range<usize>| self.class(block, row, keys);
        match class(hull.from..hull.to) {
            BlockClass::All => hull,
            BlockClass::None => Hull::EMPTY,
            BlockClass::Mixed => {
                let panel = |at: usize| (at / LANES * LANES).max(hull.from)..((at / LANES + 1) * LANES).min(hull.to);
                let (mut from, mut to) = (hull.from, hull.to);
                while from < to && class(panel(from)) == BlockClass::None {
                    from = panel(from).end;
                }
                while from < to && class(panel(to - 1)) == BlockClass::None {
                    to = panel(to - 1).start;
                }
                Hull { from, to, all: false }
            }
        }
    }

    /// What the mask function says of one row and some of the block's keys.
    fn class(&self, block: &Block, row: Row, keys: Range<usize>) -> BlockClass {
        self.mods.mask.class(BlockPosition {
            batch: self.task.index,
            head: row.head,
            rows: row.i..row.i + 1,
            keys: block.first + keys.start..block.first + keys.end,
        })
    }

    /// What the range rules let a row see of the block.
    fn keys_of(&self, block: &Block, row: Row) -> crate::attention::visibility::Keys {
        let position = self.seq.offset.saturating_add_unsigned(row.i);
        self.call.visible.keys(position, self.seq.kv_len).within(block.first, block.len)
    }

    /// A row of a bias or mask, from the block's first key on.
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

    /// The rows of a bias or mask that belong to a group.
    ///
    /// # Safety
    /// The view is as large as the call's bias or mask.
    unsafe fn all_columns<T: Copy>(
        &self,
        view: &View<'_, T>,
        block: &Block,
        group: Range<usize>,
    ) -> [Columns<T>; MAX_GROUP] {
        let mut columns = [Columns::NONE; MAX_GROUP];
        for row in self.rows(group) {
            // SAFETY: the caller's promise.
            columns[row.n] = unsafe { self.columns(view, block, row) };
        }
        columns
    }

    /// ALiBi and the caller's score function.
    fn shift(&self, block: &Block, group: Range<usize>, spans: &[Span], scores: &mut [f32]) {
        let rows = group.len();
        if let Some(slopes) = self.call.options.alibi {
            let mut lines = [(0.0, 0.0); MAX_GROUP];
            for row in self.rows(group.clone()) {
                let position = self.seq.offset.saturating_add_unsigned(row.i).saturating_sub_unsigned(block.first);
                lines[row.n] = (slopes[row.head], position as f32);
            }
            self.s.alibi(Group { scores, spans, rows }, &lines);
        }
        if A::ACTIVE {
            for row in self.rows(group) {
                let keys = spans[row.n / S::TILE_ROWS].keys();
                let scores = &mut scores[row.n * SCORE_STRIDE..][keys.clone()];
                let first = block.first + keys.start;
                self.s.vectorize(
                    #[inline(always)]
                    || {
                        for (j, score) in scores.iter_mut().enumerate() {
                            let new = self.mods.score.score(*score, self.position(row, first + j));
                            // What a bias has hidden stays hidden.
                            *score = if *score == f32::NEG_INFINITY { *score } else { new };
                        }
                    },
                );
            }
        }
    }

    /// Sets the scores of keys that a row does not see, and of the padding behind the last key, to −∞.
    ///
    /// # Safety
    /// As for [`Self::prepare`].
    unsafe fn hide(
        &self,
        block: &Block,
        group: Range<usize>,
        (spans, mask): (&[Span], Option<MaskRows<'_>>),
        scores: &mut [f32],
    ) {
        let rows = group.len();
        if let Some((mask, columns)) = mask {
            let mut mixed = Spans { len: spans.len(), ..Spans::NONE };
            for (to, &span) in mixed.tiles.iter_mut().zip(spans).filter(|(_, span)| span.partial) {
                *to = span;
            }
            // SAFETY: the columns of every row in a span are readable.
            unsafe { self.s.mask(Group { scores, spans: &mixed, rows }, columns, mask) };
        }
        if spans.iter().any(|span| !span.keys().end.is_multiple_of(LANES)) {
            self.s.hide_ends(Group { scores, spans, rows });
        }
        if !spans.iter().any(|span| span.partial) {
            return;
        }
        for row in self.rows(group) {
            let span = spans[row.n / S::TILE_ROWS];
            if !span.partial || span.is_empty() {
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
            if B::ACTIVE {
                self.hide_by_function(block, row, lo..hi, scores);
            }
        }
    }

    /// Asks the mask function, panel by panel, and key by key where it cannot say.
    fn hide_by_function(&self, block: &Block, row: Row, keys: Range<usize>, scores: &mut [f32]) {
        for first in keys.clone().step_by(LANES) {
            let panel = first..keys.end.min(first + LANES);
            match self.class(block, row, panel.clone()) {
                BlockClass::All => {}
                BlockClass::None => scores[panel].fill(f32::NEG_INFINITY),
                BlockClass::Mixed => {
                    for j in panel {
                        if !self.mods.mask.keep(self.position(row, block.first + j)) {
                            scores[j] = f32::NEG_INFINITY;
                        }
                    }
                }
            }
        }
    }
}
