//! Launch of the backward pass: a call, what was saved of it, and its gradients, handed out to workers key block by key
//! block.
//!
//! A worker that takes a key block of a key/value head adds up the gradients of its keys and values over all query rows,
//! in order, in its scratch. The gradients of queries are added up over the key blocks, in order, in shared memory: a row
//! block of one key block waits for the same row block of the key block before. Key blocks are taken in order, the same
//! one of all heads before the next, so a worker waits only for what another is at, and seldom. So every sum is taken in
//! one order, whoever takes it: gradients have the same bits for any number of threads.

use crate::attention::backward::call::{Gradients, Reduced, Saved, SharedGradients, assert_fits};
use crate::attention::backward::column::Column;
use crate::attention::backward::memory::{BackwardMemory, BackwardScratch, RowMemory};
use crate::attention::blocks::task::BoundCall;
use crate::attention::call::Call;
use crate::attention::checked::CheckedCall;
use crate::attention::mods::Mods;
use crate::attention::row_mods::RowMods;
use crate::attention::steps::by_isa::Steps;
use crate::attention::tiling::{MAX_ROW_BLOCK, Tiling};
use crate::simd::isa::Isa;
use crate::tensor::element::Precision;
use crate::tensor::rows::KEY_BLOCK;
use crate::work_queue::{Queue, Stop};
use core::sync::atomic::{AtomicUsize, Ordering};

/// Backward pass bound to its gradients: a queue of key blocks that workers take until it is empty.
pub struct BackwardLaunch<'a> {
    pub(crate) checked: CheckedCall<'a>,
    pub(crate) saved: Saved<'a>,
    pub(crate) gradients: SharedGradients<'a>,
    pub(crate) reduced: Reduced<'a>,
    pub(crate) rows: RowMemory<'a>,
    columns: Queue,
    /// Number of key blocks of the longest sequence, at least 1.
    columns_per_head: usize,
    /// Number of row blocks that each key block is done with, `[sequence and head][key block]`.
    progress: &'a [AtomicUsize],
    stop: Stop<'a>,
}

/// Number of times a waiting worker looks again before it lets other threads run: some microseconds.
const PATIENCE: usize = 1 << 10;

/// Returns the number of key blocks of a call: of each key/value head, and of all.
fn count_columns(call: &Call<'_>) -> Option<(usize, usize)> {
    let longest = call.longest().1.div_ceil(KEY_BLOCK).max(1);
    let heads = call.sequences().checked_mul(call.kv.kv_heads())?;
    Some((longest, heads.checked_mul(longest)?))
}

impl<'a> BackwardLaunch<'a> {
    /// Binds a call to its gradients. `None` if there is no memory for what workers share.
    ///
    /// # Panics
    /// If shapes do not fit together. `sdpa` reports such calls as errors before it makes a launch.
    pub fn new(
        call: Call<'a>,
        saved: Saved<'a>,
        gradients: Gradients<'a>,
        tiling: Tiling,
        memory: &'a mut BackwardMemory,
    ) -> Option<Self> {
        let checked = CheckedCall::reading(Call { precision: Precision::Exact, ..call }, tiling);
        assert_fits(checked.call(), &saved, &gradients);
        let (columns_per_head, columns) = count_columns(&call)?;
        if !memory.try_reserve(&call, columns) {
            return None;
        }
        let (gradients, reduced) = gradients.split(&call);
        if let Some(bias) = &gradients.bias {
            bias.clear();
        }
        let (rows, progress) = memory.parts(&call);
        let columns = Queue::new(if call.q.shape()[1] == 0 { 0 } else { columns });
        let stop = Stop::when(None);
        Some(Self { checked, saved, gradients, reduced, rows, columns, columns_per_head, progress, stop })
    }

    /// Number of independent pieces of work, about.
    pub fn columns(&self) -> usize {
        self.columns.len()
    }

    /// Leaves undone what no worker has begun.
    pub fn stop(&self) {
        self.stop.now();
    }

