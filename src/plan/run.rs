//! Execution of plans.
//!
//! Workers take tasks from one counter until none is left. A task writes its own rows and reads shared inputs, so the
//! result does not depend on which worker runs it, or when.

use crate::error::Error;
use crate::plan::Plan;
use crate::plan::problem::Problem;
use crate::threads::exec::Exec;
use crate::threads::executor::Executor;
use crate::threads::run::{NO_MODS, Run};
use crate::threads::workers::{self, reserved};
use crate::threads::workspace::Workspace;
use sdpa_kernels::{Isa, Launch, MaskMod, ScoreMod, Scratch, WeightMod};
use std::sync::Mutex;

/// Work of one worker on a launch.
type Work<'w> = &'w (dyn Fn(&Launch<'_>, Isa, &mut Scratch) + Sync);

impl Problem<'_> {
    /// Computes the problem. Cannot fail: everything was checked when the problem was made.
    ///
    /// A plan made for another shape is replaced by one for this shape: that costs a microsecond and never gives a
    /// wrong result.
    pub fn run(self, plan: &Plan, workspace: &mut Workspace) {
        // No functions, so none that does not fit; nothing stops it either.
        let _ = self.run_with(plan, workspace, Run::new());
    }

    /// Computes the problem with your own functions, on your own threads, or until your stop function says so.
    ///
    /// # Errors
    /// [`Error::Mask`] if the mask function does not fit the call ([`MaskMod::fits`]): outputs are then untouched.
    /// [`Error::Stopped`] if work was left undone. With closures, or without a mask function, and without
    /// [`Run::until`], it cannot fail.
    ///
    /// # Panics
    /// If one of the functions does: the panic reaches the caller when all workers have come to rest. Outputs are then
    /// partly written: rows are whole, untouched, or, in tasks that a function panicked in, anything. The workspace, the
    /// plan, caches and the pool serve other calls as before.
    pub fn run_with<S: ScoreMod, M: MaskMod, P: WeightMod>(
        self,
        plan: &Plan,
        workspace: &mut Workspace,
        run: Run<'_, S, M, P>,
    ) -> Result<(), Error> {
        let mods = run.mods;
        self.call.check_mask(&mods.mask)?;
        let plan = if plan.shape == self.shape { *plan } else { Plan::new(&self, plan.exec()) };
        // A weight function needs every row whole.
        let plan = if mods.weight.is_given() { Plan { split: None, ..plan } } else { plan };
        let run = run.mods(&NO_MODS);
        self.run_as(&plan, workspace, run, &|launch, isa, scratch| launch.work(isa, scratch, mods))
    }

    /// Computes the problem by calling `work` on each worker. Not generic, so that a caller's functions do not compile
    /// it again.
    fn run_as(self, plan: &Plan, workspace: &mut Workspace, run: Run<'_>, work: Work<'_>) -> Result<(), Error> {
        let split_rows = plan.split_rows(&self);
        let mut launch = Launch::new(self.call, self.outputs, plan.tiling).until(run.stop);
        if let Some(split_rows) = split_rows {
            launch = launch.split(&mut workspace.partials, split_rows);
        }
        carry_out(plan, &launch, &mut workspace.forward, run.threads(), work)
    }

    /// Plans and computes the problem with a new workspace, on the threads of `exec`.
    pub fn run_once(self, exec: Exec) {
        // As in `run`: nothing can fail.
        let _ = self.run_once_with(exec, Run::new());
    }

    /// Plans and computes the problem as [`Self::run_with`] does, with a new workspace, on the threads of `exec` if
    /// the run names none.
    ///
    /// # Errors
    /// As [`Self::run_with`].
    ///
    /// # Panics
    /// As [`Self::run_with`].
    pub fn run_once_with<S: ScoreMod, M: MaskMod, P: WeightMod>(
        self,
        exec: Exec,
        run: Run<'_, S, M, P>,
    ) -> Result<(), Error> {
        let plan = Plan::new(&self, exec).shrink_to();
        self.run_with(&plan, &mut Workspace::new(), run.on(exec))
    }
}

impl Workspace {
    /// Carries out a launch without functions.
    pub(crate) fn carry_out(&mut self, plan: &Plan, launch: &Launch<'_>, executor: &dyn Executor) -> Result<(), Error> {
        let work = |launch: &Launch<'_>, isa: Isa, scratch: &mut Scratch| launch.work(isa, scratch, &NO_MODS);
        carry_out(plan, launch, &mut self.forward, executor, &work)
    }
}

/// Carries out a launch by calling `work` on each worker that there is memory for.
fn carry_out(
    plan: &Plan,
    launch: &Launch<'_>,
    workers: &mut Vec<Mutex<Scratch>>,
    executor: &dyn Executor,
    work: Work<'_>,
) -> Result<(), Error> {
    // At least one: there was memory for it when the problem was made.
    let ready = reserved(workers, plan.workers, executor, |scratch| scratch.try_reserve(&plan.tiling)).len();
    let workers = &mut workers[..ready.max(1)];
    workers::work_through(workers, executor, &|| launch.stop(), &|scratch| work(launch, plan.isa, scratch));
    if launch.is_stopped() { Err(Error::Stopped) } else { Ok(()) }
}
