//! The translator: a model that the example of the same name in `adapters/candle` has trained, run by `sdpa-layers`.

use crate::words::{END, POSITIONS};
use safetensors::SafeTensors;
use sdpa::{Attention, KvCache, ViewMut};
use sdpa_layers::{
    Activation, Compute, Embedding, FeedForward, LayerInput, Linear, MultiHeadAttention, MultiHeadInput, Norm,
    NormOrder, SafeTensorsFile, Sequences, TensorSource, Transformer, TransformerLayer, Weights,
};
use std::error::Error;

pub(crate) type Result<T> = std::result::Result<T, Box<dyn Error>>;

const EPS: f32 = 1e-6;

pub(crate) struct Translator {
    /// Words by number; the first is the mark of the end.
    english: Vec<String>,
    french: Vec<String>,
    embeddings: [Embedding; 2],
    positions: Embedding,
    encoder: Transformer,
    steps: Vec<DecoderLayer>,
    last_norm: Norm,
    head: Linear,
    /// The decoder once more, for all rows of a text at once.
    whole: Transformer,
    compute: Compute<'static>,
}

/// Parts of a decoder layer, each of which a step shows.
struct DecoderLayer {
    own: (MultiHeadAttention, Norm),
    cross: (MultiHeadAttention, Norm),
    feed_forward: (FeedForward, Norm),
}

/// One step of the decoder.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Step {
    /// The most likely next word.
    pub(crate) word: u32,
    /// Its probability.
    pub(crate) probability: f32,
    /// Weights of the last cross-attention on the English words and the mark of the end: the mean of the heads.
    pub(crate) looks_at: Vec<f32>,
    /// Logits of all French words.
    pub(crate) logits: Vec<f32>,
}

/// A text, and what was made of it step by step. The last step is the mark of the end, unless [`POSITIONS`] steps came first.
#[derive(Debug)]
pub(crate) struct Translation {
    /// English words and the mark of the end, by number.
    pub(crate) source: Vec<u32>,
    /// States of the encoder, a row for each.
    pub(crate) states: Vec<f32>,
    pub(crate) steps: Vec<Step>,
}

impl Translation {
    /// Returns the French words, without the mark of the end.
    pub(crate) fn words(&self) -> impl Iterator<Item = u32> {
        self.steps.iter().map(|step| step.word).take_while(|&word| word != END)
    }
}

impl Translator {
    /// Reads a file that the training has written.
    pub(crate) fn read(bytes: &[u8]) -> Result<Self> {
        let header = SafeTensors::read_metadata(bytes)?.1.metadata().clone().unwrap_or_default();
        let field = |name: &str| header.get(name).ok_or_else(|| format!("{name}: not in the header"));
        let words = |name: &str| Ok::<_, Box<dyn Error>>(field(name)?.split(' ').map(str::to_owned).collect());
        let file = File { tensors: SafeTensorsFile::new(bytes)?, heads: field("heads")?.parse()? };
        let encoder = (0..).take_while(|n| file.has(&format!("encoder.{n}")));
        let encoder = encoder.map(|n| file.encoder_layer(&format!("encoder.{n}"))).collect::<Result<_>>()?;
        let names: Vec<_> = (0..).map(|n| format!("decoder.{n}")).take_while(|name| file.has(name)).collect();
        let whole = names.iter().map(|name| {
            let DecoderLayer { own, cross, feed_forward } = file.decoder_layer(name)?;
            Ok(TransformerLayer::decoder(NormOrder::Pre, own, cross, feed_forward)?)
        });
        let embeddings = [file.embedding("embedding.english.weight")?, file.embedding("embedding.french.weight")?];
        Ok(Self {
            english: words("english")?,
            french: words("french")?,
            positions: Embedding::sinusoidal(POSITIONS, embeddings[0].width())?,
            embeddings,
            encoder: Transformer::new(encoder)?.norm(file.norm("encoder.norm")?)?,
            steps: names.iter().map(|name| file.decoder_layer(name)).collect::<Result<_>>()?,
            last_norm: file.norm("decoder.norm")?,
            head: file.linear("head")?,
            whole: Transformer::new(whole.collect::<Result<_>>()?)?.norm(file.norm("decoder.norm")?)?,
            compute: Compute::default(),
        })
    }

