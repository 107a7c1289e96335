//! Split-KV, for few rows and many keys: key blocks are shared out over workers, each is accumulated by itself, then
//! they are merged in order. (Flash-Decoding: Dao, Haziza, Massa and Sizov 2023.)
//!
//! A unit is one key block of one key/value head, with all the rows that share the head. Its maxima, sums and
//! unnormalised outputs are written where the merge reads them. Units are taken in the order in which their memory
//! lies, in runs, so that the hardware prefetcher predicts the next reads, also from one unit to the next. The merge
//! takes a head's units in the order of their keys, on whichever workers they were computed: the result is bit for bit
//! that of one pass. It begins when all units are accumulated, on the workers that are awake by then: waking the others
//! a second time took longer than merging.

use crate::attention::blocks::task::{AttentionTask, BoundCall, Next};
use crate::attention::call::{Call, Sequence, Task};
use crate::attention::forward::epilogue::EndedRowBlocks;
use crate::attention::steps::by_isa::Steps;
use crate::attention::steps::softmax;
use crate::attention::tiling::{Regions, Scratch, Tiling};
use crate::attention::units::{Start, Unit, Units};
use crate::matmul::pack::NonFinite;
use crate::simd::LANES;
use crate::simd::aligned::AlignedBuf;
use crate::tensor::rows::KEY_BLOCK;
use crate::work_queue::{Queue, Stop};
use core::marker::PhantomData;
use core::ops::Range;
use core::sync::atomic::{AtomicUsize, Ordering};

/// Number of times a worker with nothing more to accumulate checks if the others are done: some 50 µs, the time of a
/// run. Then it leaves the merge to them: they may not be running at all.
const PATIENCE: usize = 1 << 12;

/// Memory for what units accumulate. Grows to the size calls need and is kept.
#[derive(Debug, Default)]
pub struct Partials {
    buffer: AlignedBuf,
    /// Start of each sequence, then the end of the last.
    starts: Vec<Start>,
}

impl Partials {
    /// Creates empty memory; the first use allocates.
    pub const fn new() -> Self {
        Self { buffer: AlignedBuf::new(), starts: Vec::new() }
    }

    /// Number of bytes held.
    pub fn bytes(&self) -> usize {
        self.buffer.bytes() + self.starts.capacity() * size_of::<Start>()
    }

    /// Counts the units of the sequences with at most `few` rows and reserves memory for them. Returns false if there
    /// is no memory.
    fn try_reserve(&mut self, call: &Call<'_>, few: usize) -> bool {
        self.starts.clear();
        if self.starts.try_reserve(call.sequences() + 1).is_err() {
            return false;
        }
        let mut all = Start::default();
        self.starts.push(all);
        for sequence in 0..call.sequences() {
            let Some(next) = call.units_of(sequence, few).and_then(|its| all.plus(its)) else { return false };
            all = next;
            self.starts.push(all);
        }
        // Half as much again if possible, because sequences grow.
        self.buffer.holds(all.floats)
            || self.buffer.try_reserve(all.floats.saturating_add(all.floats / 2))
            || self.buffer.try_reserve(all.floats)
    }
}

/// Amount of data that the units of a call accumulate under split-KV, and of keys that they read for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Accumulation {
    /// Number of units; `usize::MAX` if it overflows.
    pub units: usize,
    /// Number of floats accumulated by all units together; `usize::MAX` if it overflows.
    pub floats: usize,
    /// Number of keys read, counted once for each key/value head.
    pub keys: usize,
}

