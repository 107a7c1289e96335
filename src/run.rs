//! Execution of plans.
//!
//! Workers take tasks from one counter until none is left. A task writes its own rows and reads shared inputs, so the
//! result does not depend on which worker runs it, or when.

use crate::exec::Exec;
use crate::plan::{Plan, Split};
use crate::problem::Problem;
use crate::threads::{current_threads, each};
use sdpa_kernels::{Isa, Launch, MaskMod, Mods, Partials, ProbMod, ScoreMod, Scratch};

/// Work of one worker on a launch.
type Work<'w> = &'w (dyn Fn(&Launch<'_>, Isa, &mut Scratch) + Sync);

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
    workers: Vec<Scratch>,
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
        self.workers.iter().map(Scratch::bytes).sum::<usize>() + self.partials.bytes()
    }

    fn for_plan(&mut self, plan: &Plan) -> (&mut [Scratch], &mut Partials) {
        // At most as many workers as the pool has threads, whatever the plan says. One thread needs no pool, and
        // querying the pool's size would start it.
        let workers = if plan.workers > 1 { plan.workers.min(current_threads()) } else { 1 };
        if self.workers.len() < workers {
            self.workers.resize_with(workers, Scratch::new);
        }
        // Reserve the scratch here, not in the workers: which of them find tasks differs from run to run. Use as many
        // workers as there is memory for; there was memory for one when the problem was made.
        let ready =
            self.workers[..workers].iter_mut().map_while(|worker| worker.try_reserve(&plan.tiling).then_some(()));
        let ready = ready.count();
        (&mut self.workers[..ready.max(1)], &mut self.partials)
    }
}

impl Problem<'_> {
    /// Computes the problem. Cannot fail: everything was checked when the problem was made.
    ///
    /// A plan made for another shape is replaced by one for this shape: that costs a microsecond and never gives a
    /// wrong result.
    pub fn run(self, plan: &Plan, workspace: &mut Workspace) {
        self.run_with(plan, workspace, &Mods::new());
    }

    /// Computes the problem with the caller's functions of scores, positions or weights, in the fused pass.
    pub fn run_with<S: ScoreMod, M: MaskMod, P: ProbMod>(
        self,
        plan: &Plan,
        workspace: &mut Workspace,
        mods: &Mods<S, M, P>,
    ) {
        let plan = if plan.shape == self.shape { *plan } else { Plan::new(&self, plan.exec) };
        // A weight function needs every row whole.
        let plan = if P::ACTIVE { Plan { split: Split::Rows, ..plan } } else { plan };
        self.run_as(&plan, workspace, &|launch, isa, scratch| launch.work(isa, scratch, mods));
    }

    /// Computes the problem by calling `work` on each worker. Not generic, so that a caller's functions do not compile
    /// it again.
    fn run_as(self, plan: &Plan, workspace: &mut Workspace, work: Work<'_>) {
        // The plan may have been made for another problem of this shape.
        let shares_keys = plan.split != Split::Rows && plan.shares_keys(&self).is_some();
        let (scratch, partials) = workspace.for_plan(plan);
        let mut launch = Launch::new(self.call, self.outputs, plan.tiling);
        if shares_keys {
            launch = launch.split(partials, plan.tasks);
        }
        each(scratch, |scratch| work(&launch, plan.exec.isa, scratch));
    }

    /// Plans and computes the problem with a workspace of its own.
    pub fn run_once(self, exec: Exec) {
        self.run_once_with(exec, &Mods::new());
    }

    /// Plans and computes the problem with the caller's functions and a workspace of its own.
    pub fn run_once_with<S: ScoreMod, M: MaskMod, P: ProbMod>(self, exec: Exec, mods: &Mods<S, M, P>) {
        let plan = Plan::new(&self, exec).shrink_to();
        self.run_with(&plan, &mut Workspace::new(), mods);
    }
}
