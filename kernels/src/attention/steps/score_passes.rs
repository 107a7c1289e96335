//! Passes over a block of scores before the softmax: softcap, bias, ALiBi; `mask_passes.rs` has those that hide keys. Each is a
//! separate pass over the block, in second-level cache, so that options do not multiply the number of kernels; a pass is made
//! only if its option is set.

use crate::attention::scratch::SCORE_STRIDE;
use crate::attention::steps::span::Spans;
use crate::matmul::pack::NonFinite;
use crate::simd::exp::{exp, exp_m1};
use crate::simd::{LANES, Simd, lanes};
use crate::tensor::any::{Typed, size_of_val_of};
use crate::tensor::element::{Bf16, Element, F16};
use crate::tensor::rows::KEY_BLOCK;

/// Row of a bias or mask, by the keys of a block.
#[derive(Clone, Copy)]
pub(crate) struct Columns<T> {
    /// Column of key `before`.
    pub(crate) first: *const T,
    pub(crate) element: isize,
    /// Number of the block's first keys that have no column, and stay as they are.
    pub(crate) before: usize,
    /// Number of keys up to the last column; keys beyond are hidden.
    pub(crate) len: usize,
    /// Numbers of the keys from `before` on, where columns are as far apart as these; null where they follow one another.
    pub(crate) numbers: *const u32,
}

impl<T: Copy> Columns<T> {
    pub(crate) const NONE: Self =
        Self { first: core::ptr::null(), element: 0, before: 0, len: 0, numbers: core::ptr::null() };

    /// Returns true if the columns lie side by side.
    #[inline(always)]
    pub(crate) fn are_contiguous(&self) -> bool {
        self.element == 1 && self.numbers.is_null()
    }

    /// Returns the column of key `j`.
    ///
    /// # Safety
    /// The row is readable and `before <= j < len`.
    #[inline(always)]
    pub(crate) unsafe fn get(&self, j: usize) -> T {
        debug_assert!((self.before..self.len).contains(&j), "key {j} of {}..{}", self.before, self.len);
        let j = j - self.before;
        // SAFETY: the caller guarantees a readable row and a key with a column, and so with a number if there are numbers.
        unsafe {
            let column = if self.numbers.is_null() { j } else { (*self.numbers.add(j) - *self.numbers) as usize };
            *self.first.offset(column as isize * self.element)
        }
    }

    /// Calls `f(panel, its sixteen columns)` for each panel: the columns in place if they are contiguous and complete,
    /// otherwise a copy, filled up with `none` for keys that stay as they are and with `fill` for those beyond the last. Panels
    /// of keys that stay as they are, are left out.
    ///
    /// # Safety
    /// The row is readable.
    #[inline(always)]
    pub(crate) unsafe fn for_each_panel(
        &self,
        panels: core::ops::Range<usize>,
        none: T,
        fill: T,
        mut f: impl FnMut(usize, *const T),
    ) {
        let there = if self.are_contiguous() { self.len / LANES } else { 0 };
        let start = (self.before / LANES).clamp(panels.start, panels.end);
        let first = self.before.div_ceil(LANES).clamp(start, panels.end);
        let split = there.clamp(first, panels.end);
        for panel in first..split {
            // SAFETY: sixteen contiguous columns of the row.
            f(panel, unsafe { self.first.add(panel * LANES - self.before) });
        }
        for panel in (start..first).chain(split..panels.end) {
            let mut lanes = [fill; LANES];
            let first = panel * LANES;
            for (i, lane) in lanes.iter_mut().enumerate().take(self.len.saturating_sub(first)) {
                // SAFETY: `before <= first + i < len`.
                *lane = if first + i < self.before { none } else { unsafe { self.get(first + i) } };
            }
            f(panel, lanes.as_ptr());
        }
    }
}

/// Bias rows of a row block, of elements of any type.
pub(crate) type AnyColumns<'a> = Typed<&'a [Columns<f32>], &'a [Columns<Bf16>], &'a [Columns<F16>]>;

