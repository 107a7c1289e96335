//! States of what options: how they are made.

use crate::attention::Attention;
use crate::error::{Error, floats, same, zeros};
use crate::inputs::Inputs;
use crate::shape::KvShape;
use crate::state::AttnState;
use crate::state::parted_call::{ALIGNMENT, PartedCall, check_no_keys};
use crate::state::waiting::Waiting;
use crate::threads::exec::Exec;
use crate::threads::workspace::Workspace;
use sdpa_kernels::{KEY_BLOCK, MaskMod, Mods, ScoreMod, Seen, Tensor, View, WeightMod};

impl<'a> AttnState<'a> {
    /// Creates a state without keys. `q` is `[batch, heads, q_len, head_dim]`, of any element type; `keys`
    /// are the sizes that later keys and values have.
    ///
    /// # Errors
    /// As [`Attention::problem`]; [`Error::Needs`] for [`Alignment::BottomRight`](crate::Alignment::BottomRight); [`Error::TooLarge`] or
    /// [`Error::Memory`] if the state does not fit in memory.
    pub fn new(attention: Attention, q: impl Into<Tensor<'a>>, keys: KvShape, exec: Exec<'a>) -> Result<Self, Error> {
        let (q, KvShape { kv_heads, head_dim, value_dim }) = (q.into(), keys);
        let [batch, .., dim] = q.shape();
        same("k", "head_dim", head_dim, dim, "q")?;
        for dim in [dim, value_dim] {
            floats("state", [batch, kv_heads, KEY_BLOCK, dim])?;
        }
        let none = |dim| View::<f32>::bhld(&[], [batch, kv_heads, 0, dim]);
        Self::from_inputs(attention, Inputs::new(q, none(dim)?, none(value_dim)?), exec)
    }

    /// Creates a state without keys from the inputs of a call: its queries, biases, masks, ALiBi slopes, sinks, key
    /// lengths, positions and selected keys. Only the shapes of its keys and values are used, and these may have no rows: push keys
    /// and values. Biases, masks, lengths, positions and selected keys are those of all keys that will come; each push takes its
    /// columns, and a bias or mask needs a column for each key that will come, or one column. A selected key that never comes
    /// counts for nothing.
    ///
    /// ```
    /// use sdpa::{Alignment, Attention, AttnState, Exec, Inputs, Mask, Outputs, View, ViewMut};
    /// // One row; 300 equal keys of one number. The mask shows key 2 and the last.
    /// let (q, k, v): ([f32; 1], _, Vec<f32>) = ([1.0], [1.0; 300], (0..300).map(|n| n as f32).collect());
    /// let shown: Vec<bool> = (0..300).map(|n| n == 2 || n == 299).collect();
    /// let keys = |x| View::bhld(x, [1, 1, 300, 1]);
    /// let (k, v) = (keys(&k)?, keys(&v)?);
    /// let inputs = Inputs::new(View::bhld(&q, [1, 1, 1, 1])?, k, v).mask(Mask::keep(View::bhld(&shown, [1, 1, 1, 300])?));
    /// let mut state = AttnState::from_inputs(Attention::new(), inputs, Exec::serial())?;
    /// for part in [0..100, 100..300] {
    ///     state.push(k.rows(part.clone()).unwrap(), v.rows(part).unwrap())?;
    /// }
    /// let mut out = [0.0];
    /// state.read(Outputs::new(ViewMut::bhld(&mut out, [1, 1, 1, 1])?))?;
    /// assert_eq!(out, [150.5]); // the mean of 2 and 299
    /// # Ok::<(), sdpa::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Self::new`]; [`Error::Needs`] for caches, pages and ragged sequences: their keys do not come in parts.
    pub fn from_inputs(attention: Attention, inputs: Inputs<'a>, exec: Exec<'a>) -> Result<Self, Error> {
        Self::from_inputs_in(attention, inputs, exec, Workspace::new())
    }

