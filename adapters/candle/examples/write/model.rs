//! A small GPT: a causal stack over letters.

use crate::text::{LENGTH, letters};
use crate::training::{Attend, FeedForward, MultiHead, Norm, Visible, positions, projection};
use candle_core::{D, Device, Module, Result, Tensor};
use candle_nn::{Embedding, Linear, VarBuilder, embedding, loss, ops};
use rand::Rng;
use rand::distr::{Distribution, weighted::WeightedIndex};

const WIDTH: usize = 128;
pub(crate) const HEADS: usize = 4;
const HIDDEN: usize = 512;
const LAYERS: usize = 3;

pub(crate) struct Gpt {
    embedding: Embedding,
    positions: Tensor,
    layers: Vec<(MultiHead, FeedForward)>,
    norm: Norm,
    head: Linear,
}

impl Gpt {
    pub(crate) fn new(attend: Attend, vars: &VarBuilder<'_>) -> Result<Self> {
        let layer = |n: usize| {
            let vars = vars.pp("layer").pp(n);
            let attention = MultiHead::new(attend, WIDTH, HEADS, &vars.pp("self"))?;
            Ok((attention, FeedForward::new(WIDTH, HIDDEN, &vars.pp("feed_forward"))?))
        };
        Ok(Self {
            embedding: embedding(letters(), WIDTH, vars.pp("embedding"))?,
            positions: positions(LENGTH, WIDTH)?,
            layers: (0..LAYERS).map(layer).collect::<Result<_>>()?,
            norm: Norm::new(WIDTH, vars.pp("norm"))?,
            head: projection(WIDTH, letters(), vars.pp("head"))?,
        })
    }

    /// Mean cross-entropy of every letter but the first of each row, `[rows, LENGTH + 1]`.
    pub(crate) fn loss(&self, rows: &Tensor) -> Result<Tensor> {
        let (given, next) = (rows.narrow(1, 0, LENGTH)?, rows.narrow(1, 1, LENGTH)?);
        let causal = Visible::causal(LENGTH)?;
        let mut x = self.embedding.forward(&given)?.broadcast_add(&self.positions)?;
        for (attention, feed_forward) in &self.layers {
            let normed = attention.norm.forward(&x)?;
            x = feed_forward.forward(&(x + attention.forward(&normed, &normed, &causal)?)?)?;
        }
        let logits = self.head.forward(&self.norm.forward(&x)?)?;
        loss::cross_entropy(&logits.flatten(0, 1)?, &next.flatten_all()?)
    }

    /// Writes a row of letters after a beginning, each drawn by its probability; keys and values are in caches.
    pub(crate) fn write(&self, beginning: &[u32], rng: &mut impl Rng) -> Result<Vec<u32>> {
        let mut caches = self.layers.iter().map(|(attention, _)| attention.cache(1)).collect::<Result<Vec<_>>>()?;
        let mut text = beginning.to_vec();
        for position in 0..LENGTH {
            let letter = Tensor::new(&text[position..=position], &Device::Cpu)?.unsqueeze(0)?;
            let mut x = self.embedding.forward(&letter)?.broadcast_add(&self.positions.narrow(0, position, 1)?)?;
            for ((attention, feed_forward), cache) in self.layers.iter().zip(&mut caches) {
                let normed = attention.norm.forward(&x)?;
                attention.append(&normed, cache)?;
                x = feed_forward.forward(&(x + attention.cached(&normed, cache)?)?)?;
            }
            if position + 1 == text.len() {
                let logits = self.head.forward(&self.norm.forward(&x)?)?;
                let weights = ops::softmax(&logits, D::Minus1)?.flatten_all()?.to_vec1::<f32>()?;
                let next = WeightedIndex::new(weights).map_err(candle_core::Error::wrap)?;
                text.push(next.sample(rng) as u32);
            }
        }
        Ok(text)
    }
}
