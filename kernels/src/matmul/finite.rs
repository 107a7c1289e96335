//! Checks that elements are finite.

use crate::simd::isa::Isa;
use crate::simd::{LANES, Simd};
use crate::tensor::any::{AnyRows, Tensor, Typed};
use crate::tensor::element::Element;
use crate::tensor::rows::Rows;

/// Returns true if all elements of `n` rows of `cols` values are finite.
///
/// # Safety
/// `values` has `n` readable rows of `cols` elements.
pub(crate) unsafe fn all_finite<S: Simd>(s: S, values: AnyRows, n: usize, cols: usize) -> bool {
    s.vectorize(
        #[inline(always)]
        // SAFETY: same contract.
        move || by_type!(Typed, values, |values| unsafe { all_finite_of(s, values, n, cols) }),
    )
}

/// Returns what [`all_finite`] does, of values of one type.
///
/// # Safety
/// Same contract as [`all_finite`].
#[inline(always)]
unsafe fn all_finite_of<S: Simd, T: Element>(s: S, values: Rows<T>, n: usize, cols: usize) -> bool {
    let zero = s.splat(0.0);
    // x·0 is 0 for a finite x and NaN otherwise, and a NaN stays. Four sums, so that none waits for its predecessor.
    let (mut seen, mut rest) = ([zero; 4], 0.0f32);
    let whole = if values.element == 1 { cols / LANES * LANES } else { 0 };
    let fours = whole / (4 * LANES) * (4 * LANES);
    let mut done = 0;
    while done < n {
        // SAFETY: the caller guarantees row `done < n`.
        let (mut row, together) = unsafe { (values.at(done), values.evenly(done).min(n - done)) };
        for _ in 0..together {
            for i in (0..fours).step_by(4 * LANES) {
                for (k, seen) in seen.iter_mut().enumerate() {
                    // SAFETY: `i + 64 ≤ cols`, contiguous.
                    *seen = s.fma(unsafe { T::load(s, row.add(i + k * LANES)) }, zero, *seen);
                }
            }
            for i in (fours..whole).step_by(LANES) {
                // SAFETY: `i + 16 ≤ cols`, contiguous.
                seen[0] = s.fma(unsafe { T::load(s, row.add(i)) }, zero, seen[0]);
            }
            for i in whole..cols {
                // SAFETY: `i < cols`.
                rest += unsafe { *row.offset(i as isize * values.element) }.widen() * 0.0;
            }
            row = row.wrapping_offset(values.step());
        }
        done += together;
    }
    let [a, b, c, d] = seen;
    s.reduce_sum(s.add(s.add(a, b), s.add(c, d))) + rest == 0.0
}

/// Returns the first element of a tensor that is not finite, and its index.
pub fn first_not_finite(tensor: &Tensor<'_>, isa: Isa) -> Option<([usize; 4], f32)> {
    let [batch, heads, rows, dim] = tensor.shape();
    if rows == 0 || dim == 0 {
        return None;
    }
    (0..batch).flat_map(|b| (0..heads).map(move |h| [b, h])).find_map(|[b, h]| {
        // SAFETY: the head is inside the shape and has a row 0; all its rows are readable.
        if dispatch!(isa, |s| unsafe { all_finite(s, tensor.rows(b, h, 0), rows, dim) }) {
            return None;
        }
        let mut at = (0..rows).flat_map(|l| (0..dim).map(move |d| [b, h, l, d]));
        at.find_map(|at| tensor.get(at).filter(|x| !x.is_finite()).map(|x| (at, x)))
    })
}
