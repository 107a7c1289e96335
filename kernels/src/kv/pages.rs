//! Keys and values in pages: a pool, the caller's own or a [`PackedPool`], and a table of the pages of each sequence.
//! (Kwon and others 2023, arXiv:2309.06180.)

use crate::kv::block_table::{BlockTable, PageError, Stretch};
use crate::kv::cache::{ExactRows, PackedPool, TokenPart};
use crate::kv::gathered::rows_memory;
use crate::kv::key_block::{BlockValues, Keys};
use crate::tensor::any::{AnyRows, Tensor, Typed};
use crate::tensor::element::Dtype;
use crate::tensor::rows::{KEY_BLOCK, Rows, Table};
use core::cmp::Ordering;
use core::ops::Range;

/// Keys and values in pages, and a table that has been checked against them.
#[derive(Debug, Clone, Copy)]
pub struct Pages<'a> {
    pool: Pool<'a>,
    table: BlockTable<'a>,
    /// Number of entries of a sequence.
    width: usize,
    longest: usize,
}

/// Keys and values of all pages.
#[derive(Debug, Clone, Copy)]
enum Pool<'a> {
    /// Keys `[pages, kv_heads, page size, head_dim]` and values `[pages, kv_heads, page size, value_dim]` of the caller.
    Tensors { k: Tensor<'a>, v: Tensor<'a> },
    /// Pages that are packed.
    Packed(&'a PackedPool),
}

