//! Layers of both models, as `sdpa-layers` computes them: without biases, RMS norms before each part, ReLU.

use candle_core::{D, DType, Device, Module, Result, Tensor};
use candle_nn::{Init, Linear, VarBuilder, linear_no_bias, ops};
use sdpa_candle::{Alignment, Attention, KvCache, KvShape, Sdpa};
use sdpa_layers::{Compute, Embedding};

/// Implementation of attention in a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Attend {
    /// This crate's operation.
    Sdpa,
    /// Candle's own operations: matmul, softmax, matmul.
    Candle,
}

/// Visibility of keys to a row, for either attention.
#[derive(Debug, Clone)]
pub(crate) struct Visible {
    sdpa: Sdpa,
    bias: Tensor,
}

impl Visible {
    /// Each row sees the rows up to its own.
    pub(crate) fn causal(rows: usize) -> Result<Self> {
        let sdpa = Sdpa::new(Attention::new().causal().align(Alignment::TopLeft));
        Ok(Self { sdpa, bias: bias((1, 1, rows, rows), |n| n % rows <= n / rows)? })
    }

    /// Each row sees the first keys of its sequence, by the number given for it.
    pub(crate) fn lengths(lens: &[u32], keys: usize) -> Result<Self> {
        let sdpa = Sdpa::default().kv_lens(&Tensor::new(lens, &Device::Cpu)?);
        Ok(Self { sdpa, bias: bias((lens.len(), 1, 1, keys), |n| n % keys < lens[n / keys] as usize)? })
    }
}

/// Mask that is added to scores for candle: −∞ where a key is hidden.
fn bias(shape: (usize, usize, usize, usize), seen: impl Fn(usize) -> bool) -> Result<Tensor> {
    let numbers = (0..shape.0 * shape.2 * shape.3).map(|n| if seen(n) { 0.0 } else { f32::NEG_INFINITY });
    Tensor::from_iter(numbers, &Device::Cpu)?.reshape(shape)
}

/// RMS norm. The faster norms of candle-nn have no gradients.
pub(crate) struct Norm(Tensor);

const EPS: f32 = 1e-6;

impl Norm {
    pub(crate) fn new(width: usize, vars: VarBuilder<'_>) -> Result<Self> {
        Ok(Self(vars.get_with_hints(width, "weight", Init::Const(1.0))?))
    }
}

impl Module for Norm {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        ops::rms_norm_slow(x, &self.0, EPS)
    }
}

/// A projection without a bias.
pub(crate) fn projection(inputs: usize, outputs: usize, vars: VarBuilder<'_>) -> Result<Linear> {
    linear_no_bias(inputs, outputs, vars)
}

/// Attention between projections, with the norm before it.
pub(crate) struct MultiHead {
    attend: Attend,
    heads: usize,
    q: Linear,
    k: Linear,
    v: Linear,
    out: Linear,
    pub(crate) norm: Norm,
}

impl MultiHead {
    pub(crate) fn new(attend: Attend, width: usize, heads: usize, vars: &VarBuilder<'_>) -> Result<Self> {
        let square = |name: &str| projection(width, width, vars.pp(name));
        let norm = Norm::new(width, vars.pp("norm"))?;
        Ok(Self { attend, heads, q: square("q")?, k: square("k")?, v: square("v")?, out: square("out")?, norm })
    }

    /// Splits a projection into heads, `[batch, heads, rows, head_dim]`: a view.
    fn heads(&self, projection: &Linear, x: &Tensor) -> Result<Tensor> {
        let (batch, rows, _) = x.dims3()?;
        projection.forward(x)?.reshape((batch, rows, self.heads, ()))?.transpose(1, 2)
    }

    fn joined(&self, heads: &Tensor) -> Result<Tensor> {
        self.out.forward(&heads.transpose(1, 2)?.flatten_from(D::Minus2)?)
    }

    /// Rows of `x` look at rows of `memory`, `[batch, rows, width]` both.
    pub(crate) fn forward(&self, x: &Tensor, memory: &Tensor, visible: &Visible) -> Result<Tensor> {
        let (q, k, v) = (self.heads(&self.q, x)?, self.heads(&self.k, memory)?, self.heads(&self.v, memory)?);
        let heads = match self.attend {
            Attend::Sdpa => visible.sdpa.forward(&q, &k, &v)?,
            Attend::Candle => weights(&q, &k, Some(&visible.bias))?.matmul(&v.contiguous()?)?,
        };
        self.joined(&heads)
    }

    /// Weights of each head, `[batch, heads, rows, keys]`; every key is seen.
    pub(crate) fn weights(&self, x: &Tensor, memory: &Tensor) -> Result<Tensor> {
        weights(&self.heads(&self.q, x)?, &self.heads(&self.k, memory)?, None)
    }

    /// Makes an empty cache for this attention.
    pub(crate) fn cache(&self, sequences: usize) -> Result<KvCache> {
        let dim = self.q.weight().dim(0)? / self.heads;
        KvCache::new(sequences, KvShape { kv_heads: self.heads, head_dim: dim, value_dim: dim })
    }

    /// Adds keys and values of these rows to the cache.
    pub(crate) fn append(&self, memory: &Tensor, cache: &mut KvCache) -> Result<()> {
        cache.append(&self.heads(&self.k, memory)?, &self.heads(&self.v, memory)?)
    }

    /// Rows of `x` look at what is in the cache.
    pub(crate) fn cached(&self, x: &Tensor, cache: &KvCache) -> Result<Tensor> {
        self.joined(&cache.attend(&self.heads(&self.q, x)?, &Sdpa::default())?)
    }
}

/// softmax(q·kᵀ / √head_dim + bias), in candle's operations.
fn weights(q: &Tensor, k: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    let scale = (q.dim(3)? as f64).powf(-0.5);
    let scores = (q.contiguous()?.matmul(&k.t()?.contiguous()?)? * scale)?;
    ops::softmax(&bias.map_or(Ok(scores.clone()), |bias| scores.broadcast_add(bias))?, D::Minus1)
}

/// Two projections with ReLU between them, with the norm before them.
pub(crate) struct FeedForward {
    up: Linear,
    down: Linear,
    norm: Norm,
}

impl FeedForward {
    pub(crate) fn new(width: usize, hidden: usize, vars: &VarBuilder<'_>) -> Result<Self> {
        let norm = Norm::new(width, vars.pp("norm"))?;
        Ok(Self {
            up: projection(width, hidden, vars.pp("up"))?,
            down: projection(hidden, width, vars.pp("down"))?,
            norm,
        })
    }
}

impl Module for FeedForward {
    /// Adds to the stream.
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        x + self.down.forward(&self.up.forward(&self.norm.forward(x)?)?.relu()?)?
    }
}

/// Sinusoidal positions, `[positions, width]`.
pub(crate) fn positions(positions: usize, width: usize) -> Result<Tensor> {
    let mut rows = vec![0.0; positions * width];
    let all: Vec<u32> = (0..positions as u32).collect();
    Embedding::sinusoidal(positions, width)
        .and_then(|table| table.look_up(&all, &mut rows, &mut Compute::default()))
        .map_err(candle_core::Error::wrap)?;
    Tensor::from_vec(rows, (positions, width), &Device::Cpu)?.to_dtype(DType::F32)
}