    /// Words that it knows, in order; the first is the mark of the end.
    pub(crate) fn english(&self) -> &[String] {
        &self.english
    }

    pub(crate) fn french(&self, word: u32) -> &str {
        &self.french[word as usize]
    }

    /// Layers of the encoder, and as many of the decoder.
    pub(crate) fn layers(&self) -> usize {
        self.encoder.layers().len()
    }

    /// Width of a state.
    pub(crate) fn width(&self) -> usize {
        self.encoder.width()
    }

    /// Numbers of English words and of the end; or the first word that is not known.
    pub(crate) fn numbers<'w>(&self, words: &'w [String]) -> std::result::Result<Vec<u32>, &'w str> {
        let number = |word: &'w String| match self.english.binary_search(word) {
            Ok(at) => Ok(at as u32),
            Err(_) => Err(word.as_str()),
        };
        words.iter().map(number).chain([Ok(END)]).collect()
    }

    /// Translates an English text, word by word, each time the most likely.
    pub(crate) fn translate(&mut self, source: Vec<u32>) -> Result<Translation> {
        let states = self.encode(&source)?;
        let mut caches =
            self.steps.iter().map(|layer| layer.own.0.cache(1)).collect::<std::result::Result<Vec<_>, _>>()?;
        let (mut steps, mut last) = (Vec::new(), END);
        while steps.len() < POSITIONS {
            let step = self.step(last, steps.len(), &states, &mut caches)?;
            last = step.word;
            steps.push(step);
            if last == END {
                break;
            }
        }
        Ok(Translation { source, states, steps })
    }

    /// States of the encoder, a row for each word.
    fn encode(&mut self, source: &[u32]) -> Result<Vec<f32>> {
        let x = self.embed(0, source, 0)?;
        let mut states = vec![0.0; x.len()];
        self.encoder.forward(LayerInput::new(&x, Sequences::one(source.len())), &mut states, &mut self.compute)?;
        Ok(states)
    }

    /// Rows of words that stand from `start` on.
    fn embed(&mut self, language: usize, words: &[u32], start: usize) -> Result<Vec<f32>> {
        let mut x = vec![0.0; words.len() * self.width()];
        self.embeddings[language].look_up(words, &mut x, &mut self.compute)?;
        self.positions.add_positions(&mut x, Sequences::one(words.len()), start, &mut self.compute)?;
        Ok(x)
    }

    /// Gives the decoder one word. It sees those before through the caches.
    fn step(&mut self, word: u32, position: usize, states: &[f32], caches: &mut [KvCache]) -> Result<Step> {
        let mut x = self.embed(1, &[word], position)?;
        let mut looks_at = Vec::new();
        for (layer, cache) in self.steps.iter().zip(caches) {
            looks_at = layer.step(&mut x, states, cache, &mut self.compute)?;
        }
        let (mut normed, mut logits) = (vec![0.0; x.len()], vec![0.0; self.french.len()]);
        self.last_norm.forward(&x, &mut normed, &mut self.compute)?;
        self.head.forward(&normed, &mut logits, &mut self.compute)?;
        let best = (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b])).unwrap_or(0);
        let sum: f32 = logits.iter().map(|logit| (logit - logits[best]).exp()).sum();
        Ok(Step { word: best as u32, probability: 1.0 / sum, looks_at, logits })
    }

    /// Logits of each step, `[steps, words]`, from the whole translation at once, by [`Transformer`] alone.
    pub(crate) fn whole(&mut self, translation: &Translation) -> Result<Vec<f32>> {
        let words = [END].into_iter().chain(translation.steps.iter().map(|step| step.word));
        let words: Vec<u32> = words.take(translation.steps.len()).collect();
        let x = self.embed(1, &words, 0)?;
        let x = LayerInput::new(&x, Sequences::one(words.len()));
        let memory = LayerInput::new(&translation.states, Sequences::one(translation.source.len()));
        let mut rows = vec![0.0; words.len() * self.width()];
        self.whole.forward_with_memory(x, memory, &mut rows, &mut self.compute)?;
        let mut logits = vec![0.0; words.len() * self.french.len()];
        self.head.forward(&rows, &mut logits, &mut self.compute)?;
        Ok(logits)
    }
}

