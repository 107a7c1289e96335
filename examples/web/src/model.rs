//! Models with attention that the page shows: the translator's encoder, which is part of this module, or a BERT from its files.

use sdpa_layers::{
    Bert, BertConfig, BertInput, Compute, Embedding, Linear, ModelError, Norm, Sequences, Tensor, TensorSource, Weights,
};
use std::error::Error;

pub(crate) type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// First attention of the translator's encoder, rounded (`build.rs`).
const WORDS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/words.bin"));

/// Words of the translator by number, separated by spaces; the first is the mark of the end.
pub(crate) const NAMES: &str = include_str!(concat!(env!("OUT_DIR"), "/words.txt"));

/// Longest text of the translator's words, in tokens.
const POSITIONS: usize = 512;

const EPS: f32 = 1e-6;

/// Projections to queries, keys and values of one layer.
type Projections = [Linear; 3];

/// Model up to the projections of each layer's attention.
#[derive(Debug)]
pub(crate) struct Model {
    layers: Vec<Projections>,
    heads: usize,
    states: States,
    compute: Compute<'static>,
}

/// Part of a model that makes the rows which the projections read.
#[derive(Debug)]
enum States {
    Words { tokens: Embedding, positions: Embedding, norm: Norm },
    Bert(Bert),
}

impl Model {
    /// Reads the words of the translator and the first layer of its encoder.
    pub(crate) fn words() -> Result<Self> {
        let mut rest = WORDS;
        let mut next = || matrix(&mut rest).ok_or("words.bin ends early");
        let [(table, width), (gains, _)] = [next()?, next()?];
        let states = States::Words {
            tokens: Embedding::new(table, width)?,
            positions: Embedding::sinusoidal(POSITIONS, width)?,
            norm: Norm::rms(gains, EPS)?,
        };
        let mut projection = || -> Result<Linear> {
            let (weights, inputs) = next()?;
            Ok(Linear::new(Weights::rows(&weights, [weights.len() / inputs, inputs])?))
        };
        let layers = vec![[projection()?, projection()?, projection()?]];
        Ok(Self { layers, heads: env!("HEADS").parse()?, states, compute: Compute::default() })
    }

    /// Makes a BERT of its sizes and its tensors.
    pub(crate) fn bert(sizes: BertConfig, tensors: &Tensors) -> Result<Self> {
        let (heads, number) = (sizes.num_attention_heads, sizes.num_hidden_layers);
        // It says which tensors are missing or do not fit.
        let states = States::Bert(Bert::new(sizes, tensors)?);
        let layer =
            |n| Ok([tensors.projection(n, "query")?, tensors.projection(n, "key")?, tensors.projection(n, "value")?]);
        let layers = (0..number).map(layer).collect::<Result<_>>()?;
        Ok(Self { layers, heads, states, compute: Compute::default() })
    }

    pub(crate) fn layers(&self) -> usize {
        self.layers.len()
    }

    pub(crate) fn heads(&self) -> usize {
        self.heads
    }

    /// Queries, keys and values of a layer, each `[tokens, width]`; their columns are the heads, one after another.
    pub(crate) fn project(&mut self, layer: usize, tokens: &[u32]) -> Result<[Vec<f32>; 3]> {
        let projections = self.layers.get(layer).ok_or("there is no such layer")?;
        let states = self.states.rows(layer, tokens, &mut self.compute)?;
        let mut parts = [const { Vec::new() }; 3];
        for (part, projection) in parts.iter_mut().zip(projections) {
            part.resize(tokens.len() * projection.outputs(), 0.0);
            projection.forward(&states, part, &mut self.compute)?;
        }
        Ok(parts)
    }
}

impl States {
    /// Rows that the projections of a layer read, `[tokens, width]`.
    fn rows(&self, layer: usize, tokens: &[u32], compute: &mut Compute<'_>) -> Result<Vec<f32>> {
        let sequences = Sequences::one(tokens.len());
        match self {
            States::Words { tokens: table, positions, norm } => {
                let mut x = vec![0.0; tokens.len() * table.width()];
                table.look_up(tokens, &mut x, compute)?;
                positions.add_positions(&mut x, sequences, 0, compute)?;
                let mut normed = vec![0.0; x.len()];
                norm.forward(&x, &mut normed, compute)?;
                Ok(normed)
            }
            States::Bert(bert) => {
                let mut x = vec![0.0; tokens.len() * bert.width()];
                bert.forward_to(layer, BertInput::new(tokens, sequences), &mut x, compute)?;
                Ok(x)
            }
        }
    }
}

/// Tensors of a model's file, which JavaScript takes apart: its own JSON costs the page nothing.
#[derive(Debug, Default)]
pub(crate) struct Tensors(Vec<(String, Tensor<'static>)>);

impl Tensors {
    pub(crate) const fn new() -> Self {
        Self(Vec::new())
    }

    pub(crate) fn add(&mut self, name: String, tensor: Tensor<'static>) {
        self.0.push((name, tensor));
    }

    fn find(&self, name: &str) -> Option<&Tensor<'static>> {
        self.0.iter().find(|(found, _)| found == name).map(|(_, tensor)| tensor)
    }

    fn projection(&self, layer: usize, part: &str) -> Result<Linear> {
        let prefix = if self.contains("bert.embeddings.word_embeddings.weight") { "bert." } else { "" };
        let [weight, bias] = ["weight", "bias"].map(|end| {
            let name = format!("{prefix}encoder.layer.{layer}.attention.self.{part}.{end}");
            self.find(&name).ok_or(ModelError::Missing { tensor: name })
        });
        let (weight, bias) = (weight?.data(), bias?.data());
        Ok(Linear::new(Weights::rows(weight, [bias.len(), weight.len() / bias.len().max(1)])?.bias(bias)?))
    }
}

impl TensorSource for Tensors {
    fn tensor(&self, name: &str) -> std::result::Result<Option<Tensor<'_>>, ModelError> {
        Ok(self.find(name).map(|tensor| Tensor::new(tensor.shape(), tensor.data())).transpose()?)
    }

    fn contains(&self, name: &str) -> bool {
        self.find(name).is_some()
    }
}

/// Takes a matrix of rounded numbers off the front, as `build.rs` writes it; returns them, row by row, and its width.
fn matrix(from: &mut &[u8]) -> Option<(Vec<f32>, usize)> {
    let mut four = || from.split_off(..4).and_then(|bytes| bytes.first_chunk().copied());
    let [rows, width] = [four()?, four()?].map(|bytes| u32::from_le_bytes(bytes) as usize);
    let mut numbers = Vec::with_capacity(rows * width);
    for _ in 0..rows {
        let scale = f32::from_le_bytes(*from.split_off(..4)?.first_chunk()?);
        numbers.extend(from.split_off(..width)?.iter().map(|&byte| scale * f32::from(byte as i8)));
    }
    Some((numbers, width))
}
