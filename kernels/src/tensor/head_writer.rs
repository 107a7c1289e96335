//! Heads of an output, split for independent writers.

use crate::tensor::view_mut::ViewMut;
use core::fmt;
use core::ops::Range;

/// Some heads of one batch entry of a [`ViewMut`], for one writer. Others may write the other heads meanwhile.
pub struct HeadsMut<'a, T = f32> {
    view: ViewMut<'a, T>,
    batch: usize,
    heads: Range<usize>,
}

impl<'a, T> ViewMut<'a, T> {
    /// Splits the view by batch, and by `group_size` adjacent heads: `[0, 0..group_size]` first, then the next heads,
    /// then the next batch.
    ///
    /// # Panics
    /// If `group_size` is 0, or the number of heads is not a multiple of it.
    #[doc(hidden)] // what it gives has no name in `sdpa`
    pub fn into_heads(self, group_size: usize) -> impl Iterator<Item = HeadsMut<'a, T>> + Send
    where
        T: Send,
    {
        let [batch, heads, ..] = self.shape();
        assert!(group_size > 0 && heads.is_multiple_of(group_size), "{heads} heads by {group_size}");
        let groups = heads / group_size;
        (0..batch * groups).map(move |i| {
            let first = i % groups * group_size;
            // SAFETY: a `HeadsMut` accesses elements by `row` alone, and this view none.
            let view = unsafe { self.same() };
            HeadsMut { view, batch: i / groups, heads: first..first + group_size }
        })
    }
}

impl<T: Copy> HeadsMut<'_, T> {
    /// Writes a row of the `head`th of these heads.
    ///
    /// # Panics
    /// If an index is outside the shape, or the row has another length.
    pub fn write(&mut self, head: usize, row: usize, values: &[T]) {
        let [.., rows, dim] = self.view.shape();
        assert!(head < self.heads.len() && row < rows && values.len() == dim, "a row outside the view");
        if dim == 0 {
            return;
        }
        // SAFETY: the row is inside the shape by the assertion, and has elements. A view holds every element once, each
        // of its heads is in one `HeadsMut` (`into_heads` took the view and is the only constructor), and this one is
        // borrowed exclusively.
        unsafe {
            let (first, stride) = self.view.row(self.batch, self.heads.start + head, row);
            if stride == 1 {
                core::ptr::copy_nonoverlapping(values.as_ptr(), first, dim);
            } else {
                for (i, &x) in values.iter().enumerate() {
                    first.offset(i as isize * stride).write(x);
                }
            }
        }
    }
}

impl<T> fmt::Debug for HeadsMut<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HeadsMut").field("batch", &self.batch).field("heads", &self.heads).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Writes every layout of `[2, 6, 3, 4]` by two threads, head `h` of batch `b` by one of them.
    #[test]
    fn every_element_is_written_once_where_it_lies() {
        let (shape, n) = ([2, 6, 3, 4], 144);
        let name = |[b, h, l, d]: [usize; 4]| ((b * 6 + h) * 3 + l) * 4 + d;
        for (offset, strides) in
            [(0, [72, 12, 4, 1]), (0, [72, 4, 24, 1]), (n - 1, [-72, -12, -4, -1]), (0, [72, 12, 1, 3])]
        {
            let mut data = vec![usize::MAX; n];
            let view = ViewMut::from_strides(&mut data, offset, shape, strides).unwrap();
            let (mut one, mut other): (Vec<_>, Vec<_>) = view.into_heads(2).enumerate().partition(|(i, _)| i % 2 == 0);
            let write = |parts: &mut Vec<(usize, HeadsMut<'_, usize>)>| {
                for (i, part) in parts {
                    for (h, l) in (0..2).flat_map(|h| (0..3).map(move |l| (h, l))) {
                        let at = |d| name([*i / 3, *i % 3 * 2 + h, l, d]);
                        part.write(h, l, &[at(0), at(1), at(2), at(3)]);
                    }
                }
            };
            std::thread::scope(|scope| {
                scope.spawn(|| write(&mut one));
                write(&mut other);
            });
            let view = crate::View::from_strides(&data, offset, shape, strides).unwrap();
            for i in 0..n {
                let at = [i / 72, i / 12 % 6, i / 4 % 3, i % 4];
                assert_eq!(view.get(at), Some(&name(at)), "{strides:?} {at:?}");
            }
        }
    }

    #[test]
    #[should_panic(expected = "a row outside the view")]
    fn a_head_of_another_writer_is_refused() {
        let mut data = [0.0f32; 8];
        let mut parts = ViewMut::bhld(&mut data, [1, 2, 1, 4]).unwrap().into_heads(1);
        parts.next().unwrap().write(1, 0, &[1.0; 4]);
    }

    #[test]
    fn nothing_to_write() {
        let mut data = [0.0f32; 8];
        assert_eq!(ViewMut::bhld(&mut data, [0, 2, 1, 4]).unwrap().into_heads(2).count(), 0);
        assert_eq!(ViewMut::bhld(&mut data, [3, 0, 1, 4]).unwrap().into_heads(2).count(), 0);
        let mut parts = ViewMut::bhld(&mut data, [1, 2, 1, 0]).unwrap().into_heads(2);
        parts.next().unwrap().write(1, 0, &[]);
    }
}
