//! The end of a row: sink, normalisation, log-sum-exp. Tiles of values end rows themselves where they can (`values.rs`), by what is
//! here.

use crate::element::Element;
use crate::geometry::{MAX_GROUP, MAX_TASK, Regions};
use crate::infinite::infinities;
use crate::options::{MaskMod, Mods, ProbMod, ScoreMod};
use crate::poison::Care;
use crate::rows::Rows;
use crate::simd::{LANES, QUIET_NAN, Simd, quiet};
use crate::steps::Steps;
use crate::tensor::Typed;
use crate::tile::{Exchange, Fused, Row};
use crate::view::SharedMut;
use core::cell::Cell;
use core::ops::Range;

/// Rows that are finished together: few, so that a task of few rows does not set up many.
const END_ROWS: usize = 16;

/// What the last step needs to know of one row.
#[derive(Clone, Copy)]
pub(crate) struct RowEnd {
    /// Factor of the gathered output: 1 / Σ exp, in two parts so that the product is rounded about once.
    pub(crate) factor: (f32, f32),
    /// The maximum and the sum, sink included.
    top: f64,
    sum: f64,
}

/// Rows of a group that end with the block at hand: nothing is added to them after it.
pub(crate) struct GroupEnds {
    /// Of each row of the group: see [`RowEnd`].
    factors: [(f32, f32); MAX_GROUP],
    /// Where it goes: contiguous floats.
    rows: [*mut f32; MAX_GROUP],
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

/// Which groups of a task have ended.
#[derive(Clone, Copy)]
pub(crate) struct EndedGroups {
    groups: [bool; MAX_TASK.div_ceil(MAX_GROUP)],
    /// Whether what they gathered was finite.
    finite: bool,
}

// Rows are finished so many at a time, all of one group.
const _: () = assert!(MAX_GROUP.is_multiple_of(END_ROWS));

impl EndedGroups {
    pub(crate) const NONE: Self = Self { groups: [false; MAX_TASK.div_ceil(MAX_GROUP)], finite: true };

    fn has(&self, group: usize) -> bool {
        self.groups[group]
    }

    /// Notes that a group has ended.
    pub(crate) fn add(&mut self, group: usize, ends: &GroupEnds) {
        self.groups[group] = true;
        self.finite &= ends.is_finite();
    }
}

impl ColumnEnds<'_> {
    /// How many columns.
    #[inline(always)]
    pub(crate) fn columns(self) -> usize {
        self.past.saturating_sub(self.first)
    }
}

impl GroupEnds {
    /// Of nothing.
    #[inline(always)]
    pub(crate) const fn none() -> Self {
        Self {
            factors: [(0.0, 0.0); MAX_GROUP],
            rows: [core::ptr::null_mut(); MAX_GROUP],
            finite: Cell::new([0.0; LANES]),
        }
    }

    /// Of these columns.
    pub(crate) fn of(&self, columns: Range<usize>) -> ColumnEnds<'_> {
        let Range { start: first, end: past } = columns;
        ColumnEnds { factors: &self.factors, rows: &self.rows, first, past, finite: &self.finite }
    }

    /// True if all that has ended is finite.
    fn is_finite(&self) -> bool {
        self.finite.get().iter().all(|&x| x == 0.0)
    }
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
    pub(crate) gathered: &'a [f32],
    pub(crate) stride: usize,
    pub(crate) ends: &'a [RowEnd],
    /// Rows are written as `cols` elements, `element` apart.
    pub(crate) cols: usize,
    pub(crate) element: isize,
    /// Whether what was gathered may be other than finite and has to end well nevertheless.
    pub(crate) care: Care,
}

/// `found`, or NaN if x is not finite: x·0 is 0 if it is, and NaN if not, and a NaN stays.
#[inline(always)]
pub(crate) fn if_finite<S: Simd>(s: S, x: S::V, found: S::V) -> S::V {
    s.fma(x, s.splat(0.0), found)
}

