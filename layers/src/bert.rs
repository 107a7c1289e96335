//! BERT: takes tokens, writes a row for each token or for each text.

mod config;
mod load;
mod names;

use crate::compute::Compute;
use crate::embedding::Embedding;
use crate::error::{at_most, same};
use crate::layer_input::LayerInput;
use crate::linear::check_rows;
use crate::model::ModelError;
use crate::norm::Norm;
use crate::pool::{Pooling, normalise};
use crate::sequences::Sequences;
use crate::share::{self, RowSlice};
use crate::transformer::Transformer;
pub use config::BertConfig;
use names::{POSITIONS, TYPES, WORDS};
use sdpa::{Error, Precision};

/// Tokens per thread that [`Bert::embed`] processes at once: those of a feed-forward, so that hidden states stay in
/// or near the cache from layer to layer. With 5 or 20 times the tokens it was 5 to 8 % slower.
const BATCH: usize = 384;

/// Cost of one number of the sum of embeddings, in the operations that [`sdpa::Exec`] counts.
const COST: f64 = 8.0;

/// Input of a [`Bert`]: texts as token numbers, laid end to end.
///
/// ```
/// use sdpa_layers::{BertInput, Sequences};
/// // Two texts of three tokens and of two, laid end to end; 2 and 3 stand for [CLS] and [SEP].
/// let input = BertInput::new(&[2, 7, 3, 2, 3], Sequences::Ragged(&[0, 3, 5])).types(&[0; 5]);
/// # let _ = input;
/// ```
#[derive(Debug, Clone, Copy)]
pub struct BertInput<'a> {
    tokens: &'a [u32],
    types: Option<&'a [u32]>,
    sequences: Sequences<'a>,
}

impl<'a> BertInput<'a> {
    /// Takes token numbers and their division into sequences; the tokenizer must add `[CLS]` and `[SEP]`.
    pub fn new(tokens: &'a [u32], sequences: Sequences<'a>) -> Self {
        Self { tokens, types: None, sequences }
    }

    /// Sets a type for each token: in a pair of texts, 0 for the first and 1 for the second. All are 0 by default.
    #[must_use]
    pub fn types(self, types: &'a [u32]) -> Self {
        Self { types: Some(types), ..self }
    }
}

/// BERT (Devlin, Chang, Lee, Toutanova 2018, arXiv:1810.04805), and the sentence encoders based on it (Reimers,
/// Gurevych 2019, arXiv:1908.10084): embeddings of token, type and position, then post-norm encoder layers.
///
/// Sequences of any lengths are laid end to end, without padding. A token's row depends on its own sequence alone, to
/// the bit. For n tokens in sequences of length L: n·(8·hidden² + 4·hidden·intermediate + 4·L·hidden) operations per
/// layer.
///
/// ```
/// use sdpa_layers::{Bert, BertConfig, BertInput, Compute, Pooling, Sequences, Tensor};
/// # use std::collections::HashMap;
/// # let config = BertConfig { vocab_size: 10, hidden_size: 4, num_hidden_layers: 1, num_attention_heads: 2,
/// #     intermediate_size: 4, max_position_embeddings: 6, ..BertConfig::default() };
/// # let mut weights = HashMap::new();
/// # for (name, rows) in [("word_embeddings.weight", 10), ("position_embeddings.weight", 6),
/// #     ("token_type_embeddings.weight", 2)] {
/// #     let data: Vec<f32> = (0..rows * 4).map(|i| (i as f32).sin()).collect();
/// #     weights.insert(format!("embeddings.{name}"), Tensor::new([rows, 4], data)?);
/// # }
/// # for name in ["embeddings.LayerNorm", "encoder.layer.0.attention.output.LayerNorm",
/// #     "encoder.layer.0.output.LayerNorm"] {
/// #     weights.insert(format!("{name}.weight"), Tensor::new([4], vec![1.0; 4])?);
/// #     weights.insert(format!("{name}.bias"), Tensor::new([4], vec![1.0; 4])?);
/// # }
/// # for name in ["attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense",
/// #     "intermediate.dense", "output.dense"] {
/// #     weights.insert(format!("encoder.layer.0.{name}.weight"), Tensor::new([4, 4], vec![0.5; 16])?);
/// #     weights.insert(format!("encoder.layer.0.{name}.bias"), Tensor::new([4], vec![0.5; 4])?);
/// # }
/// let bert = Bert::new(config, &weights)?;
/// // two texts, of three tokens and of two
/// let input = BertInput::new(&[2, 7, 3, 2, 3], Sequences::Ragged(&[0, 3, 5]));
/// let mut rows = vec![0.0; 2 * bert.width()];
/// bert.embed(input, Pooling::Mean, &mut rows, &mut Compute::default())?;
/// # let length = |row: &[f32]| row.iter().map(|x| x * x).sum::<f32>();
/// # assert!((length(&rows[..4]) - 1.0).abs() < 1e-6 && (length(&rows[4..]) - 1.0).abs() < 1e-6);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Bert {
    config: BertConfig,
    words: Embedding,
    positions: Embedding,
    /// `[types, hidden]`.
    types: Vec<f32>,
    norm: Norm,
    layers: Transformer,
}

