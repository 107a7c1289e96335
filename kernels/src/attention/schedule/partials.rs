//! Partial results of split-KV: memory for what key blocks accumulate until it is merged.

use crate::attention::call::tiling::Tiling;
use crate::attention::call::{Call, SplitSequence};
use crate::attention::schedule::split_sequences::{SplitRows, SplitSequences, Then, merges_of, part_floats};
use crate::attention::schedule::units::{Unit, Units};
use crate::attention::schedule::work::Schedule;
use crate::simd::LANES;
use crate::simd::aligned::{AlignedBuf, SharedFloats};
use crate::work_queue::{Progress, Queue, Stop};
use core::ops::Range;

/// Number of times a worker with nothing more to accumulate checks if the others are done, for each vector of rows: some
/// 50 to 200 µs, the time of a run. Then it leaves the merge to them: they may not be running at all.
const PATIENCE: usize = 1 << 12;

/// Memory for what units accumulate. Grows to the size calls need and is kept.
#[derive(Debug)]
pub struct Partials {
    buffer: AlignedBuf,
    entries: SplitSequences,
}

impl Default for Partials {
    fn default() -> Self {
        Self::new()
    }
}

impl Partials {
    /// Creates empty memory; the first use allocates.
    pub const fn new() -> Self {
        Self { buffer: AlignedBuf::new(), entries: SplitSequences::new() }
    }

    /// Number of bytes held.
    pub fn bytes(&self) -> usize {
        self.buffer.bytes() + self.entries.bytes()
    }

    /// Number of bytes that new memory holds for the parts of `sequences` sequences, `floats` floats in all; `usize::MAX` on
    /// overflow.
    pub(crate) const fn bytes_for(floats: usize, sequences: usize) -> usize {
        AlignedBuf::bytes_for(with_room(floats)).saturating_add(SplitSequences::bytes_for(sequences))
    }

    /// Returns the sequences of the last call that were split.
    pub(crate) fn entries(&self) -> &[SplitSequence] {
        self.entries.list().split_last().map_or(&[], |(_end, entries)| entries)
    }

    /// Returns maxima, sums and outputs, of `width` floats a row, that the rows of an entry and key/value head have accumulated
    /// over each key block, in the order of the blocks. The call's parts were kept.
    pub(crate) fn parts(&self, entry: &SplitSequence, [head, width]: [usize; 2]) -> impl Iterator<Item = [&[f32]; 3]> {
        let (rows, padded) = (entry.rows, entry.rows.next_multiple_of(LANES));
        let floats = part_floats(rows, width);
        let first = entry.first_float + head * entry.parts() * floats;
        self.buffer.floats()[first..first + entry.parts() * floats].chunks_exact(floats.max(1)).map(move |part| {
            let ((max, rest), outs) = (part.split_at(padded), rows * width);
            [max, &rest[..padded], &rest[padded..padded + outs]]
        })
    }

    /// Lists the work of a call whose sequences with few rows are split, and reserves memory for their parts. `None` if there is
    /// no memory.
    ///
    /// # Panics
    /// If sequences of more rows than a task's are split.
    pub(crate) fn split<'a>(
        &'a mut self,
        call: &Call<'_>,
        tiling: &Tiling,
        split_rows: SplitRows,
    ) -> Option<(Schedule<'a>, Parts<'a>)> {
        assert!(split_rows.most_rows <= tiling.task_rows, "the rows of a head are no task");
        let Self { buffer, entries } = self;
        let schedule = Schedule::new(call, tiling, Some(split_rows), entries);
        let units = schedule.units?;
        let floats = units.floats();
        let there = buffer.holds(floats) || buffer.try_reserve(with_room(floats)) || buffer.try_reserve(floats);
        there.then(|| (schedule, Parts::new(units, tiling.width(), buffer.floats_mut(), split_rows.then)))
    }
}

/// Number of floats to reserve for `floats`: half as many again, if there is memory, because sequences grow.
const fn with_room(floats: usize) -> usize {
    floats.saturating_add(floats / 2)
}

