//! Few rows, many keys: blocks of keys shared out over workers, each gathered by itself, then folded in order.
//! (Flash-Decoding: Dao, Haziza, Massa and Sizov 2023.)
//!
//! A unit is one block of keys of one key/value head, with all the rows that share the head. Its maxima, sums and
//! unnormalised outputs go where the fold finds them. Units are taken in the order in which their memory lies, runs of
//! them at a time: the core's own guesses at what will be read next come true, also from one unit to the next. The fold
//! takes a head's units in the order of their keys, whoever computed them: to the bit what one pass does. It begins when
//! all is gathered, on whatever workers are there by then: waking them a second time took longer than folding.

use crate::block::KEY_BLOCK;
use crate::finish::EndedGroups;
use crate::geometry::{Geometry, Regions, Scratch};
use crate::launch::{Call, Task};
use crate::lines::LINE_BYTES;
use crate::options::{MaskMod, Mods, ProbMod, ScoreMod};
use crate::poison::Care;
use crate::queue::Queue;
use crate::simd::LANES;
use crate::softmax;
use crate::source::KeyValues;
use crate::steps::Steps;
use crate::tile::{Fused, Next};
use core::marker::PhantomData;
use core::ops::Range;
use core::sync::atomic::{AtomicUsize, Ordering};

/// How often a worker that finds nothing more to gather looks whether the others are done: some 50 µs, a run's time. Then it
/// leaves the folding to them: they may not be running at all.
const PATIENCE: usize = 1 << 12;

/// The units of a call, and memory for what each gathers.
pub(crate) struct Split<'a> {
    partials: *mut f32,
    units: Units,
    /// Rows of a unit.
    rows: usize,
    width: usize,
    /// Units of a run.
    run: usize,
    runs: Queue,
    folds: Queue,
    /// Runs that are done.
    gathered: AtomicUsize,
    borrow: PhantomData<&'a mut [f32]>,
}

// SAFETY: an exclusive borrow of floats; every unit's part is written by whoever takes its run, and read by whoever folds
// after all runs are done.
unsafe impl Send for Split<'_> {}
// SAFETY: as above.
unsafe impl Sync for Split<'_> {}

/// The blocks of keys of all sequences and heads, in the order in which their memory lies.
pub(crate) struct Units {
    sequences: usize,
    heads: usize,
    /// Of the longest sequence.
    blocks: usize,
    order: Order,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Order {
    /// All blocks of a head, then the next head.
    Heads,
    /// A block of every head, then the next block.
    Blocks,
}

impl Units {
    pub(crate) fn new(kv: &KeyValues<'_>) -> Self {
        let [sequences, heads, kv_len, _] = kv.k_shape();
        let order = if kv.has_heads_inside() { Order::Blocks } else { Order::Heads };
        Self { sequences, heads, blocks: kv_len.div_ceil(KEY_BLOCK), order }
    }

    pub(crate) fn len(&self) -> usize {
        self.sequences * self.heads * self.blocks
    }

    /// Sequence, head and first key of a unit. Not every sequence is long enough to have it.
    pub(crate) fn at(&self, unit: usize) -> [usize; 3] {
        let (sequence, unit) = (unit / (self.heads * self.blocks), unit % (self.heads * self.blocks));
        let (head, block) = match self.order {
            Order::Heads => (unit / self.blocks, unit % self.blocks),
            Order::Blocks => (unit % self.heads, unit / self.heads),
        };
        [sequence, head, block * KEY_BLOCK]
    }
}

/// Floats that may be left free so that parts begin on a line.
const SLACK: usize = LANES - 1;

/// Floats of a unit's part: maxima and sums in whole vectors, then rows of outputs.
fn unit_floats(rows: usize, width: usize) -> usize {
    2 * rows.next_multiple_of(LANES) + rows * width
}

/// Floats that a call's units take together, and may leave free before them to begin on a line; `None` beyond the address space.
pub fn split_floats(shape: [usize; 3], rows: usize, value_dim: usize) -> Option<usize> {
    let [sequences, kv_heads, kv_len] = shape;
    let unit = unit_floats(rows, value_dim.next_multiple_of(LANES));
    sequences.checked_mul(kv_heads)?.checked_mul(kv_len.div_ceil(KEY_BLOCK))?.checked_mul(unit)?.checked_add(SLACK)
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
        // Whole lines: a vector that lies across two takes two stores.
        let (_, partials) = partials.split_at_mut(partials.as_ptr().align_offset(LINE_BYTES).min(SLACK));
        let units = Units::new(&call.kv);
        let run = units.len().div_ceil(runs.max(1)).max(1);
        Self {
            partials: partials.as_mut_ptr(),
            rows,
            width: geometry.width(),
            run,
            runs: Queue::new(units.len().div_ceil(run)),
            units,
            folds: Queue::new(sequences * heads),
            gathered: AtomicUsize::new(0),
            borrow: PhantomData,
        }
    }

    /// True once all runs are done, which is waited for a little: who comes too early leaves the rest to the last, who never
    /// does.
    pub(crate) fn is_gathered(&self) -> bool {
        // Acquire: what the gathering workers wrote.
        (0..PATIENCE).any(|_| {
            let done = self.gathered.load(Ordering::Acquire) == self.runs.len();
            if !done {
                core::hint::spin_loop();
            }
            done
        })
    }

