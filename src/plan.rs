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
use sdpa_kernels::{Accumulation, Isa, KEY_BLOCK, MAX_SPLIT_ROWS, MEMORY_BOUND_ROWS, Rates, SplitRows, Then, Tiling};

/// Runs of units per worker: enough that others wait little for the last to finish.
const RUNS_PER_WORKER: usize = 4;
/// Bytes of partial results that are always few enough for blocks of keys to be divided among workers; with more than
/// [`MEMORY_BOUND_ROWS`] rows, for each thread.
const FEW_BYTES: usize = 1 << 20;
const FEW_BYTES_A_THREAD: usize = 4 << 20;

/// Division of a problem of one shape into tasks. Of the plan, only the instruction set can change bits of the result:
/// without FMA, or with another [`Precision`](crate::Precision) than `Exact`.
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
    /// Numbers of rows and of keys that are multiplied together.
    pub(crate) tile: (usize, usize),
    /// Largest number of rows of a row block.
    row_block: usize,
    threads: usize,
    pub(crate) workers: usize,
    pub(crate) tasks: usize,
    pub(crate) tiling: Tiling,
    /// Sequences of split-KV, if key blocks are divided among workers too.
    pub(crate) split: Option<SplitRows>,
    /// Bytes of memory for partial results.
    partials_bytes: usize,
}

impl Plan {
    /// Plans for problems of this problem's shape.
    pub fn new(problem: &Problem<'_>, exec: Exec) -> Self {
        let shape = problem.shape;
        let rates = problem.call().rates(exec.isa);
        let (tile_rows, _) = rates.tile;
        let rows = Rows::of(problem, rates);
        let workers = problem.workers(exec);
        let task_rows = rows.per_task(problem, workers, tile_rows);
        let with_room = |tiling: Tiling| tiling.with_parts(rates.parts).with_gathered(problem.call().gathered_floats());
        let tiling = with_room(Tiling::new(shape.head_dim, shape.value_dim, task_rows, tile_rows));
        let of_lists = problem.call().tasks_of_lists(tiling.task_rows());
        let tasks = of_lists.unwrap_or_else(|| rows.heads.saturating_mul(rows.rows.div_ceil(tiling.task_rows())));
        let by_rows = Self::by_rows(shape, exec, rates, workers, tasks, tiling);
        let most_rows = MEMORY_BOUND_ROWS.min(tiling.task_rows());
        if problem.call().visible.window.is_none()
            && let Some(work) = by_rows.split_work(problem, most_rows)
        {
            return by_rows.by_keys(problem, workers, most_rows, work);
        }
        // Compute-bound rows, or a window: split by keys only if workers would be idle.
        if tasks < workers && rows.rows <= MAX_SPLIT_ROWS && problem.call().options.ragged.is_none() {
            let most_rows = rows.rows;
            let tiling = with_room(Tiling::for_split(shape.head_dim, shape.value_dim, most_rows, tile_rows));
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
    #[cfg(feature = "parts")]
    pub(crate) fn of_blocks(problem: &Problem<'_>, exec: Exec) -> Self {
        let (shape, rows, rates) = (problem.shape, problem.longest_rows(), problem.call().rates(exec.isa));
        let (tile_rows, _) = rates.tile;
        let tiling = Tiling::for_split(shape.head_dim, shape.value_dim, rows, tile_rows).with_parts(rates.parts);
        let (workers, work) = (problem.workers(exec), problem.call().accumulation(rows).apart());
        Self::by_rows(shape, exec, rates, workers, 1, tiling).by_keys(problem, workers, rows, work)
    }

    /// Returns true if the plan is for problems of this problem's shape, and has scratch for their operands.
    pub(crate) fn fits(&self, problem: &Problem<'_>) -> bool {
        let parts = problem.call().rates(self.isa).parts;
        let has_room = self.tiling.has_parts(parts) && self.tiling.has_gathered(problem.call().gathered_floats());
        self.shape == problem.shape && has_room
    }

    /// Plans tasks of rows.
    fn by_rows(shape: Shape, exec: Exec, rates: Rates, workers: usize, tasks: usize, tiling: Tiling) -> Self {
        let (Exec { isa, threads, .. }, Rates { tile, row_block, .. }) = (exec, rates);
        Self {
            shape,
            isa,
            tile,
            row_block,
            threads,
            workers: workers.min(tasks.max(1)),
            tasks,
            tiling,
            split: None,
            partials_bytes: 0,
        }
    }

    /// Divides the key blocks of the sequences with at most `most_rows` rows among up to `workers` workers.
    fn by_keys(self, problem: &Problem<'_>, workers: usize, most_rows: usize, work: Accumulation) -> Self {
        let runs = if workers > 1 { work.units.min(workers.saturating_mul(RUNS_PER_WORKER)) } else { 1 };
        let split = SplitRows { most_rows, runs, few_bytes: Some(self.few_bytes(most_rows)), then: Then::Merge };
        // Ragged sequences may be of both kinds, with few rows and with many.
        let tasks = if problem.call().options.ragged.is_some() { self.tasks.saturating_add(runs) } else { runs };
        Self { workers: workers.min(tasks.max(1)), tasks, split: Some(split), partials_bytes: work.bytes(runs), ..self }
    }

    /// Returns the work on the sequences with at most `most_rows` rows a key/value head, if their key blocks can be divided
    /// among workers: if there are several blocks, and partial results stay small.
    pub(crate) fn split_work(&self, problem: &Problem<'_>, most_rows: usize) -> Option<Accumulation> {
        let (shape, call) = (problem.shape, problem.call());
        // Sequences that are not ragged are equally long; there may be any number of them without rows.
        let rows = (shape.heads / shape.kv_heads.max(1)).saturating_mul(shape.q_len);
        let none = call.options.ragged.is_none() && !(1..=most_rows).contains(&rows);
        if none || call.most_keys_of_row() <= KEY_BLOCK || !problem.may_be_split() {
            return None;
        }
        let work = call.accumulation(most_rows);
        work.is_few(self.few_bytes(most_rows)).then_some(work)
    }

    /// Returns the bytes of partial results that are always few enough.
    fn few_bytes(&self, most_rows: usize) -> usize {
        if most_rows > MEMORY_BOUND_ROWS { FEW_BYTES_A_THREAD.saturating_mul(self.threads) } else { FEW_BYTES }
    }

    /// Returns the split of the sequences with few rows, if the plan splits them and the problem, which may be another of this
    /// shape, can be split.
    pub(crate) fn split_rows(&self, problem: &Problem<'_>) -> Option<SplitRows> {
        self.split.filter(|_| problem.may_be_split())
    }

    /// Instruction set of the plan.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// Returns how busy each of `workers` workers is, for the tests and benchmarks of this repository alone.
    #[cfg(feature = "_probe")]
    #[doc(hidden)]
    pub fn balance(&self, problem: &Problem<'_>, workers: usize) -> Vec<f64> {
        // A plan for another shape is replaced when it runs.
        let plan = if self.fits(problem) { *self } else { Self::new(problem, self.exec()) };
        sdpa_kernels::probe::balance(problem.call(), &plan.tiling, plan.split_rows(problem), workers)
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
        self.partials_bytes
    }

    /// Scratch of one worker in bytes. Independent of lengths, heads and batch.
    pub fn scratch_bytes(&self) -> usize {
        self.tiling.scratch_bytes()
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Shape { batch, heads, kv_heads, q_len, kv_len, head_dim, value_dim } = self.shape;
        let (rows, keys) = self.tile;
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
            self.row_block.min(self.tiling.task_rows()),
            self.workers,
            self.scratch_bytes() / 1024
        )
    }
}
