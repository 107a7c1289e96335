//! Gradients as they are written: rows of sums, scaled and rounded once.

use crate::simd::{Simd, quiet};
use crate::tensor::any::TensorMut;
use crate::tensor::element::Element;
use crate::tensor::view_mut::ViewMut;

/// Writes rows of a gradient, from one on: `scale` times each sum, or zeros where a row has no sums.
///
/// # Safety
/// The rows are inside the gradient, and this worker's alone.
pub(crate) unsafe fn write_rows<'a, S: Simd>(
    s: S,
    gradient: &TensorMut<'_>,
    [b, h, first]: [usize; 3],
    rows: impl Iterator<Item = &'a [f32]>,
    scale: f32,
) {
    by_type!(TensorMut, gradient, |gradient| s.vectorize(
        #[inline(always)]
        || for (i, sums) in rows.enumerate() {
            // SAFETY: the caller guarantees the contract.
            unsafe { write_row(gradient, [b, h, first + i], sums, scale) };
        }
    ));
}

/// Writes a row of a gradient, as [`write_rows`] does.
///
/// # Safety
/// Same contract as [`write_rows`].
#[inline(always)]
unsafe fn write_row<T: Element>(gradient: &ViewMut<'_, T>, [b, h, l]: [usize; 3], sums: &[f32], scale: f32) {
    // A zero is positive, and a NaN the quiet one.
    let scaled = |sum: f32| T::narrow(quiet(sum * scale + 0.0));
    let dim = gradient.shape()[3];
    // SAFETY: the caller guarantees a row inside the gradient, which has `dim` elements and is this worker's alone; they lie side
    // by side where their distance is 1.
    unsafe {
        let (first, element) = gradient.row(b, h, l);
        if element == 1 && sums.len() >= dim {
            let row = core::slice::from_raw_parts_mut(first, dim);
            row.iter_mut().zip(sums).for_each(|(x, &sum)| *x = scaled(sum));
            return;
        }
        for d in 0..dim {
            *first.offset(d as isize * element) = sums.get(d).map_or(T::narrow(0.0), |&sum| scaled(sum));
        }
    }
}
