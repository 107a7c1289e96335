//! Borrowed, strided, four-dimensional views: `[batch, heads, rows, dim]` whatever the memory layout.
//!
//! A view is checked once, when it is made: every index inside its shape lies inside its slice. The kernels then read
//! without further checks. A [`ViewMut`] is also checked to hold every element once, so that rows can be handed to
//! different threads.

use crate::tensor::layout::{Layout, LayoutError, blhd_layout, dense};
use core::fmt;

/// Read-only view `[batch, heads, rows, dim]` of a slice. Strides are in elements; 0 broadcasts. The slice may be longer
/// than the view needs; elements that no index reaches are never read.
#[derive(Clone, Copy)]
pub struct View<'a, T = f32> {
    data: &'a [T],
    layout: Layout,
}

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
        let [b, l, h, d] = shape;
        if kv_heads == 0 || h % kv_heads != 0 {
            return Err(LayoutError::Heads { heads: h, kv_heads });
        }
        let too_large = LayoutError::TooLarge { shape };
        let all = kv_heads.checked_mul(2).and_then(|n| n.checked_add(h)).ok_or(too_large.clone())?;
        let (_, strides) = blhd_layout([b, l, all, d])?;
        let at = |heads: usize| heads.checked_mul(d).ok_or(too_large.clone());
        Ok([
            Self::from_strides(data, 0, [b, h, l, d], strides)?,
            Self::from_strides(data, at(h)?, [b, kv_heads, l, d], strides)?,
            Self::from_strides(data, at(h + kv_heads)?, [b, kv_heads, l, d], strides)?,
        ])
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
        Ok(Self { data, layout: Layout::checked(data.len(), offset, shape, strides)? })
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
            let at = self.layout.row(b, h, l) as isize + d as isize * self.layout.strides[3];
            &self.data[at as usize]
        })
    }

    /// Returns the elements of a row inside the shape, if they are contiguous.
    pub(crate) fn contiguous_row(&self, [b, h, l]: [usize; 3]) -> Option<&'a [T]> {
        let [nb, nh, nl, nd] = self.shape();
        let inside = b < nb && h < nh && l < nl && nd > 0;
        (inside && self.strides()[3] == 1).then(|| &self.data[self.layout.row(b, h, l)..][..nd])
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
        // Checked again: the larger shape has limits of its own.
        let Layout { offset, shape, strides } = layout;
        Some(Self { data: self.data, layout: Layout::checked(self.data.len(), offset, shape, strides).ok()? })
    }

    /// Returns some of the rows, of every batch and head. `None` if the range is outside the rows.
    pub fn rows(&self, rows: core::ops::Range<usize>) -> Option<Self> {
        let mut layout = self.layout;
        if rows.start > rows.end || rows.end > layout.shape[2] {
            return None;
        }
        layout.shape[2] = rows.len();
        if !layout.shape.contains(&0) {
            // The first row kept exists, so its index is in bounds.
            layout.offset = self.layout.row(0, 0, rows.start);
        }
        Some(Self { data: self.data, layout })
    }

    /// Returns the rows of one head as a matrix: the slice from its first element on, and the distances, in elements,
    /// from one row and from one column to the next. `None` outside the shape, if the head has no elements, or if a
    /// stride is negative.
    pub fn head(&self, b: usize, h: usize) -> Option<(&'a [T], (usize, usize))> {
        let ([nb, nh, nl, nd], [_, _, row, element]) = (self.shape(), self.strides());
        // A dimension that is never stepped along may have any stride.
        let step = |n: usize, stride: isize| if n > 1 { usize::try_from(stride).ok() } else { Some(1) };
        let strides = (step(nl, row)?, step(nd, element)?);
        (b < nb && h < nh && nl > 0 && nd > 0).then(|| (&self.data[self.layout.row(b, h, 0)..], strides))
    }

    /// Returns the same elements as another type.
    ///
    /// # Safety
    /// The types have the same size and alignment, and every bit pattern of a `T` is a valid `U`.
    pub(crate) unsafe fn cast<U>(self) -> View<'a, U> {
        const { assert!(size_of::<T>() == size_of::<U>() && align_of::<T>() == align_of::<U>()) }
        // SAFETY: the same memory; the caller guarantees that every `T` is a valid `U`.
        let data = unsafe { core::slice::from_raw_parts(self.data.as_ptr().cast(), self.data.len()) };
        View { data, layout: self.layout }
    }

    /// Returns a pointer to element `[b, h, l, 0]` and the stride from one element of the row to the next.
    ///
    /// # Safety
    /// `b`, `h`, `l` are inside the shape and the row has an element. All `dim` elements of the row may then be read.
    #[inline]
    pub(crate) unsafe fn row(&self, b: usize, h: usize, l: usize) -> (*const T, isize) {
        // SAFETY: `Layout::checked` verified that every index inside the shape is inside the slice.
        (unsafe { self.data.as_ptr().add(self.layout.row(b, h, l)) }, self.layout.strides[3])
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

/// Writable view `[batch, heads, rows, dim]` in which no element is held twice. The slice may be longer than the view
/// needs; elements that no index reaches are never written.
pub struct ViewMut<'a, T = f32> {
    data: &'a mut [T],
    layout: Layout,
}

