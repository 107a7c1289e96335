//! How a problem will be run: plain data, made from sizes alone, printable.

use crate::exec::Exec;
use crate::problem::Problem;
use crate::shape::Shape;
use core::fmt;
use sdpa_kernels::{Accumulation, Isa, KEY_BLOCK, MAX_TASK, Tiling};

/// Tasks that each worker should find, so that the last ones to finish do not keep the others waiting long.
const TASKS_PER_WORKER: usize = 4;
/// Fewest rows of a task worth packing the keys for: at 32 rows packing is already a tenth of the work.
const MIN_TASK: usize = 32;
/// Rows of a key/value head up to which blocks of keys are shared out.
const FEW_ROWS: usize = 16;
/// Blocks of keys are shared out only if what they gather is at most this share of the keys and values they read, these
/// counted as `f32`, or no more bytes than [`LITTLE`]; and never more bytes than [`MOST`].
const SHARE: usize = 16;
const LITTLE: usize = 1 << 20;
const MOST: usize = 1 << 30;
/// How a problem of one shape is cut up and shared out. No bit of the result depends on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Plan {
    pub(crate) shape: Shape,
    pub(crate) exec: Exec,
    pub(crate) workers: usize,
    pub(crate) tasks: usize,
    pub(crate) tiling: Tiling,
    pub(crate) sharing: Sharing,
}

/// What is shared out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Sharing {
    /// Heads and query rows: every task streams all the keys its rows see.
    Rows,
    /// Blocks of keys too: rows are few. Memory for what all blocks gather, in bytes.
    Keys { bytes: usize },
}

impl Plan {
    /// Plans for problems of this one's shape.
    pub fn new(problem: &Problem<'_>, exec: Exec) -> Self {
        let shape = problem.shape;
        let (tile_rows, _) = exec.isa.tile();
        // Rows that share a key/value head make one run, cut into equal tasks.
        let sharing = shape.heads / shape.kv_heads.max(1);
        let rows = sharing.saturating_mul(problem.call.q.shape()[2]);
        let heads = problem.call.q.shape()[0].saturating_mul(shape.kv_heads);
        let workers = exec.workers(shape.flops());
        let wanted = if workers > 1 { workers.saturating_mul(TASKS_PER_WORKER).div_ceil(heads.max(1)) } else { 1 };
        let parts = wanted.min(rows.div_ceil(MIN_TASK)).max(rows.div_ceil(MAX_TASK)).max(1);
        let task_rows = rows.div_ceil(parts).next_multiple_of(tile_rows).min(MAX_TASK);
        let tiling = Tiling::new(shape.head_dim, shape.value_dim, task_rows, tile_rows);
        let tasks = heads.saturating_mul(rows.div_ceil(tiling.task_rows()));
        let workers_of = |tasks: usize| workers.min(tasks.max(1));
        let by_rows = Self { shape, exec, workers: workers_of(tasks), tasks, tiling, sharing: Sharing::Rows };
        let Some(bytes) = by_rows.shares_keys(problem) else { return by_rows };
        let units = heads.saturating_mul(shape.kv_len.div_ceil(KEY_BLOCK));
        let runs = if workers > 1 { units.min(workers.saturating_mul(TASKS_PER_WORKER)) } else { 1 };
        Self { workers: workers_of(runs), tasks: runs, sharing: Sharing::Keys { bytes }, ..by_rows }
    }

    /// Bytes that blocks of keys gather, if they are to be shared out: rows are few, blocks several (decoding), and memory in
    /// proportion.
    pub(crate) fn shares_keys(&self, problem: &Problem<'_>) -> Option<usize> {
        let (shape, call) = (problem.shape, &problem.call);
        let rows = call.group_size().saturating_mul(call.q.shape()[2]);
        let few = (1..=FEW_ROWS.min(self.tiling.task_rows())).contains(&rows);
        if !few || shape.kv_len <= KEY_BLOCK || problem.needs_whole_rows() || call.visible.window.is_some() {
            return None;
        }
        let Accumulation { floats, keys } = call.accumulation();
        let [gathered, read] = [floats, keys.saturating_mul(shape.head_dim + shape.value_dim)]
            .map(|floats| floats.saturating_mul(size_of::<f32>()));
        (gathered <= MOST && gathered <= LITTLE.max(read / SHARE)).then_some(gathered)
    }

    /// With no more scratch than this one problem takes.
    pub(crate) fn shrink_to(self) -> Self {
        Self { tiling: self.tiling.shrink_to(self.shape.kv_len), ..self }
    }

    /// The instruction set.
    pub fn isa(&self) -> Isa {
        self.exec.isa
    }

    /// Threads that will work, at most.
    pub fn workers(&self) -> usize {
        self.workers
    }

    /// Independent pieces of work.
    pub fn tasks(&self) -> usize {
        self.tasks
    }

    /// What blocks of keys gather where they are shared out (few rows, many keys), in bytes, all of them together: at most a
    /// sixteenth of the keys and values that are read, these counted as `f32`, or 1 MiB, and never more than 1 GiB. Beyond
    /// that, and for more rows, only rows are shared out: then 0.
    pub fn gathered_bytes(&self) -> usize {
        match self.sharing {
            Sharing::Keys { bytes } => bytes,
            Sharing::Rows => 0,
        }
    }

    /// Scratch of one worker, in bytes. Does not depend on lengths, heads or batch.
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
            "{} tasks of up to {} rows, in groups of {}, on {} thread(s), {} KiB of scratch each",
            self.tasks,
            self.tiling.task_rows(),
            self.tiling.row_block_rows(),
            self.workers,
            self.scratch_bytes() / 1024
        )
    }
}