/// What was gathered, times its row's factor. A zero is positive.
#[inline(always)]
pub(crate) fn normalised<S: Simd>(s: S, x: S::V, [high, low]: [S::V; 2]) -> S::V {
    s.add(s.fma(x, high, s.mul(x, low)), s.splat(0.0))
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
    let (zero, nan) = (s.splat(0.0), s.splat(QUIET_NAN));
    let mut finite = zero;
    let whole = a.element == 1 && a.cols >= LANES;
    for (r, (end, &out)) in a.ends.iter().zip(out).enumerate() {
        let (high, low) = (s.splat(end.factor.0), s.splat(end.factor.1));
        let mut row = zero;
        let mut i = 0;
        while i < a.cols {
            // SAFETY: `i + 16 ≤ width ≤ stride`, and `gathered` has a stride for every row.
            let mut x = unsafe { s.load(a.gathered.as_ptr().add(r * a.stride + i)) };
            if a.care == Care::Careful {
                x = infinities(s, x);
            }
            row = if_finite(s, x, row);
            let mut y = normalised(s, x, [high, low]);
            if a.care == Care::Careful {
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

    /// Where the rows of a group go, and by which factors they end, if tiles can write them: contiguous floats. Writes their
    /// log-sum-exp. Nothing may be added to them after the block at hand.
    ///
    /// # Safety
    /// As for [`Self::run`]; the group has met its last scores.
    pub(crate) unsafe fn end_group(&self, group: Range<usize>, ends: &mut GroupEnds, regions: &Regions<'_>) -> bool {
        let Some(Typed::F32(out)) = &self.outputs.out else { return false };
        let [.., step, element] = out.strides();
        if element != 1 {
            return false;
        }
        for (row, n) in self.stretches(group.clone()) {
            // SAFETY: the rows are inside the output, and this task's alone.
            let (first, _) = unsafe { out.row(self.seq.batch, row.head, self.seq.first_row + row.i) };
            for (k, to) in ends.rows[row.n..row.n + n].iter_mut().enumerate() {
                *to = first.wrapping_offset(k as isize * step);
            }
        }
        for row in self.rows(group.clone()) {
            // SAFETY: passed on.
            ends.factors[row.n] = unsafe { self.end_row(row, group.start + row.n, regions) }.factor;
        }
        true
    }

    /// How a row ends. Writes its log-sum-exp.
    ///
    /// # Safety
    /// As for [`Self::run`]; the row is row `r` of the task.
    #[inline(always)]
    unsafe fn end_row(&self, row: Row, r: usize, regions: &Regions<'_>) -> RowEnd {
        let end = self.row_end(row, regions.max[r], regions.sum[r]);
        if let Some(lse) = &self.outputs.lse {
            // SAFETY: the row is inside the output, and this task's alone.
            unsafe { *lse.row(self.seq.batch, row.head, self.seq.first_row + row.i).0 = end.lse() };
        }
        end
    }

    /// Normalises and writes the task's rows, or keeps them as they are for more keys to come. False if something gathered
    /// was not finite.
    ///
    /// # Safety
    /// As for [`Self::run`].
    pub(crate) unsafe fn finish(&self, care: Care, ended: EndedGroups, regions: &mut Regions<'_>) -> bool {
        let Some(output) = &self.outputs.out else {
            let finite = self.gathered_is_finite(regions);
            if finite || care == Care::Careful {
                // SAFETY: passed on.
                unsafe { self.exchange(regions, Exchange::Save) };
            }
            return finite;
        };
        // SAFETY: passed on.
        by_type!(Typed, output, |out| unsafe { self.finish_into(out, care, ended, regions) })
    }

    /// The same, to an output of a type.
    ///
    /// # Safety
    /// As for [`Self::run`].
    unsafe fn finish_into<T: Element>(
        &self,
        output: &SharedMut<'_, T>,
        care: Care,
        ended: EndedGroups,
        regions: &mut Regions<'_>,
    ) -> bool {
        let mut finite = ended.finite;
        let rows = self.task.rows.len();
        let groups = (0..rows).step_by(END_ROWS).map(|first| first..rows.min(first + END_ROWS));
        for group in groups.filter(|group| !ended.has(group.start / self.geometry.group_rows)) {
            let mut ends = [RowEnd::EMPTY; END_ROWS];
            let mut out = [core::ptr::null_mut::<T>(); END_ROWS];
            let mut element = 1;
            for row in self.rows(group.clone()) {
                // SAFETY: passed on.
                unsafe {
                    ends[row.n] = self.end_row(row, group.start + row.n, regions);
                    (out[row.n], element) = output.row(self.seq.batch, row.head, self.seq.first_row + row.i);
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