impl Call<'_> {
    /// Returns how much the key blocks of the sequences with at most `few` rows a key/value head would accumulate under
    /// split-KV: maxima, sums and outputs of all the rows that share a head, for each block with a key that may be
    /// visible to some row of its sequence.
    pub fn accumulation(&self, few: usize) -> Accumulation {
        const OVERFLOW: Start = Start { units: usize::MAX, floats: usize::MAX };
        let (mut all, mut keys) = (Start::default(), 0usize);
        for sequence in (0..self.sequences()).filter(|&sequence| self.has_few_rows(sequence, few)) {
            all = self.units_of(sequence, few).and_then(|its| all.plus(its)).unwrap_or(OVERFLOW);
            keys = keys.saturating_add(self.kv.kv_heads().saturating_mul(self.visible_keys(sequence).len()));
        }
        Accumulation { units: all.units, floats: all.floats, keys }
    }

    /// Returns true if at most `few` rows of a sequence share a key/value head.
    fn has_few_rows(&self, sequence: usize, few: usize) -> bool {
        self.rows_of(sequence) <= few
    }

    /// Returns the units of a sequence and what they accumulate: none if it has more than `few` rows. `None` if a number
    /// overflows.
    fn units_of(&self, sequence: usize, few: usize) -> Option<Start> {
        if !self.has_few_rows(sequence, few) {
            return Some(Start::default());
        }
        let units = self.kv.kv_heads().checked_mul(self.visible_blocks(sequence).len())?;
        let [.., value_dim] = self.kv.v_shape();
        let part = unit_floats(self.rows_of(sequence), value_dim.next_multiple_of(LANES));
        Some(Start { units, floats: units.checked_mul(part)? })
    }

    /// Returns a range that holds every key visible to some row of a sequence by its length and the range rules.
    fn visible_keys(&self, sequence: usize) -> Range<usize> {
        let Sequence { q_len, kv_len, offset, .. } = self.sequence(sequence);
        match q_len {
            0 => 0..0,
            _ if !self.visible.hides_keys() => 0..kv_len,
            n => self.visible.key_range(offset, offset.saturating_add_unsigned(n - 1), kv_len),
        }
    }

    /// Returns the numbers of the blocks that hold [`Self::visible_keys`].
    fn visible_blocks(&self, sequence: usize) -> Range<usize> {
        let keys = self.visible_keys(sequence);
        keys.start / KEY_BLOCK..keys.end.div_ceil(KEY_BLOCK)
    }
}

/// Sequences that are split into units, and how the units are handed out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FewRows {
    /// Largest number of rows a key/value head of a sequence that is split.
    pub few: usize,
    /// Number of runs that the units are handed out in, about.
    pub runs: usize,
}

/// Units of the sequences with few rows, and memory for what each accumulates.
pub(crate) struct Split<'a> {
    partials: *mut f32,
    units: Units<'a>,
    /// Number of rows a key/value head up to which a sequence is split into units.
    few: usize,
    width: usize,
    /// Number of units of a run.
    run: usize,
    runs: Queue,
    merges: Queue,
    /// Number of runs that are done.
    accumulated: AtomicUsize,
    borrow: PhantomData<&'a mut [f32]>,
}

// SAFETY: `partials` is an exclusive borrow of floats; a unit's part is written only by the worker that takes its run,
// and read and rewritten only by the worker that merges its head, after all runs are done.
unsafe impl Send for Split<'_> {}
// SAFETY: shared access obeys the same rule: one worker writes a part, and one merges it after all runs are done.
unsafe impl Sync for Split<'_> {}

/// Number of floats of a unit's part: maxima and sums in whole vectors, then rows of outputs.
fn unit_floats(rows: usize, width: usize) -> usize {
    let padded = rows.checked_next_multiple_of(LANES).unwrap_or(usize::MAX);
    padded.saturating_mul(2).saturating_add(rows.saturating_mul(width))
}

impl<'a> Split<'a> {
    /// Splits the sequences with at most `few` rows a head into units, in about `runs` runs. `None` if there is no memory
    /// for what they accumulate.
    ///
    /// # Panics
    /// If `few` rows are more than a task's.
    pub(crate) fn new(
        call: &Call<'_>,
        tiling: &Tiling,
        partials: &'a mut Partials,
        FewRows { few, runs }: FewRows,
    ) -> Option<Self> {
        assert!(few <= tiling.task_rows, "the rows of a head are no task");
        if !partials.try_reserve(call, few) {
            return None;
        }
        let units = Units::new(&call.kv, &partials.starts);
        let run = units.len().div_ceil(runs.max(1)).max(1);
        Some(Self {
            partials: partials.buffer.floats_mut().as_mut_ptr(),
            few,
            width: tiling.width(),
            run,
            runs: Queue::new(units.len().div_ceil(run)),
            merges: Queue::new(call.sequences().checked_mul(units.heads)?),
            units,
            accumulated: AtomicUsize::new(0),
            borrow: PhantomData,
        })
    }

    /// Returns true if a sequence is split into units.
    pub(crate) fn covers(&self, call: &Call<'_>, sequence: usize) -> bool {
        call.has_few_rows(sequence, self.few)
    }

