//! The translator: an encoder of English, a decoder of French that looks at its states.

use crate::corpus::Batch;
use crate::training::{Attend, FeedForward, MultiHead, Norm, Visible, positions, projection};
use crate::words::{END, POSITIONS};
use candle_core::{D, Device, Module, Result, Tensor};
use candle_nn::{Embedding, Linear, VarBuilder, embedding, loss};
use sdpa_candle::KvCache;

/// Sizes of a translator.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sizes {
    /// Words of English and of French.
    pub(crate) words: [usize; 2],
    pub(crate) width: usize,
    pub(crate) heads: usize,
    /// Between the projections of the feed-forward.
    pub(crate) hidden: usize,
    /// Layers of encoder and decoder, each.
    pub(crate) layers: usize,
}

pub(crate) struct Translator {
    embeddings: [Embedding; 2],
    positions: Tensor,
    encoder: Vec<EncoderLayer>,
    encoder_norm: Norm,
    decoder: Vec<DecoderLayer>,
    decoder_norm: Norm,
    head: Linear,
}

struct EncoderLayer {
    own: MultiHead,
    feed_forward: FeedForward,
}

struct DecoderLayer {
    own: MultiHead,
    cross: MultiHead,
    feed_forward: FeedForward,
}

/// Keys and values of a decoder layer: of the words so far, and of the encoder's states.
struct Caches {
    own: KvCache,
    cross: KvCache,
}

impl Translator {
    pub(crate) fn new(attend: Attend, sizes: Sizes, vars: &VarBuilder<'_>) -> Result<Self> {
        let Sizes { words: [english, french], width, heads, hidden, layers } = sizes;
        let multi_head = |vars: &VarBuilder<'_>, name: &str| MultiHead::new(attend, width, heads, &vars.pp(name));
        let feed_forward = |vars: &VarBuilder<'_>| FeedForward::new(width, hidden, &vars.pp("feed_forward"));
        let layers = |name: &'static str| (0..layers).map(move |n| vars.pp(name).pp(n));
        let encoder = layers("encoder")
            .map(|vars| Ok(EncoderLayer { own: multi_head(&vars, "self")?, feed_forward: feed_forward(&vars)? }));
        let decoder = layers("decoder").map(|vars| {
            let (own, cross) = (multi_head(&vars, "self")?, multi_head(&vars, "cross")?);
            Ok(DecoderLayer { own, cross, feed_forward: feed_forward(&vars)? })
        });
        Ok(Self {
            embeddings: [
                embedding(english, width, vars.pp("embedding.english"))?,
                embedding(french, width, vars.pp("embedding.french"))?,
            ],
            positions: positions(POSITIONS, width)?,
            encoder: encoder.collect::<Result<_>>()?,
            encoder_norm: Norm::new(width, vars.pp("encoder.norm"))?,
            decoder: decoder.collect::<Result<_>>()?,
            decoder_norm: Norm::new(width, vars.pp("decoder.norm"))?,
            head: projection(width, french, vars.pp("head"))?,
        })
    }

    /// Rows of words that stand from `start` on.
    fn embed(&self, language: usize, words: &Tensor, start: usize) -> Result<Tensor> {
        let positions = self.positions.narrow(0, start, words.dim(1)?)?;
        self.embeddings[language].forward(words)?.broadcast_add(&positions)
    }

    /// States of English texts, `[texts, longest, width]`.
    pub(crate) fn encode(&self, source: &Tensor, visible: &Visible) -> Result<Tensor> {
        let mut x = self.embed(0, source, 0)?;
        for layer in &self.encoder {
            let normed = layer.own.norm.forward(&x)?;
            x = (x + layer.own.forward(&normed, &normed, visible)?)?;
            x = layer.feed_forward.forward(&x)?;
        }
        self.encoder_norm.forward(&x)
    }

    /// Mean cross-entropy of the batch's targets.
    pub(crate) fn loss(&self, batch: &Batch) -> Result<Tensor> {
        let states = self.decode(batch, |_, _, _| Ok(()))?.flatten(0, 1)?.index_select(&batch.places, 0)?;
        loss::cross_entropy(&self.head.forward(&states)?, &batch.targets)
    }

