//! Partial results of split-KV: memory for what units accumulate, and the queues that hand units out.

use crate::attention::blocks::task::Next;
use crate::attention::call::tiling::Tiling;
use crate::attention::call::{Call, Task};
use crate::attention::schedule::runs::FewRows;
use crate::attention::schedule::units::{Places, Unit, Units, unit_floats};
use crate::simd::LANES;
use crate::simd::aligned::AlignedBuf;
use crate::work_queue::{Queue, Stop};
use core::marker::PhantomData;
use core::ops::Range;
use core::sync::atomic::{AtomicUsize, Ordering};

/// Number of times a worker with nothing more to accumulate checks if the others are done, for each vector of rows: some
/// 50 to 200 µs, the time of a run. Then it leaves the merge to them: they may not be running at all.
const PATIENCE: usize = 1 << 12;

/// Memory for what units accumulate. Grows to the size calls need and is kept.
#[derive(Debug)]
pub struct Partials {
    buffer: AlignedBuf,
    places: Places,
}

impl Default for Partials {
    fn default() -> Self {
        Self::new()
    }
}

impl Partials {
    /// Creates empty memory; the first use allocates.
    pub const fn new() -> Self {
        Self { buffer: AlignedBuf::new(), places: Places::new() }
    }

    /// Number of bytes held.
    pub fn bytes(&self) -> usize {
        self.buffer.bytes() + self.places.bytes()
    }

    /// Counts the units of the sequences with few rows and reserves memory for them. Returns false if there is no memory.
    fn try_reserve(&mut self, call: &Call<'_>, few: FewRows) -> bool {
        let Some(floats) = self.places.try_fill(call, few) else { return false };
        // Half as much again if possible, because sequences grow.
        self.buffer.holds(floats)
            || self.buffer.try_reserve(floats.saturating_add(floats / 2))
            || self.buffer.try_reserve(floats)
    }
}

/// Number of rows whose units are merged together: a vector of rows.
pub(crate) const MERGED_ROWS: usize = LANES;

/// Returns the number of merges of the units of `rows` rows; one if there are none.
pub(crate) fn merges(rows: usize) -> usize {
    rows.div_ceil(MERGED_ROWS).max(1)
}

/// Rows of a place and key/value head whose units are merged together, and the place.
pub(crate) struct Merge {
    pub(crate) place: usize,
    pub(crate) task: Task,
}

/// Units of the sequences with few rows, memory for what each accumulates, and the queues that hand them out.
pub(crate) struct Split<'a> {
    partials: *mut f32,
    pub(crate) units: Units<'a>,
    /// Number of rows a key/value head up to which a sequence is split into units.
    few: usize,
    /// Number of floats from one row of outputs to the next.
    pub(crate) width: usize,
    /// Queue of runs.
    pub(crate) queue: Queue,
    /// Queue of [merges](Merge).
    pub(crate) merges: Queue,
    /// Number of runs that are done.
    pub(crate) accumulated: AtomicUsize,
    borrow: PhantomData<&'a mut [f32]>,
}

// SAFETY: `partials` is an exclusive borrow of floats; the part of a key block, place and head is written only by the worker
// that takes the run of the block's one unit, and where blocks have one part together, one run has all their units; after all
// runs are done, each row of a part is read and rewritten only by the worker that takes the merge of its place, head and rows.
unsafe impl Send for Split<'_> {}
// SAFETY: shared access obeys the same rule: at any time, one worker has a part, or a row of it.
unsafe impl Sync for Split<'_> {}

impl<'a> Split<'a> {
    /// Splits the sequences with few rows into units. `None` if there is no memory for what they accumulate.
    ///
    /// # Panics
    /// If `few` rows are more than a task's.
    pub(crate) fn new(call: &Call<'_>, tiling: &Tiling, partials: &'a mut Partials, few_rows: FewRows) -> Option<Self> {
        let few = few_rows.few;
        assert!(few <= tiling.task_rows, "the rows of a head are no task");
        if !partials.try_reserve(call, few_rows) {
            return None;
        }
        let units = Units::new(&call.kv, &partials.places);
        let merged = units.places().checked_mul(units.heads)?.checked_mul(merges(few))?;
        Some(Self {
            partials: partials.buffer.floats_mut().as_mut_ptr(),
            few,
            width: tiling.width(),
            queue: Queue::new(units.runs.len()),
            merges: Queue::new(merged),
            units,
            accumulated: AtomicUsize::new(0),
            borrow: PhantomData,
        })
    }

