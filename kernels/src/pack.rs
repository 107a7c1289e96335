//! Packing: keys to `[panel of 16 keys][head_dim][16]`, values (and strided queries) to contiguous, padded rows.
//!
//! Keys are transposed so that lanes can run over keys; the cost, one pass over the block, is shared by all the rows
//! of a task (1–3 % of the work). Queries are used where they lie when their rows are
//! contiguous, values when they are also whole vectors wide; otherwise they are copied.

use crate::element::{Dtype, Element};
use crate::poison::Care;
use crate::rows::Rows;
use crate::simd::{LANES, Simd};
use core::ops::Range;

/// Packs the first `n` of `all` keys of `d` elements; the last panel is filled up with zeros.
///
/// # Safety
/// `keys` has `all` readable rows of `d` elements, at least `n`.
#[inline(always)]
pub(crate) unsafe fn pack_keys<S: Simd, T: Element>(
    s: S,
    keys: Rows<T>,
    [n, all]: [usize; 2],
    d: usize,
    out: &mut [f32],
) {
    let squares = if keys.element == 1 { d } else { 0 };
    fill_panels(
        n,
        [d, squares],
        out,
        #[inline(always)]
        // SAFETY: rows below `n` and `all`, whole squares of elements, and room for them.
        |first, columns, to| unsafe {
            let panel = Sixteen::new(keys, first, [n, all]);
            match panel.even {
                Some(even) if T::DTYPE == Dtype::F32 => {
                    even.columns_from(columns.start).transpose(s, columns.len(), to)
                }
                _ => {
                    for (square, i) in columns.step_by(LANES).enumerate() {
                        let mut wide = [[0.0f32; LANES]; LANES];
                        for (r, wide) in wide.iter_mut().enumerate() {
                            s.store(wide.as_mut_ptr(), T::load(s, panel.row(r).add(i)));
                        }
                        panel.ask_ahead(s, i);
                        let step = size_of_val(&wide[0]) as isize;
                        s.transpose(wide.as_ptr().cast(), step, to.add(square * LANES * LANES));
                    }
                }
            }
        },
        #[inline(always)]
        // SAFETY: row `r < n`, element `i < d`.
        |r, i| unsafe { *keys.at(r).offset(i as isize * keys.element) }.widen(),
    );
}

/// Sixteen rows that lie evenly, and where the sixteen after them begin: there too, if there are such.
#[derive(Clone, Copy)]
pub(crate) struct Even {
    first: *const f32,
    next: *const f32,
    /// Bytes from one row to the next.
    step: isize,
}

impl Even {
    /// From column `i` on, of what is moved in fours of bytes.
    #[inline(always)]
    pub(crate) fn columns_from(self, i: usize) -> Self {
        Self { first: self.first.wrapping_add(i), next: self.next.wrapping_add(i), ..self }
    }

    /// Transposes so many columns, whole squares.
    ///
    /// The core does not foresee sixteen rows at a time: asks for the next panel's in the order in which they will come.
    /// Addresses are counted on, with nothing looked up and nothing kept on the stack: where memory is waited for, that shows.
    /// (A loop over rows of 512 bytes that multiplied for each row's address took 21 µs for what now takes 13.)
    ///
    /// # Safety
    /// The rows have these columns; `to` is as many times sixteen writable floats.
    #[inline(always)]
    pub(crate) unsafe fn transpose<S: Simd>(self, s: S, columns: usize, mut to: *mut f32) {
        let Self { mut first, mut next, step } = self;
        for _ in 0..columns / LANES {
            let mut row = next;
            for _ in 0..LANES {
                s.prefetch_far(row);
                row = row.wrapping_byte_offset(step);
            }
            // SAFETY: the caller's promise.
            unsafe { s.transpose(first, step, to) };
            (first, next, to) = (first.wrapping_add(LANES), next.wrapping_add(LANES), to.wrapping_add(LANES * LANES));
        }
    }
}

/// The rows of a panel.
pub(crate) struct Sixteen<T> {
    rows: Rows<T>,
    first: usize,
    /// How many rows are to be packed, and how many there are.
    n: usize,
    all: usize,
    /// If there are sixteen, and they lie evenly.
    pub(crate) even: Option<Even>,
}

impl<T> Sixteen<T> {
    /// From row `first < n` on, of `n`, and of `all` for the next panel.
    ///
    /// # Safety
    /// There are `all` rows, at least `n`.
    #[inline(always)]
    pub(crate) unsafe fn new(rows: Rows<T>, first: usize, [n, all]: [usize; 2]) -> Self {
        let mut sixteen = Self { rows, first, n, all, even: None };
        if first + LANES <= n {
            // SAFETY: rows `first .. first + 16` are below `n`; the one after them may be the last again.
            unsafe {
                if rows.evenly(first) >= LANES {
                    let [here, next] = [first, (first + LANES).min(all - 1)].map(|i| rows.at(i).cast());
                    sixteen.even =
                        Some(Even { first: here, next, step: rows.step().wrapping_mul(size_of::<T>() as isize) });
                }
            }
        }
        sixteen
    }

    /// Row `r` of the panel, the last again where there are fewer.
    ///
    /// # Safety
    /// The rows are still there.
    #[inline(always)]
    pub(crate) unsafe fn row(&self, r: usize) -> *const T {
        // SAFETY: a row below `n`.
        unsafe { self.rows.at((self.first + r).min(self.n - 1)) }
    }

