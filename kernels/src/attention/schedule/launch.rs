//! Launch: a call bound to its outputs and handed out to workers, piece by piece.

use crate::attention::blocks::task::{AttentionTask, BoundCall, Next};
use crate::attention::call::Call;
use crate::attention::call::checked::CheckedCall;
use crate::attention::call::outputs::{Outputs, POINTS, Point};
use crate::attention::call::row_mods::{AnyMods, RowMods};
use crate::attention::forward::key_weight_sums;
use crate::attention::forward::mainloop::ASSUMED_FINITE;
use crate::attention::forward::short::ShortCall;
use crate::attention::schedule::key_blocks::BlockWorker;
use crate::attention::schedule::partials::{Partials, Parts};
use crate::attention::schedule::split_kv;
use crate::attention::schedule::split_sequences::SplitRows;
use crate::attention::schedule::work::{Schedule, Work};
use crate::attention::scratch::{Scratch, Tiling};
use crate::simd::Simd;
use crate::simd::isa::Isa;
use crate::tensor::element::Dtype;
use crate::work_queue::{Queue, Stop};
use core::ops::Range;

/// Checked call with its tiling and schedule: a queue of work that workers take until it is empty.
pub struct Launch<'a> {
    checked: CheckedCall<'a>,
    tiling: Tiling,
    schedule: Schedule<'a>,
    queue: Queue,
    /// Parts of the units of the schedule, if it has any.
    parts: Option<Parts<'a>>,
    stop: Stop<'a>,
    /// True if all the call's memory is in cache: see [`CACHED_BYTES`].
    near: bool,
}

/// Bytes of queries, keys, values and outputs together up to which a call counts as near: a second-level cache holds
/// them, and the caller has just written them. Prefetching them would only take time; where they are not in cache after
/// all, only prefetch hints are lost. 0 under Miri, so that short tests run the prefetching code.
const CACHED_BYTES: usize = if cfg!(miri) { 0 } else { 256 << 10 };

/// Returns true if a call takes at most [`CACHED_BYTES`] bytes. A cache, or pages, may have been written long ago: false.
fn is_near(call: &Call<'_>, outputs: &Outputs<'_>) -> bool {
    let Some([k, v]) = call.kv.tensors() else { return false };
    let size = |shape: [usize; 4], dtype: Dtype| shape.into_iter().fold(dtype.bytes(), usize::saturating_mul);
    let read = [call.q, k, v].map(|x| size(x.shape(), x.dtype()));
    let written = outputs.out.as_ref().map_or(0, |out| size(out.shape(), out.dtype()));
    read.into_iter().fold(written, usize::saturating_add) <= CACHED_BYTES
}

impl<'a> Launch<'a> {
    /// Lists the work of a call. If `split` says so, the key blocks, not the rows, of sequences with few rows are shared out
    /// (split-KV): `partials` is memory for what blocks accumulate. If it cannot grow to the size needed, rows are shared out.
    ///
    /// # Panics
    /// If the tiling is for other sizes; if sequences of more rows than a task's are split, or there are outputs that need every
    /// row whole: scores or a state.
    pub fn new(checked: CheckedCall<'a>, tiling: Tiling, split: Option<SplitRows>, partials: &'a mut Partials) -> Self {
        checked.assert_held_by(&tiling);
        let (call, outputs) = (checked.call(), checked.outputs());
        let whole = outputs.state.is_some() || outputs.wants_all_keys();
        assert!(split.is_none() || !whole, "such outputs need every row whole");
        let parts = split.and_then(|split| partials.split(call, &tiling, split));
        let schedule = Schedule::new(call, outputs, &tiling, parts.as_ref().map(|parts| parts.units));
        let (queue, near) = (Queue::new(schedule.len()), is_near(call, outputs));
        Self { checked, tiling, schedule, queue, parts, stop: Stop::when(None), near }
    }

    /// Returns true if there are key blocks to share out.
    pub(crate) fn is_split(&self) -> bool {
        self.parts.is_some()
    }

    /// Sets a function that is asked before each task, and under split-KV before each key block: if it returns true, the
    /// rest is left undone.
    #[must_use]
    pub fn until(self, stop: Option<&'a (dyn Fn() -> bool + Sync)>) -> Self {
        Self { stop: Stop::when(stop), ..self }
    }

    /// Leaves undone what no worker has begun.
    pub fn stop(&self) {
        self.stop.now();
    }

