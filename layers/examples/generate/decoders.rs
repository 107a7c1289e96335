//! Decoders of any size, with random weights.

use sdpa::{Attention, Error};
use sdpa_layers::{
    Activation, FeedForward, Linear, MultiHeadAttention, Norm, NormOrder, Rope, RopePairs, Transformer,
    TransformerLayer, Weights,
};

/// What a layer is made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Family {
    /// Layer norms, biases, GELU.
    Gpt2,
    /// RMS norms, rotary positions, a gate.
    Llama,
}

/// A decoder's sizes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Size {
    pub(crate) family: Family,
    pub(crate) layers: usize,
    /// Query heads, key/value heads.
    pub(crate) heads: [usize; 2],
    pub(crate) head_dim: usize,
    /// Between the projections of the feed-forward.
    pub(crate) hidden: usize,
}

impl Size {
    /// Of the residual stream.
    pub(crate) fn width(&self) -> usize {
        self.heads[0] * self.head_dim
    }

    /// Numbers that a token reads of the layers' matrices.
    pub(crate) fn weights(&self) -> usize {
        let [heads, kv_heads] = self.heads;
        let attention = 2 * (heads + kv_heads) * self.head_dim * self.width();
        let matrices = if self.family == Family::Llama { 3 } else { 2 };
        self.layers * (attention + matrices * self.hidden * self.width())
    }

    /// Numbers that a token reads of keys and values, its own included.
    pub(crate) fn keys_and_values(&self, past: usize) -> usize {
        self.layers * 2 * self.heads[1] * self.head_dim * (past + 1)
    }

    pub(crate) fn name(&self) -> String {
        let [heads, kv_heads] = self.heads;
        let family = if self.family == Family::Llama { "Llama" } else { "GPT-2" };
        format!("{family}, {heads}/{kv_heads} heads")
    }

    /// What decoders of one picture have in common.
    pub(crate) fn shared(&self) -> String {
        format!("{} layers of width {}, heads of {}", self.layers, self.width(), self.head_dim)
    }

    /// The decoder, for so many positions. Matrices are parts of one pool of random numbers.
    pub(crate) fn decoder(&self, positions: usize) -> Result<Transformer, Error> {
        let (width, pool) = (self.width(), self.pool());
        let mut start = 0;
        let mut linear = |outputs: usize, inputs: usize| {
            start = (start + 977) % SPARE; // no matrix is another
            let weights = Weights::rows(&pool[start..start + outputs * inputs], [outputs, inputs])?;
            let biased = self.family == Family::Gpt2;
            Ok::<_, Error>(Linear::new(if biased { weights.bias(&pool[..outputs])? } else { weights }))
        };
        let norm = || match self.family {
            Family::Gpt2 => Norm::layer(vec![1.0; width], 1e-5)?.bias(vec![0.0; width]),
            Family::Llama => Norm::rms(vec![1.0; width], 1e-6),
        };
        let rope = Rope::new(positions, self.head_dim, 10_000.0, RopePairs::Half)?;
        let mut layer = || {
            let kv_width = self.heads[1] * self.head_dim;
            let projections =
                [linear(width, width)?, linear(kv_width, width)?, linear(kv_width, width)?, linear(width, width)?];
            let attention = MultiHeadAttention::new(self.heads, projections)?.attention(Attention::new().causal());
            let up = linear(self.hidden, width)?;
            let (attention, feed_forward) = match self.family {
                Family::Gpt2 => (attention, FeedForward::new(Activation::GeluTanh, up, linear(width, self.hidden)?)?),
                Family::Llama => {
                    let (gate, down) = (linear(self.hidden, width)?, linear(width, self.hidden)?);
                    (attention.rope(rope.clone())?, FeedForward::gated(Activation::Silu, gate, up, down)?)
                }
            };
            TransformerLayer::encoder(NormOrder::Pre, (attention, norm()?), (feed_forward, norm()?))
        };
        let layers = (0..self.layers).map(|_| layer()).collect::<Result<_, _>>()?;
        Transformer::new(layers)?.norm(norm()?)
    }

    /// Room for the largest matrix at any place that it may start from; about as far spread as trained weights are.
    fn pool(&self) -> Vec<f32> {
        let largest = self.width() * self.hidden.max(self.width());
        random(SPARE + largest).map(|x| x * (3.0 / self.width() as f32).sqrt()).collect()
    }
}

/// Places at which a matrix may start in the pool.
const SPARE: usize = 1 << 16;

/// Even between −1 and 1, the same each time (xorshift64, Marsaglia 2003).
pub(crate) fn random(n: usize) -> impl Iterator<Item = f32> {
    let mut bits = 0x9e37_79b9_7f4a_7c15_u64;
    (0..n).map(move |_| {
        bits ^= bits << 13;
        bits ^= bits >> 7;
        bits ^= bits << 17;
        (bits >> 40) as f32 / (1u32 << 23) as f32 - 1.0
    })
}
