//! Layers made of the parameters of a file, by the names that PyTorch and transformers give them.
#![allow(dead_code, reason = "every program compiles this module and uses its part of it")]

use crate::fixture::Fixture;
use sdpa::Attention;
use sdpa_layers::{
    Activation, Compute, Embedding, FeedForward, Linear, MultiHeadAttention, Norm, NormOrder, Rope, RopePairs,
    Sequences, Start, Transformer, TransformerLayer, Weights,
};

/// The parameters under a name.
#[derive(Clone)]
pub(crate) struct Params<'a> {
    file: &'a Fixture,
    prefix: String,
}

impl<'a> Params<'a> {
    pub(crate) fn new(file: &'a Fixture, entry: &str) -> Self {
        Self { file, prefix: format!("{entry}.param.") }
    }

    fn under(&self, name: &str) -> Self {
        Self { file: self.file, prefix: format!("{}{name}.", self.prefix) }
    }

    fn name(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }

    fn has(&self, name: &str) -> bool {
        self.file.has(&self.name(name))
    }

    fn floats(&self, name: &str) -> Vec<f32> {
        self.file.floats(&self.name(name))
    }

    fn optional(&self, name: &str) -> Option<Vec<f32>> {
        self.has(name).then(|| self.floats(name))
    }

    fn shape(&self, name: &str) -> [usize; 2] {
        self.file.shape(&self.name(name))
    }

    /// `[outputs, inputs]`, with its bias if there is one.
    fn linear(&self, weight: &str, bias: &str) -> Linear {
        self.linears(weight, bias, 1).remove(0)
    }

    /// Several projections stored as one, of equal numbers of outputs.
    fn linears(&self, weight: &str, bias: &str, parts: usize) -> Vec<Linear> {
        let (data, bias) = (self.floats(weight), self.optional(bias));
        cut(Weights::rows(&data, self.shape(weight)).unwrap(), bias.as_deref(), self.shape(weight)[0], parts)
    }

    /// The same of GPT-2's `[inputs, outputs]`.
    fn conv1d(&self, name: &str, parts: usize) -> Vec<Linear> {
        let this = self.under(name);
        let (data, bias) = (this.floats("weight"), this.optional("bias"));
        cut(Weights::columns(&data, this.shape("weight")).unwrap(), bias.as_deref(), this.shape("weight")[1], parts)
    }

    fn layer_norm(&self, name: &str) -> Norm {
        let this = self.under(name);
        Norm::layer(this.floats("weight"), 1e-5).unwrap().bias(this.floats("bias")).unwrap()
    }

    fn rms_norm(&self, name: &str) -> Norm {
        Norm::rms(self.under(name).floats("weight"), 1e-6).unwrap()
    }

    fn embedding(&self, name: &str) -> Embedding {
        Embedding::new(self.floats(name), self.shape(name)[1]).unwrap()
    }
}

fn cut(weights: Weights<'_>, bias: Option<&[f32]>, outputs: usize, parts: usize) -> Vec<Linear> {
    let weights = bias.map_or(weights, |bias| weights.bias(bias).unwrap());
    let each = outputs / parts;
    (0..parts).map(|part| Linear::new(weights.part(part * each..(part + 1) * each).unwrap())).collect()
}

fn four(projections: impl IntoIterator<Item = Linear>) -> [Linear; 4] {
    projections.into_iter().collect::<Vec<_>>().try_into().expect("q, k, v, out")
}

/// `nn.MultiheadAttention`.
pub(crate) fn multi_head(params: &Params<'_>, heads: usize) -> MultiHeadAttention {
    let mut projections = if params.has("in_proj_weight") {
        params.linears("in_proj_weight", "in_proj_bias", 3)
    } else {
        ["q", "k", "v"].map(|part| params.linear(&format!("{part}_proj_weight"), "in_proj_bias")).into()
    };
    projections.push(params.linear("out_proj.weight", "out_proj.bias"));
    MultiHeadAttention::new([heads, heads], four(projections)).unwrap()
}

fn torch_feed_forward(params: &Params<'_>, activation: Activation) -> FeedForward {
    let [up, down] =
        ["linear1", "linear2"].map(|name| params.linear(&format!("{name}.weight"), &format!("{name}.bias")));
    FeedForward::new(activation, up, down).unwrap()
}

/// `nn.TransformerEncoderLayer`.
pub(crate) fn encoder_layer(
    params: &Params<'_>,
    heads: usize,
    order: NormOrder,
    activation: Activation,
) -> TransformerLayer {
    let own = (multi_head(&params.under("self_attn"), heads), params.layer_norm("norm1"));
    TransformerLayer::encoder(order, own, (torch_feed_forward(params, activation), params.layer_norm("norm2"))).unwrap()
}

