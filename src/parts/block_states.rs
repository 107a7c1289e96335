//! States of query rows over each block of keys, and states to fold them into: decoding over keys that lie on several machines.

use crate::attention::Attention;
use crate::error::{Error, at_most, floats, same, zeros};
use crate::inputs::Inputs;
use crate::parts::inputs::SELECTED;
use crate::plan::Plan;
use crate::plan::problem::Problem;
use crate::shape::Shape;
use crate::threads::exec::Exec;
use crate::threads::run::NO_MODS;
use crate::threads::workspace::Workspace;
use sdpa_kernels::{
    Alignment, AnyMods, Basis, Isa, KEY_BLOCK, MAX_SPLIT_ROWS, Outputs, Seen, State, View, ViewMut, merge_states,
};

/// States of query rows over each single block of 256 keys, kept until the state over all earlier keys is there: see
/// [`RowStates`].
///
/// For a few rows, such as a decode step's, with keys in blocks on several machines. Each machine computes the states of
/// its own blocks, which takes all the time, then a [`RowStates`] goes from one to the next in the order of the keys and takes
/// in each block. The result has the bits of one call over all keys. (Flash-Decoding across machines: Dao, Haziza, Massa and
/// Sizov 2023.)
///
/// ```
/// use sdpa::parts::{BlockStates, RowStates};
/// use sdpa::{Attention, Exec, Inputs, Outputs, View, ViewMut};
/// let (q, x) = ([0.5; 8], vec![0.25; 600 * 8]);
/// let q = View::bhld(&q, [1, 1, 1, 8])?;
/// // Two machines have the first 512 keys and the other 88.
/// let here = View::bhld(&x[..512 * 8], [1, 1, 512, 8])?;
/// let there = View::bhld(&x[512 * 8..], [1, 1, 88, 8])?;
/// let mut states = RowStates::new([1, 1, 1, 8])?;
/// for (keys, first) in [(here, 0), (there, 512)] {
///     let mut blocks = BlockStates::new();
///     blocks.compute(&Attention::new(), Inputs::new(q, keys, keys), first, Exec::serial())?;
///     states.fold(&blocks)?; // then send `states.as_slice()` to the next machine
/// }
/// let mut out = [0.0; 8];
/// states.write(None, Outputs::new(ViewMut::bhld(&mut out, [1, 1, 1, 8])?), Exec::serial())?;
/// assert_eq!(out, [0.25; 8]);
/// # Ok::<(), sdpa::Error>(())
/// ```
#[derive(Debug, Default)]
pub struct BlockStates {
    states: sdpa_kernels::BlockStates,
    value_dim: usize,
    isa: Option<Isa>,
    workspace: Workspace,
}

impl BlockStates {
    /// Creates empty memory; the first call of [`Self::compute`] fills it, and later ones use it again.
    pub const fn new() -> Self {
        Self { states: sdpa_kernels::BlockStates::new(), value_dim: 0, isa: None, workspace: Workspace::new() }
    }

    /// Bytes held.
    pub fn bytes(&self) -> usize {
        self.states.bytes() + self.workspace.bytes()
    }

    /// Computes the states of the query rows over each block of the inputs' keys, which follow `first` keys that lie elsewhere,
    /// a multiple of 256. Rows are at their own positions, or at those that [`Alignment::TopLeft`] or [`Alignment::Offset`] gives
    /// them among all keys. Sinks are not taken in: [`RowStates::write`] adds them once.
    ///
    /// Memory: two numbers and an output for each row and each block with a key that the range rules show to some row.
    ///
    /// # Errors
    /// As [`Attention::problem`]; [`Error::Multiple`] if `first` is no multiple of 256; [`Error::Range`] if more rows share a
    /// key/value head than one task holds (128, fewer for long heads); [`Error::Needs`] for dropout, for positions of rows but not
    /// of keys, for biases and masks over the last keys and [`Alignment::BottomRight`], which need the number of all keys, and for
    /// values in another basis; [`Error::Memory`]. There are no states then.
    pub fn compute(
        &mut self,
        attention: &Attention,
        inputs: Inputs<'_>,
        first: usize,
        exec: Exec,
    ) -> Result<(), Error> {
        self.value_dim = 0;
        let by_order = over_keys_from(first, attention)?;
        inputs.check_row_positions()?;
        if let Some(argument) = inputs.suffix().or(inputs.selected.map(|_| SELECTED)) {
            return Err(Error::Needs { argument, needs: "a call over all keys" });
        }
        let format = inputs.key_values()?.format();
        if format.is_some_and(|format| format.value_basis != Basis::Channels) {
            // Parts of ranks meet before rows are finished.
            return Err(Error::Needs { argument: "value_basis", needs: "values in the basis of their channels" });
        }
        // Given positions are among all keys.
        let attention = if inputs.key_positions.is_some() { *attention } else { by_order };
        let checked = attention.call_alone(&inputs)?;
        let shape = Shape::of(checked.call());
        let problem = Problem { checked, shape };
        let plan = Plan::of_blocks(&problem, exec);
        const OF: &str = "the rows that one task holds, as each block is computed alone";
        let rows = problem.longest_rows();
        // Tiles of some instruction sets make room for a few more.
        at_most("q", "rows that share a key/value head", rows, plan.tiling.task_rows().min(MAX_SPLIT_ROWS), OF)?;
        let memory = Error::Memory { what: "states of blocks", bytes: plan.partials_bytes() };
        let launch = self.states.launch(problem.checked, plan.tiling, plan.tasks).ok_or(memory)?;
        plan.execute(&launch, &mut self.workspace.forward, exec.executor(), AnyMods::of(&NO_MODS))?;
        (self.value_dim, self.isa) = (shape.value_dim, Some(exec.isa));
        Ok(())
    }
}

