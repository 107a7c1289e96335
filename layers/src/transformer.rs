//! Transformer layers: attention and feed-forward on a residual stream.

mod precision;

use crate::compute::{Buffer, Compute};
use crate::error::same;
use crate::feed_forward::FeedForward;
use crate::layer_input::LayerInput;
use crate::linear::{check_rows, rows_of};
use crate::multi_head::{MultiHeadAttention, MultiHeadInput};
use crate::next_rows::{NextRows, Parts};
use crate::norm::Norm;
use crate::share::{self, RowSlice};
use sdpa::{Error, KvCache, LayerCaches};

/// Cost of adding a number, in the operations that [`sdpa::Exec`] counts: the time of memory.
const COST: f64 = 8.0;

/// Position of the norms.
///
/// ```
/// use sdpa_layers::NormOrder;
/// let order = |norm_first: bool| if norm_first { NormOrder::Pre } else { NormOrder::Post }; // of PyTorch's layers
/// assert_eq!(order(false), NormOrder::Post);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum NormOrder {
    /// Before each part, x + part(norm(x)): GPT-2, Llama (Xiong et al. 2020, arXiv:2002.04745).
    Pre,
    /// After each sum, norm(x + part(x)): the original, and BERT (Vaswani et al. 2017, arXiv:1706.03762).
    Post,
}

/// Transformer layer: self-attention, in a decoder cross-attention, and feed-forward, each on a residual stream, with a
/// norm before or after it.
///
/// Causality and positions are settings of the attention ([`MultiHeadAttention::attention`],
/// [`MultiHeadAttention::rope`]): an encoder layer with causal attention is a block of GPT-2; with [`Norm::rms`],
/// rotary positions and a gated [`FeedForward`] it is one of Llama.
///
/// Besides the memory of its parts, a call takes three times the memory of x, from its [`Compute`]. To the bit, a
/// sequence's results do not depend on other sequences of the batch.
///
/// ```
/// use sdpa::Attention;
/// use sdpa_layers::{
///     Activation, Compute, FeedForward, LayerInput, Linear, MultiHeadAttention, Norm, NormOrder, Sequences,
///     TransformerLayer, Weights,
/// };
/// // Width 4, two heads, hidden width 8; weights that come to nothing
/// let linear = |outputs, inputs| Weights::rows(&[0.0; 32][..outputs * inputs], [outputs, inputs]).map(Linear::new);
/// let attention = MultiHeadAttention::new([2, 2], [linear(4, 4)?, linear(4, 4)?, linear(4, 4)?, linear(4, 4)?])?
///     .attention(Attention::new().causal());
/// let feed_forward = FeedForward::new(Activation::Gelu, linear(8, 4)?, linear(4, 8)?)?;
/// let norm = || Norm::layer([1.0; 4], 1e-5);
/// let layer = TransformerLayer::encoder(NormOrder::Pre, (attention, norm()?), (feed_forward, norm()?))?;
/// let (x, mut out) = ([1.0; 3 * 4], [0.0; 3 * 4]);
/// layer.forward(LayerInput::new(&x, Sequences::one(3)), &mut out, &mut Compute::default())?;
/// assert_eq!(out, x); // the stream, and nothing added to it
/// # Ok::<(), sdpa::Error>(())
/// ```
#[derive(Debug)]
#[doc(alias = "EncoderLayer", alias = "DecoderLayer")]
pub struct TransformerLayer {
    order: NormOrder,
    own: (MultiHeadAttention, Norm),
    cross: Option<(MultiHeadAttention, Norm)>,
    feed_forward: (FeedForward, Norm),
}

impl TransformerLayer {
    /// Encoder layer: self-attention, then feed-forward, each with its norm.
    ///
    /// # Errors
    /// [`Error::Mismatch`] unless all parts are as wide as the first norm.
    pub fn encoder(
        order: NormOrder,
        own: (MultiHeadAttention, Norm),
        feed_forward: (FeedForward, Norm),
    ) -> Result<Self, Error> {
        let width = own.1.width();
        let of = "the norm of the self-attention";
        check_attention("self-attention", &own, width)?;
        for (what, keys) in ["width of keys", "width of values"].into_iter().zip(own.0.memory_inputs()) {
            same("self-attention", what, keys, width, of)?;
        }
        same("feed-forward", "inputs", feed_forward.0.inputs(), width, of)?;
        same("feed-forward", "outputs", feed_forward.0.outputs(), width, of)?;
        same("norm of the feed-forward", "width", feed_forward.1.width(), width, of)?;
        Ok(Self { order, own, cross: None, feed_forward })
    }

