//! Plans and execution of backward calls.

use crate::attention::no_scratch;
use crate::backward::functions;
use crate::backward::problem::BackwardProblem;
use crate::error::Error;
use crate::plan::call_time;
use crate::shape::Shape;
use crate::threads::exec::Exec;
use crate::threads::run::{NO_MODS, Run};
use crate::threads::workers::{reserved, work_through};
use crate::threads::workspace::Workspace;
use sdpa_kernels::{
    AnyMods, BackwardLaunch, BackwardMemory, BackwardScratch, Call, Isa, KEY_BLOCK, MaskMod, ScoreMod, Tiling,
    WeightMod,
};

/// Division of a backward problem of one shape into tasks: key blocks, each with all the query rows that see it. Of the
/// plan, only the instruction set can change bits of the result: without FMA, or with another [`Precision`](crate::Precision)
/// than `Exact`.
///
/// ```
/// # use sdpa::{Attention, BackwardPlan, Exec, Gradients, Inputs, Saved, View};
/// # let (x, lse) = ([0.5f32; 300 * 8], [1.0f32; 300]);
/// # let (shape, rows) = ([1, 1, 300, 8], View::bhl(&lse, [1, 1, 300])?);
/// # let x = View::bhld(&x, shape)?;
/// let problem = Attention::new().backward(Inputs::new(x, x, x), Saved::new(x, rows, x), Gradients::new())?;
/// let plan = BackwardPlan::new(&problem, Exec::serial());
/// assert_eq!((plan.workers(), plan.tasks()), (1, 2)); // 300 keys are two blocks
/// # Ok::<(), sdpa::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct BackwardPlan {
    shape: Shape,
    isa: Isa,
    threads: usize,
    workers: usize,
    tasks: usize,
    tiling: Tiling,
}

impl BackwardPlan {
    /// Plans for problems of this problem's shape.
    pub fn new(problem: &BackwardProblem<'_>, exec: Exec) -> Self {
        let shape = problem.shape;
        let heads = shape.batch.saturating_mul(shape.kv_heads);
        let tasks = heads.saturating_mul(shape.kv_len.div_ceil(KEY_BLOCK).max(1));
        // Five products of matrices where the forward pass has two.
        let workers = call_time::workers(exec, 2.5, &problem.checked).min(tasks.max(1));
        let tiling = Tiling::for_backward(shape.head_dim, shape.value_dim, exec.isa.tile().0);
        let tiling = tiling.with_parts(problem.checked.call().backward_parts(exec.isa));
        Self { shape, isa: exec.isa, threads: exec.threads, workers, tasks, tiling }
    }

    /// Instruction set of the plan.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// Largest number of threads that will work.
    pub fn workers(&self) -> usize {
        self.workers
    }

    /// Number of tasks: key blocks, counted for each key/value head.
    pub fn tasks(&self) -> usize {
        self.tasks
    }

    /// Scratch of one worker in bytes, without the 8 for each parameter of a score function with a gradient that is wanted.
    /// Independent of lengths, heads and batch.
    pub fn scratch_bytes(&self) -> usize {
        BackwardScratch::bytes_for(&self.tiling)
    }
}

impl BackwardProblem<'_> {
    /// Computes the gradients. A plan made for another shape, or without scratch for this [`Precision`](crate::Precision), is
    /// replaced by one for this problem.
    ///
    /// # Errors
    /// [`Error::Memory`]; gradients are then untouched.
    pub fn run(self, plan: &BackwardPlan, workspace: &mut Workspace) -> Result<(), Error> {
        self.run_with(plan, workspace, Run::new())
    }

    /// Computes the gradients of a call with your own functions, on your own threads, or until your stop function says
    /// so.
    ///
    /// # Errors
    /// As [`Self::run`]; [`Error::Needs`] for a score function without a [derivative](ScoreMod::derivative) and for a
    /// weight function; [`Error::Mismatch`] for gradients in other than all [parameters](ScoreMod::parameters) of the score
    /// function; [`Error::Mask`] if the mask function does not fit the call ([`MaskMod::fits`]). Gradients are then untouched.
    /// [`Error::Stopped`] if work was left undone: gradients are then partly written.
    ///
    /// # Panics
    /// If one of the functions does: the panic reaches the caller when all workers have come to rest. Gradients are then
    /// partly written. The workspace, the plan and the pool serve other calls as before.
    pub fn run_with<S: ScoreMod, M: MaskMod, P: WeightMod>(
        self,
        plan: &BackwardPlan,
        workspace: &mut Workspace,
        run: Run<'_, S, M, P>,
    ) -> Result<(), Error> {
        functions::check(self.checked.call(), &self.gradients, run.mods)?;
        self.run_any(plan, workspace, run.mods(&NO_MODS), AnyMods::of(run.mods))
    }

    /// Computes the gradients. Not generic, so that a caller's functions do not compile it again.
    fn run_any(
        self,
        plan: &BackwardPlan,
        workspace: &mut Workspace,
        run: Run<'_>,
        mods: AnyMods<'_>,
    ) -> Result<(), Error> {
        let exec = Exec::serial().isa(plan.isa).threads(plan.threads);
        let has_parts = plan.tiling.has_parts(self.checked.call().backward_parts(plan.isa));
        let plan = if plan.shape == self.shape && has_parts { *plan } else { BackwardPlan::new(&self, exec) };
        let Workspace { backward, gradients: memory, .. } = workspace;
        let parameters = self.gradients.parameter_count();
        let workers =
            reserved(backward, plan.workers, run.threads(), |scratch| scratch.try_reserve(&plan.tiling, parameters));
        if workers.is_empty() {
            let of_parameters = parameters.saturating_mul(size_of::<f64>());
            return Err(no_scratch(plan.scratch_bytes().saturating_add(of_parameters)));
        }
        let Self { checked, saved, gradients, part, .. } = self;
        let call = *checked.call();
        let launch = BackwardLaunch::new(checked, saved, gradients, part, plan.tiling, memory);
        let launch = launch.ok_or_else(|| no_memory(&call, parameters))?.until(run.stop);
        for &stage in launch.stages() {
            let work = |scratch: &mut BackwardScratch| launch.work(stage, plan.isa, scratch, mods);
            work_through(workers, run.threads(), &|| launch.stop(), &work);
        }
        if launch.is_stopped() {
            return Err(Error::Stopped);
        }
        launch.finish();
        Ok(())
    }

    /// Plans and computes the gradients with a new workspace, on the threads of `exec`.
    ///
    /// # Errors
    /// As [`Self::run`].
    pub fn run_once(self, exec: Exec) -> Result<(), Error> {
        self.run_once_with(exec, Run::new())
    }

    /// Plans and computes the gradients as [`Self::run_with`] does, with a new workspace, on the threads of `exec`
    /// if the run names none.
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
        let plan = BackwardPlan::new(&self, exec);
        self.run_with(&plan, &mut Workspace::new(), run.on(exec))
    }
}

/// Returns the error of a call without memory for its rows and for the sums of `parameters` parameters.
pub(crate) fn no_memory(call: &Call<'_>, parameters: usize) -> Error {
    Error::Memory { what: "workspace of the backward pass", bytes: BackwardMemory::bytes_for(call, parameters) }
}