/// States of query rows over the keys so far: for each row the largest score, the sum of the exponentials, and the output that is
/// not normalised yet. Plain numbers, to be sent from one machine to the next; [`BlockStates`] are folded into them.
///
/// ```
/// use sdpa::parts::RowStates;
/// let sent = RowStates::new([1, 32, 1, 128])?; // a row of 32 heads: 130 numbers each
/// let mut received = RowStates::new(sent.shape())?;
/// received.as_mut_slice().copy_from_slice(sent.as_slice());
/// assert_eq!((sent.as_slice().len(), received), (32 * 130, sent.clone()));
/// # Ok::<(), sdpa::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct RowStates {
    /// Batch, heads, rows, value_dim.
    shape: [usize; 4],
    /// Maxima, then sums, then outputs in whole vectors.
    floats: Vec<f32>,
}

/// Number of floats of an output of `value_dim` elements: in whole vectors of sixteen.
fn width(value_dim: usize) -> usize {
    value_dim.next_multiple_of(16)
}

impl RowStates {
    /// Creates the states of rows that have seen no keys, for outputs of this shape: `[batch, heads, q_len, value_dim]`.
    ///
    /// # Errors
    /// [`Error::Empty`] for a value_dim of 0, [`Error::TooLarge`] or [`Error::Memory`] if they do not fit in memory.
    pub fn new(shape: [usize; 4]) -> Result<Self, Error> {
        let [batch, heads, rows, value_dim] = shape;
        if value_dim == 0 {
            return Err(Error::Empty { argument: "states of rows", what: "value_dim" });
        }
        let width = value_dim.checked_next_multiple_of(16).and_then(|width| width.checked_add(2));
        let width = width.ok_or(Error::TooLarge { what: "states of rows", sizes: shape })?;
        let mut states =
            Self { shape, floats: zeros("states of rows", floats("states of rows", [batch, heads, rows, width])?)? };
        let [max, ..] = states.parts_mut();
        max.fill(f32::NEG_INFINITY);
        Ok(states)
    }

    /// Batch, heads, query rows and length of an output.
    pub fn shape(&self) -> [usize; 4] {
        self.shape
    }

    /// Returns all numbers, to be sent: maxima and sums, one for each row, then outputs, each in whole vectors of sixteen.
    pub fn as_slice(&self) -> &[f32] {
        &self.floats
    }

    /// Returns all numbers, to be received.
    pub fn as_mut_slice(&mut self) -> &mut [f32] {
        &mut self.floats
    }

    /// Returns maxima, sums and outputs.
    fn parts_mut(&mut self) -> [&mut [f32]; 3] {
        let [batch, heads, rows, _] = self.shape;
        let (max, rest) = self.floats.split_at_mut(batch * heads * rows);
        let (sum, out) = rest.split_at_mut(batch * heads * rows);
        [max, sum, out]
    }

    /// Takes in the states over the next blocks of keys, in their order.
    ///
    /// # Errors
    /// [`Error::Mismatch`] if they are of other rows; [`Error::Needs`] if none were computed. The states are then unchanged.
    pub fn fold(&mut self, blocks: &BlockStates) -> Result<(), Error> {
        let Some(isa) = blocks.isa.filter(|_| blocks.value_dim > 0) else {
            return Err(Error::Needs { argument: "blocks", needs: "states: compute them first" });
        };
        let [batch, heads, rows, _] = blocks.states.shape();
        self.same_rows([batch, heads, rows, blocks.value_dim], "blocks")?;
        blocks.states.fold_into(isa, self.parts_mut());
        Ok(())
    }

