//! The fused loop: one pass over the keys, one block at a time, for the rows of one task.
//!
//! ```text
//! (max, sum, out) ← (−∞, 0, 0) for every row
//! for each block of 256 keys:
//!     pack its keys                                    once, for all rows
//!     for each group of up to 96 rows:
//!         S ← scale · Q Kᵀ                             scores
//!         S ← −∞ where the row does not see the key
//!         P ← exp(S − rowmax S)                        softmax; also takes (rowmax S, Σ P) into (max, sum)
//!         out ← keep · out + join · P V                values
//! out ← out / sum;  lse ← max + ln sum                 finish
//! ```
//! (Dao, Fu, Ermon, Rudra and Ré 2022, arXiv:2205.14135.) Nothing grows with the number of keys.

use crate::block::{KEY_BLOCK, SCORE_STRIDE, Span};
use crate::finish::{Finish, RowEnd};
use crate::geometry::{Geometry, MAX_GROUP, Regions};
use crate::launch::{Call, Outputs, Sequence, Task};
use crate::pack::{Rows, pack_rows};
use crate::scores::Scores;
use crate::simd::LANES;
use crate::softmax;
use crate::steps::Steps;
use crate::values::{ValueRows, Values};
use crate::visible::Keys;
use core::ops::Range;

/// Most tiles of a group: a backend's tile has at least one row.
const MAX_TILES: usize = MAX_GROUP;

/// Runs one task.
///
/// # Safety
/// The call is consistent, `task` lies inside it, `regions` were cut for `geometry`, and nobody else writes the
/// task's rows of the outputs.
pub(crate) unsafe fn run<S: Steps>(
    s: S,
    call: &Call<'_>,
    outputs: &Outputs<'_>,
    task: Task,
    regions: Regions<'_>,
    geometry: &Geometry,
) {
    let loop_ = Fused { s, call, seq: call.sequence(task.batch), task, geometry };
    // SAFETY: passed on.
    unsafe { loop_.run(outputs, regions) }
}

struct Fused<'a, 'c, S> {
    s: S,
    call: &'a Call<'c>,
    seq: Sequence,
    task: Task,
    geometry: &'a Geometry,
}

/// The key block at hand.
struct Block {
    first: usize,
    len: usize,
    keys: Rows,
    values: Rows,
    /// Which packed run is in the scratch, if any: keys by first key, values by first column.
    packed_keys: Option<usize>,
    packed_values: Option<(usize, Clean)>,
    /// Whether all its values are finite, once somebody had to know.
    finite: Option<bool>,
}

/// Whether packed values had what is not finite replaced by zero.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Clean {
    No,
    Yes,
}

impl<S: Steps> Fused<'_, '_, S> {
    /// # Safety
    /// As for [`run`].
    unsafe fn run(&self, outputs: &Outputs<'_>, mut regions: Regions<'_>) {
        let rows = self.task.rows.len();
        regions.max.fill(f32::NEG_INFINITY);
        regions.sum.fill(0.0);
        regions.out[..rows * self.geometry.width()].fill(0.0);
        let group_rows = self.geometry.group_rows;
        // SAFETY: passed on; every group lies inside the task.
        unsafe {
            let queries = self.queries(&mut regions);
            for first in (0..self.seq.kv_len).step_by(KEY_BLOCK) {
                let mut block = self.block(first);
                for group in (0..rows).step_by(group_rows) {
                    self.group(&mut block, queries, group..rows.min(group + group_rows), &mut regions);
                }
            }
            for group in (0..rows).step_by(group_rows) {
                self.finish(group..rows.min(group + group_rows), outputs, &regions);
            }
        }
    }

    /// The head and row of the sequence that row `r` of the task is.
    fn row(&self, r: usize) -> (usize, usize) {
        let r = self.task.rows.start + r;
        (self.task.kv_head * self.call.sharing() + r / self.seq.q_len, r % self.seq.q_len)
    }

    /// The keys that row `r` of the task sees.
    fn keys_of(&self, r: usize) -> Keys {
        let (_, i) = self.row(r);
        self.call.visible.keys(self.seq.offset.saturating_add_unsigned(i), self.seq.kv_len)
    }

