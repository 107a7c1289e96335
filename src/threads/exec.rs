//! Execution settings of a problem: instruction set and threads.

use crate::threads::executor::Executor;
use crate::threads::{CurrentPool, current_threads};
use core::fmt;
use sdpa_kernels::Isa;

/// Floating-point operations per worker that make waking another thread worthwhile: about 40 µs of one core's work,
/// several times as long as rayon takes to wake a thread.
const FLOPS_PER_WORKER: f64 = 4e6;

/// Floating-point operations that take as long as reading a byte from memory: 32 GB and 100 GFLOP a second.
pub(crate) const FLOPS_PER_BYTE: f64 = 3.0;

/// Execution settings of a problem: instruction set, and which threads to use, and how many.
///
/// ```
/// use sdpa::{Attention, Exec, Inputs, Isa, Outputs, View, ViewMut};
/// let (x, mut out) = ([0.5; 3 * 4], [0.0; 3 * 4]);
/// let x = View::bhld(&x, [1, 1, 3, 4])?;
/// let problem =
///     Attention::new().problem(Inputs::new(x, x, x), Outputs::new(ViewMut::bhld(&mut out, [1, 1, 3, 4])?))?;
/// let narrowest = Isa::available().next().unwrap();
/// problem.run_once(Exec::default().threads(2).isa(narrowest)); // two threads at most
/// assert_eq!(out, [0.5; 3 * 4]);
/// # Ok::<(), sdpa::Error>(())
/// ```
#[derive(Clone, Copy)]
pub struct Exec<'e> {
    pub(crate) isa: Isa,
    pub(crate) threads: usize,
    executor: &'e dyn Executor,
}

impl fmt::Debug for Exec<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Exec").field("isa", &self.isa).field("threads", &self.threads).finish_non_exhaustive()
    }
}

impl Default for Exec<'_> {
    /// Returns the widest instruction set, on all threads of the current rayon pool (one thread without the `rayon`
    /// feature).
    ///
    /// A caller outside the pool hands its work over and sleeps: then two threads have to be woken, one after the
    /// other. A caller inside ([`rayon::scope`], `ThreadPool::install`) works too. This matters for calls of about a
    /// millisecond, such as decode steps: from outside, a second thread may not make them faster at all.
    ///
    /// [`rayon::scope`]: https://docs.rs/rayon/latest/rayon/fn.scope.html
    fn default() -> Self {
        Self { threads: current_threads(), ..Self::serial() }
    }
}

impl<'e> Exec<'e> {
    /// Returns the widest instruction set, on the calling thread alone.
    pub fn serial() -> Self {
        Self { isa: Isa::detect(), threads: 1, executor: &CurrentPool }
    }

    /// Returns the widest instruction set, on all threads of an executor: a [`ThreadPool`](crate::ThreadPool), or one of
    /// your own. Everything that takes an `Exec` runs on it; a kept [`Plan`](crate::Plan) does not hold it, so name it
    /// again in [`Run::executor`].
    ///
    /// [`Run::executor`]: crate::Run::executor
    pub fn on(executor: &'e dyn Executor) -> Self {
        Self { executor, ..Self::serial() }.threads(executor.threads())
    }

    /// Sets the instruction set.
    #[must_use]
    pub fn isa(self, isa: Isa) -> Self {
        Self { isa, ..self }
    }

    /// Sets the largest number of threads to use, of the current pool or of the executor; 0 counts as 1.
    #[must_use]
    pub fn threads(self, threads: usize) -> Self {
        Self { threads: threads.max(1), ..self }
    }

    /// Returns the executor that calls run on: by default [`CurrentPool`].
    ///
    /// ```
    /// use sdpa::{Exec, Executor, ThreadPool};
    /// let pool = ThreadPool::new(2)?;
    /// assert_eq!(Exec::on(&pool).threads(1).executor().threads(), 2);
    /// # Ok::<(), std::io::Error>(())
    /// ```
    pub fn executor(&self) -> &'e dyn Executor {
        self.executor
    }

    /// Returns the instruction set.
    pub fn instruction_set(&self) -> Isa {
        self.isa
    }

    /// Returns the number of threads worth waking for `flops` floating-point operations: at least 1, at most
    /// [`Self::threads`].
    ///
    /// Calls use this number; use it for your own work beside attention. A byte that is read from memory takes the time of
    /// about 3 operations: count the larger of the two times.
    ///
    /// ```
    /// use sdpa::Exec;
    /// let exec = Exec::serial().threads(8);
    /// assert_eq!((exec.workers(1e3), exec.workers(1e12)), (1, 8));
    /// ```
    pub fn workers(&self, flops: f64) -> usize {
        self.threads.min((flops / FLOPS_PER_WORKER) as usize).max(1)
    }
}