/// Parts: what the units of a call accumulate, each written by one worker, then merged.
pub(crate) struct Parts<'a> {
    /// All parts. That of a key block, entry and head is written only by the worker that takes the run of the block's one unit, and
    /// where blocks have one part together, one run has all their units; after all runs are done, each row of a part is read and
    /// rewritten only by the worker that takes the merge of its entry, head and rows.
    floats: SharedFloats<'a>,
    pub(crate) units: Units<'a>,
    /// Number of floats from one row of outputs to the next.
    pub(crate) width: usize,
    /// Queue of [merges](Units::merge).
    pub(crate) merges: Queue,
    /// Number of runs that are done.
    pub(crate) accumulated: Progress,
}

impl<'a> Parts<'a> {
    /// Lays the parts of all units, with outputs of `width` floats a row, in `memory`.
    ///
    /// # Panics
    /// If the memory is too short.
    fn new(units: Units<'a>, width: usize, memory: &'a mut [f32], then: Then) -> Self {
        assert!(memory.len() >= units.floats(), "no memory for the parts");
        Self {
            floats: SharedFloats::new(memory),
            width,
            merges: Queue::new(if then == Then::Merge { units.merges() } else { 0 }),
            units,
            accumulated: Progress::default(),
        }
    }

    /// Waits a little until all runs are done, and returns true if they are. A worker that comes too early, or sees that
    /// the call is stopped, leaves the merge to the others; the last one to finish its runs always finds all of them done.
    pub(crate) fn is_accumulated(&self, stop: &Stop<'_>) -> bool {
        self.accumulated.wait_briefly(self.units.runs.len(), PATIENCE * merges_of(self.units.most_rows), stop)
    }

    /// Returns some rows of the part that a unit is accumulated into, from a whole vector of rows on: maxima and sums, both
    /// padded to whole vectors, and outputs.
    ///
    /// # Panics
    /// If the rows are none of the part's, or begin inside a vector.
    ///
    /// # Safety
    /// The unit is one of these units; no other reference to these rows of its part exists meanwhile.
    #[expect(clippy::mut_from_ref, reason = "the caller guarantees sole access to the part")]
    pub(crate) unsafe fn part(&self, unit: Unit, rows: Range<usize>) -> [&mut [f32]; 3] {
        let all = self.units.entry(unit.entry).rows;
        assert!(rows.end <= all && rows.start.is_multiple_of(LANES), "rows {rows:?} of {all}");
        let [all, padded] = [all, rows.len()].map(|rows| rows.next_multiple_of(LANES));
        let first = self.units.offset(unit, self.width);
        let (max, sum, out) = (first + rows.start, first + all + rows.start, first + 2 * all + rows.start * self.width);
        // SAFETY: the caller guarantees sole access to these rows of the part: maxima and sums, both padded, and outputs.
        let part = |at: usize, n: usize| unsafe { self.floats.part(at..at + n) };
        [part(max, padded), part(sum, padded), part(out, rows.len() * self.width)]
    }

    /// Clears the part that a unit is accumulated into: nothing is accumulated yet.
    ///
    /// # Safety
    /// As [`Self::part`], for all rows of the unit.
    pub(crate) unsafe fn clear(&self, unit: Unit) {
        // SAFETY: same contract.
        let [max, sum, out] = unsafe { self.part(unit, 0..self.units.entry(unit.entry).rows) };
        max.fill(f32::NEG_INFINITY);
        sum.fill(0.0);
        out.fill(0.0);
    }

    /// Returns the address of the part that a unit is accumulated into, to prefetch it.
    pub(crate) fn address_of(&self, unit: Unit) -> *const f32 {
        self.floats.address(self.units.offset(unit, self.width))
    }

    /// Returns the number of bytes of a unit's part that are not in cache: none if another block of its head has been accumulated
    /// into it just now.
    pub(crate) fn cold_bytes(&self, unit: Unit) -> usize {
        match self.units.entry(unit.entry).in_order {
            true => 0,
            false => part_floats(self.units.entry(unit.entry).rows, self.width) * size_of::<f32>(),
        }
    }
}
