//! Plans: how a problem is divided into tasks. Plain data, made from sizes alone, printable.

use crate::exec::Exec;
use crate::problem::Problem;
use crate::shape::Shape;
use core::fmt;
use sdpa_kernels::{Accumulation, Isa, KEY_BLOCK, MAX_TASK, Tiling};

/// Tasks per worker, enough that the last ones to finish do not keep the others waiting long.
const TASKS_PER_WORKER: usize = 4;
/// Fewest rows of a task worth packing the keys for: at 32 rows, packing is already a tenth of the work.
const MIN_TASK: usize = 32;
/// Rows per key/value head up to which blocks of keys are divided among workers (split-KV).
const FEW_ROWS: usize = 16;
/// Blocks of keys are divided among workers only if their partial results take at most 1/`SHARE` of the bytes of the
/// keys and values they read (counted as `f32`) or at most [`LITTLE`] bytes; and never more than [`MOST`] bytes.
const SHARE: usize = 16;
const LITTLE: usize = 1 << 20;
const MOST: usize = 1 << 30;
/// Division of a problem of one shape into tasks. No bit of the result depends on it.
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
    pub(crate) exec: Exec,
    pub(crate) workers: usize,
    pub(crate) tasks: usize,
    pub(crate) tiling: Tiling,
    pub(crate) split: Split,
}

/// Work that is divided among workers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Split {
    /// Heads and query rows: every task streams all the keys its rows see.
    Rows,
    /// Blocks of keys too, in `runs` runs, of the sequences whose rows are few (split-KV); `bytes` is the memory of the
    /// partial results of all blocks.
    Keys { runs: usize, bytes: usize },
}

/// Work on the sequences with few rows, key block by key block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct FewRowsWork {
    /// Number of key blocks, counted for each key/value head.
    units: usize,
    /// Bytes of their partial results.
    bytes: usize,
}

impl Plan {
    /// Plans for problems of this problem's shape.
    pub fn new(problem: &Problem<'_>, exec: Exec) -> Self {
        let shape = problem.shape;
        let (tile_rows, _) = exec.isa.tile();
        // Query rows that share a key/value head form one sequence of rows, divided into equal tasks.
        let group_size = shape.heads / shape.kv_heads.max(1);
        let rows = group_size.saturating_mul(problem.call.q.shape()[2]);
        let heads = problem.call.q.shape()[0].saturating_mul(shape.kv_heads);
        let workers = exec.workers(problem.flops());
        let wanted = if workers > 1 { workers.saturating_mul(TASKS_PER_WORKER).div_ceil(heads.max(1)) } else { 1 };
        let parts = wanted.min(rows.div_ceil(MIN_TASK)).max(rows.div_ceil(MAX_TASK)).max(1);
        let task_rows = rows.div_ceil(parts).next_multiple_of(tile_rows).min(MAX_TASK);
        let tiling = Tiling::new(shape.head_dim, shape.value_dim, task_rows, tile_rows);
        let tasks = heads.saturating_mul(rows.div_ceil(tiling.task_rows()));
        let workers_of = |tasks: usize| workers.min(tasks.max(1));
        let by_rows = Self { shape, exec, workers: workers_of(tasks), tasks, tiling, split: Split::Rows };
        let Some(FewRowsWork { units, bytes }) = by_rows.shares_keys(problem) else { return by_rows };
        let runs = if workers > 1 { units.min(workers.saturating_mul(TASKS_PER_WORKER)) } else { 1 };
        // Ragged sequences may be of both kinds, with few rows and with many.
        let tasks = if problem.call.options.ragged.is_some() { tasks.saturating_add(runs) } else { runs };
        Self { workers: workers_of(tasks), tasks, split: Split::Keys { runs, bytes }, ..by_rows }
    }

    /// Returns the work on the sequences with few rows, if their key blocks are to be divided among workers: there are
    /// several blocks (decoding), and memory in proportion.
    pub(crate) fn shares_keys(&self, problem: &Problem<'_>) -> Option<FewRowsWork> {
        let (shape, call, few) = (problem.shape, &problem.call, self.few_rows());
        // Sequences that are not ragged have as many rows each; there may be any number of them without rows.
        let rows = (shape.heads / shape.kv_heads.max(1)).saturating_mul(shape.q_len);
        let none = call.options.ragged.is_none() && !(1..=few).contains(&rows);
        if none || shape.kv_len <= KEY_BLOCK || problem.needs_whole_rows() || call.visible.window.is_some() {
            return None;
        }
        let Accumulation { units, floats, keys } = call.accumulation(few);
        let [bytes, read] = [floats, keys.saturating_mul(shape.head_dim + shape.value_dim)]
            .map(|floats| floats.saturating_mul(size_of::<f32>()));
        (units > 0 && bytes <= MOST && bytes <= LITTLE.max(read / SHARE)).then_some(FewRowsWork { units, bytes })
    }

    /// Largest number of rows a key/value head of a sequence whose key blocks are divided among workers.
    pub(crate) fn few_rows(&self) -> usize {
        FEW_ROWS.min(self.tiling.task_rows())
    }

    /// Shrinks the scratch to what this one problem takes. Where key blocks are divided, rows of several sequences may
    /// be gathered in it.
    pub(crate) fn shrink_to(self) -> Self {
        match self.split {
            Split::Rows => Self { tiling: self.tiling.shrink_to(self.shape.kv_len), ..self },
            Split::Keys { .. } => self,
        }
    }

    /// Instruction set of the plan.
    pub fn isa(&self) -> Isa {
        self.exec.isa
    }

    /// Largest number of threads that will work.
    pub fn workers(&self) -> usize {
        self.workers
    }

    /// Number of independent tasks.
    pub fn tasks(&self) -> usize {
        self.tasks
    }

    /// Bytes of the partial results of all key blocks, where these are divided among workers (few rows, many keys): at
    /// most a sixteenth of the bytes of keys and values that are read (counted as `f32`), or 1 MiB, and never more than
    /// 1 GiB. Beyond these limits, and for more rows, only rows are divided: then 0.
    pub fn partials_bytes(&self) -> usize {
        match self.split {
            Split::Keys { bytes, .. } => bytes,
            Split::Rows => 0,
        }
    }

    /// Scratch of one worker in bytes. Independent of lengths, heads and batch.
    pub fn scratch_bytes(&self) -> usize {
        self.tiling.scratch_bytes()
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Shape { batch, heads, kv_heads, q_len, kv_len, head_dim, value_dim } = self.shape;
        let (rows, keys) = self.exec.isa.tile();
        writeln!(
            f,
            "{batch} × {heads} heads ({kv_heads} key/value), {q_len} rows × {kv_len} keys, {head_dim} → {value_dim}"
        )?;
        writeln!(f, "{}, tiles of {rows} rows × {keys} keys, blocks of {KEY_BLOCK} keys", self.exec.isa)?;
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
