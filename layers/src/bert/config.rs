//! Sizes and constants of a BERT.

use crate::model::ModelError;
use sdpa_kernels::Activation;

/// Sizes and constants of a BERT, under the names they have in `config.json`. The default is bert-base-uncased.
///
/// ```
/// use sdpa_layers::BertConfig;
/// // all-MiniLM-L6-v2
/// let config = BertConfig { hidden_size: 384, num_hidden_layers: 6, intermediate_size: 1536, ..BertConfig::default() };
/// assert_eq!(config.hidden_size / config.num_attention_heads, 32);
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
#[allow(missing_docs, reason = "the names are the documentation: those of the file")]
pub struct BertConfig {
    pub vocab_size: usize,
    pub hidden_size: usize,
    pub num_hidden_layers: usize,
    pub num_attention_heads: usize,
    pub intermediate_size: usize,
    pub hidden_act: Activation,
    pub max_position_embeddings: usize,
    pub type_vocab_size: usize,
    pub layer_norm_eps: f32,
}

impl Default for BertConfig {
    fn default() -> Self {
        Self {
            vocab_size: 30522,
            hidden_size: 768,
            num_hidden_layers: 12,
            num_attention_heads: 12,
            intermediate_size: 3072,
            hidden_act: Activation::Gelu,
            max_position_embeddings: 512,
            type_vocab_size: 2,
            layer_norm_eps: 1e-12,
        }
    }
}

impl BertConfig {
    /// Reads a `config.json`. Fields that do not affect the computation are ignored.
    ///
    /// # Errors
    /// [`ModelError::Format`] if it is not a JSON object; [`ModelError::Config`] for a field that is missing, has the
    /// wrong type, or requires something not supported: another family of models, relative positions, decoding.
    #[cfg(feature = "safetensors")]
    pub fn from_json(bytes: &[u8]) -> Result<Self, ModelError> {
        let json = crate::model::Json::new(bytes)?;
        json.one_of("model_type", &[("bert", ())])?;
        json.one_of("position_embedding_type", &[("absolute", ())])?;
        json.off("is_decoder")?;
        json.off("add_cross_attention")?;
        let default = Self::default();
        let activations = [
            ("gelu", Activation::Gelu),
            ("gelu_new", Activation::GeluTanh),
            ("gelu_pytorch_tanh", Activation::GeluTanh),
            ("relu", Activation::Relu),
            ("silu", Activation::Silu),
            ("swish", Activation::Silu),
        ];
        let config = Self {
            vocab_size: json.count("vocab_size")?,
            hidden_size: json.count("hidden_size")?,
            num_hidden_layers: json.count("num_hidden_layers")?,
            num_attention_heads: json.count("num_attention_heads")?,
            intermediate_size: json.count("intermediate_size")?,
            hidden_act: json.one_of("hidden_act", &activations)?,
            max_position_embeddings: json.count("max_position_embeddings")?,
            type_vocab_size: json.count_or("type_vocab_size", default.type_vocab_size)?,
            layer_norm_eps: json.number_or("layer_norm_eps", default.layer_norm_eps)?,
        };
        config.check()?;
        Ok(config)
    }

    /// Checks that the sizes and constants are consistent with each other.
    pub(super) fn check(&self) -> Result<(), ModelError> {
        let refuse = |field, got: &dyn core::fmt::Display, expected: String| {
            Err(ModelError::Config { field, got: got.to_string(), expected })
        };
        let sizes = [
            ("vocab_size", self.vocab_size),
            ("hidden_size", self.hidden_size),
            ("num_hidden_layers", self.num_hidden_layers),
            ("num_attention_heads", self.num_attention_heads),
            ("intermediate_size", self.intermediate_size),
            ("max_position_embeddings", self.max_position_embeddings),
            ("type_vocab_size", self.type_vocab_size),
        ];
        if let Some((field, got)) = sizes.into_iter().find(|(_, size)| *size == 0) {
            return refuse(field, &got, "at least 1".to_owned());
        }
        let (width, heads) = (self.hidden_size, self.num_attention_heads);
        if !width.is_multiple_of(heads) {
            return refuse("num_attention_heads", &heads, format!("a divisor of hidden_size, which is {width}"));
        }
        let eps = self.layer_norm_eps;
        if !(eps >= 0.0 && eps.is_finite()) {
            return refuse("layer_norm_eps", &eps, "finite and not negative".to_owned());
        }
        Ok(())
    }
}
