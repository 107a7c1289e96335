//! candle-transformers' Llama with this attention, and its caches, in place of candle's own.

use candle_core::{DType, Device, Result, Tensor};
use candle_nn::{Linear, Module, RmsNorm, VarBuilder, linear_no_bias as linear, ops, rms_norm, rotary_emb};
use candle_transformers::models::llama::{self, Config};
use sdpa_candle::{Alignment, Attention, KvCache, KvShape, Sdpa};

pub(crate) struct Llama {
    /// Candle's model without layers: the embedding of tokens, the last norm and the head.
    ends: llama::Llama,
    ends_cache: llama::Cache,
    layers: Vec<Layer>,
    cos: Tensor,
    sin: Tensor,
}

impl Llama {
    pub(crate) fn load(weights: &VarBuilder<'_>, config: &Config) -> Result<Self> {
        let no_layers = Config { num_hidden_layers: 0, ..config.clone() };
        let layer = |n| Layer::load(&weights.pp(format!("model.layers.{n}")), config);
        let half = config.hidden_size / config.num_attention_heads / 2;
        let frequency = |i| config.rope_theta.powf(-(i as f32) / half as f32);
        let angles = |position: usize| (0..half).map(move |i| position as f32 * frequency(i));
        let angles = Tensor::from_iter((0..config.max_position_embeddings).flat_map(angles), weights.device())?
            .reshape((config.max_position_embeddings, half))?;
        Ok(Self {
            ends: llama::Llama::load(weights.clone(), &no_layers)?,
            ends_cache: llama::Cache::new(false, weights.dtype(), &no_layers, &Device::Cpu)?,
            layers: (0..config.num_hidden_layers).map(layer).collect::<Result<_>>()?,
            cos: angles.cos()?.to_dtype(weights.dtype())?,
            sin: angles.sin()?.to_dtype(weights.dtype())?,
        })
    }

    /// Logits after the last of these tokens, `[batch, tokens]`, which go on from what is in the caches.
    pub(crate) fn forward(&mut self, tokens: &Tensor, caches: &mut [KvCache]) -> Result<Tensor> {
        let (from, rows) = (caches[0].lens()[0], tokens.dim(1)?);
        let (cos, sin) = (self.cos.narrow(0, from, rows)?, self.sin.narrow(0, from, rows)?);
        let mut x = self.ends.embed(tokens)?;
        for (layer, cache) in self.layers.iter().zip(caches) {
            x = layer.forward(&x, &cos, &sin, cache)?;
        }
        self.ends.forward_input_embed(&x, 0, &mut self.ends_cache)
    }

    /// An empty cache for each layer.
    pub(crate) fn caches(config: &Config, batch: usize) -> Result<Vec<KvCache>> {
        let dim = config.hidden_size / config.num_attention_heads;
        (0..config.num_hidden_layers)
            .map(|_| {
                KvCache::new(batch, KvShape { kv_heads: config.num_key_value_heads, head_dim: dim, value_dim: dim })
            })
            .collect()
    }
}

struct Layer {
    dim: usize,
    attention_norm: RmsNorm,
    qkv: [Linear; 3],
    out: Linear,
    norm: RmsNorm,
    gate: Linear,
    up: Linear,
    down: Linear,
}

impl Layer {
    fn load(weights: &VarBuilder<'_>, config: &Config) -> Result<Self> {
        let (hidden, wide) = (config.hidden_size, config.intermediate_size);
        let dim = hidden / config.num_attention_heads;
        let kv = dim * config.num_key_value_heads;
        let part = |name: &str, from, to| linear(from, to, weights.pp(name));
        let norm = |name: &str| rms_norm(hidden, config.rms_norm_eps, weights.pp(name));
        Ok(Self {
            dim,
            attention_norm: norm("input_layernorm")?,
            qkv: [
                part("self_attn.q_proj", hidden, hidden)?,
                part("self_attn.k_proj", hidden, kv)?,
                part("self_attn.v_proj", hidden, kv)?,
            ],
            out: part("self_attn.o_proj", hidden, hidden)?,
            norm: norm("post_attention_layernorm")?,
            gate: part("mlp.gate_proj", hidden, wide)?,
            up: part("mlp.up_proj", hidden, wide)?,
            down: part("mlp.down_proj", wide, hidden)?,
        })
    }

    fn attend(&self, x: &Tensor, cos: &Tensor, sin: &Tensor, cache: &mut KvCache) -> Result<Tensor> {
        let (batch, rows, _) = x.dims3()?;
        let heads = |part: &Linear| part.forward(x)?.reshape((batch, rows, (), self.dim));
        let [q, k, v] = self.qkv.each_ref().map(heads);
        let (q, k) = (rotary_emb::rope_thd(&q?, cos, sin)?, rotary_emb::rope_thd(&k?, cos, sin)?);
        cache.append(&k.transpose(1, 2)?, &v?.transpose(1, 2)?)?;
        let causal = Sdpa::new(Attention::new().causal().align(Alignment::BottomRight));
        self.out.forward(&cache.attend(&q.transpose(1, 2)?, &causal)?.transpose(1, 2)?.flatten_from(2)?)
    }

    fn forward(&self, x: &Tensor, cos: &Tensor, sin: &Tensor, cache: &mut KvCache) -> Result<Tensor> {
        let x = (self.attend(&self.attention_norm.forward(x)?, cos, sin, cache)? + x)?;
        let normed = self.norm.forward(&x)?;
        self.down.forward(&(ops::silu(&self.gate.forward(&normed)?)? * self.up.forward(&normed)?)?)? + x
    }
}

/// A small model, for random weights.
pub(crate) fn small() -> Config {
    Config {
        hidden_size: 256,
        intermediate_size: 512,
        vocab_size: 300,
        num_hidden_layers: 3,
        num_attention_heads: 8,
        num_key_value_heads: 2,
        use_flash_attn: false,
        rms_norm_eps: 1e-5,
        rope_theta: 10_000.0,
        bos_token_id: None,
        eos_token_id: None,
        rope_scaling: None,
        max_position_embeddings: 512,
        tie_word_embeddings: false,
    }
}

/// Largest difference between logits, as a part of the largest logit.
pub(crate) fn difference(logits: &Tensor, of: &Tensor) -> Result<f32> {
    let largest = of.to_dtype(DType::F32)?.abs()?.max_all()?.to_scalar::<f32>()?;
    Ok((logits - of)?.to_dtype(DType::F32)?.abs()?.max_all()?.to_scalar::<f32>()? / largest)
}
