//! Multi-head attention: attention between learned projections.

mod decode;
mod input;

use crate::compute::Compute;
use crate::error::{exactly, multiple_of, same};
use crate::linear::{Linear, check_rows, rows_of};
use crate::next_rows::Parts;
use crate::norm::Norm;
use crate::positions::Rope;
use crate::sequences::{Sequences, Start};
use crate::share;
use input::Memory;
pub use input::MultiHeadInput;
use sdpa::{Alignment, Attention, Error, Inputs, KvCache, Outputs, Precision, View, ViewMut};

/// Extra tensors of a call besides its input and output.
#[derive(Debug)]
enum Beside<'a> {
    Nothing,
    /// Destination of each head's weights.
    Weights(ViewMut<'a>),
    /// Keys and values of earlier rows, to which those of these rows are appended.
    Cache(&'a mut KvCache, Parts<'a>),
}

/// Multi-head attention (Vaswani et al. 2017, arXiv:1706.03762): out · Concat(head₁ … headₙ), where head *i* is
/// attention over the *i*-th slice of the projected queries, keys and values.
///
/// Dimensions follow from the four projections: keys of a head have length `q.outputs() / heads`, values `v.outputs() /
/// kv_heads`. Inputs of q, k and v may differ in width; there may be fewer key/value heads than query heads. The three
/// projections run side by side, and fused attention reads their results in place; nothing of size rows × keys is
/// allocated.
///
/// ```
/// use sdpa::Attention;
/// use sdpa_layers::{Compute, Linear, MultiHeadAttention, MultiHeadInput, Sequences, Weights};
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
    /// Length of a head's keys; `value_dim` is that of its values.
    key_dim: usize,
    value_dim: usize,
    q: Linear,
    k: Linear,
    v: Linear,
    out: Linear,
    attention: Attention,
    /// Precision of the whole layer, if it was set.
    precision: Option<Precision>,
    alibi: Option<Vec<f32>>,
    sinks: Option<Vec<f32>>,
    /// Norms of queries and keys.
    norms: Option<[Norm; 2]>,
    rope: Option<Rope>,
}

