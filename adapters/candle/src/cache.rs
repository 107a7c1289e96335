//! Keys and values kept from call to call.

use crate::attend::{CachedOp, NoGradient, Order};
use crate::settings::Sdpa;
use crate::views::{self, on_cpu, refused};
use candle_core::{DType, Result, Tensor, Var, bail};
use core::ops::{Deref, DerefMut};
use sdpa::{Dtype, Int4, KeyScales, KvShape};

/// Keys and values of one layer for a batch of sequences, kept packed from call to call: [`sdpa::KvCache`] filled from
/// candle's tensors. Its other methods (`truncate`, `fork`, `lens`, …) are those of [`sdpa::KvCache`].
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use sdpa_candle::{Alignment, Attention, KvCache, KvShape, Sdpa};
/// # fn main() -> candle_core::Result<()> {
/// let sdpa = Sdpa::new(Attention::new().causal().align(Alignment::BottomRight));
/// let shape = KvShape { kv_heads: 2, head_dim: 64, value_dim: 64 };
/// let mut cache = KvCache::new(1, shape)?.dtype(DType::BF16)?; // one sequence
/// for rows in [10, 1, 1] {
///     let q = Tensor::randn(0f32, 1.0, (1, 8, rows, 64), &Device::Cpu)?;
///     let kv = Tensor::randn(0f32, 1.0, (1, 2, rows, 64), &Device::Cpu)?;
///     cache.append(&kv, &kv)?;
///     assert_eq!(cache.attend(&q, &sdpa)?.dims(), [1, 8, rows, 64]);
/// }
/// assert_eq!(cache.lens(), [12]);
/// # Ok(()) }
/// ```
#[derive(Debug, Clone)]
pub struct KvCache {
    cache: sdpa::KvCache,
    /// Name of keys or values that were appended and that candle tracks.
    tracked: Option<&'static str>,
}

impl KvCache {
    /// Creates an empty `f32` cache for `sequences` sequences. A sliding cache is made with
    /// [`sdpa::KvCache::sliding`] and `From`.
    ///
    /// # Errors
    /// As [`sdpa::KvCache::new`].
    pub fn new(sequences: usize, shape: KvShape) -> Result<Self> {
        sdpa::KvCache::new(sequences, shape).map(Self::from).map_err(refused)
    }

    /// Sets the element type of the empty cache: `f32`, `bf16` or `f16`.
    ///
    /// # Errors
    /// Any other type, or as [`sdpa::KvCache::dtype`].
    pub fn dtype(self, dtype: DType) -> Result<Self> {
        let dtype = match dtype {
            DType::F32 => Dtype::F32,
            DType::BF16 => Dtype::Bf16,
            DType::F16 => Dtype::F16,
            other => bail!("sdpa: dtype: type is {}, but must be f32, bf16 or f16", other.as_str()),
        };
        self.cache.dtype(dtype).map(Self::from).map_err(refused)
    }

    /// Sets int8 elements with scales: see [`sdpa::KvCache::int8`], which bounds their error.
    ///
    /// # Errors
    /// As [`sdpa::KvCache::int8`].
    pub fn int8(self, keys: KeyScales) -> Result<Self> {
        self.cache.int8(keys).map(Self::from).map_err(refused)
    }

    /// Sets elements of four bits: see [`sdpa::KvCache::int4`], which bounds their error.
    ///
    /// # Errors
    /// As [`sdpa::KvCache::int4`].
    pub fn int4(self, kind: Int4) -> Result<Self> {
        self.cache.int4(kind).map(Self::from).map_err(refused)
    }

    /// Appends keys `[sequences, kv_heads, rows, head_dim]` and values `[sequences, kv_heads, rows, value_dim]` to all
    /// sequences, from tensors of any strides and of types `f32`, `bf16`, `f16` and `f64` in any mix. Elements of `f64` are rounded
    /// to `f32` in a copy.
    ///
    /// # Errors
    /// As [`sdpa::KvCache::append`]; the cache is then unchanged.
    pub fn append(&mut self, k: &Tensor, v: &Tensor) -> Result<()> {
        with_views(k, v, |k, v| self.cache.append(k, v))?;
        self.note([k, v]);
        Ok(())
    }

    /// Appends keys and values of batch 1 to one sequence; otherwise as [`Self::append`].
    ///
    /// # Errors
    /// As [`sdpa::KvCache::append_to`]; the cache is then unchanged.
    pub fn append_to(&mut self, sequence: usize, k: &Tensor, v: &Tensor) -> Result<()> {
        with_views(k, v, |k, v| self.cache.append_to(sequence, k, v))?;
        self.note([k, v]);
        Ok(())
    }

    /// Remembers that candle tracks keys or values.
    fn note(&mut self, [k, v]: [&Tensor; 2]) {
        let found = [("k", k), ("v", v)].into_iter().find(|(_, x)| x.track_op());
        self.tracked = self.tracked.or(found.map(|(argument, _)| argument));
    }

    /// Computes attention of queries `[sequences, heads, q_len, head_dim]` over the cache. The output is as for
    /// [`Sdpa::forward`], but has no gradients: if candle tracks an argument, or what was appended, `backward` is an error
    /// that names it.
    ///
    /// # Errors
    /// As [`Sdpa::forward`].
    pub fn attend(&self, q: &Tensor, sdpa: &Sdpa) -> Result<Tensor> {
        views::check_device("q", q)?;
        let order = Order::of(q);
        let lens = self.cache.lens();
        let call = sdpa.over_cache([lens.len(), lens.iter().copied().max().unwrap_or(0)])?;
        let op = CachedOp { sdpa: call, cache: &self.cache, order };
        let out = views::narrowed(q)?.apply_op1_no_bwd(&op)?.to_dtype(q.dtype())?;
        let [bias, alibi, sinks] = sdpa.learned();
        let arguments = [("q", Some(q).filter(|q| q.track_op())), ("bias", bias), ("alibi", alibi), ("sinks", sinks)];
        let tracked = arguments.into_iter().find(|(_, x)| x.is_some()).map(|(argument, _)| argument);
        order.restore(match tracked.or(self.tracked) {
            // Made to depend on a separate variable: the argument would keep all that it was computed from.
            Some(argument) => Var::zeros((), DType::F32, q.device())?.apply_op1(NoGradient { argument, out })?,
            None => out,
        })
    }
}

/// Calls `append` with keys and values as they lie in memory.
fn with_views(
    k: &Tensor,
    v: &Tensor,
    append: impl FnOnce(sdpa::Tensor<'_>, sdpa::Tensor<'_>) -> std::result::Result<(), sdpa::Error>,
) -> Result<()> {
    views::check_device("k", k)?;
    views::check_device("v", v)?;
    let (k, v) = (views::narrowed(k)?, views::narrowed(v)?);
    let ((k, k_layout), (v, v_layout)) = (k.storage_and_layout(), v.storage_and_layout());
    let k = views::tensor("k", on_cpu("k", &k)?, k_layout)?;
    let v = views::tensor("v", on_cpu("v", &v)?, v_layout)?;
    append(k, v).map_err(refused)
}

impl From<sdpa::KvCache> for KvCache {
    fn from(cache: sdpa::KvCache) -> Self {
        Self { cache, tracked: None }
    }
}

impl Deref for KvCache {
    type Target = sdpa::KvCache;

    fn deref(&self) -> &sdpa::KvCache {
        &self.cache
    }
}

impl DerefMut for KvCache {
    fn deref_mut(&mut self) -> &mut sdpa::KvCache {
        &mut self.cache
    }
}
