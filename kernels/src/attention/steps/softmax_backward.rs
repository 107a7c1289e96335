//! Backward pass over a block of scores: weights from the saved log-sum-exp, and the gradients of the scores from those
//! of the weights.
//!
//! ```text
//! p  = exp(s − lse)               0 where hidden; exp((s − reference) − rest) where lse = reference + rest is far from 0
//! ds = p · (dp − δ)               δ = Σ do·o − dlse, one number a row
//! ```
//! (Dao, Fu, Ermon, Rudra and Ré 2022, arXiv:2205.14135, appendix B.)
//!
//! Where the block holds all the weight of a row, Σ p = 1 and Σ ds = dlse. What Σ ds differs by is then rounding: δ comes from
//! the saved output, dp from the values. It is taken out, p times the difference from each ds: otherwise it would be all that is
//! left of a row that sees one key, and much of one that sees a few. In a block that holds a part of the weight, Σ ds is off by more
//! than rounding; where it is not, by chance or because the part is next to nothing, what is taken out is no more than rounding.

use crate::attention::scratch::SCORE_STRIDE;
use crate::attention::steps::key_sums::all_keys;
use crate::attention::steps::score_passes::ScoreBlock;
use crate::simd::exp::exp;
use crate::simd::{LANES, Simd, lanes};

/// Saved results of a row.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct SavedRow {
    /// Number that scores are counted from: the saved log-sum-exp of a row that [is far](is_far) from 0, otherwise 0.
    pub(crate) reference: f32,
    /// Log-sum-exp of the scores that are counted from it.
    pub(crate) lse: f32,
    /// Gradient of the log-sum-exp.
    pub(crate) d_lse: f32,
    pub(crate) delta: Delta,
}

/// Log-sum-exps from which on their rounding to `f32`, half a unit, is more than 2⁻¹⁷, and so is the relative error of weights that
/// are computed from them alone.
const FAR: f32 = 256.0;

/// Returns true if the rounding of a row's log-sum-exp would show in weights: they need what it leaves, too.
#[inline]
pub(crate) fn is_far(lse: f32) -> bool {
    (FAR..f32::INFINITY).contains(&lse.abs())
}

/// δ of a row.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Delta {
    /// Σ do·o − dlse.
    pub(crate) value: f32,
    /// Bound of what rounding makes of the difference between δ and Σ p·dp − dlse; 0 if it is not finite.
    pub(crate) rounding: f32,
}

/// Bound of the rounding of a dot product, as a share of the sum of its products' absolute values. The usual error of 64 to 256
/// products is one to four epsilons.
const ROUNDING: f32 = 16.0 * f32::EPSILON;

impl Delta {
    /// Creates a row's δ from the products do·o and the gradient of its log-sum-exp.
    pub(crate) fn new(products: RowDot, d_lse: f32) -> Self {
        let rounding = (products.absolute_sum + d_lse.abs()) * ROUNDING;
        let rounding = if rounding < f32::INFINITY { rounding } else { 0.0 };
        Self { value: products.sum - d_lse, rounding }
    }
}

/// Counts the scores of rows that are far from 0 from their references. Those near their reference stay exact: the difference of
/// numbers within a factor of two is.
pub(crate) fn subtract_references<S: Simd>(s: S, row_block: ScoreBlock<'_>, saved: &[SavedRow]) {
    if saved[..row_block.rows].iter().all(|row| row.reference == 0.0) {
        return;
    }
    row_block.replace(
        s,
        #[inline(always)]
        |row, _, scores| s.sub(scores, s.splat(saved[row].reference)),
    );
}

