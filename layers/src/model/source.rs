//! Sources of a model's weights: tensors by name.

use super::ModelError;
use crate::error::exactly;
use crate::linear::{Linear, Weights};
use crate::norm::Norm;
use sdpa::Error;
use std::borrow::Cow;
use std::collections::HashMap;
use std::hash::BuildHasher;

/// Row-major tensor of a model: borrowed, or owned if it had to be widened.
///
/// ```
/// use sdpa_layers::Tensor;
/// let numbers = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0];
/// let borrowed = Tensor::new([2, 3], &numbers[..])?;
/// let owned = Tensor::new([2, 3], numbers.to_vec())?;
/// assert_eq!(borrowed, owned);
/// # Ok::<(), sdpa::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct Tensor<'a> {
    shape: Vec<usize>,
    data: Cow<'a, [f32]>,
}

impl<'a> Tensor<'a> {
    /// Takes a shape, and its numbers: the product of the sizes says how many.
    ///
    /// # Errors
    /// [`Error::Range`] if there are more or fewer numbers.
    pub fn new(shape: impl Into<Vec<usize>>, data: impl Into<Cow<'a, [f32]>>) -> Result<Self, Error> {
        let (shape, data) = (shape.into(), data.into());
        // No slice is as long as a product beyond the address space.
        let size = shape.iter().fold(1usize, |size, &n| size.saturating_mul(n));
        exactly(size, "the product of its sizes").check("tensor", "length", data.len())?;
        Ok(Self { shape, data })
    }

    /// Sizes of its dimensions.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Numbers, row-major.
    pub fn data(&self) -> &[f32] {
        &self.data
    }
}

/// Source of named tensors: a file, a map, or anything else that holds a model.
///
/// ```
/// use sdpa_layers::{ModelError, Tensor, TensorSource};
/// /// Model with biases of 0.
/// struct Zeros;
/// impl TensorSource for Zeros {
///     fn tensor(&self, name: &str) -> Result<Option<Tensor<'_>>, ModelError> {
///         Ok(if self.contains(name) { Some(Tensor::new([4], vec![0.0; 4])?) } else { None })
///     }
///     fn contains(&self, name: &str) -> bool {
///         name.ends_with(".bias")
///     }
/// }
/// assert!(Zeros.tensor("pooler.bias")?.is_some() && Zeros.tensor("pooler.weight")?.is_none());
/// # Ok::<(), ModelError>(())
/// ```
pub trait TensorSource {
    /// Returns the tensor of this name, if there is one.
    ///
    /// # Errors
    /// [`ModelError`] if the tensor exists but cannot be read.
    fn tensor(&self, name: &str) -> Result<Option<Tensor<'_>>, ModelError>;

    /// Returns true if there is a tensor of this name, without reading it.
    fn contains(&self, name: &str) -> bool;
}

impl<S: BuildHasher> TensorSource for HashMap<String, Tensor<'_>, S> {
    fn tensor(&self, name: &str) -> Result<Option<Tensor<'_>>, ModelError> {
        let Some(Tensor { shape, data }) = self.get(name) else { return Ok(None) };
        Ok(Some(Tensor { shape: shape.clone(), data: Cow::Borrowed(data) }))
    }

    fn contains(&self, name: &str) -> bool {
        self.contains_key(name)
    }
}

/// Tensors with a common prefix of their names, read in the shapes that a configuration requires.
pub(crate) struct Named<'s> {
    source: &'s dyn TensorSource,
    prefix: String,
}

impl<'s> Named<'s> {
    pub(crate) fn new(source: &'s dyn TensorSource, prefix: impl Into<String>) -> Self {
        Self { source, prefix: prefix.into() }
    }

    /// Extends the prefix of names.
    pub(crate) fn below(&self, prefix: impl core::fmt::Display) -> Self {
        Self { source: self.source, prefix: format!("{}{prefix}", self.prefix) }
    }

    pub(crate) fn contains(&self, name: &str) -> bool {
        self.source.contains(&format!("{}{name}", self.prefix))
    }

    /// Reads the numbers of a tensor of this shape.
    pub(crate) fn take<const N: usize>(&self, name: &str, shape: [usize; N]) -> Result<Cow<'s, [f32]>, ModelError> {
        let name = format!("{}{name}", self.prefix);
        match self.source.tensor(&name)? {
            None => Err(ModelError::Missing { tensor: name }),
            Some(tensor) if tensor.shape != shape => {
                Err(ModelError::Shape { tensor: name, got: tensor.shape, expected: shape.to_vec() })
            }
            Some(tensor) => Ok(tensor.data),
        }
    }

    /// Returns the first of these names that exists, otherwise the first of all: older files use other names.
    pub(crate) fn any_of<'n>(&self, names: &[&'n str]) -> &'n str {
        names.iter().find(|name| self.contains(name)).unwrap_or(&names[0])
    }

    /// Reads `weight` `[outputs, inputs]` and `bias` of a projection.
    pub(crate) fn linear(&self, shape: [usize; 2]) -> Result<Linear, ModelError> {
        let weight = self.take("weight", shape)?;
        let bias = self.take("bias", [shape[0]])?;
        Ok(Linear::new(Weights::rows(&weight, shape)?.bias(&bias)?))
    }

    /// Reads `weight` and `bias` of a layer norm; `gamma` and `beta` in files converted from TensorFlow.
    pub(crate) fn layer_norm(&self, width: usize, eps: f32) -> Result<Norm, ModelError> {
        let gain = self.take(self.any_of(&["weight", "gamma"]), [width])?;
        let bias = self.take(self.any_of(&["bias", "beta"]), [width])?;
        Ok(Norm::layer(gain, eps)?.bias(bias)?)
    }
}
