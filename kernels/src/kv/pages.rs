//! Keys and values in the caller's pages: a pool, and a table of the pages of each sequence. (Kwon and others 2023,
//! arXiv:2309.06180.)

use crate::tensor::any::{AnyRows, Tensor, Typed};
use crate::tensor::rows::{Rows, Table};
use crate::tensor::view::View;
use core::cmp::Ordering;
use core::fmt;
use core::ops::Range;

/// Pages of the sequences of a call, in order: `lens.len()` rows of equally many entries, of which a sequence uses as
/// many as its length needs. Pages may be shared, and come in any order.
#[derive(Debug, Clone, Copy)]
pub struct BlockTable<'a> {
    /// Page numbers, `[sequence][entry]`.
    pub entries: &'a [u32],
    /// Number of keys of each sequence.
    pub lens: &'a [usize],
}

/// Error in a block table or the pool it is for.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum PageError {
    /// The pools of keys and values differ in a size: `pages`, `heads` or `page size`.
    Pools {
        /// Name of the size.
        what: &'static str,
        /// Size in the pool of keys.
        keys: usize,
        /// Size in the pool of values.
        values: usize,
    },
    /// The number of entries is not a multiple of the number of sequences.
    Entries {
        /// Number of entries.
        entries: usize,
        /// Number of sequences.
        sequences: usize,
    },
    /// A sequence has more keys than its entries have room for.
    Length {
        /// Index of the sequence.
        sequence: usize,
        /// Length of the sequence.
        len: usize,
        /// Number of entries of the sequence.
        entries: usize,
        /// Number of keys of a page.
        page_size: usize,
    },
    /// A sequence has more keys than positions can count, `isize::MAX`.
    TooLong {
        /// Index of the sequence.
        sequence: usize,
        /// Length of the sequence.
        len: usize,
    },
    /// An entry that a sequence uses is no page of the pool.
    Page {
        /// Index of the sequence.
        sequence: usize,
        /// Index of the entry in the sequence.
        entry: usize,
        /// Page number in the entry.
        page: u32,
        /// Number of pages in the pool.
        pages: usize,
    },
}

impl fmt::Display for PageError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Pools { what, keys, values } => {
                write!(f, "the pools differ in their {what}: {keys} for keys, {values} for values")
            }
            Self::Entries { entries, sequences } => {
                write!(f, "block table: {entries} entries cannot be shared out evenly over {sequences} sequences")
            }
            Self::Length { sequence, len, page_size: 0, .. } => {
                write!(f, "pages: the page size is 0, but sequence {sequence} of the block table has {len} keys")
            }
            Self::Length { sequence, len, entries, page_size } => write!(
                f,
                "block table: sequence {sequence} has {len} keys, but its {entries} entries of {page_size} have room for {}",
                entries.saturating_mul(*page_size)
            ),
            Self::TooLong { sequence, len } => {
                write!(f, "block table: sequence {sequence} has {len} keys, but positions end at {}", isize::MAX)
            }
            Self::Page { sequence, entry, page, pages } => write!(
                f,
                "block table: entry {entry} of sequence {sequence} is page {page}, but the pool has {pages} pages"
            ),
        }
    }
}

impl std::error::Error for PageError {}

/// Pools of keys `[pages, kv_heads, page size, head_dim]` and values `[pages, kv_heads, page size, value_dim]`, and a
/// table that has been checked against them.
#[derive(Debug, Clone, Copy)]
pub struct Pages<'a> {
    pub(crate) k: Tensor<'a>,
    pub(crate) v: Tensor<'a>,
    table: BlockTable<'a>,
    /// Number of entries of a sequence.
    width: usize,
    longest: usize,
}

