//! The decoder: a small GPT on letters. Its weights are those that the example `write` of `adapters/candle` has learned, or random
//! ones of any size.

use crate::Result;
use safetensors::SafeTensors;
use sdpa::{Attention, Error, LayerCaches};
use sdpa_layers::{
    Activation, Compute, Embedding, FeedForward, Linear, MultiHeadAttention, NextRows, Norm, NormOrder,
    SafeTensorsFile, Sequences, Start, TensorSource, Transformer, TransformerLayer, Weights,
};

/// Letters of the trained decoder, by number. The first begins every line.
const LETTERS: &str = "\n abcdefghijklmnopqrstuvwxyz.";
/// The trained decoder: 0.6 million weights, in f16.
const TRAINED: &[u8] = include_bytes!("../models/letters.safetensors");
/// Added to the mean square of a row, by all norms.
const EPS: f32 = 1e-6;

/// Sizes of a decoder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Size {
    /// Number of layers.
    pub layers: usize,
    /// Width of the residual stream.
    pub width: usize,
    /// Number of heads.
    pub heads: usize,
    /// Width between the projections of the feed-forward.
    pub hidden: usize,
    /// Largest number of tokens of a text, its prompt included.
    pub context: usize,
}

/// A decoder on letters: RMS norms before each part, sinusoidal positions, ReLU, no biases.
#[derive(Debug)]
pub struct Decoder {
    embedding: Embedding,
    positions: Embedding,
    transformer: Transformer,
    head: Linear,
}

impl Decoder {
    /// The trained decoder: three layers of width 128 and texts of up to 512 letters.
    ///
    /// # Errors
    /// If the file is not what it was when this was written.
    pub fn trained() -> Result<Self> {
        let (_, metadata) = SafeTensors::read_metadata(TRAINED)?;
        let header = metadata.metadata().clone().unwrap_or_default();
        let size = |name: &str| -> Result<usize> {
            Ok(header.get(name).ok_or_else(|| format!("{name}: not in the decoder's header"))?.parse()?)
        };
        let file = SafeTensorsFile::new(TRAINED)?;
        let layers = (0..).take_while(|n| file.contains(&format!("layer.{n}.self.q.weight"))).count();
        let shape = |name: &str| -> Result<Vec<usize>> {
            Ok(file.tensor(name)?.ok_or_else(|| format!("{name}: no such tensor"))?.shape().to_vec())
        };
        let &[hidden, width] = &shape("layer.0.feed_forward.up.weight")?[..] else {
            return Err("up: no matrix".into());
        };
        let size = Size { layers, width, heads: size("heads")?, hidden, context: size("context")? };
        Self::new(size, &Source::File(file))
    }

    /// A decoder with random weights, the same for the same seed: it writes nonsense, at the speed of its size.
    ///
    /// # Errors
    /// If the sizes do not fit together.
    pub fn random(size: Size, seed: u64) -> Result<Self> {
        Self::new(size, &Source::Random(seed))
    }

    fn new(size: Size, source: &Source) -> Result<Self> {
        let Size { layers, width, heads, hidden, context } = size;
        let layer = |n: usize| -> Result<TransformerLayer> {
            let linear = |name: &str, shape| source.linear(&format!("layer.{n}.{name}.weight"), shape);
            let norm = |name: &str| source.norm(&format!("layer.{n}.{name}.norm.weight"), width);
            let square = |name: &str| linear(&format!("self.{name}"), [width, width]);
            let projections = [square("q")?, square("k")?, square("v")?, square("out")?];
            let attention = MultiHeadAttention::new([heads; 2], projections)?.attention(Attention::new().causal());
            let (up, down) =
                (linear("feed_forward.up", [hidden, width])?, linear("feed_forward.down", [width, hidden])?);
            let feed_forward = FeedForward::new(Activation::Relu, up, down)?;
            let parts = ((attention, norm("self")?), (feed_forward, norm("feed_forward")?));
            Ok(TransformerLayer::encoder(NormOrder::Pre, parts.0, parts.1)?)
        };
        let layers = (0..layers).map(layer).collect::<Result<_>>()?;
        Ok(Self {
            embedding: Embedding::new(source.take("embedding.weight", [LETTERS.len(), width])?, width)?,
            positions: Embedding::sinusoidal(context, width)?,
            transformer: Transformer::new(layers)?.norm(source.norm("norm.weight", width)?)?,
            head: source.linear("head.weight", [LETTERS.len(), width])?,
        })
    }

