//! Tensors: views of any strides, element types, and rows of elements.

#[macro_use]
pub(crate) mod any;
pub(crate) mod element;
#[cfg(feature = "half")]
mod half;
#[cfg(feature = "nn")]
pub(crate) mod head_writer;
pub(crate) mod layout;
pub(crate) mod misfit;
#[cfg(feature = "ndarray")]
mod ndarray;
pub(crate) mod panels;
pub(crate) mod rows;
pub(crate) mod view;
pub(crate) mod view_mut;
