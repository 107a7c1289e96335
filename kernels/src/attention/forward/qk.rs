//! QKᵀ of a row block and a key block. Keys are packed already or packed here, as elements, pairs or bytes.

use crate::attention::forward::key_block::Block;
use crate::attention::forward::queries::{Int8Queries, Queries};
use crate::attention::forward::scores::After;
use crate::attention::forward::task::AttentionTask;
use crate::attention::steps::bf16::PairPanels;
use crate::attention::steps::by_isa::Steps;
use crate::attention::steps::qk::Scores;
use crate::attention::steps::qk_int8;
use crate::attention::tiling::{MAX_ROW_BLOCK, Regions};
use crate::kv::key_block::Keys;
use crate::matmul::bf16_pairs::{self, as_pairs};
use crate::matmul::dot_tile::FAR;
use crate::matmul::int8;
use crate::matmul::prefetch::{READING_KEYS, READING_ROWS};
use crate::simd::LANES;
use crate::tensor::any::Typed;
use crate::tensor::rows::KEY_BLOCK;
use core::ops::Range;

/// Distance in keys at which tiles prefetch key rows that are not packed yet, of `row` bytes each: the run after the
/// next; where the first-level cache is large and few rows prefetch into it, as many keys as it holds beside this run.
/// In whole runs.
#[inline]
fn lead(roomy: bool, row: usize) -> usize {
    if roomy { (FAR / row).max(1).next_multiple_of(READING_KEYS) } else { 2 * READING_KEYS }
}

impl<S: Steps> AttentionTask<'_, '_, S> {
    /// Computes QKᵀ of a row block and a key block.
    ///
    /// # Safety
    /// Same contract as [`AttentionTask::compute_scores`].
    pub(crate) unsafe fn compute_qk(
        &self,
        block: &mut Block,
        queries: Queries<'_>,
        row_block: Range<usize>,
        after: After<'_>,
        regions: &mut Regions<'_>,
    ) {
        if let Queries::Int8(queries) = queries {
            // SAFETY: the caller guarantees the contract of `compute_scores`; the queries are the task's.
            return unsafe { self.compute_qk_int8(block, queries, row_block, after, regions.scores) };
        }
        let native = matches!(queries, Queries::Pairs(_));
        let d = self.tiling.head_dim;
        let ready = match block.keys {
            Keys::Rows(_) => false,
            Keys::Packed(_) => !native || d.is_multiple_of(2),
            Keys::Int8 { .. } => unreachable!("keys of bytes meet queries of bytes"),
        };
        // Few rows of the whole task, not of the row block: a later row block finds its keys packed already.
        let few = self.task.rows.len() <= READING_ROWS;
        let most = if few { READING_KEYS } else { KEY_BLOCK };
        let run = if ready { KEY_BLOCK } else { self.tiling.pack_keys.min(most) };
        let n = row_block.len();
        // SAFETY: the caller guarantees a row block inside the task.
        let rows = unsafe { self.query_rows(queries, row_block) };
        for first in (0..block.len).step_by(run) {
            let keys = first..block.len.min(first + run);
            // SAFETY: these keys of the block exist; every query row has `head_dim` floats, or pairs; packed keys come
            // in whole panels.
            unsafe {
                let depth = self.depth(native);
                let later = if few { self.later(block, first, depth) } else { None };
                if !ready && block.packed_keys != Some(first) {
                    // The keys to come are prefetched either by these tiles or by packing.
                    let all = if later.is_some() { keys.len() } else { block.len - first };
                    self.pack_keys(block, keys.clone(), all, native, regions.keys);
                    block.packed_keys = Some(first);
                }
                let mut scores = Scores {
                    queries: &rows[..n],
                    keys: (),
                    panels: first / LANES..keys.end.div_ceil(LANES),
                    spans: after.spans,
                    head_dim: depth,
                    scale: self.call.scale,
                    next: after.bias,
                    later,
                    prefetch: &mut block.prefetch,
                    out: regions.scores,
                };
                match block.keys {
                    Keys::Packed(Typed::Bf16(panels)) if native && ready => {
                        self.s.scores_pairs(scores.of(PairPanels::Apart(panels.cast())));
                    }
                    _ if native => self.s.scores_pairs(scores.of(PairPanels::Packed(regions.keys.as_ptr().cast()))),
                    Keys::Packed(panels) => self.s.scores(scores.of(panels)),
                    _ => self.s.scores(scores.of(Typed::F32(regions.keys.as_ptr()))),
                }
            }
        }
    }

    /// Returns the number of floats of a query, or of pairs.
    #[inline]
    fn depth(&self, native: bool) -> usize {
        if native { self.tiling.head_dim.div_ceil(2) } else { self.tiling.head_dim }
    }