    /// Decoder layer: self-attention, then attention to a memory, then feed-forward, each with its norm. The memory is
    /// as wide as the inputs of the cross-attention's keys and values.
    ///
    /// # Errors
    /// [`Error::Mismatch`] unless all parts are as wide as the first norm.
    pub fn decoder(
        order: NormOrder,
        own: (MultiHeadAttention, Norm),
        cross: (MultiHeadAttention, Norm),
        feed_forward: (FeedForward, Norm),
    ) -> Result<Self, Error> {
        check_attention("cross-attention", &cross, own.1.width())?;
        let [keys, values] = cross.0.memory_inputs();
        same("cross-attention", "width of values", values, keys, "its keys")?;
        Ok(Self { cross: Some(cross), ..Self::encoder(order, own, feed_forward)? })
    }

    /// Width of the rows of x and of `out`.
    pub fn width(&self) -> usize {
        self.own.1.width()
    }

    /// Writes a row of `out` for each row of x, `[rows, width]` both.
    ///
    /// # Errors
    /// Any [`Error`]; [`Error::Needs`] if the layer has cross-attention. `out` is then untouched.
    pub fn forward(&self, x: LayerInput<'_>, out: &mut [f32], compute: &mut Compute) -> Result<(), Error> {
        run(core::slice::from_ref(self), None, Call::new(x), out, compute)
    }

    /// Writes a row of `out` for each row of x, `[rows, width]` both, as [`Self::forward`] does, with cross-attention to
    /// `memory`: the rows of an encoder's output, divided into the same number of sequences as x.
    ///
    /// # Errors
    /// Any [`Error`]; [`Error::Needs`] if the layer has no cross-attention. `out` is then untouched.
    pub fn forward_with_memory(
        &self,
        x: LayerInput<'_>,
        memory: LayerInput<'_>,
        out: &mut [f32],
        compute: &mut Compute,
    ) -> Result<(), Error> {
        run(core::slice::from_ref(self), None, Call::new(x).memory(memory), out, compute)
    }

    /// Self-attention of the layer.
    pub fn self_attention(&self) -> &MultiHeadAttention {
        &self.own.0
    }

    /// Cross-attention of the layer, if it has one.
    pub fn cross_attention(&self) -> Option<&MultiHeadAttention> {
        self.cross.as_ref().map(|(attention, _)| attention)
    }

