//! Final scores of a row block against a key block: QKᵀ, the options in their fixed order, −∞ where hidden.
//!
//! Each option is a separate pass over the score block, made only if it is set. The whole panels that range rules,
//! masks and mask functions hide are known before anything is computed: a tile computes the span of keys that are
//! visible to its rows, if rows are many without the panels inside it that are not. A block without a visible key is
//! skipped, and a block with all keys visible to all rows is not masked.

use crate::attention::blocks::key_block::KeyBlock;
use crate::attention::blocks::key_numbers::KeyColumns;
use crate::attention::blocks::task::Row;
use crate::attention::call::mods::{BlockClass, BlockPosition};
use crate::attention::call::options::{Covered, Mask};
use crate::attention::call::outputs::Point;
use crate::attention::call::row_mods::PanelClasses;
use crate::attention::call::visibility::VisibleKeys;
use crate::attention::products::by_arithmetic;
use crate::attention::scratch::{MAX_ROW_BLOCK, SCORE_STRIDE};
use crate::attention::steps::dropout;
use crate::attention::steps::mask_passes;
use crate::attention::steps::score_passes::{self, Columns, ScoreBlock};
use crate::attention::steps::span::{MAX_SPAN_ROWS, RowKeys, Span, Spans, union};
use crate::kv::key_block::Keys;
use crate::matmul::e4m3;
use crate::matmul::pack::NonFinite;
use crate::matmul::prefetch::MEMORY_BOUND_ROWS;
use crate::simd::{LANES, Simd, quiet};
use crate::tensor::any::{Tensor, Typed};
use crate::tensor::rows::KEY_BLOCK;
use crate::tensor::view::View;
use core::ops::Range;

/// Mask, and the mask's rows that belong to a row block.
type MaskRows<'a> = (Mask<'a>, &'a [Columns<u8>]);

impl<S: Simd> KeyBlock<'_, '_, S> {
    /// Computes the row block's final scores into `regions.scores`, and the keys each tile needs into `spans`. Returns
    /// false if no key of the block is visible to any row.
    pub(crate) fn compute_scores(&mut self, row_block: Range<usize>) -> bool {
        let (options, rows) = (&self.task.call.options, row_block.len());
        let mask = options.mask.map(|Covered { of, cover }| {
            // SAFETY: the call's mask; `CheckedCall` has checked its sizes.
            (of, unsafe { self.all_columns(Covered { of: &of.view(), cover }, row_block.clone()) })
        });
        let mask = mask.as_ref().map(|(mask, columns)| (*mask, &columns[..]));
        // SAFETY: the columns are rows of the mask, just taken.
        unsafe { self.find_spans(row_block.clone(), mask) };
        if self.spans.iter().all(|span| span.is_empty()) {
            return false;
        }
        let bias = options.bias.map(|Covered { of, cover }| {
            by_type!(Tensor => Typed, of, |bias| {
                // SAFETY: the call's bias; `CheckedCall` has checked its sizes.
                unsafe { self.all_columns(Covered { of: &bias, cover }, row_block.clone()) }
            })
        });
        let bias = bias.as_ref().map(|rows| by_type!(Typed => Typed, rows, |rows| &rows[..]));
        by_arithmetic!(S: self.task.products.keys, |A| self.compute_qk::<A>(row_block.clone(), bias));
        if let Keys::E4m3 { scales, .. } = self.keys {
            // SAFETY: the scales are the block's.
            let scales = unsafe { &*scales };
            score_passes::scale_columns(self.task.s, self.scores(rows), scales, e4m3::FROM_HALF, NonFinite::Ignored);
        }
        self.exact_scores(row_block.clone());
        self.write_scores(Point::Raw, row_block.clone());
        if let Some(cap) = options.softcap {
            let block = ScoreBlock { scores: self.regions.scores, spans: self.spans, rows };
            score_passes::softcap(self.task.s, block, cap, self.copies.derivatives.as_deref_mut());
        }
        self.write_scores(Point::Softcapped, row_block.clone());
        if let Some(columns) = bias {
            // SAFETY: the columns are rows of the bias, taken above.
            unsafe { score_passes::bias(self.task.s, self.scores(rows), columns) };
        }
        self.add_alibi_and_score_function(row_block.clone());
        // SAFETY: the columns are rows of the mask, taken above.
        unsafe { self.apply_mask(row_block, mask) };
        true
    }

