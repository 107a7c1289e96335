//! Construction of a BERT from its weights.

use super::names::{POSITIONS, TYPES, WORDS};
use super::{Bert, BertConfig};
use crate::embedding::Embedding;
use crate::feed_forward::FeedForward;
use crate::model::{ModelError, Named, TensorSource};
use crate::multi_head::MultiHeadAttention;
use crate::transformer::{NormOrder, Transformer, TransformerLayer};

/// Tensors that every layer has.
const IN_EVERY_LAYER: [&str; 2] = ["attention.self.query.weight", "attention.self.key.weight"];

impl Bert {
    /// Takes the weights under their usual names, those of PyTorch and Hugging Face:
    /// `embeddings.word_embeddings.weight`, `encoder.layer.0.attention.self.query.weight` and so on, all of them
    /// optionally prefixed with `bert.`; norms may have `gamma` and `beta`. Tensors that are not needed (a pooler,
    /// heads of other tasks) are ignored. Weights are packed: one copy, in another order.
    ///
    /// # Errors
    /// [`ModelError::Config`] for a configuration that contradicts itself or has more or fewer layers than the weights;
    /// [`ModelError::Missing`]; [`ModelError::Shape`] with both shapes; or any error of the source.
    pub fn new(config: BertConfig, weights: &dyn TensorSource) -> Result<Self, ModelError> {
        config.check()?;
        let prefix = if weights.contains(&format!("bert.{WORDS}")) { "bert." } else { "" };
        let weights = Named::new(weights, prefix);
        let (hidden, positions) = (config.hidden_size, config.max_position_embeddings);
        let words = Embedding::new(weights.take(WORDS, [config.vocab_size, hidden])?, hidden)?;
        let positions = Embedding::new(weights.take(POSITIONS, [positions, hidden])?, hidden)?;
        let types = weights.take(TYPES, [config.type_vocab_size, hidden])?.into_owned();
        let norm = weights.below("embeddings.LayerNorm.").layer_norm(hidden, config.layer_norm_eps)?;
        // No preallocated capacity: the number of layers has not been checked against the weights yet.
        let mut layers = Vec::new();
        for layer in 0..config.num_hidden_layers {
            let name = |tensor| format!("encoder.layer.{layer}.{tensor}");
            // One of them alone may be missing for another reason.
            if layer > 0 && !IN_EVERY_LAYER.into_iter().any(|tensor| weights.contains(&name(tensor))) {
                let (field, got) = ("num_hidden_layers", config.num_hidden_layers.to_string());
                let expected = format!("at most {layer}: there is no {}", name(IN_EVERY_LAYER[0]));
                return Err(ModelError::Config { field, got, expected });
            }
            layers.push(encoder_layer(&config, &weights.below(format_args!("encoder.layer.{layer}.")))?);
        }
        let beyond = format!("encoder.layer.{}.{}", layers.len(), IN_EVERY_LAYER[0]);
        if weights.contains(&beyond) {
            let (field, got) = ("num_hidden_layers", layers.len().to_string());
            return Err(ModelError::Config { field, got, expected: format!("more: there is {beyond}") });
        }
        Ok(Self { config, words, positions, types, norm, layers: Transformer::new(layers)? })
    }

    /// Takes the bytes of `config.json` and of `model.safetensors`, read or memory-mapped.
    ///
    /// # Errors
    /// As for [`BertConfig::from_json`], [`crate::SafeTensorsFile::new`] and [`Self::new`].
    #[cfg(feature = "safetensors")]
    pub fn from_safetensors(config: &[u8], weights: &[u8]) -> Result<Self, ModelError> {
        let config = BertConfig::from_json(config)?;
        Self::new(config, &crate::model::SafeTensorsFile::new(weights)?)
    }
}

fn encoder_layer(config: &BertConfig, weights: &Named<'_>) -> Result<TransformerLayer, ModelError> {
    let (hidden, middle, heads) = (config.hidden_size, config.intermediate_size, config.num_attention_heads);
    let linear = |name: &str, outputs, inputs| weights.below(name).linear([outputs, inputs]);
    let norm = |name: &str| weights.below(name).layer_norm(hidden, config.layer_norm_eps);
    let projections = [
        linear("attention.self.query.", hidden, hidden)?,
        linear("attention.self.key.", hidden, hidden)?,
        linear("attention.self.value.", hidden, hidden)?,
        linear("attention.output.dense.", hidden, hidden)?,
    ];
    let attention = MultiHeadAttention::new([heads, heads], projections)?;
    let attention = (attention, norm("attention.output.LayerNorm.")?);
    let (up, down) = (linear("intermediate.dense.", middle, hidden)?, linear("output.dense.", hidden, middle)?);
    let feed_forward = (FeedForward::new(config.hidden_act, up, down)?, norm("output.LayerNorm.")?);
    Ok(TransformerLayer::encoder(NormOrder::Post, attention, feed_forward)?)
}
