//! Tensors of 16-bit elements, with the same numbers as `f32` beside them. The crate `half` does the rounding here.

use crate::support::Tensor;
use half::{bf16, f16};
use sdpa::{Dtype, View, ViewMut};

pub const DTYPES: [Dtype; 3] = [Dtype::F32, Dtype::Bf16, Dtype::F16];
pub const SHORT: [Dtype; 2] = [Dtype::Bf16, Dtype::F16];

/// A number as an element of this type has it.
pub fn rounded(x: f32, dtype: Dtype) -> f32 {
    match dtype {
        Dtype::F32 => x,
        Dtype::Bf16 => bf16::from_f32(x).to_f32(),
        Dtype::F16 => f16::from_f32(x).to_f32(),
        dtype => panic!("a new type: {dtype}"),
    }
}

/// The bits of that element, as the last of these 32.
pub fn bits(x: f32, dtype: Dtype) -> u32 {
    match dtype {
        Dtype::F32 => x.to_bits(),
        Dtype::Bf16 => bf16::from_f32(x).to_bits().into(),
        Dtype::F16 => f16::from_f32(x).to_bits().into(),
        dtype => panic!("a new type: {dtype}"),
    }
}

/// Memory of elements of a type.
#[derive(Debug, Clone)]
pub enum Elements {
    F32(Vec<f32>),
    Bf16(Vec<bf16>),
    F16(Vec<f16>),
}

impl Elements {
    pub fn of(data: &[f32], dtype: Dtype) -> Self {
        match dtype {
            Dtype::F32 => Self::F32(data.to_vec()),
            Dtype::Bf16 => Self::Bf16(data.iter().map(|&x| bf16::from_f32(x)).collect()),
            Dtype::F16 => Self::F16(data.iter().map(|&x| f16::from_f32(x)).collect()),
            dtype => panic!("a new type: {dtype}"),
        }
    }

    pub fn dtype(&self) -> Dtype {
        match self {
            Self::F32(_) => Dtype::F32,
            Self::Bf16(_) => Dtype::Bf16,
            Self::F16(_) => Dtype::F16,
        }
    }

    pub fn bits(&self) -> Vec<u32> {
        match self {
            Self::F32(data) => data.iter().map(|x| x.to_bits()).collect(),
            Self::Bf16(data) => data.iter().map(|x| x.to_bits().into()).collect(),
            Self::F16(data) => data.iter().map(|x| x.to_bits().into()).collect(),
        }
    }

    /// A writable tensor that lies like `like`.
    pub fn view_mut(&mut self, like: &Tensor) -> sdpa::TensorMut<'_> {
        let &Tensor { offset, shape, strides, .. } = like;
        let fits = "it fits its memory";
        match self {
            Self::F32(data) => ViewMut::from_strides(data, offset, shape, strides).expect(fits).into(),
            Self::Bf16(data) => ViewMut::from_strides(data, offset, shape, strides).expect(fits).into(),
            Self::F16(data) => ViewMut::from_strides(data, offset, shape, strides).expect(fits).into(),
        }
    }
}

/// A tensor rounded to a type, as elements of it and widened again.
#[derive(Debug, Clone)]
pub struct Rounded {
    pub elements: Elements,
    pub wide: Tensor,
}

/// As `f32`.
impl From<Tensor> for Rounded {
    fn from(x: Tensor) -> Self {
        Self::new(&x, Dtype::F32)
    }
}

impl Rounded {
    pub fn new(x: &Tensor, dtype: Dtype) -> Self {
        let data = x.data.iter().map(|&x| rounded(x, dtype)).collect();
        Self { elements: Elements::of(&x.data, dtype), wide: Tensor { data, ..x.clone() } }
    }

    pub fn dtype(&self) -> Dtype {
        self.elements.dtype()
    }

    pub fn view(&self) -> sdpa::Tensor<'_> {
        let Tensor { offset, shape, strides, .. } = self.wide;
        let fits = "it fits its memory";
        match &self.elements {
            Elements::F32(data) => View::from_strides(data, offset, shape, strides).expect(fits).into(),
            Elements::Bf16(data) => View::from_strides(data, offset, shape, strides).expect(fits).into(),
            Elements::F16(data) => View::from_strides(data, offset, shape, strides).expect(fits).into(),
        }
    }
}
