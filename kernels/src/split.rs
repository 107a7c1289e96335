//! Few rows, many keys: blocks of keys shared out over workers, each gathered by itself, then folded in order.
//! (Flash-Decoding: Dao, Haziza, Massa and Sizov 2023.)
//!
//! A unit is one block of keys of one key/value head, with all the rows that share the head. Its maxima, sums and
//! unnormalised outputs go where the fold finds them. Units are taken in the order in which their memory lies, runs of
//! them at a time: the core's own guesses at what will be read next come true, also from one unit to the next. The fold
//! takes a head's units in the order of their keys, whoever computed them: to the bit what one pass does.

use crate::block::KEY_BLOCK;
use crate::geometry::{Geometry, Regions, Scratch};
use crate::launch::{Call, Task};
use crate::options::{MaskMod, Mods, ProbMod, ScoreMod};
use crate::outputs::Shared;
use crate::pack::Rows;
use crate::poison::Care;
use crate::queue::Queue;
use crate::simd::LANES;
use crate::softmax;
use crate::source::KeyValues;
use crate::steps::Steps;
use crate::tensor::Typed;
use crate::tile::Fused;
use core::marker::PhantomData;
use core::sync::atomic::{AtomicUsize, Ordering};

/// The units of a call, and memory for what each gathers.
pub(crate) struct Split<'a> {
    partials: *mut f32,
    /// Blocks of the longest sequence.
    blocks: usize,
    heads: usize,
    sequences: usize,
    /// Rows of a unit.
    rows: usize,
    width: usize,
    /// Heads before blocks, as tensors lie, or blocks before heads, as a cache does.
    order: Order,
    /// Units of a run.
    run: usize,
    pub(crate) runs: Queue,
    pub(crate) folds: Queue,
    /// Runs that are done.
    gathered: AtomicUsize,
    borrow: PhantomData<&'a mut [f32]>,
}

// SAFETY: an exclusive borrow of floats; every unit's part is written by whoever takes its run, and read by whoever folds
// after all runs are done.
unsafe impl Send for Split<'_> {}
// SAFETY: as above.
unsafe impl Sync for Split<'_> {}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Order {
    Heads,
    Blocks,
}

/// One block of keys of one head.
struct Unit {
    task: Task,
    /// Its first key.
    first: usize,
}

/// Floats of a unit's part: maxima and sums in whole vectors, then rows of outputs.
fn unit_floats(rows: usize, width: usize) -> usize {
    2 * rows.next_multiple_of(LANES) + rows * width
}

/// Floats that a call's units take together; `None` beyond the address space.
pub fn split_floats(shape: [usize; 3], rows: usize, value_dim: usize) -> Option<usize> {
    let [sequences, kv_heads, kv_len] = shape;
    let unit = unit_floats(rows, value_dim.next_multiple_of(LANES));
    sequences.checked_mul(kv_heads)?.checked_mul(kv_len.div_ceil(KEY_BLOCK))?.checked_mul(unit)
}

impl<'a> Split<'a> {
    /// Cuts the call into about so many runs.
    ///
    /// # Panics
    /// If there is less memory than [`split_floats`], or the rows of a head are more than a task's.
    pub(crate) fn new(call: &Call<'_>, geometry: &Geometry, partials: &'a mut [f32], runs: usize) -> Self {
        let [sequences, heads, kv_len, _] = call.kv.k_shape();
        let rows = call.sharing() * call.q.shape()[2];
        let needed = split_floats([sequences, heads, kv_len], rows, geometry.value_dim);
        assert!(needed.is_some_and(|n| partials.len() >= n), "too little memory for the units");
        assert!(rows <= geometry.task_rows && call.options.ragged.is_none(), "the rows of a head are no task");
        let blocks = kv_len.div_ceil(KEY_BLOCK);
        let units = sequences * heads * blocks;
        let run = units.div_ceil(runs.max(1)).max(1);
        Self {
            partials: partials.as_mut_ptr(),
            blocks,
            heads,
            sequences,
            rows,
            width: geometry.width(),
            order: if let KeyValues::Cache(_) = call.kv { Order::Blocks } else { Order::Heads },
            run,
            runs: Queue::new(units.div_ceil(run)),
            folds: Queue::new(sequences * heads),
            gathered: AtomicUsize::new(0),
            borrow: PhantomData,
        }
    }

    /// The units of a run.
    fn units(&self, run: usize) -> impl Iterator<Item = Unit> {
        let all = self.sequences * self.heads * self.blocks;
        (run * self.run..all.min((run + 1) * self.run)).map(|unit| {
            let (index, unit) = (unit / (self.heads * self.blocks), unit % (self.heads * self.blocks));
            let (kv_head, block) = match self.order {
                Order::Heads => (unit / self.blocks, unit % self.blocks),
                Order::Blocks => (unit % self.heads, unit / self.heads),
            };
            Unit { task: Task { index, kv_head, rows: 0..self.rows }, first: block * KEY_BLOCK }
        })
    }

    /// The task whose blocks a fold puts together.
    fn whole(&self, fold: usize) -> Task {
        Task { index: fold / self.heads, kv_head: fold % self.heads, rows: 0..self.rows }
    }