    /// Copies the task's queries if they are not contiguous, and says where the rows are.
    ///
    /// # Safety
    /// As for [`run`].
    unsafe fn queries(&self, regions: &mut Regions<'_>) -> Queries {
        if self.call.q.strides()[3] == 1 || self.geometry.head_dim <= 1 {
            return Queries::InPlace;
        }
        let d = self.geometry.head_dim;
        for (r, copy) in regions.queries.chunks_exact_mut(d).take(self.task.rows.len()).enumerate() {
            let (h, i) = self.row(r);
            // SAFETY: the row is inside the call's queries.
            let (first, element) = unsafe { self.call.q.row(self.task.batch, h, i) };
            for (n, x) in copy.iter_mut().enumerate() {
                // SAFETY: element `n < head_dim`.
                *x = unsafe { *first.offset(n as isize * element) };
            }
        }
        Queries::Copied(regions.queries.as_ptr())
    }

    /// The block of keys that starts at `first`.
    ///
    /// # Safety
    /// As for [`run`]; `first < kv_len`.
    unsafe fn block(&self, first: usize) -> Block {
        let (b, h) = (self.task.batch, self.task.kv_head);
        // SAFETY: key `first` exists.
        let ((k, k_element), (v, v_element)) = unsafe { (self.call.k.row(b, h, first), self.call.v.row(b, h, first)) };
        Block {
            first,
            len: KEY_BLOCK.min(self.seq.kv_len - first),
            keys: Rows { first: k, row: self.call.k.strides()[2], element: k_element },
            values: Rows { first: v, row: self.call.v.strides()[2], element: v_element },
            packed_keys: None,
            packed_values: None,
            finite: None,
        }
    }

    /// One group of rows against one block.
    ///
    /// # Safety
    /// As for [`run`]; `group` lies inside the task.
    unsafe fn group(&self, block: &mut Block, queries: Queries, group: Range<usize>, regions: &mut Regions<'_>) {
        let mut spans = [Span::default(); MAX_TILES];
        let tiles = group.len().div_ceil(S::TILE_ROWS);
        let spans = &mut spans[..tiles];
        self.spans(block, group.clone(), spans);
        if spans.iter().all(|span| span.is_empty()) {
            return;
        }
        // SAFETY: passed on.
        unsafe { self.scores(block, queries, group.clone(), spans, regions) };
        self.hide(block, group.clone(), spans, regions.scores);
        // SAFETY: passed on.
        let poisoned = unsafe { self.poisoned(block, spans) };
        let seen = poisoned.then(|| Seen::new(S::TILE_ROWS, spans, group.len(), regions.scores));
        let width = self.geometry.width();
        let state = softmax::Rows {
            max: &mut regions.max[group.start..],
            sum: &mut regions.sum[group.start..],
            keep: regions.keep,
            join: regions.join,
        };
        self.s.softmax(regions.scores, spans, group.len(), state);
        // SAFETY: passed on.
        unsafe {
            let clean = if poisoned { Clean::Yes } else { Clean::No };
            for cols in (0..width).step_by(self.geometry.pack_cols) {
                let cols = cols..self.geometry.value_dim.min(cols + self.geometry.pack_cols);
                self.values(block, cols, clean, group.clone(), spans, regions);
            }
            if let Some(seen) = seen {
                self.add_poison(block, &seen, group, regions);
            }
        }
    }

    /// What each tile of the group needs of the block.
    fn spans(&self, block: &Block, group: Range<usize>, spans: &mut [Span]) {
        if !self.call.visible.uses_position() {
            spans.fill(Span::new(0, block.len, false));
            return;
        }
        for (tile, span) in spans.iter_mut().enumerate() {
            let first = group.start + tile * S::TILE_ROWS;
            let (mut lo, mut hi, mut partial, mut same) = (KEY_BLOCK, 0, false, None);
            for r in first..group.end.min(first + S::TILE_ROWS) {
                let keys = self.keys_of(r).within(block.first, block.len);
                partial |= keys.prefix > 0 || *same.get_or_insert(keys) != keys;
                let (from, to) = keys.hull();
                if from < to {
                    (lo, hi) = (lo.min(from), hi.max(to));
                }
            }
            *span = Span::new(lo, hi, partial);
        }
    }