    /// Creates a state as [`Self::from_inputs`] does, in the memory of an earlier state or call.
    ///
    /// ```
    /// use sdpa::{Attention, AttnState, Exec, Inputs, Outputs, View, ViewMut, Workspace};
    /// let (x, mut out, mut workspace) = ([0.5; 3 * 4], [0.0; 3 * 4], Workspace::new());
    /// let x = View::bhld(&x, [1, 1, 3, 4])?;
    /// for _ in 0..10 {
    ///     let mut state = AttnState::from_inputs_in(Attention::new(), Inputs::new(x, x, x), Exec::serial(), workspace)?;
    ///     state.push(x, x)?;
    ///     workspace = state.finish(Outputs::new(ViewMut::bhld(&mut out, [1, 1, 3, 4])?))?;
    /// }
    /// assert_eq!(out, [0.5; 3 * 4]);
    /// # Ok::<(), sdpa::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Self::from_inputs`]; the workspace is then freed.
    pub fn from_inputs_in(
        attention: Attention,
        inputs: Inputs<'a>,
        exec: Exec<'a>,
        mut workspace: Workspace,
    ) -> Result<Self, Error> {
        let call = PartedCall::new(attention, inputs)?;
        let PartedCall { kv_heads, value_dim, .. } = call;
        let [batch, heads, rows, dim] = inputs.q.shape();
        let product = |sizes| floats("state", sizes);
        let (n, accumulated) = (product([batch, heads, rows, 1])?, product([batch, heads, rows, value_dim])?);
        let waiting = |dim| Waiting::new([batch, kv_heads, dim], attention.precision);
        let [max, sum, out] = std::mem::take(&mut workspace.state);
        let mut state = Self {
            call,
            exec,
            first: 0,
            accumulated: 0,
            parts: [filled(max, n, f32::NEG_INFINITY)?, filled(sum, n, 0.0)?, sized(out, accumulated)?],
            seen: Seen::Nothing,
            waiting: 0,
            waiting_k: waiting(dim)?,
            waiting_v: waiting(value_dim)?,
            workspace,
        };
        // A call without keys checks the settings.
        state.accumulate(None)?;
        Ok(state)
    }

    /// Sets score and mask functions, which see keys and rows where they lie among all ([`Self::rows_from`] says which rows these
    /// are); sequences and heads are those of the state's queries.
    ///
    /// ```
    /// use sdpa::{Attention, AttnState, Exec, KvShape, Mods, Outputs, Position, View, ViewMut};
    /// let (q, k, v) = ([1.0], [1.0; 2], [3.0, 5.0]);
    /// let odd = Mods::new().mask(|at: Position| at.key % 2 == 1);
    /// let keys = KvShape { kv_heads: 1, head_dim: 1, value_dim: 1 };
    /// let state = AttnState::new(Attention::new(), View::bhld(&q, [1, 1, 1, 1])?, keys, Exec::serial())?;
    /// let mut state = state.mods(&odd)?;
    /// for key in [0, 1] {
    ///     state.push(View::bhld(&k[key..], [1, 1, 1, 1])?, View::bhld(&v[key..], [1, 1, 1, 1])?)?;
    /// }
    /// let mut out = [0.0];
    /// state.read(Outputs::new(ViewMut::bhld(&mut out, [1, 1, 1, 1])?))?;
    /// assert_eq!(out, [5.0]);
    /// # Ok::<(), sdpa::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Needs`] for a weight function, or if keys were pushed already; [`Error::Mask`] if the mask function does
    /// not fit.
    ///
    /// If a function panics in a push, the state is half updated: make another.
    pub fn mods<S: ScoreMod, M: MaskMod, P: WeightMod>(mut self, mods: &'a Mods<S, M, P>) -> Result<Self, Error> {
        let call = self.call.mods(mods)?;
        check_no_keys("functions", self.len())?;
        self.call = call;
        self.accumulate(None)?;
        Ok(self)
    }

