//! Running state of the online softmax, and how what was accumulated over later keys is merged into what was over earlier ones.

use crate::attention::steps::infinite;
use crate::matmul::pack::NonFinite;
use crate::simd::exp::exp;
use crate::simd::{LANES, Simd, lanes};

/// Running state of a row block, padded to whole vectors, and the two factors of the last key block.
pub(crate) struct SoftmaxState<'a> {
    /// Largest score so far.
    pub(crate) max: &'a mut [f32],
    /// Σ exp(score − max) so far.
    pub(crate) sum: &'a mut [f32],
    /// Factor of everything accumulated before this block. On entry to [`merge_block_state`]: the block's own maxima.
    pub(crate) rescale_prev: &'a mut [f32],
    /// Factor of this block. On entry to [`merge_block_state`]: the block's own sums.
    pub(crate) rescale_block: &'a mut [f32],
}

/// Merges the state of rows accumulated over later keys into that over earlier ones, as the softmax does with a block: the later
/// rows' maxima and sums are passed in `rescale_prev` and `rescale_block`, and become the factors for [`merge_outputs`].
pub(crate) fn merge_state<S: Simd>(s: S, state: SoftmaxState<'_>) {
    let rows = state.max.len();
    assert!(rows.is_multiple_of(LANES));
    assert!([state.sum.len(), state.rescale_prev.len(), state.rescale_block.len()] == [rows; 3]);
    s.vectorize(
        #[inline(always)]
        move || merge_block_state(s, rows, state),
    )
}

/// Merges outputs over later keys into outputs over earlier ones, rows of `dim` elements, as the P·V step does with a block:
/// `out ← out · rescale_prev + later · factor`. Where both were accumulated with non-finite values handled, marks of infinite
/// values (`infinite.rs`) stay marks.
pub(crate) fn merge_outputs<S: Simd>(
    s: S,
    [rescale_prev, factor]: [&[f32]; 2],
    out: &mut [f32],
    later: &[f32],
    dim: usize,
    nonfinite: NonFinite,
) {
    s.vectorize(
        #[inline(always)]
        move || {
            assert!(out.len() == later.len());
            for (row, (out, later)) in out.chunks_exact_mut(dim).zip(later.chunks_exact(dim)).enumerate() {
                let factors = [rescale_prev[row], factor[row]];
                let ((out, out_rest), (later, later_rest)) = (out.as_chunks_mut(), later.as_chunks());
                for (out, later) in out.iter_mut().zip(later) {
                    merge_sixteen(s, factors, out, later, nonfinite);
                }
                if !out_rest.is_empty() {
                    let (mut a, mut b) = ([0.0; LANES], [0.0; LANES]);
                    a[..out_rest.len()].copy_from_slice(out_rest);
                    b[..later_rest.len()].copy_from_slice(later_rest);
                    merge_sixteen(s, factors, &mut a, &b, nonfinite);
                    out_rest.copy_from_slice(&a[..out_rest.len()]);
                }
            }
        },
    )
}

/// Merges sixteen elements of a row, as [`merge_outputs`] does.
#[inline(always)]
fn merge_sixteen<S: Simd>(s: S, factors: [f32; 2], out: &mut [f32; LANES], later: &[f32; LANES], nonfinite: NonFinite) {
    let (before, [rescale_prev, factor]) = (*out, factors);
    let old = s.mul(lanes::load(s, out), s.splat(rescale_prev));
    lanes::store(s, out, s.fma(lanes::load(s, later), s.splat(factor), old));
    if nonfinite == NonFinite::Handled && out.iter().any(|x| x.is_nan()) {
        for (out, (&before, &later)) in out.iter_mut().zip(before.iter().zip(later)) {
            *out = infinite::merge(factors, before, later, *out);
        }
    }
}

/// Merges the block into the running `(max, sum)`, and replaces the block's maxima and sums by the two factors.
#[inline(always)]
pub(crate) fn merge_block_state<S: Simd>(s: S, padded: usize, state: SoftmaxState<'_>) {
    let hidden = s.splat(f32::NEG_INFINITY);
    for row in (0..padded).step_by(LANES) {
        // SAFETY: `row + 16 ≤ padded`, and `softmax` and `merge_state` assert that all four slices are at least so long.
        unsafe {
            let (old_max, old_sum) = (s.load(state.max.as_ptr().add(row)), s.load(state.sum.as_ptr().add(row)));
            let (max, sum) =
                (s.load(state.rescale_prev.as_ptr().add(row)), s.load(state.rescale_block.as_ptr().add(row)));
            let new_max = s.max(max, old_max);
            let reference = s.select_eq(new_max, hidden, s.splat(0.0), new_max);
            let rescale_prev = exp(s, s.sub(old_max, reference));
            let rescale_block = exp(s, s.sub(max, reference));
            s.store(state.max.as_mut_ptr().add(row), new_max);
            s.store(state.sum.as_mut_ptr().add(row), s.fma(sum, rescale_block, s.mul(old_sum, rescale_prev)));
            s.store(state.rescale_prev.as_mut_ptr().add(row), rescale_prev);
            s.store(state.rescale_block.as_mut_ptr().add(row), rescale_block);
        }
    }
}
