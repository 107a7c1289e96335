//! Arrays of numpy as tensors of `sdpa`: the same memory and strides.
//!
//! rust-numpy keeps a list of the arrays that calls read and write: while one is borrowed here, no other call of an extension that
//! uses it writes it, in whatever thread. What Python itself writes meanwhile is the caller's to mind, as for numpy's own functions.

use crate::arguments::Arguments;
use crate::errors::{value, wrong_type};
use half::{bf16, f16};
use ndarray::{ArrayView, ArrayViewMut, Dimension};
use numpy::{
    BorrowError, Element, PyArrayDescrMethods, PyArrayDyn, PyArrayMethods, PyReadonlyArrayDyn, PyReadwriteArrayDyn,
    PyUntypedArray, PyUntypedArrayMethods, dtype,
};
use pyo3::prelude::*;

/// Largest number of dimensions that rust-numpy views.
const MAX_DIMENSIONS: usize = 32;

/// Value by the type of an array's elements.
pub(crate) enum Typed<A, B, C> {
    F32(A),
    F16(B),
    Bf16(C),
}

/// Array that is read. Elements of bfloat16 are borrowed by their bits, for which numpy has a type.
pub(crate) type Floats<'py> =
    Typed<PyReadonlyArrayDyn<'py, f32>, PyReadonlyArrayDyn<'py, f16>, PyReadonlyArrayDyn<'py, u16>>;

/// Array that is written.
pub(crate) type FloatsMut<'py> =
    Typed<PyReadwriteArrayDyn<'py, f32>, PyReadwriteArrayDyn<'py, f16>, PyReadwriteArrayDyn<'py, u16>>;

/// Array by the type of its elements.
type FloatArray<'py> = Typed<Bound<'py, PyArrayDyn<f32>>, Bound<'py, PyArrayDyn<f16>>, Bound<'py, PyArrayDyn<u16>>>;

/// Meaning of arrays of `uint16`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Uint16 {
    /// Bits of bfloat16.
    Bfloat16,
    Integers,
}

impl Uint16 {
    /// Returns what the call says of arrays of `uint16`.
    pub(crate) fn of(arguments: &Arguments<'_, '_>) -> PyResult<Self> {
        match arguments.optional::<String>("uint16_as", "str or None")?.as_deref() {
            None => Ok(Self::Integers),
            Some("bfloat16") => Ok(Self::Bfloat16),
            Some(word) => Err(value("uint16_as", format_args!("{word:?}, but must be 'bfloat16' or None"))),
        }
    }

    /// Borrows an array to read it.
    ///
    /// # Errors
    /// `TypeError` if its elements are no floats of 32 or 16 bits, `ValueError` if it is not aligned or is being written.
    pub(crate) fn read<'py>(self, argument: &str, array: &Bound<'py, PyUntypedArray>) -> PyResult<Floats<'py>> {
        Ok(match self.typed(argument, array)? {
            Typed::F32(array) => Typed::F32(reading(argument, &array)?),
            Typed::F16(array) => Typed::F16(reading(argument, &array)?),
            Typed::Bf16(array) => Typed::Bf16(reading(argument, &array)?),
        })
    }

    /// Borrows an array to write it.
    ///
    /// # Errors
    /// As [`Self::read`], or if it is read-only or is being read.
    pub(crate) fn write<'py>(self, argument: &str, array: &Bound<'py, PyUntypedArray>) -> PyResult<FloatsMut<'py>> {
        Ok(match self.typed(argument, array)? {
            Typed::F32(array) => Typed::F32(writing(argument, &array)?),
            Typed::F16(array) => Typed::F16(writing(argument, &array)?),
            Typed::Bf16(array) => Typed::Bf16(writing(argument, &array)?),
        })
    }

    /// Returns an array by the type of its elements.
    fn typed<'py>(self, argument: &str, array: &Bound<'py, PyUntypedArray>) -> PyResult<FloatArray<'py>> {
        let (py, found) = (array.py(), array.dtype());
        check_memory(argument, array)?;
        if found.is_equiv_to(&dtype::<f32>(py)) {
            return Ok(Typed::F32(of_type(array)?));
        }
        if found.is_equiv_to(&dtype::<f16>(py)) {
            return Ok(Typed::F16(of_type(array)?));
        }
        if found.is_equiv_to(&dtype::<u16>(py)) && self == Self::Bfloat16 {
            return Ok(Typed::Bf16(of_type(array)?));
        }
        let name = found.getattr("name")?.extract::<String>()?;
        if name == "bfloat16" && found.itemsize() == size_of::<bf16>() {
            // The type is that of a package such as ml_dtypes, which this one does without.
            return Ok(Typed::Bf16(of_type(array.call_method1("view", (dtype::<u16>(py),))?.as_any())?));
        }
        let expected = match (argument, &*name) {
            (_, "uint16") => "float32, float16 or bfloat16: uint16_as='bfloat16' reads uint16 as the bits of bfloat16",
            ("attn_mask", _) => {
                "bool, float32, float16 or bfloat16, in native byte order: astype makes a copy of such a type"
            }
            _ => "float32, float16 or bfloat16, in native byte order: astype('float32') makes a copy of that type",
        };
        Err(wrong_type(argument, found.str()?, expected))
    }
}