    /// Waits a little until all runs are done, and returns true if they are. A worker that comes too early, or sees that
    /// the call is stopped, leaves the merge to the others; the last one to finish its runs always finds all of them done.
    pub(crate) fn is_accumulated(&self, stop: &Stop<'_>) -> bool {
        for _ in 0..PATIENCE * merges(self.few) {
            // Acquire: makes the parts written by all workers visible.
            let done = self.accumulated.load(Ordering::Acquire) == self.queue.len();
            if done || stop.is_stopped() {
                return done;
            }
            core::hint::spin_loop();
        }
        false
    }

    /// Returns the numbers of the units of the run that the queue gives this number. The queue counts down: prefixes that
    /// sequences share come first, the short blocks at their ends last.
    pub(crate) fn run(&self, number: usize) -> Range<usize> {
        self.units.runs.units(self.queue.len() - 1 - number)
    }

    /// Returns the merge that the queue gives this number, if it has rows, or is the first of its place and head.
    pub(crate) fn merge(&self, number: usize) -> Option<Merge> {
        let chunks = merges(self.few);
        let (number, chunk) = (number / chunks, number % chunks);
        let (place, head) = (number / self.units.heads, number % self.units.heads);
        let Task { sequence, kv_head, rows } = self.task([place, head]);
        let first = chunk * MERGED_ROWS;
        let rows = first..rows.end.min(first + MERGED_ROWS);
        (chunk == 0 || !rows.is_empty()).then_some(Merge { place, task: Task { sequence, kv_head, rows } })
    }

    /// Returns the task of all the rows of a place that share a key/value head.
    pub(crate) fn task(&self, [place, kv_head]: [usize; 2]) -> Task {
        Task { sequence: self.units.sequence(place), kv_head, rows: 0..self.units.rows(place) }
    }

    /// Returns some rows of the part that a unit is accumulated into, from a whole vector of rows on: maxima and sums, both
    /// padded to whole vectors, and outputs.
    ///
    /// # Panics
    /// If the rows are none of the part's, or begin inside a vector.
    ///
    /// # Safety
    /// The unit is one of the split's; no other reference to these rows of its part exists meanwhile.
    #[expect(clippy::mut_from_ref, reason = "the caller guarantees sole access to the part")]
    pub(crate) unsafe fn part(&self, unit: Unit, rows: Range<usize>) -> [&mut [f32]; 3] {
        let all = self.units.rows(unit.place);
        assert!(rows.end <= all && rows.start.is_multiple_of(LANES), "rows {rows:?} of {all}");
        let [all, padded] = [all, rows.len()].map(|rows| rows.next_multiple_of(LANES));
        // SAFETY: the caller guarantees the unit and sole access to the rows of its part, which are some of it: a part is
        // maxima and sums, both padded, and rows of outputs.
        unsafe {
            let at = self.part_at(unit);
            let part = |at: *mut f32, n: usize| core::slice::from_raw_parts_mut(at, n);
            let out = at.add(2 * all + rows.start * self.width);
            [
                part(at.add(rows.start), padded),
                part(at.add(all + rows.start), padded),
                part(out, rows.len() * self.width),
            ]
        }
    }

    /// Clears the part that a unit is accumulated into: nothing is accumulated yet.
    ///
    /// # Safety
    /// As [`Self::part`], for all rows of the unit.
    pub(crate) unsafe fn clear(&self, unit: Unit) {
        // SAFETY: same contract.
        let [max, sum, out] = unsafe { self.part(unit, 0..self.units.rows(unit.place)) };
        max.fill(f32::NEG_INFINITY);
        sum.fill(0.0);
        out.fill(0.0);
    }

    /// Returns the address of the part that a unit is accumulated into.
    ///
    /// # Safety
    /// The unit is one of the split's.
    unsafe fn part_at(&self, unit: Unit) -> *mut f32 {
        // SAFETY: `offset` checks place, head and block, so the part lies among those of its place, for all of which `new` has
        // reserved memory.
        unsafe { self.partials.add(self.units.offset(unit, self.width)) }
    }

    /// Returns the work of a unit that another one follows in its run.
    ///
    /// # Safety
    /// The unit is one of the split's.
    pub(crate) unsafe fn followed_by(&self, unit: Unit, next: Option<Unit>) -> Next {
        // SAFETY: same contract: the caller guarantees the unit.
        let at = unsafe { self.part_at(unit) }.cast_const().cast();
        // One part for all blocks has been accumulated into just now.
        let bytes = match self.units.in_order(unit.place) {
            true => 0,
            false => unit_floats(self.units.rows(unit.place), self.width) * size_of::<f32>(),
        };
        // Without rows: its keys are prefetched, and it may have more rows than the task that prefetches them.
        let keys_of = |unit: Unit| Task { rows: 0..0, ..self.task([unit.place, unit.head]) };
        let next = next.map(|next| (keys_of(next), self.units.first_key(next)));
        Next::Unit { accumulated: (at, bytes), next }
    }
}
