//! Plans: how a problem is divided into tasks. Plain data, made from sizes alone, printable.

pub(crate) mod call_time;
pub(crate) mod explain;
pub(crate) mod problem;
pub(crate) mod run;
pub(crate) mod task_rows;

use crate::plan::problem::Problem;
use crate::plan::task_rows::Rows;
use crate::shape::Shape;
use crate::threads::exec::Exec;
use core::fmt;
use sdpa_kernels::{Accumulation, Isa, KEY_BLOCK, MAX_SPLIT_ROWS, MEMORY_BOUND_ROWS, SplitRows, Then, Tiling};

/// Runs of units per worker: enough that others wait little for the last to finish.
const RUNS_PER_WORKER: usize = 4;
/// Blocks of keys are divided among workers only if their partial results take at most 1/`SHARE` of the bytes of the
/// keys and values they read (counted as `f32`) or at most [`LITTLE`] bytes (with more than [`MEMORY_BOUND_ROWS`] rows,
/// [`LITTLE_EACH`] for each thread); and never more than [`MOST`] bytes.
const SHARE: usize = 16;
const LITTLE: usize = 1 << 20;
const LITTLE_EACH: usize = 4 << 20;
const MOST: usize = 1 << 30;

/// Division of a problem of one shape into tasks. Of the plan, only the instruction set can change bits of the result:
/// without FMA, or with [`Precision::Native`](crate::Precision::Native).
///
/// ```
/// use sdpa::{Attention, Exec, Inputs, Outputs, Plan, View, ViewMut};
/// let (x, mut out) = ([0.5; 3 * 4], [0.0; 3 * 4]);
/// let x = View::bhld(&x, [1, 1, 3, 4])?;
/// let problem =
///     Attention::new().problem(Inputs::new(x, x, x), Outputs::new(ViewMut::bhld(&mut out, [1, 1, 3, 4])?))?;
/// let plan = Plan::new(&problem, Exec::default());
/// assert_eq!((plan.tasks(), plan.workers()), (1, 1)); // too small to be shared out
/// println!("{plan}");
/// # Ok::<(), sdpa::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Plan {
    pub(crate) shape: Shape,
    pub(crate) isa: Isa,
    threads: usize,
    pub(crate) workers: usize,
    pub(crate) tasks: usize,
    pub(crate) tiling: Tiling,
    /// Split-KV, if the key blocks of some sequences are divided among workers too.
    pub(crate) split: Option<Split>,
}

/// Split-KV of a plan: its sequences, and the bytes of memory for partial results.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Split {
    rows: SplitRows,
    bytes: usize,
}

impl Plan {
    /// Plans for problems of this problem's shape.
    pub fn new(problem: &Problem<'_>, exec: Exec) -> Self {
        let shape = problem.shape;
        let (tile_rows, _) = exec.isa.tile();
        let rows = Rows::of(problem);
        let workers = problem.workers(exec);
        let task_rows = rows.per_task(problem, workers, tile_rows);
        let tiling = Tiling::new(shape.head_dim, shape.value_dim, task_rows, tile_rows);
        let tasks = rows.heads.saturating_mul(rows.rows.div_ceil(tiling.task_rows()));
        let Exec { isa, threads, .. } = exec;
        let by_rows = Self { shape, isa, threads, workers: workers.min(tasks.max(1)), tasks, tiling, split: None };
        let most_rows = MEMORY_BOUND_ROWS.min(tiling.task_rows());
        if problem.call.visible.window.is_none()
            && let Some(work) = by_rows.split_work(problem, most_rows)
        {
            return by_rows.by_keys(problem, workers, most_rows, work);
        }
        // Compute-bound rows, or a window: split by keys only if workers would be idle.
        if tasks < workers && rows.rows <= MAX_SPLIT_ROWS && problem.call.options.ragged.is_none() {
            let most_rows = rows.rows;
            let tiling = Tiling::for_split(shape.head_dim, shape.value_dim, most_rows, tile_rows);
            let whole = Self { tiling, ..by_rows };
            if most_rows <= tiling.task_rows()
                && let Some(work) = whole.split_work(problem, most_rows).filter(|work| work.units > tasks)
            {
                return whole.by_keys(problem, workers, most_rows, work);
            }
        }
        by_rows
    }

    /// Plans the states of each single block of keys. The number of rows may be too large: see the tiling.
    pub(crate) fn of_blocks(problem: &Problem<'_>, exec: Exec) -> Self {
        let (shape, rows) = (problem.shape, problem.longest_rows());
        let (tile_rows, _) = exec.isa.tile();
        let tiling = Tiling::for_split(shape.head_dim, shape.value_dim, rows, tile_rows);
        let (workers, work) = (problem.workers(exec), problem.call.accumulation(rows));
        // Blocks that are not merged have a part each.
        let work = Accumulation { floats_of_one: work.floats, ..work };
        let Exec { isa, threads, .. } = exec;
        Self { shape, isa, threads, workers, tasks: 1, tiling, split: None }.by_keys(problem, workers, rows, work)
    }

