//! Backward pass over keys that come in parts.

use crate::attention::Attention;
use crate::backward::functions::NO_DERIVATIVE;
use crate::backward::problem::BackwardProblem;
use crate::backward::run::no_memory;
use crate::error::Error;
use crate::error::messages::KEYS_BEFORE;
use crate::inputs::{Inputs, KeyLists};
use crate::parts::key_gradient_sums::{KeyGradientShape, KeyGradientSums};
use crate::state::parted_call::{PartedCall, check_no_keys, check_room};
use crate::threads::exec::Exec;
use crate::threads::workspace::Workspace;
use core::ops::Range;
use sdpa_kernels::{
    Gradients, KEY_BLOCK, MaskMod, Mods, Part, Position, Precision, Saved, ScoreMod, Tensor, View, ViewMut, WeightMod,
};

/// Second column that rows far from 0 need: a call over all keys sums their exponentials again, a state has not seen all keys.
const RESTS: &str = "a second column (Outputs::lse) for rows beyond ±256, where one f32 is too coarse: a state cannot sum \
                     their keys first";

/// Backward pass of query rows, for keys that arrive in parts: push the keys in order, then write the gradients of the rows.
///
/// Each push adds to the sums of the gradients of its keys and values, in a [`KeyGradientSums`]; rows may be on several machines,
/// and sums go from one to the next. The gradients have the bits of one call if keys are cut at multiples of 256, each stretch of
/// rows says which is its first ([`Self::starting_at`]), and the sums of some keys pass through all stretches in order. They are those
/// of [`Precision::Exact`](crate::Precision::Exact), whatever the settings say.
///
/// ```
/// use sdpa::parts::{BackwardState, KeyGradientShape, KeyGradientSums};
/// use sdpa::{Attention, Exec, Gradients, Inputs, Outputs, Saved, View, ViewMut};
/// // 200 rows and 300 keys of eight numbers. One machine has the first 80 rows, another the rest.
/// let (x, d_out) = (vec![0.5f32; 300 * 8], vec![1.0f32; 200 * 8]);
/// let (kv, q) = (View::bhld(&x, [1, 1, 300, 8])?, View::bhld(&x, [1, 1, 200, 8])?);
/// let (mut out, mut lse, mut dq, mut dv) = (vec![0.0; 200 * 8], vec![0.0; 200], vec![0.0; 200 * 8], vec![0.0; 300 * 8]);
/// let outputs = Outputs::new(ViewMut::bhld(&mut out, [1, 1, 200, 8])?).lse(ViewMut::bhl(&mut lse, [1, 1, 200])?);
/// sdpa::attention(&Attention::new(), Inputs::new(q, kv, kv), outputs)?;
/// let (out, d_out) = (View::bhld(&out, [1, 1, 200, 8])?, View::bhld(&d_out, [1, 1, 200, 8])?);
/// let lse = View::bhl(&lse, [1, 1, 200])?;
///
/// let mut sums = KeyGradientSums::new(KeyGradientShape { batch: 1, heads: 1, keys: 300, head_dim: 8, value_dim: 8 })?;
/// for rows in [0..80, 80..200] {
///     let [q, out, lse, d_out] = [q, out, lse, d_out].map(|x| x.rows(rows.clone()).unwrap());
///     let saved = Saved::new(out, lse, d_out);
///     let mut state = BackwardState::new(Attention::new(), Inputs::new(q, kv, kv), saved, Exec::serial())?;
///     state = state.starting_at(rows.start)?;
///     state.push(kv, kv, &mut sums)?; // then send `sums.as_slice()` to the next machine
///     let dq = &mut dq[rows.start * 8..rows.end * 8];
///     state.write(Gradients::new().q(ViewMut::bhld(dq, [1, 1, rows.len(), 8])?))?;
/// }
/// let gradients = Gradients::new().v(ViewMut::bhld(&mut dv, [1, 1, 300, 8])?);
/// sums.write(&Attention::new(), gradients, Exec::serial())?;
/// assert!(dv.iter().all(|x| (x - 200.0 / 300.0).abs() < 1e-4));
/// # Ok::<(), sdpa::Error>(())
/// ```
///
/// Memory: the gradient of each query in `f32`, and sixteen numbers a row.
#[derive(Debug)]
pub struct BackwardState<'a> {
    call: PartedCall<'a>,
    saved: Saved<'a>,
    exec: Exec<'a>,
    /// Number of keys pushed or passed over.
    keys: usize,
    workspace: Workspace,
}

