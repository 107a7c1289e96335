//! Packing: keys to `[panel of 16 keys][head_dim][16]`, values (and strided queries) to contiguous, padded rows.
//!
//! Keys are transposed so that lanes can run over keys; the cost, one pass over the block, is shared by all the rows
//! of a task (1–3 % of the work). Queries are used where they lie when their rows are
//! contiguous, values when they are also whole vectors wide; otherwise they are copied.

use crate::simd::width::LINE_BYTES;
use crate::simd::{LANES, Level, Simd};
use crate::tensor::element::{Dtype, Element};
use crate::tensor::rows::Rows;
use core::ops::Range;

/// Whether values are taken as they are, or blocks of them looked at first.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum NonFinite {
    /// As they are.
    Ignored,
    /// What is not finite is replaced by 0, and added to the rows that see it afterwards.
    Handled,
}

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
    let columns = if keys.element == 1 { d } else { 0 };
    fill_panels(
        n,
        [d, columns],
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
                        panel.for_each_row(
                            s,
                            i,
                            #[inline(always)]
                            |r, row| s.store(wide[r].as_mut_ptr(), T::load(s, row)),
                        );
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

/// Sixteen rows that lie evenly.
#[derive(Clone, Copy)]
pub(crate) struct Even<T> {
    first: *const T,
    /// Where the next panel begins, to ask for it: as if it, too, lay evenly.
    next: Option<*const T>,
    /// Bytes from one row to the next.
    step: isize,
}

impl<T: Copy> Even<T> {
    /// From column `i` on.
    #[inline(always)]
    pub(crate) fn columns_from(self, i: usize) -> Self {
        Self { first: self.first.wrapping_add(i), next: self.next.map(|next| next.wrapping_add(i)), ..self }
    }

    /// Asks for the next panel's rows. The core does not foresee sixteen at a time.
    #[inline(always)]
    fn ask_ahead<S: Simd>(self, s: S) {
        let Some(mut row) = self.next else { return };
        for _ in 0..LANES {
            s.prefetch_far(Level::Second, row.cast(), LINE_BYTES);
            row = row.wrapping_byte_offset(self.step);
        }
    }

    /// Transposes so many columns, whole squares; a column is four bytes, whatever it is made of.
    ///
    /// Addresses are counted on, with nothing looked up and nothing narrow_by_mask on the stack: where memory is waited for, that shows.
    /// (A loop over rows of 512 bytes that multiplied for each row's address took 21 µs for what now takes 13.)
    ///
    /// # Safety
    /// The rows have these columns; `to` is as many times sixteen writable floats.
    #[inline(always)]
    pub(crate) unsafe fn transpose<S: Simd>(mut self, s: S, columns: usize, mut to: *mut f32) {
        for _ in 0..columns / LANES {
            self.ask_ahead(s);
            // SAFETY: the caller's promise.
            unsafe { s.transpose(self.first.cast(), self.step, to) };
            self = self.columns_from(LANES * size_of::<f32>() / size_of::<T>());
            to = to.wrapping_add(LANES * LANES);
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
    pub(crate) even: Option<Even<T>>,
}

impl<T: Copy> Sixteen<T> {
    /// From row `first < n` on, of `n`, and of `all` for the next panel.
    ///
    /// # Safety
    /// There are `all` rows, at least `n`.
    #[inline(always)]
    pub(crate) unsafe fn new(rows: Rows<T>, first: usize, [n, all]: [usize; 2]) -> Self {
        let mut sixteen = Self { rows, first, n, all, even: None };
        // SAFETY: rows below `n`, and below `all`.
        unsafe {
            if first + LANES <= n && rows.evenly(first) >= LANES {
                let next = (first + LANES < all).then(|| rows.at(first + LANES));
                let step = rows.step().wrapping_mul(size_of::<T>() as isize);
                sixteen.even = Some(Even { first: rows.at(first), next, step });
            }
        }
        sixteen
    }

    /// Calls `f(r, column i of row r)` for all sixteen, the last again where there are fewer, and asks for the next panel's.
    ///
    /// # Safety
    /// The rows are still there, and have such a column.
    #[inline(always)]
    pub(crate) unsafe fn for_each_row<S: Simd>(&self, s: S, i: usize, mut f: impl FnMut(usize, *const T)) {
        if let Some(even) = self.even.map(|even| even.columns_from(i)) {
            even.ask_ahead(s);
            let mut row = even.first;
            for r in 0..LANES {
                f(r, row);
                row = row.wrapping_byte_offset(even.step);
            }
            return;
        }
        for r in 0..LANES {
            // SAFETY: rows below `n`, and below `all`.
            unsafe {
                if self.first + LANES + r < self.all {
                    s.prefetch_far(
                        Level::Second,
                        self.rows.at(self.first + LANES + r).wrapping_add(i).cast(),
                        LINE_BYTES,
                    );
                }
                f(r, self.rows.at((self.first + r).min(self.n - 1)).add(i));
            }
        }
    }
}

/// Fills panels `[panel][depth][16]` with `n` rows: the first columns, if there are sixteen or more, by
/// `squares(first row, columns, to)`, squares of sixteen rows, or none (a partial panel may hold anything beyond its rows: it is
/// blanked afterwards), the others by `element(row, column)`. What is beyond the last row becomes zeros.
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

/// Copies `n` rows of `cols` columns, each filled up with zeros to whole vectors, as elements of any type. With nonfinite,
/// anything that is not finite becomes zero.
///
/// # Safety
/// `values` has `n` readable rows of `cols` elements.
#[inline(always)]
pub(crate) unsafe fn pack_rows<S: Simd, T: Element, O: Element>(
    s: S,
    values: Rows<T>,
    [n, cols]: [usize; 2],
    nonfinite: NonFinite,
    out: &mut [O],
) {
    let width = cols.next_multiple_of(LANES);
    for (j, out) in out[..n * width].chunks_exact_mut(width).enumerate() {
        // SAFETY: the caller vouches for row `j < n`.
        let row = unsafe { values.at(j) };
        let (copy, padding) = out.split_at_mut(cols);
        // SAFETY: the row has `cols` elements.
        unsafe { copy_row(s, row, values.element, copy) };
        if nonfinite == NonFinite::Handled {
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
    let cols = out.len();
    let whole = if element == 1 && cols >= LANES { cols } else { 0 };
    for i in (0..whole).step_by(LANES) {
        // The last vector ends with the row: some of it is written twice, alike.
        let i = i.min(cols - LANES);
        // SAFETY: contiguous elements that the caller vouches for; sixteen of ours.
        unsafe { O::store(s, out[i..][..LANES].as_mut_ptr(), T::load(s, row.add(i))) };
    }
    for (i, x) in out.iter_mut().enumerate().skip(whole) {
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
                for (k, seen) in seen.iter_mut().enumerate() {
                    // SAFETY: `i + 64 ≤ cols`, contiguous.
                    *seen = s.fma(unsafe { T::load(s, row.add(i + k * LANES)) }, zero, *seen);
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