    /// # Safety
    /// As for [`Self::group`].
    unsafe fn scores(
        &self,
        block: &mut Block,
        queries: Queries,
        group: Range<usize>,
        spans: &[Span],
        regions: &mut Regions<'_>,
    ) {
        let d = self.geometry.head_dim;
        let mut rows = [core::ptr::null(); MAX_GROUP];
        let rows = &mut rows[..group.len()];
        for (row, r) in rows.iter_mut().zip(group) {
            *row = match queries {
                // SAFETY: row `r` of the task is inside the call's queries.
                Queries::InPlace => unsafe {
                    let (h, i) = self.row(r);
                    self.call.q.row(self.task.batch, h, i).0
                },
                // SAFETY: the copy has a row for every row of the task.
                Queries::Copied(first) => unsafe { first.add(r * d) },
            };
        }
        for first in (0..block.len).step_by(self.geometry.pack_keys) {
            let n = self.geometry.pack_keys.min(block.len - first);
            // SAFETY: keys `first .. first + n` of the block exist; every query row has `head_dim` floats.
            unsafe {
                if block.packed_keys != Some(first) {
                    let keys = Rows { first: block.keys.at(first), ..block.keys };
                    self.s.pack_keys(keys, n, d, regions.keys);
                    block.packed_keys = Some(first);
                }
                self.s.scores(Scores {
                    queries: rows,
                    keys: regions.keys,
                    panels: first / LANES..(first + n).div_ceil(LANES),
                    spans,
                    head_dim: d,
                    scale: self.call.scale,
                    out: regions.scores,
                });
            }
        }
    }

    /// Sets the scores of keys that a row does not see, and of the padding behind the last key, to −∞.
    fn hide(&self, block: &Block, group: Range<usize>, spans: &[Span], scores: &mut [f32]) {
        for (tile, span) in spans.iter().enumerate() {
            let end = span.end_panel() * LANES;
            if span.is_empty() || (!span.partial && span.keys().end == end) {
                continue;
            }
            let rows = tile * S::TILE_ROWS..group.len().min((tile + 1) * S::TILE_ROWS);
            for r in rows {
                let scores = &mut scores[r * SCORE_STRIDE..][..end];
                if span.partial {
                    let keys = self.keys_of(group.start + r).within(block.first, block.len);
                    let lo = span.keys().start;
                    let (prefix, start) = (keys.prefix.max(lo), keys.start.max(lo));
                    if prefix < start {
                        scores[prefix..start.min(end)].fill(f32::NEG_INFINITY);
                    }
                    scores[keys.end.max(lo)..].fill(f32::NEG_INFINITY);
                } else {
                    scores[span.keys().end..].fill(f32::NEG_INFINITY);
                }
            }
        }
    }

    /// True if some row of the group has a hidden key among those its tile runs over, and the block's values are not
    /// all finite: weight 0 times ∞ would be NaN.
    ///
    /// # Safety
    /// As for [`Self::group`].
    unsafe fn poisoned(&self, block: &mut Block, spans: &[Span]) -> bool {
        spans.iter().any(|span| span.partial)
            && !*block.finite.get_or_insert_with(|| {
                // SAFETY: the block's values exist.
                unsafe { self.s.all_finite(block.values, block.len, self.geometry.value_dim) }
            })
    }

    /// The values of one run of columns, where they lie if that will do.
    ///
    /// # Safety
    /// As for [`Self::group`].
    unsafe fn values(
        &self,
        block: &mut Block,
        cols: Range<usize>,
        clean: Clean,
        group: Range<usize>,
        spans: &[Span],
        regions: &mut Regions<'_>,
    ) {
        let (stride, n) = (self.geometry.width(), cols.len());
        // SAFETY: the run's first column exists for every key of the block.
        let run = unsafe {
            Rows { first: block.values.first.offset(cols.start as isize * block.values.element), ..block.values }
        };
        let in_place = clean == Clean::No && run.element == 1 && n.is_multiple_of(LANES);
        let values = if in_place {
            ValueRows { first: run.first, stride: run.row }
        } else {
            if block.packed_values != Some((cols.start, clean)) {
                // SAFETY: as above.
                unsafe { pack_rows(run, block.len, n, clean == Clean::Yes, regions.values) };
                block.packed_values = Some((cols.start, clean));
            }
            ValueRows { first: regions.values.as_ptr(), stride: n.next_multiple_of(LANES) as isize }
        };
        // SAFETY: spans end inside the block, and the run is whole vectors wide where it lies or as packed.
        unsafe {
            self.s.values(Values {
                weights: regions.scores,
                values,
                vecs: n.div_ceil(LANES),
                spans,
                rows: group.len(),
                keep: regions.keep,
                join: regions.join,
                out: &mut regions.out[group.start * stride + cols.start..],
                out_stride: stride,
            });
        }
    }

