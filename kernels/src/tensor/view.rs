//! Borrowed, strided, four-dimensional views: `[batch, heads, rows, dim]` whatever the memory layout.
//!
//! A view is checked once, when it is made: every index inside its shape lies inside its memory. The kernels then read
//! only those elements, without further checks.

use crate::tensor::layout::{Layout, LayoutError, blhd_layout, dense, packed_qkv};
use core::fmt;
use core::marker::PhantomData;

/// Read-only view `[batch, heads, rows, dim]` of a slice. Strides are in elements; 0 broadcasts. The slice may be longer
/// than the view needs; elements that no index reaches are never read.
#[derive(Clone, Copy)]
pub struct View<'a, T = f32> {
    /// Element of index 0 of the layout. Every element that the layout reaches may be read for `'a`.
    data: *const T,
    layout: Layout,
    between: Between,
    borrow: PhantomData<&'a [T]>,
}

/// Elements that lie between those of a view.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Between {
    /// They may be read too, from the lowest element of the view to the highest: the view is of a slice.
    Readable,
    /// They may belong to somebody else, who may be writing to them.
    Foreign,
}

// SAFETY: a view is a shared borrow of elements of type `T`.
unsafe impl<T: Sync> Send for View<'_, T> {}
// SAFETY: as for `Send`.
unsafe impl<T: Sync> Sync for View<'_, T> {}

impl<'a, T> View<'a, T> {
    /// Makes a view of a dense array stored batch, heads, rows, dim: `shape` is `[batch, heads, rows, dim]`.
    ///
    /// # Errors
    /// [`LayoutError::OutOfBounds`] if `data` is shorter, [`LayoutError::TooLarge`] if the shape does not fit the
    /// address space.
    pub fn bhld(data: &'a [T], shape: [usize; 4]) -> Result<Self, LayoutError> {
        let strides = dense(shape).map_err(|()| LayoutError::TooLarge { shape })?;
        Self::from_strides(data, 0, shape, strides)
    }

    /// Makes a view of a dense array stored batch, rows, heads, dim: `stored` is `[batch, rows, heads, dim]`. The
    /// view's shape is still `[batch, heads, rows, dim]`.
    ///
    /// # Errors
    /// As for [`Self::bhld`].
    pub fn blhd(data: &'a [T], stored: [usize; 4]) -> Result<Self, LayoutError> {
        let (shape, strides) = blhd_layout(stored)?;
        Self::from_strides(data, 0, shape, strides)
    }

    /// Makes the three views of a packed projection: each row holds `heads` query heads, then `kv_heads` key heads,
    /// then `kv_heads` value heads, all of `dim` elements. `shape` is `[batch, rows, heads, dim]` of the queries.
    ///
    /// # Errors
    /// [`LayoutError::Heads`] if `heads` is not a multiple of `kv_heads`; others as for [`Self::bhld`].
    pub fn packed_qkv(data: &'a [T], shape: [usize; 4], kv_heads: usize) -> Result<[Self; 3], LayoutError> {
        let layouts = packed_qkv(data.len(), shape, kv_heads)?;
        let data = data.as_ptr();
        Ok(layouts.map(|layout| Self { data, layout, between: Between::Readable, borrow: PhantomData }))
    }

    /// Makes a view of one element a row, as the LSE has: `shape` is `[batch, heads, rows]` of a dense array. The view's
    /// shape is `[batch, heads, rows, 1]`.
    ///
    /// # Errors
    /// As for [`Self::bhld`].
    pub fn bhl(data: &'a [T], shape: [usize; 3]) -> Result<Self, LayoutError> {
        let [b, h, l] = shape;
        Self::bhld(data, [b, h, l, 1])
    }

    /// Divides rows that hold several heads side by side, as a projection leaves them: `[batch, 1, rows, heads · dim]`
    /// becomes `[batch, heads, rows, dim]`.
    ///
    /// # Errors
    /// [`LayoutError::Columns`] if there is not one head, or if its length is no multiple of `heads`.
    pub fn split_heads(self, heads: usize) -> Result<Self, LayoutError> {
        Ok(Self { layout: self.layout.split_heads(heads)?, ..self })
    }

