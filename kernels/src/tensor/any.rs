//! Views of any element type, with the type as a run-time value.

use crate::simd::isa::{Isa, vectorized};
use crate::tensor::element::{Bf16, Dtype, Element, F16};
use crate::tensor::rows::Rows;
use crate::tensor::view::View;
use crate::tensor::view_mut::ViewMut;
use core::ops::Range;

/// One of three values, by element type.
#[derive(Clone, Copy)]
pub(crate) enum Typed<A, B, C> {
    F32(A),
    Bf16(B),
    F16(C),
}

/// Rows of elements of any type.
pub(crate) type AnyRows = Typed<Rows<f32>, Rows<Bf16>, Rows<F16>>;
/// Panels of packed keys of any type: row `i` is panel `i`, `[head_dim][16]`.
pub(crate) type AnyPanels = AnyRows;

/// Evaluates the same expression for each element type.
macro_rules! by_type {
    ($Enum:ident, $value:expr, |$x:pat_param| $e:expr) => {
        match $value {
            $Enum::F32($x) => $e,
            $Enum::Bf16($x) => $e,
            $Enum::F16($x) => $e,
        }
    };
    ($Enum:ident => $To:ident, $value:expr, |$x:pat_param| $e:expr) => {
        match $value {
            $Enum::F32($x) => $To::F32($e),
            $Enum::Bf16($x) => $To::Bf16($e),
            $Enum::F16($x) => $To::F16($e),
        }
    };
}

/// Evaluates the same expression for the element type of a [`Dtype`], with that type as `$T`.
macro_rules! by_dtype {
    ($dtype:expr, |$T:ident| $e:expr) => {
        match $dtype {
            $crate::tensor::element::Dtype::F32 => {
                type $T = f32;
                $crate::tensor::any::Typed::F32($e)
            }
            $crate::tensor::element::Dtype::Bf16 => {
                type $T = $crate::tensor::element::Bf16;
                $crate::tensor::any::Typed::Bf16($e)
            }
            $crate::tensor::element::Dtype::F16 => {
                type $T = $crate::tensor::element::F16;
                $crate::tensor::any::Typed::F16($e)
            }
        }
    };
}

