//! Types of elements: what they hold, what they take to read, and what an answer computed in them may be off by.

use crate::failure::Result;
use sdpa::{Bf16, F16, Tensor, TensorMut, View, ViewMut};
use serde::{Deserialize, Serialize};

/// Largest error of an answer in f32 that does not count as wrong. Every f32 peer is within 2e-6 on unit-normal data.
pub(crate) const WRONG: f64 = 1e-5;

/// Elements of tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Elements {
    F32,
    /// All tensors: queries, keys, values, output.
    Bf16,
    /// Keys and values; queries and output may be f32.
    F16,
    /// Keys and values, quantised as each library does it; queries and output are f32.
    Int8,
}

impl Elements {
    pub(crate) const ALL: [Self; 4] = [Self::F32, Self::Bf16, Self::F16, Self::Int8];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
            Self::Int8 => "int8",
        }
    }

    /// A number as everyone gets it. Types of 16 bits round it, before the clock starts and for the f64 answer too;
    /// how a number becomes 8 bits is each library's own matter, and part of its error.
    pub(crate) fn rounded(self, x: f32) -> f32 {
        match self {
            Self::F32 | Self::Int8 => x,
            Self::Bf16 => Bf16::from_f32(x).to_f32(),
            Self::F16 => F16::from_f32(x).to_f32(),
        }
    }

    /// Bytes of an element of keys or values; scales are not counted.
    pub(crate) fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 | Self::F16 => 2,
            Self::Int8 => 1,
        }
    }

    /// What an output may be off by before it counts as wrong, where the largest of the right answer is so large.
    pub(crate) fn wrong(self, largest: f64) -> f64 {
        match self {
            Self::F32 => WRONG,
            // The output is rounded by 2⁻⁹ of itself; weights that are rounded too, and sums of either, add some times
            // as much.
            Self::Bf16 => largest / 64.0,
            // By 2⁻¹², and so on.
            Self::F16 => largest / 256.0,
            // Keys and values are off by up to 1/254 of the largest of their row or block, and weights by a few per cent.
            Self::Int8 => largest / 16.0,
        }
    }
}

/// Limits of errors, beyond which an answer counts as wrong.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    /// Computed in the elements of the task.
    pub(crate) own: f64,
    /// Computed in bf16, whatever the elements are.
    pub(crate) in_bf16: f64,
}

impl Limits {
    /// Those of an output in which `largest` is the largest magnitude.
    pub(crate) fn of(elements: Elements, largest: f64) -> Self {
        Self { own: elements.wrong(largest), in_bf16: Elements::Bf16.wrong(largest) }
    }
}

/// Rounding within a peer, beside that of the elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Rounding {
    /// None: products and sums in f32.
    Exact,
    /// Sums of weighted values in f16, if values are f16.
    SumsInF16,
    /// Factors of products may be rounded to bf16.
    FactorsToBf16,
}

impl Rounding {
    /// Returns the limit of an answer's error. A sum in f16 is rounded by up to 2⁻¹² of itself at every key: by chance, √n times that
    /// over n keys, 1/32 for 16384, and some outputs have four times as much.
    pub(crate) fn limit(self, elements: Elements, limits: Limits) -> f64 {
        match (self, elements) {
            (Self::SumsInF16, Elements::F16) => 32.0 * limits.own,
            (Self::FactorsToBf16, _) => limits.in_bf16.max(limits.own),
            _ => limits.own,
        }
    }
}

/// Elements of one of the types that tensors have.
#[derive(Debug)]
pub(crate) enum Data {
    F32(Vec<f32>),
    Bf16(Vec<Bf16>),
    F16(Vec<F16>),
}

impl Data {
    /// Numbers in elements of that type; f32 for those that only a cache holds.
    pub(crate) fn new(elements: Elements, data: Vec<f32>) -> Self {
        match elements {
            Elements::F32 | Elements::Int8 => Self::F32(data),
            Elements::Bf16 => Self::Bf16(data.into_iter().map(Bf16::from_f32).collect()),
            Elements::F16 => Self::F16(data.into_iter().map(F16::from_f32).collect()),
        }
    }

    pub(crate) fn view(&self, shape: [usize; 4]) -> Result<Tensor<'_>> {
        Ok(match self {
            Self::F32(data) => View::bhld(data, shape)?.into(),
            Self::Bf16(data) => View::bhld(data, shape)?.into(),
            Self::F16(data) => View::bhld(data, shape)?.into(),
        })
    }

    pub(crate) fn view_mut(&mut self, shape: [usize; 4]) -> Result<TensorMut<'_>> {
        Ok(match self {
            Self::F32(data) => ViewMut::bhld(data, shape)?.into(),
            Self::Bf16(data) => ViewMut::bhld(data, shape)?.into(),
            Self::F16(data) => ViewMut::bhld(data, shape)?.into(),
        })
    }

    pub(crate) fn widened(&self) -> Vec<f32> {
        match self {
            Self::F32(data) => data.clone(),
            Self::Bf16(data) => data.iter().map(|x| x.to_f32()).collect(),
            Self::F16(data) => data.iter().map(|x| x.to_f32()).collect(),
        }
    }
}
