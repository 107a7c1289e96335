//! Epilogue of a row: sink, normalisation, log-sum-exp. P·V tiles end rows themselves where they can (`pv.rs`), with
//! the functions of this file.

use crate::attention::scratch::MAX_ROW_BLOCK;
use crate::attention::steps::infinite::infinities;
use crate::elementary::{exp, ln, ln_each};
use crate::matmul::pack::NonFinite;
use crate::simd::{LANES, QUIET_NAN, Simd, Vector, quiet};
use crate::tensor::element::Element;
use core::cell::Cell;
use core::ops::Range;

/// Number of rows that are finished together: few, so that a task of few rows does not set up many.
pub(crate) const END_ROWS: usize = 16;

/// Sum of a row's exponentials over all keys, of scores less their maximum. A sink is one more key, with value zero.
#[derive(Clone, Copy)]
pub(crate) struct RowSum {
    /// Maximum of the scores, the sink included.
    top: f64,
    /// Sum of the exponentials, the sink's included.
    sum: f64,
    /// Factor that gives exponentials of scores less the maximum of the keys alone this maximum.
    own: f64,
    /// Sum of the exponentials of the keys alone.
    accumulated: f32,
}

/// Rows of a row block that end with the current key block: nothing is accumulated into them after it.
pub(crate) struct RowBlockEnds {
    /// Factor of each row: see [`RowSum::factor`].
    pub(crate) factors: [(f32, f32); MAX_ROW_BLOCK],
    /// Address that each row is written to, as contiguous floats.
    pub(crate) rows: [*mut f32; MAX_ROW_BLOCK],
    /// Zeros, if every row that has ended so far is finite.
    finite: Cell<[f32; LANES]>,
}

/// Columns `first..past` of the rows of a [`RowBlockEnds`], for P·V tiles to end.
#[derive(Clone, Copy)]
pub(crate) struct ColumnEnds<'a> {
    pub(crate) factors: &'a [(f32, f32)],
    pub(crate) rows: &'a [*mut f32],
    pub(crate) first: usize,
    pub(crate) past: usize,
    pub(crate) finite: &'a Cell<[f32; LANES]>,
}

impl ColumnEnds<'_> {
    /// Returns those of the rows from `row` on, `columns` columns further on.
    #[inline(always)]
    pub(crate) fn from(self, row: usize, columns: usize) -> Self {
        let Self { factors, rows, first, .. } = self;
        Self { factors: &factors[row..], rows: &rows[row..], first: first + columns, ..self }
    }

    /// Number of columns.
    #[inline(always)]
    pub(crate) fn columns(self) -> usize {
        self.past.saturating_sub(self.first)
    }
}

impl RowBlockEnds {
    /// Creates the ends of no rows.
    #[inline(always)]
    pub(crate) const fn none() -> Self {
        Self {
            factors: [(0.0, 0.0); MAX_ROW_BLOCK],
            rows: [core::ptr::null_mut(); MAX_ROW_BLOCK],
            finite: Cell::new([0.0; LANES]),
        }
    }

    /// Returns the ends of these columns.
    pub(crate) fn of(&self, columns: Range<usize>) -> ColumnEnds<'_> {
        let Range { start: first, end: past } = columns;
        ColumnEnds { factors: &self.factors, rows: &self.rows, first, past, finite: &self.finite }
    }

    /// Returns true if every row that has ended is finite.
    pub(crate) fn is_finite(&self) -> bool {
        self.finite.get().iter().all(|&x| x == 0.0)
    }
}

impl RowSum {
    /// Takes the maximum and the sum that the keys have, and the sink.
    #[inline(always)]
    pub(crate) fn new(max: f32, accumulated: f32, sink: Option<f32>) -> Self {
        let (mut top, mut sum, mut own) = (max as f64, accumulated as f64, 1.0);
        if let Some(sink) = sink.map(f64::from) {
            let old = top;
            top = if sink > old || sink.is_nan() { sink } else { old };
            if top != f64::NEG_INFINITY {
                own = exp(old - top);
                sum = sum * own + exp(sink - top);
            }
        }
        Self { top, sum, own, accumulated }
    }

    /// Returns the factor of the accumulated output: 1 / Σ exp, in two parts so that the product is rounded about once.
    #[inline(always)]
    pub(crate) fn factor(self) -> (f32, f32) {
        // No key was visible, so the outputs are zeros, whatever the sink is. A NaN sum is not equal to 0.
        if self.accumulated == 0.0 {
            return (0.0, 0.0);
        }
        let factor = self.own / self.sum;
        // A sink can make the factor NaN although all else is finite.
        if factor.is_nan() {
            return (QUIET_NAN, QUIET_NAN);
        }
        let high = factor as f32;
        (high, (factor - high as f64) as f32)
    }

