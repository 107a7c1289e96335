//! Few rows, many keys: blocks of keys shared out over workers, each accumulated by itself, then folded in order.
//! (Flash-Decoding: Dao, Haziza, Massa and Sizov 2023.)
//!
//! A unit is one block of keys of one key/value head, with all the rows that share the head. Its maxima, sums and
//! unnormalised outputs go where the merge finds them. Units are taken in the order in which their memory lies, runs of
//! them at a time: the core's own guesses at what will be read next come true, also from one unit to the next. The merge
//! takes a head's units in the order of their keys, whoever computed them: to the bit what one pass does. It begins when
//! all is accumulated, on whatever workers are there by then: waking them a second time took longer than folding.

use crate::attention::call::{Call, Sequence, Task};
use crate::attention::forward::epilogue::EndedRowBlocks;
use crate::attention::forward::task::{AttentionTask, Next};
use crate::attention::mods::{MaskMod, Mods, ProbMod, ScoreMod};
use crate::attention::steps::by_isa::Steps;
use crate::attention::steps::softmax;
use crate::attention::tiling::{Regions, Scratch, Tiling};
use crate::kv::source::KeyValues;
use crate::matmul::pack::NonFinite;
use crate::simd::LANES;
use crate::simd::aligned::AlignedBuf;
use crate::tensor::rows::KEY_BLOCK;
use crate::work_queue::Queue;
use core::marker::PhantomData;
use core::ops::Range;
use core::sync::atomic::{AtomicUsize, Ordering};

/// How often a worker that finds nothing more to accumulate looks whether the others are done: some 50 µs, a run's time. Then it
/// leaves the folding to them: they may not be running at all.
const PATIENCE: usize = 1 << 12;

/// Memory for what units accumulate. Grows to what calls need and stays.
#[derive(Debug, Default)]
pub struct Partials {
    lines: AlignedBuf,
    /// The number of each sequence's first unit, and that of all units.
    starts: Vec<usize>,
}

impl Partials {
    /// Empty; the first use allocates.
    pub const fn new() -> Self {
        Self { lines: AlignedBuf::new(), starts: Vec::new() }
    }

    /// Bytes held.
    pub fn bytes(&self) -> usize {
        self.lines.bytes() + self.starts.capacity() * size_of::<usize>()
    }

    /// Floats the units of a call and makes room for them. False if there is no memory.
    fn try_reserve(&mut self, call: &Call<'_>, rows: usize, value_dim: usize) -> bool {
        self.starts.clear();
        if self.starts.try_reserve(call.sequences() + 1).is_err() {
            return false;
        }
        let heads = call.kv.kv_heads();
        let mut units = 0;
        for index in 0..call.sequences() {
            self.starts.push(units);
            units += heads * call.blocks_seen(index).len();
        }
        self.starts.push(units);
        let unit = unit_floats(rows, value_dim.next_multiple_of(LANES));
        let Some(floats) = units.checked_mul(unit) else { return false };
        // Some room to grow, for sequences do.
        self.lines.holds(floats)
            || self.lines.try_reserve(floats.saturating_add(floats / 2))
            || self.lines.try_reserve(floats)
    }
}

/// What blocks of keys accumulate where they are shared out, and what they read for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Accumulation {
    /// Floats accumulated, by all blocks together; `usize::MAX` for more than can be counted.
    pub floats: usize,
    /// Keys read, each head's counted apart.
    pub keys: usize,
}