impl<'a, T> ViewMut<'a, T> {
    /// Makes a writable view of a dense array stored batch, heads, rows, dim: `shape` is `[batch, heads, rows, dim]`.
    ///
    /// # Errors
    /// As for [`View::bhld`].
    pub fn bhld(data: &'a mut [T], shape: [usize; 4]) -> Result<Self, LayoutError> {
        let strides = dense(shape).map_err(|()| LayoutError::TooLarge { shape })?;
        Self::from_strides(data, 0, shape, strides)
    }

    /// Makes a writable view of a dense array stored batch, rows, heads, dim: `stored` is `[batch, rows, heads, dim]`.
    /// The view's shape is still `[batch, heads, rows, dim]`.
    ///
    /// # Errors
    /// As for [`View::bhld`].
    pub fn blhd(data: &'a mut [T], stored: [usize; 4]) -> Result<Self, LayoutError> {
        let (shape, strides) = blhd_layout(stored)?;
        Self::from_strides(data, 0, shape, strides)
    }

    /// Makes a writable view of one element a row, as LSE is written: `shape` is `[batch, heads, rows]` of a dense
    /// array. The view's shape is `[batch, heads, rows, 1]`.
    ///
    /// # Errors
    /// As for [`View::bhld`].
    pub fn bhl(data: &'a mut [T], shape: [usize; 3]) -> Result<Self, LayoutError> {
        let [b, h, l] = shape;
        Self::bhld(data, [b, h, l, 1])
    }

    /// Makes a writable view of any strides, in elements, as long as no element is held twice.
    ///
    /// # Errors
    /// [`LayoutError::OutOfBounds`] as for [`View::from_strides`], [`LayoutError::Overlap`] if two indices share an
    /// element, [`LayoutError::Interleaved`] if dimensions interleave so that it would take too long to rule this out.
    pub fn from_strides(
        data: &'a mut [T],
        offset: usize,
        shape: [usize; 4],
        strides: [isize; 4],
    ) -> Result<Self, LayoutError> {
        let layout = Layout::checked(data.len(), offset, shape, strides)?;
        match layout.is_injective() {
            Some(true) => Ok(Self { data, layout }),
            Some(false) => Err(LayoutError::Overlap { shape, strides }),
            None => Err(LayoutError::Interleaved { shape, strides }),
        }
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
    pub fn get_mut(&mut self, index: [usize; 4]) -> Option<&mut T> {
        let [b, h, l, d] = index;
        let [nb, nh, nl, nd] = self.shape();
        (b < nb && h < nh && l < nl && d < nd).then(|| {
            let at = self.layout.row(b, h, l) as isize + d as isize * self.layout.strides[3];
            &mut self.data[at as usize]
        })
    }

    /// Returns the elements as one slice if they are dense in the order batch, heads, rows, dim; otherwise the view
    /// itself.
    ///
    /// # Errors
    /// The view itself, if its elements are not dense.
    pub fn into_dense(self) -> Result<&'a mut [T], Self> {
        let Layout { offset, shape, strides } = self.layout;
        let len = shape.iter().product();
        if len == 0 {
            return Ok(&mut []);
        }
        let same = dense(shape).is_ok_and(|d| (0..4).all(|i| shape[i] == 1 || d[i] == strides[i]));
        if same { Ok(&mut self.data[offset..][..len]) } else { Err(self) }
    }