    /// Takes in the states over later keys: all keys of `later` follow those of these states. The numbers are those of one call
    /// up to rounding, since sums are taken in another order than [`Self::fold`] takes them in.
    ///
    /// ```
    /// use sdpa::parts::RowStates;
    /// use sdpa::{Exec, Outputs, ViewMut};
    /// let mut states = RowStates::new([1, 1, 1, 2])?;
    /// let mut later = RowStates::new([1, 1, 1, 2])?;
    /// later.as_mut_slice()[..4].copy_from_slice(&[0.0, 2.0, 6.0, 8.0]); // largest score, sum, outputs
    /// states.merge(&later, Exec::serial())?;
    /// let mut out = [0.0; 2];
    /// states.write(None, Outputs::new(ViewMut::bhld(&mut out, [1, 1, 1, 2])?), Exec::serial())?;
    /// assert_eq!(out, [3.0, 4.0]);
    /// # Ok::<(), sdpa::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Mismatch`] if they are of other rows; these states are then unchanged.
    pub fn merge(&mut self, later: &Self, exec: Exec) -> Result<(), Error> {
        self.same_rows(later.shape, "later")?;
        let [batch, heads, rows, value_dim] = self.shape;
        let n = batch * heads * rows;
        let (max, rest) = later.floats.split_at(n);
        let (sum, out) = rest.split_at(n);
        merge_states(exec.isa, width(value_dim), self.parts_mut(), [max, sum, out]);
        Ok(())
    }

    fn same_rows(&self, got: [usize; 4], argument: &'static str) -> Result<(), Error> {
        for ((what, got), expected) in ["batch", "heads", "rows", "value_dim"].into_iter().zip(got).zip(self.shape) {
            same(argument, what, got, expected, "these states")?;
        }
        Ok(())
    }

    /// Checks outputs and sinks as [`Self::write`] does, before there are any keys.
    ///
    /// ```
    /// use sdpa::parts::RowStates;
    /// use sdpa::{Error, Outputs, ViewMut};
    /// let (states, mut out) = (RowStates::new([1, 2, 1, 8])?, [0.0; 2 * 7]);
    /// let outputs = Outputs::new(ViewMut::bhld(&mut out, [1, 2, 1, 7])?);
    /// assert!(matches!(states.check(None, &outputs), Err(Error::Mismatch { argument: "out", got: 7, expected: 8, .. })));
    /// # Ok::<(), sdpa::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Self::write`].
    pub fn check(&self, sinks: Option<&[f32]>, outputs: &Outputs<'_>) -> Result<(), Error> {
        outputs.check_for_state()?;
        let checked = Attention::new().checked(&self.inputs(sinks)?)?;
        Ok(outputs.fits(checked.call())?)
    }

    /// Returns the inputs of a call without keys, for which the queries do not matter.
    fn inputs<'s>(&self, sinks: Option<&'s [f32]>) -> Result<Inputs<'s>, Error> {
        let [b, h, rows, value_dim] = self.shape;
        let inputs = Inputs::new(
            View::from_strides(&[0.0f32], 0, [b, h, rows, 1], [0; 4])?,
            View::<f32>::bhld(&[], [b, h, 0, 1])?,
            View::<f32>::bhld(&[], [b, h, 0, value_dim])?,
        );
        Ok(sinks.map_or(inputs, |sinks| inputs.sinks(sinks)))
    }

    /// Writes the results for the keys so far. `sinks` are logits, one for each query head, that take part once.
    ///
    /// # Errors
    /// As [`Attention::problem`], for the outputs and sinks; [`Error::Needs`] for scores and key weight sums, which need all keys
    /// at once.
    pub fn write(&self, sinks: Option<&[f32]>, outputs: Outputs<'_>, exec: Exec) -> Result<(), Error> {
        outputs.check_for_state()?;
        let ([b, h, rows, value_dim], inputs) = (self.shape, self.inputs(sinks)?);
        // Work on a copy: views of states are exclusive.
        let mut copy = self.clone();
        let [max, sum, out] = copy.parts_mut();
        let step = width(value_dim) as isize;
        // Without sequences the other sizes may be any numbers, and strides do not matter.
        let of_head = (rows as isize).wrapping_mul(step);
        let strides = [(h as isize).wrapping_mul(of_head), of_head, step, 1];
        let state = State {
            max: ViewMut::bhl(max, [b, h, rows])?,
            sum: ViewMut::bhl(sum, [b, h, rows])?,
            out: ViewMut::from_strides(out, 0, self.shape, strides)?,
            seen: Seen::Keys,
        };
        let problem = Attention::new().problem(inputs, outputs.resume(state))?;
        problem.run_once(exec);
        Ok(())
    }
}

/// Returns the settings of a call over keys that follow `first` others.
fn over_keys_from(first: usize, attention: &Attention) -> Result<Attention, Error> {
    if attention.dropout.is_some() {
        return Err(Error::Needs { argument: "dropout", needs: "a call over all keys, or an AttnState of them" });
    }
    if !first.is_multiple_of(KEY_BLOCK) {
        return Err(Error::Multiple { argument: "first key", got: first, of: KEY_BLOCK });
    }
    if attention.alignment == Some(Alignment::BottomRight) {
        return Err(Error::Needs { argument: "bottom-right", needs: "the number of all keys" });
    }
    Ok(attention.counted_from(first))
}
