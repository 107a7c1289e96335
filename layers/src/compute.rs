//! Resources of layers: threads, instruction set, reusable memory.

use crate::error::{floats, zeros};
use crate::share;
use core::fmt;
use sdpa::{Error, Exec, Plan, Problem, Run, Workspace};

/// Resources of layers: threads, an instruction set, and reusable memory.
///
/// Pass the same one to every call: it keeps its buffers, which grow to what the largest call needs, so a warm call on
/// one thread allocates nothing.
///
/// ```
/// use sdpa::Exec;
/// use sdpa_layers::{Compute, Norm};
/// let mut compute = Compute::new(Exec::serial()); // one for all layers and all calls
/// let (norm, mut out) = (Norm::rms([1.0, 1.0], 0.0)?, [0.0; 4]);
/// norm.forward(&[1.0, -1.0, 3.0, 3.0], &mut out, &mut compute)?;
/// assert_eq!(out, [1.0, -1.0, 1.0, 1.0]);
/// # Ok::<(), sdpa::Error>(())
/// ```
#[derive(Debug, Default)]
pub struct Compute<'e> {
    exec: Exec<'e>,
    stop: Stop<'e>,
    workspace: Workspace,
    buffers: Vec<Vec<f32>>,
    lengths: Vec<usize>,
}

impl<'e> Compute<'e> {
    /// Creates resources without memory; the first call allocates it. Layers run on the threads of `exec`.
    pub fn new(exec: Exec<'e>) -> Self {
        Self { exec, ..Self::default() }
    }

    /// Sets a function that stops a call when it returns true: at a deadline, say, or by a flag that another thread sets. The
    /// call then returns [`Error::Stopped`], and caches have no row of it. Its output is untouched; where it is that of attention
    /// alone ([`Dictionary`](crate::Dictionary), weights of heads), it is as [`Error::Stopped`] says. Attention asks the function,
    /// as [`Run::until`] says; projections between two layers' attentions run to their end.
    ///
    /// ```
    /// use core::sync::atomic::{AtomicBool, Ordering};
    /// use sdpa::{Error, Exec};
    /// # use sdpa_layers::{Linear, MultiHeadAttention, Weights};
    /// use sdpa_layers::{Compute, MultiHeadInput, Sequences};
    /// # let linear = || Weights::rows(&[0.5; 16], [4, 4]).map(Linear::new);
    /// # let layer = MultiHeadAttention::new([2, 2], [linear()?, linear()?, linear()?, linear()?])?;
    /// let gone = AtomicBool::new(false);
    /// let stop = || gone.load(Ordering::Relaxed);
    /// let mut compute = Compute::new(Exec::default()).until(&stop);
    /// let (x, mut out) = ([1.0; 3 * 4], [0.0; 3 * 4]);
    /// let input = MultiHeadInput::new(&x, Sequences::one(3));
    /// gone.store(true, Ordering::Relaxed); // the client has gone away
    /// assert_eq!(layer.forward(input, &mut out, &mut compute), Err(Error::Stopped));
    /// gone.store(false, Ordering::Relaxed);
    /// layer.forward(input, &mut out, &mut compute)?; // the next call is as any other
    /// # Ok::<(), sdpa::Error>(())
    /// ```
    #[must_use]
    pub fn until(self, stop: &'e (dyn Fn() -> bool + Sync)) -> Self {
        Self { stop: Stop(Some(stop)), ..self }
    }

