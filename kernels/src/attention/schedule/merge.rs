//! Merges: of softmax states, one accumulated over later keys into one accumulated over earlier keys, and of results over
//! different keys.

use crate::attention::steps::softmax_merge::{self, SoftmaxState};
use crate::elementary::{exp, ln};
use crate::matmul::pack::NonFinite;
use crate::simd::isa::Isa;
use crate::simd::{LANES, Simd};
use crate::tensor::view::View;
use crate::tensor::view_mut::ViewMut;

/// Merges rows accumulated over later keys into rows accumulated over earlier ones: maxima, sums, and outputs of `dim`
/// elements each, not normalised. With one block of later keys the result is bit for bit that of the fused loop.
///
/// # Panics
/// If the lengths do not fit together.
pub fn merge_states(isa: Isa, dim: usize, earlier: [&mut [f32]; 3], later: [&[f32]; 3]) {
    dispatch!(isa, |s| merge_rows(s, dim, earlier, later));
}

/// Merges rows, as [`merge_states`] does.
fn merge_rows<S: Simd>(
    s: S,
    dim: usize,
    [max, sum, out]: [&mut [f32]; 3],
    [later_max, later_sum, later_out]: [&[f32]; 3],
) {
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
        let (mut rescale_prev, mut rescale_block) = (lanes(later_max, f32::NEG_INFINITY), lanes(later_sum, 0.0));
        let values = here.start * dim..here.end * dim;
        let state = SoftmaxState {
            max: &mut m,
            sum: &mut l,
            rescale_prev: &mut rescale_prev,
            rescale_block: &mut rescale_block,
        };
        softmax_merge::merge_state(s, state);
        let (earlier, later) = (&mut out[values.clone()], &later_out[values]);
        let any_nan = earlier.iter().chain(later).any(|x| x.is_nan());
        let nonfinite = if any_nan { NonFinite::Handled } else { NonFinite::Ignored };
        softmax_merge::merge_outputs(s, [&rescale_prev, &rescale_block], earlier, later, dim, nonfinite);
        max[here.clone()].copy_from_slice(&m[..here.len()]);
        sum[here.clone()].copy_from_slice(&l[..here.len()]);
    }
}

/// Merges outputs over other keys into outputs, `[batch, heads, rows, dim]`, by their log-sum-exps, `[batch, heads, rows, 1]`, or
/// `[.., 2]` with their rounding errors. A side with a log-sum-exp of −∞ counts for nothing, whatever its output holds.
///
/// # Panics
/// If the shapes do not fit together.
pub fn merge_results(isa: Isa, mine: [ViewMut<'_>; 2], others: [View<'_>; 2]) {
    let [out, lse] = mine.each_ref().map(ViewMut::shape);
    let ([b, h, l, _], [.., columns]) = (out, lse);
    let fits = lse == [b, h, l, columns] && matches!(columns, 1 | 2);
    assert!(others.map(|x| x.shape()) == [out, lse] && fits, "results of different shapes");
    dispatch!(isa, |s| s.vectorize(
        #[inline(always)]
        || merge_all(s, mine, others)
    ));
}

#[inline(always)]
fn merge_all<S: Simd>(s: S, [mut out, mut lse]: [ViewMut<'_>; 2], [other_out, other_lse]: [View<'_>; 2]) {
    let [batch, heads, rows, dim] = out.shape();
    for (b, h, l) in (0..batch).flat_map(|b| (0..heads).flat_map(move |h| (0..rows).map(move |l| (b, h, l)))) {
        let at = |column| [b, h, l, column];
        // Without a second column, nothing is left.
        let mine = [0, 1].map(|column| lse.get_mut(at(column)).map_or(0.0, |x| *x));
        let weights = Weights::of(mine, [0, 1].map(|column| other_lse.get(at(column)).copied().unwrap_or(0.0)));
        for (column, x) in weights.lse.into_iter().enumerate() {
            lse.get_mut(at(column)).into_iter().for_each(|to| *to = x);
        }
        if let (Some(out), Some(other)) = (out.contiguous_row_mut([b, h, l]), other_out.contiguous_row([b, h, l])) {
            // While the next row waits for an exponential and a logarithm, memory is busy with the row after it.
            for i in (2 * dim..3 * dim).step_by(LANES) {
                s.prefetch(out.as_ptr().wrapping_add(i));
                s.prefetch(other.as_ptr().wrapping_add(i));
            }
            weights.merge(out, other);
            continue;
        }
        for at in (0..dim).map(|d| [b, h, l, d]) {
            if let (Some(x), Some(y)) = (out.get_mut(at), other_out.get(at)) {
                weights.merge(core::slice::from_mut(x), core::slice::from_ref(y));
            }
        }
    }
}

/// Weights of two rows over different keys, and what comes of their log-sum-exps.
struct Weights {
    /// Log-sum-exp over the keys of both, and its rounding error.
    lse: [f32; 2],
    kind: Merge,
}

/// Sides that count in a merge.
#[derive(Clone, Copy)]
enum Merge {
    /// Neither: the result is 0.
    Neither,
    /// The row merged into.
    Mine,
    /// The other row.
    Other,
    /// Both, with these weights; their sum is 1.
    Both([f64; 2]),
}

impl Weights {
    /// Computes the weights of rows with these log-sum-exps, each with its rounding error, or 0.
    #[inline(always)]
    fn of(mine: [f32; 2], other: [f32; 2]) -> Self {
        let hidden = f32::NEG_INFINITY;
        match (mine[0] == hidden, other[0] == hidden) {
            (true, true) => Self { lse: [hidden, 0.0], kind: Merge::Neither },
            (false, true) => Self { lse: mine, kind: Merge::Mine },
            (true, false) => Self { lse: other, kind: Merge::Other },
            (false, false) => {
                let [mine, other] = [mine, other].map(|lse| lse.map(f64::from));
                // Numbers far from 0 are subtracted first.
                let ahead = (other[0] - mine[0]) + (other[1] - mine[1]);
                let top = if ahead > 0.0 { other } else { mine };
                // The larger has weight exp(0) = 1; NaN where it is infinite or NaN.
                let one = if top[0].is_finite() { 1.0 } else { f64::NAN };
                let weights = if ahead > 0.0 { [exp(-ahead), one] } else { [one, exp(ahead)] };
                let sum = weights[0] + weights[1];
                let more = top[1] + ln(sum);
                let lse = (top[0] + more) as f32;
                let rest = (top[0] - f64::from(lse)) + more;
                let lse = [lse, if lse.is_finite() { rest as f32 } else { 0.0 }];
                Self { lse, kind: Merge::Both(weights.map(|weight| weight / sum)) }
            }
        }
    }

    /// Merges some elements of the rows.
    #[inline(always)]
    fn merge(&self, out: &mut [f32], other: &[f32]) {
        match self.kind {
            Merge::Neither => out.fill(0.0),
            Merge::Mine => {}
            Merge::Other => out.copy_from_slice(other),
            Merge::Both([mine, others]) => {
                for (x, &y) in out.iter_mut().zip(other) {
                    *x = (f64::from(*x) * mine + f64::from(y) * others) as f32;
                }
            }
        }
    }
}