    /// Tokens of a text: that which begins a line, then one for each letter.
    ///
    /// # Errors
    /// If the text has a letter that the decoder does not know.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        let number = |letter: char| match LETTERS.find(letter) {
            Some(number) => Ok(number as u32),
            None => Err(format!("{letter:?}: not a letter of this decoder, which knows {LETTERS:?}").into()),
        };
        [Ok(0)].into_iter().chain(text.chars().map(number)).collect()
    }

    /// Letter of a token; its number is below that of the letters.
    pub fn letter(&self, token: u32) -> char {
        char::from(LETTERS.as_bytes()[token as usize])
    }

    /// Number of letters.
    pub fn letters(&self) -> usize {
        LETTERS.len()
    }

    /// Width of a row.
    pub fn width(&self) -> usize {
        self.transformer.width()
    }

    /// Largest number of tokens of a text, its prompt included.
    pub fn context(&self) -> usize {
        self.positions.entries()
    }

    /// Layers of the decoder.
    pub fn transformer(&self) -> &Transformer {
        &self.transformer
    }

    /// Writes the row of each token to `x`, `[tokens, width]`. `starts` has the position of each sequence's first token.
    ///
    /// # Errors
    /// As [`Embedding::look_up`] and [`Embedding::add_positions`].
    pub fn embed(
        &self,
        tokens: &[u32],
        (ends, starts): (&[usize], &[usize]),
        x: &mut [f32],
        compute: &mut Compute,
    ) -> std::result::Result<(), Error> {
        self.embedding.look_up(tokens, x, compute)?;
        self.positions.add_positions(x, Sequences::Ragged(ends), Start::Each(starts), compute)
    }

    /// Runs the layers on the next rows of some sequences.
    ///
    /// # Errors
    /// As [`Transformer::decode_ragged`].
    pub fn advance(
        &self,
        next: NextRows<'_>,
        caches: &mut LayerCaches,
        out: &mut [f32],
        compute: &mut Compute,
    ) -> std::result::Result<(), Error> {
        self.transformer.decode_ragged(next, caches, out, compute)
    }

    /// Writes the logits of what follows each row, `[rows, letters]`.
    ///
    /// # Errors
    /// As [`Linear::forward`].
    pub fn logits(&self, rows: &[f32], out: &mut [f32], compute: &mut Compute) -> std::result::Result<(), Error> {
        self.head.forward(rows, out, compute)
    }
}

/// Source of weights.
enum Source {
    File(SafeTensorsFile<'static>),
    /// Normal numbers of a seed.
    Random(u64),
}

impl Source {
    fn take<const N: usize>(&self, name: &str, shape: [usize; N]) -> Result<Vec<f32>> {
        match self {
            Self::File(file) => {
                let tensor = file.tensor(name)?.ok_or_else(|| format!("{name}: no such tensor"))?;
                if tensor.shape() != shape {
                    return Err(format!("{name}: shape is {:?}, but must be {shape:?}", tensor.shape()).into());
                }
                Ok(tensor.data().to_vec())
            }
            Self::Random(seed) => {
                // Even between −√3 and √3, so that the variance is 1; a row keeps its length from layer to layer.
                let spread = 3f32.sqrt() / (shape[N - 1] as f32).sqrt();
                let mut state =
                    name.bytes().fold(*seed, |hash, byte| hash.wrapping_mul(31).wrapping_add(byte.into())) | 1;
                Ok((0..shape.iter().product()).map(|_| spread * even(&mut state)).collect())
            }
        }
    }

    fn linear(&self, name: &str, shape: [usize; 2]) -> Result<Linear> {
        Ok(Linear::new(Weights::rows(&self.take(name, shape)?, shape)?))
    }

    fn norm(&self, name: &str, width: usize) -> Result<Norm> {
        let gain = match self {
            Self::File(_) => self.take(name, [width])?,
            Self::Random(_) => vec![1.0; width],
        };
        Ok(Norm::rms(gain, EPS)?)
    }
}

/// Even between −1 and 1 (xorshift64, Marsaglia 2003).
fn even(state: &mut u64) -> f32 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    (*state >> 40) as f32 / (1u32 << 23) as f32 - 1.0
}
