//! Arrays that a call writes.

use crate::arguments::Arguments;
use crate::elements::{FloatsMut, Typed, Uint16, as_bf16_mut};
use crate::errors::{shape, value};
use crate::leading::{OWN, four, four_sizes};
use ndarray::{ArrayViewMut, Axis, IxDyn};
use numpy::{PyArrayDyn, PyArrayMethods, PyReadwriteArrayDyn, PyUntypedArray, PyUntypedArrayMethods};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use sdpa::ViewMut;

/// Effort of numpy's search for an element that two arrays share; without an answer they count as sharing one.
const MAX_WORK: usize = 1 << 16;

/// Output of a call and, if asked for, its log-sum-exp.
pub(crate) struct Outputs<'py> {
    /// Array that the caller gets.
    out: Bound<'py, PyUntypedArray>,
    elements: FloatsMut<'py>,
    lse: Option<PyReadwriteArrayDyn<'py, f32>>,
}

impl<'py> Outputs<'py> {
    /// Takes the call's `out`, which shares no element with its inputs, or makes one in the type and order of the queries.
    ///
    /// # Errors
    /// `TypeError` or `ValueError`, which name the argument.
    pub(crate) fn new(
        arguments: &Arguments<'_, 'py>,
        inputs: &[(&'static str, Bound<'py, PyUntypedArray>)],
        sizes: &[usize],
    ) -> PyResult<Self> {
        let out = match arguments.array("out")? {
            Some(out) if out.shape() != sizes => return Err(shape("out", out.shape(), sizes)),
            Some(out) => {
                inputs.iter().try_for_each(|(argument, input)| check_apart(&out, argument, input))?;
                out
            }
            None => empty_like(&inputs[0].1, sizes)?,
        };
        let elements = Uint16::of(arguments)?.write("out", &out)?;
        let lse = match arguments.required("return_lse", "bool")? {
            true => Some(PyArrayDyn::zeros(arguments.py(), &sizes[..sizes.len() - 1], false).readwrite()),
            false => None,
        };
        Ok(Self { out, elements, lse })
    }

    /// Returns what `sdpa` writes.
    ///
    /// # Errors
    /// `ValueError` if the strides of `out` do not fit a writable view.
    pub(crate) fn views(&mut self) -> PyResult<sdpa::Outputs<'_>> {
        check_strides(&self.out)?;
        let outputs = match &mut self.elements {
            _ if self.out.is_empty() => sdpa::Outputs::new(nothing(self.out.shape())?),
            Typed::F32(out) => sdpa::Outputs::new(writable("out", out.as_array_mut())?),
            Typed::F16(out) => sdpa::Outputs::new(writable("out", out.as_array_mut())?),
            Typed::Bf16(out) => sdpa::Outputs::new(writable("out", as_bf16_mut(out.as_array_mut()))?),
        };
        let Some(lse) = &mut self.lse else { return Ok(outputs) };
        let elements = Axis(lse.ndim());
        Ok(outputs.lse(match lse.is_empty() {
            true => nothing(&[lse.shape(), &[1]].concat())?,
            false => writable("lse", lse.as_array_mut().insert_axis(elements))?,
        }))
    }

    /// Returns the arrays that were written: the output, or output and log-sum-exp.
    pub(crate) fn into_arrays(self) -> PyResult<Bound<'py, PyAny>> {
        let Self { out, elements: _, lse } = self;
        let Some(lse) = lse else { return Ok(out.into_any()) };
        let py = out.py();
        Ok(PyTuple::new(py, [out.as_any(), lse.as_any()])?.into_any())
    }
}

/// Refuses an output with strides that ndarray does not take: each dimension must step over the whole of those with smaller strides.
fn check_strides(out: &Bound<'_, PyUntypedArray>) -> PyResult<()> {
    let (shape, strides) = (out.shape(), out.strides());
    let mut dimensions: Vec<_> = shape.iter().zip(strides).filter(|&(&size, _)| size > 1).collect();
    dimensions.sort_unstable_by_key(|(_, stride)| stride.unsigned_abs());
    let mut extent = 0usize;
    let nested = dimensions.into_iter().all(|(size, stride)| {
        let beyond = stride.unsigned_abs() > extent;
        extent = extent.saturating_add((size - 1).saturating_mul(stride.unsigned_abs()));
        beyond
    });
    if nested || out.is_empty() {
        return Ok(());
    }
    let why = format!(
        "shape {shape:?} with strides of {strides:?} bytes holds an element twice, or its dimensions interleave"
    );
    Err(value("out", why))
}

/// Returns a view of this shape, which has no elements: such arrays have strides that ndarray does not take.
fn nothing(shape: &[usize]) -> PyResult<ViewMut<'static>> {
    ViewMut::bhld(&mut [], four_sizes(shape)).map_err(|error| value("out", error))
}

/// Returns an array as `sdpa` writes it.
fn writable<'a, T>(argument: &str, array: ArrayViewMut<'a, T, IxDyn>) -> PyResult<ViewMut<'a, T>> {
    ViewMut::try_from(four(argument, array)?).map_err(|error| value(argument, error))
}

/// Refuses an output that shares an element with an input.
fn check_apart(out: &Bound<'_, PyUntypedArray>, argument: &str, input: &Bound<'_, PyUntypedArray>) -> PyResult<()> {
    let py = out.py();
    let numpy = py.import(intern!(py, "numpy"))?;
    let shares = numpy.call_method1(intern!(py, "may_share_memory"), (out, input, MAX_WORK))?;
    if shares.extract()? { Err(value("out", format_args!("shares memory with {argument}"))) } else { Ok(()) }
}

/// Returns an array without values, in the type of the queries. Its heads are inside its rows if those of the queries are, so that
/// joining the heads of a row copies nothing.
fn empty_like<'py>(queries: &Bound<'py, PyUntypedArray>, sizes: &[usize]) -> PyResult<Bound<'py, PyUntypedArray>> {
    let (py, rank) = (queries.py(), sizes.len());
    let strides = queries.strides();
    let inside = queries.ndim() == rank && rank >= OWN && {
        let [heads, rows] = [rank - 3, rank - 2];
        sizes[heads] > 1 && sizes[rows] > 1 && strides[heads].unsigned_abs() < strides[rows].unsigned_abs()
    };
    let mut stored = sizes.to_vec();
    if inside {
        stored.swap(rank - 3, rank - 2);
    }
    let numpy = py.import(intern!(py, "numpy"))?;
    let stored = PyTuple::new(py, stored)?;
    let mut out = numpy.call_method1(intern!(py, "empty"), (stored, queries.dtype()))?;
    if inside {
        out = out.call_method1(intern!(py, "swapaxes"), (-3, -2))?;
    }
    Ok(out.cast_into()?)
}