/// Turns final scores, counted from their references, into weights, and gradients of weights, `[row][SCORE_STRIDE]`, into
/// gradients of scores. Both are 0 where hidden, and in whole panels from the first to the last key that some row sees. What rounding leaves of the sum of a row's
/// gradients is taken out of them, where the block holds all the row's weight.
pub(crate) fn softmax_backward<S: Simd>(
    s: S,
    mut row_block: ScoreBlock<'_>,
    gradients: &mut [f32],
    saved: &[SavedRow],
) {
    s.vectorize(
        #[inline(always)]
        move || {
            assert!(saved.len() >= row_block.rows && gradients.len() >= row_block.rows * SCORE_STRIDE);
            let (zero, hidden) = (s.splat(0.0), s.splat(f32::NEG_INFINITY));
            let keys = all_keys(row_block.spans);
            let all = keys.start / LANES..keys.end.div_ceil(LANES);
            let gradients = gradients.as_mut_ptr();
            row_block.for_each_row(
                #[inline(always)]
                |row, panels, scores| {
                    let SavedRow { lse, d_lse, delta, .. } = saved[row];
                    let (lse, value) = (s.splat(lse), s.splat(delta.value));
                    // SAFETY: `gradients` has a stride for every row, as asserted; panels lie inside a row's stride.
                    let at = |panel: usize| unsafe {
                        (scores.add(panel * LANES), gradients.add(row * SCORE_STRIDE + panel * LANES))
                    };
                    let outside = (all.start..panels.start.min(all.end)).chain(panels.end.max(all.start)..all.end);
                    for (score, gradient) in outside.map(at) {
                        // SAFETY: a panel of the row, in both blocks.
                        unsafe {
                            s.store(score, zero);
                            s.store(gradient, zero);
                        }
                    }
                    let mut sum = zero;
                    for (score_at, gradient_at) in panels.clone().map(at) {
                        // SAFETY: a panel of the row, in both blocks.
                        unsafe {
                            let score = s.load(score_at);
                            let weight = s.select_eq(score, hidden, zero, exp(s, s.sub(score, lse)));
                            let gradient = s.mul(weight, s.sub(s.load(gradient_at), value));
                            let gradient = s.select_eq(score, hidden, zero, gradient);
                            sum = s.add(sum, gradient);
                            s.store(score_at, weight);
                            s.store(gradient_at, gradient);
                        }
                    }
                    let error = s.reduce_sum(sum) - d_lse;
                    if error.abs() < delta.rounding {
                        for (weight, gradient) in panels.map(at) {
                            // SAFETY: a panel of the row, in both blocks.
                            unsafe {
                                let less = s.mul(s.load(weight), s.splat(error));
                                s.store(gradient, s.sub(s.load(gradient), less));
                            }
                        }
                    }
                },
            );
        },
    )
}

/// Multiplies gradients of capped scores by the derivatives of the softcap. What is 0 stays 0.
pub(crate) fn softcap_backward<S: Simd>(s: S, gradients: ScoreBlock<'_>, derivatives: &[f32]) {
    let derivatives = derivatives.as_chunks::<SCORE_STRIDE>().0;
    gradients.replace(
        s,
        #[inline(always)]
        move |row, panel, gradient| {
            let (zero, derivative) = (s.splat(0.0), lanes::load(s, &derivatives[row].as_chunks().0[panel]));
            s.select_eq(gradient, zero, zero, s.mul(gradient, derivative))
        },
    );
}

/// Products of the elements of two rows.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct RowDot {
    pub(crate) sum: f32,
    pub(crate) absolute_sum: f32,
}

/// Computes the dot product of each row of `a` with the row of `b`, in sixteen lanes, then by one tree.
///
/// # Safety
/// Each row is readable for `16 · vecs` floats.
pub(crate) unsafe fn row_dots<S: Simd>(s: S, [a, b]: [&[*const f32]; 2], vecs: usize, dots: &mut [RowDot]) {
    s.vectorize(
        #[inline(always)]
        move || {
            for ((&a, &b), dot) in a.iter().zip(b).zip(dots) {
                let (zero, mut sum, mut absolute_sum) = (s.splat(0.0), s.splat(0.0), s.splat(0.0));
                for i in (0..vecs).map(|vec| vec * LANES) {
                    // SAFETY: the caller guarantees `16 · vecs` floats of both rows.
                    let (a, b) = unsafe { (s.load(a.add(i)), s.load(b.add(i))) };
                    let product = s.mul(a, b);
                    sum = s.fma(a, b, sum);
                    absolute_sum = s.add(absolute_sum, s.max(product, s.sub(zero, product)));
                }
                *dot = RowDot { sum: s.reduce_sum(sum), absolute_sum: s.reduce_sum(absolute_sum) };
            }
        },
    )
}
