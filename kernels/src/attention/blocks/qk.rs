//! QKᵀ of a row block and a key block. Keys are packed already or packed here, as elements, pairs or bytes.

use crate::attention::blocks::key_block::KeyBlock;
use crate::attention::blocks::prefetch;
use crate::attention::blocks::queries::{Queries, are_readable_in_place};
use crate::attention::scratch::MAX_ROW_BLOCK;
use crate::attention::steps::bf16::PairPanels;
use crate::attention::steps::float_loops;
use crate::attention::steps::qk::{FloatKeys, FloatQueries, LaterKeys};
use crate::attention::steps::qk_int8::{Int8Queries, IntegerKeys};
use crate::attention::steps::score_passes::AnyColumns;
use crate::attention::steps::score_run::{ScoreRun, Scores};
use crate::kv::key_block::Keys;
use crate::matmul::bf16_pairs;
use crate::matmul::dot_tile::{FAR, Later};
use crate::matmul::key_code::{Int4Keys, Int8Keys};
use crate::matmul::pack::{self, NonFinite};
use crate::matmul::prefetch::{MEMORY_BOUND_ROWS, READING_KEYS};
use crate::simd::aligned::elements_mut;
use crate::simd::{LANES, Simd};
use crate::tensor::any::{Tensor, Typed};
use crate::tensor::rows::{KEY_BLOCK, Rows};
use core::ops::Range;

/// Distance in keys at which tiles prefetch key rows that are not packed yet, of `row` bytes each: the run after the
/// next; where the first-level cache is large and few rows prefetch into it, as many keys as it holds beside this run.
/// In whole runs.
#[inline]
fn lead(roomy: bool, row: usize) -> usize {
    if roomy { (FAR / row).max(1).next_multiple_of(READING_KEYS) } else { 2 * READING_KEYS }
}

impl<S: Simd> KeyBlock<'_, '_, S> {
    /// Computes QKᵀ of a row block. `bias` is the bias rows that the next pass adds, if there are any.
    pub(crate) fn compute_qk(&mut self, row_block: Range<usize>, bias: Option<AnyColumns<'_>>) {
        if let Queries::Int8(queries) = self.queries {
            return self.compute_qk_int8(queries, row_block, bias);
        }
        let task = self.task;
        let native = matches!(self.queries, Queries::Pairs(_));
        let d = task.tiling.head_dim;
        // Few rows of the whole task, not of the row block: a later row block finds its keys packed already.
        let few = task.set.rows.len() <= MEMORY_BOUND_ROWS;
        let ready = match self.keys {
            Keys::Rows(_) => false,
            Keys::Packed(panels) if native => !panels.are_scattered() && d.is_multiple_of(2),
            // Many rows read panels of floats, side by side.
            Keys::Packed(panels) => few || matches!(panels, Typed::F32(rows) if !rows.are_scattered()),
            Keys::Int8 { .. } | Keys::Int4 { .. } | Keys::Latent => unreachable!("keys of integers meet bytes"),
        };
        let most = if few { READING_KEYS } else { KEY_BLOCK };
        let run = if ready { KEY_BLOCK } else { task.tiling.pack_keys.min(most) };
        let n = row_block.len();
        let (rows, depth) = (self.query_rows(row_block), self.depth(native));
        let needed = if ready { 0..self.len } else { self.needed.clone() };
        for first in needed.clone().step_by(run) {
            let keys = first..needed.end.min(first + run);
            let later = if few { self.later(first, depth, n, ready) } else { None };
            if !ready && self.packed_keys != Some(first) {
                // The keys to come are prefetched either by these tiles or by packing.
                let all = if later.is_some() { keys.len() } else { needed.end - first };
                self.pack_keys(keys.clone(), all, native);
                self.packed_keys = Some(first);
            }
            let queries = FloatQueries { rows: &rows[..n], depth, scale: task.call.scale };
            let (packed, panel) = (self.regions.keys.as_ptr(), (depth * LANES) as isize);
            let (stored, run) = (self.keys, &mut self.score_run(n, first / LANES..keys.end.div_ceil(LANES), bias));
            // SAFETY: every query row has `depth` floats, or pairs; keys are packed in whole panels, from key `first`
            // on, which is 0 if they were packed before. No span has keys that are not needed.
            unsafe {
                if native {
                    let panels = match stored {
                        Keys::Packed(Typed::Bf16(panels)) if ready => {
                            PairPanels::Apart(Rows::strided(panels.at(0).cast(), 2 * panel, 1))
                        }
                        _ => PairPanels::Packed(Rows::strided(packed.cast(), panel, 1)),
                    };
                    task.s.with_bf16_dot(Scores { queries, keys: FloatKeys { panels, later }, run });
                } else {
                    let panels = match stored {
                        Keys::Packed(panels) if ready => panels,
                        _ => Typed::F32(Rows::strided(packed, panel, 1)),
                    };
                    float_loops::scores(task.s, run, queries, FloatKeys { panels, later });
                }
            }
        }
    }