impl Call<'_> {
    /// What blocks of keys would accumulate: maxima, sums and outputs of all the rows that share a head, for each block that some
    /// row of its sequence may see.
    pub fn accumulation(&self) -> Accumulation {
        let (heads, [.., value_dim]) = (self.kv.kv_heads(), self.kv.v_shape());
        let rows = self.group_size().saturating_mul(self.q.shape()[2]);
        let unit = unit_floats(rows, value_dim.next_multiple_of(LANES));
        let (mut units, mut keys) = (0usize, 0usize);
        for index in 0..self.sequences() {
            units = units.saturating_add(heads.saturating_mul(self.blocks_seen(index).len()));
            keys = keys.saturating_add(heads.saturating_mul(self.keys_seen(index).len()));
        }
        Accumulation { floats: units.saturating_mul(unit), keys }
    }

    /// A range that holds every key that some row of a sequence may see, by its length and the rules that are ranges.
    fn keys_seen(&self, index: usize) -> Range<usize> {
        let Sequence { q_len, kv_len, offset, .. } = self.sequence(index);
        match q_len {
            0 => 0..0,
            _ if !self.visible.uses_position() => 0..kv_len,
            n => self.visible.hull(offset, offset.saturating_add_unsigned(n - 1), kv_len),
        }
    }

    /// The numbers of the blocks that hold them.
    fn blocks_seen(&self, index: usize) -> Range<usize> {
        let keys = self.keys_seen(index);
        keys.start / KEY_BLOCK..keys.end.div_ceil(KEY_BLOCK)
    }
}

/// The units of a call, and memory for what each gathers.
pub(crate) struct Split<'a> {
    partials: *mut f32,
    units: Units<'a>,
    /// Rows of a unit.
    rows: usize,
    width: usize,
    /// Units of a run.
    run: usize,
    runs: Queue,
    merges: Queue,
    /// Runs that are done.
    accumulated: AtomicUsize,
    borrow: PhantomData<&'a mut [f32]>,
}

// SAFETY: an exclusive borrow of floats; every unit's part is written by whoever takes its run, and read by whoever merges
// after all runs are done.
unsafe impl Send for Split<'_> {}
// SAFETY: as above.
unsafe impl Sync for Split<'_> {}

/// The blocks of keys of all sequences and heads, in the order in which their memory lies.
pub(crate) struct Units<'a> {
    heads: usize,
    /// The number of each sequence's first unit, and that of all units.
    starts: &'a [usize],
    order: Order,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Order {
    /// All blocks of a head, then the next head.
    Heads,
    /// A block of every head, then the next block.
    Blocks,
}

/// A unit: a block of a sequence and head, counted from the first block that the sequence has units for.
#[derive(Clone, Copy)]
pub(crate) struct Unit {
    pub(crate) sequence: usize,
    pub(crate) head: usize,
    pub(crate) block: usize,
}

impl<'a> Units<'a> {
    pub(crate) fn new(kv: &KeyValues<'_>, starts: &'a [usize]) -> Self {
        let order = if kv.has_heads_inside() { Order::Blocks } else { Order::Heads };
        Self { heads: kv.kv_heads(), starts, order }
    }

    pub(crate) fn len(&self) -> usize {
        self.starts.last().copied().unwrap_or(0)
    }

    /// Blocks that a sequence has units for.
    fn blocks(&self, sequence: usize) -> usize {
        (self.starts[sequence + 1] - self.starts[sequence]) / self.heads.max(1)
    }

    /// The unit of a number below [`Self::len`].
    pub(crate) fn at(&self, unit: usize) -> Unit {
        let sequence = self.starts.partition_point(|&start| start <= unit) - 1;
        let (unit, blocks) = (unit - self.starts[sequence], self.blocks(sequence));
        let (head, block) = match self.order {
            Order::Heads => (unit / blocks, unit % blocks),
            Order::Blocks => (unit % self.heads, unit / self.heads),
        };
        Unit { sequence, head, block }
    }

    /// Where a unit's part is among all parts.
    fn number(&self, Unit { sequence, head, block }: Unit) -> usize {
        self.starts[sequence] + head * self.blocks(sequence) + block
    }
}

/// Floats of a unit's part: maxima and sums in whole vectors, then rows of outputs.
fn unit_floats(rows: usize, width: usize) -> usize {
    let padded = rows.checked_next_multiple_of(LANES).unwrap_or(usize::MAX);
    padded.saturating_mul(2).saturating_add(rows.saturating_mul(width))
}