/// Returns the array as one of a type that it was found to have.
fn of_type<'py, T: Element>(array: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyArrayDyn<T>>> {
    Ok(array.cast::<PyArrayDyn<T>>()?.clone())
}

/// Refuses arrays whose elements cannot be read where they lie.
fn check_memory(argument: &str, array: &Bound<'_, PyUntypedArray>) -> PyResult<()> {
    if array.ndim() > MAX_DIMENSIONS {
        let got = array.ndim();
        return Err(value(argument, format_args!("{got} dimensions, but must have at most {MAX_DIMENSIONS}")));
    }
    if array.is_aligned() {
        return Ok(());
    }
    Err(value(argument, "its elements are not aligned in memory: numpy.require(array, requirements='A') makes a copy"))
}

fn reading<'py, T: Element>(argument: &str, array: &Bound<'py, PyArrayDyn<T>>) -> PyResult<PyReadonlyArrayDyn<'py, T>> {
    array.try_readonly().map_err(|_| value(argument, "another call is writing this array"))
}

fn writing<'py, T: Element>(
    argument: &str,
    array: &Bound<'py, PyArrayDyn<T>>,
) -> PyResult<PyReadwriteArrayDyn<'py, T>> {
    let why = |error| match error {
        BorrowError::NotWriteable => "the array is read-only",
        _ => "the array is being read or written: it interleaves with an input, or another call uses it",
    };
    array.try_readwrite().map_err(|error| value(argument, why(error)))
}

/// Borrows a mask of `bool`.
///
/// # Errors
/// As [`Uint16::read`].
pub(crate) fn read_mask<'py>(
    argument: &str,
    array: &Bound<'py, PyUntypedArray>,
) -> PyResult<PyReadonlyArrayDyn<'py, bool>> {
    check_memory(argument, array)?;
    reading(argument, &of_type(array)?)
}

/// Returns true if the elements are of `bool`.
pub(crate) fn is_mask(array: &Bound<'_, PyUntypedArray>) -> bool {
    array.dtype().is_equiv_to(&dtype::<bool>(array.py()))
}

/// Returns the elements of bfloat16 that bits stand for.
#[allow(unsafe_code, reason = "ndarray has no safe cast between types of the same bits")]
pub(crate) fn as_bf16<D: Dimension>(bits: ArrayView<'_, u16, D>) -> ArrayView<'_, bf16, D> {
    let elements = bits.raw_view().cast();
    // SAFETY: `bf16` is a transparent `u16`, so elements are aligned and every bit pattern is valid. The lifetime is that of the
    // view, which borrows the same elements.
    unsafe { elements.deref_into_view() }
}

/// Returns the elements of bfloat16 that bits stand for, to write them.
#[allow(unsafe_code, reason = "as for `as_bf16`")]
pub(crate) fn as_bf16_mut<D: Dimension>(mut bits: ArrayViewMut<'_, u16, D>) -> ArrayViewMut<'_, bf16, D> {
    let elements = bits.raw_view_mut().cast();
    // SAFETY: as in `as_bf16`. The view of the bits, which borrows the elements exclusively, ends here.
    unsafe { elements.deref_into_view_mut() }
}