    /// Describes the scores to compute of some rows of a row block, and of some panels.
    fn score_run<'s>(
        &'s mut self,
        rows: usize,
        panels: Range<usize>,
        next_bias: Option<AnyColumns<'s>>,
    ) -> ScoreRun<'s> {
        let (prefetch, out) = (&mut self.prefetch, &mut *self.regions.scores);
        ScoreRun { rows, panels, spans: self.spans, next_bias, prefetch, out }
    }

    /// Returns the number of floats of a query, or of pairs.
    #[inline]
    fn depth(&self, native: bool) -> usize {
        let d = self.task.tiling.head_dim;
        if native { d.div_ceil(2) } else { d }
    }

    /// Returns the address of every query of a row block. The queries are not bytes.
    #[inline]
    fn query_rows(&self, row_block: Range<usize>) -> [*const f32; MAX_ROW_BLOCK] {
        let task = self.task;
        let depth = self.depth(matches!(self.queries, Queries::Pairs(_)));
        let mut rows = [core::ptr::null(); MAX_ROW_BLOCK];
        for (row, n) in task.stretches(row_block.clone()) {
            let first = (row_block.start + row.n) * depth;
            let copied = first..first + n * depth;
            let (first, step) = match (self.queries, &task.call.q) {
                // SAFETY: the task's rows are inside the call's queries.
                (Queries::InPlace, Tensor::F32(q)) if are_readable_in_place(q) => unsafe {
                    (q.row(row.q_batch, row.head, row.at).0, q.strides()[2])
                },
                (Queries::Copied(copies), _) => (copies[copied].as_ptr(), depth as isize),
                (Queries::Pairs(pairs), _) => (pairs[copied].as_ptr().cast(), depth as isize),
                _ => unreachable!("queries in another form than the keys'"),
            };
            for (k, at) in rows[row.n..row.n + n].iter_mut().enumerate() {
                *at = first.wrapping_offset(k as isize * step);
            }
        }
        rows
    }

    /// Packs some of the block's keys, which begin with a panel, into scratch: in panels, or in panels of pairs.
    /// Prefetches the keys after them, up to `all` keys from the first.
    fn pack_keys(&mut self, keys: Range<usize>, all: usize, native: bool) {
        assert!(keys.start + keys.len().max(all) <= self.len, "keys outside the block");
        let (task, out) = (self.task, &mut *self.regions.keys);
        let (d, n) = (task.tiling.head_dim, [keys.len(), all]);
        // SAFETY: the keys exist, as asserted; a cache's panels are whole.
        unsafe {
            match self.keys {
                Keys::Rows(Typed::Bf16(rows)) if native => {
                    bf16_pairs::pack(task.s, rows.rows_from(keys.start), n, d, elements_mut(out));
                }
                Keys::Packed(Typed::Bf16(panels)) if native => {
                    let pairs = elements_mut(out).chunks_exact_mut(d.div_ceil(2) * LANES);
                    for (panel, pairs) in (keys.start / LANES..keys.end.div_ceil(LANES)).zip(pairs) {
                        bf16_pairs::pair_up(panels.at(panel), 1, d, pairs);
                    }
                }
                Keys::Packed(panels) => {
                    let (panels, all) = (panels.rows_from(keys.start / LANES), keys.len().div_ceil(LANES));
                    pack::pack_rows(task.s, panels, [all, d * LANES], NonFinite::Ignored, out);
                }
                Keys::Rows(rows) => pack::pack_keys(task.s, rows.rows_from(keys.start), n, d, out),
                Keys::Int8 { .. } | Keys::Int4 { .. } | Keys::Latent => unreachable!("keys of integers meet bytes"),
            }
        }
    }

    /// Returns what few rows, `rows` of them, prefetch while they compute the keys from `first` on: packed keys
    /// [far](Later::far) after these, if they are `ready` to be read where they lie, or rows [`lead`] keys after these, if
    /// they are contiguous. The tiles prefetch, one line with each step, and not the packing, which reads its lines sixteen at
    /// a time: this way memory is busy while nothing waits for it.
    fn later(&self, first: usize, depth: usize, rows: usize, ready: bool) -> Option<LaterKeys> {
        let head_dim = self.task.tiling.head_dim;
        match self.keys {
            Keys::Packed(_) => ready.then(|| LaterKeys::Panels { far: Later::far(self.task.s, rows) }),
            Keys::Rows(rows) if rows.element() == 1 => {
                // SAFETY: the block has at least one key.
                let rows = unsafe { rows.first() };
                let row = head_dim * rows.element;
                let dense = rows.n == usize::MAX && rows.step == row as isize;
                let then = first + lead(self.task.s.has_large_l1(), row);
                // A cache's blocks are not one behind the other.
                let held =
                    if self.task.call.kv.cache().is_some() { self.len } else { self.task.seq.kv_len - self.first };
                let there = dense && then < held;
                let at = rows.at.wrapping_add(then * row);
                there.then(|| LaterKeys::Rows { at, bytes: LANES * row / depth })
            }
            _ => None,
        }
    }

    /// Computes QKᵀ of int8 queries and keys of eight or four bits.
    fn compute_qk_int8(&mut self, queries: Int8Queries<'_>, rows: Range<usize>, bias: Option<AnyColumns<'_>>) {
        self.prefetch_key_scales();
        let (s, all) = (self.task.s, self.len.div_ceil(LANES));
        let at_once = if matches!(self.keys, Keys::Latent) { self.latent_panels_at_once() } else { all };
        for first in (0..all).step_by(at_once) {
            let panels = first..all.min(first + at_once);
            // SAFETY: the block has these panels, and their numbers; the cache outlives the call, and the block's table the block.
            unsafe {
                let keys = match self.keys {
                    Keys::Latent => self.latent_keys(panels.clone()),
                    keys => keys,
                };
                let (queries, run) = (queries.rows(rows.clone()), &mut self.score_run(rows.len(), panels, bias));
                match keys {
                    Keys::Int8 { panels, scales } => {
                        let code = Int8Keys(scales.map(|scales| &*scales));
                        s.with_int8_dot(Scores { queries, keys: IntegerKeys { panels, code }, run });
                    }
                    Keys::Int4 { panels, kind, numbers } => {
                        let code = Int4Keys { kind, numbers };
                        s.with_int8_dot(Scores { queries, keys: IntegerKeys { panels, code }, run });
                    }
                    _ => unreachable!("queries of bytes meet keys of integers"),
                }
            }
        }
    }

    /// Prefetches the scales of integer keys that will be read later, unless keys are scattered.
    fn prefetch_key_scales(&self) {
        // SAFETY: the block has a panel of keys, and its numbers.
        unsafe {
            match self.keys {
                Keys::Int8 { panels, scales: Some(scales) } if !panels.are_scattered() => {
                    prefetch::behind_scales(self.task, scales.cast(), size_of_val(&*scales));
                }
                Keys::Int4 { panels, kind, numbers } if !panels.are_scattered() => {
                    let bytes = kind.number_bytes(KEY_BLOCK, self.task.tiling.head_dim);
                    prefetch::behind_scales(self.task, numbers.at(0).cast(), bytes);
                }
                _ => {}
            }
        }
    }
}
