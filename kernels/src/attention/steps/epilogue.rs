//! The end of a row: sink, normalisation, log-sum-exp. Tiles of values end rows themselves where they can (`pv.rs`), by what is
//! here.

use crate::attention::steps::infinite::infinities;
use crate::attention::tiling::MAX_ROW_BLOCK;
use crate::matmul::pack::NonFinite;
use crate::simd::{LANES, QUIET_NAN, Simd, quiet};
use crate::tensor::element::Element;
use core::cell::Cell;
use core::ops::Range;

/// What the last step needs to know of one row.
#[derive(Clone, Copy)]
pub(crate) struct RowEnd {
    /// KeyOperand of the accumulated output: 1 / Σ exp, in two parts so that the product is rounded about once.
    pub(crate) factor: (f32, f32),
    /// The maximum and the sum, sink included.
    top: f64,
    sum: f64,
}

/// Rows of a group that end with the block at hand: nothing is added to them after it.
pub(crate) struct RowBlockEnds {
    /// Of each row of the group: see [`RowEnd`].
    pub(crate) factors: [(f32, f32); MAX_ROW_BLOCK],
    /// Where it goes: contiguous floats.
    pub(crate) rows: [*mut f32; MAX_ROW_BLOCK],
    /// Zeros, if all that has ended so far is finite.
    finite: Cell<[f32; LANES]>,
}

/// The same, for tiles to end them: columns `first..past` of rows.
#[derive(Clone, Copy)]
pub(crate) struct ColumnEnds<'a> {
    pub(crate) factors: &'a [(f32, f32)],
    pub(crate) rows: &'a [*mut f32],
    pub(crate) first: usize,
    pub(crate) past: usize,
    pub(crate) finite: &'a Cell<[f32; LANES]>,
}

impl ColumnEnds<'_> {
    /// How many columns.
    #[inline(always)]
    pub(crate) fn columns(self) -> usize {
        self.past.saturating_sub(self.first)
    }
}

impl RowBlockEnds {
    /// Of nothing.
    #[inline(always)]
    pub(crate) const fn none() -> Self {
        Self {
            factors: [(0.0, 0.0); MAX_ROW_BLOCK],
            rows: [core::ptr::null_mut(); MAX_ROW_BLOCK],
            finite: Cell::new([0.0; LANES]),
        }
    }

    /// Of these columns.
    pub(crate) fn of(&self, columns: Range<usize>) -> ColumnEnds<'_> {
        let Range { start: first, end: past } = columns;
        ColumnEnds { factors: &self.factors, rows: &self.rows, first, past, finite: &self.finite }
    }

    /// True if all that has ended is finite.
    pub(crate) fn is_finite(&self) -> bool {
        self.finite.get().iter().all(|&x| x == 0.0)
    }
}

impl RowEnd {
    /// A row that sees nothing. What it has accumulated is zeros.
    pub(crate) const EMPTY: Self = Self { factor: (0.0, 0.0), top: f64::NEG_INFINITY, sum: 0.0 };

    /// Closes a row with this maximum and sum. A sink is one more key, with value zero.
    pub(crate) fn new(max: f32, sum: f32, sink: Option<f32>) -> Self {
        let accumulated = sum;
        let (mut top, mut sum, mut own) = (max as f64, sum as f64, 1.0);
        if let Some(sink) = sink.map(f64::from) {
            let old = top;
            top = if sink > old || sink.is_nan() { sink } else { old };
            if top != f64::NEG_INFINITY {
                own = (old - top).exp();
                sum = sum * own + (sink - top).exp();
            }
        }
        // Nothing visible, and so nothing accumulated: zeros, whatever the sink is. A NaN sum is not nothing.
        if accumulated == 0.0 {
            return Self { top, sum, ..Self::EMPTY };
        }
        let factor = own / sum;
        // Of a sink, beside what is finite otherwise.
        if factor.is_nan() {
            return Self { factor: (QUIET_NAN, QUIET_NAN), top, sum };
        }
        let high = factor as f32;
        Self { factor: (high, (factor - high as f64) as f32), top, sum }
    }

