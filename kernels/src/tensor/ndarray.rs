//! Conversions from the arrays of the crate `ndarray`: same elements, same strides.
//!
//! An array of ndarray is a pointer to its first element (the one of index 0 in every dimension), lengths and strides, in
//! elements and of any sign. All its elements are in one allocation, less than `isize::MAX` bytes from end to end; the
//! array borrows these and not what lies between them, which may be part of another array. Without elements the pointer may
//! dangle, and where a dimension has length 1 its stride may be anything.

use crate::tensor::layout::LayoutError;
use crate::tensor::view::View;
use crate::tensor::view_mut::ViewMut;
use ndarray::{ArrayBase, ArrayRef, ArrayView, ArrayViewMut, Data, DataMut, Dimension};

/// Returns shape and strides of an array of four dimensions, or of three: one head.
fn layout<T, D: Dimension>(array: &ArrayRef<T, D>) -> Result<([usize; 4], [isize; 4]), LayoutError> {
    match (array.shape(), array.strides()) {
        (&[b, h, l, d], &[of_b, of_h, of_l, of_d]) => Ok(([b, h, l, d], [of_b, of_h, of_l, of_d])),
        (&[b, l, d], &[of_b, of_l, of_d]) => Ok(([b, 1, l, d], [of_b, 0, of_l, of_d])),
        _ => Err(LayoutError::Dimensions { got: array.ndim() }),
    }
}

/// Views an array `[batch, heads, rows, dim]` of any strides, or `[batch, rows, columns]` as one head, which
/// [`View::split_heads`] divides into several. Needs the feature `ndarray`; for ndarray 0.17.
///
/// # Errors
/// [`LayoutError::Dimensions`] unless the array has four dimensions, or three.
impl<'a, T, D: Dimension> TryFrom<ArrayView<'a, T, D>> for View<'a, T> {
    type Error = LayoutError;

    fn try_from(array: ArrayView<'a, T, D>) -> Result<Self, LayoutError> {
        let (shape, strides) = layout(&array)?;
        // SAFETY: the array borrows its elements for `'a`, and the pointer is to the first.
        unsafe { Self::from_first(array.as_ptr(), shape, strides) }
    }
}

/// Views an array of any strides, owned or borrowed, as an `ArrayView`. Needs the feature `ndarray`; for ndarray 0.17.
///
/// # Errors
/// As for an `ArrayView`.
impl<'a, T, S: Data<Elem = T>, D: Dimension> TryFrom<&'a ArrayBase<S, D>> for View<'a, T> {
    type Error = LayoutError;

    fn try_from(array: &'a ArrayBase<S, D>) -> Result<Self, LayoutError> {
        array.view().try_into()
    }
}

/// Views a writable array `[batch, heads, rows, dim]` of any strides, or `[batch, rows, columns]` as one head. Needs the feature `ndarray`; for ndarray 0.17.
///
/// # Errors
/// [`LayoutError::Dimensions`] unless the array has four dimensions, or three, [`LayoutError::Overlap`] or
/// [`LayoutError::Interleaved`] as for [`ViewMut::from_strides`].
impl<'a, T, D: Dimension> TryFrom<ArrayViewMut<'a, T, D>> for ViewMut<'a, T> {
    type Error = LayoutError;

    fn try_from(mut array: ArrayViewMut<'a, T, D>) -> Result<Self, LayoutError> {
        let (shape, strides) = layout(&array)?;
        // SAFETY: the array borrows its elements exclusively for `'a`, and the pointer is to the first.
        unsafe { Self::from_first(array.as_mut_ptr(), shape, strides) }
    }
}

/// Views a writable array of any strides, owned or borrowed, as an `ArrayViewMut`. Needs the feature `ndarray`; for
/// ndarray 0.17.
///
/// # Errors
/// As for an `ArrayViewMut`.
impl<'a, T, S: DataMut<Elem = T>, D: Dimension> TryFrom<&'a mut ArrayBase<S, D>> for ViewMut<'a, T> {
    type Error = LayoutError;

    fn try_from(array: &'a mut ArrayBase<S, D>) -> Result<Self, LayoutError> {
        array.view_mut().try_into()
    }
}
