//! Arguments of a call, by name.

use crate::errors::{self, wrong_type};
use numpy::PyUntypedArray;
use pyo3::exceptions::PyOverflowError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// Arguments of a call: all have a value, which is None if they are not given.
pub(crate) struct Arguments<'a, 'py> {
    by_name: &'a Bound<'py, PyDict>,
}

impl<'a, 'py> Arguments<'a, 'py> {
    pub(crate) fn new(by_name: &'a Bound<'py, PyDict>) -> Self {
        Self { by_name }
    }

    pub(crate) fn py(&self) -> Python<'py> {
        self.by_name.py()
    }

    /// Returns the argument as it is, or `None` if it is not given.
    pub(crate) fn any(&self, argument: &str) -> PyResult<Option<Bound<'py, PyAny>>> {
        Ok(self.by_name.get_item(argument)?.filter(|value| !value.is_none()))
    }

    /// Returns the argument as `expected`, if it is given.
    ///
    /// # Errors
    /// `TypeError` if it is something else, `ValueError` if it is a number beyond the range of the type.
    pub(crate) fn optional<T: FromPyObjectOwned<'py>>(&self, argument: &str, expected: &str) -> PyResult<Option<T>> {
        let Some(value) = self.any(argument)? else { return Ok(None) };
        let error: PyErr = match value.extract::<T>() {
            Ok(extracted) => return Ok(Some(extracted)),
            Err(error) => error.into(),
        };
        if error.is_instance_of::<PyOverflowError>(self.py()) {
            return Err(errors::value(argument, format_args!("{}, but must be {expected}", value.str()?)));
        }
        Err(wrong_type(argument, value.get_type().name()?, expected))
    }

    /// Returns the argument as `expected`.
    ///
    /// # Errors
    /// `TypeError` if it is something else, or None.
    pub(crate) fn required<T: FromPyObjectOwned<'py>>(&self, argument: &str, expected: &str) -> PyResult<T> {
        self.optional(argument, expected)?.ok_or_else(|| wrong_type(argument, "NoneType", expected))
    }

    /// Returns an argument that is an array, if it is given.
    ///
    /// # Errors
    /// `TypeError` if it is something else.
    pub(crate) fn array(&self, argument: &str) -> PyResult<Option<Bound<'py, PyUntypedArray>>> {
        let Some(value) = self.any(argument)? else { return Ok(None) };
        let array = value.cast_into::<PyUntypedArray>().map_err(|error| error.into_inner());
        array.map(Some).or_else(|value| Err(wrong_type(argument, value.get_type().name()?, "numpy.ndarray")))
    }

    /// Returns an argument that is an array.
    ///
    /// # Errors
    /// `TypeError` if it is something else, or None.
    pub(crate) fn required_array(&self, argument: &str) -> PyResult<Bound<'py, PyUntypedArray>> {
        self.array(argument)?.ok_or_else(|| wrong_type(argument, "NoneType", "numpy.ndarray"))
    }
}