    /// Adds what [`Clean::Yes`] left out: the values that are not finite, to the rows that see their keys. Whatever
    /// else is in such an output, it ends as the ∞ or NaN that the full sum would have been.
    ///
    /// # Safety
    /// As for [`Self::group`].
    unsafe fn add_poison(&self, block: &Block, seen: &Seen, group: Range<usize>, regions: &mut Regions<'_>) {
        let width = self.geometry.width();
        for j in 0..block.len {
            for c in 0..self.geometry.value_dim {
                // SAFETY: key `j` of the block, column `c` of its value.
                let x = unsafe { *block.values.at(j).offset(c as isize * block.values.element) };
                if x.is_finite() {
                    continue;
                }
                for r in (0..group.len()).filter(|&r| seen.sees(r, j)) {
                    let weight = regions.scores[r * SCORE_STRIDE + j];
                    regions.out[(group.start + r) * width + c] += weight * x * regions.join[r];
                }
            }
        }
    }

    /// Normalises and writes a group of rows.
    ///
    /// # Safety
    /// As for [`Self::group`].
    unsafe fn finish(&self, group: Range<usize>, outputs: &Outputs<'_>, regions: &Regions<'_>) {
        let mut ends = [RowEnd::new(0.0, 0.0, None); MAX_GROUP];
        let mut out = [core::ptr::null_mut(); MAX_GROUP];
        let (ends, out) = (&mut ends[..group.len()], &mut out[..group.len()]);
        let mut element = 1;
        let b = self.task.batch;
        for (n, r) in group.clone().enumerate() {
            let (h, i) = self.row(r);
            ends[n] = RowEnd::new(regions.max[r], regions.sum[r], None);
            // SAFETY: the rows are inside the outputs and this task's alone.
            unsafe {
                if let Some(lse) = &outputs.lse {
                    *lse.row(b, h, i).0 = ends[n].lse;
                }
                if self.geometry.value_dim > 0 {
                    (out[n], element) = outputs.out.row(b, h, i);
                }
            }
        }
        let stride = self.geometry.width();
        // SAFETY: every row has `value_dim` elements, and they are this task's alone.
        unsafe {
            self.s.finish(Finish {
                gathered: &regions.out[group.start * stride..group.end * stride],
                stride,
                ends,
                out,
                cols: self.geometry.value_dim,
                element,
            });
        }
    }
}

/// Where the task's queries are.
#[derive(Clone, Copy)]
enum Queries {
    /// In the caller's memory, contiguous.
    InPlace,
    /// Copied to scratch, `[row of the task][head_dim]`.
    Copied(*const f32),
}

/// Which keys of a block each row of a group sees, noted before the scores become weights. Only needed where hidden
/// values are not finite.
struct Seen([[u64; KEY_BLOCK / 64]; MAX_GROUP]);

impl Seen {
    fn new(tile_rows: usize, spans: &[Span], rows: usize, scores: &[f32]) -> Self {
        let mut bits = [[0; KEY_BLOCK / 64]; MAX_GROUP];
        for (r, bits) in bits[..rows].iter_mut().enumerate() {
            for j in spans[r / tile_rows].keys() {
                if scores[r * SCORE_STRIDE + j] != f32::NEG_INFINITY {
                    bits[j / 64] |= 1 << (j % 64);
                }
            }
        }
        Self(bits)
    }

    fn sees(&self, row: usize, key: usize) -> bool {
        self.0[row][key / 64] >> (key % 64) & 1 == 1
    }
}
