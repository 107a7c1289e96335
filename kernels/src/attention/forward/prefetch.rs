//! What a task will need next: the memory that its tiles prefetch while they compute the block at hand.

use crate::attention::call::Task;
use crate::attention::forward::task::{AttentionTask, Next, Row};
use crate::attention::mods::{MaskMod, Mods, ProbMod, ScoreMod};
use crate::attention::steps::by_isa::Steps;
use crate::kv::key_block::{BlockValues, Keys};
use crate::kv::value_panels::{ValuePanels, value_panel};
use crate::matmul::int8;
use crate::matmul::prefetch::PrefetchQueue;
use crate::simd::LANES;
use crate::tensor::any::AnyRows;
use crate::tensor::rows::{KEY_BLOCK, Table};

/// Rows of a unit that nothing before them asks for, a panel's: packing asks for the next panel, tiles for later values.
const FIRST: usize = LANES;

impl<'t, 'a, S: Steps, A: ScoreMod, B: MaskMod, C: ProbMod> AttentionTask<'t, 'a, S, Mods<A, B, C>> {
    /// What will be needed once a block is done: the next block; after the last one the task's outputs, and what the
    /// next task begins with. Of a unit, where it will accumulate, and what its values and the next unit's keys begin with: the rest is
    /// asked for as they are read, and all of it where they lie one behind the other, in a cache.
    ///
    /// # Safety
    /// As for [`Self::run`]; the block is one of the task's, of `len` keys from `first` on.
    pub(crate) unsafe fn prefetch(&self, [first, len]: [usize; 2], values: BlockValues) -> PrefetchQueue {
        let mut prefetch = PrefetchQueue::nothing();
        if let Next::Near = self.next {
            return prefetch;
        }
        // SAFETY: passed on.
        unsafe {
            if let Next::Unit { accumulated: (at, bytes), next } = &self.next {
                prefetch.push(*at, 0, 1, *bytes);
                if let BlockValues::Rows { rows, .. } = values {
                    prefetch.push_rows(rows, len.min(FIRST), self.tiling.value_dim);
                    if let Some((task, first)) = next {
                        self.with_task(task).push_first_keys(*first, &mut prefetch);
                    }
                }
                return prefetch;
            }
            match self.blocks().next_back().filter(|&last| first < last) {
                Some(_) => self.push_block(first + KEY_BLOCK, &mut prefetch),
                None => {
                    if let Some(out) = &self.outputs.out {
                        self.push_rows(&mut prefetch, self.tiling.value_dim, |row| {
                            out.rows(self.seq.batch, row.head, self.seq.first_row + row.i)
                        });
                    }
                    if let Next::Task(task) = &self.next {
                        self.with_task(task).push_opening(&mut prefetch);
                    }
                }
            }
        }
        prefetch
    }

    /// This call's work for another task.
    fn with_task(&self, task: &Task) -> Self {
        Self::new(self.s, self.mods, self.call, self.outputs, task.clone(), self.tiling)
    }

    /// The first keys of a block, if there is such.
    ///
    /// # Safety
    /// As for [`Self::run`].
    unsafe fn push_first_keys(&self, first: usize, prefetch: &mut PrefetchQueue) {
        let len = self.seq.kv_len.saturating_sub(first).min(FIRST);
        if len == 0 || !self.call.kv.holds(self.seq.batch, first) {
            return;
        }
        let (at, table) = (self.place(first), &mut Table::new());
        // SAFETY: so many keys exist, and their block is held.
        if let Keys::Rows(rows) = unsafe { self.call.kv.keys(at, len, table) } {
            prefetch.push_rows(rows, len, self.tiling.head_dim);
        }
    }

    /// # Safety
    /// As for [`Self::run`]; `first < kv_len`.
    unsafe fn push_block(&self, first: usize, prefetch: &mut PrefetchQueue) {
        let at = self.place(first);
        let len = KEY_BLOCK.min(self.seq.kv_len - first);
        let (d, kv) = (self.tiling.head_dim, &self.call.kv);
        // Pages are left to themselves: their rows are many short stretches.
        if !kv.holds(at[0], first) || kv.is_paged() {
            return;
        }
        let table = &mut Table::new();
        // SAFETY: key `first` exists, and its block is held.
        let (keys, values) = unsafe { (kv.keys(at, len, table), kv.values(at, len, table)) };
        match keys {
            Keys::Rows(rows) => prefetch.push_rows(rows, len, d),
            Keys::Packed(panels) => {
                let (first, bytes) = panels.bytes();
                prefetch.push(first, 0, 1, len.next_multiple_of(LANES) * d * bytes);
            }
            // Scales are left to themselves: a thirtieth of the memory.
            Keys::Int8 { keys, .. } => prefetch.push(keys.cast(), 0, 1, len.div_ceil(LANES) * int8::panel_bytes(d)),
        }
        match values {
            BlockValues::Rows { rows, .. } => prefetch.push_rows(rows, len, self.tiling.value_dim),
            BlockValues::ValuePanels(value_panels) => push_strips(prefetch, value_panels.bytes(), len),
            BlockValues::Int8 { value_panels, .. } => push_strips(prefetch, value_panels.bytes(), len),
        }
    }

    /// # Safety
    /// As for [`Self::run`].
    unsafe fn push_opening(&self, prefetch: &mut PrefetchQueue) {
        if self.task.rows.is_empty() {
            return;
        }
        // SAFETY: passed on.
        unsafe {
            if let Some(first) = self.blocks().next() {
                self.push_block(first, prefetch);
            }
            self.push_rows(prefetch, self.tiling.head_dim, |row| {
                self.call.q.rows(self.seq.batch, row.head, self.seq.first_row + row.i)
            });
        }
    }

    /// The task's rows of q or of the output, as far as they belong to the head of the first.
    #[inline]
    fn push_rows(&self, prefetch: &mut PrefetchQueue, dim: usize, at: impl Fn(Row) -> AnyRows) {
        if let Some(row) = self.rows(0..1).next() {
            prefetch.push_rows(at(row), self.task.rows.len().min(self.seq.q_len - row.i), dim);
        }
    }
}

/// Adds `n` rows of value panels whose elements have so many bytes. Where value panels are not all of a width, nearly those rows.
fn push_strips(prefetch: &mut PrefetchQueue, (value_panels, bytes): (ValuePanels<u8>, usize), n: usize) {
    let cols = value_panel(0, value_panels.width).len() * bytes;
    prefetch.push(
        value_panels.first,
        (KEY_BLOCK * cols) as isize,
        (value_panels.width * bytes).div_ceil(cols),
        n * cols,
    );
}
