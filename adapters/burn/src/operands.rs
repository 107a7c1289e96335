//! Tensors of a call.

use crate::error::Error;
use crate::views;
use burn_flex::FlexTensor;
use burn_tensor::{DType, Element, TensorData, bf16, f16};
use sdpa::{Attention, Inputs, Outputs, TensorMut, ViewMut};

/// Tensors of a call. Clones share their memory.
#[derive(Debug, Clone)]
pub(crate) struct Operands {
    pub(crate) query: FlexTensor,
    pub(crate) key: FlexTensor,
    pub(crate) value: FlexTensor,
    pub(crate) mask: Option<FlexTensor>,
    pub(crate) bias: Option<FlexTensor>,
}

impl Operands {
    pub(crate) fn inputs(&self) -> Result<Inputs<'_>, Error> {
        let mut inputs = Inputs::new(
            views::tensor("query", &self.query)?,
            views::tensor("key", &self.key)?,
            views::tensor("value", &self.value)?,
        );
        if let Some(mask) = &self.mask {
            inputs = inputs.mask(views::mask(mask)?);
        }
        if let Some(bias) = &self.bias {
            inputs = inputs.bias(views::tensor("attn_bias", bias)?);
        }
        Ok(inputs)
    }

    /// Returns the output, of the type of the queries; writes the log-sum-exp to `lse`, if there is such a vector.
    pub(crate) fn attention(&self, attention: &Attention, lse: Option<&mut Vec<f32>>) -> Result<FlexTensor, Error> {
        let inputs = self.inputs()?;
        match self.query.dtype() {
            DType::BF16 => run::<bf16>(attention, inputs, lse),
            DType::F16 => run::<f16>(attention, inputs, lse),
            _ => run::<f32>(attention, inputs, lse),
        }
    }
}

/// Runs the call into new memory.
fn run<T>(attention: &Attention, inputs: Inputs<'_>, lse: Option<&mut Vec<f32>>) -> Result<FlexTensor, Error>
where
    T: Element + Default,
    for<'a> TensorMut<'a>: From<ViewMut<'a, T>>,
{
    let shape = inputs.shape()?;
    let sizes = [shape.batch, shape.heads, shape.q_len, shape.value_dim];
    let len = sizes.iter().try_fold(1usize, |n, &size| n.checked_mul(size));
    let len = len.ok_or(sdpa::Error::TooLarge { what: "output", sizes })?;
    let mut out = vec![T::default(); len];
    let mut outputs = Outputs::new(ViewMut::bhld(&mut out, sizes)?);
    if let Some(lse) = lse {
        lse.resize(shape.batch * shape.heads * shape.q_len, 0.0);
        outputs = outputs.lse(ViewMut::bhl(lse, [shape.batch, shape.heads, shape.q_len])?);
    }
    sdpa::attention(attention, inputs, outputs)?;
    Ok(FlexTensor::from_data(TensorData::new(out, sizes)))
}
