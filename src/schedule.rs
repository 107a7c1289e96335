//! Runs a plan: the only file that knows about threads.
//!
//! Workers take tasks from one counter until none is left. A task writes its own rows and reads shared inputs, so who
//! runs it, and when, cannot be seen in the result.

use crate::plan::{Exec, Plan, Sharing};
use crate::problem::Problem;
use sdpa_kernels::{Launch, MaskMod, Mods, Packed, Partials, ProbMod, Product, ScoreMod, Scratch};
use std::sync::{Mutex, PoisonError};

/// Memory that runs share: one scratch for each worker, which grows to what plans need and stays.
///
/// A second run of the same plan with the same workspace allocates nothing.
#[derive(Debug, Default)]
pub struct Workspace {
    workers: Vec<Scratch>,
    /// What blocks of keys gather, where they are shared out.
    partials: Partials,
}

impl Workspace {
    /// Empty; the first run fills it.
    pub const fn new() -> Self {
        Self { workers: Vec::new(), partials: Partials::new() }
    }

    /// Bytes held.
    pub fn bytes(&self) -> usize {
        self.workers.iter().map(Scratch::bytes).sum::<usize>() + self.partials.bytes()
    }

    fn for_plan(&mut self, plan: &Plan) -> (&mut [Scratch], &mut Partials) {
        // No more than the pool has threads, whatever was planned for. One thread needs no pool: asking would start it.
        let workers = if plan.workers > 1 { plan.workers.min(current_threads()) } else { 1 };
        if self.workers.len() < workers {
            self.workers.resize_with(workers, Scratch::new);
        }
        // Here, not in the workers: which of them find work differs from run to run.
        // As many as there is memory for; for one there was when the problem was made.
        let ready =
            self.workers[..workers].iter_mut().map_while(|worker| worker.try_reserve(&plan.geometry).then_some(()));
        let ready = ready.count();
        (&mut self.workers[..ready.max(1)], &mut self.partials)
    }
}

impl Problem<'_> {
    /// Computes. Cannot fail: everything was checked when the problem was made.
    ///
    /// A plan made for another shape is made anew for this one; that costs a microsecond, never a wrong result.
    pub fn run(self, plan: &Plan, workspace: &mut Workspace) {
        self.run_with(plan, workspace, &Mods::new());
    }

    /// Computes with the caller's functions of scores, positions or weights, compiled into the fused pass.
    pub fn run_with<S: ScoreMod, M: MaskMod, P: ProbMod>(
        self,
        plan: &Plan,
        workspace: &mut Workspace,
        mods: &Mods<S, M, P>,
    ) {
        let plan = if plan.shape == self.shape { *plan } else { Plan::new(&self, plan.exec) };
        // A plan may have been made for another problem of this shape.
        let shares_keys = plan.sharing != Sharing::Rows && !P::ACTIVE && plan.shares_keys(&self).is_some();
        let (scratch, partials) = workspace.for_plan(&plan);
        let mut launch = Launch::new(self.call, self.outputs, plan.geometry);
        if shares_keys {
            launch = launch.split(partials, plan.tasks);
        }
        each(scratch, |scratch| launch.work(plan.exec.isa, scratch, mods));
    }

    /// Plans and computes, with memory of its own.
    pub fn run_once(self, exec: Exec) {
        self.run_once_with(exec, &Mods::new());
    }

    /// Plans and computes with the caller's functions, with memory of its own.
    pub fn run_once_with<S: ScoreMod, M: MaskMod, P: ProbMod>(self, exec: Exec, mods: &Mods<S, M, P>) {
        let plan = Plan::new(&self, exec).snug();
        self.run_with(&plan, &mut Workspace::new(), mods);
    }
}

/// Calls `work` once for each scratch, at the same time where there are threads for it. What `work` dispatches on, it
/// dispatches on inside: a closure handed to rayon does not inherit the caller's instruction set.
fn each(scratch: &mut [Scratch], work: impl Fn(&mut Scratch) + Sync + Send) {
    #[cfg(feature = "rayon")]
    if scratch.len() > 1 {
        use rayon::prelude::*;
        scratch.par_iter_mut().with_max_len(1).for_each(work);
        return;
    }
    scratch.iter_mut().take(1).for_each(work);
}

