//! Run: functions, threads and deadline of the execution of a plan.

use crate::threads::CurrentPool;
use crate::threads::exec::Exec;
use crate::threads::executor::Executor;
use core::fmt;
use sdpa_kernels::Mods;

/// No functions.
pub(crate) const NO_MODS: Mods = Mods::new();

/// Function that says when to stop.
pub(crate) type StopFn<'r> = &'r (dyn Fn() -> bool + Sync);

/// Functions, threads and deadline of a run, for [`Problem::run_with`](crate::Problem::run_with) and
/// [`BackwardProblem::run_with`](crate::BackwardProblem::run_with).
///
/// ```
/// use std::time::{Duration, Instant};
/// use sdpa::{Attention, Error, Exec, Inputs, Mods, Outputs, Plan, Position, Run, View, ViewMut, Workspace};
/// # let (q, k, v) = (vec![0.5; 2 * 4 * 8], vec![0.25; 2 * 4 * 8], vec![1.0; 2 * 4 * 8]);
/// # let (shape, mut out) = ([1, 2, 4, 8], vec![0.0; 2 * 4 * 8]);
/// # let inputs = Inputs::new(View::bhld(&q, shape)?, View::bhld(&k, shape)?, View::bhld(&v, shape)?);
/// # let outputs = Outputs::new(ViewMut::bhld(&mut out, shape)?);
/// let problem = Attention::new().problem(inputs, outputs)?;
/// let plan = Plan::new(&problem, Exec::default());
/// let even = Mods::new().mask(|at: Position| at.key % 2 == 0);
/// let deadline = Instant::now() + Duration::from_secs(60);
/// let late = || Instant::now() > deadline;
/// match problem.run_with(&plan, &mut Workspace::new(), Run::new().mods(&even).until(&late)) {
///     Ok(()) => assert_eq!(out[0], 1.0),
///     Err(Error::Stopped) => panic!("four rows took a minute"),
///     Err(error) => return Err(error),
/// }
/// # Ok::<(), Error>(())
/// ```
pub struct Run<'r, S = (), M = (), P = ()> {
    pub(crate) mods: &'r Mods<S, M, P>,
    /// None: that of the [`Exec`], or rayon's current pool.
    executor: Option<&'r dyn Executor>,
    pub(crate) stop: Option<StopFn<'r>>,
}

impl Run<'_> {
    /// Creates a run without functions, to the end, on the threads of the call's [`Exec`], or rayon's [`CurrentPool`] if it
    /// has none.
    pub const fn new() -> Self {
        Self { mods: &NO_MODS, executor: None, stop: None }
    }
}

impl<'r, S, M, P> Run<'r, S, M, P> {
    /// Sets the functions of scores, positions and weights, which are called in the fused pass.
    pub fn mods<S2, M2, P2>(self, mods: &'r Mods<S2, M2, P2>) -> Run<'r, S2, M2, P2> {
        Run { mods, executor: self.executor, stop: self.stop }
    }

    /// Sets the threads to run on. Make the plan for the same number of threads: [`Exec::on`]. Bits do not depend on threads.
    pub fn executor(self, executor: &'r dyn Executor) -> Self {
        Self { executor: Some(executor), ..self }
    }

    /// Returns the executor to run on.
    pub(crate) fn threads(&self) -> &'r dyn Executor {
        self.executor.unwrap_or(&CurrentPool)
    }

    /// Returns a run on the threads of these settings, unless it has its own.
    pub(crate) fn on(self, exec: Exec<'r>) -> Self {
        Self { executor: self.executor.or(Some(exec.executor())), ..self }
    }

    /// Returns the settings of a call that names none: all threads of the run.
    pub(crate) fn exec(&self) -> Exec<'r> {
        self.executor.map_or_else(Exec::default, Exec::on)
    }

    /// Sets a function that stops the run when it returns true: at a deadline, say, or by a flag that another thread
    /// sets. [`Error::Stopped`](crate::Error::Stopped) says what the outputs then hold.
    ///
    /// Each worker calls it before each task. A task of the forward pass is up to 384 query rows of one key/value head
    /// against all the keys they see: at head_dim 64 about a millisecond for every 1000 keys. If key blocks are divided
    /// among workers ([`Plan::partials_bytes`](crate::Plan::partials_bytes) is not 0), a task is a block of 256 keys:
    /// some microseconds, or up to a millisecond for 128 long rows. A task of the backward pass is a block of 256 keys
    /// against all the rows that see them. If a cache holds non-finite values, a head may be computed once more after
    /// its last block, without a call of the function. [`Mods`](crate::Mods) says what to mind in a function that makes a call.
    pub fn until(self, stop: &'r (dyn Fn() -> bool + Sync)) -> Self {
        Self { stop: Some(stop), ..self }
    }
}

impl Default for Run<'_> {
    fn default() -> Self {
        Self::new()
    }
}

impl<S, M, P> Clone for Run<'_, S, M, P> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<S, M, P> Copy for Run<'_, S, M, P> {}

impl<S, M, P> fmt::Debug for Run<'_, S, M, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let threads = self.threads().threads();
        f.debug_struct("Run").field("threads", &threads).field("stops", &self.stop.is_some()).finish_non_exhaustive()
    }
}
