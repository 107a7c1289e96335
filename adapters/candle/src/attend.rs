//! Calls of `sdpa` as candle's operations.

use crate::settings::{Sdpa, pack};
use crate::views;
use candle_core::{CpuStorage, CustomOp1, CustomOp3, Layout, Result, Shape, Tensor, bail};
use half::{bf16, f16};
use sdpa::{Inputs, Outputs, TensorMut, ViewMut};
use std::sync::OnceLock;

/// Order of the output's elements in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Order {
    /// Batch, heads, rows, dim.
    HeadsFirst,
    /// Batch, rows, heads, dim.
    RowsFirst,
}

impl Order {
    /// Returns the order in which the queries lie in memory.
    pub(crate) fn of(q: &Tensor) -> Self {
        match (q.dims(), q.stride()) {
            (&[_, heads, rows, _], &[_, head, row, _]) if heads > 1 && rows > 1 && 0 < head && head < row => {
                Self::RowsFirst
            }
            _ => Self::HeadsFirst,
        }
    }

    /// Returns an output of an operation as `[batch, heads, rows, dim]`.
    pub(crate) fn restore(self, out: Tensor) -> Result<Tensor> {
        match self {
            Self::HeadsFirst => Ok(out),
            Self::RowsFirst => out.transpose(1, 2),
        }
    }
}

impl Sdpa {
    /// Computes attention of queries `[batch, heads, q_len, head_dim]`, keys `[batch, kv_heads, kv_len, head_dim]` and
    /// values `[batch, kv_heads, kv_len, value_dim]`, of types `f32`, `bf16`, `f16` and `f64` in any mix; `heads` is a
    /// multiple of `kv_heads`. Tensors of `f64` are rounded to `f32` in a copy and computed in `f32`: the result is no more
    /// accurate than that of `f32` tensors, and what `f32` cannot hold becomes ±∞.
    ///
    /// Returns `[batch, heads, q_len, value_dim]` in the type of the queries, which lies in memory as the queries do:
    /// if they are a transposed `[batch, q_len, heads, head_dim]`, transposing the output back copies nothing.
    ///
    /// # Errors
    /// Candle's error with the message of [`sdpa::Error`], which names the argument, if something does not fit. Tensors
    /// must be on the CPU; the error names the argument and its device.
    ///
    /// Candle's `backward` gives gradients in `q`, `k`, `v`, bias, slopes and sinks, by [`sdpa::attention_backward`]. Masks and
    /// lengths are integers, which have none; a call with [`selected`](Self::selected) keys has no backward pass. A bias, slopes
    /// or sinks that candle tracks are copied in a call, and so are the values beside them.
    pub fn forward(&self, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
        for (argument, x) in [("q", q), ("k", k), ("v", v)] {
            views::check_device(argument, x)?;
        }
        let order = Order::of(q);
        let out = self.forward_f32(order, [&views::narrowed(q)?, &views::narrowed(k)?, &views::narrowed(v)?])?;
        order.restore(out.to_dtype(q.dtype())?)
    }

    /// Computes attention of tensors that are not `f64`, into an output in the given order.
    fn forward_f32(&self, order: Order, [q, k, v]: [&Tensor; 3]) -> Result<Tensor> {
        let call = match (q.dims(), k.dims()) {
            (&[batch, _, rows, _], &[_, _, keys, _]) => self.over_tensors([batch, rows, keys])?,
            // Refused below.
            _ => self.clone(),
        };
        let learned: Vec<&Tensor> = call.learned().into_iter().flatten().collect();
        // Candle's operations have three arguments.
        let last = if learned.is_empty() { v.clone() } else { pack(v, &learned)? };
        // Candle asks only operations on variables, and on what depends on them, for gradients.
        let lse = [q, k, &last].iter().any(|x| x.track_op()).then(OnceLock::new);
        let packed = (!learned.is_empty()).then(|| v.detach());
        q.apply_op3(k, &last, Op { sdpa: call, order, packed, lse })
    }
}

