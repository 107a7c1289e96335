//! Partial results: attention over keys that arrive in parts, and merging of results.

mod build;
pub(crate) mod functions;
mod merge;
pub(crate) mod parted_call;
mod sight;
mod waiting;

use crate::error::Error;
use crate::threads::exec::Exec;
use crate::threads::workspace::Workspace;
pub use merge::merge;
use parted_call::PartedCall;
use sdpa_kernels::{Alignment, Call, KEY_BLOCK, Outputs, Seen, Tensor, View};
use waiting::Waiting;

/// Attention state of query rows, for keys that arrive in parts: push the keys as they arrive, read the result at any time.
///
/// However the keys are divided, the result has the bits of one call over all keys: keys that do not fill a block of
/// 256 are copied and wait until it is full. States over different keys can be merged. Rows that select keys
/// ([`Inputs::selected`](crate::Inputs::selected)) have the same bits however the keys are divided, and the numbers of one
/// call up to rounding: sums are taken over the selected keys of each 256.
///
/// Position-dependent rules need [`Alignment::TopLeft`](crate::Alignment::TopLeft),
/// [`Alignment::Offset`](crate::Alignment::Offset), or positions of rows and keys, because the final number of keys is not known.
///
/// ```
/// # use sdpa::{Attention, AttnState, Exec, KvShape, View, ViewMut};
/// # let (q, k, v) = (vec![0.5; 2 * 8], vec![0.25; 6 * 8], vec![1.0; 6 * 8]);
/// # let keys = |x| View::bhld(x, [1, 1, 6, 8]);
/// let shape = KvShape { kv_heads: 1, head_dim: 8, value_dim: 8 };
/// let mut state = AttnState::new(Attention::new(), View::bhld(&q, [1, 1, 2, 8])?, shape, Exec::serial())?;
/// state.push(keys(&k)?, keys(&v)?)?;
/// let mut out = vec![0.0; 2 * 8];
/// state.read(Outputs::new(ViewMut::bhld(&mut out, [1, 1, 2, 8])?))?;
/// # use sdpa::Outputs;
/// # Ok::<(), sdpa::Error>(())
/// ```
///
/// [`Self::from_inputs`] takes every option that can be cut by rows and keys.
#[derive(Debug)]
pub struct AttnState<'a> {
    call: PartedCall<'a>,
    exec: Exec<'a>,
    /// Position of the first key of this state; `accumulated` counts the keys accumulated, in whole blocks.
    first: usize,
    accumulated: usize,
    /// Maxima, sums and outputs, and the keys that they are of. Before any, outputs may hold anything.
    parts: [Vec<f32>; 3],
    seen: Seen,
    /// Number of keys held until their block is full.
    waiting: usize,
    waiting_k: Waiting,
    waiting_v: Waiting,
    workspace: Workspace,
}

impl<'a> AttnState<'a> {
    /// Number of keys pushed so far.
    pub fn len(&self) -> usize {
        self.accumulated + self.waiting
    }