    /// Returns the address of every query of a row block.
    ///
    /// # Safety
    /// Same contract as [`AttentionTask::compute_scores`]; the queries are not bytes.
    #[inline]
    unsafe fn query_rows(&self, queries: Queries<'_>, row_block: Range<usize>) -> [*const f32; MAX_ROW_BLOCK] {
        let depth = self.depth(matches!(queries, Queries::Pairs(_)));
        let mut rows = [core::ptr::null(); MAX_ROW_BLOCK];
        for (row, n) in self.stretches(row_block.clone()) {
            let copied = (row_block.start + row.n) * depth;
            let (first, step) = match queries {
                // SAFETY: the row is inside the call's queries.
                Queries::InPlace(q) => unsafe {
                    (q.row(self.seq.batch, row.head, self.seq.first_row + row.i).0, q.strides()[2])
                },
                // SAFETY: the copy has a row for every row of the task.
                Queries::Copied(first) => unsafe { (first.add(copied), depth as isize) },
                // SAFETY: the pairs have a row for every row of the task.
                Queries::Pairs(first) => unsafe { (first.add(copied).cast(), depth as isize) },
                Queries::Int8(_) => unreachable!("queries of bytes meet keys of bytes"),
            };
            for (k, at) in rows[row.n..row.n + n].iter_mut().enumerate() {
                *at = first.wrapping_offset(k as isize * step);
            }
        }
        rows
    }

    /// Packs some of a block's keys into scratch: in panels, or in panels of pairs. Prefetches the keys after them, up
    /// to `all` keys from the first.
    ///
    /// # Safety
    /// Same contract as [`AttentionTask::compute_scores`]; the block has these keys, which begin with a panel, and
    /// `all` from the first of them.
    unsafe fn pack_keys(&self, block: &Block, keys: Range<usize>, all: usize, native: bool, out: &mut [f32]) {
        let (d, n) = (self.tiling.head_dim, [keys.len(), all]);
        // SAFETY: the keys exist; a cache's panels are whole.
        unsafe {
            match block.keys {
                Keys::Rows(Typed::Bf16(rows)) if native => {
                    self.s.pack_pairs(rows.rows_from(keys.start), n, d, as_pairs(out));
                }
                Keys::Packed(Typed::Bf16(panels)) if native => {
                    bf16_pairs::pair_up(panels.add(keys.start * d), keys.len().div_ceil(LANES), d, as_pairs(out));
                }
                Keys::Rows(rows) => self.s.pack_keys(rows.rows_from(keys.start), n, d, out),
                _ => unreachable!("packed as they are"),
            }
        }
    }

    /// Returns the address that few rows prefetch from while they compute the keys from `first` on, and the bytes for
    /// each element of a panel: packed keys [`FAR`] bytes after these, or rows [`lead`] keys after these, if they are
    /// contiguous. The tiles prefetch, one line with each step, and not the packing, which reads its lines sixteen at a
    /// time: this way memory is busy while nothing waits for it.
    ///
    /// # Safety
    /// Same contract as [`AttentionTask::compute_scores`].
    unsafe fn later(&self, block: &Block, first: usize, depth: usize) -> Option<(*const u8, usize)> {
        match block.keys {
            Keys::Packed(panels) => {
                let (at, element) = panels.bytes();
                let bytes = LANES * self.tiling.head_dim * element;
                Some((at.wrapping_add(first / LANES * bytes + FAR), bytes / depth))
            }
            Keys::Rows(rows) if rows.element() == 1 => {
                // SAFETY: the block has at least one key.
                let rows = unsafe { rows.first() };
                let row = self.tiling.head_dim * rows.element;
                let dense = rows.n == usize::MAX && rows.step == row as isize;
                let then = first + lead(self.s.has_large_l1(), row);
                let there = dense && block.first + then < self.seq.kv_len;
                there.then(|| (rows.at.wrapping_add(then * row), LANES * row / depth))
            }
            _ => None,
        }
    }

    /// Computes QKᵀ of int8 queries and keys.
    ///
    /// # Safety
    /// Same contract as [`AttentionTask::compute_scores`]; the queries are the task's.
    unsafe fn compute_qk_int8(
        &self,
        block: &mut Block,
        queries: Int8Queries,
        row_block: Range<usize>,
        After { spans, bias }: After<'_>,
        scores: &mut [f32],
    ) {
        let Keys::Int8 { keys, scales } = block.keys else { unreachable!("queries of bytes meet keys of bytes") };
        let (d, n) = (self.tiling.head_dim, row_block.len());
        let quads = int8::quads(d);
        // SAFETY: the queries are every row of the task; the cache outlives the call.
        let (query_quads, rows, keys, scales) = unsafe {
            (
                core::slice::from_raw_parts(queries.quads.add(row_block.start * quads), n * quads),
                core::slice::from_raw_parts(queries.rows.add(row_block.start), n),
                &*keys,
                scales.map(|scales| &*scales),
            )
        };
        self.s.scores_int8(qk_int8::Scores {
            queries: query_quads,
            rows,
            keys,
            scales,
            panels: 0..block.len.div_ceil(LANES),
            spans,
            head_dim: d,
            next: bias,
            prefetch: &mut block.prefetch,
            out: scores,
        });
    }
}