/// View `[batch, heads, rows, dim]` of elements of any type.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub enum Tensor<'a> {
    /// View of `f32`.
    F32(View<'a>),
    /// View of bfloat16.
    Bf16(View<'a, Bf16>),
    /// View of binary16.
    F16(View<'a, F16>),
}

/// Writable view `[batch, heads, rows, dim]` of elements of any type.
#[derive(Debug)]
#[non_exhaustive]
pub enum TensorMut<'a> {
    /// View of `f32`.
    F32(ViewMut<'a>),
    /// View of bfloat16.
    Bf16(ViewMut<'a, Bf16>),
    /// View of binary16.
    F16(ViewMut<'a, F16>),
}

impl Tensor<'_> {
    /// Returns the shape, `[batch, heads, rows, dim]`.
    #[inline]
    pub fn shape(&self) -> [usize; 4] {
        by_type!(Tensor, self, |view| view.shape())
    }

    /// Returns the strides of batch, heads, rows and dim, in elements.
    #[inline]
    pub fn strides(&self) -> [isize; 4] {
        by_type!(Tensor, self, |view| view.strides())
    }

    /// Returns true if these elements are the first columns of another tensor: the same memory, as
    /// [`View::columns`] gives it.
    pub fn is_start_of(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::F32(a), Self::F32(b)) => a.is_start_of(b),
            (Self::Bf16(a), Self::Bf16(b)) => a.is_start_of(b),
            (Self::F16(a), Self::F16(b)) => a.is_start_of(b),
            _ => false,
        }
    }

    /// Returns true if a row of one head is stored beside the same row of the other heads.
    #[inline]
    pub(crate) fn has_heads_inside(&self) -> bool {
        let [_, head, row, _] = self.strides();
        head.unsigned_abs() < row.unsigned_abs()
    }

    /// Returns the type of the elements.
    #[inline]
    pub fn dtype(&self) -> Dtype {
        match self {
            Self::F32(_) => Dtype::F32,
            Self::Bf16(_) => Dtype::Bf16,
            Self::F16(_) => Dtype::F16,
        }
    }

    /// Returns the element at an index, widened, or `None` outside the shape.
    pub fn get(&self, at: [usize; 4]) -> Option<f32> {
        by_type!(Tensor, self, |view| view.get(at).map(|x| x.widen()))
    }

    /// Returns some elements of row `[b, h, l]`, widened, or `None` outside the shape.
    #[doc(hidden)] // for the oracle
    pub fn elements(&self, row: [usize; 3], of: Range<usize>) -> Option<Vec<f32>> {
        let [b, h, l] = row;
        of.map(|d| self.get([b, h, l, d])).collect()
    }

    /// Returns the same elements, repeated to `shape` along dimensions of length 1. `None` if a dimension is neither 1
    /// nor that of `shape`.
    pub fn broadcast(&self, shape: [usize; 4]) -> Option<Self> {
        Some(by_type!(Tensor => Tensor, self, |view| view.broadcast(shape)?))
    }

    /// Returns the part of the batch in a range. `None` if the range is outside it.
    pub fn batch_in(&self, range: core::ops::Range<usize>) -> Option<Self> {
        Some(by_type!(Tensor => Tensor, self, |view| view.batch(range)?))
    }

    /// Returns the heads in a range, of every batch. `None` if the range is outside the heads.
    pub fn heads_in(&self, range: core::ops::Range<usize>) -> Option<Self> {
        Some(by_type!(Tensor => Tensor, self, |view| view.heads(range)?))
    }

    /// Returns the rows in a range, of every batch and head. `None` if the range is outside the rows.
    pub fn rows_in(&self, range: core::ops::Range<usize>) -> Option<Self> {
        Some(by_type!(Tensor => Tensor, self, |view| view.rows(range)?))
    }

    /// Returns the columns in a range, of every row. `None` if the range is outside the columns.
    pub fn columns_in(&self, range: core::ops::Range<usize>) -> Option<Self> {
        Some(by_type!(Tensor => Tensor, self, |view| view.columns(range)?))
    }

    /// Returns rows `l` and on of a head.
    ///
    /// # Safety
    /// Same contract as `View::row`.
    #[inline]
    pub(crate) unsafe fn rows(&self, b: usize, h: usize, l: usize) -> AnyRows {
        by_type!(Tensor => Typed, self, |view| {
            // SAFETY: the caller guarantees the contract of `View::row`.
            let (first, element) = unsafe { view.row(b, h, l) };
            Rows::strided(first, view.strides()[2], element)
        })
    }
}

/// Returns the first finite element of a tensor of at least this magnitude, and its index, if there is one.
pub fn first_beyond(tensor: &Tensor<'_>, isa: Isa, least: f32) -> Option<([usize; 4], f32)> {
    if tensor.dtype() == Dtype::F16 && least >= F16::LEAST_INFINITE {
        return None;
    }
    by_type!(Tensor, tensor, |view| {
        let [batch, heads, rows, dim] = view.shape();
        let beyond = |x: f32| x.is_finite() && x.abs() >= least;
        let mut at = (0..batch * heads * rows).map(|i| [i / rows / heads, i / rows % heads, i % rows]);
        at.find_map(|[b, h, l]| {
            let row = view.contiguous_row([b, h, l]);
            let none = row.is_some_and(|row| {
                vectorized(
                    isa,
                    #[inline(always)]
                    || row.iter().fold(true, |none, x| none & !beyond(x.widen())),
                )
            });
            let mut elements =
                (0..if none { 0 } else { dim }).filter_map(|d| Some(([b, h, l, d], tensor.get([b, h, l, d])?)));
            elements.find(|&(_, x)| beyond(x))
        })
    })
}

impl TensorMut<'_> {
    /// Returns the shape, `[batch, heads, rows, dim]`.
    #[inline]
    pub fn shape(&self) -> [usize; 4] {
        by_type!(TensorMut, self, |view| view.shape())
    }

    /// Returns the type of the elements.
    #[inline]
    pub fn dtype(&self) -> Dtype {
        match self {
            Self::F32(_) => Dtype::F32,
            Self::Bf16(_) => Dtype::Bf16,
            Self::F16(_) => Dtype::F16,
        }
    }

    /// Returns rows `l` and on of a head, to prefetch them.
    ///
    /// # Safety
    /// Same contract as `ViewMut::row`.
    #[inline]
    pub(crate) unsafe fn rows(&self, b: usize, h: usize, l: usize) -> AnyRows {
        by_type!(TensorMut => Typed, self, |view| {
            // SAFETY: the caller guarantees the contract of `ViewMut::row`.
            let (first, element) = unsafe { view.row(b, h, l) };
            Rows::strided(first.cast_const(), view.strides()[2], element)
        })
    }
}

