//! Packing: keys to `[panel of 16 keys][head_dim][16]`, values (and strided queries) to contiguous, padded rows.
//!
//! Keys are transposed so that lanes can run over keys; the cost, one pass over the block, is shared by all the rows of
//! a task (1–3 % of the work). Queries are used in place when their rows are contiguous, values when they are also
//! whole vectors wide; otherwise they are copied.

use crate::simd::portable::transpose_four;
use crate::simd::width::LINE_BYTES;
use crate::simd::{LANES, Level, Simd};
use crate::tensor::any::{AnyRows, Typed};
use crate::tensor::element::{Dtype, Element};
use crate::tensor::rows::Rows;
use core::ops::Range;

/// Treatment of values that are not finite.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum NonFinite {
    /// Used as they are.
    Ignored,
    /// Replaced by 0, and added afterwards to the rows that see them.
    Handled,
}

impl NonFinite {
    /// Treats values that are not finite so.
    #[inline(always)]
    pub(crate) fn treat<T: Element>(self, values: &mut [T]) {
        if self == Self::Handled {
            for x in values.iter_mut().filter(|x| !x.widen().is_finite()) {
                *x = T::narrow(0.0);
            }
        }
    }
}

/// Packs the first `n` of `all` keys of `d` elements; the last panel is filled up with zeros.
///
/// # Safety
/// `keys` has `all` readable rows of `d` elements, at least `n`.
pub(crate) unsafe fn pack_keys<S: Simd>(s: S, keys: AnyRows, n: [usize; 2], d: usize, out: &mut [f32]) {
    s.vectorize(
        #[inline(always)]
        // SAFETY: same contract.
        move || by_type!(Typed, keys, |keys| unsafe { pack_keys_of(s, keys, n, d, out) }),
    )
}

