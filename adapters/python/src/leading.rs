//! Dimensions before the heads: any number of them, broadcast as numpy does, are the batch of a call.

use crate::errors::value;
use ndarray::{ArrayBase, Axis, Data, Ix4, IxDyn};
use numpy::{PyUntypedArray, PyUntypedArrayMethods};
use pyo3::intern;
use pyo3::prelude::*;

/// Number of dimensions of a head and its rows: heads, rows, elements.
pub(crate) const OWN: usize = 3;

/// Dimensions of a call before the heads.
pub(crate) struct Leading {
    sizes: Vec<usize>,
    /// Number of sequences: the product of the sizes.
    pub(crate) batch: usize,
    /// Number of dimensions of the output.
    rank: usize,
}

impl Leading {
    /// Broadcasts the leading dimensions of queries, keys and values.
    ///
    /// # Errors
    /// `ValueError` if an array has fewer than two dimensions, or dimensions that differ and are not 1.
    pub(crate) fn of(arrays: [(&str, &Bound<'_, PyUntypedArray>); 3]) -> PyResult<Self> {
        let rank = arrays.iter().map(|(_, array)| array.ndim()).max().unwrap_or(0);
        let mut sizes = vec![1; rank.saturating_sub(OWN)];
        for (argument, array) in arrays {
            let shape = array.shape();
            if shape.len() < 2 {
                return Err(value(argument, format_args!("shape is {shape:?}, but must be [..., heads, rows, dim]")));
            }
            let own = &shape[..shape.len().saturating_sub(OWN)];
            let missing = sizes.len() - own.len();
            for (size, &got) in sizes[missing..].iter_mut().zip(own) {
                match (*size, got) {
                    (1, _) => *size = got,
                    (_, 1) => {}
                    (expected, _) if expected == got => {}
                    (expected, _) => {
                        let why = format!(
                            "shape is {shape:?}: a leading dimension is {got}, but query or key has {expected}"
                        );
                        return Err(value(argument, why));
                    }
                }
            }
        }
        let batch = sizes.iter().try_fold(1usize, |batch, &size| batch.checked_mul(size));
        let why = || value("query", format_args!("leading dimensions {sizes:?} do not fit the address space"));
        let batch = batch.ok_or_else(why)?;
        Ok(Self { sizes, batch, rank })
    }

    /// Returns the shape of an output with these last dimensions, in the number of dimensions of the inputs.
    pub(crate) fn shape(&self, heads: usize, rest: &[usize]) -> Vec<usize> {
        let heads = (self.rank >= OWN).then_some(heads);
        self.sizes.iter().copied().chain(heads).chain(rest.iter().copied()).collect()
    }

    /// Returns the array, repeated along leading dimensions that are 1 or missing: a view, in which the stride of these is 0.
    pub(crate) fn repeat<'py>(&self, array: &Bound<'py, PyUntypedArray>) -> PyResult<Bound<'py, PyUntypedArray>> {
        let shape = array.shape();
        let own = shape.len().min(OWN);
        if shape[..shape.len() - own] == self.sizes[..] {
            return Ok(array.clone());
        }
        let mut to = self.sizes.clone();
        to.resize(self.sizes.len() + OWN - own, 1);
        to.extend(&shape[shape.len() - own..]);
        let py = array.py();
        let repeated = py.import(intern!(py, "numpy"))?.call_method1(intern!(py, "broadcast_to"), (array, to))?;
        Ok(repeated.cast_into()?)
    }

    /// Returns a mask or bias, repeated as [`Self::repeat`] does unless it is the same for all sequences.
    ///
    /// # Errors
    /// `ValueError` if it has more dimensions than the scores, or leading dimensions that are neither 1 nor theirs.
    pub(crate) fn repeat_mask<'py>(
        &self,
        argument: &str,
        array: Bound<'py, PyUntypedArray>,
    ) -> PyResult<Bound<'py, PyUntypedArray>> {
        let shape = array.shape();
        let own = &shape[..shape.len().saturating_sub(OWN)];
        if own.iter().all(|&size| size == 1) && own.len() <= self.sizes.len() {
            return Ok(array);
        }
        let fits = own.len() <= self.sizes.len()
            && own.iter().rev().zip(self.sizes.iter().rev()).all(|(&got, &size)| got == 1 || got == size);
        if fits { self.repeat(&array) } else { Err(self.misfit(argument, shape)) }
    }

    fn misfit(&self, argument: &str, shape: &[usize]) -> PyErr {
        let sizes = &self.sizes;
        value(argument, format_args!("shape is {shape:?}, but must be broadcast to {sizes:?} and heads, rows, keys"))
    }
}

/// Returns a shape as batch, heads, rows, elements.
pub(crate) fn four_sizes(shape: &[usize]) -> [usize; 4] {
    let (leading, own) = shape.split_at(shape.len().saturating_sub(OWN));
    let mut four = [1; 4];
    four[0] = leading.iter().product();
    four[4 - own.len()..].copy_from_slice(own);
    four
}

/// Returns the array as `[batch, heads, rows, elements]`; those missing in front are 1, and leading ones are merged.
///
/// # Errors
/// `ValueError` if their strides cannot be merged.
pub(crate) fn four<S>(argument: &str, array: ArrayBase<S, IxDyn>) -> PyResult<ArrayBase<S, Ix4>>
where
    S: Data,
{
    let mut array = array;
    while array.ndim() < 4 {
        array = array.insert_axis(Axis(0));
    }
    let shape = array.shape().to_vec();
    if array.is_empty() {
        // Without elements strides mean nothing.
        return array.into_shape_with_order(four_sizes(&shape)).map_err(|error| value(argument, error));
    }
    while array.ndim() > 4 {
        if !array.merge_axes(Axis(0), Axis(1)) {
            let why = format!(
                "shape is {shape:?}: the strides of dimensions {:?} do not make one of them, which takes a copy \
                 (numpy.ascontiguousarray)",
                &shape[..shape.len() - OWN]
            );
            return Err(value(argument, why));
        }
        array = array.index_axis_move(Axis(0), 0);
    }
    array.into_dimensionality().map_err(|error| value(argument, error))
}