impl Bert {
    /// Sets the precision of all projections of the layers, as [`Linear::precision`](crate::Linear::precision) does, and of attention.
    ///
    /// ```
    /// use sdpa::Precision;
    /// use sdpa_layers::{Bert, BertConfig, ModelError, TensorSource};
    /// fn load(config: BertConfig, weights: &dyn TensorSource) -> Result<Bert, ModelError> {
    ///     Ok(Bert::new(config, weights)?.precision(Precision::Accurate))
    /// }
    /// ```
    #[must_use]
    pub fn precision(self, precision: Precision) -> Self {
        Self { layers: self.layers.precision(precision), ..self }
    }

    /// Sizes and constants of the model.
    pub fn config(&self) -> &BertConfig {
        &self.config
    }

    /// Width of a row of hidden states, and of an embedding.
    pub fn width(&self) -> usize {
        self.config.hidden_size
    }

    /// Writes the last hidden state of each token to `out`, `[tokens, hidden]`.
    ///
    /// # Errors
    /// [`ModelError::Token`] for a token or type beyond its table, [`ModelError::TooLong`] for a sequence longer than
    /// the model's positions, or [`ModelError::Layer`] for sizes that do not fit; `out` is then untouched.
    pub fn forward(&self, input: BertInput<'_>, out: &mut [f32], compute: &mut Compute) -> Result<(), ModelError> {
        self.forward_to(self.config.num_hidden_layers, input, out, compute)
    }

    /// Writes the hidden states after the first `layers` layers to `out`, `[tokens, hidden]`; after 0, the normed sum
    /// of embeddings.
    ///
    /// # Errors
    /// As for [`Self::forward`]; [`Error::Range`] if the model has fewer layers.
    pub fn forward_to(
        &self,
        layers: usize,
        input: BertInput<'_>,
        out: &mut [f32],
        compute: &mut Compute,
    ) -> Result<(), ModelError> {
        at_most(self.config.num_hidden_layers, "those of the model").check("layers", "number", layers)?;
        self.check(&input)?;
        check_rows("out", out, input.tokens.len(), self.width())?;
        self.run(layers, input, out, compute)
    }

    /// Writes to `out`, `[sequences, hidden]`, one row of length 1 for each sequence: the pooled hidden states,
    /// normalised. Sequences are processed in batches of a few hundred tokens per thread, so memory does not grow with
    /// the number of sequences.
    ///
    /// # Errors
    /// As for [`Self::forward`]; if there is no memory for a sequence, `out` may hold the rows of earlier sequences.
    pub fn embed(
        &self,
        input: BertInput<'_>,
        pooling: Pooling,
        out: &mut [f32],
        compute: &mut Compute,
    ) -> Result<(), ModelError> {
        self.check(&input)?;
        let (width, count) = (self.width(), input.sequences.count());
        check_rows("out", out, count, width)?;
        let batch = BATCH * compute.threads();
        let mut ends = compute.lengths();
        let mut first = 0;
        let mut done = Ok(());
        while first < count && done.is_ok() {
            let start = input.sequences.rows(first).start;
            ends.clear();
            ends.push(0);
            let mut next = first;
            while next < count && (next == first || input.sequences.rows(next).end - start <= batch) {
                ends.push(input.sequences.rows(next).end - start);
                next += 1;
            }
            let rows = start..input.sequences.rows(next - 1).end;
            let sequences = Sequences::Ragged(&ends);
            let tokens = &input.tokens[rows.clone()];
            let part = BertInput { tokens, types: input.types.map(|types| &types[rows]), sequences };
            done = self.embed_part(part, pooling, &mut out[first * width..next * width], compute);
            first = next;
        }
        compute.recycle_lengths(ends);
        done
    }

