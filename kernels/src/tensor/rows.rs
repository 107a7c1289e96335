//! Rows of keys, values and queries: evenly spaced, or located by a table.

use core::mem::MaybeUninit;

/// Number of keys in a block. Blocks always start at multiples of this number. It affects the bits of results, so it is
/// one constant for every machine. 256 keys make the rescaling (`value_dim` multiplications and FMAs a row) less than 1
/// % of the block's work, and a row block's scores fit the second-level cache.
pub const KEY_BLOCK: usize = 256;

/// Length of the longest query, key or value. Sixteen keys of this length take a gigabyte of scratch; the limit keeps
/// sizes of scratch within 64 bits.
pub const MAX_DIM: usize = 1 << 24;

/// Rows of numbers in memory, elements `element` apart: rows at a fixed distance, or each at the address in a table.
pub(crate) struct Rows<T = f32> {
    /// Row 0; null with a table.
    first: *const T,
    /// Distance from one row to the next; with a table, within evenly spaced rows.
    step: isize,
    table: *const MaybeUninit<Entry>,
    /// With a table, offset added to its entries.
    shift: isize,
    pub(crate) element: isize,
}

// Not derived: a derive would require `T: Clone` and `T: Copy`.
impl<T> Clone for Rows<T> {
    #[inline(always)]
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Rows<T> {}

impl<T> Rows<T> {
    /// Makes rows; row `i` starts at `first + i·row`.
    #[inline]
    pub(crate) const fn strided(first: *const T, row: isize, element: isize) -> Self {
        Self { first, step: row, table: core::ptr::null(), shift: 0, element }
    }

    /// Makes rows; row `i` starts at the address in entry `i` of the table, which was filled with rows `row` apart.
    pub(crate) fn scattered(table: &Table, row: isize, element: isize) -> Self {
        Self { first: core::ptr::null(), step: row, table: table.rows.as_ptr(), shift: 0, element }
    }

    /// Returns the address of row `i`.
    ///
    /// # Safety
    /// Row `i` exists: with a table, entry `i` was filled, and the table is still there.
    #[inline(always)]
    pub(crate) unsafe fn at(self, i: usize) -> *const T {
        debug_assert!(if self.table.is_null() { !self.first.is_null() } else { i < KEY_BLOCK }, "no row {i}");
        // SAFETY: the caller guarantees that row `i` exists: with a table, that its entry was filled and the table is
        // alive.
        unsafe {
            if self.table.is_null() {
                self.first.offset(i as isize * self.step)
            } else {
                (*self.table.add(i)).assume_init().row.cast::<T>().offset(self.shift)
            }
        }
    }

    /// Returns the address of row `i`, to prefetch it, and how many rows from it on are evenly spaced. Without a table,
    /// `i` need not be below `n`: other rows may lie behind them.
    ///
    /// # Safety
    /// There are `n` rows.
    #[inline(always)]
    pub(crate) unsafe fn later(self, i: usize, n: usize) -> Option<(*const T, usize)> {
        if self.table.is_null() {
            return Some((self.first.wrapping_offset((i as isize).wrapping_mul(self.step)), usize::MAX));
        }
        // SAFETY: row `i` is below `n`, and the caller guarantees `n` rows.
        (i < n).then(|| unsafe { (self.at(i), self.evenly(i)) })
    }

    /// Returns the same rows as rows of another type.
    pub(crate) fn cast<U>(self) -> Rows<U> {
        const { assert!(size_of::<T>() == size_of::<U>()) }
        let Self { first, step, table, shift, element } = self;
        Rows { first: first.cast(), step, table, shift, element }
    }

    /// Returns the same rows as smaller elements: `n` have the size of one of these.
    pub(crate) fn elements<U>(self, n: isize) -> Rows<U> {
        const { assert!(size_of::<T>() >= size_of::<U>()) }
        let Self { first, step, table, shift, element } = self;
        Rows { first: first.cast(), step: n * step, table, shift: n * shift, element }
    }

    /// Returns true if the rows' addresses are in a table.
    #[inline(always)]
    pub(crate) fn are_scattered(self) -> bool {
        !self.table.is_null()
    }

    /// Returns the distance between rows, where they are evenly spaced.
    #[inline(always)]
    pub(crate) fn step(self) -> isize {
        self.step
    }

    /// Returns the bytes of an element.
    #[inline(always)]
    pub(crate) fn element_bytes(self) -> usize {
        size_of::<T>()
    }

