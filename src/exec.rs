//! On what a problem is run: an instruction set and threads.

use crate::threads::current_threads;
use sdpa_kernels::Isa;

/// Floating-point operations that make waking another thread worth while: about 40 µs of one core's work, several
/// times what rayon takes to wake one.
const FLOPS_PER_WORKER: f64 = 4e6;

/// On what a problem is run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Exec {
    pub(crate) isa: Isa,
    pub(crate) threads: usize,
}

impl Default for Exec {
    /// The widest instruction set, on all threads of the current rayon pool (one without the `rayon` feature).
    ///
    /// A call from outside the pool hands its work over and sleeps meanwhile: two threads have to be woken, one after the
    /// other. From within ([`rayon::scope`], `ThreadPool::install`) the caller works too. For calls of a millisecond, such
    /// as steps of a decoder, that decides: measured 1.8 × one thread on two from within, 1.0 × from outside.
    ///
    /// [`rayon::scope`]: https://docs.rs/rayon/latest/rayon/fn.scope.html
    fn default() -> Self {
        Self { isa: Isa::detect(), threads: current_threads() }
    }
}

impl Exec {
    /// The widest instruction set, on the calling thread alone.
    pub fn serial() -> Self {
        Self { isa: Isa::detect(), threads: 1 }
    }

    /// On this instruction set.
    #[must_use]
    pub fn isa(self, isa: Isa) -> Self {
        Self { isa, ..self }
    }

    /// On at most this many threads of the current pool; 0 counts as 1.
    #[must_use]
    pub fn threads(self, threads: usize) -> Self {
        Self { threads: threads.max(1), ..self }
    }

    /// How many threads are worth waking for this many floating-point operations.
    pub(crate) fn workers(&self, flops: f64) -> usize {
        self.threads.min((flops / FLOPS_PER_WORKER) as usize).max(1)
    }
}
