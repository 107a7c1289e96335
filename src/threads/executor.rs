//! Executor: the trait by which a call runs on your own thread pool.

use sdpa_kernels::ThreadPool;

/// Threads that run closures, for [`Exec::on`](crate::Exec::on) and [`Run::executor`](crate::Run::executor): a
/// [`ThreadPool`](crate::ThreadPool), rayon's [`CurrentPool`](crate::CurrentPool), or a pool of your own.
///
/// An implementation in safe code cannot make a call unsound, even if it breaks the promises below. The calling thread
/// does the work of an index that was not called; an index that is called twice, or is not below `tasks`, does nothing
/// more. An implementation that extends lifetimes by `unsafe` code must not return before every call of `task` has.
///
/// ```
/// use sdpa::{Attention, Exec, Executor, Inputs, Mods, Outputs, Plan, Run, View, ViewMut, Workspace};
///
/// /// Threads of the standard library, started anew for each call.
/// struct Threads(usize);
///
/// impl Executor for Threads {
///     fn threads(&self) -> usize {
///         self.0
///     }
///     fn run(&self, tasks: usize, task: &(dyn Fn(usize) + Sync)) {
///         std::thread::scope(|scope| {
///             (1..tasks).for_each(|index| drop(scope.spawn(move || task(index))));
///             task(0); // the calling thread works too
///         });
///     }
/// }
///
/// let (q, k, v) = (vec![0.5; 8 * 64 * 32], vec![0.25; 8 * 300 * 32], vec![1.0; 8 * 300 * 32]);
/// let (rows, keys) = ([1, 8, 64, 32], [1, 8, 300, 32]); // batch, heads, rows, head_dim
/// let inputs = Inputs::new(View::bhld(&q, rows)?, View::bhld(&k, keys)?, View::bhld(&v, keys)?);
/// let mut out = vec![0.0; 8 * 64 * 32];
/// let problem = Attention::new().problem(inputs, Outputs::new(ViewMut::bhld(&mut out, rows)?))?;
/// let threads = Threads(2);
/// let plan = Plan::new(&problem, Exec::on(&threads));
/// problem.run_with(&plan, &mut Workspace::new(), Run::new().executor(&threads))?;
/// assert!(out.iter().all(|&x| x == 1.0));
/// # Ok::<(), sdpa::Error>(())
/// ```
pub trait Executor: Sync {
    /// Number of threads that may work on one call at once, including the calling thread if it works too. 0 counts as
    /// 1.
    fn threads(&self) -> usize;

    /// Calls `task` once with each index below `tasks`, at most [`Self::threads`] of them, in any order and on any
    /// threads, and returns when all calls have returned.
    ///
    /// An index stands for a worker, not for a piece of work: workers divide the work among themselves, and late ones
    /// find less of it. No call waits for another, so calling them one after the other is right too, if slow. `task`
    /// never panics: a panic in your functions is passed to the calling thread.
    fn run(&self, tasks: usize, task: &(dyn Fn(usize) + Sync));
}

impl Executor for ThreadPool {
    fn threads(&self) -> usize {
        self.threads()
    }

    fn run(&self, tasks: usize, task: &(dyn Fn(usize) + Sync)) {
        self.run(tasks, task);
    }
}