    /// ln Σ exp(score), −∞ if nothing was visible.
    pub(crate) fn lse(&self) -> f32 {
        quiet((self.top + self.sum.ln()) as f32)
    }
}

/// A group of rows to be written out.
pub(crate) struct Finish<'a> {
    /// Running outputs, rows `stride` apart.
    pub(crate) accumulated: &'a [f32],
    pub(crate) stride: usize,
    pub(crate) ends: &'a [RowEnd],
    /// Rows are written as `cols` elements, `element` apart.
    pub(crate) cols: usize,
    pub(crate) element: isize,
    /// Whether what was accumulated may be other than finite and has to end well nevertheless.
    pub(crate) nonfinite: NonFinite,
}

/// `found`, or NaN if x is not finite: x·0 is 0 if it is, and NaN if not, and a NaN stays.
#[inline(always)]
pub(crate) fn if_finite<S: Simd>(s: S, x: S::V, found: S::V) -> S::V {
    s.fma(x, s.splat(0.0), found)
}

/// What was accumulated, times its row's factor. A zero is positive.
#[inline(always)]
pub(crate) fn normalised<S: Simd>(s: S, x: S::V, [high, low]: [S::V; 2]) -> S::V {
    s.add(s.fma(x, high, s.mul(x, low)), s.splat(0.0))
}

/// Writes the rows: what was accumulated times its factor. Zeros are written positive and NaNs as the one quiet NaN, so
/// that neither the sign of nothing nor a payload depends on what was hidden beside it. True if all that was accumulated is
/// finite; if it is not, what was written is worth nothing unless it was written with nonfinite.
///
/// # Safety
/// `out` says where each row goes; every pointer in it is writable for `cols` elements, `element` apart.
#[inline(always)]
pub(crate) unsafe fn finish<S: Simd, T: Element>(s: S, a: Finish<'_>, out: &[*mut T]) -> bool {
    let width = a.cols.next_multiple_of(LANES);
    assert!(a.ends.len() == out.len() && a.stride >= width && a.accumulated.len() >= out.len() * a.stride);
    let (zero, nan) = (s.splat(0.0), s.splat(QUIET_NAN));
    let mut finite = zero;
    let whole = a.element == 1 && a.cols >= LANES;
    for (r, (end, &out)) in a.ends.iter().zip(out).enumerate() {
        let (high, low) = (s.splat(end.factor.0), s.splat(end.factor.1));
        let mut row = zero;
        let mut i = 0;
        while i < a.cols {
            // SAFETY: `i + 16 ≤ width ≤ stride`, and `accumulated` has a stride for every row.
            let mut x = unsafe { s.load(a.accumulated.as_ptr().add(r * a.stride + i)) };
            if a.nonfinite == NonFinite::Handled {
                x = infinities(s, x);
            }
            row = if_finite(s, x, row);
            let mut y = normalised(s, x, [high, low]);
            if a.nonfinite == NonFinite::Handled {
                // ∞ times the low part may be NaN where ∞ times the whole is ∞: then the high part alone is the answer.
                let coarse = s.mul(x, high);
                y = s.select_eq(y, y, y, s.select_eq(coarse, coarse, s.add(coarse, zero), nan));
            }
            if whole {
                // SAFETY: 16 contiguous elements inside the row.
                unsafe { T::store(s, out.add(i), y) };
            } else {
                let mut lanes = [T::narrow(0.0); LANES];
                // SAFETY: `lanes` is 16 elements.
                unsafe { T::store(s, lanes.as_mut_ptr(), y) };
                for (n, &lane) in lanes[..LANES.min(a.cols - i)].iter().enumerate() {
                    // SAFETY: `i + n < cols`.
                    unsafe { *out.offset((i + n) as isize * a.element) = lane };
                }
            }
            i += LANES;
            // The last vector of contiguous elements ends with the row: some of it is written twice, alike.
            if whole && i < a.cols {
                i = i.min(a.cols - LANES);
            }
        }
        // One chain for all rows would be waited for.
        finite = s.add(finite, row);
    }
    s.reduce_sum(finite) == 0.0
}
