//! Execution of plans.
//!
//! Workers take tasks from one counter until none is left. A task writes its own rows and reads shared inputs, so the
//! result does not depend on which worker runs it, or when.

use crate::error::Error;
use crate::plan::Plan;
use crate::plan::problem::Problem;
use crate::threads::exec::Exec;
use crate::threads::executor::Executor;
use crate::threads::run::Run;
use crate::threads::workers::{reserved, work_through};
use crate::threads::workspace::Workspace;
use sdpa_kernels::{AnyMods, Launch, MaskMod, ScoreMod, Scratch, WeightMod};
use std::sync::Mutex;

impl Problem<'_> {
    /// Computes the problem. Nothing can be wrong with it: everything was checked when it was made, and is not checked again.
    ///
    /// A plan made for another shape, or without scratch for this [`Precision`](crate::Precision), is replaced by one for this
    /// problem: that costs a microsecond and never gives a wrong result.
    ///
    /// # Panics
    /// If there is no memory for the scratch of one worker ([`Plan::scratch_bytes`]). Outputs are then untouched.
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
    /// plan, caches and the pool serve other calls as before. Also as [`Self::run`].
    pub fn run_with<S: ScoreMod, M: MaskMod, P: WeightMod>(
        self,
        plan: &Plan,
        workspace: &mut Workspace,
        run: Run<'_, S, M, P>,
    ) -> Result<(), Error> {
        self.call().check_mask(&run.mods.mask)?;
        let plan = if plan.fits(&self) { *plan } else { Plan::new(&self, plan.exec()) };
        // A weight function needs every row whole.
        let split = plan.split_rows(&self).filter(|_| !run.mods.weight.is_given());
        let launch = Launch::new(self.checked, plan.tiling, split, &mut workspace.partials).until(run.stop);
        plan.execute(&launch, &mut workspace.forward, run.threads(), AnyMods::of(run.mods))
    }

    /// Plans and computes the problem with a new workspace, on the threads of `exec`.
    ///
    /// # Panics
    /// As [`Self::run`].
    pub fn run_once(self, exec: Exec) {
        // As in `run`.
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
        let mut plan = Plan::new(&self, exec);
        // Scratch for this one problem. Where key blocks are divided, rows of several sequences may be gathered in it.
        if plan.split.is_none() {
            plan.tiling = plan.tiling.shrink_to(self.shape.kv_len);
        }
        self.run_with(&plan, &mut Workspace::new(), run.on(exec))
    }
}

impl Plan {
    /// Carries out a launch on each worker that there is memory for.
    ///
    /// # Errors
    /// [`Error::Stopped`] if work was left undone.
    pub(crate) fn execute(
        &self,
        launch: &Launch<'_>,
        workers: &mut Vec<Mutex<Scratch>>,
        executor: &dyn Executor,
        mods: AnyMods<'_>,
    ) -> Result<(), Error> {
        // At least one: there was memory for it when the problem was made.
        let ready = reserved(workers, self.workers, executor, |scratch| scratch.try_reserve(&self.tiling)).len();
        let work = |scratch: &mut Scratch| launch.work(self.isa, scratch, mods);
        work_through(&mut workers[..ready.max(1)], executor, &|| launch.stop(), &work);
        if launch.is_stopped() { Err(Error::Stopped) } else { Ok(()) }
    }
}