    /// Returns true if work was left undone.
    pub fn is_stopped(&self) -> bool {
        self.stop.is_stopped()
    }

    /// Takes tasks and runs them until none is left. Any number of workers may call this at once, each with its own
    /// scratch; when all calls have returned, the outputs are complete, unless the launch [was stopped](Self::is_stopped): then
    /// tasks that were begun are done, and the rows of others are untouched.
    ///
    /// # Panics
    /// If key blocks are shared out and there is a weight function, which needs every row whole; if the tiling has no scratch for the
    /// [parts](crate::Rates::parts) of operands.
    pub fn work(&self, isa: Isa, scratch: &mut Scratch, mods: AnyMods<'_>) {
        dispatch!(isa, |s| self.work_on(s, scratch, mods.0));
    }

    /// Returns how many short tasks are taken together. Taking is an atomic operation, which waits for all that was
    /// written before, a quarter of such a task's time; and a core's own prefetcher follows tasks in the order of memory.
    fn short_run(&self) -> usize {
        /// Least number of runs, if there are that many tasks: several for each worker, so that all end at nearly the same time.
        const RUNS: usize = 512;
        /// Largest number of tasks of a run: some 20 µs.
        const MOST: usize = 64;
        (self.schedule.tasks() / RUNS).clamp(1, MOST)
    }

    /// Does the work of [`Self::work`] with the steps of one instruction set.
    fn work_on<S: Simd>(&self, s: S, scratch: &mut Scratch, mods: &dyn RowMods<S>) {
        let Self { checked, tiling, schedule, queue, parts, stop, near } = self;
        assert!(parts.is_none() || !mods.given().weight, "a weight function needs every row whole");
        let bound = BoundCall::new(s, mods, checked, tiling);
        let short = ShortCall::of(bound);
        let most = if short.as_ref().is_some_and(|call| call.all_short) { self.short_run() } else { 1 };
        // SAFETY: the parts were made for this call.
        let mut block_worker = parts.as_ref().map(|parts| unsafe { BlockWorker::new(bound, parts) });
        let (mut run, mut predicted): (Range<usize>, Option<(usize, Work)>) = (0..0, None);
        loop {
            if run.is_empty() {
                run = queue.take_run(most);
            }
            // Tasks are numbered from the last on, so this is the order of memory.
            let Some(number) = run.next_back().filter(|_| !stop.leaves()) else { break };
            let this = predicted.take().filter(|(predicted, _)| *predicted == number);
            let this = this.map_or_else(|| schedule.work(checked.call(), number), |(_, work)| work);
            let next = if run.is_empty() { queue.peek_run(most) } else { run.clone() }.next_back();
            predicted = next.map(|number| (number, schedule.work(checked.call(), number)));
            match this {
                Work::Rows(rows) => {
                    let next = match &predicted {
                        _ if *near => Next::Near,
                        Some((_, Work::Rows(next))) => Next::Rows(next.clone()),
                        _ => Next::Nothing,
                    };
                    // SAFETY: every number is taken once and no two tasks share a row, so the task's part of the outputs
                    // is this worker's.
                    let task = unsafe { AttentionTask::new(bound, rows, next) };
                    if !short.as_ref().is_some_and(|short| short.run(&task, scratch)) {
                        task.run(&ASSUMED_FINITE, scratch);
                    }
                }
                Work::Blocks(units) => {
                    let block_worker = block_worker.as_mut().expect("a schedule with units has parts for them");
                    // SAFETY: every number is taken once, so the run is this worker's.
                    unsafe { block_worker.run(units, stop, scratch) }
                }
                // SAFETY: every number is taken once and stands for one sequence and head, so the sums of their keys are
                // this worker's.
                Work::KeyWeightSums { sequence, kv_head } => unsafe {
                    key_weight_sums::key_weight_sums(bound, [sequence, kv_head], scratch);
                },
            }
        }
        if let Some(parts) = parts {
            // SAFETY: the parts were made for this call.
            unsafe { split_kv::merge(parts, bound, stop, scratch) }
        }
    }
}

impl core::fmt::Debug for Launch<'_> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let written = POINTS.iter().filter(|&&point: &&Point| self.checked.outputs().point(point).is_some());
        f.debug_struct("Launch")
            .field("call", self.checked.call())
            .field("tiling", &self.tiling)
            .field("tasks", &self.schedule.tasks())
            .field("runs", &self.schedule.runs())
            .field("points", &written.collect::<Vec<_>>())
            .finish_non_exhaustive()
    }
}