    /// States of the decoder, all rows at once, before the head. `look` is shown each layer with the rows that it takes
    /// to the encoder's states, and these.
    fn decode(
        &self,
        batch: &Batch,
        mut look: impl FnMut(&DecoderLayer, &Tensor, &Tensor) -> Result<()>,
    ) -> Result<Tensor> {
        let seen = Visible::lengths(&batch.lens, batch.source.dim(1)?)?;
        let memory = self.encode(&batch.source, &seen)?;
        let causal = Visible::causal(batch.input.dim(1)?)?;
        let mut x = self.embed(1, &batch.input, 0)?;
        for layer in &self.decoder {
            let normed = layer.own.norm.forward(&x)?;
            x = (x + layer.own.forward(&normed, &normed, &causal)?)?;
            let normed = layer.cross.norm.forward(&x)?;
            look(layer, &normed, &memory)?;
            x = (x + layer.cross.forward(&normed, &memory, &seen)?)?;
            x = layer.feed_forward.forward(&x)?;
        }
        self.decoder_norm.forward(&x)
    }

    /// Logits of every French word, `[pairs, rows, words]`.
    #[allow(dead_code, reason = "tests compare them")]
    pub(crate) fn logits(&self, batch: &Batch) -> Result<Tensor> {
        self.head.forward(&self.decode(batch, |_, _, _| Ok(()))?)
    }

    /// Translates texts, `[texts, longest]` and their lengths, word by word, each time the most likely; the keys and
    /// values of what came before are in caches.
    pub(crate) fn translate(&self, source: &Tensor, lens: &[u32]) -> Result<Vec<Vec<u32>>> {
        let memory = self.encode(source, &Visible::lengths(lens, source.dim(1)?)?)?;
        let mut caches =
            self.decoder.iter().map(|layer| layer.caches(&memory, lens)).collect::<Result<Vec<Caches>>>()?;
        let mut texts = vec![Vec::new(); lens.len()];
        let mut last = vec![END; lens.len()];
        for position in 0..POSITIONS {
            let mut x = self.embed(1, &Tensor::new(&last[..], &Device::Cpu)?.unsqueeze(1)?, position)?;
            for (layer, caches) in self.decoder.iter().zip(&mut caches) {
                x = layer.step(x, caches)?;
            }
            let logits = self.head.forward(&self.decoder_norm.forward(&x)?)?;
            let best = logits.squeeze(1)?.argmax(D::Minus1)?.to_vec1::<u32>()?;
            // What has ended stays so.
            for ((last, best), text) in last.iter_mut().zip(best).zip(&mut texts) {
                *last = if position > 0 && *last == END { END } else { best };
                text.extend((*last != END).then_some(*last));
            }
            if last.iter().all(|&word| word == END) {
                break;
            }
        }
        Ok(texts)
    }

    /// Weights of the last cross-attention, `[rows, keys]`, the mean of its heads; of one pair.
    pub(crate) fn alignment(&self, batch: &Batch) -> Result<Tensor> {
        let mut weights = None;
        self.decode(batch, |layer, rows, memory| {
            weights = Some(layer.cross.weights(rows, memory)?.mean(1)?.squeeze(0)?);
            Ok(())
        })?;
        weights.ok_or_else(|| candle_core::Error::Msg("a decoder without layers".to_owned()))
    }
}

impl DecoderLayer {
    /// Caches for texts with these states.
    fn caches(&self, memory: &Tensor, lens: &[u32]) -> Result<Caches> {
        let mut cross = self.cross.cache(lens.len())?;
        self.cross.append(memory, &mut cross)?;
        for (sequence, &len) in lens.iter().enumerate() {
            cross.truncate(sequence, len as usize).map_err(candle_core::Error::wrap)?;
        }
        Ok(Caches { own: self.own.cache(lens.len())?, cross })
    }

    /// Advances the stream of the next word of each text.
    fn step(&self, x: Tensor, caches: &mut Caches) -> Result<Tensor> {
        let normed = self.own.norm.forward(&x)?;
        self.own.append(&normed, &mut caches.own)?;
        let x = (x + self.own.cached(&normed, &caches.own)?)?;
        let x = (&x + self.cross.cached(&self.cross.norm.forward(&x)?, &caches.cross)?)?;
        self.feed_forward.forward(&x)
    }
}