impl MultiHeadAttention {
    /// Takes the numbers of query heads and key/value heads, and the projections of q, k, v and of the output.
    ///
    /// # Errors
    /// [`Error::Heads`] if the number of query heads is not a multiple of that of key/value heads, [`Error::Range`]
    /// if the projections do not divide into heads or do not fit together.
    pub fn new([heads, kv_heads]: [usize; 2], [q, k, v, out]: [Linear; 4]) -> Result<Self, Error> {
        if heads == 0 || kv_heads == 0 || !heads.is_multiple_of(kv_heads) {
            return Err(Error::Heads { q_heads: heads, kv_heads, of: "k" });
        }
        let (key_dim, value_dim) = (q.outputs() / heads, v.outputs() / kv_heads);
        multiple_of(heads, "the number of query heads").check("q projection", "outputs", q.outputs())?;
        exactly(kv_heads * key_dim, "kv_heads × the head_dim of q").check("k projection", "outputs", k.outputs())?;
        multiple_of(kv_heads, "the number of key/value heads").check("v projection", "outputs", v.outputs())?;
        let inputs = exactly(heads.saturating_mul(value_dim), "query heads × the value_dim of v");
        inputs.check("out projection", "inputs", out.inputs())?;
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
            precision: None,
            alibi: None,
            sinks: None,
            norms: None,
            rope: None,
        })
    }

    /// Sets scale, softcap, causal, window, alignment.
    #[must_use]
    pub fn attention(self, attention: Attention) -> Self {
        Self { attention, ..self }
    }

    /// Sets the precision of the projections, as [`Linear::precision`] does, and of attention, whatever its settings say.
    #[must_use]
    pub fn precision(self, precision: Precision) -> Self {
        let [q, k, v, out] = [self.q, self.k, self.v, self.out].map(|linear| linear.precision(precision));
        Self { q, k, v, out, precision: Some(precision), ..self }
    }

    /// Sets ALiBi slopes, one per query head.
    ///
    /// # Errors
    /// [`Error::Mismatch`] if there is not one slope for each head.
    pub fn alibi(self, slopes: Vec<f32>) -> Result<Self, Error> {
        same("alibi slopes", "length", slopes.len(), self.heads, "the layer (heads)")?;
        Ok(Self { alibi: Some(slopes), ..self })
    }

    /// Sets attention sinks, one logit per query head: a key with this score and the value 0.
    ///
    /// # Errors
    /// [`Error::Mismatch`] if there is not one logit for each head.
    pub fn sinks(self, logits: Vec<f32>) -> Result<Self, Error> {
        same("sinks", "length", logits.len(), self.heads, "the layer (heads)")?;
        Ok(Self { sinks: Some(logits), ..self })
    }

    /// Sets norms of queries and keys, before they are rotated: of each head, if a norm is as wide as a head (Henry et al. 2020,
    /// arXiv:2010.04245), or of all heads together, if it is as wide as the projection.
    ///
    /// ```
    /// use sdpa_layers::{Linear, MultiHeadAttention, Norm, Weights};
    /// let weights = vec![0.1; 8 * 8];
    /// let linear = || Weights::rows(&weights, [8, 8]).map(Linear::new);
    /// let layer = MultiHeadAttention::new([2, 2], [linear()?, linear()?, linear()?, linear()?])?
    ///     .qk_norm([Norm::rms([1.0; 4], 1e-6)?, Norm::rms([1.0; 4], 1e-6)?])?; // of heads of 4
    /// # let _ = layer;
    /// # Ok::<(), sdpa::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Range`] if a norm has another width.
    pub fn qk_norm(self, [q, k]: [Norm; 2]) -> Result<Self, Error> {
        for (argument, norm, all) in [("q norm", &q, self.q.outputs()), ("k norm", &k, self.k.outputs())] {
            if norm.width() != all {
                exactly(self.key_dim, "the head_dim of the layer").check(argument, "width", norm.width())?;
            }
        }
        Ok(Self { norms: Some([q, k]), ..self })
    }

    /// Sets rotary positions: queries and keys are rotated by their position in their sequence, counted from 0.
    ///
    /// # Errors
    /// [`Error::Range`] if heads are narrower than the rotated columns.
    pub fn rope(self, rope: Rope) -> Result<Self, Error> {
        rope.check("q projection", self.key_dim)?;
        Ok(Self { rope: Some(rope), ..self })
    }

    /// Width of the rows of x.
    pub fn inputs(&self) -> usize {
        self.q.inputs()
    }

    /// Widths of the rows from which keys and values are projected.
    pub fn memory_inputs(&self) -> [usize; 2] {
        [self.k.inputs(), self.v.inputs()]
    }

    /// Width of the rows of `out`.
    pub fn outputs(&self) -> usize {
        self.out.outputs()
    }

    /// Number of query heads.
    pub fn heads(&self) -> usize {
        self.heads
    }

    /// Writes a row of `out`, `[rows, outputs]`, for each row of x.
    ///
    /// # Errors
    /// Any [`Error`]; `out` is then untouched.
    pub fn forward(&self, input: MultiHeadInput<'_>, out: &mut [f32], compute: &mut Compute) -> Result<(), Error> {
        self.run(input, out, Beside::Nothing, compute)
    }

    /// Writes a row of `out` for each row of x, and the weights of each head, `[sequences, heads, rows, keys]` of the
    /// longest sequences. Only this call takes memory of rows × keys, which you provide.
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
        self.run(input, out, Beside::Weights(weights), compute)
    }

    fn run(
        &self,
        input: MultiHeadInput<'_>,
        out: &mut [f32],
        beside: Beside<'_>,
        compute: &mut Compute,
    ) -> Result<(), Error> {
        let memory = input.memory.unwrap_or(Memory { keys: input.x, values: input.x, sequences: input.sequences });
        let rows = rows_of("x", input.x, self.q.inputs())?;
        let keys = rows_of("keys", memory.keys, self.k.inputs())?;
        check_rows("values", memory.values, keys, self.v.inputs())?;
        check_rows("out", out, rows, self.out.outputs())?;
        input.sequences.check("x", rows)?;
        memory.sequences.check("keys", keys)?;

        let (q, k, v, attended) = (self.q.outputs(), self.k.outputs(), self.v.outputs(), self.out.inputs());
        // The projections of q and k, if they are normed before they are used.
        let projected = if self.norms.is_some() { [[rows, q], [keys, k]] } else { [[0, 0]; 2] };
        let sizes = [[rows, q], [keys, k], [keys, v], [rows, attended], projected[0], projected[1]];
        let mut buffers = compute.buffers("projections", sizes)?;
        let done = self.attend(&input, &memory, &mut buffers, beside, compute);
        if done.is_ok() {
            share::multiply(compute.exec(), [self.out.product(&buffers[3], out)]);
        }
        buffers.into_iter().for_each(|buffer| compute.recycle(buffer));
        done
    }

    /// Projects into the first three buffers, and writes the attention output to the fourth.
    fn attend(
        &self,
        input: &MultiHeadInput<'_>,
        memory: &Memory<'_>,
        buffers: &mut [crate::compute::Buffer; 6],
        beside: Beside<'_>,
        compute: &mut Compute,
    ) -> Result<(), Error> {
        let [q, k, v, attended, q_projected, k_projected] = buffers;
        let [to_q, to_k] =
            if self.norms.is_some() { [&mut *q_projected, &mut *k_projected] } else { [&mut *q, &mut *k] };
        share::multiply(
            compute.exec(),
            [self.q.product(input.x, to_q), self.k.product(memory.keys, to_k), self.v.product(memory.values, v)],
        );
        if let Some([q_norm, k_norm]) = &self.norms {
            q_norm.forward(q_projected, q, compute)?;
            k_norm.forward(k_projected, k, compute)?;
        }
        let rows = q.len() / self.q.outputs();
        let keys = k.len() / self.k.outputs();
        let (heads, key_heads) = ([self.heads, self.key_dim], [self.kv_heads, self.key_dim]);
        if let Some(rope) = &self.rope {
            let mut lens = compute.lengths();
            let start = match &beside {
                Beside::Cache(cache, parts) => {
                    lens.extend(parts.lens(cache));
                    Start::Each(&lens)
                }
                _ => Start::At(0),
            };
            rope.rotate(q, heads, input.sequences, start, compute)?;
            rope.rotate(k, key_heads, memory.sequences, start, compute)?;
            compute.recycle_lengths(lens);
        }
        let q = View::blhd(q, input.sequences.stored(rows, heads))?;
        let k = View::blhd(k, memory.sequences.stored(keys, key_heads))?;
        let v = View::blhd(v, memory.sequences.stored(keys, [self.kv_heads, self.value_dim]))?;
        let attended = ViewMut::blhd(attended, input.sequences.stored(rows, [self.heads, self.value_dim]))?;
        let mut attention = self.precision.map_or(self.attention, |precision| self.attention.precision(precision));
        let mut outputs = Outputs::new(attended);
        let inputs = match beside {
            Beside::Cache(cache, parts) => {
                self.check_decodes()?;
                parts.append(cache, k, v)?;
                attention = attention.align(Alignment::BottomRight);
                parts.of(Inputs::cached(q, cache))
            }
            Beside::Weights(weights) => {
                outputs = outputs.weights(weights);
                divided(Inputs::new(q, k, v), input.sequences, memory.sequences)?
            }
            Beside::Nothing => divided(Inputs::new(q, k, v), input.sequences, memory.sequences)?,
        };
        compute.attend(attention.problem(self.with_options(inputs, input), outputs)?)
    }

    /// Adds positions, lengths and masks of the layer and its input to the inputs of attention.
    fn with_options<'a>(&'a self, mut inputs: Inputs<'a>, input: &MultiHeadInput<'a>) -> Inputs<'a> {
        if let Some(slopes) = &self.alibi {
            inputs = inputs.alibi(slopes);
        }
        if let Some(logits) = &self.sinks {
            inputs = inputs.sinks(logits);
        }
        if let Some(bias) = input.bias {
            inputs = inputs.bias(bias);
        }
        if let Some(lens) = input.kv_lens {
            inputs = inputs.kv_lens(lens);
        }
        if let Some(mask) = input.mask {
            inputs = inputs.mask(mask);
        }
        inputs
    }
}

/// Divides queries and keys into sequences.
fn divided<'a>(inputs: Inputs<'a>, x: Sequences<'a>, keys: Sequences<'a>) -> Result<Inputs<'a>, Error> {
    match (x, keys) {
        (Sequences::Ragged(q), Sequences::Ragged(k)) => Ok(inputs.ragged(q, k)),
        (Sequences::Even { .. }, Sequences::Even { .. }) => Ok(inputs),
        _ => Err(Error::Needs { argument: "ragged sequences", needs: "x and the keys to be ragged, both" }),
    }
}