/// Attention over keys and values in tensors.
pub(crate) struct Op {
    pub(crate) sdpa: Sdpa,
    pub(crate) order: Order,
    /// Values, if the third argument is not these but all that [`pack`] lays end to end.
    pub(crate) packed: Option<Tensor>,
    /// Log-sum-exp of the forward call, which the backward pass needs, if there may be one.
    pub(crate) lse: Option<OnceLock<Vec<f32>>>,
}

impl CustomOp3 for Op {
    fn name(&self) -> &'static str {
        "sdpa"
    }

    fn cpu_fwd(
        &self,
        q: &CpuStorage,
        q_layout: &Layout,
        k: &CpuStorage,
        k_layout: &Layout,
        v: &CpuStorage,
        v_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let packed = self.packed.as_ref().map(Tensor::storage_and_layout);
        let (v, v_layout) = match &packed {
            Some((storage, layout)) => (views::on_cpu("v", storage)?, *layout),
            None => (v, v_layout),
        };
        let queries = views::tensor("q", q, q_layout)?;
        let inputs = Inputs::new(queries, views::tensor("k", k, k_layout)?, views::tensor("v", v, v_layout)?);
        let Some(saved) = &self.lse else { return self.sdpa.run(inputs, q, self.order, None) };
        let mut lse = Vec::new();
        let out = self.sdpa.run(inputs, q, self.order, Some(&mut lse))?;
        // Candle calls an operation once: there is nothing set yet.
        let _ = saved.set(lse);
        Ok(out)
    }

    fn bwd(
        &self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        out: &Tensor,
        d_out: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let Some(lse) = self.lse.as_ref().and_then(OnceLock::get) else {
            bail!("sdpa: backward without a forward call on the CPU")
        };
        let [out, d_out] = [self.order.restore(out.clone())?, self.order.restore(d_out.clone())?];
        let of_all = self.sdpa.gradients([q, k, self.packed.as_ref().unwrap_or(v)], [&out, &d_out], lse)?;
        let ([dq, dk, dv], options) = of_all;
        let last = if self.packed.is_none() { dv } else { pack(&dv, &options.iter().collect::<Vec<_>>())? };
        Ok((Some(dq), Some(dk), Some(last)))
    }
}

/// Attention over keys and values in a cache.
pub(crate) struct CachedOp<'a> {
    pub(crate) sdpa: Sdpa,
    pub(crate) cache: &'a sdpa::KvCache,
    pub(crate) order: Order,
}

impl CustomOp1 for CachedOp<'_> {
    fn name(&self) -> &'static str {
        "sdpa over a cache"
    }

    fn cpu_fwd(&self, q: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let inputs = Inputs::cached(views::tensor("q", q, layout)?, self.cache);
        self.sdpa.run(inputs, q, self.order, None)
    }
}

/// Output of a call over a cache, in which candle could want the gradient of an argument: the step back is an error.
pub(crate) struct NoGradient {
    /// Name of the argument.
    pub(crate) argument: &'static str,
    /// Result of the call.
    pub(crate) out: Tensor,
}

impl CustomOp1 for NoGradient {
    fn name(&self) -> &'static str {
        "sdpa over a cache"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        let (storage, _) = self.out.storage_and_layout();
        Ok((views::on_cpu("output", &storage)?.clone(), self.out.shape().clone()))
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, _: &Tensor) -> Result<Option<Tensor>> {
        bail!("sdpa: {}: needs Sdpa::forward for a gradient: a call over a cache has no backward pass", self.argument)
    }
}

impl Sdpa {
    /// Runs the call with all options. Returns its output in the type of `q` and the given order, and the shape in that
    /// order; and its log-sum-exp, if there is a vector for it.
    fn run(
        &self,
        inputs: Inputs<'_>,
        q: &CpuStorage,
        order: Order,
        lse: Option<&mut Vec<f32>>,
    ) -> Result<(CpuStorage, Shape)> {
        self.with_options(inputs, |inputs| match q {
            CpuStorage::BF16(_) => {
                self.filled(inputs, order, vec![bf16::ZERO; out_len(&inputs)?], lse, CpuStorage::BF16)
            }
            CpuStorage::F16(_) => self.filled(inputs, order, vec![f16::ZERO; out_len(&inputs)?], lse, CpuStorage::F16),
            _ => self.filled(inputs, order, vec![0f32; out_len(&inputs)?], lse, CpuStorage::F32),
        })
    }