impl DecoderLayer {
    /// Advances the row of one word; returns where it looks among the encoder's states.
    fn step(
        &self,
        x: &mut [f32],
        states: &[f32],
        cache: &mut KvCache,
        compute: &mut Compute,
    ) -> std::result::Result<Vec<f32>, sdpa::Error> {
        let (mut normed, mut part) = (vec![0.0; x.len()], vec![0.0; x.len()]);
        self.own.1.forward(x, &mut normed, compute)?;
        self.own.0.decode(&normed, cache, &mut part, compute)?;
        add(x, &part);

        let (heads, keys) = (self.cross.0.heads(), states.len() / self.cross.0.memory_inputs()[0]);
        let mut weights = vec![0.0; heads * keys];
        self.cross.1.forward(x, &mut normed, compute)?;
        let input = MultiHeadInput::new(&normed, Sequences::one(1)).memory(states, Sequences::one(keys));
        let view = ViewMut::bhld(&mut weights, [1, heads, 1, keys])?;
        self.cross.0.forward_with_weights(input, &mut part, view, compute)?;
        add(x, &part);

        self.feed_forward.1.forward(x, &mut normed, compute)?;
        self.feed_forward.0.forward(&normed, &mut part, compute)?;
        add(x, &part);
        let mean = |key: usize| weights.iter().skip(key).step_by(keys).sum::<f32>() / heads as f32;
        Ok((0..keys).map(mean).collect())
    }
}

fn add(x: &mut [f32], part: &[f32]) {
    x.iter_mut().zip(part).for_each(|(x, part)| *x += part);
}

/// Tensors by name.
struct File<'a> {
    tensors: SafeTensorsFile<'a>,
    heads: usize,
}

impl File<'_> {
    /// True if there is a layer of this name.
    fn has(&self, layer: &str) -> bool {
        self.tensors.contains(&format!("{layer}.self.q.weight"))
    }

    fn tensor(&self, name: &str) -> Result<sdpa_layers::Tensor<'_>> {
        Ok(self.tensors.tensor(name)?.ok_or_else(|| format!("{name}: no such tensor"))?)
    }

    fn embedding(&self, name: &str) -> Result<Embedding> {
        let table = self.tensor(name)?;
        Ok(Embedding::new(table.data(), table.shape().last().copied().unwrap_or(0))?)
    }

    fn linear(&self, name: &str) -> Result<Linear> {
        let weight = self.tensor(&format!("{name}.weight"))?;
        let &[outputs, inputs] = weight.shape() else { return Err(format!("{name}: not a matrix").into()) };
        Ok(Linear::new(Weights::rows(weight.data(), [outputs, inputs])?))
    }

    fn norm(&self, name: &str) -> Result<Norm> {
        Ok(Norm::rms(self.tensor(&format!("{name}.weight"))?.data(), EPS)?)
    }

    fn attention(&self, name: &str) -> Result<(MultiHeadAttention, Norm)> {
        let part = |part: &str| self.linear(&format!("{name}.{part}"));
        let projections = [part("q")?, part("k")?, part("v")?, part("out")?];
        Ok((MultiHeadAttention::new([self.heads; 2], projections)?, self.norm(&format!("{name}.norm"))?))
    }

    fn feed_forward(&self, name: &str) -> Result<(FeedForward, Norm)> {
        let name = format!("{name}.feed_forward");
        let (up, down) = (self.linear(&format!("{name}.up"))?, self.linear(&format!("{name}.down"))?);
        Ok((FeedForward::new(Activation::Relu, up, down)?, self.norm(&format!("{name}.norm"))?))
    }

    fn encoder_layer(&self, name: &str) -> Result<TransformerLayer> {
        let own = self.attention(&format!("{name}.self"))?;
        Ok(TransformerLayer::encoder(NormOrder::Pre, own, self.feed_forward(name)?)?)
    }

    fn decoder_layer(&self, name: &str) -> Result<DecoderLayer> {
        let (own, norm) = self.attention(&format!("{name}.self"))?;
        Ok(DecoderLayer {
            own: (own.attention(Attention::new().causal()), norm),
            cross: self.attention(&format!("{name}.cross"))?,
            feed_forward: self.feed_forward(name)?,
        })
    }
}
