//! Packing: keys to `[panel of 16 keys][head_dim][16]`, values (and strided queries) to contiguous, padded rows.
//!
//! Keys are transposed so that lanes can run over keys; the cost, one pass over the block, is shared by all the rows
//! of a task (1–3 % of the work). Queries are used where they lie when their rows are
//! contiguous, values when they are also whole vectors wide; otherwise they are copied.

use crate::block::KEY_BLOCK;
use crate::element::{Dtype, Element};
use crate::poison::Care;
use crate::simd::{LANES, Simd};
use core::mem::MaybeUninit;

/// Rows of numbers somewhere in memory, elements `element` apart: one after the other at a fixed distance, or each where a
/// table says.
pub(crate) struct Rows<T = f32> {
    /// Row 0; with a table, nothing.
    first: *const T,
    /// From one row to the next; with a table, what to add to its entries.
    step: isize,
    table: *const MaybeUninit<*const ()>,
    pub(crate) element: isize,
}

// Not derived: that would ask the same of `T`.
impl<T> Clone for Rows<T> {
    #[inline(always)]
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Rows<T> {}

impl<T> Rows<T> {
    /// Row `i` starts at `first + i·row`.
    pub(crate) const fn strided(first: *const T, row: isize, element: isize) -> Self {
        Self { first, step: row, table: core::ptr::null(), element }
    }

    /// Row `i` starts where entry `i` of the table says.
    pub(crate) fn scattered(table: &Table, element: isize) -> Self {
        Self { first: core::ptr::null(), step: 0, table: table.rows.as_ptr(), element }
    }

    /// # Safety
    /// Row `i` exists: with a table, entry `i` was filled, and the table is still there.
    #[inline(always)]
    pub(crate) unsafe fn at(self, i: usize) -> *const T {
        // SAFETY: the caller vouches for row `i`.
        unsafe {
            if self.table.is_null() {
                self.first.offset(i as isize * self.step)
            } else {
                (*self.table.add(i)).assume_init().cast::<T>().offset(self.step)
            }
        }
    }

    /// The distance between rows, if it is always the same.
    pub(crate) fn stride(self) -> Option<isize> {
        self.table.is_null().then_some(self.step)
    }

    /// Rows `i` and on.
    ///
    /// # Safety
    /// Row `i` exists.
    pub(crate) unsafe fn rows_from(self, i: usize) -> Self {
        // SAFETY: the caller vouches for row `i`.
        unsafe {
            if self.table.is_null() {
                Self { first: self.first.offset(i as isize * self.step), ..self }
            } else {
                Self { table: self.table.add(i), ..self }
            }
        }
    }

    /// The same rows from element `i` on.
    ///
    /// # Safety
    /// The rows have an element `i`.
    pub(crate) unsafe fn columns_from(self, i: usize) -> Self {
        let shift = i as isize * self.element;
        if self.table.is_null() {
            // SAFETY: the caller vouches for element `i`.
            Self { first: unsafe { self.first.offset(shift) }, ..self }
        } else {
            Self { step: self.step + shift, ..self }
        }
    }
}

/// Where each row of a block lies.
pub(crate) struct Table {
    rows: [MaybeUninit<*const ()>; KEY_BLOCK],
}

impl Table {
    /// No rows yet. Costs nothing: entries are written before they are read.
    #[inline(always)]
    pub(crate) const fn new() -> Self {
        Self { rows: [MaybeUninit::uninit(); KEY_BLOCK] }
    }

    /// Entries `at .. at + n`: rows `stride` apart, which exist.
    pub(crate) fn fill<T>(&mut self, at: usize, n: usize, first: *const T, stride: isize) {
        for (i, row) in self.rows[at..at + n].iter_mut().enumerate() {
            row.write(first.wrapping_offset(i as isize * stride).cast());
        }
    }
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
    let squares = if keys.element == 1 { d / LANES * LANES } else { 0 };
    fill_panels(
        n,
        [d, squares],
        out,
        #[inline(always)]
        |[first, here], i, to| {
            // SAFETY: rows below `all`, elements `i .. i + 16`; room for a square.
            unsafe {
                ask_ahead(s, keys, [first, all], i);
                let row = |r: usize| keys.at(first + r.min(here - 1)).add(i);
                if T::DTYPE == Dtype::F32 {
                    s.transpose(core::array::from_fn(|r| row(r).cast()), to);
                } else {
                    let mut wide = [[0.0f32; LANES]; LANES];
                    for (r, wide) in wide.iter_mut().enumerate() {
                        s.store(wide.as_mut_ptr(), T::load(s, row(r)));
                    }
                    s.transpose(core::array::from_fn(|r| wide[r].as_ptr()), to);
                }
            }
        },
        #[inline(always)]
        // SAFETY: row `r < n`, element `i < d`.
        |r, i| unsafe { *keys.at(r).offset(i as isize * keys.element) }.widen(),
    );
}

/// Fills panels `[panel][depth][16]` with `n` rows: columns below `squares` by `square([first row, rows], column, to)`, sixteen
/// of sixteen rows at a time (a partial panel may hold anything beyond its rows: it is blanked afterwards), the others by
/// `element(row, column)`. What is beyond the last row becomes zeros.
#[inline(always)]
pub(crate) fn fill_panels<U: Copy + Default>(
    n: usize,
    [depth, squares]: [usize; 2],
    out: &mut [U],
    square: impl Fn([usize; 2], usize, *mut U),
    element: impl Fn(usize, usize) -> U,
) {
    assert!(out.len() >= n.next_multiple_of(LANES) * depth);
    for first in (0..n).step_by(LANES) {
        let here = LANES.min(n - first);
        let panel = &mut out[first * depth..][..LANES * depth];
        for i in (0..squares).step_by(LANES) {
            square([first, here], i, panel[i * LANES..][..LANES * LANES].as_mut_ptr());
        }
        for r in 0..here {
            for i in squares..depth {
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

/// The core does not foresee sixteen rows at a time: asks for the next panel's, from element `i` on, in the order they will
/// come.
///
/// # Safety
/// There are `all` rows.
#[inline(always)]
pub(crate) unsafe fn ask_ahead<S: Simd, T: Element>(s: S, keys: Rows<T>, [first, all]: [usize; 2], i: usize) {
    if first + LANES < all {
        for r in 0..LANES {
            // SAFETY: a row below `all`.
            let later = unsafe { keys.at((first + LANES + r).min(all - 1)) };
            s.prefetch_far(later.wrapping_add(i).cast());
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
    let (mut seen, mut rest) = (zero, 0.0f32);
    for j in 0..n {
        // SAFETY: the caller vouches for row `j < n`.
        let row = unsafe { values.at(j) };
        let whole = if values.element == 1 { cols / LANES * LANES } else { 0 };
        for i in (0..whole).step_by(LANES) {
            // SAFETY: `i + 16 ≤ cols`, contiguous.
            seen = s.fma(unsafe { T::load(s, row.add(i)) }, zero, seen);
        }
        for i in whole..cols {
            // SAFETY: `i < cols`.
            rest += unsafe { *row.offset(i as isize * values.element) }.widen() * 0.0;
        }
    }
    s.reduce_sum(seen) + rest == 0.0
}
