//! Launch: a call bound to its outputs and handed out to workers, task by task.

use crate::attention::blocks::task::{AttentionTask, BoundCall, Next};
use crate::attention::call::checked::CheckedCall;
use crate::attention::call::mods::{MaskMod, Mods, ScoreMod, WeightMod};
use crate::attention::call::outputs::{Outputs, POINTS, Point};
use crate::attention::call::row_mods::RowMods;
use crate::attention::call::tiling::{Scratch, Tiling};
use crate::attention::call::{Call, Task};
use crate::attention::forward::key_weight_sums;
use crate::attention::forward::short::ShortCall;
use crate::attention::schedule::partials::{Partials, Split};
use crate::attention::schedule::runs::FewRows;
use crate::attention::schedule::split_kv;
use crate::attention::schedule::tasks::Tasks;
use crate::simd::Simd;
use crate::simd::isa::Isa;
use crate::tensor::element::Dtype;
use crate::work_queue::{Queue, Stop};
use core::ops::Range;

/// Call with its outputs and tiling: a queue of tasks that workers take until it is empty.
pub struct Launch<'a> {
    checked: CheckedCall<'a>,
    tasks: Tasks,
    queue: Queue,
    /// Queue of sequences and key/value heads whose key weight sums are computed.
    key_weight_sums: Queue,
    /// Split-KV of the sequences with few rows, if their key blocks are shared out.
    split: Option<Split<'a>>,
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
    /// Binds a call to its outputs.
    ///
    /// # Panics
    /// If shapes do not fit together. `sdpa` reports such calls as errors before it makes a launch.
    pub fn new(call: Call<'a>, outputs: Outputs<'a>, tiling: Tiling) -> Self {
        let wanted = outputs.key_weight_sums.as_ref().is_some_and(|sums| !sums.shape().contains(&0));
        let near = is_near(&call, &outputs);
        let checked = CheckedCall::new(call, outputs, tiling);
        let (call, tiling) = (checked.call(), checked.tiling());
        let kv_heads = call.kv.kv_heads();
        let (sequences, tasks) = (call.sequences(), Tasks::new(tiling));
        Self {
            tasks,
            queue: Queue::new(tasks.len(call)),
            key_weight_sums: Queue::new(if wanted { sequences * kv_heads } else { 0 }),
            split: None,
            stop: Stop::when(None),
            near,
            checked,
        }
    }

    /// Shares out the key blocks, not the rows, of sequences with few rows (split-KV): `partials` is memory for what
    /// blocks accumulate. If it cannot grow to the size needed, rows are shared out as before.
    ///
    /// # Panics
    /// If few rows are more than a task's, or there are outputs that need every row whole: scores or a state.
    #[must_use]
    pub fn split(self, partials: &'a mut Partials, few: FewRows) -> Self {
        let (call, outputs) = (self.checked.call(), self.checked.outputs());
        assert!(outputs.state.is_none() && !outputs.wants_all_keys(), "such outputs need every row whole");
        let Some(split) = Split::new(call, self.checked.tiling(), partials, few) else { return self };
        let tasks = self.tasks.without(few.few);
        let queue = Queue::new(tasks.len(call));
        Self { split: Some(split), tasks, queue, ..self }
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
    /// scratch; when all calls have returned, the outputs are complete, unless
    /// the launch [was stopped](Self::is_stopped): then tasks that were begun are done, and the rows of others are untouched.
    pub fn work<A: ScoreMod, B: MaskMod, C: WeightMod>(&self, isa: Isa, scratch: &mut Scratch, mods: &Mods<A, B, C>) {
        assert!(self.split.is_none() || !mods.weight.is_given(), "a weight function needs every row whole");
        dispatch!(isa, |s| s.work(self, scratch, mods));
    }

    /// Returns how many short tasks are taken together. Taking is an atomic operation, which waits for all that was
    /// written before, a quarter of such a task's time; and a core's own prefetcher follows tasks in the order of memory.
    fn short_run(&self) -> usize {
        /// Least number of runs of a call with as many tasks: several for each worker, so that all end at nearly the same
        /// time.
        const RUNS: usize = 512;
        /// Largest number of tasks of a run: some 20 µs.
        const MOST: usize = 64;
        (self.queue.len() / RUNS).clamp(1, MOST)
    }

    /// Does the work of [`Self::work`] with the steps of one instruction set.
    fn work_on<S: Simd>(&self, s: S, scratch: &mut Scratch, mods: &dyn RowMods<S>) {
        let Self { checked, tasks, queue, key_weight_sums, split, stop, near } = self;
        let task = |number| tasks.at(checked.call(), number);
        let bound = BoundCall { s, mods, checked };
        let short = ShortCall::of(bound);
        let most = if short.as_ref().is_some_and(|call| call.all_short) { self.short_run() } else { 1 };
        let (mut run, mut predicted): (Range<usize>, Option<(usize, Task)>) = (0..0, None);
        loop {
            if run.is_empty() {
                run = queue.take_run(most);
            }
            let Some(number) = run.next().filter(|_| !stop.leaves()) else { break };
            let this = predicted.take().filter(|(predicted, _)| *predicted == number);
            let this = this.map_or_else(|| task(number), |(_, task)| task);
            predicted = run.clone().next().or_else(|| queue.peek_run(most)).map(|number| (number, task(number)));
            let next = match &predicted {
                _ if *near => Next::Near,
                Some((_, task)) => Next::Task(task.clone()),
                None => Next::Nothing,
            };
            // SAFETY: every number is taken once and no two tasks share a row, so the task's part of the outputs is this
            // worker's.
            let this = unsafe { AttentionTask::new(bound, this) }.followed_by(next);
            if !short.as_ref().is_some_and(|call| this.run_short(call, scratch)) {
                this.run(scratch);
            }
        }
        // After the tasks, of which each takes longer than a run of units: the last to finish then keep the others
        // waiting least.
        if let Some(split) = split {
            // SAFETY: the split was made for this call.
            unsafe { split_kv::run(split, bound, stop, scratch) };
        }
        let kv_heads = checked.call().kv.kv_heads();
        while let Some(number) = key_weight_sums.take_unless(stop) {
            let head = [number / kv_heads, number % kv_heads];
            // SAFETY: every number is taken once and stands for one sequence and head, so the sums of their keys are
            // this worker's.
            unsafe { key_weight_sums::key_weight_sums(bound, head, scratch) }
        }
    }
}

/// Work of a launch, compiled in this crate for each instruction set: the fused pass is no part of the crate that calls
/// it, whatever functions it calls it with.
trait Worker: Simd {
    /// Calls [`Launch::work_on`].
    fn work(self, launch: &Launch<'_>, scratch: &mut Scratch, mods: &dyn RowMods<Self>);
}

macro_rules! worker {
    ($token:ty) => {
        impl Worker for $token {
            fn work(self, launch: &Launch<'_>, scratch: &mut Scratch, mods: &dyn RowMods<Self>) {
                launch.work_on(self, scratch, mods);
            }
        }
    };
}

for_each_token!(worker);

impl core::fmt::Debug for Launch<'_> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let written = POINTS.iter().filter(|&&point: &&Point| self.checked.outputs().point(point).is_some());
        f.debug_struct("Launch")
            .field("call", self.checked.call())
            .field("tiling", self.checked.tiling())
            .field("tasks", &self.queue.len())
            .field("points", &written.collect::<Vec<_>>())
            .finish_non_exhaustive()
    }
}