    /// Sets the number of the first of these rows among the rows of a call that is cut by rows, 0 by default. Dropout counts rows
    /// from it, and functions see it as [`Position::row`](crate::Position::row). It is also the row's position among the keys, as
    /// in one call, unless an [`Alignment::Offset`](crate::Alignment::Offset) gives the position of the first of these rows.
    ///
    /// ```
    /// use sdpa::{Attention, AttnState, Exec, Inputs, Mods, Outputs, Position, View, ViewMut};
    /// // Two rows, each in a state; row i sees key i.
    /// let (q, k, v) = ([1.0; 2], [1.0; 2], [3.0, 5.0]);
    /// let (k, v) = (View::bhld(&k, [1, 1, 2, 1])?, View::bhld(&v, [1, 1, 2, 1])?);
    /// let same = Mods::new().mask(|at: Position| at.row == at.key);
    /// for row in [0, 1] {
    ///     let inputs = Inputs::new(View::bhld(&q[row..], [1, 1, 1, 1])?, k, v);
    ///     let state = AttnState::from_inputs(Attention::new(), inputs, Exec::serial())?;
    ///     let mut state = state.rows_from(row)?.mods(&same)?;
    ///     state.push(k, v)?;
    ///     let mut out = [0.0];
    ///     state.read(Outputs::new(ViewMut::bhld(&mut out, [1, 1, 1, 1])?))?;
    ///     assert_eq!(out, [[3.0, 5.0][row]]);
    /// }
    /// # Ok::<(), sdpa::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Needs`] if keys were pushed already; [`Error::TooLarge`] if the rows go beyond the last position;
    /// [`Error::Mask`] if a mask function that was set before does not fit them.
    pub fn rows_from(mut self, first_row: usize) -> Result<Self, Error> {
        check_no_keys("first row", self.len())?;
        self.call = self.call.rows_from(first_row)?;
        self.accumulate(None)?;
        Ok(self)
    }

    /// Sets the number of keys before this state's first key, a multiple of 256: for a state that will be merged into that of
    /// the earlier keys.
    ///
    /// # Errors
    /// [`Error::Multiple`] if `first` is not a multiple of 256; [`Error::TooLarge`] if it does not fit the address space;
    /// [`Error::Needs`] if keys were pushed already.
    pub fn starting_at(self, first: usize) -> Result<Self, Error> {
        check_no_keys("first key", self.len())?;
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
    /// already, or neither an alignment nor positions of rows are set.
    pub fn alibi(mut self, slopes: &'a [f32]) -> Result<Self, Error> {
        check_no_keys("alibi slopes", self.len())?;
        if self.call.attention.alignment.is_none() && self.call.inputs.row_positions.is_none() {
            return Err(Error::Needs { argument: "alibi", needs: ALIGNMENT });
        }
        self.call.inputs = self.call.inputs.alibi(slopes);
        self.accumulate(None)?;
        Ok(self)
    }

    /// Sets attention sinks, `[heads]`, one logit per query head. They are added once, when the state is read.
    ///
    /// # Errors
    /// [`Error::Mismatch`] if there is not one logit for each query head.
    pub fn sinks(mut self, logits: &'a [f32]) -> Result<Self, Error> {
        self.call.inputs = self.call.inputs.sinks(logits);
        self.accumulate(None)?;
        Ok(self)
    }
}

/// Returns `len` numbers, whatever they are, in the same memory if they fit.
fn sized(mut memory: Vec<f32>, len: usize) -> Result<Vec<f32>, Error> {
    if memory.capacity() < len {
        return zeros("state", len);
    }
    memory.resize(len, 0.0);
    Ok(memory)
}

/// Returns `len` equal numbers, in the same memory if they fit.
fn filled(memory: Vec<f32>, len: usize, number: f32) -> Result<Vec<f32>, Error> {
    let mut memory = sized(memory, len)?;
    memory.fill(number);
    Ok(memory)
}
