//! QKᵀ of a row block and a key block. Keys are read where they lie, or packed here.

use crate::attention::blocks::key_block::KeyBlock;
use crate::attention::blocks::queries::{Queries, are_readable_in_place};
use crate::attention::products::multiply::Multiply;
use crate::attention::products::operands::{KeySource, KeysToPack, LaterKeys, Packing, QueryRows, RunKeys};
use crate::attention::products::score_run::ScoreRun;
use crate::attention::steps::score_passes::AnyColumns;
use crate::kv::key_block::Keys;
use crate::matmul::dot_tile::{FAR, Later};
use crate::matmul::prefetch::{MEMORY_BOUND_ROWS, READING_KEYS};
use crate::simd::{LANES, Simd};
use crate::tensor::any::Tensor;
use crate::tensor::rows::{KEY_BLOCK, Room};
use core::ops::Range;

/// Distance in keys at which tiles prefetch key rows that are not packed yet, of `row` bytes each: the run after the
/// next; where the first-level cache is large and few rows prefetch into it, the keys that it holds beside this run.
/// In whole runs.
#[inline]
fn lead(roomy: bool, row: usize) -> usize {
    if roomy { (FAR / row).max(1).next_multiple_of(READING_KEYS) } else { 2 * READING_KEYS }
}

impl<S: Simd> KeyBlock<'_, '_, S> {
    /// Computes QKᵀ of a row block by the arithmetic of the task's queries and keys, run by run of the keys. `bias` is the bias rows
    /// that the next pass adds, if there are any.
    pub(crate) fn compute_qk<A: Multiply>(&mut self, row_block: Range<usize>, bias: Option<AnyColumns<'_>>) {
        let (task, n, head_dim) = (self.task, row_block.len(), self.task.tiling.head_dim);
        // Few rows of the whole task, not of the row block: a later row block finds its keys packed already.
        let few = task.set.rows.len() <= MEMORY_BOUND_ROWS;
        let ready = A::reads_keys(&self.keys, task.set.rows.len(), head_dim);
        let run = match ready {
            true => KEY_BLOCK,
            false => {
                let source = KeySource { keys: &self.keys, values: &self.values };
                let fit = self.regions.keys.len() / A::panel_floats(source, head_dim) * LANES;
                fit.min(if few { READING_KEYS } else { KEY_BLOCK })
            }
        };
        let mut room = Room::new();
        let rows = self.query_rows::<A>(row_block, &mut room);
        let [scale, _] = self.scaling.factors(task.call.scale);
        let needed = if ready { 0..self.len } else { self.needed.clone() };
        for first in needed.clone().step_by(run) {
            let keys = first..needed.end.min(first + run);
            let later = if few { self.later::<A>(first, n, ready) } else { None };
            let mut run_keys = RunKeys { keys: self.keys, later };
            if !ready {
                let packing = if self.packed_keys == Some(first) { Packing::Done } else { Packing::Needed };
                // The keys to come are prefetched either by these tiles or by packing.
                let all = if later.is_some() { keys.len() } else { needed.end - first };
                assert!(first + keys.len().max(all) <= self.len, "keys outside the block");
                let source = KeySource { keys: &self.keys, values: &self.values };
                let to_pack = KeysToPack { source, keys: keys.clone(), all, head_dim, packing };
                // SAFETY: the block's keys exist, and their packed form is used before others are packed.
                run_keys.keys = unsafe { A::pack_keys(task.s, to_pack, self.regions.keys) };
                self.packed_keys = Some(first);
            }
            let queries = QueryRows { rows, head_dim, dtype: task.call.q.dtype(), scale };
            let panels = first / LANES..keys.end.div_ceil(LANES);
            let (prefetch, out) = (&mut *self.prefetch, &mut *self.regions.scores);
            let mut run = ScoreRun { rows: n, panels, spans: self.spans, next_bias: bias, prefetch, out };
            // SAFETY: every query has `head_dim` elements, those in scratch one after the other; the block has the keys, from
            // key `first` on, which is 0 if they were packed before. No span has keys that are not needed.
            unsafe { A::scores(task.s, &mut run, queries, run_keys) }
        }
    }

    /// Returns the address of every query of a row block.
    #[inline(always)]
    fn query_rows<'r, A: Multiply>(&self, row_block: Range<usize>, room: &'r mut Room<*const f32>) -> &'r [*const f32] {
        let (task, floats) = (self.task, A::query_floats(self.task.tiling.head_dim));
        let spread =
            |first: *const f32, n: usize, step: isize| (0..n).map(move |k| first.wrapping_offset(k as isize * step));
        match (self.queries, &task.call.q) {
            // Addresses in the whole memory: a tile goes on from one to the next rows.
            (Queries::Stored(stored), _) => {
                assert!(row_block.end * floats <= stored.len(), "queries outside scratch");
                let first = stored.as_ptr().wrapping_add(row_block.start * floats);
                room.fill(spread(first, row_block.len(), floats as isize))
            }
            (Queries::InPlace, Tensor::F32(q)) if are_readable_in_place(q) => {
                room.fill(task.stretches(row_block).flat_map(|(row, n)| {
                    // SAFETY: the task's rows are inside the call's queries.
                    let (first, _) = unsafe { q.row(row.q_batch, row.head, row.at) };
                    spread(first, n, q.strides()[2])
                }))
            }
            _ => unreachable!("queries in another form than the keys'"),
        }
    }

    /// Returns what few rows, `rows` of them, prefetch while they compute the keys from `first` on: packed keys
    /// [far](Later::far) after these, if they are `ready` to be read where they lie, or rows [`lead`] keys after these, if
    /// they are contiguous. The tiles prefetch, one line with each step, and not the packing, which reads its lines sixteen at
    /// a time: this way memory is busy while nothing waits for it.
    fn later<A: Multiply>(&self, first: usize, rows: usize, ready: bool) -> Option<LaterKeys> {
        let head_dim = self.task.tiling.head_dim;
        match self.keys {
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
                there.then(|| LaterKeys::Rows { at, bytes: LANES * row / A::depth(head_dim) })
            }
            _ => ready.then(|| LaterKeys::Panels { far: Later::far(self.task.s, rows) }),
        }
    }
}
