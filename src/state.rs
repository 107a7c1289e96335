//! Partial results: attention over keys that arrive in parts, and merging of results.

mod merge;

use crate::Attention;
use crate::error::{Error, floats, same, zeros};
use crate::inputs::Inputs;
use crate::plan::Plan;
use crate::plan::run::Workspace;
use crate::threads::exec::Exec;
pub use merge::merge;
use sdpa_kernels::{Alignment, KEY_BLOCK, Outputs, State, View, ViewMut};

/// Alignment that position-dependent rules need in a state, which does not know the final number of keys.
const ALIGNMENT: &str = "an alignment: top-left or an offset, since a state does not know how many keys will come";

/// Attention state of query rows whose keys arrive in parts: push the keys as they arrive, read the result at any time.
///
/// However the keys are divided, the result has the bits of one call over all keys: keys that do not fill a block of
/// 256 are copied and wait until it is full. States over different keys can be merged.
///
/// Position-dependent rules need an [`Alignment::TopLeft`] or [`Alignment::Offset`], because the final number of keys
/// is not known.
///
/// ```
/// # use sdpa::{Attention, AttnState, Exec, View, ViewMut};
/// # let (q, k, v) = (vec![0.5; 2 * 8], vec![0.25; 6 * 8], vec![1.0; 6 * 8]);
/// # let keys = |x| View::bhld(x, [1, 1, 6, 8]);
/// let mut state = AttnState::new(Attention::new(), View::bhld(&q, [1, 1, 2, 8])?, [1, 8], Exec::serial())?;
/// state.push(keys(&k)?, keys(&v)?)?;
/// let mut out = vec![0.0; 2 * 8];
/// state.read(Outputs::new(ViewMut::bhld(&mut out, [1, 1, 2, 8])?))?;
/// # use sdpa::Outputs;
/// # Ok::<(), sdpa::Error>(())
/// ```
#[derive(Debug)]
pub struct AttnState<'a> {
    attention: Attention,
    q: View<'a>,
    alibi: Option<&'a [f32]>,
    sinks: Option<&'a [f32]>,
    exec: Exec,
    kv_heads: usize,
    value_dim: usize,
    /// Position of the first key of this state; `accumulated` counts the keys accumulated, in whole blocks.
    first: usize,
    accumulated: usize,
    max: Vec<f32>,
    sum: Vec<f32>,
    out: Vec<f32>,
    /// Number of keys held until their block is full; their keys and values are `[batch, kv_heads, KEY_BLOCK, dim]`.
    waiting: usize,
    waiting_k: Vec<f32>,
    waiting_v: Vec<f32>,
    workspace: Workspace,
}

impl<'a> AttnState<'a> {
    /// Creates a state without keys. `q` is `[batch, heads, q_len, head_dim]`; `keys` is the `[kv_heads, value_dim]`
    /// that later keys and values have.
    ///
    /// # Errors
    /// As [`Attention::problem`]; [`Error::Needs`] for [`Alignment::BottomRight`]; [`Error::TooLarge`] or
    /// [`Error::Memory`] if the state does not fit in memory.
    pub fn new(attention: Attention, q: View<'a>, keys: [usize; 2], exec: Exec) -> Result<Self, Error> {
        if attention.alignment == Some(Alignment::BottomRight) {
            return Err(Error::Needs {
                argument: "bottom-right",
                needs: "the number of keys, which a state does not know",
            });
        }
        if attention.dropout.is_some() {
            return Err(Error::Needs { argument: "dropout", needs: "a call over all keys, not a state" });
        }
        if attention.alignment.is_none() {
            attention.rule(false).map_or(Ok(()), |argument| Err(Error::Needs { argument, needs: ALIGNMENT }))?;
        }
        let ([batch, heads, rows, dim], [kv_heads, value_dim]) = (q.shape(), keys);
        let product = |sizes| floats("state", sizes);
        let (n, accumulated) = (product([batch, heads, rows, 1])?, product([batch, heads, rows, value_dim])?);
        let (waiting_k, waiting_v) =
            (product([batch, kv_heads, KEY_BLOCK, dim])?, product([batch, kv_heads, KEY_BLOCK, value_dim])?);
        let mut state = Self {
            attention,
            q,
            alibi: None,
            sinks: None,
            exec,
            kv_heads,
            value_dim,
            first: 0,
            accumulated: 0,
            max: zeros("state", n)?,
            sum: zeros("state", n)?,
            out: zeros("state", accumulated)?,
            waiting: 0,
            waiting_k: zeros("state", waiting_k)?,
            waiting_v: zeros("state", waiting_v)?,
            workspace: Workspace::new(),
        };
        state.max.fill(f32::NEG_INFINITY);
        // A call without keys checks the settings.
        state.accumulate(None)?;
        Ok(state)
    }

