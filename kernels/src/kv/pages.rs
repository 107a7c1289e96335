//! Keys and values in pages of the caller's: a pool, and a table that says which pages a sequence has.
//! (Kwon and others 2023, arXiv:2309.06180.)

use crate::tensor::any::{AnyRows, Tensor, Typed};
use crate::tensor::rows::{Rows, Table};
use crate::tensor::view::View;
use core::fmt;

/// Which pages the sequences of a call have, in order: `lens.len()` rows of equally many entries, of which a sequence uses
/// as many as its length needs. Pages may be shared, and come in any order.
#[derive(Debug, Clone, Copy)]
pub struct BlockTable<'a> {
    /// Page numbers, `[sequence][entry]`.
    pub entries: &'a [u32],
    /// Keys of each sequence.
    pub lens: &'a [usize],
}

/// What is wrong with a block table or the pool it is for.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum PageError {
    /// The pools of keys and values differ in a size: `pages`, `heads` or `page size`.
    Pools {
        /// Which size.
        what: &'static str,
        /// Of the keys.
        keys: usize,
        /// Of the values.
        values: usize,
    },
    /// The number of entries is not a multiple of the number of sequences.
    Entries {
        /// Entries there are.
        entries: usize,
        /// Sequences there are.
        sequences: usize,
    },
    /// A sequence has more keys than its entries have room for.
    Length {
        /// The sequence.
        sequence: usize,
        /// Its length.
        len: usize,
        /// Its entries.
        entries: usize,
        /// Keys of a page.
        page_size: usize,
    },
    /// A sequence has more keys than positions can count, `isize::MAX`.
    TooLong {
        /// The sequence.
        sequence: usize,
        /// Its length.
        len: usize,
    },
    /// An entry that a sequence uses is no page of the pool.
    Page {
        /// The sequence.
        sequence: usize,
        /// Which of its entries.
        entry: usize,
        /// The page it names.
        page: u32,
        /// Pages there are.
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

/// Pools of keys `[pages, kv_heads, page size, head_dim]` and values `[pages, kv_heads, page size, value_dim]`, and a table
/// that has been checked against them.
#[derive(Debug, Clone, Copy)]
pub struct Pages<'a> {
    pub(crate) k: Tensor<'a>,
    pub(crate) v: Tensor<'a>,
    table: BlockTable<'a>,
    /// Entries of a sequence.
    width: usize,
    longest: usize,
}

impl<'a> Pages<'a> {
    /// Checks every entry that is used.
    ///
    /// # Errors
    /// [`PageError`].
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

    /// Shapes of keys and values as seen by a call.
    pub(crate) fn shapes(&self) -> [[usize; 4]; 2] {
        [self.k, self.v].map(|pool| {
            let [_, heads, _, dim] = pool.shape();
            [self.table.lens.len(), heads, self.longest, dim]
        })
    }

    /// Keys of each sequence.
    pub fn lens(&self) -> &'a [usize] {
        self.table.lens
    }

    /// Keys of a page.
    pub fn page_size(&self) -> usize {
        self.k.shape()[2]
    }

    /// An element of one of the two pools.
    pub(crate) fn element(&self, pool: &Tensor<'_>, [b, h, j, d]: [usize; 4]) -> Option<f32> {
        if j >= *self.table.lens.get(b)? {
            return None;
        }
        let page = self.table.entries[b * self.width + j / self.page_size()];
        pool.get([page as usize, h, j % self.page_size(), d])
    }

    /// Rows of one of the two pools.
    ///
    /// # Safety
    /// As for `KeyValues::keys`; `pool` is one of the two.
    pub(crate) unsafe fn rows(&self, pool: &Tensor<'_>, at: [usize; 3], len: usize, table: &mut Table) -> AnyRows {
        // SAFETY: passed on.
        by_type!(Tensor => Typed, pool, |pool| unsafe { self.rows_of(pool, at, len, table) })
    }

    /// # Safety
    /// As for [`Self::rows`].
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