    /// Threads and instruction set.
    pub fn exec(&self) -> Exec<'e> {
        self.exec
    }

    /// Returns the number of threads available to a call made here.
    pub(crate) fn threads(&self) -> usize {
        share::workers(self.exec, f64::INFINITY)
    }

    /// Computes attention. Everything was checked when the problem was made.
    ///
    /// # Errors
    /// [`Error::Stopped`] if the function of [`Self::until`] said so.
    pub(crate) fn attend(&mut self, problem: Problem<'_>) -> Result<(), Error> {
        let plan = Plan::new(&problem, self.exec);
        let run = Run::new().executor(self.exec.executor());
        let run = self.stop.0.map_or(run, |stop| run.until(stop));
        problem.run_with(&plan, &mut self.workspace, run)
    }

    /// Lends a buffer for `rows` rows of `width` numbers; its contents are left over from earlier calls. Return it with
    /// [`Self::recycle`].
    ///
    /// # Errors
    /// [`Error::TooLarge`] or [`Error::Memory`].
    pub(crate) fn buffer(&mut self, what: &'static str, [rows, width]: [usize; 2]) -> Result<Buffer, Error> {
        let len = floats(what, [rows, width, 1, 1])?;
        // Take the smallest buffer that is large enough, otherwise the largest: sizes settle after one call.
        let fits = |floats: &Vec<f32>| (floats.len() < len, floats.len().abs_diff(len));
        let best = (0..self.buffers.len()).min_by_key(|&i| fits(&self.buffers[i]));
        let mut floats = best.map_or_else(Vec::new, |i| self.buffers.swap_remove(i));
        if floats.len() < len {
            // Free the old buffer instead of resizing it: its contents are not needed, and its memory may be needed for
            // the new one.
            drop(core::mem::take(&mut floats));
            floats = zeros(what, len)?;
        }
        Ok(Buffer { floats, len })
    }

    /// Lends several buffers at once.
    ///
    /// # Errors
    /// As for [`Self::buffer`]; no buffers are then lent.
    pub(crate) fn buffers<const N: usize>(
        &mut self,
        what: &'static str,
        sizes: [[usize; 2]; N],
    ) -> Result<[Buffer; N], Error> {
        let mut buffers = [const { Buffer { floats: Vec::new(), len: 0 } }; N];
        for (buffer, sizes) in buffers.iter_mut().zip(sizes) {
            *buffer = self.buffer(what, sizes)?;
        }
        Ok(buffers)
    }

    /// Takes back a buffer that [`Self::buffer`] gave.
    pub(crate) fn recycle(&mut self, buffer: Buffer) {
        self.buffers.push(buffer.floats);
    }

    /// Lends an empty list for lengths. Return it with [`Self::recycle_lengths`].
    pub(crate) fn lengths(&mut self) -> Vec<usize> {
        let mut lengths = core::mem::take(&mut self.lengths);
        lengths.clear();
        lengths
    }

    /// Takes back the list that [`Self::lengths`] gave.
    pub(crate) fn recycle_lengths(&mut self, lengths: Vec<usize>) {
        self.lengths = lengths;
    }
}

/// Function that says when to stop.
#[derive(Clone, Copy, Default)]
struct Stop<'e>(Option<&'e (dyn Fn() -> bool + Sync)>);

impl fmt::Debug for Stop<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_some() { "a function" } else { "none" })
    }
}

/// Memory lent by a [`Compute`].
#[derive(Debug)]
pub(crate) struct Buffer {
    /// Keeps its largest length, so that nothing is cleared if calls differ in length.
    floats: Vec<f32>,
    len: usize,
}

impl core::ops::Deref for Buffer {
    type Target = [f32];
    fn deref(&self) -> &[f32] {
        &self.floats[..self.len]
    }
}

impl core::ops::DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [f32] {
        &mut self.floats[..self.len]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_that_cannot_be_had_are_errors() {
        let mut compute = Compute::default();
        let lent = compute.buffers("rows", [[3, 4], [0, usize::MAX]]).unwrap();
        assert_eq!(lent.each_ref().map(|buffer| buffer.len()), [12, 0]);
        lent.into_iter().for_each(|buffer| compute.recycle(buffer));
        let sizes = [1 << 30, 1 << 28];
        assert_eq!(compute.buffer("rows", sizes).unwrap_err(), Error::Memory { what: "rows", bytes: 1 << 60 });
        for [rows, width] in [[1 << 30, 1 << 31], [usize::MAX, 2]] {
            let error = Error::TooLarge { what: "rows", sizes: [rows, width, 1, 1] };
            assert_eq!(compute.buffers("rows", [[2, 2], [rows, width]]).unwrap_err(), error);
        }
        assert_eq!(compute.buffer("rows", [3, 4]).unwrap().len(), 12);
    }
}