    /// Calls `work` with the inputs and the tensors that options add.
    pub(crate) fn with_options<R>(&self, inputs: Inputs<'_>, work: impl FnOnce(Inputs<'_>) -> Result<R>) -> Result<R> {
        let alibi = self.alibi.as_ref().map(|slopes| views::numbers("alibi", slopes)).transpose()?;
        let sinks = self.sinks.as_ref().map(|logits| views::numbers("sinks", logits)).transpose()?;
        let kv_lens = self.kv_lens.as_ref().map(|lens| views::lengths("kv_lens", lens)).transpose()?;
        let selected = self.selected.as_ref().map(|lists| lists.keys(inputs, kv_lens.as_deref())).transpose()?;
        let bias = self.bias.as_ref().map(Tensor::storage_and_layout);
        let mask = self.mask.as_ref().map(|mask| (mask, mask.tensor().storage_and_layout()));
        let [batch, ..] = inputs.queries().shape();
        // Borrows that end with this function join the caller's.
        let mut inputs = inputs;
        if let Some(slopes) = &alibi {
            inputs = inputs.alibi(slopes);
        }
        if let Some(logits) = &sinks {
            inputs = inputs.sinks(logits);
        }
        if let Some(lens) = &kv_lens {
            inputs = inputs.kv_lens(lens);
        }
        if let Some(keys) = &selected {
            inputs = inputs.selected(keys);
        }
        if let Some((storage, layout)) = &bias {
            views::check_front("bias", layout.dims(), batch)?;
            inputs = inputs.bias(views::floats("bias", views::on_cpu("bias", storage)?, layout)?);
        }
        if let Some((mask, (storage, layout))) = &mask {
            views::check_front("mask", layout.dims(), batch)?;
            inputs = inputs.mask(mask.over(views::mask(views::on_cpu("mask", storage)?, layout)?));
        }
        work(inputs)
    }

    /// Runs the call into `out`, and its log-sum-exp into `lse`, if there is such a vector.
    fn filled<T>(
        &self,
        inputs: Inputs<'_>,
        order: Order,
        mut out: Vec<T>,
        lse: Option<&mut Vec<f32>>,
        storage: fn(Vec<T>) -> CpuStorage,
    ) -> Result<(CpuStorage, Shape)>
    where
        for<'a> ViewMut<'a, T>: Into<TensorMut<'a>>,
    {
        let sdpa::Shape { batch, heads, q_len, value_dim, .. } = inputs.shape().map_err(views::refused)?;
        let (view, shape) = match order {
            Order::HeadsFirst => {
                let shape = [batch, heads, q_len, value_dim];
                (ViewMut::bhld(&mut out, shape), shape)
            }
            Order::RowsFirst => {
                let shape = [batch, q_len, heads, value_dim];
                (ViewMut::blhd(&mut out, shape), shape)
            }
        };
        let mut outputs = Outputs::new(view.map_err(views::refused)?);
        if let Some(lse) = lse {
            lse.resize(batch * heads * q_len, 0.0);
            outputs = outputs.lse(ViewMut::bhl(lse, [batch, heads, q_len]).map_err(views::refused)?);
        }
        sdpa::attention(&self.attention, inputs, outputs).map_err(views::refused)?;
        Ok((storage(out), shape.to_vec().into()))
    }
}

/// Returns the number of elements of the output.
fn out_len(inputs: &Inputs<'_>) -> Result<usize> {
    let sdpa::Shape { batch, heads, q_len, value_dim, .. } = inputs.shape().map_err(views::refused)?;
    Ok(batch * heads * q_len * value_dim)
}