impl AnyColumns<'_> {
    /// Returns the number of rows.
    pub(crate) fn len(&self) -> usize {
        by_type!(Typed, self, |rows| rows.len())
    }

    /// Returns the address of a row's first panel, if its columns are contiguous, and the bytes of a panel. The address wraps where
    /// the first keys have no columns.
    #[inline(always)]
    pub(crate) fn panels(&self, row: usize) -> (*const u8, usize) {
        by_type!(Typed, self, |rows| {
            let first = rows[row].first.wrapping_sub(rows[row].before);
            (first.cast(), LANES * size_of_val_of(first))
        })
    }
}

/// Scores of a row block against one key block.
pub(crate) struct ScoreBlock<'a> {
    /// Scores, `[row][SCORE_STRIDE]`.
    pub(crate) scores: &'a mut [f32],
    pub(crate) spans: &'a Spans,
    pub(crate) rows: usize,
}

impl ScoreBlock<'_> {
    /// Calls `f(row, panels, scores of the row)` for each row.
    #[inline(always)]
    pub(crate) fn for_each_row(&mut self, mut f: impl FnMut(usize, core::ops::Range<usize>, *mut f32)) {
        assert!(self.spans.are_of(self.rows) && self.scores.len() >= self.rows * SCORE_STRIDE);
        let mut first = 0;
        for span in self.spans.iter() {
            let end = self.rows.min(first + self.spans.tile_rows());
            for row in first..end {
                // SAFETY: `row < rows`, and `scores` has a stride for every row, as asserted above.
                let scores = unsafe { self.scores.as_mut_ptr().add(row * SCORE_STRIDE) };
                f(row, span.first_panel()..span.end_panel(), scores);
            }
            first = end;
        }
    }

    /// Replaces the scores of each panel of each row by `f(row, panel, scores)`.
    #[inline(always)]
    pub(crate) fn replace<S: Simd>(mut self, s: S, mut f: impl FnMut(usize, usize, S::V) -> S::V) {
        s.vectorize(
            #[inline(always)]
            move || {
                self.for_each_row(
                    #[inline(always)]
                    |row, panels, scores| {
                        for panel in panels {
                            // SAFETY: spans end inside a block, and a row of scores holds one.
                            unsafe {
                                let at = scores.add(panel * LANES);
                                s.store(at, f(row, panel, s.load(at)));
                            }
                        }
                    },
                );
            },
        );
    }
}

/// Limit of |x| up to which tanh is computed as an odd polynomial; beyond, as (1 − e)/(1 + e) with e = exp(−2|x|).
const TANH_SMALL: f32 = 0.625;
/// Coefficients of x³, x⁵ … x¹¹ of tanh on ±0.625 (Moshier's Cephes, `tanhf`; error below 1 ULP).
const TANH: [f32; 5] = [-0.333_332_8, 0.133_314_42, -0.053_739_715, 0.020_639_09, -0.005_704_988_7];

/// Returns tanh x, up to [`TANH_SMALL`].
#[inline(always)]
fn tanh_small<S: Simd>(s: S, x: S::V) -> S::V {
    let z = s.mul(x, x);
    let mut p = s.splat(TANH[4]);
    for k in [TANH[3], TANH[2], TANH[1], TANH[0]] {
        p = s.fma(p, z, s.splat(k));
    }
    s.fma(s.mul(p, z), x, x)
}

/// Multiplies the scores, or weights, of each key by its scale and a factor. A negative scale is that of a row with NaN: what is not
/// handled is NaN then.
pub(crate) fn scale_columns<S: Simd>(
    s: S,
    row_block: ScoreBlock<'_>,
    scales: &[f32],
    factor: f32,
    nonfinite: NonFinite,
) {
    let scales = scales.as_chunks::<LANES>().0;
    row_block.replace(
        s,
        #[inline(always)]
        |_, panel, scores| {
            // SAFETY: an array of sixteen lanes.
            let scale = s.mul(unsafe { s.load(scales[panel].as_ptr()) }, s.splat(factor));
            let size = s.max(scale, s.sub(s.splat(0.0), scale));
            s.mul(
                scores,
                match nonfinite {
                    NonFinite::Handled => size,
                    NonFinite::Ignored => s.select_eq(scale, size, scale, s.splat(f32::NAN)),
                },
            )
        },
    );
}