    /// Asks for the next panel's, from element `i` on.
    ///
    /// # Safety
    /// The rows are still there.
    #[inline(always)]
    pub(crate) unsafe fn ask_ahead<S: Simd>(&self, s: S, i: usize) {
        for r in LANES..2 * LANES {
            // SAFETY: a row below `all`.
            let later = unsafe { self.rows.at((self.first + r).min(self.all - 1)) };
            s.prefetch_far(later.wrapping_add(i).cast());
        }
    }
}

/// Fills panels `[panel][depth][16]` with `n` rows: the first columns, if there are sixteen or more, by
/// `squares(first row, columns, to)`, squares of sixteen rows (a partial panel may hold anything beyond its rows: it is blanked
/// afterwards), the others by `element(row, column)`. What is beyond the last row becomes zeros.
#[inline(always)]
pub(crate) fn fill_panels<U: Copy + Default>(
    n: usize,
    [depth, columns]: [usize; 2],
    out: &mut [U],
    squares: impl Fn(usize, Range<usize>, *mut U),
    element: impl Fn(usize, usize) -> U,
) {
    assert!(out.len() >= n.next_multiple_of(LANES) * depth && columns <= depth);
    let columns = if columns < LANES { 0 } else { columns };
    let whole = columns / LANES * LANES;
    for first in (0..n).step_by(LANES) {
        let here = LANES.min(n - first);
        let panel = &mut out[first * depth..][..LANES * depth];
        squares(first, 0..whole, panel.as_mut_ptr());
        if whole < columns {
            // The last square ends with the columns: some of it is written twice, alike.
            squares(first, columns - LANES..columns, panel[(columns - LANES) * LANES..].as_mut_ptr());
        }
        for r in 0..here {
            for i in columns..depth {
                panel[i * LANES + r] = element(first + r, i);
            }
        }
        if here < LANES {
            for lanes in panel.chunks_exact_mut(LANES) {
                lanes[here..].fill(U::default());
            }
        }
    }
}

/// Copies `n` rows of `cols` columns, each filled up with zeros to whole vectors, as elements of any type. With care,
/// anything that is not finite becomes zero.
///
/// # Safety
/// `values` has `n` readable rows of `cols` elements.
#[inline(always)]
pub(crate) unsafe fn pack_rows<S: Simd, T: Element, O: Element>(
    s: S,
    values: Rows<T>,
    [n, cols]: [usize; 2],
    care: Care,
    out: &mut [O],
) {
    let width = cols.next_multiple_of(LANES);
    for (j, out) in out[..n * width].chunks_exact_mut(width).enumerate() {
        // SAFETY: the caller vouches for row `j < n`.
        let row = unsafe { values.at(j) };
        let (copy, padding) = out.split_at_mut(cols);
        // SAFETY: the row has `cols` elements.
        unsafe { copy_row(s, row, values.element, copy) };
        if care == Care::Careful {
            for x in copy.iter_mut().filter(|x| !x.widen().is_finite()) {
                *x = O::narrow(0.0);
            }
        }
        padding.fill(O::narrow(0.0));
    }
}

/// Copies one row.
///
/// # Safety
/// As many elements as `out` has are readable from `row` on, `element` apart.
#[inline(always)]
unsafe fn copy_row<S: Simd, T: Element, O: Element>(s: S, row: *const T, element: isize, out: &mut [O]) {
    let mut done = 0;
    if element == 1 {
        let (whole, _) = out.as_chunks_mut::<LANES>();
        for (chunk, to) in whole.iter_mut().enumerate() {
            // SAFETY: contiguous elements that the caller vouches for; sixteen of ours.
            unsafe { O::store(s, to.as_mut_ptr(), T::load(s, row.add(chunk * LANES))) };
        }
        done = whole.len() * LANES;
    }
    for (i, x) in out.iter_mut().enumerate().skip(done) {
        // SAFETY: element `i` of the row.
        *x = O::narrow(unsafe { *row.offset(i as isize * element) }.widen());
    }
}

/// True if all of `n` rows of `cols` values are finite.
///
/// # Safety
/// `values` has `n` readable rows of `cols` elements.
#[inline(always)]
pub(crate) unsafe fn all_finite<S: Simd, T: Element>(s: S, values: Rows<T>, n: usize, cols: usize) -> bool {
    let zero = s.splat(0.0);
    // x·0 is 0 for a finite x and NaN otherwise, and a NaN stays.
    // Four sums, so that none is waited for.
    let (mut seen, mut rest) = ([zero; 4], 0.0f32);
    let whole = if values.element == 1 { cols / LANES * LANES } else { 0 };
    let fours = whole / (4 * LANES) * (4 * LANES);
    let mut done = 0;
    while done < n {
        // SAFETY: the caller vouches for row `done < n`.
        let (mut row, together) = unsafe { (values.at(done), values.evenly(done).min(n - done)) };
        for _ in 0..together {
            for i in (0..fours).step_by(4 * LANES) {
                for (n, seen) in seen.iter_mut().enumerate() {
                    // SAFETY: `i + 64 ≤ cols`, contiguous.
                    *seen = s.fma(unsafe { T::load(s, row.add(i + n * LANES)) }, zero, *seen);
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
