//! Candle's own attention, and tensors for it.

use crate::interleaved;
use candle_core::{D, DType, Device, Result, Tensor};
use candle_nn::ops::softmax;

pub(crate) const TYPES: [DType; 3] = [DType::F32, DType::BF16, DType::F16];

/// Tensors and settings of a call that change its scores.
#[derive(Default)]
pub(crate) struct Scores {
    pub(crate) scale: Option<f64>,
    pub(crate) softcap: Option<f64>,
    /// Broadcast to the scores.
    pub(crate) bias: Option<Tensor>,
    /// Nonzero where a row sees a key; broadcast to the scores.
    pub(crate) keep: Option<Tensor>,
    /// `[heads]`
    pub(crate) sinks: Option<Tensor>,
}

impl Scores {
    pub(crate) fn keep(keep: Tensor) -> Self {
        Self { keep: Some(keep), ..Self::default() }
    }
}

/// Numbers of about a normal distribution, the same for the same seed.
pub(crate) fn random(shape: impl Into<candle_core::Shape>, seed: u64) -> Tensor {
    let shape = shape.into();
    Tensor::from_vec(interleaved::random(shape.elem_count(), seed), shape, &Device::Cpu).unwrap()
}

/// A mask `[1, 1, rows, keys]` by a rule of row and key.
pub(crate) fn mask(rows: usize, keys: usize, rule: impl Fn(usize, usize) -> bool) -> Tensor {
    let bytes = (0..rows * keys).map(|n| u8::from(rule(n / keys, n % keys))).collect();
    Tensor::from_vec::<_, u8>(bytes, (1, 1, rows, keys), &Device::Cpu).unwrap()
}

/// Candle's answer, in `f32`. A row that sees no key gives NaN.
pub(crate) fn candle(q: &Tensor, k: &Tensor, v: &Tensor, scores: &Scores) -> Result<Tensor> {
    let (batch, heads, rows, dim) = q.dims4()?;
    let group = heads / k.dim(1)?;
    // Head h of the queries meets head h / group of the keys.
    let repeated = |x: &Tensor| {
        let (b, h, l, d) = x.dims4()?;
        x.to_dtype(DType::F32)?.unsqueeze(2)?.broadcast_as((b, h, group, l, d))?.reshape((b, heads, l, d))
    };
    let (q, k, v) = (q.to_dtype(DType::F32)?.contiguous()?, repeated(k)?, repeated(v)?);
    let mut s = (q.matmul(&k.t()?)? * scores.scale.unwrap_or(1.0 / (dim as f64).sqrt()))?;
    if let Some(c) = scores.softcap {
        s = ((s / c)?.tanh()? * c)?;
    }
    if let Some(bias) = &scores.bias {
        s = s.broadcast_add(&bias.to_dtype(DType::F32)?)?;
    }
    if let Some(keep) = &scores.keep {
        let hidden = Tensor::full(f32::NEG_INFINITY, s.shape(), s.device())?;
        s = keep.broadcast_as(s.shape())?.where_cond(&s, &hidden)?;
    }
    let keys = s.dim(3)?;
    if let Some(sinks) = &scores.sinks {
        s = Tensor::cat(&[s, sinks.reshape((1, heads, 1, 1))?.broadcast_as((batch, heads, rows, 1))?], 3)?;
    }
    softmax(&s, D::Minus1)?.narrow(D::Minus1, 0, keys)?.contiguous()?.matmul(&v)
}

/// Elements in the order of the shape, in `f32`.
pub(crate) fn numbers(x: &Tensor) -> Vec<f32> {
    x.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

pub(crate) fn assert_close(got: &Tensor, expected: &Tensor, bound: f32, what: &str) {
    assert_eq!(got.dims(), expected.dims(), "{what}");
    let (got, expected) = (numbers(got), numbers(expected));
    let worst = got.iter().zip(&expected).map(|(a, b)| (a - b).abs()).enumerate();
    let worst = worst.max_by(|a, b| a.1.total_cmp(&b.1));
    if let Some((at, worst)) = worst {
        assert!(worst <= bound, "{what}: element {at}: {} for {}, off by {worst:e}", got[at], expected[at]);
    }
}

pub(crate) fn assert_same(got: &Tensor, expected: &Tensor, what: &str) {
    assert_eq!((got.dims(), got.dtype()), (expected.dims(), expected.dtype()), "{what}");
    let (got, expected) = (numbers(got), numbers(expected));
    let differs = got.iter().zip(&expected).position(|(a, b)| a.to_bits() != b.to_bits());
    assert!(differs.is_none(), "{what}: element {differs:?}");
}