macro_rules! from_views {
    ($($Type:ident $Element:ty;)*) => {$(
        impl<'a> From<View<'a, $Element>> for Tensor<'a> {
            fn from(view: View<'a, $Element>) -> Self {
                Self::$Type(view)
            }
        }

        impl<'a> From<ViewMut<'a, $Element>> for TensorMut<'a> {
            fn from(view: ViewMut<'a, $Element>) -> Self {
                Self::$Type(view)
            }
        }
    )*};
}

from_views!(F32 f32; Bf16 Bf16; F16 F16;);

impl AnyRows {
    /// Returns the distance from one element of a row to the next, in elements.
    #[inline]
    pub(crate) fn element(self) -> isize {
        by_type!(Typed, self, |rows| rows.element)
    }

    /// Returns true if the rows' addresses are in a table.
    #[inline]
    pub(crate) fn are_scattered(self) -> bool {
        by_type!(Typed, self, |rows| rows.are_scattered())
    }

    /// Returns the type of the elements.
    pub(crate) fn dtype(self) -> Dtype {
        match self {
            Self::F32(_) => Dtype::F32,
            Self::Bf16(_) => Dtype::Bf16,
            Self::F16(_) => Dtype::F16,
        }
    }

    /// Returns rows `i` and on.
    ///
    /// # Safety
    /// Row `i` exists.
    #[inline]
    pub(crate) unsafe fn rows_from(self, i: usize) -> Self {
        // SAFETY: the caller guarantees that row `i` exists.
        by_type!(Typed => Typed, self, |rows| unsafe { rows.rows_from(i) })
    }

    /// Returns the same rows from element `i` on.
    ///
    /// # Safety
    /// The rows have an element `i`.
    #[inline]
    pub(crate) unsafe fn columns_from(self, i: usize) -> Self {
        // SAFETY: the caller guarantees that the rows have an element `i`.
        by_type!(Typed => Typed, self, |rows| unsafe { rows.columns_from(i) })
    }

    /// Returns element `i` of row `j`, widened.
    ///
    /// # Safety
    /// The row has such an element.
    pub(crate) unsafe fn get(self, j: usize, i: usize) -> f32 {
        // SAFETY: the caller guarantees element `i` of row `j`.
        by_type!(Typed, self, |rows| unsafe { rows.at(j).offset(i as isize * rows.element).read().widen() })
    }

    /// Returns the rows from row 0 on that are evenly spaced.
    ///
    /// # Safety
    /// Row 0 exists.
    #[inline]
    pub(crate) unsafe fn first(self) -> FirstRows {
        by_type!(Typed, self, |rows| {
            // SAFETY: the caller guarantees that row 0 exists.
            let (at, n) = unsafe { (rows.at(0), rows.evenly(0)) };
            let element = size_of_val_of(at);
            FirstRows { at: at.cast(), step: rows.step().saturating_mul(element as isize), n, element }
        })
    }
}

/// Evenly spaced rows, as bytes.
pub(crate) struct FirstRows {
    pub(crate) at: *const u8,
    /// Bytes from one row to the next.
    pub(crate) step: isize,
    pub(crate) n: usize,
    /// Number of bytes of an element.
    pub(crate) element: usize,
}

/// Returns the size in bytes of the pointer's target type.
pub(crate) const fn size_of_val_of<T>(_: *const T) -> usize {
    size_of::<T>()
}
