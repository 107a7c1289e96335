//! Execution of plans.
//!
//! Workers take tasks from one counter until none is left. A task writes its own rows and reads shared inputs, so the
//! result does not depend on which worker runs it, or when.

use crate::error::Error;
use crate::plan::problem::Problem;
use crate::plan::{Plan, Split};
use crate::threads::CurrentPool;
use crate::threads::exec::Exec;
use crate::threads::executor::Executor;
use crate::threads::workers::{self, own, reserved, share};
use core::fmt;
use sdpa_kernels::{Isa, Launch, MaskMod, Mods, Partials, ProbMod, ScoreMod, Scratch};
use std::sync::Mutex;

/// Work of one worker on a launch.
type Work<'w> = &'w (dyn Fn(&Launch<'_>, Isa, &mut Scratch) + Sync);

/// Threads to run on, and the function that says when to stop, if there is one.
#[derive(Clone, Copy)]
struct Host<'h> {
    executor: &'h dyn Executor,
    stop: Option<&'h (dyn Fn() -> bool + Sync)>,
}

/// Answer of a call that was stopped before all of its rows were computed: see [`Problem::run_until`].
///
/// ```
/// let error: Box<dyn std::error::Error> = sdpa::Stopped.into();
/// assert_eq!(error.to_string(), "stopped before all rows were computed");
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stopped;

impl fmt::Display for Stopped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("stopped before all rows were computed")
    }
}

impl core::error::Error for Stopped {}

/// Reusable memory of runs: one scratch per worker, which grows to the largest plan so far and is kept.
///
/// A second run of the same plan with the same workspace allocates nothing.
///
/// ```
/// use sdpa::{Attention, Exec, Inputs, Outputs, Plan, View, ViewMut, Workspace};
/// let (x, mut out, mut workspace, mut plan) = ([0.5; 3 * 4], [0.0; 3 * 4], Workspace::new(), None);
/// for _ in 0..10 {
///     let x = View::bhld(&x, [1, 1, 3, 4])?;
///     let outputs = Outputs::new(ViewMut::bhld(&mut out, [1, 1, 3, 4])?);
///     let problem = Attention::new().problem(Inputs::new(x, x, x), outputs)?;
///     let plan = *plan.get_or_insert_with(|| Plan::new(&problem, Exec::serial())); // made once, kept
///     problem.run(&plan, &mut workspace); // allocates the first time only
/// }
/// assert!(workspace.bytes() > 0);
/// # Ok::<(), sdpa::Error>(())
/// ```
#[derive(Debug, Default)]
pub struct Workspace {
    /// Locked while in use, so that an executor that calls a worker twice at once makes one of the two do nothing.
    workers: Vec<Mutex<Scratch>>,
    /// Partial results of key blocks, where these are divided among workers.
    partials: Partials,
}

impl Workspace {
    /// Creates an empty workspace; the first run fills it.
    pub const fn new() -> Self {
        Self { workers: Vec::new(), partials: Partials::new() }
    }

    /// Bytes held.
    pub fn bytes(&self) -> usize {
        workers::bytes(&self.workers, Scratch::bytes) + self.partials.bytes()
    }
}