    /// Returns true if no key was pushed yet.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Pushes the next keys `[batch, kv_heads, n, head_dim]` and values `[batch, kv_heads, n, value_dim]`, any number
    /// of them, of any element types.
    ///
    /// # Errors
    /// [`Error::Mismatch`] if they do not fit q or each other, [`Error::Range`] if a bias or mask has no columns for
    /// them, or they have no positions; the state is then unchanged. [`Error::Selection`] if there is no memory for the lists of
    /// selected keys: [`Self::len`] then says how many keys count.
    pub fn push<'k>(&mut self, k: impl Into<Tensor<'k>>, v: impl Into<Tensor<'k>>) -> Result<(), Error> {
        let (k, v) = (k.into(), v.into());
        let n = self.call.check_keys([k, v], self.first + self.len())?;
        let mut next = 0;
        while next < n {
            if self.waiting == 0 && n - next >= KEY_BLOCK {
                // Selected keys make blocks of their own, so these are the same however keys are divided.
                let blocks = if self.call.inputs.selected.is_some() { 1 } else { (n - next) / KEY_BLOCK };
                let whole = next..next + blocks * KEY_BLOCK;
                let keys = k.rows_in(whole.clone()).zip(v.rows_in(whole.clone()));
                self.accumulate(keys.map(|(k, v)| [k, v]))?;
                next = whole.end;
                continue;
            }
            let some = next..n.min(next + KEY_BLOCK - self.waiting);
            self.waiting_k.copy(k, some.clone(), self.waiting);
            self.waiting_v.copy(v, some.clone(), self.waiting);
            next = some.end;
            self.wait_for(some.len())?;
        }
        Ok(())
    }

    /// Counts `n` more held keys, and accumulates them if their block is full.
    fn wait_for(&mut self, n: usize) -> Result<(), Error> {
        self.waiting += n;
        if self.waiting < KEY_BLOCK {
            return Ok(());
        }
        let (k, v) = (std::mem::take(&mut self.waiting_k), std::mem::take(&mut self.waiting_v));
        let done = self.accumulate(Some([k.first(KEY_BLOCK)?, v.first(KEY_BLOCK)?]));
        (self.waiting_k, self.waiting_v) = (k, v);
        self.waiting = if done.is_ok() { 0 } else { self.waiting - n };
        done
    }

    /// Checks outputs as [`Self::read`] does, before there are any keys to read.
    ///
    /// # Errors
    /// As [`Self::read`].
    pub fn check(&self, outputs: &Outputs<'_>) -> Result<(), Error> {
        outputs.check_for_state()?;
        let lists = self.call.inputs.lists_from(self.before(), 0)?;
        let keys = [self.waiting_k.first(0)?, self.waiting_v.first(0)?];
        let (attention, inputs) = self.call.over(keys, self.before(), &lists);
        Ok(outputs.fits(attention.checked(&inputs)?.call())?)
    }

    /// Writes the result for the keys so far; more keys may be pushed afterwards.
    ///
    /// # Errors
    /// As [`Attention::problem`](crate::Attention::problem), for the outputs; [`Error::Needs`] for scores and key weight sums, which a
    /// state cannot give; [`Error::Selection`] if there is no memory for lists of selected keys.
    pub fn read(&mut self, outputs: Outputs<'_>) -> Result<(), Error> {
        // Work on a copy: views of the state are exclusive, and reading must leave it unchanged.
        self.write(&mut self.parts.clone(), &mut Workspace::new(), outputs)
    }

    /// Writes the result as [`Self::read`] does, for the last time: without a copy of the state. [`Self::from_inputs_in`] can use
    /// its memory again.
    ///
    /// # Errors
    /// As [`Self::read`].
    pub fn finish(mut self, outputs: Outputs<'_>) -> Result<Workspace, Error> {
        let (mut parts, mut workspace) = (std::mem::take(&mut self.parts), std::mem::take(&mut self.workspace));
        self.write(&mut parts, &mut workspace, outputs)?;
        Ok(Workspace { state: parts, ..workspace })
    }

    /// Adds the keys that wait to maxima, sums and outputs, and writes the result.
    fn write(&self, parts: &mut [Vec<f32>; 3], workspace: &mut Workspace, outputs: Outputs<'_>) -> Result<(), Error> {
        outputs.check_for_state()?;
        let lists = self.call.inputs.lists_from(self.before(), self.waiting)?;
        let keys = [self.waiting_k.first(self.waiting)?, self.waiting_v.first(self.waiting)?];
        let (attention, mut inputs) = self.call.over(keys, self.before(), &lists);
        inputs.sinks = self.call.inputs.sinks;
        let problem = attention.problem(inputs, outputs.resume(self.call.state(parts, self.seen)?))?;
        self.call.functions.run(problem, self.exec, workspace, self.call.shift(self.before()));
        Ok(())
    }

    /// Position of the next key to be accumulated.
    fn before(&self) -> usize {
        self.first + self.accumulated
    }

    /// Accumulates whole blocks of keys; without keys, only checks the settings.
    fn accumulate(&mut self, keys: Option<[Tensor<'_>; 2]>) -> Result<(), Error> {
        let [b, .., dim] = self.call.inputs.q.shape();
        let none = |dim| View::<f32>::bhld(&[], [b, self.call.kv_heads, 0, dim]).map(Tensor::from);
        let [k, v] = keys.unwrap_or([none(dim)?, none(self.call.value_dim)?]);
        let (n, shift) = (k.shape()[2], self.call.shift(self.before()));
        if keys.is_some() && !self.call.inputs.lists_name(self.before()..self.before() + n) {
            self.accumulated += n;
            return Ok(());
        }
        let lists = self.call.inputs.lists_from(self.before(), n)?;
        let (attention, mut inputs) = self.call.over([k, v], self.before(), &lists);
        inputs.sinks = self.call.inputs.sinks.filter(|_| keys.is_none());
        let state = self.call.state(&mut self.parts, self.seen)?;
        let problem = attention.problem(inputs, Outputs::accumulate(state))?;
        if keys.is_none() {
            // Rows lie where they do among all keys.
            let call = Call { alignment: Alignment::Offset(self.call.offset()), ..*problem.call() };
            return Ok(self.call.functions.fit(&call, self.call.shift(0))?);
        }
        self.call.functions.run(problem, self.exec, &mut self.workspace, shift);
        (self.seen, self.accumulated) = (Seen::Keys, self.accumulated + n);
        Ok(())
    }
}