    /// Returns ln Σ exp(score), the sink among the scores; −∞ if there is nothing to sum.
    pub(crate) fn lse(self) -> f32 {
        Self::lse_of(self.top, ln(self.sum))
    }

    /// Returns what rounding leaves of the log-sum-exp, which was rounded to `lse`; 0 if that is not finite. It is computed from
    /// differences: at 10³⁰ even an `f64` would lose the logarithm.
    pub(crate) fn lse_rest(self, lse: f32) -> f32 {
        if lse.is_finite() { quiet((self.top - f64::from(lse) + ln(self.sum)) as f32) } else { 0.0 }
    }

    /// Returns the log-sum-exp for a logarithm of the sum.
    #[inline(always)]
    fn lse_of(top: f64, ln_sum: f64) -> f32 {
        quiet((top + ln_sum) as f32)
    }
}

/// Returns the [log-sum-exp](RowSum::lse) of each of some rows without sinks, with these maxima and sums.
pub(crate) fn lses<S: Simd>(s: S, max: &[f32; END_ROWS], sum: &[f32; END_ROWS]) -> [f32; END_ROWS] {
    s.vectorize(
        #[inline(always)]
        move || {
            let mut logarithms = sum.map(f64::from);
            ln_each(&mut logarithms);
            let mut lses = [0.0; END_ROWS];
            for r in 0..END_ROWS {
                lses[r] = RowSum::lse_of(f64::from(max[r]), logarithms[r]);
            }
            lses
        },
    )
}

/// Rows to be normalised and written out.
pub(crate) struct Finish<'a> {
    /// Running outputs, rows `stride` apart.
    pub(crate) accumulated: &'a [f32],
    pub(crate) stride: usize,
    /// [Factor](RowSum::factor) of each row.
    pub(crate) factors: &'a [(f32, f32)],
    /// Rows are written as `cols` elements, `element` apart.
    pub(crate) cols: usize,
    pub(crate) element: isize,
    /// [`NonFinite::Handled`] if the accumulated outputs may be non-finite and the results must be right nevertheless.
    pub(crate) nonfinite: NonFinite,
}

/// Returns `found`, or NaN if `x` is not finite: x·0 is 0 for a finite `x` and NaN for others. A NaN `found` stays NaN.
#[inline(always)]
pub(crate) fn if_finite<W: Vector>(w: W, x: W::V, found: W::V) -> W::V {
    w.fma(x, w.splat(0.0), found)
}

/// Multiplies an accumulated output by its row's factor. A zero result is positive.
#[inline(always)]
pub(crate) fn normalised<W: Vector>(w: W, x: W::V, [high, low]: [W::V; 2]) -> W::V {
    w.add(w.fma(x, high, w.mul(x, low)), w.splat(0.0))
}

/// Writes the rows: accumulated outputs times their factors. Zeros are written positive and NaNs as the one quiet NaN,
/// so that neither the sign of a zero nor a NaN's payload depends on hidden values. Returns true if all accumulated
/// outputs are finite; if they are not, the rows written are not valid unless `nonfinite` is [`NonFinite::Handled`].
///
/// # Safety
/// `out` holds the address of each row; every pointer in it is writable for `cols` elements, `element` apart.
pub(crate) unsafe fn finish<S: Simd, T: Element>(s: S, a: Finish<'_>, out: &[*mut T]) -> bool {
    s.vectorize(
        #[inline(always)]
        // SAFETY: same contract.
        move || unsafe { finish_inlined(s, a, out) },
    )
}

/// Writes the rows, as [`finish`] does.
///
/// # Safety
/// Same contract as [`finish`].
#[inline(always)]
unsafe fn finish_inlined<S: Simd, T: Element>(s: S, a: Finish<'_>, out: &[*mut T]) -> bool {
    let width = a.cols.next_multiple_of(LANES);
    assert!(a.factors.len() == out.len() && a.stride >= width && a.accumulated.len() >= out.len() * a.stride);
    debug_assert!(out.iter().all(|row| !row.is_null()), "a row without an address");
    let (zero, nan) = (s.splat(0.0), s.splat(QUIET_NAN));
    let mut finite = zero;
    let whole = a.element == 1 && a.cols >= LANES;
    for (r, (&(high, low), &out)) in a.factors.iter().zip(out).enumerate() {
        let (high, low) = (s.splat(high), s.splat(low));
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
                // ∞ times the low part may be NaN where ∞ times the whole factor is ∞: then the high part alone is
                // used.
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
            // The last vector of contiguous elements ends with the row: some elements are written twice, with equal
            // bits.
            if whole && i < a.cols {
                i = i.min(a.cols - LANES);
            }
        }
        // A chain of FMAs for each row: the latency of one chain over all rows would cost time.
        finite = s.add(finite, row);
    }
    s.reduce_sum(finite) == 0.0
}