    /// Where a unit's part is: maxima, sums, outputs.
    ///
    /// # Safety
    /// The unit is one of the call's; nobody else uses its part meanwhile.
    #[expect(clippy::mut_from_ref, reason = "who may write is the caller's promise")]
    unsafe fn part(&self, task: &Task, first: usize) -> [&mut [f32]; 3] {
        let number = (task.index * self.heads + task.kv_head) * self.blocks + first / KEY_BLOCK;
        let padded = self.rows.next_multiple_of(LANES);
        // SAFETY: `new` made sure that there is memory for every unit.
        unsafe {
            let at = self.partials.add(number * unit_floats(self.rows, self.width));
            let part = |at: *mut f32, n: usize| core::slice::from_raw_parts_mut(at, n);
            [part(at, padded), part(at.add(padded), padded), part(at.add(2 * padded), self.rows * self.width)]
        }
    }
}

impl<S: Steps, A: ScoreMod, B: MaskMod, C: ProbMod> Fused<'_, '_, S, Mods<A, B, C>> {
    /// Gathers a unit, if its rows see anything of it.
    ///
    /// # Safety
    /// As for [`Fused::run`], with the unit's part in place of the task's rows.
    unsafe fn gather_unit(&self, split: &Split<'_>, first: usize, regions: &mut Regions<'_>) {
        if self.task.rows.is_empty() || !self.holds(first) {
            return;
        }
        // SAFETY: passed on.
        unsafe {
            let queries = self.queries(regions);
            let [max, sum, out] = split.part(&self.task, first);
            // As in `run`: again with care if anything is not finite.
            for care in [Care::Fast, Care::Careful] {
                self.gather(queries, care, core::iter::once(first), regions);
                let gathered = Typed::F32(Rows::strided(regions.out.as_ptr(), 0, 1));
                if self.s.all_finite(gathered, 1, out.len()) {
                    break;
                }
            }
            max.copy_from_slice(&regions.max[..max.len()]);
            sum.copy_from_slice(&regions.sum[..sum.len()]);
            out.copy_from_slice(&regions.out[..out.len()]);
        }
    }

    /// Folds the units of the task's rows in the order of their keys, and writes the rows.
    ///
    /// # Safety
    /// As for [`Fused::run`]; all units are gathered.
    unsafe fn fold_units(&self, split: &Split<'_>, regions: &mut Regions<'_>) {
        // SAFETY: passed on; one fold a sequence and head.
        unsafe { self.fill_rows_beyond() };
        if self.task.rows.is_empty() {
            return;
        }
        self.clear(regions);
        let padded = self.task.rows.len().next_multiple_of(LANES);
        for first in self.blocks() {
            // SAFETY: the unit is gathered, and nobody else folds it.
            let [max, sum, out] = unsafe { split.part(&self.task, first) };
            let state = softmax::Rows {
                max: &mut regions.max[..padded],
                sum: &mut regions.sum[..padded],
                keep: max,
                join: sum,
            };
            self.s.fold(state, &mut regions.out[..out.len()], out, split.width);
        }
        // SAFETY: passed on.
        unsafe { self.finish(Care::Careful, regions) };
    }
}

/// Takes runs of units and gathers them until none is left.
///
/// # Safety
/// The call is consistent with its outputs, and the split was made for it.
pub(crate) unsafe fn gather<S: Steps, A: ScoreMod, B: MaskMod, C: ProbMod>(
    split: &Split<'_>,
    parts: &Parts<'_, '_, S, Mods<A, B, C>>,
    scratch: &mut Scratch,
) {
    while let Some(run) = split.runs.take() {
        for Unit { task, first } in split.units(run) {
            let fused = parts.fused(task).unit();
            // SAFETY: passed on; the unit belongs to this run, and the run was taken once.
            unsafe { fused.gather_unit(split, first, &mut scratch.regions(parts.geometry)) }
        }
        split.gathered.fetch_add(1, Ordering::Release);
    }
}

/// Takes heads and folds their units until none is left.
///
/// # Safety
/// As for [`gather`].
///
/// # Panics
/// If a run is not done.
pub(crate) unsafe fn fold<S: Steps, A: ScoreMod, B: MaskMod, C: ProbMod>(
    split: &Split<'_>,
    parts: &Parts<'_, '_, S, Mods<A, B, C>>,
    scratch: &mut Scratch,
) {
    // Acquire: what the gathering workers wrote.
    assert!(split.gathered.load(Ordering::Acquire) == split.runs.len(), "folded before all was gathered");
    while let Some(number) = split.folds.take() {
        let fused = parts.fused(split.whole(number));
        // SAFETY: passed on; the head's rows are this worker's alone.
        unsafe { fused.fold_units(split, &mut scratch.regions(parts.geometry)) }
    }
}

/// What it takes to look at a task.
pub(crate) struct Parts<'t, 'a, S, M> {
    pub(crate) s: S,
    pub(crate) mods: &'t M,
    pub(crate) call: &'t Call<'a>,
    pub(crate) outputs: &'t Shared<'a>,
    pub(crate) geometry: &'t Geometry,
}

impl<'t, 'a, S: Steps, A: ScoreMod, B: MaskMod, C: ProbMod> Parts<'t, 'a, S, Mods<A, B, C>> {
    pub(crate) fn fused(&self, task: Task) -> Fused<'t, 'a, S, Mods<A, B, C>> {
        Fused::new(self.s, self.mods, self.call, self.outputs, task, self.geometry)
    }
}
