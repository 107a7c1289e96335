//! The end of a row: sink, normalisation, log-sum-exp.

use crate::element::Element;
use crate::geometry::{MAX_GROUP, Regions};
use crate::options::{MaskMod, Mods, ProbMod, ScoreMod};
use crate::poison::Care;
use crate::rows::Rows;
use crate::simd::{LANES, Simd};
use crate::steps::Steps;
use crate::tensor::Typed;
use crate::tile::{Exchange, Fused, Row};
use crate::view::SharedMut;
use core::ops::Range;

/// Rows that are finished together: few, so that a task of few rows does not set up many.
const END_ROWS: usize = 16;

/// The one NaN that is written.
const NAN: f32 = f32::from_bits(0x7fc0_0000);

/// What the last step needs to know of one row.
#[derive(Clone, Copy)]
pub(crate) struct RowEnd {
    /// Factor of the gathered output: 1 / Σ exp, in two parts so that the product is rounded about once.
    pub(crate) factor: (f32, f32),
    /// The maximum and the sum, sink included.
    top: f64,
    sum: f64,
}

impl RowEnd {
    /// A row that sees nothing. What it has gathered is zeros.
    pub(crate) const EMPTY: Self = Self { factor: (0.0, 0.0), top: f64::NEG_INFINITY, sum: 0.0 };

    /// Closes a row with this maximum and sum. A sink is one more key, with value zero.
    pub(crate) fn new(max: f32, sum: f32, sink: Option<f32>) -> Self {
        let gathered = sum;
        let (mut top, mut sum, mut own) = (max as f64, sum as f64, 1.0);
        if let Some(sink) = sink.map(f64::from) {
            let old = top;
            top = if sink > old || sink.is_nan() { sink } else { old };
            if top != f64::NEG_INFINITY {
                own = (old - top).exp();
                sum = sum * own + (sink - top).exp();
            }
        }
        // Nothing visible, and so nothing gathered: zeros, whatever the sink is. A NaN sum is not nothing.
        if gathered == 0.0 {
            return Self { top, sum, ..Self::EMPTY };
        }
        let factor = own / sum;
        // Of a sink, beside what is finite otherwise.
        if factor.is_nan() {
            return Self { factor: (NAN, NAN), top, sum };
        }
        let high = factor as f32;
        Self { factor: (high, (factor - high as f64) as f32), top, sum }
    }

    /// ln Σ exp(score), −∞ if nothing was visible.
    pub(crate) fn lse(&self) -> f32 {
        (self.top + self.sum.ln()) as f32
    }
}

/// A group of rows to be written out.
pub(crate) struct Finish<'a> {
    /// Running outputs, rows `stride` apart.
    pub(crate) gathered: &'a [f32],
    pub(crate) stride: usize,
    pub(crate) ends: &'a [RowEnd],
    /// Rows are written as `cols` elements, `element` apart.
    pub(crate) cols: usize,
    pub(crate) element: isize,
    /// Whether what was gathered may be other than finite and has to end well nevertheless.
    pub(crate) care: Care,
}