/// `nn.TransformerDecoderLayer`, causal.
pub(crate) fn decoder_layer(
    params: &Params<'_>,
    heads: usize,
    order: NormOrder,
    activation: Activation,
) -> TransformerLayer {
    let own = multi_head(&params.under("self_attn"), heads).attention(Attention::new().causal());
    let cross = multi_head(&params.under("multihead_attn"), heads);
    let feed_forward = torch_feed_forward(params, activation);
    let [first, second, third] = ["norm1", "norm2", "norm3"].map(|name| params.layer_norm(name));
    TransformerLayer::decoder(order, (own, first), (cross, second), (feed_forward, third)).unwrap()
}

/// A language model without its last projection.
pub(crate) struct Model {
    tokens: Embedding,
    positions: Option<Embedding>,
    pub(crate) transformer: Transformer,
    /// The attention of the first layer once more, and its norm.
    pub(crate) first: (MultiHeadAttention, Norm),
}

impl Model {
    pub(crate) fn embed(&self, tokens: &[u32], sequences: Sequences<'_>, x: &mut [f32], compute: &mut Compute) {
        self.embed_from(0, (tokens, sequences), x, compute);
    }

    /// Tokens of sequences that go on from these positions.
    pub(crate) fn embed_from<'a>(
        &self,
        start: impl Into<Start<'a>>,
        (tokens, sequences): (&[u32], Sequences<'a>),
        x: &mut [f32],
        compute: &mut Compute,
    ) {
        self.tokens.look_up(tokens, x, compute).unwrap();
        if let Some(positions) = &self.positions {
            positions.add_positions(x, sequences, start, compute).unwrap();
        }
    }
}

/// `GPT2Model`.
pub(crate) fn gpt2(params: &Params<'_>) -> Model {
    let attention = |layer: &Params<'_>| {
        let projections = layer.conv1d("attn.c_attn", 3).into_iter().chain(layer.conv1d("attn.c_proj", 1));
        let attention = MultiHeadAttention::new([4, 4], four(projections)).unwrap();
        (attention.attention(Attention::new().causal()), layer.layer_norm("ln_1"))
    };
    let layer = |number: usize| {
        let layer = params.under(&format!("h.{number}"));
        let [up, down] = ["mlp.c_fc", "mlp.c_proj"].map(|name| layer.conv1d(name, 1).remove(0));
        let feed_forward = FeedForward::new(Activation::GeluTanh, up, down).unwrap();
        TransformerLayer::encoder(NormOrder::Pre, attention(&layer), (feed_forward, layer.layer_norm("ln_2"))).unwrap()
    };
    Model {
        tokens: params.embedding("wte.weight"),
        positions: Some(params.embedding("wpe.weight")),
        transformer: Transformer::new(vec![layer(0), layer(1)]).unwrap().norm(params.layer_norm("ln_f")).unwrap(),
        first: attention(&params.under("h.0")),
    }
}

/// `LlamaModel`.
pub(crate) fn llama(params: &Params<'_>) -> Model {
    let rope = Rope::new(64, 16, 10_000.0, RopePairs::Half).unwrap();
    let linear = |params: &Params<'_>, name: &str| params.linear(&format!("{name}.weight"), &format!("{name}.bias"));
    let attention = |layer: &Params<'_>| {
        let projections = ["q", "k", "v", "o"].map(|part| linear(layer, &format!("self_attn.{part}_proj")));
        let attention = MultiHeadAttention::new([4, 2], projections).unwrap().rope(rope.clone()).unwrap();
        (attention.attention(Attention::new().causal()), layer.rms_norm("input_layernorm"))
    };
    let layer = |number: usize| {
        let layer = params.under(&format!("layers.{number}"));
        let [gate, up, down] = ["gate", "up", "down"].map(|part| linear(&layer, &format!("mlp.{part}_proj")));
        let feed_forward = FeedForward::gated(Activation::Silu, gate, up, down).unwrap();
        let norm = layer.rms_norm("post_attention_layernorm");
        TransformerLayer::encoder(NormOrder::Pre, attention(&layer), (feed_forward, norm)).unwrap()
    };
    Model {
        tokens: params.embedding("embed_tokens.weight"),
        positions: None,
        transformer: Transformer::new(vec![layer(0), layer(1)]).unwrap().norm(params.rms_norm("norm")).unwrap(),
        first: attention(&params.under("layers.0")),
    }
}