    /// Embeds a checked input in one batch.
    fn embed_part(
        &self,
        input: BertInput<'_>,
        pooling: Pooling,
        out: &mut [f32],
        compute: &mut Compute,
    ) -> Result<(), ModelError> {
        let width = self.width();
        let mut hidden = compute.buffer("hidden states", [input.tokens.len(), width])?;
        let done = self.run(self.config.num_hidden_layers, input, &mut hidden, compute).and_then(|()| {
            pooling.forward(&hidden, width, input.sequences, out)?;
            Ok(normalise(out, width)?)
        });
        compute.recycle(hidden);
        done
    }

    /// Checks everything that can be wrong with an input.
    fn check(&self, input: &BertInput<'_>) -> Result<(), ModelError> {
        let BertInput { tokens, types, sequences } = input;
        sequences.check("tokens", tokens.len())?;
        let table = |tensor, xs: &[u32], rows: usize| match xs.iter().position(|&x| x as usize >= rows) {
            Some(index) => Err(ModelError::Token { index, got: xs[index], tensor, rows }),
            None => Ok(()),
        };
        let rows = self.config.max_position_embeddings;
        let long = match sequences {
            Sequences::Even { batch, len } => (*batch > 0 && *len > rows).then_some((0, *len)),
            Sequences::Ragged(ends) => {
                let lens = ends.windows(2).map(|pair| pair[1] - pair[0]);
                lens.enumerate().find(|&(_, len)| len > rows)
            }
        };
        if let Some((sequence, len)) = long {
            return Err(ModelError::TooLong { sequence, len, tensor: POSITIONS, rows });
        }
        table(WORDS, tokens, self.config.vocab_size)?;
        if let Some(types) = types {
            same("types", "length", types.len(), tokens.len(), "the tokens").map_err(Error::from)?;
            table(TYPES, types, self.config.type_vocab_size)?;
        }
        Ok(())
    }

    /// Runs the first `layers` layers on a checked input.
    fn run(
        &self,
        layers: usize,
        input: BertInput<'_>,
        out: &mut [f32],
        compute: &mut Compute,
    ) -> Result<(), ModelError> {
        let mut other = compute.buffer("hidden states", [input.tokens.len(), self.width()])?;
        let done = if layers == 0 {
            self.embeddings(&input, &mut other, out, compute)
        } else {
            self.embeddings(&input, out, &mut other, compute)
                .and_then(|()| self.layers.forward_to(layers, LayerInput::new(&other, input.sequences), out, compute))
        };
        compute.recycle(other);
        Ok(done?)
    }

    /// Writes the normed sum of the word, type and position embeddings of each token; `sum` holds the sum.
    fn embeddings(
        &self,
        input: &BertInput<'_>,
        sum: &mut [f32],
        out: &mut [f32],
        compute: &mut Compute,
    ) -> Result<(), Error> {
        let width = self.width();
        self.words.look_up(input.tokens, sum, compute)?;
        let (cost, operand) = (COST * sum.len() as f64, RowSlice(&mut *sum, width));
        share::rows(compute.exec(), input.tokens.len(), cost, operand, |first, rows| {
            for (row, x) in rows.0.chunks_exact_mut(width).enumerate() {
                let kind = input.types.map_or(0, |types| types[first + row] as usize);
                x.iter_mut().zip(&self.types[kind * width..][..width]).for_each(|(x, add)| *x += add);
            }
        });
        self.positions.add_positions(sum, input.sequences, 0, compute)?;
        self.norm.forward(sum, out, compute)
    }
}
