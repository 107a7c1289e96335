//! Views of burn's tensors: the memory of the Flex backend, with its strides.

use crate::error::Error;
use burn_flex::{Flex, FlexTensor, Layout};
use burn_tensor::{Bool, BoolStore, DType, PrimitiveConversionError, Tensor, bf16, f16};
use sdpa::{LayoutError, Mask, View};

/// Returns the tensor of the backend, which shares the memory of burn's.
pub(crate) fn float(argument: &'static str, tensor: Tensor<4>) -> Result<FlexTensor, Error> {
    tensor.try_into_primitive::<Flex>().map_err(|e| elsewhere(argument, e))
}

/// Returns the tensor of the backend, which shares the memory of burn's.
pub(crate) fn bool(argument: &'static str, tensor: Tensor<4, Bool>) -> Result<FlexTensor, Error> {
    tensor.try_into_primitive::<Flex>().map_err(|e| elsewhere(argument, e))
}

pub(crate) fn elsewhere(argument: &'static str, e: PrimitiveConversionError) -> Error {
    let (PrimitiveConversionError::BackendMismatch(reason) | PrimitiveConversionError::KindMismatch(reason)) = e;
    Error::Backend { argument, reason }
}

/// Views a tensor of elements that are read as they lie.
pub(crate) fn tensor<'a>(argument: &'static str, tensor: &'a FlexTensor) -> Result<sdpa::Tensor<'a>, Error> {
    let layout = tensor.layout();
    Ok(match tensor.dtype() {
        DType::F32 => view(tensor.storage::<f32>(), layout)?.into(),
        DType::BF16 => view(tensor.storage::<bf16>(), layout)?.into(),
        DType::F16 => view(tensor.storage::<f16>(), layout)?.into(),
        got => return Err(Error::Dtype { argument, got, expected: "f32, bf16 or f16" }),
    })
}

/// Views a mask, in which true hides a key.
pub(crate) fn mask(tensor: &FlexTensor) -> Result<Mask<'_>, Error> {
    match tensor.dtype() {
        DType::Bool(BoolStore::Native | BoolStore::U8) => Ok(Mask::drop(view(tensor.bytes(), tensor.layout())?)),
        got => Err(Error::Dtype { argument: "mask", got, expected: "bools of a byte" }),
    }
}

fn view<'a, T>(memory: &'a [T], layout: &Layout) -> Result<View<'a, T>, LayoutError> {
    let strides = layout.strides().try_into().map_err(|_| LayoutError::Dimensions { got: layout.num_dims() })?;
    View::from_strides(memory, layout.start_offset(), layout.shape().dims(), strides)
}