    /// Waits a little until all runs are done, and returns true if they are. A worker that comes too early leaves the
    /// merge to the others; the last one to finish its runs always finds all of them done.
    pub(crate) fn is_accumulated(&self) -> bool {
        // Acquire: makes the parts written by all workers visible.
        (0..PATIENCE).any(|_| {
            let done = self.accumulated.load(Ordering::Acquire) == self.runs.len();
            if !done {
                core::hint::spin_loop();
            }
            done
        })
    }

    /// Returns the numbers of a run's units.
    fn run(&self, run: usize) -> Range<usize> {
        run * self.run..self.units.len().min((run + 1) * self.run)
    }

    /// Returns the task whose rows a unit belongs to, and the unit's first key.
    fn unit(&self, call: &Call<'_>, unit: usize) -> (Task, usize) {
        let Unit { sequence, head, block } = self.units.at(unit);
        (self.task(call, [sequence, head]), (call.visible_blocks(sequence).start + block) * KEY_BLOCK)
    }

    /// Returns the task of all the rows of a sequence that share a key/value head.
    fn task(&self, call: &Call<'_>, [sequence, kv_head]: [usize; 2]) -> Task {
        Task { sequence, kv_head, rows: 0..call.rows_of(sequence) }
    }

    /// Returns a unit's part: maxima, sums, outputs.
    ///
    /// # Safety
    /// The unit is one of the call's, and the task is all its rows; no other reference to its part exists meanwhile.
    #[expect(clippy::mut_from_ref, reason = "the caller guarantees sole access to the part")]
    unsafe fn part(&self, call: &Call<'_>, task: &Task, first: usize) -> [&mut [f32]; 3] {
        let rows = task.rows.len();
        let padded = rows.next_multiple_of(LANES);
        // SAFETY: the caller guarantees the unit and sole access to its part; a part is maxima and sums, both padded,
        // and `rows` rows of outputs.
        unsafe {
            let at = self.part_at(call, task, first);
            let part = |at: *mut f32, n: usize| core::slice::from_raw_parts_mut(at, n);
            [part(at, padded), part(at.add(padded), padded), part(at.add(2 * padded), rows * self.width)]
        }
    }

    /// Returns the address of a unit's part.
    ///
    /// # Safety
    /// The unit is one of the call's, and the task is all its rows.
    unsafe fn part_at(&self, call: &Call<'_>, task: &Task, first: usize) -> *mut f32 {
        // A block before the first wraps around, and is beyond the last.
        let block = (first / KEY_BLOCK).wrapping_sub(call.visible_blocks(task.sequence).start);
        assert!(block < self.units.blocks(task.sequence), "key {first} belongs to no unit");
        let unit = Unit { sequence: task.sequence, head: task.kv_head, block };
        let offset = self.units.offset(unit, unit_floats(task.rows.len(), self.width));
        // SAFETY: the block was just checked, and the caller guarantees the sequence and head, and that the task is all
        // their rows, so the part lies among those of its sequence; `new` has reserved a part for each unit.
        unsafe { self.partials.add(offset) }
    }

    /// Number of bytes of a unit's part.
    fn part_bytes(&self, task: &Task) -> usize {
        unit_floats(task.rows.len(), self.width) * size_of::<f32>()
    }
}