    /// Returns a read-only view of the same elements.
    pub fn as_view(&self) -> View<'_, T> {
        View { data: self.data, layout: self.layout }
    }

    /// Borrows the same elements for a shorter time.
    pub fn reborrow(&mut self) -> ViewMut<'_, T> {
        ViewMut { data: self.data, layout: self.layout }
    }

    /// Returns the same elements as another type.
    ///
    /// # Safety
    /// The types have the same size and alignment; every bit pattern of a `T` is a valid `U`, and the reverse.
    #[cfg(feature = "half")]
    pub(crate) unsafe fn cast<U>(self) -> ViewMut<'a, U> {
        const { assert!(size_of::<T>() == size_of::<U>() && align_of::<T>() == align_of::<U>()) }
        // SAFETY: the same memory, borrowed exclusively; the caller guarantees that every `T` is a valid `U`, and that
        // every `U` written is a valid `T`.
        let data = unsafe { core::slice::from_raw_parts_mut(self.data.as_mut_ptr().cast(), self.data.len()) };
        ViewMut { data, layout: self.layout }
    }

    /// Converts the exclusive borrow into a form that several threads can write through, each to its own rows.
    pub(crate) fn into_shared(self) -> SharedMut<'a, T> {
        SharedMut { data: self.data.as_mut_ptr(), layout: self.layout, borrow: core::marker::PhantomData }
    }
}

impl<T> fmt::Debug for ViewMut<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Layout { offset, shape, strides } = self.layout;
        f.debug_struct("ViewMut")
            .field("shape", &shape)
            .field("strides", &strides)
            .field("offset", &offset)
            .finish_non_exhaustive()
    }
}

/// Mutable view that several tasks write through, each only to rows that it owns: see `launch::Launch`.
pub(crate) struct SharedMut<'a, T> {
    data: *mut T,
    layout: Layout,
    borrow: core::marker::PhantomData<&'a mut [T]>,
}

// SAFETY: it is an exclusive borrow of a slice of `T`; writes through it are `unsafe`, and their callers guarantee
// disjoint rows.
unsafe impl<T: Send> Send for SharedMut<'_, T> {}
// SAFETY: as for `Send`; a shared reference alone lets a thread do nothing without that guarantee.
unsafe impl<T: Send> Sync for SharedMut<'_, T> {}

impl<T> SharedMut<'_, T> {
    /// Returns another handle to the same view: the contract of [`Self::row`] extends over all handles.
    pub(crate) fn same(&self) -> Self {
        Self { ..*self }
    }

    pub(crate) fn shape(&self) -> [usize; 4] {
        self.layout.shape
    }

    pub(crate) fn strides(&self) -> [isize; 4] {
        self.layout.strides
    }

    /// Returns a pointer to element `[b, h, l, 0]` and the stride from one element of the row to the next.
    ///
    /// # Safety
    /// `b`, `h`, `l` are inside the shape and the row has an element. All `dim` elements of the row may then be read and
    /// written, while no other thread accesses them.
    #[inline]
    pub(crate) unsafe fn row(&self, b: usize, h: usize, l: usize) -> (*mut T, isize) {
        // SAFETY: `Layout::checked` verified that every index inside the shape is inside the slice.
        (unsafe { self.data.add(self.layout.row(b, h, l)) }, self.layout.strides[3])
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
    fn mutable_views_hold_each_element_once() {
        let mut data = [0.0f32; 24];
        assert!(ViewMut::blhd(&mut data, [1, 3, 2, 4]).is_ok());
        assert!(ViewMut::from_strides(&mut data, 23, [1, 2, 3, 4], [0, -12, -4, -1]).is_ok());
        let twice = ViewMut::from_strides(&mut data, 0, [1, 2, 3, 4], [0, 0, 4, 1]);
        assert!(matches!(twice, Err(LayoutError::Overlap { .. })));
        assert!(ViewMut::from_strides(&mut data, 0, [1, 2, 3, 4], [0, 3, 4, 1]).is_err());
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
    fn elements_are_written_where_they_are_read() {
        let mut data = [0; 24];
        let mut view = ViewMut::from_strides(&mut data, 23, [1, 2, 3, 4], [0, -12, -4, -1]).unwrap();
        *view.get_mut([0, 1, 2, 3]).unwrap() = 5;
        assert!(view.get_mut([1, 0, 0, 0]).is_none() && view.get_mut([0, 0, 0, 4]).is_none());
        assert_eq!(view.as_view().get([0, 1, 2, 3]), Some(&5));
        assert!(view.into_dense().is_err());
        assert_eq!(data[0], 5);
        let last = ViewMut::from_strides(&mut data, 12, [1, 1, 3, 4], [-7, 99, 4, 1]).unwrap();
        assert_eq!(last.into_dense().unwrap().len(), 12);
        assert_eq!(ViewMut::bhld(&mut data, [0, 9, 9, 9]).unwrap().into_dense().unwrap(), &[]);
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
}