/// Replaces each score by `c·tanh(score / c)`, and writes `derivatives`, `[row][SCORE_STRIDE]`, if they are wanted.
///
/// The derivative at x = score / c is 1 − tanh² x. Where tanh is near 1 that cancels, but 4u / (1 + u)² with u = exp(−2|x|) does
/// not.
pub(crate) fn softcap<S: Simd>(s: S, mut row_block: ScoreBlock<'_>, cap: f32, mut derivatives: Option<&mut [f32]>) {
    s.vectorize(
        #[inline(always)]
        move || {
            let (c, over) = (s.splat(cap), s.splat(1.0 / cap));
            let (zero, one) = (s.splat(0.0), s.splat(1.0));
            let small = s.splat(TANH_SMALL);
            let size = |x: S::V| s.max(x, s.sub(zero, x));
            row_block.for_each_row(
                #[inline(always)]
                |row, panels, scores| {
                    // SAFETY: panels lie inside the row.
                    let at = |panel: usize| unsafe { scores.add(panel * LANES) };
                    let mut derivatives =
                        derivatives.as_mut().map(|derivatives| &mut derivatives.as_chunks_mut::<SCORE_STRIDE>().0[row]);
                    // Scores are usually far below the cap: one test per row finds out if the long form is needed. If it is,
                    // each lane still takes the form for its own size, so the bits do not depend on the test.
                    let mut widest = zero;
                    for panel in panels.clone() {
                        // SAFETY: a panel of the row.
                        widest = s.max(size(s.mul(unsafe { s.load(at(panel)) }, over)), widest);
                    }
                    let long = s.reduce_max(widest) > TANH_SMALL;
                    for panel in panels {
                        // SAFETY: a panel of the row.
                        let x = s.mul(unsafe { s.load(at(panel)) }, over);
                        let mut y = tanh_small(s, x);
                        if long {
                            let e = exp_m1(s, s.mul(size(x), s.splat(-2.0)));
                            let tanh = s.div(s.sub(zero, e), s.add(e, s.splat(2.0)));
                            let signed = s.select_eq(x, size(x), tanh, s.sub(zero, tanh));
                            y = s.select_eq(s.max(size(x), small), small, y, signed);
                        }
                        // SAFETY: a panel of the row.
                        unsafe { s.store(at(panel), s.mul(y, c)) };
                        if let Some(derivatives) = &mut derivatives {
                            let mut derivative = s.sub(one, s.mul(y, y));
                            if long {
                                let u = exp(s, s.mul(size(x), s.splat(-2.0)));
                                let more = s.add(one, u);
                                let far = s.div(s.mul(s.splat(4.0), u), s.mul(more, more));
                                derivative = s.select_eq(s.max(size(x), small), small, derivative, far);
                            }
                            lanes::store(s, &mut derivatives.as_chunks_mut().0[panel], derivative);
                        }
                    }
                },
            );
        },
    )
}

/// Adds a bias, widened as it is read; −∞ hides whatever the score was.
///
/// # Safety
/// Every row's columns are readable.
pub(crate) unsafe fn bias<S: Simd>(s: S, row_block: ScoreBlock<'_>, rows: AnyColumns<'_>) {
    s.vectorize(
        #[inline(always)]
        // SAFETY: same contract.
        move || by_type!(Typed, rows, |rows| unsafe { bias_of(s, row_block, rows) }),
    )
}