    /// Advances the stream, which is the first of three buffers of one size, by one layer.
    fn advance(
        &self,
        buffers: &mut [Buffer; 3],
        (x, memory): (LayerInput<'_>, Option<LayerInput<'_>>),
        cache: Option<(&mut KvCache, Parts<'_>)>,
        compute: &mut Compute,
    ) -> Result<(), Error> {
        let cross = match (&self.cross, memory) {
            (Some((attention, norm)), Some(memory)) => Some((Part::Cross(attention, x, memory), norm)),
            (None, None) => None,
            (Some(_), None) => return Err(Error::Needs { argument: "cross-attention", needs: "a memory" }),
            (None, Some(_)) => return Err(Error::Needs { argument: "memory", needs: "a layer with cross-attention" }),
        };
        let own = match cache {
            None => Part::Own(&self.own.0, x),
            Some((cache, parts)) => Part::Cached(&self.own.0, cache, parts),
        };
        let own = Some((own, &self.own.1));
        let feed_forward = Some((Part::FeedForward(&self.feed_forward.0), &self.feed_forward.1));
        for (part, norm) in [own, cross, feed_forward].into_iter().flatten() {
            let [stream, normed, result] = &mut *buffers;
            match self.order {
                NormOrder::Pre => {
                    norm.forward(stream, normed, compute)?;
                    part.forward(normed, result, compute)?;
                    add(stream, result, self.width(), compute);
                }
                NormOrder::Post => {
                    part.forward(stream, result, compute)?;
                    norm.add_and_forward(result, stream, normed, compute)?;
                    buffers.swap(0, 1);
                }
            }
        }
        Ok(())
    }
}

fn check_attention(
    argument: &'static str,
    (attention, norm): &(MultiHeadAttention, Norm),
    width: usize,
) -> Result<(), Error> {
    let of = "the norm of the self-attention";
    same(argument, "inputs", attention.inputs(), width, of)?;
    same(argument, "outputs", attention.outputs(), width, of)?;
    Ok(same("norm of the cross-attention", "width", norm.width(), width, of)?)
}

/// Stack of transformer layers, with an optional norm of the result: an encoder, a decoder, or a language model without
/// its embedding tables.
///
/// ```
/// # use sdpa_layers::{Activation, FeedForward, Linear, MultiHeadAttention, NormOrder, TransformerLayer, Weights};
/// use sdpa_layers::{Compute, LayerInput, Norm, Sequences, Transformer};
/// # let linear = |outputs, inputs| Weights::rows(&[0.0; 32][..outputs * inputs], [outputs, inputs]).map(Linear::new);
/// # let layer = || {
/// #     let attention = MultiHeadAttention::new([2, 2], [linear(4, 4)?, linear(4, 4)?, linear(4, 4)?, linear(4, 4)?])?;
/// #     let feed_forward = FeedForward::new(Activation::Gelu, linear(8, 4)?, linear(4, 8)?)?;
/// #     let norm = || Norm::layer([1.0; 4], 1e-5);
/// #     TransformerLayer::encoder(NormOrder::Pre, (attention, norm()?), (feed_forward, norm()?))
/// # };
/// // Two layers of width 4 with weights that come to nothing
/// let encoder = Transformer::new(vec![layer()?, layer()?])?.norm(Norm::rms([1.0; 4], 0.0)?)?;
/// let (x, mut out) = ([2.0; 3 * 4], [0.0; 3 * 4]);
/// encoder.forward(LayerInput::new(&x, Sequences::one(3)), &mut out, &mut Compute::default())?;
/// assert_eq!(out, [1.0; 3 * 4]);
/// # Ok::<(), sdpa::Error>(())
/// ```
#[derive(Debug)]
#[doc(alias = "Encoder", alias = "Decoder")]
pub struct Transformer {
    layers: Vec<TransformerLayer>,
    norm: Option<Norm>,
}

impl Transformer {
    /// Takes the layers, first to last.
    ///
    /// # Errors
    /// [`Error::Empty`] if there are no layers, [`Error::Mismatch`] unless they all have one width.
    pub fn new(layers: Vec<TransformerLayer>) -> Result<Self, Error> {
        let Some(first) = layers.first() else {
            return Err(Error::Empty { argument: "transformer", what: "number of layers" });
        };
        for layer in &layers {
            same("layer", "width", layer.width(), first.width(), "the first layer")?;
        }
        Ok(Self { layers, norm: None })
    }

    /// Sets a norm after the last layer, as models with [`NormOrder::Pre`] have it.
    ///
    /// # Errors
    /// [`Error::Mismatch`] unless it is as wide as the layers.
    pub fn norm(self, norm: Norm) -> Result<Self, Error> {
        same("norm", "width", norm.width(), self.width(), "the layers")?;
        Ok(Self { norm: Some(norm), ..self })
    }

    /// Layers, first to last.
    pub fn layers(&self) -> &[TransformerLayer] {
        &self.layers
    }

    /// Width of the rows of x and of `out`.
    pub fn width(&self) -> usize {
        self.layers[0].width()
    }

    /// Writes a row of `out` for each row of x, `[rows, width]` both.
    ///
    /// # Errors
    /// Any [`Error`]; [`Error::Needs`] if a layer has cross-attention. `out` is then untouched.
    pub fn forward(&self, x: LayerInput<'_>, out: &mut [f32], compute: &mut Compute) -> Result<(), Error> {
        run(&self.layers, self.norm.as_ref(), Call::new(x), out, compute)
    }

    /// Computes the next rows of sequences; earlier rows are in these caches, one for each layer.
    pub(super) fn forward_cached(
        &self,
        next: NextRows<'_>,
        caches: &mut LayerCaches,
        out: &mut [f32],
        compute: &mut Compute,
    ) -> Result<(), Error> {
        let x = LayerInput::new(next.rows, next.parts.division);
        let call = Call { caches: Some((caches, next.parts)), ..Call::new(x) };
        run(&self.layers, self.norm.as_ref(), call, out, compute)
    }