    /// Drops weights of a row block at random, if the call asks for it.
    pub(crate) fn drop_weights(&mut self, row_block: Range<usize>) {
        let (s, rows) = (self.task.s, row_block.len());
        let numbers = self.numbers.listed.map(|listed| listed.numbers);
        if let Some(kept) = self.task.draw_kept(row_block, self.spans, self.first, numbers) {
            dropout::drop_weights(s, self.scores(rows), &kept);
        }
    }

    /// Returns the scores of a row block of `rows` rows, and the keys each tile needs.
    #[inline(always)]
    pub(crate) fn scores(&mut self, rows: usize) -> ScoreBlock<'_> {
        ScoreBlock { scores: self.regions.scores, spans: self.spans, rows }
    }

    /// Finds the keys of the block that each tile of the row block needs.
    ///
    /// # Safety
    /// The mask's rows are readable.
    unsafe fn find_spans(&mut self, row_block: Range<usize>, mask: Option<MaskRows<'_>>) {
        let task = self.task;
        let (rows, tile_rows) = (row_block.len(), task.products.tile_rows::<S>());
        let whole = Span::new(0, self.len, false);
        let ruled = task.call.visible.hides_keys() || task.call.options.mask.is_some() || task.given.mask;
        if !ruled || task.outputs.wants_all_keys() {
            self.spans.of_rows(rows, tile_rows).fill(Span { needs_mask: ruled, ..whole });
            if task.given.mask {
                self.classes[..row_block.len()].fill(PanelClasses::MIXED);
            }
            return;
        }
        if mask.is_none() && !task.given.mask {
            if task.shows_all(self.first..self.first + self.len) {
                self.spans.of_rows(rows, tile_rows).fill(whole);
                return;
            }
            let (tiles, mut first) = (self.spans.of_rows(rows, tile_rows).len(), row_block.start);
            for tile in 0..tiles {
                let of_tile = first..row_block.end.min(first + tile_rows);
                first = of_tile.end;
                self.spans.set(tile, self.span_by_rules(of_tile));
            }
            return;
        }
        // Few rows have loops that do not take rows apart.
        let may_be_apart = task.products.takes_rows_apart() && rows > MEMORY_BOUND_ROWS;
        let mut ranges = [RowKeys::EMPTY; MAX_ROW_BLOCK];
        let ranges = self.visible_ranges(row_block.clone(), &mut ranges);
        if let Some((mask, columns)) = mask {
            // SAFETY: the caller guarantees readable rows.
            unsafe { mask_passes::narrow_by_mask(task.s, columns, mask, ranges) };
        }
        if task.given.mask {
            for (first, len) in task.stretches(row_block) {
                self.narrow_rows(first, &mut ranges[first.n..first.n + len]);
            }
        }
        for (span, ranges) in self.spans.of_rows(rows, tile_rows).iter_mut().zip(ranges.chunks(tile_rows)) {
            *span = Span::of_rows(ranges);
            if may_be_apart {
                *span = span.apart_if_faster(ranges);
            }
        }
    }

    /// Returns the keys of the block that the range rules make visible to some rows of a tile.
    fn span_by_rules(&self, rows: Range<usize>) -> Span {
        let (task, call) = (self.task, self.task.call);
        if let Some((first, of_head)) = task.stretches(rows.clone()).next()
            && of_head == rows.len()
            && call.visible.is_one_range()
            && call.options.own_positions().is_none()
            && task.list.is_none()
        {
            let positions = [first, first.after(of_head - 1)].map(|row| task.row_position(row.i));
            let (keys, all) = call.visible.seen_in(positions, task.seq.kv_len, self.first..self.first + self.len);
            return Span::new(keys.start, keys.end, !all);
        }
        Span::of_rows(self.visible_ranges(rows, &mut [RowKeys::EMPTY; MAX_SPAN_ROWS]))
    }

    /// Writes the keys of the block that the range rules make visible to each of some rows of the task, and returns them.
    fn visible_ranges<'a>(&self, rows: Range<usize>, ranges: &'a mut [RowKeys]) -> &'a mut [RowKeys] {
        let ranges = &mut ranges[..rows.len()];
        if let Some(positions) = self.numbers.positions.filter(|_| self.task.sees_by_positions()) {
            for row in self.task.rows(rows) {
                let seen = self.task.seen_positions(row.i).expect("the rules are by positions");
                ranges[row.n] = mask_passes::keys_at(self.task.s, positions, seen);
            }
            return ranges;
        }
        if !self.task.call.visible.hides_keys() {
            ranges.fill(RowKeys::new(0, self.len, true));
            return ranges;
        }
        for row in self.task.rows(rows) {
            let keys = self.visible_to(row);
            let (from, to) = keys.key_range();
            ranges[row.n] = RowKeys::new(from, to, keys.prefix == 0);
        }
        ranges
    }

    /// Narrows the ranges of consecutive rows of a head by the mask function, first all together, then row by row, and
    /// keeps the classes it gives.
    fn narrow_rows(&mut self, first: Row, ranges: &mut [RowKeys]) {
        let ((lo, hi), mods) = (union(ranges), self.task.mods);
        let together = ranges.len() > 1 && lo < hi && self.numbers.listed.is_none();
        let all = match together.then(|| mods.class(self.position(first, ranges.len(), lo..hi))) {
            Some(BlockClass::All) => Some(PanelClasses::ALL),
            Some(BlockClass::None) => Some(PanelClasses::NONE),
            Some(BlockClass::Mixed) | None => None,
        };
        for (k, range) in ranges.iter_mut().enumerate() {
            let row = first.after(k);
            let classes = all.unwrap_or_else(|| match range.is_empty() {
                true => PanelClasses::NONE,
                false => mods.classes(self.numbers.run(self.task, row, range.from), range.to - range.from),
            });
            self.classes[row.n] = classes;
            *range = range.narrowed(classes);
        }
    }

    /// Returns the position of some rows of a head, from `row` on, and some of the block's keys.
    fn position(&self, row: Row, rows: usize, keys: Range<usize>) -> BlockPosition {
        BlockPosition {
            batch: self.task.set.sequence,
            head: row.head,
            rows: row.i..row.i + rows,
            keys: self.numbers.number(keys.start)..self.numbers.number(keys.end - 1) + 1,
            position: self.task.seq.offset.saturating_add_unsigned(row.i),
        }
    }

    /// Returns the keys of the block that the range rules make visible to a row, where keys are at their own indices.
    #[inline(always)]
    fn visible_to(&self, row: Row) -> VisibleKeys {
        let position = self.task.row_position(row.i);
        self.task.call.visible.keys(position, self.task.seq.kv_len).within(self.first, self.len)
    }

    /// Returns the rows of a bias or mask that belong to a row block, from the block's first key on.
    ///
    /// # Safety
    /// The view is as large as the call's bias or mask.
    unsafe fn all_columns<T: Copy>(
        &self,
        Covered { of, cover }: Covered<&View<'_, T>>,
        row_block: Range<usize>,
    ) -> [Columns<T>; MAX_ROW_BLOCK] {
        let (task, [batch, heads, _, width]) = (self.task, of.shape());
        let first_key = cover.first_key(width, task.seq.kv_len);
        let KeyColumns { before, len, first: column, numbers } = self.numbers.columns(first_key, width);
        let mut columns = [Columns { before, len, ..Columns::NONE }; MAX_ROW_BLOCK];
        if column >= width {
            return columns;
        }
        let (sequence, by_kv_head) = (task.set.sequence % batch, heads != task.call.q.shape()[1]);
        for row in task.rows(row_block) {
            let head = if by_kv_head { task.set.kv_head } else { row.head };
            // SAFETY: the caller guarantees a view that `CheckedCall` has checked: it has a row for each query row of each
            // query or key/value head, of each sequence or those of a period; and `column` is one of its columns.
            columns[row.n] = unsafe {
                let (first, element) = of.row(sequence, head, row.i);
                Columns { first: first.offset(column as isize * element), element, before, len, numbers }
            };
        }
        columns
    }

    /// Adds ALiBi to the scores, and applies the caller's score function.
    fn add_alibi_and_score_function(&mut self, row_block: Range<usize>) {
        let task = self.task;
        if let Some(slopes) = task.call.options.alibi {
            match self.numbers.positions {
                None => {
                    let mut lines = [(0.0, 0.0); MAX_ROW_BLOCK];
                    for row in task.rows(row_block.clone()) {
                        let position = task.row_position(row.i).saturating_sub_unsigned(self.first);
                        lines[row.n] = (slopes[row.head], position as f32);
                    }
                    score_passes::alibi(task.s, self.scores(row_block.len()), &lines);
                }
                Some(positions) => {
                    let mut lines = [(0.0, 0); MAX_ROW_BLOCK];
                    for row in task.rows(row_block.clone()) {
                        lines[row.n] = (slopes[row.head], task.row_position(row.i) as i64);
                    }
                    let mut of_block = [0; KEY_BLOCK];
                    of_block[..self.len].copy_from_slice(positions);
                    score_passes::alibi_at(task.s, self.scores(row_block.len()), &lines, &of_block);
                }
            }
        }
        if task.given.score {
            copy_scores(&mut self.copies.biased, self.regions.scores, row_block.len());
            for row in task.rows(row_block) {
                let keys = self.spans.of_row(row.n).keys();
                let run = self.numbers.run(task, row, keys.start);
                task.mods.apply_score(task.s, run, &mut self.regions.scores[row.n * SCORE_STRIDE..][keys]);
            }
        }
    }

    /// Sets the scores of keys hidden from a row, and of the padding after the last key, to −∞.
    ///
    /// # Safety
    /// The mask's rows are readable.
    unsafe fn apply_mask(&mut self, row_block: Range<usize>, mask: Option<MaskRows<'_>>) {
        let (task, rows) = (self.task, row_block.len());
        if let Some((mask, columns)) = mask {
            let mut mixed = Spans::NONE;
            for (to, &span) in mixed.of_rows(rows, self.spans.tile_rows()).iter_mut().zip(&**self.spans) {
                *to = if span.needs_mask { span } else { Span::EMPTY };
            }
            let block = ScoreBlock { scores: self.regions.scores, spans: &mixed, rows };
            // SAFETY: the caller guarantees readable rows.
            unsafe { mask_passes::mask(task.s, block, columns, mask) };
        }
        if self.spans.iter().any(|span| !span.keys().end.is_multiple_of(LANES)) {
            mask_passes::mask_padding(task.s, self.scores(rows));
        }
        if !self.spans.iter().any(|span| span.needs_mask) {
            return;
        }
        for row in task.rows(row_block) {
            let span = self.spans.of_row(row.n);
            if !span.needs_mask || span.is_empty() {
                continue;
            }
            let (lo, hi) = (span.keys().start, span.keys().end);
            self.hide_by_rules(row, lo..hi);
            if task.given.mask {
                let run = self.numbers.run(task, row, lo);
                let scores = &mut self.regions.scores[row.n * SCORE_STRIDE..][lo..hi];
                task.mods.apply_mask(task.s, run, self.classes[row.n], scores);
            }
        }
    }

    /// Sets the scores of keys of the block that the range rules hide from a row to −∞.
    fn hide_by_rules(&mut self, row: Row, of: Range<usize>) {
        let (lo, hi) = (of.start, of.end);
        let at = row.n * SCORE_STRIDE..row.n * SCORE_STRIDE + hi;
        if let Some(seen) = self.task.seen_positions(row.i) {
            let positions = self.numbers.positions.unwrap_or_default();
            let scores = &mut self.regions.scores[at][lo..];
            return mask_passes::hide_at(self.task.s, &positions[lo..hi], seen, scores);
        }
        if !self.task.call.visible.hides_keys() {
            return;
        }
        let keys = self.visible_to(row);
        let scores = &mut self.regions.scores[at];
        let (prefix, start) = (keys.prefix.clamp(lo, hi), keys.start.clamp(lo, hi));
        if prefix < start {
            scores[prefix..start].fill(f32::NEG_INFINITY);
        }
        scores[keys.end.clamp(start, hi)..hi].fill(f32::NEG_INFINITY);
    }

    /// Writes out the row block's scores of the key block, if there is an output for this point.
    pub(crate) fn write_scores(&self, point: Point, row_block: Range<usize>) {
        let task = self.task;
        let Some(view) = task.outputs.point(point) else { return };
        for row in task.rows(row_block) {
            let scores = &self.regions.scores[row.n * SCORE_STRIDE..][..self.len];
            // SAFETY: the task's rows are inside the view, with every key of the sequence, and are this worker's alone.
            unsafe {
                let (first, element) = view.row(task.set.sequence, row.head, row.i);
                for (j, &score) in scores.iter().enumerate() {
                    *first.offset(self.numbers.number(j) as isize * element) = quiet(score);
                }
            }
        }
    }
}

/// Copies the scores of `rows` rows, if there is memory for a copy.
fn copy_scores(copy: &mut Option<&mut [f32]>, scores: &[f32], rows: usize) {
    if let Some(copy) = copy {
        copy[..rows * SCORE_STRIDE].copy_from_slice(&scores[..rows * SCORE_STRIDE]);
    }
}