    /// Sets the position of the first key, a multiple of 256: for a state that will be merged into an earlier one.
    ///
    /// # Errors
    /// [`Error::Multiple`] if `first` is not a multiple of 256; [`Error::TooLarge`] if it does not fit the address space;
    /// [`Error::Needs`] if keys were pushed already.
    pub fn starting_at(self, first: usize) -> Result<Self, Error> {
        if !self.is_empty() {
            return Err(Error::Needs { argument: "first key", needs: "a state without keys" });
        }
        if !first.is_multiple_of(KEY_BLOCK) {
            return Err(Error::Multiple { argument: "first key", got: first, of: KEY_BLOCK });
        }
        if first > isize::MAX as usize {
            return Err(Error::TooLarge { what: "first key", sizes: [first, 1, 1, 1] });
        }
        Ok(Self { first, ..self })
    }

    /// Sets ALiBi slopes, `[heads]`, one per query head.
    ///
    /// # Errors
    /// [`Error::Mismatch`] or [`Error::Number`] for slopes that do not fit; [`Error::Needs`] if keys were pushed
    /// already or no alignment is set.
    pub fn alibi(mut self, slopes: &'a [f32]) -> Result<Self, Error> {
        if !self.is_empty() {
            return Err(Error::Needs { argument: "alibi slopes", needs: "a state without keys" });
        }
        if self.attention.alignment.is_none() {
            return Err(Error::Needs { argument: "alibi", needs: ALIGNMENT });
        }
        self.alibi = Some(slopes);
        self.accumulate(None)?;
        Ok(self)
    }

    /// Sets attention sinks, `[heads]`, one logit per query head. They are added once, when the state is read.
    ///
    /// # Errors
    /// [`Error::Mismatch`] if there are not as many logits as query heads.
    pub fn sinks(mut self, logits: &'a [f32]) -> Result<Self, Error> {
        self.sinks = Some(logits);
        self.accumulate(None)?;
        Ok(self)
    }

    /// Number of keys pushed so far.
    pub fn len(&self) -> usize {
        self.accumulated + self.waiting
    }

    /// Returns true if no key was pushed yet.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Pushes the next keys `[batch, kv_heads, n, head_dim]` and values `[batch, kv_heads, n, value_dim]`, any number
    /// of them.
    ///
    /// # Errors
    /// [`Error::Mismatch`] if they do not fit q or each other; the state is then unchanged.
    pub fn push(&mut self, k: View<'_>, v: View<'_>) -> Result<(), Error> {
        let ([batch, _, _, dim], [kb, kh, n, kd], [vb, vh, vn, vd]) = (self.q.shape(), k.shape(), v.shape());
        same("k", "batch", kb, batch, "q")?;
        same("k", "heads", kh, self.kv_heads, "the state").map_err(|e| Error::from(e).or_exchanged("k", [kh, n]))?;
        same("k", "head_dim", kd, dim, "q")?;
        same("v", "batch", vb, batch, "q")?;
        same("v", "heads", vh, self.kv_heads, "the state").map_err(|e| Error::from(e).or_exchanged("v", [vh, vn]))?;
        same("v", "rows", vn, n, "k")?;
        same("v", "value_dim", vd, self.value_dim, "the state")?;
        let mut next = 0;
        while next < n {
            if self.waiting == 0 && n - next >= KEY_BLOCK {
                let whole = next..next + (n - next) / KEY_BLOCK * KEY_BLOCK;
                self.accumulate(k.rows(whole.clone()).zip(v.rows(whole.clone())))?;
                next = whole.end;
                continue;
            }
            let some = next..n.min(next + KEY_BLOCK - self.waiting);
            copy_rows(k, some.clone(), &mut self.waiting_k, self.waiting);
            copy_rows(v, some.clone(), &mut self.waiting_v, self.waiting);
            self.waiting += some.len();
            next = some.end;
            if self.waiting == KEY_BLOCK {
                self.gather_waiting()?;
            }
        }
        Ok(())
    }