/// Rows times weights, several such products side by side: `(x, weights, out)` each. One fork and one join for all.
pub(crate) fn multiply<const N: usize>(exec: Exec, products: [(&[f32], &Packed, &mut [f32]); N]) {
    let cost: f64 = products.iter().map(|(x, weights, _)| weights.cost(x.len() / weights.inputs())).sum();
    let workers = exec.workers(cost).min(if exec.threads > 1 { current_threads() } else { 1 });
    let products = products.map(|(x, weights, out)| Product::new(x, weights, out, workers));
    let work = || products.iter().for_each(|product| product.work(exec.isa));
    #[cfg(feature = "rayon")]
    if workers > 1 {
        use rayon::prelude::*;
        (0..workers).into_par_iter().with_max_len(1).for_each(|_| work());
        return;
    }
    work();
}

/// A slice as rows of this width.
pub(crate) struct Rows<T>(pub(crate) T, pub(crate) usize);

/// Operands that go by row: cut before a row, both parts go their own way. More than two are pairs of pairs.
pub(crate) trait Split: Send + Sized {
    fn split(self, row: usize) -> (Self, Self);
}

impl Split for Rows<&[f32]> {
    fn split(self, row: usize) -> (Self, Self) {
        let (before, after) = self.0.split_at(row * self.1);
        (Rows(before, self.1), Rows(after, self.1))
    }
}

impl Split for Rows<&mut [f32]> {
    fn split(self, row: usize) -> (Self, Self) {
        let (before, after) = self.0.split_at_mut(row * self.1);
        (Rows(before, self.1), Rows(after, self.1))
    }
}

impl<A: Split, B: Split> Split for (A, B) {
    fn split(self, row: usize) -> (Self, Self) {
        let ((a, c), (b, d)) = (self.0.split(row), self.1.split(row));
        ((a, b), (c, d))
    }
}

/// Calls `work(first row, operands from there on)` for runs of rows that together are all `count` of them, on as many
/// threads as `flops` operations are worth. Nothing is allocated.
pub(crate) fn rows<T: Split>(exec: Exec, count: usize, flops: f64, operands: T, work: impl Fn(usize, T) + Sync) {
    let workers = exec.workers(flops).min(count);
    let workers = if workers > 1 { workers.min(current_threads()) } else { 1 };
    share(workers, 0..count, operands, &work);
}

/// Halves the workers and the rows until a worker is alone.
fn share<T: Split>(workers: usize, rows: core::ops::Range<usize>, operands: T, work: &(impl Fn(usize, T) + Sync)) {
    if workers <= 1 {
        return work(rows.start, operands);
    }
    let half = workers / 2;
    let before = rows.len() * half / workers;
    let (left, right) = operands.split(before);
    let middle = rows.start + before;
    join(|| share(half, rows.start..middle, left, work), || share(workers - half, middle..rows.end, right, work));
}

/// Both, at the same time where there are threads for it.
fn join(a: impl FnOnce() + Send, b: impl FnOnce() + Send) {
    #[cfg(feature = "rayon")]
    rayon::join(a, b);
    #[cfg(not(feature = "rayon"))]
    {
        a();
        b();
    }
}

/// Calls `work` on every part, each worker with its own `each` floats of scratch: as many workers as there is scratch for.
/// They take the next part until none is left.
pub(crate) fn parts<P: Send>(
    scratch: &mut [f32],
    each: usize,
    parts: impl Iterator<Item = P> + Send,
    work: impl Fn(&mut [f32], P) + Sync,
) {
    let queue = Mutex::new(parts);
    let worker = |scratch: &mut [f32]| {
        loop {
            let part = queue.lock().unwrap_or_else(PoisonError::into_inner).next();
            let Some(part) = part else { return };
            work(scratch, part);
        }
    };
    #[cfg(feature = "rayon")]
    if scratch.len() > each {
        use rayon::prelude::*;
        return scratch.par_chunks_exact_mut(each).with_max_len(1).for_each(worker);
    }
    worker(&mut scratch[..each]);
}

/// Threads of the pool a call would run in.
pub(crate) fn current_threads() -> usize {
    #[cfg(feature = "rayon")]
    return rayon::current_num_threads();
    #[cfg(not(feature = "rayon"))]
    1
}
