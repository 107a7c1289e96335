//! Rows of keys, values and queries, wherever they lie: at a fixed distance, or where a table says.

use core::mem::MaybeUninit;

/// Keys in a block. Blocks start at key multiples of this, always: it is part of what a result's bits mean, so it is
/// one constant for every machine. 256 keys make the fold (`value_dim` multiplications and FMAs a row) less than 1 %
/// of the block's work, and 48 rows of scores fit the second-level cache many times over; 128 measured 2–3 % slower.
pub const KEY_BLOCK: usize = 256;

/// Longest query, key or value. Sixteen keys of this length take a gigabyte of scratch; with it, no product of sizes
/// below can overflow.
pub const MAX_DIM: usize = 1 << 24;

/// Rows of numbers somewhere in memory, elements `element` apart: one after the other at a fixed distance, or each where a
/// table says.
pub(crate) struct Rows<T = f32> {
    /// Row 0; with a table, nothing.
    first: *const T,
    /// From one row to the next; with a table, where rows lie evenly.
    step: isize,
    table: *const MaybeUninit<Entry>,
    /// With a table, what to add to its entries.
    shift: isize,
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
    #[inline]
    pub(crate) const fn strided(first: *const T, row: isize, element: isize) -> Self {
        Self { first, step: row, table: core::ptr::null(), shift: 0, element }
    }

    /// Row `i` starts where entry `i` of the table says, which was filled with rows `row` apart.
    pub(crate) fn scattered(table: &Table, row: isize, element: isize) -> Self {
        Self { first: core::ptr::null(), step: row, table: table.rows.as_ptr(), shift: 0, element }
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
                (*self.table.add(i)).assume_init().row.cast::<T>().offset(self.shift)
            }
        }
    }

    /// Where row `i` is, to ask for it, and how many from it on lie evenly. Without a table it need not be one of the `n` there
    /// are: others may lie behind them.
    ///
    /// # Safety
    /// There are `n` rows.
    #[inline(always)]
    pub(crate) unsafe fn later(self, i: usize, n: usize) -> Option<(*const T, usize)> {
        if self.table.is_null() {
            return Some((self.first.wrapping_offset((i as isize).wrapping_mul(self.step)), usize::MAX));
        }
        // SAFETY: a row below `n`.
        (i < n).then(|| unsafe { (self.at(i), self.evenly(i)) })
    }

    /// The distance between rows, where they lie evenly.
    #[inline(always)]
    pub(crate) fn step(self) -> isize {
        self.step
    }

    /// How many rows from row `i` on lie evenly.
    ///
    /// # Safety
    /// Row `i` exists: see [`Self::at`].
    #[inline(always)]
    pub(crate) unsafe fn evenly(self, i: usize) -> usize {
        // SAFETY: the caller vouches for row `i`.
        if self.table.is_null() { usize::MAX } else { unsafe { (*self.table.add(i)).assume_init().together } }
    }

    /// Rows `i` and on.
    ///
    /// # Safety
    /// Row `i` exists.
    #[inline]
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
    #[inline]
    pub(crate) unsafe fn columns_from(self, i: usize) -> Self {
        let shift = i as isize * self.element;
        if self.table.is_null() {
            // SAFETY: the caller vouches for element `i`.
            Self { first: unsafe { self.first.offset(shift) }, ..self }
        } else {
            Self { shift: self.shift + shift, ..self }
        }
    }
}

/// Where a row lies.
#[derive(Clone, Copy)]
struct Entry {
    row: *const (),
    /// How many rows lie evenly from it on.
    together: usize,
}

/// Where each row of a block lies.
pub(crate) struct Table {
    rows: [MaybeUninit<Entry>; KEY_BLOCK],
}

impl Table {
    /// No rows yet. Costs nothing: entries are written before they are read. (By a constant block: an array of a value, or a
    /// constant table, is filled in, 3 % of a tiny call.)
    #[inline(always)]
    pub(crate) const fn new() -> Self {
        Self { rows: [const { MaybeUninit::uninit() }; KEY_BLOCK] }
    }

    /// Entries `at .. at + n`: rows `stride` apart, as all of the table's, which exist.
    pub(crate) fn fill<T>(&mut self, at: usize, n: usize, first: *const T, stride: isize) {
        for (i, row) in self.rows[at..at + n].iter_mut().enumerate() {
            row.write(Entry { row: first.wrapping_offset(i as isize * stride).cast(), together: n - i });
        }
    }
}
