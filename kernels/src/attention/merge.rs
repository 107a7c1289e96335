//! Merge of softmax states: a state accumulated over later keys into one accumulated over earlier keys.

use crate::attention::steps::by_isa::Steps;
use crate::attention::steps::softmax::SoftmaxState;
use crate::simd::LANES;
use crate::simd::isa::Isa;

/// Merges rows accumulated over later keys into rows accumulated over earlier ones: maxima, sums, and outputs of `dim`
/// elements each, not normalised. With one block of later keys the result is bit for bit that of the fused loop.
///
/// # Panics
/// If the lengths do not fit together.
pub fn merge_states(isa: Isa, dim: usize, earlier: [&mut [f32]; 3], later: [&[f32]; 3]) {
    struct Merge<'a>(usize, [&'a mut [f32]; 3], [&'a [f32]; 3]);
    impl Merge<'_> {
        fn run<S: Steps>(self, s: S) {
            let Self(dim, [max, sum, out], [later_max, later_sum, later_out]) = self;
            let rows = max.len();
            assert!([sum.len(), later_max.len(), later_sum.len()] == [rows; 3]);
            assert!(dim > 0 && rows.checked_mul(dim) == Some(out.len()) && later_out.len() == out.len());
            // Sixteen rows at a time, on the stack.
            for first in (0..rows).step_by(LANES) {
                let here = first..rows.min(first + LANES);
                let lanes = |from: &[f32], fill: f32| {
                    let mut lanes = [fill; LANES];
                    lanes[..here.len()].copy_from_slice(&from[here.clone()]);
                    lanes
                };
                let (mut m, mut l) = (lanes(max, f32::NEG_INFINITY), lanes(sum, 0.0));
                let (mut rescale_prev, mut rescale_block) =
                    (lanes(later_max, f32::NEG_INFINITY), lanes(later_sum, 0.0));
                let values = here.start * dim..here.end * dim;
                let state = SoftmaxState {
                    max: &mut m,
                    sum: &mut l,
                    rescale_prev: &mut rescale_prev,
                    rescale_block: &mut rescale_block,
                };
                let (earlier, later) = (&mut out[values.clone()], &later_out[values]);
                if earlier.iter().chain(later).any(|x| x.is_nan()) {
                    s.merge(state, &mut [], &[], dim);
                    s.merge_marked([&rescale_prev, &rescale_block], earlier, later, dim);
                } else {
                    s.merge(state, earlier, later, dim);
                }
                max[here.clone()].copy_from_slice(&m[..here.len()]);
                sum[here.clone()].copy_from_slice(&l[..here.len()]);
            }
        }
    }
    dispatch!(isa, |s| Merge(dim, earlier, later).run(s));
}
