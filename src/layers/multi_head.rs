//! Multi-head attention: attention between learned projections.

use super::linear::{check_rows, rows_of};
use super::{Compute, Linear, Rope};
use crate::attention::Attention;
use crate::error::{Bound, Error};
use crate::inputs::{Inputs, same};
use crate::plan::Plan;
use crate::problem::Outputs;
use crate::schedule;
use sdpa_kernels::{Mask, View, ViewMut};

/// How rows make sequences.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sequences<'a> {
    /// A batch of sequences of one length.
    Even {
        /// How many.
        batch: usize,
        /// Rows of each.
        len: usize,
    },
    /// Sequences of any lengths, end to end: sequence `s` is rows `ends[s]..ends[s + 1]`, from 0 to the number of rows.
    /// No row is spent on padding.
    Ragged(&'a [usize]),
}

impl Sequences<'_> {
    /// One sequence of this length.
    pub const fn one(len: usize) -> Self {
        Self::Even { batch: 1, len }
    }

    /// How many sequences there are.
    pub fn count(&self) -> usize {
        match self {
            Self::Even { batch, .. } => *batch,
            Self::Ragged(ends) => ends.len().saturating_sub(1),
        }
    }

    /// The rows of the sequence with this number, which is below [`Self::count`].
    pub fn rows(&self, sequence: usize) -> core::ops::Range<usize> {
        match self {
            Self::Even { len, .. } => sequence * len..(sequence + 1) * len,
            Self::Ragged(ends) => ends[sequence]..ends[sequence + 1],
        }
    }

    /// Whether there are so many rows. What cumulative lengths may be is checked where they are used.
    pub(crate) fn check(&self, argument: &'static str, rows: usize) -> Result<(), Error> {
        match self {
            Self::Even { batch, len } => match batch.checked_mul(*len) {
                Some(all) => same(argument, "rows", rows, all, "the sequences"),
                None => Err(Error::TooLarge { what: "sequences", sizes: [*batch, *len, 1, 1] }),
            },
            Self::Ragged(ends) => match ends.last() {
                Some(&end) if end != rows => {
                    let index = ends.len() - 1;
                    Err(Error::Entry { argument: "sequences", index, got: end, bound: Bound::Exactly, limit: rows })
                }
                Some(_) => Ok(()),
                None => Err(Error::Empty { argument: "sequences", what: "the list of cumulative lengths" }),
            },
        }
    }

    /// `[batch, rows, heads, dim]` of a tensor with so many rows in all.
    fn stored(&self, rows: usize, [heads, dim]: [usize; 2]) -> [usize; 4] {
        match self {
            Self::Even { batch, len } => [*batch, *len, heads, dim],
            Self::Ragged(_) => [1, rows, heads, dim],
        }
    }
}

/// What attends to what: the tensors of a [`MultiHeadAttention`] call.
#[derive(Debug, Clone, Copy)]
pub struct MultiHeadInput<'a> {
    x: &'a [f32],
    sequences: Sequences<'a>,
    memory: Option<Memory<'a>>,
    kv_lens: Option<&'a [usize]>,
    mask: Option<Mask<'a>>,
}

/// What keys and values are made of, where it is not the queries' rows.
#[derive(Debug, Clone, Copy)]
struct Memory<'a> {
    keys: &'a [f32],
    values: &'a [f32],
    sequences: Sequences<'a>,
}

impl<'a> MultiHeadInput<'a> {
    /// Self-attention: rows of `x` look at rows of `x`, within each sequence.
    pub fn new(x: &'a [f32], sequences: Sequences<'a>) -> Self {
        Self { x, sequences, memory: None, kv_lens: None, mask: None }
    }

    /// Cross-attention: rows of `x` look at rows of `memory`, sequence by sequence.
    #[must_use]
    pub fn memory(self, memory: &'a [f32], sequences: Sequences<'a>) -> Self {
        self.keys_and_values(memory, memory, sequences)
    }

    /// Cross-attention with keys made of one tensor and values of another, as many rows each.
    #[must_use]
    pub fn keys_and_values(self, keys: &'a [f32], values: &'a [f32], sequences: Sequences<'a>) -> Self {
        Self { memory: Some(Memory { keys, values, sequences }), ..self }
    }

    /// Key padding: how many keys of each sequence exist, from the first on.
    #[must_use]
    pub fn kv_lens(self, lens: &'a [usize]) -> Self {
        Self { kv_lens: Some(lens), ..self }
    }

    /// Which keys each row may attend to: `[sequences, heads, rows, keys]`, the first three broadcast from 1.
    #[must_use]
    pub fn mask(self, mask: Mask<'a>) -> Self {
        Self { mask: Some(mask), ..self }
    }
}