/// Writes the rows: what was gathered times its factor. Zeros are written positive and NaNs as the one quiet NaN, so
/// that neither the sign of nothing nor a payload depends on what was hidden beside it. True if all that was gathered is
/// finite; if it is not, what was written is worth nothing unless it was written with care.
///
/// # Safety
/// `out` says where each row goes; every pointer in it is writable for `cols` elements, `element` apart.
#[inline(always)]
pub(crate) unsafe fn finish<S: Simd, T: Element>(s: S, a: Finish<'_>, out: &[*mut T]) -> bool {
    let width = a.cols.next_multiple_of(LANES);
    assert!(a.ends.len() == out.len() && a.stride >= width && a.gathered.len() >= out.len() * a.stride);
    let (zero, nan) = (s.splat(0.0), s.splat(NAN));
    let mut finite = zero;
    let whole = a.element == 1 && a.cols >= LANES;
    for (r, (end, &out)) in a.ends.iter().zip(out).enumerate() {
        let (high, low) = (s.splat(end.factor.0), s.splat(end.factor.1));
        let mut row = zero;
        let mut i = 0;
        while i < a.cols {
            // SAFETY: `i + 16 ≤ width ≤ stride`, and `gathered` has a stride for every row.
            let x = unsafe { s.load(a.gathered.as_ptr().add(r * a.stride + i)) };
            // x·0 is 0 for a finite x and NaN otherwise, and a NaN stays.
            row = s.fma(x, zero, row);
            let mut y = s.fma(x, high, s.mul(x, low));
            if a.care == Care::Careful {
                // ∞ times the low part may be NaN where ∞ times the whole is ∞: then the high part alone is the answer.
                let coarse = s.mul(x, high);
                y = s.select_eq(y, y, y, s.select_eq(coarse, coarse, coarse, nan));
            }
            let y = s.add(y, zero);
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

impl<S: Steps, A: ScoreMod, B: MaskMod, C: ProbMod> Fused<'_, '_, S, Mods<A, B, C>> {
    /// Per row of a group: what to subtract from its scores, and the factor that makes weights of their exponentials.
    pub(crate) fn references(&self, group: Range<usize>, max: &[f32], sum: &[f32]) -> [(f32, f32); MAX_GROUP] {
        let mut references = [(0.0, 0.0); MAX_GROUP];
        for row in self.rows(group.clone()) {
            let r = group.start + row.n;
            let end = self.row_end(row, max[r], sum[r]);
            references[row.n] = (if max[r] == f32::NEG_INFINITY { 0.0 } else { max[r] }, end.factor.0);
        }
        references
    }

    fn row_end(&self, row: Row, max: f32, sum: f32) -> RowEnd {
        RowEnd::new(max, sum, self.call.options.sinks.map(|sinks| sinks[row.head]))
    }

    /// True if all that was gathered is: if not, it has to be gathered with care.
    pub(crate) fn gathered_is_finite(&self, regions: &Regions<'_>) -> bool {
        let gathered = &regions.out[..self.task.rows.len() * self.geometry.width()];
        let row = Typed::F32(Rows::strided(gathered.as_ptr(), 0, 1));
        // SAFETY: one row of so many floats.
        unsafe { self.s.all_finite(row, 1, gathered.len()) }
    }

    /// Normalises and writes the task's rows, or keeps them as they are for more keys to come. False if something gathered
    /// was not finite.
    ///
    /// # Safety
    /// As for [`Self::run`].
    pub(crate) unsafe fn finish(&self, care: Care, regions: &mut Regions<'_>) -> bool {
        let Some(output) = &self.outputs.out else {
            let finite = self.gathered_is_finite(regions);
            if finite || care == Care::Careful {
                // SAFETY: passed on.
                unsafe { self.exchange(regions, Exchange::Save) };
            }
            return finite;
        };
        // SAFETY: passed on.
        by_type!(Typed, output, |out| unsafe { self.finish_into(out, care, regions) })
    }

    /// The same, to an output of a type.
    ///
    /// # Safety
    /// As for [`Self::run`].
    unsafe fn finish_into<T: Element>(&self, output: &SharedMut<'_, T>, care: Care, regions: &mut Regions<'_>) -> bool {
        let mut finite = true;
        let rows = self.task.rows.len();
        for group in (0..rows).step_by(END_ROWS).map(|first| first..rows.min(first + END_ROWS)) {
            let mut ends = [RowEnd::EMPTY; END_ROWS];
            let mut out = [core::ptr::null_mut::<T>(); END_ROWS];
            let mut element = 1;
            for row in self.rows(group.clone()) {
                let r = group.start + row.n;
                let (b, i) = (self.seq.batch, self.seq.first_row + row.i);
                ends[row.n] = self.row_end(row, regions.max[r], regions.sum[r]);
                // SAFETY: the rows are inside the outputs and this task's alone.
                unsafe {
                    if let Some(lse) = &self.outputs.lse {
                        *lse.row(b, row.head, i).0 = ends[row.n].lse();
                    }
                    (out[row.n], element) = output.row(b, row.head, i);
                }
                if C::ACTIVE {
                    ends[row.n].factor = (1.0, 0.0);
                }
            }
            let stride = self.geometry.width();
            // SAFETY: every row has `value_dim` elements, and they are this task's alone.
            finite &= unsafe {
                let finish = Finish {
                    gathered: &regions.out[group.start * stride..group.end * stride],
                    stride,
                    ends: &ends[..group.len()],
                    cols: self.geometry.value_dim,
                    element,
                    care,
                };
                self.s.finish(finish, T::any(&out[..group.len()]))
            };
        }
        finite
    }
}