impl<'a> Pages<'a> {
    /// Checks every entry that is used.
    ///
    /// # Errors
    /// [`PageError`] if the pools differ, or the table does not fit them.
    pub fn new(k: impl Into<Tensor<'a>>, v: impl Into<Tensor<'a>>, table: BlockTable<'a>) -> Result<Self, PageError> {
        let (k, v) = (k.into(), v.into());
        let ([pages, heads, page_size, _], [v_pages, v_heads, v_size, _]) = (k.shape(), v.shape());
        for (what, keys, values) in
            [("number of pages", pages, v_pages), ("heads", heads, v_heads), ("page size", page_size, v_size)]
        {
            if keys != values {
                return Err(PageError::Pools { what, keys, values });
            }
        }
        let (entries, sequences) = (table.entries.len(), table.lens.len());
        let width = entries.checked_div(sequences).unwrap_or(0);
        if width * sequences != entries {
            return Err(PageError::Entries { entries, sequences });
        }
        for (sequence, &len) in table.lens.iter().enumerate() {
            if len > width.saturating_mul(page_size) {
                return Err(PageError::Length { sequence, len, entries: width, page_size });
            }
            if len > isize::MAX as usize {
                return Err(PageError::TooLong { sequence, len });
            }
            // A length above 0 fits only pages of some size.
            let used = if len == 0 { 0 } else { len.div_ceil(page_size) };
            let row = &table.entries[sequence * width..][..used];
            if let Some((entry, &page)) = row.iter().enumerate().find(|&(_, &page)| page as usize >= pages) {
                return Err(PageError::Page { sequence, entry, page, pages });
            }
        }
        Ok(Self { k, v, table, width, longest: table.lens.iter().copied().max().unwrap_or(0) })
    }

    /// Returns the shapes of keys and values in a call.
    pub(crate) fn shapes(&self) -> [[usize; 4]; 2] {
        [self.k, self.v].map(|pool| {
            let [_, heads, _, dim] = pool.shape();
            [self.table.lens.len(), heads, self.longest, dim]
        })
    }

    /// Returns the number of keys of each sequence.
    pub fn lens(&self) -> &'a [usize] {
        self.table.lens
    }

    /// Returns the number of keys of a page.
    pub fn page_size(&self) -> usize {
        self.k.shape()[2]
    }

    /// Compares two sequences by the entries of keys that both have.
    pub(crate) fn compare_entries(&self, sequences: [usize; 2], keys: Range<usize>) -> Ordering {
        let size = self.page_size();
        let [a, b] = sequences
            .map(|sequence| &self.table.entries[sequence * self.width..][keys.start / size..keys.end.div_ceil(size)]);
        a.cmp(b)
    }

    /// Returns an element of one of the two pools.
    pub(crate) fn element(&self, pool: &Tensor<'_>, [b, h, j, d]: [usize; 4]) -> Option<f32> {
        if j >= *self.table.lens.get(b)? {
            return None;
        }
        let page = self.table.entries[b * self.width + j / self.page_size()];
        pool.get([page as usize, h, j % self.page_size(), d])
    }

    /// Returns rows of one of the two pools.
    ///
    /// # Safety
    /// Same contract as `KeyValues::keys`; `pool` is one of the two.
    pub(crate) unsafe fn rows(&self, pool: &Tensor<'_>, at: [usize; 3], len: usize, table: &mut Table) -> AnyRows {
        // SAFETY: same contract: the caller guarantees the rows, and that `pool` is one of the two.
        by_type!(Tensor => Typed, pool, |pool| unsafe { self.rows_of(pool, at, len, table) })
    }

    /// Returns rows of a pool of one element type.
    ///
    /// # Safety
    /// Same contract as [`Self::rows`].
    unsafe fn rows_of<T>(
        &self,
        pool: &View<'_, T>,
        [b, h, first]: [usize; 3],
        len: usize,
        table: &mut Table,
    ) -> Rows<T> {
        let (size, stride) = (self.page_size(), pool.strides()[2]);
        let entries = &self.table.entries[b * self.width..][..self.width];
        let (mut entry, mut row) = (first / size, first % size);
        let mut filled = 0;
        while filled < len {
            let here = (size - row).min(len - filled);
            // SAFETY: the entry is used by the sequence, so it was checked to be a page of the pool.
            let (at, _) = unsafe { pool.row(entries[entry] as usize, h, row) };
            table.fill(filled, here, at, stride);
            (filled, entry, row) = (filled + here, entry + 1, 0);
        }
        Rows::scattered(table, stride, pool.strides()[3])
    }
}
