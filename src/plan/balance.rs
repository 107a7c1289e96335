//! Balance of a plan: how busy each worker is.

use crate::plan::Plan;
use crate::plan::problem::Problem;
use sdpa_kernels::Costs;
use std::cmp::Reverse;
use std::collections::BinaryHeap;

impl Plan {
    /// Returns how busy each worker is when a problem runs under this plan on `workers` workers, whatever number the plan was
    /// made for: the fraction of the call's time in which it works rather than waits for the last to finish, if all are equally
    /// fast and work from the start. Workers that find nothing to do are left out. 0 workers count as 1. A plan for another
    /// shape is replaced by one for this shape, as in [`Problem::run`].
    ///
    /// Work is counted in visible pairs of query rows and keys, and in reading or packing keys; masks and your
    /// functions do not count.
    ///
    /// Complexity: the number of query rows, plus key blocks for sequences that are split.
    ///
    /// ```
    /// use sdpa::{Attention, Exec, Inputs, Outputs, Plan, View, ViewMut};
    /// let (x, mut out) = (vec![0.5; 12 * 512 * 64], vec![0.0; 12 * 512 * 64]);
    /// let x = View::bhld(&x, [1, 12, 512, 64])?;
    /// let outputs = Outputs::new(ViewMut::bhld(&mut out, [1, 12, 512, 64])?);
    /// let problem = Attention::new().problem(Inputs::new(x, x, x), outputs)?;
    /// let plan = Plan::new(&problem, Exec::default().threads(8)); // 24 tasks
    /// let busy = plan.balance(&problem, 8);
    /// assert_eq!(busy.len(), 8); // none is without work
    /// assert!(busy.iter().sum::<f64>() / 8.0 > 0.9, "{busy:?}");
    /// # Ok::<(), sdpa::Error>(())
    /// ```
    pub fn balance(&self, problem: &Problem<'_>, workers: usize) -> Vec<f64> {
        // A plan for another shape is replaced when it runs.
        let plan = if self.shape == problem.shape { *self } else { Self::new(problem, self.exec()) };
        let Costs { accumulated, merged } = problem.call().costs(&plan.tiling, plan.split_rows(problem));
        let mut done = vec![0; workers.max(1).min(accumulated.len().max(merged.len()))];
        // Nobody merges before all is accumulated.
        let [accumulating, merging] = [accumulated, merged].map(|costs| take_in_turn(&costs, &mut done) as f64);
        let time = accumulating + merging;
        done.into_iter().filter(|&done| done > 0).map(|done| done as f64 / time).collect()
    }
}

/// Lets each worker take the next piece of work as soon as it is done with the one before. Adds what they do to `done`, and
/// returns the time until the last is done.
fn take_in_turn(costs: &[u64], done: &mut [u64]) -> u64 {
    let mut free: BinaryHeap<_> = (0..done.len()).map(|worker| Reverse((0, worker))).collect();
    for &cost in costs {
        let Some(Reverse((time, worker))) = free.pop() else { break };
        done[worker] = u64::saturating_add(done[worker], cost);
        free.push(Reverse((u64::saturating_add(time, cost), worker)));
    }
    free.into_iter().map(|Reverse((time, _))| time).max().unwrap_or(0)
}