    /// Writes the result for the keys so far; more keys may be pushed afterwards.
    ///
    /// # Errors
    /// As [`Attention::problem`], for the outputs; [`Error::Needs`] for scores and key weight sums, which a state
    /// cannot give.
    pub fn read(&mut self, outputs: Outputs<'_>) -> Result<(), Error> {
        outputs.check_for_state()?;
        let (k, v) = self.waiting_views()?;
        let (attention, inputs) = self.call(k, v);
        let [b, h, rows, _] = self.q.shape();
        // Work on a copy: views of the state are exclusive, and reading must leave it unchanged.
        let (mut max, mut sum, mut out) = (self.max.clone(), self.sum.clone(), self.out.clone());
        let state = State {
            max: ViewMut::bhl(&mut max, [b, h, rows])?,
            sum: ViewMut::bhl(&mut sum, [b, h, rows])?,
            out: ViewMut::bhld(&mut out, [b, h, rows, self.value_dim])?,
        };
        let inputs = match self.sinks {
            Some(sinks) => inputs.sinks(sinks),
            None => inputs,
        };
        let problem = attention.problem(inputs, outputs.resume(state))?;
        let plan = Plan::new(&problem, self.exec);
        problem.run(&plan, &mut Workspace::new());
        Ok(())
    }

    /// Returns the settings and tensors of a call over keys that follow those accumulated.
    fn call<'k>(&self, k: View<'k>, v: View<'k>) -> (Attention, Inputs<'k>)
    where
        'a: 'k,
    {
        let before = self.first + self.accumulated;
        let offset = match self.attention.alignment {
            Some(Alignment::Offset(n)) => n,
            _ => 0,
        };
        let mut attention = self.attention.align(Alignment::Offset(offset.saturating_sub_unsigned(before)));
        attention.visible.window = attention.visible.window.map(|window| window.counted_from(before));
        let inputs = Inputs::new(self.q, k, v);
        (attention, self.alibi.map_or(inputs, |slopes| inputs.alibi(slopes)))
    }

    /// Accumulates whole blocks of keys; without keys, only checks the settings.
    fn accumulate(&mut self, keys: Option<(View<'_>, View<'_>)>) -> Result<(), Error> {
        let [b, h, rows, dim] = self.q.shape();
        let none =
            (View::bhld(&[], [b, self.kv_heads, 0, dim])?, View::bhld(&[], [b, self.kv_heads, 0, self.value_dim])?);
        let (k, v) = keys.unwrap_or(none);
        let (attention, mut inputs) = self.call(k, v);
        if let (Some(sinks), None) = (self.sinks, keys) {
            inputs = inputs.sinks(sinks);
        }
        let state = State {
            max: ViewMut::bhl(&mut self.max, [b, h, rows])?,
            sum: ViewMut::bhl(&mut self.sum, [b, h, rows])?,
            out: ViewMut::bhld(&mut self.out, [b, h, rows, self.value_dim])?,
        };
        let problem = attention.problem(inputs, Outputs::accumulate(state))?;
        if keys.is_some() {
            let plan = Plan::new(&problem, self.exec);
            problem.run(&plan, &mut self.workspace);
            self.accumulated += k.shape()[2];
        }
        Ok(())
    }

    /// Accumulates the held keys if their block is full.
    fn gather_waiting(&mut self) -> Result<(), Error> {
        if self.waiting < KEY_BLOCK {
            return Ok(());
        }
        let (k, v) = (std::mem::take(&mut self.waiting_k), std::mem::take(&mut self.waiting_v));
        let [b, .., dim] = self.q.shape();
        let views = (
            View::bhld(&k, [b, self.kv_heads, KEY_BLOCK, dim])?,
            View::bhld(&v, [b, self.kv_heads, KEY_BLOCK, self.value_dim])?,
        );
        let done = self.accumulate(Some(views));
        (self.waiting_k, self.waiting_v, self.waiting) = (k, v, 0);
        done
    }

    /// Views of the held keys and values.
    fn waiting_views(&self) -> Result<(View<'_>, View<'_>), Error> {
        let [b, .., dim] = self.q.shape();
        let whole = |x, dim| View::bhld(x, [b, self.kv_heads, KEY_BLOCK, dim]);
        let (k, v) = (whole(&self.waiting_k, dim)?, whole(&self.waiting_v, self.value_dim)?);
        Ok((k.rows(0..self.waiting).unwrap_or(k), v.rows(0..self.waiting).unwrap_or(v)))
    }
}

/// Copies `rows` of every head to `[batch, heads, KEY_BLOCK, dim]`, from row `at` on.
fn copy_rows(from: View<'_>, rows: std::ops::Range<usize>, to: &mut [f32], at: usize) {
    let [batch, heads, _, dim] = from.shape();
    for head in 0..batch * heads {
        for (n, row) in rows.clone().enumerate() {
            let to = &mut to[(head * KEY_BLOCK + at + n) * dim..][..dim];
            for (d, x) in to.iter_mut().enumerate() {
                *x = from.get([head / heads, head % heads, row, d]).copied().unwrap_or_default();
            }
        }
    }
}
