//! Partial results: attention over keys that arrive in parts, and merging of results.

mod build;
mod functions;
mod merge;
mod sight;
mod waiting;

use crate::Attention;
use crate::error::{Error, same};
use crate::inputs::Inputs;
use crate::plan::Plan;
use crate::plan::problem::Problem;
use crate::plan::run::Workspace;
use crate::threads::exec::Exec;
use functions::{Functions, Shift};
pub use merge::merge;
use sdpa_kernels::{Alignment, KEY_BLOCK, Outputs, State, Tensor, View, ViewMut};
use waiting::Waiting;

/// Attention state of query rows whose keys arrive in parts: push the keys as they arrive, read the result at any time.
///
/// However the keys are divided, the result has the bits of one call over all keys: keys that do not fill a block of
/// 256 are copied and wait until it is full. States over different keys can be merged.
///
/// Position-dependent rules need an [`Alignment::TopLeft`] or [`Alignment::Offset`], because the final number of keys
/// is not known.
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
    attention: Attention,
    /// Queries and options, for all keys that will come; keys and values without rows.
    inputs: Inputs<'a>,
    functions: Option<&'a dyn Functions>,
    exec: Exec,
    kv_heads: usize,
    value_dim: usize,
    /// Position of the first key of this state; `accumulated` counts the keys accumulated, in whole blocks.
    first: usize,
    accumulated: usize,
    max: Vec<f32>,
    sum: Vec<f32>,
    out: Vec<f32>,
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
    /// them; the state is then unchanged.
    pub fn push<'k>(&mut self, k: impl Into<Tensor<'k>>, v: impl Into<Tensor<'k>>) -> Result<(), Error> {
        let (k, v) = (k.into(), v.into());
        let ([batch, _, _, dim], [kb, kh, n, kd], [vb, vh, vn, vd]) = (self.inputs.q.shape(), k.shape(), v.shape());
        same("k", "batch", kb, batch, "q")?;
        same("k", "heads", kh, self.kv_heads, "the state").map_err(|e| Error::from(e).or_exchanged("k", [kh, n]))?;
        same("k", "head_dim", kd, dim, "q")?;
        same("v", "batch", vb, batch, "q")?;
        same("v", "heads", vh, self.kv_heads, "the state").map_err(|e| Error::from(e).or_exchanged("v", [vh, vn]))?;
        same("v", "rows", vn, n, "k")?;
        same("v", "value_dim", vd, self.value_dim, "the state")?;
        self.room_for(n)?;
        self.inputs.check_columns(self.first + self.len(), n)?;
        let mut next = 0;
        while next < n {
            if self.waiting == 0 && n - next >= KEY_BLOCK {
                let whole = next..next + (n - next) / KEY_BLOCK * KEY_BLOCK;
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

    /// Refuses keys beyond the last position.
    fn room_for(&self, n: usize) -> Result<(), Error> {
        let before = self.first + self.len();
        let fits = before.checked_add(n).is_some_and(|end| end <= isize::MAX as usize);
        if fits { Ok(()) } else { Err(Error::TooLarge { what: "keys of the state", sizes: [before, n, 1, 1] }) }
    }

    /// Counts `n` more held keys, and accumulates them if their block is full.
    fn wait_for(&mut self, n: usize) -> Result<(), Error> {
        self.waiting += n;
        if self.waiting < KEY_BLOCK {
            return Ok(());
        }
        let (k, v) = (std::mem::take(&mut self.waiting_k), std::mem::take(&mut self.waiting_v));
        let done = self.accumulate(Some([k.first(KEY_BLOCK)?, v.first(KEY_BLOCK)?]));
        (self.waiting_k, self.waiting_v, self.waiting) = (k, v, 0);
        done
    }

    /// Checks outputs as [`Self::read`] does, before there are any keys to read.
    ///
    /// # Errors
    /// As [`Self::read`].
    pub fn check(&self, outputs: &Outputs<'_>) -> Result<(), Error> {
        outputs.check_for_state()?;
        let lens = self.inputs.lengths_from(self.before(), 0);
        let keys = [self.waiting_k.first(0)?, self.waiting_v.first(0)?];
        let (attention, inputs) = self.call(keys, lens.as_deref());
        attention.checked(&inputs, outputs).map(|_| ())
    }

    /// Writes the result for the keys so far; more keys may be pushed afterwards.
    ///
    /// # Errors
    /// As [`Attention::problem`], for the outputs; [`Error::Needs`] for scores and key weight sums, which a state
    /// cannot give.
    pub fn read(&mut self, outputs: Outputs<'_>) -> Result<(), Error> {
        outputs.check_for_state()?;
        let [b, h, rows, _] = self.inputs.q.shape();
        let lens = self.inputs.lengths_from(self.before(), self.waiting);
        let keys = [self.waiting_k.first(self.waiting)?, self.waiting_v.first(self.waiting)?];
        let (attention, mut inputs) = self.call(keys, lens.as_deref());
        if let Some(sinks) = self.inputs.sinks {
            inputs = inputs.sinks(sinks);
        }
        // Work on a copy: views of the state are exclusive, and reading must leave it unchanged.
        let (mut max, mut sum, mut out) = (self.max.clone(), self.sum.clone(), self.out.clone());
        let state = State {
            max: ViewMut::bhl(&mut max, [b, h, rows])?,
            sum: ViewMut::bhl(&mut sum, [b, h, rows])?,
            out: ViewMut::bhld(&mut out, [b, h, rows, self.value_dim])?,
        };
        let problem = attention.problem(inputs, outputs.resume(state))?;
        run(problem, self.exec, &mut Workspace::new(), (self.functions, self.shift()));
        Ok(())
    }

    /// Position of the next key to be accumulated.
    fn before(&self) -> usize {
        self.first + self.accumulated
    }

    /// Position of the first row.
    fn offset(&self) -> isize {
        match self.attention.alignment {
            Some(Alignment::Offset(n)) => n,
            _ => 0,
        }
    }

    /// Distances from positions in the next call to those among all keys.
    fn shift(&self) -> Shift {
        let (keys, offset) = (self.before(), self.offset());
        Shift { keys, positions: offset.abs_diff(offset.saturating_sub_unsigned(keys)) }
    }

    /// Returns the settings and tensors of a call over keys that follow those accumulated, whose lengths are `lens`.
    fn call<'k>(&self, keys: [Tensor<'k>; 2], lens: Option<&'k [usize]>) -> (Attention, Inputs<'k>)
    where
        'a: 'k,
    {
        let before = self.before();
        let attention = self.attention.align(Alignment::Offset(self.offset())).counted_from(before);
        (attention, self.inputs.over(keys, before, lens))
    }

    /// Accumulates whole blocks of keys; without keys, only checks the settings.
    fn accumulate(&mut self, keys: Option<[Tensor<'_>; 2]>) -> Result<(), Error> {
        let [b, h, rows, dim] = self.inputs.q.shape();
        let none = |dim| View::<f32>::bhld(&[], [b, self.kv_heads, 0, dim]).map(Tensor::from);
        let [k, v] = keys.unwrap_or([none(dim)?, none(self.value_dim)?]);
        let (n, shift) = (k.shape()[2], self.shift());
        let lens = self.inputs.lengths_from(self.before(), n);
        let (attention, mut inputs) = self.call([k, v], lens.as_deref());
        if let (Some(sinks), None) = (self.inputs.sinks, keys) {
            inputs = inputs.sinks(sinks);
        }
        let state = State {
            max: ViewMut::bhl(&mut self.max, [b, h, rows])?,
            sum: ViewMut::bhl(&mut self.sum, [b, h, rows])?,
            out: ViewMut::bhld(&mut self.out, [b, h, rows, self.value_dim])?,
        };
        let problem = attention.problem(inputs, Outputs::accumulate(state))?;
        if keys.is_none() {
            let fits = self.functions.map(|functions| functions.fits(&problem.call.facts()));
            return Ok(fits.unwrap_or(Ok(()))?);
        }
        run(problem, self.exec, &mut self.workspace, (self.functions, shift));
        self.accumulated += n;
        Ok(())
    }
}

/// Plans and computes a problem, with the functions, if there are any, and the shift of what they see.
fn run(
    problem: Problem<'_>,
    exec: Exec,
    workspace: &mut Workspace,
    (functions, shift): (Option<&dyn Functions>, Shift),
) {
    let plan = Plan::new(&problem, exec);
    match functions {
        Some(functions) => functions.run(problem, &plan, workspace, shift),
        None => problem.run(&plan, workspace),
    }
}
