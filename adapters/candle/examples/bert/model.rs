//! candle-transformers' BERT with this attention instead.

use candle_core::{D, Result, Tensor};
use candle_nn::{LayerNorm, Linear, Module, VarBuilder, layer_norm, linear};
use candle_transformers::models::bert::{BertModel, Config, HiddenAct};
use sdpa_candle::Sdpa;

pub(crate) struct Bert {
    embeddings: BertModel,
    layers: Vec<Layer>,
}

impl Bert {
    pub(crate) fn load(weights: &VarBuilder<'_>, config: &Config) -> Result<Self> {
        // Candle's model without layers is its embeddings.
        let embeddings = BertModel::load(weights.clone(), &Config { num_hidden_layers: 0, ..config.clone() })?;
        let layer = |n| Layer::load(&weights.pp(format!("encoder.layer.{n}")), config);
        Ok(Self { embeddings, layers: (0..config.num_hidden_layers).map(layer).collect::<Result<_>>()? })
    }

    /// Takes what candle's model takes: tokens, their types and a mask of tokens that count, each `[batch, rows]`.
    pub(crate) fn forward(&self, ids: &Tensor, types: &Tensor, mask: &Tensor) -> Result<Tensor> {
        let sdpa = Sdpa::default().padding(mask);
        let embedded = self.embeddings.forward(ids, types, None)?;
        self.layers.iter().try_fold(embedded, |x, layer| layer.forward(&x, &sdpa))
    }
}

struct Layer {
    heads: usize,
    qkv: [Linear; 3],
    dense: Linear,
    attention_norm: LayerNorm,
    up: Linear,
    act: HiddenAct,
    down: Linear,
    norm: LayerNorm,
}

impl Layer {
    fn load(weights: &VarBuilder<'_>, config: &Config) -> Result<Self> {
        let (hidden, wide) = (config.hidden_size, config.intermediate_size);
        let square = |name: &str| linear(hidden, hidden, weights.pp(name));
        let norm = |name: &str| layer_norm(hidden, config.layer_norm_eps, weights.pp(name));
        Ok(Self {
            heads: config.num_attention_heads,
            qkv: [square("attention.self.query")?, square("attention.self.key")?, square("attention.self.value")?],
            dense: square("attention.output.dense")?,
            attention_norm: norm("attention.output.LayerNorm")?,
            up: linear(hidden, wide, weights.pp("intermediate.dense"))?,
            act: config.hidden_act,
            down: linear(wide, hidden, weights.pp("output.dense"))?,
            norm: norm("output.LayerNorm")?,
        })
    }

    fn attend(&self, x: &Tensor, sdpa: &Sdpa) -> Result<Tensor> {
        let (batch, rows, _) = x.dims3()?;
        let heads = |part: &Linear| part.forward(x)?.reshape((batch, rows, self.heads, ()))?.transpose(1, 2);
        let [q, k, v] = self.qkv.each_ref().map(heads);
        sdpa.forward(&q?, &k?, &v?)?.transpose(1, 2)?.flatten_from(D::Minus2)
    }

    fn forward(&self, x: &Tensor, sdpa: &Sdpa) -> Result<Tensor> {
        let x = self.attention_norm.forward(&(self.dense.forward(&self.attend(x, sdpa)?)? + x)?)?;
        let up = self.up.forward(&x)?;
        let up = match self.act {
            HiddenAct::Gelu => up.gelu_erf(),
            HiddenAct::GeluApproximate => up.gelu(),
            HiddenAct::Relu => up.relu(),
        };
        self.norm.forward(&(self.down.forward(&up?)? + x)?)
    }
}