/// Packs keys of one type, as [`pack_keys`] does.
///
/// # Safety
/// Same contract as [`pack_keys`].
#[inline(always)]
unsafe fn pack_keys_of<S: Simd, T: Element>(s: S, keys: Rows<T>, [n, all]: [usize; 2], d: usize, out: &mut [f32]) {
    let columns = if keys.element == 1 { d } else { 0 };
    fill_panels(
        n,
        [d, columns],
        out,
        #[inline(always)]
        // SAFETY: rows below `n` and `all`, whole squares of elements, and room for them.
        |first, columns, to| unsafe {
            let panel = PanelRows::new(keys, first, [n, all]);
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
        // SAFETY: row `r < n`, element `i < d`, as the caller guarantees.
        |r, i| unsafe { *keys.at(r).offset(i as isize * keys.element) }.widen(),
    );
}

/// Packs at most sixteen keys of `d` elements into one panel. Lanes without a key hold any numbers: a quarter of the
/// time of whole squares where there are four.
///
/// # Safety
/// `keys` has `n` readable rows of `d` contiguous elements, at least one.
#[inline(always)]
pub(crate) unsafe fn pack_few_keys(keys: Rows<f32>, n: usize, d: usize, out: &mut [f32]) {
    assert!((1..=LANES).contains(&n) && out.len() >= LANES * d);
    for four in (0..n).step_by(4) {
        // SAFETY: rows below `n`, elements below `d`, and room for a panel, as asserted.
        unsafe {
            // The last key takes the place of those that are not there.
            let rows = core::array::from_fn(|r| keys.at((four + r).min(n - 1)));
            let out = out.as_mut_ptr().add(four);
            for i in (0..d / 4 * 4).step_by(4) {
                transpose_four(rows.map(|row| row.add(i)), out.add(i * LANES));
            }
            for i in d / 4 * 4..d {
                for (r, row) in rows.iter().enumerate() {
                    *out.add(i * LANES + r) = *row.add(i);
                }
            }
        }
    }
}

/// Sixteen evenly spaced rows.
#[derive(Clone, Copy)]
pub(crate) struct StridedRows<T> {
    first: *const T,
    /// Address of the next panel's first row, to prefetch that panel, which is assumed to be evenly spaced, too.
    next: Option<*const T>,
    /// Bytes from one row to the next.
    step: isize,
}

impl<T: Copy> StridedRows<T> {
    /// Returns the same rows from column `i` on.
    #[inline(always)]
    pub(crate) fn columns_from(self, i: usize) -> Self {
        Self { first: self.first.wrapping_add(i), next: self.next.map(|next| next.wrapping_add(i)), ..self }
    }

    /// Prefetches the next panel's rows: the core's own prefetcher does not follow sixteen streams at a time.
    #[inline(always)]
    fn prefetch_ahead<S: Simd>(self, s: S) {
        let Some(mut row) = self.next else { return };
        for _ in 0..LANES {
            s.prefetch_far(Level::Second, row.cast(), LINE_BYTES);
            row = row.wrapping_byte_offset(self.step);
        }
    }

    /// Transposes `columns` columns, whole squares; a column is four bytes, whatever it is made of.
    ///
    /// Addresses are incremented, with no look-ups and nothing kept on the stack, which costs time where the loop waits
    /// for memory. (A loop over rows of 512 bytes that multiplied for each row's address took 21 µs for what now takes
    /// 13.)
    ///
    /// # Safety
    /// The rows have these columns; `to` has room for sixteen writable floats per column.
    #[inline(always)]
    pub(crate) unsafe fn transpose<S: Simd>(mut self, s: S, columns: usize, mut to: *mut f32) {
        for _ in 0..columns / LANES {
            self.prefetch_ahead(s);
            // SAFETY: the caller guarantees the columns, and a square of room at `to` for each sixteen of them.
            unsafe { s.transpose(self.first.cast(), self.step, to) };
            self = self.columns_from(LANES * size_of::<f32>() / size_of::<T>());
            to = to.wrapping_add(LANES * LANES);
        }
    }
}

/// Rows of a panel.
pub(crate) struct PanelRows<T> {
    rows: Rows<T>,
    first: usize,
    /// Number of rows to pack.
    n: usize,
    all: usize,
    /// The rows, if there are sixteen of them, evenly spaced.
    pub(crate) even: Option<StridedRows<T>>,
}

impl<T: Copy> PanelRows<T> {
    /// Takes the rows from row `first < n` on, of `n`, and of `all` for the next panel.
    ///
    /// # Safety
    /// The caller guarantees `all` rows, at least `n`.
    #[inline(always)]
    pub(crate) unsafe fn new(rows: Rows<T>, first: usize, [n, all]: [usize; 2]) -> Self {
        debug_assert!(first < n && n <= all, "rows {first}.. of {n} of {all}");
        let mut sixteen = Self { rows, first, n, all, even: None };
        // SAFETY: the rows are below `n`, that of the next panel is below `all`.
        unsafe {
            if first + LANES <= n && rows.evenly(first) >= LANES {
                let next = (first + LANES < all).then(|| rows.at(first + LANES));
                let step = rows.step().wrapping_mul(size_of::<T>() as isize);
                sixteen.even = Some(StridedRows { first: rows.at(first), next, step });
            }
        }
        sixteen
    }

    /// Calls `f(r, column i of row r)` for sixteen rows, or all that there are, and prefetches the next panel's.
    ///
    /// # Safety
    /// The rows are still alive, and have such a column.
    #[inline(always)]
    pub(crate) unsafe fn for_each_row<S: Simd>(&self, s: S, i: usize, mut f: impl FnMut(usize, *const T)) {
        if let Some(even) = self.even.map(|even| even.columns_from(i)) {
            even.prefetch_ahead(s);
            let mut row = even.first;
            for r in 0..LANES {
                f(r, row);
                row = row.wrapping_byte_offset(even.step);
            }
            return;
        }
        for r in 0..LANES {
            // SAFETY: the packed row is below `n`, the prefetched one below `all`.
            unsafe {
                if self.first + LANES + r < self.all {
                    s.prefetch_far(
                        Level::Second,
                        self.rows.at(self.first + LANES + r).wrapping_add(i).cast(),
                        LINE_BYTES,
                    );
                }
                if self.first + r < self.n {
                    f(r, self.rows.at(self.first + r).add(i));
                }
            }
        }
    }
}

/// Fills panels `[panel][depth][16]` with `n` rows. The first columns, if there are sixteen or more, are filled by
/// `squares(first row, columns, to)` in squares of sixteen rows, or not at all (beyond the rows of a partial panel it
/// writes zeros), the others by `element(row, column)`. The panel beyond the last row becomes zeros.
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
            // The last square ends at the last column: part of it is written twice, with the same numbers.
            squares(first, columns - LANES..columns, panel[(columns - LANES) * LANES..].as_mut_ptr());
        }
        for r in 0..here {
            for i in columns..depth {
                panel[i * LANES + r] = element(first + r, i);
            }
        }
        if here < LANES {
            for lanes in panel[columns * LANES..].chunks_exact_mut(LANES) {
                lanes[here..].fill(U::default());
            }
        }
    }
}