    /// Divides the key blocks of the sequences with at most `most_rows` rows among up to `workers` workers.
    fn by_keys(self, problem: &Problem<'_>, workers: usize, most_rows: usize, work: Accumulation) -> Self {
        let runs = if workers > 1 { work.units.min(workers.saturating_mul(RUNS_PER_WORKER)) } else { 1 };
        let split = Split { rows: SplitRows { most_rows, runs, then: Then::Merge }, bytes: work.bytes(runs) };
        // Ragged sequences may be of both kinds, with few rows and with many.
        let tasks = if problem.call.options.ragged.is_some() { self.tasks.saturating_add(runs) } else { runs };
        Self { workers: workers.min(tasks.max(1)), tasks, split: Some(split), ..self }
    }

    /// Returns the work on the sequences with at most `most_rows` rows a key/value head, if their key blocks can be divided
    /// among workers: if there are several blocks, and partial results stay small.
    pub(crate) fn split_work(&self, problem: &Problem<'_>, most_rows: usize) -> Option<Accumulation> {
        let (shape, call) = (problem.shape, &problem.call);
        // Sequences that are not ragged are equally long; there may be any number of them without rows.
        let rows = (shape.heads / shape.kv_heads.max(1)).saturating_mul(shape.q_len);
        let none = call.options.ragged.is_none() && !(1..=most_rows).contains(&rows);
        // A window beside first keys that it keeps: most blocks between are hidden.
        let apart = call.visible.window.is_some_and(|window| window.kept_first() > 0);
        if none || apart || shape.kv_len <= KEY_BLOCK || problem.needs_whole_rows() {
            return None;
        }
        let work = call.accumulation(most_rows);
        let [bytes, read] = [work.floats, work.keys.saturating_mul(shape.head_dim + shape.value_dim)]
            .map(|floats| floats.saturating_mul(size_of::<f32>()));
        let little = if most_rows > MEMORY_BOUND_ROWS { LITTLE_EACH.saturating_mul(self.threads) } else { LITTLE };
        let most = little.max(read / SHARE).min(MOST);
        (work.units > 0 && bytes <= most).then_some(work)
    }

    /// Returns the split of the sequences with few rows, if the plan splits them.
    pub(crate) fn split_rows(&self, problem: &Problem<'_>) -> Option<SplitRows> {
        // The plan may have been made for another problem of this shape.
        self.split.map(|split| split.rows).filter(|rows| self.split_work(problem, rows.most_rows).is_some())
    }

    /// Returns how busy each of `workers` workers is, for the tests and benchmarks of this repository alone.
    #[cfg(feature = "_probe")]
    #[doc(hidden)]
    pub fn balance(&self, problem: &Problem<'_>, workers: usize) -> Vec<f64> {
        // A plan for another shape is replaced when it runs.
        let plan = if self.shape == problem.shape { *self } else { Self::new(problem, self.exec()) };
        sdpa_kernels::probe::balance(&problem.call, &plan.tiling, plan.split_rows(problem), workers)
    }

    /// Shrinks the scratch to what this one problem takes. Where key blocks are divided, rows of several sequences may
    /// be gathered in it.
    pub(crate) fn shrink_to(self) -> Self {
        match self.split {
            None => Self { tiling: self.tiling.shrink_to(self.shape.kv_len), ..self },
            Some(_) => self,
        }
    }

    /// Instruction set of the plan.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// Returns the settings that the plan was made with, but for the executor.
    pub(crate) fn exec(&self) -> Exec<'static> {
        Exec::serial().isa(self.isa).threads(self.threads)
    }

    /// Largest number of threads that will work.
    pub fn workers(&self) -> usize {
        self.workers
    }

    /// Number of pieces that rows or key blocks are divided into: tasks of rows, or runs of key blocks. Key weight sums are
    /// not counted.
    pub fn tasks(&self) -> usize {
        self.tasks
    }

    /// Bytes that a new [`Workspace`](crate::Workspace) holds beside [`Self::scratch_bytes`] for each worker, if key blocks are
    /// divided among workers (few rows, many keys); otherwise 0. The partial results of all blocks, half as much again,
    /// because sequences grow, and a few numbers for each sequence.
    ///
    /// Several sequences of a cache or a packed pool on several workers take less if one worker has all blocks of a
    /// sequence; otherwise the number is exact. On one worker such a source takes the results of one block for each head.
    ///
    /// The results alone are at most a sixteenth of the bytes of keys and values that are read (counted as `f32`), or 1 MiB if
    /// that is more, and never more than 1 GiB. For 17 to 128 rows that share a key/value head, 4 MiB for each thread
    /// replace the 1 MiB. Beyond these limits, and for more rows, only rows are divided.
    pub fn partials_bytes(&self) -> usize {
        self.split.map_or(0, |split| split.bytes)
    }

    /// Scratch of one worker in bytes. Independent of lengths, heads and batch.
    pub fn scratch_bytes(&self) -> usize {
        self.tiling.scratch_bytes()
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Shape { batch, heads, kv_heads, q_len, kv_len, head_dim, value_dim } = self.shape;
        let (rows, keys) = self.isa.tile();
        writeln!(
            f,
            "{batch} × {heads} heads ({kv_heads} key/value), {q_len} rows × {kv_len} keys, {head_dim} → {value_dim}"
        )?;
        writeln!(f, "{}, tiles of {rows} rows × {keys} keys, blocks of {KEY_BLOCK} keys", self.isa)?;
        write!(
            f,
            "{} tasks of up to {} rows, row blocks of {}, on {} thread(s), {} KiB of scratch each",
            self.tasks,
            self.tiling.task_rows(),
            self.tiling.row_block_rows(),
            self.workers,
            self.scratch_bytes() / 1024
        )
    }
}