    /// The units of a run.
    fn run(&self, run: usize) -> Range<usize> {
        run * self.run..self.units.len().min((run + 1) * self.run)
    }

    /// The task whose rows a unit is for, and its first key.
    fn unit(&self, unit: usize) -> (Task, usize) {
        let [index, kv_head, first] = self.units.at(unit);
        (self.task(index, kv_head), first)
    }

    /// All the rows of a head.
    fn task(&self, index: usize, kv_head: usize) -> Task {
        Task { index, kv_head, rows: 0..self.rows }
    }

    /// Where a unit's part is: maxima, sums, outputs.
    ///
    /// # Safety
    /// The unit is one of the call's; nobody else uses its part meanwhile.
    #[expect(clippy::mut_from_ref, reason = "who may write is the caller's promise")]
    unsafe fn part(&self, task: &Task, first: usize) -> [&mut [f32]; 3] {
        let padded = self.rows.next_multiple_of(LANES);
        // SAFETY: passed on.
        unsafe {
            let at = self.part_at(task, first);
            let part = |at: *mut f32, n: usize| core::slice::from_raw_parts_mut(at, n);
            [part(at, padded), part(at.add(padded), padded), part(at.add(2 * padded), self.rows * self.width)]
        }
    }

    /// Where a unit's part begins.
    ///
    /// # Safety
    /// The unit is one of the call's.
    unsafe fn part_at(&self, task: &Task, first: usize) -> *mut f32 {
        let Units { heads, blocks, .. } = self.units;
        let number = (task.index * heads + task.kv_head) * blocks + first / KEY_BLOCK;
        // SAFETY: `new` made sure that there is memory for every unit.
        unsafe { self.partials.add(number * unit_floats(self.rows, self.width)) }
    }

    /// What a unit's part takes.
    fn part_bytes(&self) -> usize {
        unit_floats(self.rows, self.width) * size_of::<f32>()
    }
}

impl<S: Steps, A: ScoreMod, B: MaskMod, C: ProbMod> Fused<'_, '_, S, Mods<A, B, C>> {
    /// Gathers a unit, if its rows see anything of it.
    ///
    /// # Safety
    /// As for [`Fused::run`], with the unit's part in place of the task's rows.
    unsafe fn gather_unit(&self, split: &Split<'_>, first: usize, regions: Regions<'_>) {
        if self.task.rows.is_empty() || !self.holds(first) {
            return;
        }
        // SAFETY: passed on.
        unsafe {
            // Straight to where the fold will find it.
            let [max, sum, out] = split.part(&self.task, first);
            let mut regions = Regions { max, sum, out, ..regions };
            let queries = self.queries(&mut regions);
            // As in `run`: again with care if anything is not finite.
            for care in [Care::Fast, Care::Careful] {
                self.gather(queries, (care, None), core::iter::once(first), &mut regions);
                if self.gathered_is_finite(&regions) {
                    break;
                }
            }
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
        for care in [Care::Fast, Care::Careful] {
            // SAFETY: passed on.
            if unsafe { self.finish(care, EndedGroups::NONE, regions) } {
                break;
            }
        }
    }
}

/// Takes runs of units and gathers them until none is left.
///
/// # Safety
/// The call is consistent with its outputs, and the split was made for it.
pub(crate) unsafe fn gather<'t, 'a: 't, S: Steps, A: ScoreMod + 't, B: MaskMod + 't, C: ProbMod + 't>(
    split: &Split<'_>,
    fused: impl Fn(Task) -> Fused<'t, 'a, S, Mods<A, B, C>>,
    scratch: &mut Scratch,
) {
    while let Some(run) = split.runs.take() {
        let units = split.run(run);
        for unit in units.clone() {
            let (task, first) = split.unit(unit);
            let next = (unit + 1 < units.end).then(|| split.unit(unit + 1));
            // SAFETY: one of the call's units.
            let gathered = unsafe { split.part_at(&task, first) };
            let fused = fused(task).followed_by(Next::Unit { gathered: (gathered.cast(), split.part_bytes()), next });
            // SAFETY: passed on; the unit belongs to this run, and the run was taken once.
            unsafe { fused.gather_unit(split, first, scratch.regions(fused.geometry)) }
        }
        // Release: what this worker wrote. Acquire: who folds may be this one.
        split.gathered.fetch_add(1, Ordering::AcqRel);
    }
}

/// Takes heads and folds their units until none is left.
///
/// # Safety
/// As for [`gather`]; all is gathered.
pub(crate) unsafe fn fold<'t, 'a: 't, S: Steps, A: ScoreMod + 't, B: MaskMod + 't, C: ProbMod + 't>(
    split: &Split<'_>,
    fused: impl Fn(Task) -> Fused<'t, 'a, S, Mods<A, B, C>>,
    scratch: &mut Scratch,
) {
    while let Some(number) = split.folds.take() {
        let (index, kv_head) = (number / split.units.heads, number % split.units.heads);
        let fused = fused(split.task(index, kv_head));
        // SAFETY: passed on; the head's rows are this worker's alone.
        unsafe { fused.fold_units(split, &mut scratch.regions(fused.geometry)) }
    }
}
