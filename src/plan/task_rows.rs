//! Size of tasks: the number of query rows with which workers have equal shares.

use crate::plan::problem::Problem;
use sdpa_kernels::{MAX_TASK, Rates};

/// Number of rows, about, that make packing the keys of a task worthwhile: at 32 rows, packing is a tenth of the work.
const MIN_TASK: usize = 32;
/// Most tasks per worker that are tried for the sake of balance.
const MAX_TASKS_PER_WORKER: usize = 16;

/// Query rows of a problem that is divided into tasks of equal size.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rows {
    /// Number of key/value heads, each batch index counted.
    pub(crate) heads: usize,
    /// Number of rows that share one of these.
    pub(crate) rows: usize,
    /// Cost of packing the keys of a task, in rows.
    packing: usize,
}

/// Difference between rows in the number of keys they see.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum RowCost {
    /// Difference of a fifth at most.
    Even,
    /// Larger differences.
    Uneven,
}

impl RowCost {
    /// Compares the first and the last row of the sequence with the most rows.
    fn of(problem: &Problem<'_>) -> Self {
        let call = problem.call();
        if !call.visible.hides_keys() {
            return Self::Even;
        }
        // Sequences that are not ragged are equally long; there may be any number of them.
        let count = if call.options.ragged.is_some() { call.sequence_count() } else { call.sequence_count().min(1) };
        let longest = (0..count).map(|index| call.sequence(index)).max_by_key(|sequence| sequence.q_len);
        let Some(sequence) = longest else { return Self::Even };
        let seen = |row: usize| call.keys_of_row(&sequence, row).count();
        let [first, last] = [seen(0), seen(sequence.q_len - 1)];
        if first.min(last) >= first.max(last) / 5 * 4 { Self::Even } else { Self::Uneven }
    }
}

impl Rows {
    pub(crate) fn of(problem: &Problem<'_>, rates: Rates) -> Self {
        let shape = problem.shape;
        // Query rows that share a key/value head form one sequence of rows, divided into equal tasks.
        let group_size = shape.heads / shape.kv_heads.max(1);
        let [batch, _, q_len, _] = problem.call().q.shape();
        Self {
            heads: batch.saturating_mul(shape.kv_heads),
            rows: group_size.saturating_mul(q_len),
            packing: rates.packing,
        }
    }

    /// Returns the number of rows of a task, in whole tiles of `tile_rows`: that with which `workers` workers are done
    /// soonest, or the largest of several.
    pub(crate) fn per_task(self, problem: &Problem<'_>, workers: usize, tile_rows: usize) -> usize {
        let fewest = self.rows.div_ceil(MAX_TASK).max(1);
        let enough = MAX_TASKS_PER_WORKER.saturating_mul(workers).div_ceil(self.heads.max(1));
        let most = if workers > 1 { enough.min(self.rows.div_ceil(MIN_TASK)).max(fewest) } else { fewest };
        let size = |parts: usize| self.rows.div_ceil(parts).next_multiple_of(tile_rows).min(MAX_TASK);
        if most == fewest {
            return size(fewest);
        }
        let cost = RowCost::of(problem);
        let best = (fewest..=most).min_by_key(|&parts| self.time(size(parts), workers, cost));
        size(best.unwrap_or(fewest))
    }

    /// Returns the estimated time of tasks of `size` rows, in eighths of a row of one head.
    fn time(self, size: usize, workers: usize, cost: RowCost) -> usize {
        let tasks = self.heads.saturating_mul(self.rows.div_ceil(size.max(1)));
        let task = 8 * (size + self.packing);
        // Slack for a worker that other work keeps from its last task.
        let late = task / 4;
        late.saturating_add(match cost {
            RowCost::Even => tasks.div_ceil(workers).saturating_mul(task),
            // The longest are taken first, head by head, so the last are short; but none takes less time than the longest.
            RowCost::Uneven => (tasks.saturating_mul(task) / workers).saturating_add(task / 2).max(2 * task),
        })
    }
}