    /// Runs only the first `layers` layers, at least one, without the last norm.
    pub(crate) fn forward_to(
        &self,
        layers: usize,
        x: LayerInput<'_>,
        out: &mut [f32],
        compute: &mut Compute,
    ) -> Result<(), Error> {
        run(&self.layers[..layers], None, Call::new(x), out, compute)
    }

    /// Writes a row of `out` for each row of x, `[rows, width]` both, as [`Self::forward`] does, with cross-attention of
    /// every layer to `memory`: the rows of an encoder's output, divided into the same number of sequences as x.
    ///
    /// # Errors
    /// Any [`Error`]; [`Error::Needs`] if a layer has no cross-attention. `out` is then untouched.
    pub fn forward_with_memory(
        &self,
        x: LayerInput<'_>,
        memory: LayerInput<'_>,
        out: &mut [f32],
        compute: &mut Compute,
    ) -> Result<(), Error> {
        run(&self.layers, self.norm.as_ref(), Call::new(x).memory(memory), out, compute)
    }
}

/// Rows of a call, with a memory and caches if it has them.
struct Call<'a> {
    x: LayerInput<'a>,
    memory: Option<LayerInput<'a>>,
    /// Keys and values of earlier rows, if there are any.
    caches: Option<(&'a mut LayerCaches, Parts<'a>)>,
}

impl<'a> Call<'a> {
    fn new(x: LayerInput<'a>) -> Self {
        Self { x, memory: None, caches: None }
    }

    fn memory(self, memory: LayerInput<'a>) -> Self {
        Self { memory: Some(memory), ..self }
    }
}

/// Runs the layers on a separate stream, so that `out` is written only when nothing can fail any more.
fn run(
    layers: &[TransformerLayer],
    norm: Option<&Norm>,
    call: Call<'_>,
    out: &mut [f32],
    compute: &mut Compute,
) -> Result<(), Error> {
    let width = layers[0].width();
    let Call { x, memory, mut caches } = call;
    let rows = rows_of("x", x.rows, width)?;
    check_rows("out", out, rows, width)?;
    let mut buffers = compute.buffers("rows of a layer", [[rows, width]; 3])?;
    buffers[0].copy_from_slice(x.rows);
    let done = layers.iter().enumerate().try_for_each(|(number, layer)| {
        let cache = match &mut caches {
            Some((caches, parts)) => Some((caches.layer_mut(number)?, *parts)),
            None => None,
        };
        layer.advance(&mut buffers, (x, memory), cache, compute)
    });
    let done = done.and_then(|()| match norm {
        Some(norm) => norm.forward(&buffers[0], out, compute),
        None => {
            out.copy_from_slice(&buffers[0]);
            Ok(())
        }
    });
    buffers.into_iter().for_each(|buffer| compute.recycle(buffer));
    done
}

/// Part of a layer: reads rows, and writes the rows that are added to them.
enum Part<'a> {
    Own(&'a MultiHeadAttention, LayerInput<'a>),
    /// Attention with earlier rows in the cache.
    Cached(&'a MultiHeadAttention, &'a mut KvCache, Parts<'a>),
    Cross(&'a MultiHeadAttention, LayerInput<'a>, LayerInput<'a>),
    FeedForward(&'a FeedForward),
}

impl Part<'_> {
    fn forward(self, x: &[f32], out: &mut [f32], compute: &mut Compute) -> Result<(), Error> {
        match self {
            Part::Own(attention, own) => {
                attention.forward(own.keys(MultiHeadInput::new(x, own.sequences)), out, compute)
            }
            Part::Cached(attention, cache, parts) => {
                attention.decode_ragged(NextRows { rows: x, parts }, cache, out, compute)
            }
            Part::Cross(attention, own, memory) => {
                let input = MultiHeadInput::new(x, own.sequences).memory(memory.rows, memory.sequences);
                attention.forward(memory.keys(input), out, compute)
            }
            Part::FeedForward(feed_forward) => feed_forward.forward(x, out, compute),
        }
    }
}

/// `x ← x + add`.
fn add(x: &mut [f32], add: &[f32], width: usize, compute: &mut Compute) {
    let (rows, cost) = (x.len() / width, COST * x.len() as f64);
    share::rows(compute.exec(), rows, cost, (RowSlice(x, width), RowSlice(add, width)), |_, (x, add)| {
        x.0.iter_mut().zip(add.0).for_each(|(x, add)| *x += add);
    });
}