    /// Makes a view of any strides, in elements: element `[b, h, l, d]` is `data[offset + b·s₀ + h·s₁ + l·s₂ + d·s₃]`.
    /// Strides may be 0 (broadcast) or negative (then `offset` must leave room).
    ///
    /// # Errors
    /// [`LayoutError::OutOfBounds`] if any index inside `shape` would fall outside `data`.
    pub fn from_strides(
        data: &'a [T],
        offset: usize,
        shape: [usize; 4],
        strides: [isize; 4],
    ) -> Result<Self, LayoutError> {
        let layout = Layout::checked(data.len(), offset, shape, strides)?;
        Ok(Self { data: data.as_ptr(), layout, between: Between::Readable, borrow: PhantomData })
    }

    /// Makes a view of elements from the address of element `[0, 0, 0, 0]`.
    ///
    /// # Errors
    /// [`LayoutError::TooLarge`].
    ///
    /// # Safety
    /// Every element inside `shape` is in one allocation, initialised, and may be read for `'a`. Without elements `first`
    /// may be any pointer.
    #[cfg(feature = "ndarray")]
    pub(crate) unsafe fn from_first(
        first: *const T,
        shape: [usize; 4],
        strides: [isize; 4],
    ) -> Result<Self, LayoutError> {
        let layout = Layout::from_lowest(shape, strides)?;
        // SAFETY: index 0 is that of the lowest element, `offset` elements before the first and in its allocation.
        let data = unsafe { first.sub(layout.offset) };
        let between = if layout.has_no_gaps() { Between::Readable } else { Between::Foreign };
        Ok(Self { data, layout, between, borrow: PhantomData })
    }

    /// Makes a view of the elements that a layout reaches from `data`, its index 0.
    ///
    /// # Safety
    /// Every one of them may be read for `'a`.
    pub(super) unsafe fn from_layout(data: *const T, layout: Layout) -> Self {
        Self { data, layout, between: Between::Foreign, borrow: PhantomData }
    }

    /// Returns the shape, `[batch, heads, rows, dim]`.
    pub fn shape(&self) -> [usize; 4] {
        self.layout.shape
    }

    /// Returns the strides, in elements.
    pub fn strides(&self) -> [isize; 4] {
        self.layout.strides
    }