/// Multi-head attention (Vaswani et al. 2017, arXiv:1706.03762): out · Concat(head₁ … headₙ), where head *i* is
/// attention over the *i*-th slice of the projected queries, keys and values.
///
/// Dimensions follow from the four projections: a head's keys are `q.outputs() / heads` long, its values
/// `v.outputs() / kv_heads`. Inputs of q, k and v may differ in width; key/value heads may be fewer than query heads.
/// The three projections run side by side, attention runs fused on what they wrote, in their layout; nothing of the size
/// of rows × keys is made.
///
/// ```
/// use sdpa::Attention;
/// use sdpa::layers::{Compute, Linear, MultiHeadAttention, MultiHeadInput, Sequences, Weights};
/// // two heads of 4 over tokens of width 8; a projection that changes nothing
/// let identity: Vec<f32> = (0..64).map(|i| f32::from(u8::from(i % 9 == 0))).collect();
/// let linear = || Weights::rows(&identity, [8, 8]).map(Linear::new);
/// let layer = MultiHeadAttention::new([2, 2], [linear()?, linear()?, linear()?, linear()?])?
///     .attention(Attention::new().causal());
/// let x: Vec<f32> = (0..5 * 8).map(|i| i as f32 / 40.0).collect();
/// let mut out = vec![0.0; x.len()];
/// layer.forward(MultiHeadInput::new(&x, Sequences::one(5)), &mut out, &mut Compute::default())?;
/// assert_eq!(out[..8], x[..8]); // the first token sees only itself
/// # Ok::<(), sdpa::Error>(())
/// ```
#[derive(Debug)]
pub struct MultiHeadAttention {
    heads: usize,
    kv_heads: usize,
    /// Length of a head's keys, and of its values.
    key_dim: usize,
    value_dim: usize,
    q: Linear,
    k: Linear,
    v: Linear,
    out: Linear,
    attention: Attention,
    alibi: Option<Vec<f32>>,
    rope: Option<Rope>,
}

impl MultiHeadAttention {
    /// Query heads and key/value heads, and the projections of q, k, v and of the output.
    ///
    /// # Errors
    /// [`Error::Heads`] if query heads are no multiple of key/value heads, [`Error::Mismatch`] if the projections do not
    /// divide into heads or do not fit together.
    pub fn new([heads, kv_heads]: [usize; 2], [q, k, v, out]: [Linear; 4]) -> Result<Self, Error> {
        if heads == 0 || kv_heads == 0 || !heads.is_multiple_of(kv_heads) {
            return Err(Error::Heads { q_heads: heads, kv_heads });
        }
        let (key_dim, value_dim) = (q.outputs() / heads, v.outputs() / kv_heads);
        same("q projection", "outputs", q.outputs(), heads * key_dim, "its heads")?;
        same("k projection", "outputs", k.outputs(), kv_heads * key_dim, "q's heads")?;
        same("v projection", "outputs", v.outputs(), kv_heads * value_dim, "its heads")?;
        same("out projection", "inputs", out.inputs(), heads * value_dim, "v's heads")?;
        for (argument, dim) in [("q projection", key_dim), ("v projection", value_dim)] {
            if dim == 0 {
                return Err(Error::Empty { argument, what: "head" });
            }
        }
        Ok(Self {
            heads,
            kv_heads,
            key_dim,
            value_dim,
            q,
            k,
            v,
            out,
            attention: Attention::new(),
            alibi: None,
            rope: None,
        })
    }

    /// Scale, softcap, causal, window, alignment.
    #[must_use]
    pub fn attention(self, attention: Attention) -> Self {
        Self { attention, ..self }
    }

    /// ALiBi: one slope per query head.
    ///
    /// # Errors
    /// [`Error::Mismatch`] if there are not as many slopes as heads.
    pub fn alibi(self, slopes: Vec<f32>) -> Result<Self, Error> {
        same("alibi slopes", "length", slopes.len(), self.heads, "the layer (heads)")?;
        Ok(Self { alibi: Some(slopes), ..self })
    }

    /// Rotary positions: queries and keys are turned by their place in their sequence, counted from 0.
    ///
    /// # Errors
    /// [`Error::Mismatch`] if heads are narrower than what is turned.
    pub fn rope(self, rope: Rope) -> Result<Self, Error> {
        rope.check("q projection", self.key_dim)?;
        Ok(Self { rope: Some(rope), ..self })
    }

    /// Width of the rows of x.
    pub fn inputs(&self) -> usize {
        self.q.inputs()
    }

    /// Widths of the rows that keys and values are made of.
    pub fn memory_inputs(&self) -> [usize; 2] {
        [self.k.inputs(), self.v.inputs()]
    }