impl<'a> BackwardState<'a> {
    /// Creates a state without keys. `inputs` are those of [`AttnState::from_inputs`](crate::AttnState::from_inputs): their keys and
    /// values may have no rows. `saved` has the results of these rows over all keys.
    ///
    /// # Errors
    /// As [`Attention::backward`]; [`Error::Needs`] for what a state cannot know:
    /// [`Alignment::BottomRight`](crate::Alignment::BottomRight), ragged sequences; and the log-sum-exp of rows
    /// beyond ±256, such as rows that a finite mask hides wholly, unless a second column of `lse`
    /// ([`Outputs::lse`](crate::Outputs::lse)) has its rounding error.
    pub fn new(attention: Attention, inputs: Inputs<'a>, saved: Saved<'a>, exec: Exec<'a>) -> Result<Self, Error> {
        let call = PartedCall::new(attention.precision(Precision::Exact), inputs)?;
        let mut state = Self { call, saved, exec, keys: 0, workspace: Workspace::new() };
        let lists = inputs.lists_from(0, 0)?;
        let (attention, inputs) = state.at_end(0, &lists)?;
        let BackwardProblem { checked, .. } = attention.backward(inputs, saved, Gradients::new())?;
        if saved.lacks_rests() {
            return Err(Error::Needs { argument: "lse", needs: RESTS });
        }
        if state.workspace.gradients.try_begin(checked.call()) { Ok(state) } else { Err(no_memory(checked.call(), 0)) }
    }

    /// Sets score and mask functions, which see keys and rows where they lie among all ([`Self::starting_at`] says which rows
    /// these are); sequences and heads are those of the state's queries.
    ///
    /// # Errors
    /// [`Error::Needs`] for a weight function, for a score function without a derivative, or if keys were pushed already;
    /// [`Error::Mask`] if the mask function does not fit.
    ///
    /// If a function panics in a push, the state is half updated: make another.
    pub fn mods<S: ScoreMod, M: MaskMod, P: WeightMod>(self, mods: &'a Mods<S, M, P>) -> Result<Self, Error> {
        check_no_keys("functions", self.keys)?;
        let (row, position) = (self.call.first_row, self.call.offset());
        let at = Position { batch: 0, head: 0, row, key: 0, position, distance: position };
        if mods.score.is_given() && !self.call.inputs.q.shape().contains(&0) {
            mods.score.derivative(0.0, at).ok_or(NO_DERIVATIVE)?;
        }
        Self { call: self.call.mods(mods)?, ..self }.fitting()
    }

    /// Returns the state if the mask function fits its rows.
    fn fitting(self) -> Result<Self, Error> {
        let lists = self.call.inputs.lists_from(0, 0)?;
        let (attention, inputs) = self.at_end(0, &lists)?;
        let BackwardProblem { checked, .. } = attention.backward(inputs, self.saved, Gradients::new())?;
        self.call.functions.fit(checked.call(), self.call.shift(0))?;
        Ok(self)
    }

    /// Sets the row of the call that the first of these rows is, 0 by default. Sums are taken over blocks of 96 rows, which may
    /// begin before it and end after the last row. Dropout, functions and positions count from it as
    /// [`AttnState::rows_from`](crate::AttnState::rows_from) says.
    ///
    /// # Errors
    /// [`Error::Needs`] if keys were pushed already; [`Error::TooLarge`] if the rows go beyond the last position;
    /// [`Error::Mask`] if a mask function that was set before does not fit them.
    pub fn starting_at(self, first_row: usize) -> Result<Self, Error> {
        check_no_keys("first row", self.keys)?;
        Self { call: self.call.rows_from(first_row)?, ..self }.fitting()
    }

    /// Number of keys pushed or passed over.
    pub fn len(&self) -> usize {
        self.keys
    }

    /// Returns true if no key was pushed yet.
    pub fn is_empty(&self) -> bool {
        self.keys == 0
    }