    /// Returns the element at an index, or `None` outside the shape.
    pub fn get(&self, index: [usize; 4]) -> Option<&'a T> {
        let [b, h, l, d] = index;
        let [nb, nh, nl, nd] = self.shape();
        (b < nb && h < nh && l < nl && d < nd).then(|| {
            // SAFETY: the index is inside the shape.
            unsafe { &*self.data.add(self.layout.element(index)) }
        })
    }

    /// Returns the elements of a row inside the shape, if they are contiguous.
    pub(crate) fn contiguous_row(&self, [b, h, l]: [usize; 3]) -> Option<&'a [T]> {
        let [nb, nh, nl, nd] = self.shape();
        let inside = b < nb && h < nh && l < nl && nd > 0;
        (inside && self.strides()[3] == 1).then(|| {
            // SAFETY: the row is inside the shape, and its `nd` elements lie side by side.
            unsafe { core::slice::from_raw_parts(self.data.add(self.layout.row(b, h, l)), nd) }
        })
    }

    /// Returns the same elements, repeated to `shape` along dimensions of length 1. `None` if a dimension is neither 1
    /// nor that of `shape`.
    pub fn broadcast(&self, shape: [usize; 4]) -> Option<Self> {
        let mut layout = self.layout;
        for (dim, to) in shape.into_iter().enumerate() {
            if layout.shape[dim] == 1 && to != 1 {
                layout.strides[dim] = 0;
                layout.shape[dim] = to;
            } else if layout.shape[dim] != to {
                return None;
            }
        }
        // The same elements or none; but the larger shape has its own limits.
        layout.shape_is_countable().then_some(Self { layout, ..*self })
    }

    /// Returns some of the batch. `None` if the range is outside it.
    pub fn batch(&self, batch: core::ops::Range<usize>) -> Option<Self> {
        self.some(0, batch)
    }

    /// Returns some of the heads, of every batch. `None` if the range is outside the heads.
    pub fn heads(&self, heads: core::ops::Range<usize>) -> Option<Self> {
        self.some(1, heads)
    }

    /// Returns some of the rows, of every batch and head. `None` if the range is outside the rows.
    pub fn rows(&self, rows: core::ops::Range<usize>) -> Option<Self> {
        self.some(2, rows)
    }

    /// Returns some of the columns, of every row. `None` if the range is outside the columns.
    pub fn columns(&self, columns: core::ops::Range<usize>) -> Option<Self> {
        self.some(3, columns)
    }

    /// Returns the elements with some of the indices of a dimension.
    fn some(&self, dimension: usize, indices: core::ops::Range<usize>) -> Option<Self> {
        let mut layout = self.layout;
        if indices.start > indices.end || indices.end > layout.shape[dimension] {
            return None;
        }
        layout.shape[dimension] = indices.len();
        if !layout.shape.contains(&0) {
            // The first element kept exists, so its index is in bounds.
            let mut first = [0; 4];
            first[dimension] = indices.start;
            layout.offset = self.layout.element(first);
        }
        Some(Self { layout, ..*self })
    }

    /// Returns true if these elements are the first columns of another view: the same memory.
    pub(crate) fn is_start_of(&self, other: &Self) -> bool {
        let (layout, of) = (&self.layout, &other.layout);
        let first = |view: &Self| view.data.wrapping_add(view.layout.offset);
        layout.shape[..3] == of.shape[..3]
            && layout.shape[3] <= of.shape[3]
            && (layout.shape.contains(&0) || first(self) == first(other) && layout.strides == of.strides)
    }

    /// Returns the rows of one head as a matrix: the slice from its first element to its last, and the distances, in
    /// elements, from one row and from one column to the next. `None` outside the shape, if the head has no elements,
    /// if a stride is negative, or if memory between the elements must not be read.
    pub fn head(&self, b: usize, h: usize) -> Option<(&'a [T], (usize, usize))> {
        let ([nb, nh, nl, nd], [_, _, row, element]) = (self.shape(), self.strides());
        if b >= nb || h >= nh || nl == 0 || nd == 0 {
            return None;
        }
        // A dimension that is never stepped along may have any stride.
        let step = |n: usize, stride: isize| if n > 1 { usize::try_from(stride).ok() } else { Some(1) };
        let (row, element) = (step(nl, row)?, step(nd, element)?);
        let dense = element == 1 && (row == nd || nl == 1);
        (dense || self.between == Between::Readable).then(|| {
            let len = (nl - 1) * row + (nd - 1) * element + 1;
            // SAFETY: the first and the last element are inside the shape, strides are not negative, and what lies between
            // them is either in the shape or readable.
            let elements = unsafe { core::slice::from_raw_parts(self.data.add(self.layout.row(b, h, 0)), len) };
            (elements, (row, element))
        })
    }

    /// Returns the same elements as another type.
    ///
    /// # Safety
    /// The types have the same size and alignment, and every bit pattern of a `T` is a valid `U`.
    pub(crate) unsafe fn cast<U>(self) -> View<'a, U> {
        const { assert!(size_of::<T>() == size_of::<U>() && align_of::<T>() == align_of::<U>()) }
        View { data: self.data.cast(), layout: self.layout, between: self.between, borrow: PhantomData }
    }

    /// Returns a pointer to element `[b, h, l, 0]` and the stride from one element of the row to the next.
    ///
    /// # Safety
    /// `b`, `h`, `l` are inside the shape and the row has an element. All `dim` elements of the row may then be read.
    #[inline]
    pub(crate) unsafe fn row(&self, b: usize, h: usize, l: usize) -> (*const T, isize) {
        // SAFETY: every index inside the shape is inside the view's memory.
        (unsafe { self.data.add(self.layout.row(b, h, l)) }, self.layout.strides[3])
    }
}

impl<'a> From<View<'a, bool>> for View<'a, u8> {
    fn from(view: View<'a, bool>) -> Self {
        // SAFETY: a bool is one byte, 0 or 1, and any byte is a u8.
        unsafe { view.cast() }
    }
}