    /// Returns the same rows, if there is a table; rows `step` apart, if not.
    #[inline]
    pub(crate) fn with_step(self, step: isize) -> Self {
        debug_assert!(self.table.is_null() || step == self.step, "evenly spaced rows of a table");
        Self { step, ..self }
    }

    /// Returns how many rows from row `i` on are evenly spaced.
    ///
    /// # Safety
    /// Row `i` exists: see [`Self::at`].
    #[inline(always)]
    pub(crate) unsafe fn evenly(self, i: usize) -> usize {
        // SAFETY: the caller guarantees that row `i` exists.
        if self.table.is_null() { usize::MAX } else { unsafe { (*self.table.add(i)).assume_init().together } }
    }

    /// Returns rows `i` and on.
    ///
    /// # Safety
    /// Row `i` exists.
    #[inline]
    pub(crate) unsafe fn rows_from(self, i: usize) -> Self {
        // SAFETY: the caller guarantees that row `i` exists.
        unsafe {
            if self.table.is_null() {
                Self { first: self.first.offset(i as isize * self.step), ..self }
            } else {
                Self { table: self.table.add(i), ..self }
            }
        }
    }

    /// Returns the same rows from element `i` on.
    ///
    /// # Safety
    /// The rows have an element `i`.
    #[inline]
    pub(crate) unsafe fn columns_from(self, i: usize) -> Self {
        let shift = i as isize * self.element;
        if self.table.is_null() {
            // SAFETY: the caller guarantees that the rows have an element `i`.
            Self { first: unsafe { self.first.offset(shift) }, ..self }
        } else {
            Self { shift: self.shift + shift, ..self }
        }
    }
}

/// Location of a row.
#[derive(Clone, Copy)]
struct Entry {
    row: *const (),
    /// Number of evenly spaced rows from this one on.
    together: usize,
}

/// Locations of the rows of a block, and a number for each: the scales of rows of bytes.
pub(crate) struct Table {
    rows: [MaybeUninit<Entry>; KEY_BLOCK],
    /// Apart from the rows: filling them leaves addresses of those alone.
    pub(crate) scales: Room<f32>,
}

/// Room for a number for each key of a block.
pub(crate) struct Room<T>([MaybeUninit<T>; KEY_BLOCK]);

impl Table {
    /// Makes a table without rows. It costs nothing: entries are written before they are read. (It uses a const block:
    /// an array of a value, or a constant table, is filled in, 3 % of a tiny call.)
    #[inline(always)]
    pub(crate) const fn new() -> Self {
        Self { rows: [const { MaybeUninit::uninit() }; KEY_BLOCK], scales: Room::new() }
    }

    /// Fills entries `at .. at + n`: existing rows, `stride` apart as everywhere in the table.
    pub(crate) fn fill<T>(&mut self, at: usize, n: usize, first: *const T, stride: isize) {
        for (i, row) in self.rows[at..at + n].iter_mut().enumerate() {
            row.write(Entry { row: first.wrapping_offset(i as isize * stride).cast(), together: n - i });
        }
    }
}

impl<T: Copy> Room<T> {
    /// Makes room that holds nothing yet.
    #[inline(always)]
    pub(crate) const fn new() -> Self {
        Self([const { MaybeUninit::uninit() }; KEY_BLOCK])
    }

    /// Stores numbers, at most a block's, and returns all of them.
    #[inline]
    pub(crate) fn fill(&mut self, numbers: impl Iterator<Item = T>) -> &[T] {
        let mut filled = 0;
        for number in numbers {
            self.0[filled].write(number);
            filled += 1;
        }
        self.first(filled)
    }

    /// Stores the numbers of several slices, one after the other, and returns all of them.
    #[inline]
    pub(crate) fn fill_slices<'a>(&mut self, slices: impl Iterator<Item = &'a [T]>) -> &[T]
    where
        T: 'a,
    {
        let mut filled = 0;
        for slice in slices {
            for (to, &number) in self.0[filled..][..slice.len()].iter_mut().zip(slice) {
                to.write(number);
            }
            filled += slice.len();
        }
        self.first(filled)
    }

    /// Returns the first numbers, which were stored.
    #[inline(always)]
    fn first(&self, filled: usize) -> &[T] {
        let numbers = &self.0[..filled];
        // SAFETY: the callers have written the first `filled`.
        unsafe { core::slice::from_raw_parts(numbers.as_ptr().cast(), filled) }
    }
}
