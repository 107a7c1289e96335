//! Writable views of any strides. A [`ViewMut`] is checked to hold every element once, so that rows can be handed to
//! different threads.

use crate::tensor::layout::{Layout, LayoutError, blhd_layout, dense, packed_qkv};
use crate::tensor::view::View;
use core::fmt;
use core::marker::PhantomData;

/// Writable view `[batch, heads, rows, dim]` in which no element is held twice. The slice may be longer than the view
/// needs; elements that no index reaches are never written.
pub struct ViewMut<'a, T = f32> {
    /// Element of index 0 of the layout. Every element that the layout reaches is borrowed exclusively for `'a`; memory
    /// between them may belong to somebody else.
    data: *mut T,
    layout: Layout,
    borrow: PhantomData<&'a mut [T]>,
}

// SAFETY: a view is an exclusive borrow of elements of type `T`.
unsafe impl<T: Send> Send for ViewMut<'_, T> {}
// SAFETY: through a shared reference elements can only be read, but for `row`: its callers guarantee disjoint rows, it is
// crate-private, and it is called for plain numbers alone, which are `Send`.
unsafe impl<T: Sync> Sync for ViewMut<'_, T> {}

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

    /// Makes a writable view of one element a row, for the LSE: `shape` is `[batch, heads, rows]` of a dense array. The
    /// view's shape is `[batch, heads, rows, 1]`.
    ///
    /// # Errors
    /// As for [`View::bhld`].
    pub fn bhl(data: &'a mut [T], shape: [usize; 3]) -> Result<Self, LayoutError> {
        let [b, h, l] = shape;
        Self::bhld(data, [b, h, l, 1])
    }

    /// Makes the three writable views of a packed projection, as [`View::packed_qkv`] does: for its gradients.
    ///
    /// # Errors
    /// As for [`View::packed_qkv`].
    pub fn packed_qkv(data: &'a mut [T], shape: [usize; 4], kv_heads: usize) -> Result<[Self; 3], LayoutError> {
        let [q, k, v] = packed_qkv(data.len(), shape, kv_heads)?;
        let layouts = [q.holds_each_once()?, k.holds_each_once()?, v.holds_each_once()?];
        // Each view is alone with its elements: the three have different columns of rows that share none.
        let data = data.as_mut_ptr();
        Ok(layouts.map(|layout| Self { data, layout, borrow: PhantomData }))
    }

    /// Divides rows that hold several heads side by side, as [`View::split_heads`] does.
    ///
    /// # Errors
    /// As for [`View::split_heads`].
    pub fn split_heads(self, heads: usize) -> Result<Self, LayoutError> {
        Ok(Self { layout: self.layout.split_heads(heads)?, ..self })
    }

    /// Makes a writable view of any strides, in elements, if no two indices share an element.
    ///
    /// # Errors
    /// [`LayoutError::OutOfBounds`] as for [`View::from_strides`], [`LayoutError::Overlap`] if two indices share an
    /// element, [`LayoutError::Interleaved`] if dimensions interleave and it would take too long to check this.
    pub fn from_strides(
        data: &'a mut [T],
        offset: usize,
        shape: [usize; 4],
        strides: [isize; 4],
    ) -> Result<Self, LayoutError> {
        let layout = Layout::checked(data.len(), offset, shape, strides)?.holds_each_once()?;
        Ok(Self { data: data.as_mut_ptr(), layout, borrow: PhantomData })
    }

    /// Makes a writable view of elements from the address of element `[0, 0, 0, 0]`.
    ///
    /// # Errors
    /// [`LayoutError::TooLarge`], and [`LayoutError::Overlap`] or [`LayoutError::Interleaved`] as for
    /// [`Self::from_strides`].
    ///
    /// # Safety
    /// Every element inside `shape` is in one allocation, initialised, and borrowed exclusively for `'a`. Without elements
    /// `first` may be any pointer.
    #[cfg(feature = "ndarray")]
    pub(crate) unsafe fn from_first(
        first: *mut T,
        shape: [usize; 4],
        strides: [isize; 4],
    ) -> Result<Self, LayoutError> {
        let layout = Layout::from_lowest(shape, strides)?.holds_each_once()?;
        // SAFETY: index 0 is that of the lowest element, `offset` elements before the first and in its allocation.
        Ok(Self { data: unsafe { first.sub(layout.offset) }, layout, borrow: PhantomData })
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
            // SAFETY: the index is inside the shape, and the view is borrowed exclusively.
            unsafe { &mut *self.data.add(self.layout.element(index)) }
        })
    }

    /// Returns the elements of a row inside the shape, if they are contiguous.
    pub(crate) fn contiguous_row_mut(&mut self, [b, h, l]: [usize; 3]) -> Option<&mut [T]> {
        let [nb, nh, nl, nd] = self.shape();
        let inside = b < nb && h < nh && l < nl && nd > 0;
        (inside && self.strides()[3] == 1).then(|| {
            // SAFETY: the row is inside the shape, its `nd` elements lie side by side, and the view is borrowed exclusively.
            unsafe { core::slice::from_raw_parts_mut(self.data.add(self.layout.row(b, h, l)), nd) }
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
        if !same {
            return Err(self);
        }
        // SAFETY: the `len` elements of the view lie side by side from its first on, and are borrowed exclusively.
        Ok(unsafe { core::slice::from_raw_parts_mut(self.data.add(offset), len) })
    }

    /// Returns a read-only view of the same elements.
    pub fn as_view(&self) -> View<'_, T> {
        // SAFETY: the view's elements, which nobody writes while it is borrowed.
        unsafe { View::from_layout(self.data, self.layout) }
    }

    /// Borrows the same elements for a shorter time.
    pub fn reborrow(&mut self) -> ViewMut<'_, T> {
        ViewMut { ..*self }
    }

    /// Returns the same elements as another type.
    ///
    /// # Safety
    /// The types have the same size and alignment; every bit pattern of a `T` is a valid `U`, and the reverse.
    #[cfg(feature = "half")]
    pub(crate) unsafe fn cast<U>(self) -> ViewMut<'a, U> {
        const { assert!(size_of::<T>() == size_of::<U>() && align_of::<T>() == align_of::<U>()) }
        ViewMut { data: self.data.cast(), layout: self.layout, borrow: PhantomData }
    }

    /// Returns another handle to the same elements: the contract of [`Self::row`] extends over all handles.
    ///
    /// # Safety
    /// While there are two, elements are accessed by [`Self::row`] alone.
    #[cfg(feature = "nn")]
    pub(crate) unsafe fn same(&self) -> Self {
        Self { ..*self }
    }

    /// Returns a pointer to element `[b, h, l, 0]` and the stride from one element of the row to the next. Tasks write through it,
    /// each only to rows that it owns: see `launch::Launch`.
    ///
    /// # Safety
    /// `b`, `h`, `l` are inside the shape and the row has an element. All `dim` elements of the row may then be read and
    /// written, while no other thread accesses them and they are borrowed from the view in no other way.
    #[inline]
    pub(crate) unsafe fn row(&self, b: usize, h: usize, l: usize) -> (*mut T, isize) {
        // SAFETY: every index inside the shape is inside the view's memory.
        (unsafe { self.data.add(self.layout.row(b, h, l)) }, self.layout.strides[3])
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

#[cfg(test)]
mod tests {
    use super::*;

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

    #[cfg(feature = "ndarray")]
    #[test]
    fn elements_known_by_the_first() {
        let mut data: Vec<usize> = (0..24).collect();
        let last = &raw mut data[23];
        // SAFETY: all elements are in `data`, which nothing else uses meanwhile.
        let from_first = |shape, strides| unsafe { ViewMut::from_first(last, shape, strides) };
        *from_first([1, 2, 3, 4], [99, -12, -4, -1]).unwrap().get_mut([0, 1, 2, 3]).unwrap() = 77;
        assert!(matches!(from_first([1, 2, 2, 2], [0, 0, -2, -1]), Err(LayoutError::Overlap { .. })));
        assert!(matches!(from_first([1, 2, 2, 4], [0, -3, -6, -1]), Err(LayoutError::Overlap { .. })));
        assert!(from_first([0, 9, 9, 9], [isize::MAX; 4]).unwrap().into_dense().unwrap().is_empty());
        assert!(matches!(from_first([usize::MAX, 0, 1, 1], [1; 4]), Err(LayoutError::TooLarge { .. })));
        assert_eq!(data[0], 77);
    }
}