impl<T> fmt::Debug for View<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Layout { offset, shape, strides } = self.layout;
        f.debug_struct("View")
            .field("shape", &shape)
            .field("strides", &strides)
            .field("offset", &offset)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strides_are_checked_against_the_slice() {
        let data = [0.0f32; 24];
        assert!(View::bhld(&data, [1, 2, 3, 4]).is_ok());
        assert!(View::bhld(&data, [1, 2, 3, 5]).is_err());
        assert!(View::from_strides(&data, 23, [1, 2, 3, 4], [0, -12, -4, -1]).is_ok());
        assert!(View::from_strides(&data, 22, [1, 2, 3, 4], [0, -12, -4, -1]).is_err());
        assert!(View::from_strides(&data, 0, [1, 2, 3, 4], [isize::MAX, isize::MIN, 1, 1]).is_err());
        assert!(View::from_strides(&data, 0, [usize::MAX, 0, 3, 4], [1, 1, 1, 1]).is_err());
        assert!(View::from_strides(&data, usize::MAX, [1, 1, 1, 1], [1, 1, 1, 1]).is_err());
        assert!(View::from_strides(&data, 5, [9, 9, 9, 9], [0, 0, 0, 0]).is_ok());
        assert!(View::from_strides(&data, 0, [1 << 40, 1 << 40, 1, 1], [0, 0, 0, 0]).is_err());
    }

    #[test]
    fn heads_are_matrices() {
        let data: Vec<usize> = (0..120).collect();
        let view = View::blhd(&data, [2, 3, 4, 5]).unwrap();
        let (head, (row, element)) = view.head(1, 2).unwrap();
        assert_eq!(view.get([1, 2, 2, 3]), Some(&head[2 * row + 3 * element]));
        assert!(view.head(2, 0).is_none() && view.head(0, 4).is_none());
        let backwards = View::from_strides(&data, 119, [1, 1, 4, 5], [0, 0, -5, -1]).unwrap();
        assert!(backwards.head(0, 0).is_none());
        let single = View::from_strides(&data, 7, [1, 1, 1, 5], [-9, -9, -9, 1]).unwrap();
        assert_eq!(single.head(0, 0).map(|(head, strides)| (head[0], strides)), Some((7, (1, 1))));
        assert!(View::bhld(&data, [2, 3, 0, 5]).unwrap().head(0, 0).is_none());
    }

    #[test]
    fn packed_heads_lie_side_by_side() {
        let data: Vec<usize> = (0..2 * 3 * 8 * 5).collect();
        let [q, k, v] = View::packed_qkv(&data, [2, 3, 4, 5], 2).unwrap();
        assert_eq!(q.get([1, 3, 2, 4]), Some(&((3 + 2) * 40 + 3 * 5 + 4)));
        assert_eq!(k.get([1, 1, 2, 0]), Some(&((3 + 2) * 40 + 5 * 5)));
        assert_eq!(v.get([0, 1, 0, 4]), Some(&(7 * 5 + 4)));
        assert!(View::packed_qkv(&data, [2, 3, 4, 5], 3).is_err());
    }

    /// What lies between the elements of a view is read only if it was made from a slice, or has no gaps.
    #[cfg(feature = "ndarray")]
    #[test]
    fn elements_known_by_the_first() {
        let data: Vec<usize> = (0..120).collect();
        // SAFETY: all elements are in `data`.
        let at = |first: usize, shape, strides| unsafe { View::from_first(&raw const data[first], shape, strides) };
        let reversed = at(119, [1, 2, 3, 20], [0, -60, -20, -1]).unwrap();
        assert_eq!((reversed.get([0, 1, 2, 19]), reversed.get([0, 2, 0, 0])), (Some(&0), None));
        assert!(reversed.head(0, 0).is_none());
        // No gaps; gaps between heads; between rows; between elements.
        let transposed = at(0, [2, 3, 4, 5], [60, 20, 1, 4]).unwrap();
        assert_eq!(
            transposed.head(1, 2).map(|(head, strides)| (head[0], head.len(), strides)),
            Some((100, 20, (1, 4)))
        );
        let apart = at(0, [2, 3, 3, 5], [60, 20, 5, 1]).unwrap();
        assert_eq!(apart.head(1, 2).map(|(head, strides)| (head[0], head.len(), strides)), Some((100, 15, (5, 1))));
        assert!(at(0, [2, 3, 4, 4], [60, 20, 5, 1]).unwrap().head(1, 2).is_none());
        assert!(at(0, [2, 3, 2, 2], [60, 20, 5, 2]).unwrap().head(1, 2).is_none());
        // As many elements as from the lowest to the highest, some of them twice.
        assert!(at(0, [1, 1, 2, 4], [0, 0, 7, 0]).unwrap().head(0, 0).is_none());
        let repeated = at(7, [1, 1, 1, 5], [0, 0, 0, 0]).unwrap().broadcast([9, 9, 9, 5]).unwrap();
        assert_eq!(repeated.get([8, 8, 8, 4]), Some(&7));
        assert!(repeated.broadcast([usize::MAX, 9, 9, 5]).is_none() && apart.rows(1..3).unwrap().shape()[2] == 2);
        assert!(matches!(at(0, [usize::MAX, 0, 1, 1], [1; 4]), Err(LayoutError::TooLarge { .. })));
    }
}
