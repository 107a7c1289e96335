//! Gradients of an operation, for candle's backward pass.

use crate::settings::Sdpa;
use crate::views;
use candle_core::{DType, Result, Tensor};
use half::{bf16, f16};
use sdpa::{Gradients, Inputs, Saved, TensorMut, View, ViewMut};

/// Dense gradient in a tensor, of the tensor's type.
enum Gradient {
    F32(Vec<f32>),
    Bf16(Vec<bf16>),
    F16(Vec<f16>),
}

impl Gradient {
    /// Makes room for the gradient in a tensor.
    fn of(tensor: &Tensor) -> Self {
        let n = tensor.elem_count();
        match tensor.dtype() {
            DType::BF16 => Self::Bf16(vec![bf16::ZERO; n]),
            DType::F16 => Self::F16(vec![f16::ZERO; n]),
            _ => Self::F32(vec![0.0; n]),
        }
    }

    fn view(&mut self, shape: [usize; 4]) -> Result<TensorMut<'_>> {
        Ok(match self {
            Self::F32(data) => ViewMut::bhld(data, shape).map_err(views::refused)?.into(),
            Self::Bf16(data) => ViewMut::bhld(data, shape).map_err(views::refused)?.into(),
            Self::F16(data) => ViewMut::bhld(data, shape).map_err(views::refused)?.into(),
        })
    }

    fn into_tensor(self, like: &Tensor) -> Result<Tensor> {
        match self {
            Self::F32(data) => Tensor::from_vec(data, like.shape(), like.device()),
            Self::Bf16(data) => Tensor::from_vec(data, like.shape(), like.device()),
            Self::F16(data) => Tensor::from_vec(data, like.shape(), like.device()),
        }
    }
}

impl Sdpa {
    /// Computes the gradients in queries, keys and values, and in the tensors of options that candle tracks, from the output,
    /// `[batch, heads, q_len, value_dim]`, its gradient, and the log-sum-exp of the forward call.
    pub(crate) fn gradients(
        &self,
        qkv: [&Tensor; 3],
        [out, d_out]: [&Tensor; 2],
        lse: &[f32],
    ) -> Result<([Tensor; 3], Vec<Tensor>)> {
        let [q, k, v] = qkv.map(Tensor::storage_and_layout);
        let [(q, q_layout), (k, k_layout), (v, v_layout)] = [&q, &k, &v].map(|(storage, layout)| (storage, *layout));
        let inputs = Inputs::new(
            views::tensor("q", views::on_cpu("q", q)?, q_layout)?,
            views::tensor("k", views::on_cpu("k", k)?, k_layout)?,
            views::tensor("v", views::on_cpu("v", v)?, v_layout)?,
        );
        let [out, d_out] = [out, d_out].map(Tensor::storage_and_layout);
        let (batch, heads, rows, _) = qkv[0].dims4()?;
        let saved = Saved::new(
            views::tensor("output", views::on_cpu("output", &out.0)?, out.1)?,
            View::bhl(lse, [batch, heads, rows]).map_err(views::refused)?,
            views::tensor("gradient", views::on_cpu("gradient", &d_out.0)?, d_out.1)?,
        );
        let mut gradients = qkv.map(Gradient::of);
        let mut options = OptionGradients::of(self);
        let shape = |tensor: &Tensor| tensor.dims4().map(|(b, h, l, d)| [b, h, l, d]);
        self.with_options(inputs, |inputs| {
            let [q, k, v] = &mut gradients;
            let wanted =
                Gradients::new().q(q.view(shape(qkv[0])?)?).k(k.view(shape(qkv[1])?)?).v(v.view(shape(qkv[2])?)?);
            let wanted = options.add_to(wanted)?;
            sdpa::attention_backward(&self.attention, inputs, saved, wanted).map_err(views::refused)
        })?;
        let [dq, dk, dv] = gradients;
        let options = options.0.into_iter().flatten().map(|(of, data)| Tensor::from_vec(data, of.shape(), of.device()));
        Ok((
            [dq.into_tensor(qkv[0])?, dk.into_tensor(qkv[1])?, dv.into_tensor(qkv[2])?],
            options.collect::<Result<_>>()?,
        ))
    }
}

/// Gradients, in `f32`, in bias, slopes and sinks, each if candle tracks it, beside what it is a gradient in.
struct OptionGradients<'a>([Option<(&'a Tensor, Vec<f32>)>; 3]);

impl<'a> OptionGradients<'a> {
    /// Makes room for the gradients that a call wants.
    fn of(sdpa: &'a Sdpa) -> Self {
        let room = |of: &'a Tensor| (of, vec![0.0; of.elem_count()]);
        Self(sdpa.learned().map(|of| of.map(room)))
    }

    fn add_to<'g>(&'g mut self, mut wanted: Gradients<'g>) -> Result<Gradients<'g>> {
        let Self([bias, alibi, sinks]) = self;
        if let Some((of, data)) = bias {
            wanted = wanted.bias(ViewMut::bhld(data, views::shape4("bias", of.dims())?).map_err(views::refused)?);
        }
        if let Some((_, data)) = alibi {
            wanted = wanted.alibi(data);
        }
        if let Some((_, data)) = sinks {
            wanted = wanted.sinks(data);
        }
        Ok(wanted)
    }
}