    /// Returns true if work was left undone.
    pub fn is_stopped(&self) -> bool {
        self.stop.is_stopped()
    }

    /// Takes key blocks and computes them until none is left. Any number of workers may call this at once, each with its
    /// own scratch; when all calls have returned, [`Self::finish`] completes the gradients.
    pub fn work(&self, isa: Isa, scratch: &mut BackwardScratch) {
        dispatch!(isa, |s| s.backward(self, scratch));
    }

    /// Does the work of [`Self::work`] with the steps of one instruction set.
    fn work_on<S: Steps>(&self, s: S, scratch: &mut BackwardScratch, mods: &dyn RowMods<S>) {
        let bound = BoundCall { s, mods, checked: &self.checked };
        let kv_heads = self.checked.call().kv.kv_heads();
        while let Some(number) = self.columns.take_unless(&self.stop) {
            // The queue counts down.
            let number = self.columns.len() - 1 - number;
            let heads = self.columns.len() / self.columns_per_head;
            let (head, column) = (number % heads, number / heads);
            let (sequence, kv_head) = (head / kv_heads, head % kv_heads);
            if column >= self.columns_of(sequence) {
                continue;
            }
            let column = Column { bound, launch: self, sequence, kv_head, number: column };
            // A worker that panics does not leave others waiting.
            let guard = StopOnUnwind(&self.stop);
            // SAFETY: every number is taken once, so the key block's gradients are this worker's.
            unsafe { column.run(scratch) };
            core::mem::forget(guard);
        }
    }

    /// Returns the number of key blocks of a sequence, at least 1.
    pub(crate) fn columns_of(&self, sequence: usize) -> usize {
        self.checked.call().sequence(sequence).kv_len.div_ceil(KEY_BLOCK).max(1)
    }

    /// Returns the counter of the row blocks that a key block is done with.
    pub(crate) fn progress(&self, [sequence, kv_head, column]: [usize; 3]) -> &AtomicUsize {
        let head = sequence * self.checked.call().kv.kv_heads() + kv_head;
        &self.progress[head * self.columns_per_head + column]
    }

    /// Returns the number of row blocks of a sequence and key/value head.
    pub(crate) fn row_blocks(&self, sequence: usize) -> usize {
        let call = self.checked.call();
        call.group_size() * call.sequence(sequence).q_len.div_ceil(MAX_ROW_BLOCK)
    }

    /// Waits until a key block is done with `row_blocks` row blocks. Returns false if the work was stopped.
    pub(crate) fn wait(&self, column: [usize; 3], row_blocks: usize) -> bool {
        let progress = self.progress(column);
        let mut looks = 0;
        // Acquire: makes what the other worker has added visible.
        while progress.load(Ordering::Acquire) < row_blocks {
            if self.stop.is_stopped() {
                return false;
            }
            looks += 1;
            if looks < PATIENCE { core::hint::spin_loop() } else { std::thread::yield_now() }
        }
        true
    }
}

/// Stops the work when it is dropped.
struct StopOnUnwind<'a>(&'a Stop<'a>);

impl Drop for StopOnUnwind<'_> {
    fn drop(&mut self) {
        self.0.now();
    }
}

/// Work of a launch, compiled in this crate for each instruction set.
trait Worker: Steps {
    /// Calls [`BackwardLaunch::work_on`].
    fn backward(self, launch: &BackwardLaunch<'_>, scratch: &mut BackwardScratch);
}

macro_rules! worker {
    ($token:ty) => {
        impl Worker for $token {
            fn backward(self, launch: &BackwardLaunch<'_>, scratch: &mut BackwardScratch) {
                launch.work_on(self, scratch, &Mods::new());
            }
        }
    };
}

for_each_token!(worker);

impl core::fmt::Debug for BackwardLaunch<'_> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("BackwardLaunch")
            .field("call", self.checked.call())
            .field("columns", &self.columns.len())
            .finish_non_exhaustive()
    }
}