    /// Pushes the next keys `[batch, kv_heads, n, head_dim]` and values `[batch, kv_heads, n, value_dim]`: a multiple of 256, but for
    /// the last. Adds the gradients of these rows to `sums`, which have the same keys and values over all rows before.
    ///
    /// # Errors
    /// [`Error::Mismatch`] if keys, values, sums and q do not fit together; [`Error::Range`] if a bias or mask has no columns for the
    /// keys, or they have no positions; [`Error::Multiple`] after a push of other than a multiple of 256; [`Error::Memory`]. State and
    /// sums are then unchanged.
    pub fn push<'k>(
        &mut self,
        k: impl Into<Tensor<'k>>,
        v: impl Into<Tensor<'k>>,
        sums: &mut KeyGradientSums,
    ) -> Result<(), Error> {
        self.pushed([k.into(), v.into()], sums, Gradients::new())
    }

    /// Pushes the next keys as [`Self::push`] does, and writes the gradient in the bias of these rows and keys: in the shape of the
    /// bias, but with the columns of these keys alone; of a bias with columns for the first keys, those that it has. It is summed
    /// over the rows of this state if the bias has one row for all.
    ///
    /// ```
    /// use sdpa::parts::{BackwardState, KeyGradientShape, KeyGradientSums};
    /// use sdpa::{Attention, Exec, Inputs, Saved, View, ViewMut};
    /// // One row, two keys of weight ½; the value of the second is 1, and so is the gradient in the output, which is ½.
    /// let (q, k, v, half, one, lse) = ([0.0f32], [0.0; 2], [0.0, 1.0], [0.5], [1.0], [2f32.ln()]);
    /// let (row, keys) = ([1, 1, 1, 1], [1, 1, 2, 1]);
    /// let (k, v, bias) = (View::bhld(&k, keys)?, View::bhld(&v, keys)?, View::bhld(&k, [1, 1, 1, 2])?);
    /// let saved = Saved::new(View::bhld(&half, row)?, View::bhld(&lse, row)?, View::bhld(&one, row)?);
    /// let inputs = Inputs::new(View::bhld(&q, row)?, k, v).bias(bias);
    /// let mut state = BackwardState::new(Attention::new(), inputs, saved, Exec::serial())?;
    /// let mut sums = KeyGradientSums::new(KeyGradientShape { batch: 1, heads: 1, keys: 2, head_dim: 1, value_dim: 1 })?;
    /// let mut dbias = [0.0; 2];
    /// state.push_biased(k, v, &mut sums, ViewMut::bhld(&mut dbias, [1, 1, 1, 2])?)?;
    /// assert_eq!(dbias, [-0.25, 0.25]);
    /// # Ok::<(), sdpa::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Self::push`]; [`Error::Mismatch`] for a gradient of another shape; [`Error::Needs`] without a bias, or if it has one
    /// column: its gradient is a sum over all keys. State, sums and gradient are then unchanged.
    pub fn push_biased<'k>(
        &mut self,
        k: impl Into<Tensor<'k>>,
        v: impl Into<Tensor<'k>>,
        sums: &mut KeyGradientSums,
        dbias: ViewMut<'_>,
    ) -> Result<(), Error> {
        if self.call.inputs.bias.is_some_and(|bias| bias.of.shape()[3] == 1) {
            return Err(Error::Needs {
                argument: "dbias",
                needs: "a bias with more columns than one, which is of all keys",
            });
        }
        self.pushed([k.into(), v.into()], sums, Gradients::new().bias(dbias))
    }

    /// Pushes keys and writes gradients in their part of the bias, if they are wanted.
    fn pushed(
        &mut self,
        keys: [Tensor<'_>; 2],
        sums: &mut KeyGradientSums,
        gradients: Gradients<'_>,
    ) -> Result<(), Error> {
        let [batch, heads, _, dim] = self.call.inputs.q.shape();
        let n = self.call.check_keys(keys, self.keys)?;
        sums.check(KeyGradientShape { batch, heads, keys: n, head_dim: dim, value_dim: self.call.value_dim })?;
        self.whole_blocks_before(n)?;
        if n == 0 {
            return Ok(());
        }
        let lists = self.call.inputs.lists_from(self.keys, n)?;
        let (attention, inputs) = self.call.over(keys, self.keys, &lists);
        let problem = attention.backward(inputs, self.saved, gradients)?;
        self.run(BackwardProblem {
            part: Part::Keys { first_row: self.call.first_row, sums: sums.parts_mut() },
            ..problem
        })?;
        self.keys += n;
        Ok(())
    }

    /// Refuses more keys after an incomplete block.
    fn whole_blocks_before(&self, n: usize) -> Result<(), Error> {
        let whole = n == 0 || self.keys.is_multiple_of(KEY_BLOCK);
        if whole { Ok(()) } else { Err(Error::Multiple { argument: KEYS_BEFORE, got: self.keys, of: KEY_BLOCK }) }
    }

    /// Returns true if some row may see some of these keys, as [`AttnState::sees`](crate::AttnState::sees) does.
    pub fn sees(&self, keys: Range<usize>) -> bool {
        self.call.sees(keys)
    }

    /// Passes over the next keys, if no row sees them ([`Self::sees`]). A push of the same keys would add nothing. If earlier and
    /// later rows do see some of them, push them here too: these rows may complete a block of 96 in the sums.
    ///
    /// # Errors
    /// [`Error::Needs`] if a row may see one of them; [`Error::Multiple`] as [`Self::push`]; [`Error::TooLarge`] beyond the last
    /// position. The state is then unchanged.
    pub fn skip(&mut self, keys: usize) -> Result<(), Error> {
        check_room(self.keys, keys)?;
        self.whole_blocks_before(keys)?;
        self.call.inputs.check_columns(self.keys, keys)?;
        if self.sees(self.keys..self.keys + keys) {
            return Err(Error::Needs { argument: "skip", needs: "keys that no row sees" });
        }
        self.keys += keys;
        Ok(())
    }

    /// Checks gradients as [`Self::write`] does, before there are any keys.
    ///
    /// # Errors
    /// As [`Self::write`].
    pub fn check(&self, gradients: &Gradients<'_>) -> Result<(), Error> {
        check_for_rows(gradients)?;
        let lists = self.call.inputs.lists_from(0, 0)?;
        let (attention, inputs) = self.at_end(0, &lists)?;
        attention.checked_backward(&inputs, &self.saved, gradients).map(|_| ())
    }

    /// Writes the gradients of the queries ([`Gradients::q`]), and those that are sums over all of these rows: of sinks, slopes and
    /// scale.
    ///
    /// # Errors
    /// As [`Attention::backward`], for the gradients; [`Error::Needs`] for those of keys and values, which
    /// [`KeyGradientSums::write`] writes, of a bias, which [`Self::push_biased`] does, and in parameters of a score function, which
    /// nothing does. Gradients are then untouched.
    pub fn write(mut self, gradients: Gradients<'_>) -> Result<(), Error> {
        check_for_rows(&gradients)?;
        let lists = self.call.inputs.lists_from(0, self.keys)?;
        let (attention, inputs) = self.at_end(self.keys, &lists)?;
        let problem = attention.backward(inputs, self.saved, gradients)?;
        self.run(BackwardProblem { part: Part::End { first_row: self.call.first_row }, ..problem })
    }

    /// Returns the settings and inputs of a call over `keys` keys with numbers that do not count.
    fn at_end<'k>(&self, keys: usize, lists: &'k KeyLists<'k>) -> Result<(Attention, Inputs<'k>), Error>
    where
        'a: 'k,
    {
        let [batch, _, _, dim] = self.call.inputs.q.shape();
        let of = |dim| View::from_strides(&[0.0f32], 0, [batch, self.call.kv_heads, keys, dim], [0; 4]);
        let (attention, mut inputs) = self.call.over([of(dim)?.into(), of(self.call.value_dim)?.into()], 0, lists);
        inputs.sinks = self.call.inputs.sinks;
        Ok((attention, inputs))
    }

    /// Computes a part of the pass over the keys that follow those pushed; the last part reads no keys.
    fn run(&mut self, problem: BackwardProblem<'_>) -> Result<(), Error> {
        self.call.functions.run_backward(problem, self.exec, &mut self.workspace, self.call.shift(self.keys))
    }
}

/// Refuses gradients that the rows of a state do not have.
fn check_for_rows(gradients: &Gradients<'_>) -> Result<(), Error> {
    let Gradients { k, v, bias, parameters, .. } = gradients;
    let refused = |argument, needs| Err(Error::Needs { argument, needs });
    match (k.is_some() || v.is_some(), bias, parameters) {
        (true, ..) => refused("dk and dv", "the sums of the keys, which write them"),
        (_, Some(_), _) => refused("dbias", "the pushes of its keys, which write it"),
        (.., Some(_)) => refused("dparameters", "one call with all keys: a state does not sum gradients in parameters"),
        _ => Ok(()),
    }
}