    /// Width of the rows that are written.
    pub fn outputs(&self) -> usize {
        self.out.outputs()
    }

    /// Query heads.
    pub fn heads(&self) -> usize {
        self.heads
    }

    /// Writes a row of `out` for each row of x.
    ///
    /// # Errors
    /// Any [`Error`]; `out` is then untouched.
    pub fn forward(&self, input: MultiHeadInput<'_>, out: &mut [f32], compute: &mut Compute) -> Result<(), Error> {
        self.run(input, out, None, compute)
    }

    /// Also writes the weights of each head, `[sequences, heads, rows, keys]` of the longest sequences: the one request
    /// that takes memory in rows × keys, and it is yours.
    ///
    /// # Errors
    /// Any [`Error`]; `out` is then untouched.
    pub fn forward_with_weights(
        &self,
        input: MultiHeadInput<'_>,
        out: &mut [f32],
        weights: ViewMut<'_>,
        compute: &mut Compute,
    ) -> Result<(), Error> {
        self.run(input, out, Some(weights), compute)
    }

    fn run(
        &self,
        input: MultiHeadInput<'_>,
        out: &mut [f32],
        weights: Option<ViewMut<'_>>,
        compute: &mut Compute,
    ) -> Result<(), Error> {
        let memory = input.memory.unwrap_or(Memory { keys: input.x, values: input.x, sequences: input.sequences });
        let rows = rows_of("x", input.x, self.q.inputs())?;
        let keys = rows_of("keys", memory.keys, self.k.inputs())?;
        check_rows("values", memory.values, keys, self.v.inputs())?;
        check_rows("out", out, rows, self.out.outputs())?;
        input.sequences.check("x", rows)?;
        memory.sequences.check("keys", keys)?;

        let (q, k, v) = (self.q.outputs(), self.k.outputs(), self.v.outputs());
        let lengths = [rows * q, keys * k, keys * v, rows * self.heads * self.value_dim];
        let mut buffers = lengths.map(|len| compute.buffer(len));
        let done = self.attend(&input, &memory, &mut buffers, weights, compute);
        if done.is_ok() {
            schedule::multiply(compute.exec(), [self.out.product(&buffers[3], out)]);
        }
        buffers.into_iter().for_each(|buffer| compute.recycle(buffer));
        done
    }

    /// Projects into the first three buffers, and attends into the fourth.
    fn attend(
        &self,
        input: &MultiHeadInput<'_>,
        memory: &Memory<'_>,
        buffers: &mut [super::compute::Buffer; 4],
        weights: Option<ViewMut<'_>>,
        compute: &mut Compute,
    ) -> Result<(), Error> {
        let exec = compute.exec();
        let [q, k, v, attended] = buffers;
        schedule::multiply(
            exec,
            [self.q.product(input.x, q), self.k.product(memory.keys, k), self.v.product(memory.values, v)],
        );
        let rows = q.len() / self.q.outputs();
        let keys = k.len() / self.k.outputs();
        let key_heads = [self.kv_heads, self.key_dim];
        if let Some(rope) = &self.rope {
            rope.rotate(q, [self.heads, self.key_dim], input.sequences, 0, compute)?;
            rope.rotate(k, key_heads, memory.sequences, 0, compute)?;
        }
        let mut inputs = Inputs::new(
            View::blhd(q, input.sequences.stored(rows, [self.heads, self.key_dim]))?,
            View::blhd(k, memory.sequences.stored(keys, key_heads))?,
            View::blhd(v, memory.sequences.stored(keys, [self.kv_heads, self.value_dim]))?,
        );
        inputs = match (input.sequences, memory.sequences) {
            (Sequences::Ragged(q), Sequences::Ragged(k)) => inputs.ragged(q, k),
            (Sequences::Even { .. }, Sequences::Even { .. }) => inputs,
            _ => return Err(Error::Needs { argument: "ragged sequences", needs: "x and the keys to be ragged, both" }),
        };
        if let Some(slopes) = &self.alibi {
            inputs = inputs.alibi(slopes);
        }
        if let Some(lens) = input.kv_lens {
            inputs = inputs.kv_lens(lens);
        }
        if let Some(mask) = input.mask {
            inputs = inputs.mask(mask);
        }
        let mut outputs =
            Outputs::new(ViewMut::blhd(attended, input.sequences.stored(rows, [self.heads, self.value_dim]))?);
        if let Some(weights) = weights {
            outputs = outputs.weights(weights);
        }
        let problem = self.attention.problem(inputs, outputs)?;
        let plan = Plan::new(&problem, exec);
        problem.run(&plan, compute.workspace());
        Ok(())
    }
}