/// Adds a bias of one type, as [`bias`] does.
///
/// # Safety
/// Same contract as [`bias`].
#[inline(always)]
unsafe fn bias_of<S: Simd, T: Element>(s: S, mut row_block: ScoreBlock<'_>, rows: &[Columns<T>]) {
    assert!(rows.len() >= row_block.rows);
    let hidden = s.splat(f32::NEG_INFINITY);
    row_block.for_each_row(
        #[inline(always)]
        |row, panels, scores| {
            let add = |panel: usize, bias: *const T| {
                // SAFETY: a panel of the row's scores, and sixteen elements.
                unsafe {
                    let (at, bias) = (scores.add(panel * LANES), T::load(s, bias));
                    s.store(at, s.select_eq(bias, hidden, hidden, s.add(s.load(at), bias)));
                }
            };
            // SAFETY: the caller guarantees that every row's columns are readable.
            unsafe { rows[row].for_each_panel(panels, T::narrow(-0.0), T::narrow(f32::NEG_INFINITY), add) };
        },
    );
}

/// Adds −slope·|p − j|: per row the slope, and the row's position counted from the block's first key.
pub(crate) fn alibi<S: Simd>(s: S, row_block: ScoreBlock<'_>, rows: &[(f32, f32)]) {
    const LANE: [f32; LANES] = [0., 1., 2., 3., 4., 5., 6., 7., 8., 9., 10., 11., 12., 13., 14., 15.];
    assert!(rows.len() >= row_block.rows);
    row_block.replace(
        s,
        #[inline(always)]
        move |row, panel, score| {
            let (slope, position) = rows[row];
            let ahead = s.sub(s.splat(position - (panel * LANES) as f32), lanes::load(s, &LANE));
            let distance = s.max(ahead, s.sub(s.splat(0.0), ahead));
            s.fma(distance, s.splat(-slope), score)
        },
    );
}

/// Adds −slope·|p − k|, for keys at positions k of their own: per row the slope and the row's position.
pub(crate) fn alibi_at<S: Simd>(s: S, row_block: ScoreBlock<'_>, rows: &[(f32, i64)], positions: &[i32; KEY_BLOCK]) {
    assert!(rows.len() >= row_block.rows);
    let (panels, _) = positions.as_chunks::<LANES>();
    row_block.replace(
        s,
        #[inline(always)]
        move |row, panel, score| {
            let (slope, from) = rows[row];
            let distances = panels[panel].map(|key| from.saturating_sub(i64::from(key)).unsigned_abs() as f32);
            s.fma(lanes::load(s, &distances), s.splat(-slope), score)
        },
    );
}

/// Turns scores into finished weights: exp(score − reference) · factor, per row; 0 where hidden, even in a row that is
/// NaN.
pub(crate) fn weights<S: Simd>(s: S, row_block: ScoreBlock<'_>, rows: &[(f32, f32)]) {
    assert!(rows.len() >= row_block.rows);
    row_block.replace(
        s,
        #[inline(always)]
        move |row, _, score| {
            let (reference, factor) = rows[row];
            let weight = s.mul(exp(s, s.sub(score, s.splat(reference))), s.splat(factor));
            s.select_eq(score, s.splat(f32::NEG_INFINITY), s.splat(0.0), weight)
        },
    );
}

/// Adds the row block's weights to the sum of each key, row after row.
pub(crate) fn add_weight_sums<S: Simd>(s: S, mut row_block: ScoreBlock<'_>, sums: &mut [f32]) {
    s.vectorize(
        #[inline(always)]
        move || {
            let (sums, _) = sums[..KEY_BLOCK].as_chunks_mut();
            row_block.for_each_row(
                #[inline(always)]
                |_, panels, weights| {
                    for panel in panels {
                        // SAFETY: a panel of the row's weights.
                        let weights = unsafe { s.load(weights.add(panel * LANES)) };
                        let sum = s.add(lanes::load(s, &sums[panel]), weights);
                        lanes::store(s, &mut sums[panel], sum);
                    }
                },
            );
        },
    )
}