impl<'a> Pages<'a> {
    /// Takes pools of keys `[pages, kv_heads, page size, head_dim]` and values `[pages, kv_heads, page size,
    /// value_dim]`, and checks every used entry.
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
        Self::of(Pool::Tensors { k, v }, [pages, page_size], table)
    }

    /// Takes a pool of packed pages, and checks every used entry.
    ///
    /// # Errors
    /// [`PageError`] if the table does not fit the pool.
    #[doc(hidden)] // for the pool of `sdpa`, which holds this one
    pub fn packed(pool: &'a PackedPool, table: BlockTable<'a>) -> Result<Self, PageError> {
        Self::of(Pool::Packed(pool), [pool.pages(), pool.page_size()], table)
    }

    fn of(pool: Pool<'a>, [pages, page_size]: [usize; 2], table: BlockTable<'a>) -> Result<Self, PageError> {
        let width = table.checked(pages, page_size)?;
        Ok(Self { pool, table, width, longest: table.lens.iter().copied().max().unwrap_or(0) })
    }

    /// Returns the shapes of keys and values in a call.
    pub(crate) fn shapes(&self) -> [[usize; 4]; 2] {
        self.dims().map(|dim| [self.table.lens.len(), self.kv_heads(), self.longest, dim])
    }

    /// Returns the lengths of a key and of a value.
    pub(crate) fn dims(&self) -> [usize; 2] {
        match &self.pool {
            Pool::Tensors { k, v } => [k, v].map(|x| x.shape()[3]),
            Pool::Packed(pool) => pool.dims(),
        }
    }

    /// Returns the number of key/value heads.
    #[inline]
    pub(crate) fn kv_heads(&self) -> usize {
        match &self.pool {
            Pool::Tensors { k, .. } => k.shape()[1],
            Pool::Packed(pool) => pool.kv_heads(),
        }
    }

    /// Returns the types of keys and of values; `None` for those of eight and four bits.
    pub(crate) fn dtypes(&self) -> [Option<Dtype>; 2] {
        match &self.pool {
            Pool::Tensors { k, v } => [k, v].map(|x| Some(x.dtype())),
            Pool::Packed(pool) => pool.format().dtypes(),
        }
    }

    /// Returns the pool, if its pages are packed.
    pub(crate) fn pool(&self) -> Option<&'a PackedPool> {
        if let Pool::Packed(pool) = self.pool { Some(pool) } else { None }
    }

    /// Returns true if keys of one head are stored beside the same keys of the other heads.
    pub(crate) fn has_heads_inside(&self) -> bool {
        match &self.pool {
            Pool::Tensors { k, .. } => k.has_heads_inside(),
            // Larger pages have the blocks of a head together.
            Pool::Packed(pool) => pool.page_size() <= KEY_BLOCK,
        }
    }

    /// Returns the number of keys of each sequence.
    pub fn lens(&self) -> &'a [usize] {
        self.table.lens
    }

    /// Returns the number of keys of a page.
    pub fn page_size(&self) -> usize {
        match &self.pool {
            Pool::Tensors { k, .. } => k.shape()[2],
            Pool::Packed(pool) => pool.page_size(),
        }
    }

    /// Compares two sequences by their entries for keys that both have.
    pub(crate) fn compare_entries(&self, sequences: [usize; 2], keys: Range<usize>) -> Ordering {
        let size = self.page_size();
        let [a, b] = sequences
            .map(|sequence| &self.table.entries[sequence * self.width..][keys.start / size..keys.end.div_ceil(size)]);
        a.cmp(b)
    }

    /// Returns some elements of key or value `[b, h, j]`, widened; `None` where there is none.
    pub(crate) fn elements(&self, part: TokenPart, [b, h, j]: [usize; 3], of: Range<usize>) -> Option<Vec<f32>> {
        if j >= *self.table.lens.get(b)? {
            return None;
        }
        let page = self.table.entries[b * self.width + j / self.page_size()];
        let at = [page as usize, h, j % self.page_size()];
        match &self.pool {
            Pool::Tensors { k, v } => if part == TokenPart::Key { k } else { v }.elements(at, of),
            Pool::Packed(pool) => {
                let exact = if j < self.page_size() { pool.exact_elements(part, at, of.clone()) } else { None };
                exact.or_else(|| pool.elements(part, at, of))
            }
        }
    }

    /// Returns the exact rows of a head of a sequence, if it has any.
    #[inline]
    pub(crate) fn exact_rows(&self, b: usize, head: usize) -> Option<ExactRows<'_>> {
        let (pool, len) = (self.pool()?, *self.table.lens.get(b)?);
        pool.exact_rows([*self.table.entries.get(b * self.width)? as usize, head], len)
    }

    /// Iterates over keys of a sequence, page by page. They exist.
    fn stretches(&self, sequence: usize, keys: Range<usize>) -> impl Iterator<Item = Stretch> + Clone {
        let (size, entries) = (self.page_size(), &self.table.entries[sequence * self.width..][..self.width]);
        let mut next = keys.start;
        core::iter::from_fn(move || {
            if next >= keys.end {
                return None;
            }
            let (page, row) = (entries[next / size] as usize, next % size);
            let len = (size - row).min(keys.end - next);
            next += len;
            Some(Stretch { page, row, len })
        })
    }

    /// Returns keys of a head.
    ///
    /// # Safety
    /// Same contract as `KeyValues::keys`.
    pub(crate) unsafe fn keys(&self, [b, h, first]: [usize; 3], len: usize, table: &mut Table) -> Keys {
        let stretches = self.stretches(b, first..first + len);
        match &self.pool {
            // SAFETY: the caller guarantees that the keys exist, so their entries were checked to be pages of the pool.
            Pool::Tensors { k, .. } => Keys::Rows(unsafe { scattered_rows(k, h, stretches, table) }),
            Pool::Packed(pool) => pool.scattered().keys(h, stretches, table),
        }
    }

    /// Returns values of a head.
    ///
    /// # Safety
    /// Same contract as [`Self::keys`].
    pub(crate) unsafe fn values(&self, [b, h, first]: [usize; 3], len: usize, table: &mut Table) -> BlockValues {
        let stretches = self.stretches(b, first..first + len);
        match &self.pool {
            Pool::Tensors { v, .. } => {
                // SAFETY: the caller guarantees that the keys exist, so their entries were checked to be pages of the
                // pool.
                BlockValues::Rows { rows: unsafe { scattered_rows(v, h, stretches, table) }, readable: v.shape()[3] }
            }
            Pool::Packed(pool) => pool.scattered().values(h, stretches, table),
        }
    }

    /// Calls `f(address, bytes)` for the memory of keys and values of a head, as `KeyValues::memory_of` does.
    pub(crate) fn memory_of(
        &self,
        part: TokenPart,
        [b, h]: [usize; 2],
        keys: Range<usize>,
        f: &mut impl FnMut(*const u8, usize),
    ) {
        for Stretch { page, row, len } in self.stretches(b, keys) {
            let rows = row..row + len;
            match &self.pool {
                Pool::Tensors { k, v } => rows_memory(if part == TokenPart::Key { k } else { v }, [page, h], rows, f),
                Pool::Packed(pool) => pool.memory_of(part, [page, h], rows, f),
            }
        }
    }

    /// Returns keys and values of a head from ranges of a sequence.
    ///
    /// # Safety
    /// Same contract as `KeyValues::listed`.
    pub(crate) unsafe fn listed(
        &self,
        [b, h]: [usize; 2],
        runs: impl Iterator<Item = (usize, usize)> + Clone,
        [key_table, value_table]: [&mut Table; 2],
        room: &mut [f32],
    ) -> (Keys, BlockValues) {
        let stretches = runs.flat_map(|(first, len)| self.stretches(b, first..first + len));
        match &self.pool {
            // SAFETY: the caller guarantees that the keys exist, so their entries were checked to be pages of the pool.
            Pool::Tensors { k, v } => unsafe {
                let rows = scattered_rows(v, h, stretches.clone(), value_table);
                let values = BlockValues::Rows { rows, readable: v.shape()[3] };
                (Keys::Rows(scattered_rows(k, h, stretches, key_table)), values)
            },
            Pool::Packed(pool) => pool.scattered().listed(h, stretches, [key_table, value_table], room),
        }
    }
}

/// Returns rows of a pool, or of any tensor whose sequences are then the pages.
///
/// # Safety
/// The stretches are in pages of the pool.
pub(crate) unsafe fn scattered_rows(
    pool: &Tensor<'_>,
    head: usize,
    stretches: impl Iterator<Item = Stretch>,
    table: &mut Table,
) -> AnyRows {
    by_type!(Tensor => Typed, pool, |pool| {
        let (stride, mut filled) = (pool.strides()[2], 0);
        for Stretch { page, row, len } in stretches {
            // SAFETY: the caller guarantees the page and its rows.
            let (at, _) = unsafe { pool.row(page, head, row) };
            table.fill(filled, len, at, stride);
            filled += len;
        }
        Rows::scattered(table, stride, pool.strides()[3])
    })
}