impl<'a> Split<'a> {
    /// Cuts the call into about so many runs. `None` if there is no memory for what they accumulate.
    ///
    /// # Panics
    /// If the rows of a head are more than a task's, or sequences are ragged.
    pub(crate) fn new(call: &Call<'_>, tiling: &Tiling, partials: &'a mut Partials, runs: usize) -> Option<Self> {
        let rows = call.group_size().saturating_mul(call.q.shape()[2]);
        assert!(rows <= tiling.task_rows && call.options.ragged.is_none(), "the rows of a head are no task");
        if !partials.try_reserve(call, rows, tiling.value_dim) {
            return None;
        }
        let units = Units::new(&call.kv, &partials.starts);
        let run = units.len().div_ceil(runs.max(1)).max(1);
        Some(Self {
            partials: partials.lines.floats_mut().as_mut_ptr(),
            rows,
            width: tiling.width(),
            run,
            runs: Queue::new(units.len().div_ceil(run)),
            merges: Queue::new(call.sequences() * units.heads),
            units,
            accumulated: AtomicUsize::new(0),
            borrow: PhantomData,
        })
    }

    /// True once all runs are done, which is waited for a little: who comes too early leaves the rest to the last, who never
    /// does.
    pub(crate) fn is_accumulated(&self) -> bool {
        // Acquire: what the accumulation workers wrote.
        (0..PATIENCE).any(|_| {
            let done = self.accumulated.load(Ordering::Acquire) == self.runs.len();
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
    fn unit(&self, call: &Call<'_>, unit: usize) -> (Task, usize) {
        let Unit { sequence, head, block } = self.units.at(unit);
        (self.task(sequence, head), (call.blocks_seen(sequence).start + block) * KEY_BLOCK)
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
    unsafe fn part(&self, call: &Call<'_>, task: &Task, first: usize) -> [&mut [f32]; 3] {
        let padded = self.rows.next_multiple_of(LANES);
        // SAFETY: the caller's promise; a part is maxima and sums, padded, and so many rows of outputs.
        unsafe {
            let at = self.part_at(call, task, first);
            let part = |at: *mut f32, n: usize| core::slice::from_raw_parts_mut(at, n);
            [part(at, padded), part(at.add(padded), padded), part(at.add(2 * padded), self.rows * self.width)]
        }
    }

    /// Where a unit's part begins.
    ///
    /// # Safety
    /// The unit is one of the call's.
    unsafe fn part_at(&self, call: &Call<'_>, task: &Task, first: usize) -> *mut f32 {
        let block = first / KEY_BLOCK - call.blocks_seen(task.index).start;
        let number = self.units.number(Unit { sequence: task.index, head: task.kv_head, block });
        debug_assert!(number < self.units.len());
        // SAFETY: `new` made sure that there is memory for every unit.
        unsafe { self.partials.add(number * unit_floats(self.rows, self.width)) }
    }

    /// What a unit's part takes.
    fn part_bytes(&self) -> usize {
        unit_floats(self.rows, self.width) * size_of::<f32>()
    }
}

impl<S: Steps, A: ScoreMod, B: MaskMod, C: ProbMod> AttentionTask<'_, '_, S, Mods<A, B, C>> {
    /// Gathers a unit, if its rows see anything of it.
    ///
    /// # Safety
    /// As for [`AttentionTask::run`], with the unit's part in place of the task's rows.
    unsafe fn accumulate_unit(&self, split: &Split<'_>, first: usize, regions: Regions<'_>) {
        if self.task.rows.is_empty() || !self.holds(first) {
            return;
        }
        // SAFETY: passed on.
        unsafe {
            // Straight to where the merge will find it.
            let [max, sum, out] = split.part(self.call, &self.task, first);
            let mut regions = Regions { max, sum, out, ..regions };
            let queries = self.queries(&mut regions);
            // As in `run`: again with nonfinite if anything is not finite.
            for nonfinite in [NonFinite::Ignored, NonFinite::Handled] {
                self.accumulate(queries, (nonfinite, None), core::iter::once(first), &mut regions);
                if self.accumulated_is_finite(&regions) {
                    break;
                }
            }
        }
    }

    /// Folds the units of the task's rows in the order of their keys, and writes the rows.
    ///
    /// # Safety
    /// As for [`AttentionTask::run`]; all units are accumulated.
    unsafe fn merge_units(&self, split: &Split<'_>, regions: &mut Regions<'_>) {
        // SAFETY: passed on; one merge a sequence and head.
        unsafe { self.fill_rows_beyond() };
        if self.task.rows.is_empty() {
            return;
        }
        self.clear(regions);
        let padded = self.task.rows.len().next_multiple_of(LANES);
        for first in self.blocks() {
            // SAFETY: the unit is accumulated, and nobody else merges it.
            let [max, sum, out] = unsafe { split.part(self.call, &self.task, first) };
            let state = softmax::Rows {
                max: &mut regions.max[..padded],
                sum: &mut regions.sum[..padded],
                rescale_prev: max,
                rescale_block: sum,
            };
            self.s.merge(state, &mut regions.out[..out.len()], out, split.width);
        }
        // SAFETY: passed on.
        if unsafe { self.finish(NonFinite::Ignored, EndedRowBlocks::NONE, regions) } {
            return;
        }
        // Again, with nonfinite for what is marked, by the factors that were found.
        self.clear_outputs(0..self.task.rows.len(), regions);
        for first in self.blocks() {
            // SAFETY: as above.
            let [rescale_prev, factor, out] = unsafe { split.part(self.call, &self.task, first) };
            self.s.merge_marked([rescale_prev, factor], &mut regions.out[..out.len()], out, split.width);
        }
        // SAFETY: passed on.
        unsafe { self.finish(NonFinite::Handled, EndedRowBlocks::NONE, regions) };
    }
}

/// Takes runs of units and gathers them until none is left.
///
/// # Safety
/// The call is consistent with its outputs, and the split was made for it.
pub(crate) unsafe fn accumulate<'t, 'a: 't, S: Steps, A: ScoreMod + 't, B: MaskMod + 't, C: ProbMod + 't>(
    split: &Split<'_>,
    call: &Call<'_>,
    fused: impl Fn(Task) -> AttentionTask<'t, 'a, S, Mods<A, B, C>>,
    scratch: &mut Scratch,
) {
    while let Some(run) = split.runs.take() {
        let units = split.run(run);
        for unit in units.clone() {
            let (task, first) = split.unit(call, unit);
            let next = (unit + 1 < units.end).then(|| split.unit(call, unit + 1));
            // SAFETY: one of the call's units.
            let accumulated = unsafe { split.part_at(call, &task, first) };
            let fused =
                fused(task).followed_by(Next::Unit { accumulated: (accumulated.cast(), split.part_bytes()), next });
            // SAFETY: passed on; the unit belongs to this run, and the run was taken once.
            unsafe { fused.accumulate_unit(split, first, scratch.regions(fused.tiling)) }
        }
        // Release: what this worker wrote. Acquire: who merges may be this one.
        split.accumulated.fetch_add(1, Ordering::AcqRel);
    }
}

/// Takes heads and merges their units until none is left.
///
/// # Safety
/// As for [`accumulate`]; all is accumulated.
pub(crate) unsafe fn merge<'t, 'a: 't, S: Steps, A: ScoreMod + 't, B: MaskMod + 't, C: ProbMod + 't>(
    split: &Split<'_>,
    fused: impl Fn(Task) -> AttentionTask<'t, 'a, S, Mods<A, B, C>>,
    scratch: &mut Scratch,
) {
    while let Some(number) = split.merges.take() {
        let (index, kv_head) = (number / split.units.heads, number % split.units.heads);
        let fused = fused(split.task(index, kv_head));
        // SAFETY: passed on; the head's rows are this worker's alone.
        unsafe { fused.merge_units(split, &mut scratch.regions(fused.tiling)) }
    }
}