/// Copies `n` rows of `cols` columns, each filled up with zeros to whole vectors, as elements of any type. With
/// [`NonFinite::Handled`], elements that are not finite become zero.
///
/// # Safety
/// `values` has `n` readable rows of `cols` elements.
pub(crate) unsafe fn pack_rows<S: Simd, O: Element>(
    s: S,
    values: AnyRows,
    size: [usize; 2],
    nonfinite: NonFinite,
    out: &mut [O],
) {
    s.vectorize(
        #[inline(always)]
        // SAFETY: same contract.
        move || by_type!(Typed, values, |values| unsafe { pack_rows_of(s, values, size, nonfinite, out) }),
    )
}

/// Packs rows of one type, as [`pack_rows`] does.
///
/// # Safety
/// Same contract as [`pack_rows`].
#[inline(always)]
unsafe fn pack_rows_of<S: Simd, T: Element, O: Element>(
    s: S,
    values: Rows<T>,
    [n, cols]: [usize; 2],
    nonfinite: NonFinite,
    out: &mut [O],
) {
    debug_assert!(cols > 0 && out.len() >= n * cols.next_multiple_of(LANES), "{n} rows of {cols} columns");
    let width = cols.next_multiple_of(LANES);
    for (j, out) in out[..n * width].chunks_exact_mut(width).enumerate() {
        // SAFETY: the caller guarantees row `j < n`.
        let row = unsafe { values.at(j) };
        let (copy, padding) = out.split_at_mut(cols);
        // SAFETY: the row has `cols` elements.
        unsafe { copy_row(s, row, values.element, copy) };
        nonfinite.treat(copy);
        padding.fill(O::narrow(0.0));
    }
}

/// Copies one row.
///
/// # Safety
/// As many elements as `out` has are readable from `row` on, `element` apart.
#[inline(always)]
pub(crate) unsafe fn copy_row<S: Simd, T: Element, O: Element>(s: S, row: *const T, element: isize, out: &mut [O]) {
    let cols = out.len();
    let whole = if element == 1 && cols >= LANES { cols } else { 0 };
    for i in (0..whole).step_by(LANES) {
        // The last vector ends at the row's end: part of it is written twice, with the same numbers.
        let i = i.min(cols - LANES);
        // SAFETY: sixteen contiguous elements that the caller guarantees; sixteen elements of `out`.
        unsafe { O::store(s, out[i..][..LANES].as_mut_ptr(), T::load(s, row.add(i))) };
    }
    for (i, x) in out.iter_mut().enumerate().skip(whole) {
        // SAFETY: element `i` of the row, below the length of `out`.
        *x = O::narrow(unsafe { *row.offset(i as isize * element) }.widen());
    }
}
