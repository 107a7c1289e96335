//! Rows of single keys and values that lie anywhere, copied side by side before anything is computed: each is on a page of memory of
//! its own, and one loop that does nothing else reads them as fast as memory allows.

use crate::kv::key_block::{BlockValues, Keys};
use crate::kv::value_panels::ValuePanels;
use crate::simd::aligned::elements_mut;
use crate::simd::width::LINE_BYTES;
use crate::simd::{LANES, Simd};
use crate::tensor::any::{AnyRows, Tensor, Typed};
use crate::tensor::element::Element;
use crate::tensor::rows::{KEY_BLOCK, Rows};
use core::ops::Range;

/// Number of keys that are prefetched ahead. A core waits for some fifty lines at a time.
pub(crate) const AHEAD: usize = 16;

/// Number of floats of room for a block of rows of `dim` elements of `bytes` each, in whole vectors of elements.
pub(crate) const fn row_floats(dim: usize, bytes: usize) -> Option<usize> {
    match dim.next_multiple_of(LANES).checked_mul(bytes * KEY_BLOCK) {
        Some(bytes) => Some(bytes / size_of::<f32>()),
        None => None,
    }
}

/// Sizes of a block of keys and values that are gathered, and the room for it.
pub(crate) struct Gathering<'r> {
    /// Number of keys.
    pub(crate) len: usize,
    /// Lengths of a key and a value.
    pub(crate) dims: [usize; 2],
    pub(crate) room: &'r mut [f32],
}

/// Copies keys and their values to a room, if both are rows, and returns them there. What is no row stays where it is. Key `j` is row
/// `row(j)`.
///
/// # Safety
/// There are these rows, of these lengths. The room outlives the result, and does not change meanwhile.
pub(crate) unsafe fn gather<S: Simd>(
    s: S,
    (keys, values): (Keys, BlockValues),
    Gathering { len, dims: [dim, value_dim], room }: Gathering<'_>,
    row: impl Fn(usize) -> usize + Copy,
) -> (Keys, BlockValues) {
    // SAFETY: same contract.
    unsafe {
        match (keys, values) {
            (Keys::Rows(keys), BlockValues::Rows { rows: values, .. }) => {
                let bytes = by_type!(Typed, keys, |keys| keys.element_bytes());
                let (of_keys, of_values) = room.split_at_mut(row_floats(dim, bytes).expect("counted with the room"));
                let keys = copy(s, keys, [len, dim], row, of_keys);
                let values = copy(s, values, [len, value_dim], row, of_values);
                (Keys::Rows(keys), BlockValues::Rows { rows: values, readable: value_dim.next_multiple_of(LANES) })
            }
            // Latent keys, of which values are a part.
            (Keys::Rows(keys), BlockValues::ValuePanels(values)) => {
                let layout = values.layout();
                let rows = copy(s, keys, [len, layout.width], row, room);
                let values = by_type!(Typed => Typed, rows, |rows| ValuePanels { first: rows, layout });
                (Keys::Rows(rows), BlockValues::ValuePanels(values))
            }
            others => others,
        }
    }
}

/// Copies `len` rows of `dim` elements side by side.
///
/// # Safety
/// There are these rows.
unsafe fn copy<S: Simd>(
    s: S,
    rows: AnyRows,
    [len, dim]: [usize; 2],
    row: impl Fn(usize) -> usize,
    room: &mut [f32],
) -> AnyRows {
    by_type!(Typed => Typed, rows, |rows| s.vectorize(
        #[inline(always)]
        || {
            let (step, room) = (dim.next_multiple_of(LANES), elements_mut(room));
            for (j, to) in room.chunks_exact_mut(step).enumerate().take(len) {
                // SAFETY: the caller guarantees rows of `len` keys.
                unsafe {
                    if j + AHEAD < len {
                        prefetch(s, rows.at(row(j + AHEAD)).cast(), dim * rows.element_bytes());
                    }
                    let (to, padding) = to.split_at_mut(dim);
                    copy_row(rows, row(j), to);
                    // Read with the last columns: what is there must be finite.
                    padding.fill(Element::narrow(0.0));
                }
            }
            Rows::strided(room.as_ptr(), step as isize, 1)
        },
    ))
}

/// Calls `f(address, bytes)` for some rows of a tensor, if their elements are contiguous.
pub(crate) fn rows_memory(
    x: &Tensor<'_>,
    [b, h]: [usize; 2],
    rows: Range<usize>,
    f: &mut impl FnMut(*const u8, usize),
) {
    let ([_, _, step, element], bytes) = (x.strides(), x.shape()[3] * x.dtype().bytes());
    if rows.is_empty() || element != 1 {
        return;
    }
    // SAFETY: the callers have rows of the tensor. An address alone: nothing is accessed.
    let first = unsafe { x.rows(b, h, rows.start).first().at };
    // A dimension that is never stepped along may have any stride.
    let step = step.wrapping_mul(x.dtype().bytes() as isize);
    if step == bytes as isize {
        return f(first, rows.len() * bytes);
    }
    for row in 0..rows.len() as isize {
        f(first.wrapping_offset(row.wrapping_mul(step)), bytes);
    }
}

/// Prefetches a row into the first-level cache: prefetches into the second do not look up pages.
#[inline(always)]
pub(crate) fn prefetch<S: Simd>(s: S, at: *const u8, bytes: usize) {
    (0..bytes).step_by(LINE_BYTES).for_each(|line| s.prefetch(at.wrapping_add(line).cast()));
}

/// Prefetches a row of `dim` elements, which exists.
#[inline(always)]
pub(crate) fn prefetch_row<S: Simd>(s: S, rows: AnyRows, row: usize, dim: usize) {
    by_type!(Typed, rows, |rows| {
        // SAFETY: the row exists. An address alone.
        prefetch(s, unsafe { rows.at(row) }.cast(), dim * rows.element_bytes());
    });
}

/// Copies a row.
///
/// # Safety
/// The row exists, with as many elements.
#[inline(always)]
unsafe fn copy_row<T: Element>(rows: Rows<T>, row: usize, to: &mut [T]) {
    // SAFETY: the caller guarantees the row's elements.
    unsafe {
        let from = rows.at(row);
        let (mut vectors, mut i) = (to.chunks_exact_mut(LANES), 0);
        if rows.element == 1 {
            for vector in &mut vectors {
                vector.copy_from_slice(&from.add(i).cast::<[T; LANES]>().read_unaligned());
                i += LANES;
            }
            to[i..].iter_mut().enumerate().for_each(|(n, x)| *x = *from.add(i + n));
        } else {
            to.iter_mut().enumerate().for_each(|(i, x)| *x = *from.offset(i as isize * rows.element));
        }
    }
}