impl<S: Steps> AttentionTask<'_, S> {
    /// Accumulates a unit, if any of its keys is visible to its rows.
    ///
    /// # Safety
    /// The split was made for this call, the task is a unit's, and the unit's part is this worker's alone.
    unsafe fn accumulate_unit(&self, split: &Split<'_>, first: usize, regions: Regions<'_>) {
        if self.task.rows.is_empty() || !self.holds(first) {
            return;
        }
        // SAFETY: the caller guarantees the unit, and that its part is this worker's alone.
        let [max, sum, out] = unsafe { split.part(self.call, &self.task, first) };
        // Accumulate directly where the merge reads it.
        let regions = &mut Regions { max, sum, out, ..regions };
        let queries = self.queries(regions);
        // As in `run`: once more, with non-finite values handled, if anything is not finite.
        for nonfinite in [NonFinite::Ignored, NonFinite::Handled] {
            self.accumulate(queries, nonfinite, None, core::iter::once(first), regions);
            if self.accumulated_is_finite(regions) {
                break;
            }
        }
    }

    /// Merges the units of the task's rows in the order of their keys, and writes the rows.
    ///
    /// # Safety
    /// The split was made for this call, the task is all the rows that share a head, all units are accumulated, and no
    /// other worker merges these.
    unsafe fn merge_units(&self, split: &Split<'_>, regions: &mut Regions<'_>) {
        self.fill_rows_beyond();
        if self.task.rows.is_empty() {
            return;
        }
        self.clear(regions);
        let padded = self.task.rows.len().next_multiple_of(LANES);
        for first in self.blocks() {
            // SAFETY: the unit is accumulated, and only this worker merges it.
            let [max, sum, out] = unsafe { split.part(self.call, &self.task, first) };
            let state = softmax::SoftmaxState {
                max: &mut regions.max[..padded],
                sum: &mut regions.sum[..padded],
                rescale_prev: max,
                rescale_block: sum,
            };
            self.s.merge(state, &mut regions.out[..out.len()], out, split.width);
        }
        if self.finish(NonFinite::Ignored, EndedRowBlocks::NONE, regions) {
            return;
        }
        // Merge again with non-finite values handled: marks stay marks. The factors are those of the first merge.
        self.clear_outputs(0..self.task.rows.len(), regions);
        for first in self.blocks() {
            // SAFETY: the unit is accumulated, and only this worker merges it.
            let [rescale_prev, factor, out] = unsafe { split.part(self.call, &self.task, first) };
            self.s.merge_marked([rescale_prev, factor], &mut regions.out[..out.len()], out, split.width);
        }
        self.finish(NonFinite::Handled, EndedRowBlocks::NONE, regions);
    }
}

/// Accumulates units until none is left, then merges them, unless other workers are still accumulating.
///
/// # Safety
/// The split was made for this call.
pub(crate) unsafe fn run<S: Steps>(split: &Split<'_>, bound: BoundCall<'_, S>, stop: &Stop<'_>, scratch: &mut Scratch) {
    // SAFETY: the caller guarantees the split; the units are merged when all are accumulated.
    unsafe {
        accumulate(split, bound, stop, scratch);
        if !stop.is_stopped() && split.is_accumulated() {
            merge(split, bound, stop, scratch);
        }
    }
}

/// Takes runs of units and accumulates them until none is left.
///
/// # Safety
/// The split was made for this call.
unsafe fn accumulate<S: Steps>(split: &Split<'_>, bound: BoundCall<'_, S>, stop: &Stop<'_>, scratch: &mut Scratch) {
    let (call, tiling) = (bound.checked.call(), bound.checked.tiling());
    while let Some(run) = split.runs.take_unless(stop) {
        let units = split.run(run);
        for unit in units.clone() {
            // A run that is not done is not counted, so nothing is merged.
            if stop.leaves() {
                return;
            }
            let (task, first) = split.unit(call, unit);
            let next = (unit + 1 < units.end).then(|| split.unit(call, unit + 1));
            // SAFETY: the unit is one of the call's.
            let accumulated = unsafe { split.part_at(call, &task, first) };
            let next = Next::Unit { accumulated: (accumulated.cast(), split.part_bytes(&task)), next };
            let task = AttentionTask::reading(bound, task).followed_by(next);
            // SAFETY: the unit belongs to this run, and the run was taken once, so its part is this worker's.
            unsafe { task.accumulate_unit(split, first, scratch.regions(tiling)) }
        }
        // Release: publishes what this worker wrote. Acquire: this worker may be the one that merges.
        split.accumulated.fetch_add(1, Ordering::AcqRel);
    }
}

/// Takes heads and merges their units until none is left.
///
/// # Safety
/// The split was made for this call; all units are accumulated.
unsafe fn merge<S: Steps>(split: &Split<'_>, bound: BoundCall<'_, S>, stop: &Stop<'_>, scratch: &mut Scratch) {
    while let Some(number) = split.merges.take_unless(stop) {
        let head = [number / split.units.heads, number % split.units.heads];
        if !split.covers(bound.checked.call(), head[0]) {
            continue;
        }
        // SAFETY: each head is taken once, so its rows, and its units' parts, are this worker's.
        unsafe {
            let task = AttentionTask::new(bound, split.task(bound.checked.call(), head));
            task.merge_units(split, &mut scratch.regions(task.tiling));
        }
    }
}