impl Problem<'_> {
    /// Computes the problem. Cannot fail: everything was checked when the problem was made.
    ///
    /// A plan made for another shape is replaced by one for this shape: that costs a microsecond and never gives a
    /// wrong result.
    pub fn run(self, plan: &Plan, workspace: &mut Workspace) {
        // No functions, so none that does not fit; nothing stops it either.
        let _ = self.run_in(plan, workspace, &Mods::new(), Host { executor: &CurrentPool, stop: None });
    }

    /// Computes the problem with the caller's functions of scores, positions or weights, in the fused pass.
    ///
    /// # Errors
    /// [`Error::Mask`] if the mask function does not fit the call ([`MaskMod::fits`]): outputs are then untouched. With
    /// closures, or without a mask function, it cannot fail.
    ///
    /// # Panics
    /// If one of the functions does: the panic reaches the caller when all workers have come to rest. Outputs are then
    /// partly written: rows are whole, untouched, or, in tasks that a function panicked in, anything. The workspace, the
    /// plan, caches and the pool serve other calls as before.
    pub fn run_with<S: ScoreMod, M: MaskMod, P: ProbMod>(
        self,
        plan: &Plan,
        workspace: &mut Workspace,
        mods: &Mods<S, M, P>,
    ) -> Result<(), Error> {
        self.run_on(plan, workspace, mods, &CurrentPool)
    }

    /// Computes the problem on threads of the host's. [`Mods::new`] stands for no functions.
    ///
    /// The plan should be made for as many threads: [`Exec::on`]. Bits do not depend on it, or on the executor.
    ///
    /// # Errors
    /// As [`Self::run_with`].
    ///
    /// # Panics
    /// As [`Self::run_with`].
    pub fn run_on<S: ScoreMod, M: MaskMod, P: ProbMod>(
        self,
        plan: &Plan,
        workspace: &mut Workspace,
        mods: &Mods<S, M, P>,
        executor: &dyn Executor,
    ) -> Result<(), Error> {
        mods.mask.fits(&self.call.facts())?;
        // Without a function that stops it, a call that returns has been computed.
        let _ = self.run_in(plan, workspace, mods, Host { executor, stop: None });
        Ok(())
    }

    /// Computes the problem unless `stop` returns true meanwhile: at a deadline, say, or by a flag that another thread
    /// sets. [`CurrentPool`] stands for rayon's threads.
    ///
    /// `stop` is called by each worker before each task: up to 384 query rows of one key/value head against all the keys
    /// they see (at head_dim 64 about a millisecond for every 1000 keys). Where few rows are computed key block by key
    /// block ([`Plan::partials_bytes`] is not 0), it is called before each block of 256 keys: some microseconds of work,
    /// or up to a millisecond for 128 long rows. A head of a cache that holds values that are not finite may be computed once
    /// more after its last block, without a question.
    ///
    /// # Errors
    /// As [`Self::run_with`], if the call is refused. The inner result is [`Stopped`] if work was left undone. Every row of
    /// every output is then either computed, with the bits it always has, or untouched; which ones is not said. Key weight
    /// sums are likewise computed or untouched, by sequence and head. Where few rows are computed key block by key block, a
    /// call that is stopped before the last block leaves all of them untouched. The workspace serves other calls as before.
    ///
    /// # Panics
    /// As [`Self::run_with`]; also if `stop` does.
    ///
    /// ```
    /// use std::time::{Duration, Instant};
    /// use sdpa::{Attention, CurrentPool, Exec, Inputs, Mods, Outputs, Plan, Stopped, View, ViewMut, Workspace};
    /// # let (q, k, v) = (vec![0.5; 2 * 4 * 8], vec![0.25; 2 * 4 * 8], vec![1.0; 2 * 4 * 8]);
    /// # let (shape, mut out) = ([1, 2, 4, 8], vec![0.0; 2 * 4 * 8]);
    /// # let inputs = Inputs::new(View::bhld(&q, shape)?, View::bhld(&k, shape)?, View::bhld(&v, shape)?);
    /// # let outputs = Outputs::new(ViewMut::bhld(&mut out, shape)?);
    /// let problem = Attention::new().problem(inputs, outputs)?;
    /// let plan = Plan::new(&problem, Exec::default());
    /// let deadline = Instant::now() + Duration::from_secs(60);
    /// let late = || Instant::now() > deadline;
    /// match problem.run_until(&plan, &mut Workspace::new(), &Mods::new(), &CurrentPool, &late)? {
    ///     Ok(()) => assert_eq!(out[0], 1.0),
    ///     Err(Stopped) => panic!("four rows took a minute"),
    /// }
    /// # Ok::<(), sdpa::Error>(())
    /// ```
    pub fn run_until<S: ScoreMod, M: MaskMod, P: ProbMod>(
        self,
        plan: &Plan,
        workspace: &mut Workspace,
        mods: &Mods<S, M, P>,
        executor: &dyn Executor,
        stop: &(dyn Fn() -> bool + Sync),
    ) -> Result<Result<(), Stopped>, Error> {
        mods.mask.fits(&self.call.facts())?;
        Ok(self.run_in(plan, workspace, mods, Host { executor, stop: Some(stop) }))
    }

    fn run_in<S: ScoreMod, M: MaskMod, P: ProbMod>(
        self,
        plan: &Plan,
        workspace: &mut Workspace,
        mods: &Mods<S, M, P>,
        host: Host<'_>,
    ) -> Result<(), Stopped> {
        let plan = if plan.shape == self.shape { *plan } else { Plan::new(&self, plan.exec) };
        // A weight function needs every row whole.
        let plan = if mods.prob.is_given() { Plan { split: Split::Rows, ..plan } } else { plan };
        self.run_as(&plan, workspace, host, &|launch, isa, scratch| launch.work(isa, scratch, mods))
    }

    /// Computes the problem by calling `work` on each worker. Not generic, so that a caller's functions do not compile
    /// it again.
    fn run_as(self, plan: &Plan, workspace: &mut Workspace, host: Host<'_>, work: Work<'_>) -> Result<(), Stopped> {
        let few_rows = plan.few_rows(&self);
        let Workspace { workers, partials } = workspace;
        // At least one: there was memory for it when the problem was made.
        let ready = reserved(workers, plan.workers, host.executor, |scratch| scratch.try_reserve(&plan.tiling)).len();
        let workers = &mut workers[..ready.max(1)];
        let mut launch = Launch::new(self.call, self.outputs, plan.tiling);
        if let Some(few_rows) = few_rows {
            launch = launch.split(partials, few_rows);
        }
        if let Some(stop) = host.stop {
            launch = launch.until(stop);
        }
        let work = |scratch: &mut Scratch| work(&launch, plan.exec.isa, scratch);
        if workers.len() > 1 {
            share(workers, host.executor, &|| launch.stop(), &work);
        }
        // The calling thread alone, or what an executor that broke its promise left undone.
        work(own(&mut workers[0]));
        if launch.is_stopped() { Err(Stopped) } else { Ok(()) }
    }

    /// Plans and computes the problem with a workspace of its own.
    pub fn run_once(self, exec: Exec) {
        let plan = Plan::new(&self, exec).shrink_to();
        self.run(&plan, &mut Workspace::new());
    }

    /// Plans and computes the problem with the caller's functions and a workspace of its own.
    ///
    /// # Errors
    /// As [`Self::run_with`].
    ///
    /// # Panics
    /// As [`Self::run_with`].
    pub fn run_once_with<S: ScoreMod, M: MaskMod, P: ProbMod>(
        self,
        exec: Exec,
        mods: &Mods<S, M, P>,
    ) -> Result<(), Error> {
        let plan = Plan::new(&self, exec).shrink_to();
        self.run_with(&plan, &mut Workspace::new(), mods)
    }
}
