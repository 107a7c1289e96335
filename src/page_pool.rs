//! Page pool: keys and values in pages that are packed like the blocks of a cache.

#[cfg(feature = "safetensors")]
mod file;

use crate::cache::{check_accepted, check_elements, check_format, check_tokens, widened_codes};
use crate::error::{Error, at_most, same};
use crate::shape::KvShape;
use sdpa_kernels::{
    BlockTable, Bound, CacheFormat, Isa, KvFormat, NewTokens, PackedPool, PageError, Pages, Tensor, View,
};

/// Keys and values of one layer in pages, for servers that allocate memory page by page. Keys are packed when they are
/// appended, so a decode step reads them as fast as those of a [`KvCache`](crate::KvCache). (Keys of your own pool, in
/// [`Pages`], are packed anew in every call.)
///
/// You say which page belongs to which sequence, in a [`BlockTable`]: pages come in any order, and sequences that begin
/// alike may share them; a decode step reads shared blocks of 256 keys once. Before two sequences append separately to
/// one page, copy it ([`Self::copy_pages`]). Appending takes a table, too: it writes where the table says, even over
/// keys of another table. Pages hold zeros before they are written.
///
/// All pages are allocated when the pool is made. Later an append allocates only scratch, if it has more tokens than
/// any before, and the exact first tokens of a sequence (`exact_first` of a [`KvFormat`]), once for each page that one begins with.
///
/// ```
/// use sdpa::{Alignment, Attention, BlockTable, CacheFormat, Dtype, Inputs, KvShape, Outputs, PagePool, View, ViewMut};
/// // 100 pages of 16 keys; two key/value heads of eight
/// let shape = KvShape { kv_heads: 2, head_dim: 8, value_dim: 8 };
/// let mut pool = PagePool::new(100, 16, shape, CacheFormat::Elements(Dtype::F32))?;
/// // A prompt of 20 tokens in pages 7 and 3. The lengths of the table count them already.
/// let prompt = BlockTable { entries: &[7, 3], lens: &[20] };
/// let kv = vec![0.5; 2 * 20 * 8];
/// let kv = View::bhld(&kv, [1, 2, 20, 8])?;
/// pool.append(prompt, kv, kv)?;
/// // A step: one more token, then its row of four query heads against all keys.
/// let step = BlockTable { lens: &[21], ..prompt };
/// let (kv, q, mut out) = (vec![0.5; 2 * 8], vec![0.1; 4 * 8], vec![0.0; 4 * 8]);
/// let kv = View::bhld(&kv, [1, 2, 1, 8])?;
/// pool.append(step, kv, kv)?;
/// let inputs = Inputs::paged(View::bhld(&q, [1, 4, 1, 8])?, pool.pages(step)?);
/// let attention = Attention::new().causal().align(Alignment::BottomRight);
/// sdpa::attention(&attention, inputs, Outputs::new(ViewMut::bhld(&mut out, [1, 4, 1, 8])?))?;
/// assert!(out.iter().all(|&x| (x - 0.5).abs() < 1e-6));
/// # Ok::<(), sdpa::Error>(())
/// ```
#[derive(Debug)]
pub struct PagePool {
    pool: PackedPool,
    isa: Isa,
}

impl PagePool {
    /// Creates a pool of `pages` pages of `page_size` keys, a multiple of 16, for `kv_heads` key/value heads; `dims` is
    /// `[head_dim, value_dim]`. Formats are those of a cache, with the same accuracy: see
    /// [`KvCache::dtype`](crate::KvCache::dtype), [`KvCache::int8`](crate::KvCache::int8), [`KvCache::int4`](crate::KvCache::int4) and
    /// [`KvCache::with_format`](crate::KvCache::with_format). A [`CacheFormat`] alone is that of keys and values.
    ///
    /// ```
    /// use sdpa::{CacheFormat, KvShape, PagePool};
    /// let shape = KvShape { kv_heads: 8, head_dim: 128, value_dim: 128 };
    /// let pool = PagePool::new(1000, 16, shape, CacheFormat::Int8PerToken)?;
    /// assert_eq!((pool.page_count(), pool.page_size(), pool.shape()), (1000, 16, shape));
    /// # Ok::<(), sdpa::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Empty`] for a length of 0, [`Error::Range`] for lengths beyond the largest possible, [`Error::Mismatch`] for
    /// a number of channel scales that does not fit, [`Error::Number`] for a scale that is not positive and finite,
    /// [`Error::Pages`] for another page size, [`Error::Needs`] as for [`KvCache::with_format`](crate::KvCache::with_format),
    /// [`Error::TooLarge`], [`Error::Memory`].
    pub fn new<'f>(
        pages: usize,
        page_size: usize,
        shape: KvShape,
        format: impl Into<KvFormat<'f>>,
    ) -> Result<Self, Error> {
        let format = format.into();
        shape.check("page pool")?;
        let KvShape { kv_heads, head_dim, value_dim } = shape;
        if page_size == 0 || !page_size.is_multiple_of(16) {
            return Err(PageError::PageSize { page_size }.into());
        }
        check_format(format, shape, "the pool (kv_heads × head_dim)")?;
        let bytes = [format.keys, format.values].map(|format| match format {
            CacheFormat::Elements(dtype) => dtype.bytes(),
            _ => 1,
        });
        let pool = PackedPool::new([pages, page_size], kv_heads, shape.dims(), format);
        let sizes = [pages, page_size, kv_heads, head_dim + value_dim];
        let bytes = sizes.iter().try_fold(bytes[0].max(bytes[1]), |bytes, &size| bytes.checked_mul(size));
        let bytes = bytes.filter(|&bytes| bytes <= isize::MAX as usize);
        let bytes = bytes.ok_or(Error::TooLarge { what: "page pool", sizes })?;
        Ok(Self { pool: pool.ok_or(Error::Memory { what: "page pool", bytes })?, isa: Isa::detect() })
    }

    /// Number of pages.
    pub fn page_count(&self) -> usize {
        self.pool.pages()
    }

    /// Number of keys of a page.
    pub fn page_size(&self) -> usize {
        self.pool.page_size()
    }

    /// Sizes of the keys and values of a token.
    pub fn shape(&self) -> KvShape {
        let [head_dim, value_dim] = self.pool.dims();
        KvShape { kv_heads: self.pool.kv_heads(), head_dim, value_dim }
    }

    /// Format of keys and values.
    pub fn format(&self) -> KvFormat<'_> {
        self.pool.format()
    }

    /// Bytes held.
    pub fn bytes(&self) -> usize {
        self.pool.bytes()
    }

    /// Keys and values of the sequences of a table, for [`Inputs::paged`](crate::Inputs::paged).
    ///
    /// # Errors
    /// [`Error::Pages`] if the table does not fit the pool.
    pub fn pages<'a>(&'a self, table: BlockTable<'a>) -> Result<Pages<'a>, Error> {
        Ok(Pages::packed(&self.pool, table)?)
    }

    /// Appends `n` tokens to every sequence of a table; its lengths count them already. Keys `[sequences, kv_heads,
    /// n, head_dim]` and values `[sequences, kv_heads, n, value_dim]` become the last `n` of each.
    ///
    /// # Errors
    /// [`Error::Pages`] if the table does not fit the pool, a sequence is shorter than `n`, or two would write to one page;
    /// [`Error::Mismatch`] for shapes that do not fit; [`Error::Row`] as for [`KvCache::append`](crate::KvCache::append);
    /// [`Error::Memory`] for exact tokens. The pool is then unchanged.
    pub fn append<'t>(
        &mut self,
        table: BlockTable<'_>,
        k: impl Into<Tensor<'t>>,
        v: impl Into<Tensor<'t>>,
    ) -> Result<(), Error> {
        let (k, v) = (k.into(), v.into());
        same("k", "batch", k.shape()[0], table.lens.len(), "the block table")?;
        let rows = 0..k.shape()[2];
        let tokens = (0..table.lens.len()).map(|sequence| NewTokens { sequence, b: sequence, rows: rows.clone() });
        self.write(table, [k, v], tokens)
    }

    /// Appends tokens whose keys and values are E4M3 codes with the scales of this pool, as
    /// [`KvCache::append_codes`](crate::KvCache::append_codes) does: `n` to every sequence of a table, as [`Self::append`].
    ///
    /// # Errors
    /// [`Error::Needs`] unless keys and values have the format [`CacheFormat::E4m3PerHead`]; otherwise as [`Self::append`].
    pub fn append_codes(&mut self, table: BlockTable<'_>, k: View<'_, u8>, v: View<'_, u8>) -> Result<(), Error> {
        let [keys, values] = widened_codes(self.format(), (self.shape(), "the pool"), [k, v])?;
        self.append(table, View::bhld(&keys, k.shape())?, View::bhld(&values, v.shape())?)
    }

    /// Appends tokens of different numbers to the sequences of a table; its lengths count them already. Keys
    /// `[1, kv_heads, total, head_dim]` and values `[1, kv_heads, total, value_dim]`, laid end to end; rows
    /// `ends[i]..ends[i + 1]` are the last ones of sequence `i`, as in
    /// [`Inputs::ragged_queries`](crate::Inputs::ragged_queries).
    ///
    /// ```
    /// use sdpa::{BlockTable, CacheFormat, Dtype, KvShape, PagePool, View};
    /// let shape = KvShape { kv_heads: 1, head_dim: 2, value_dim: 2 };
    /// let mut pool = PagePool::new(8, 16, shape, CacheFormat::Elements(Dtype::Bf16))?;
    /// let rows = [0.5; 21 * 2]; // a prompt of 20 tokens, and one more token of a sequence that has 16
    /// let rows = View::bhld(&rows, [1, 1, 21, 2])?;
    /// pool.append_ragged(BlockTable { entries: &[0, 1, 5, 2], lens: &[20, 17] }, &[0, 20, 21], rows, rows)?;
    /// # Ok::<(), sdpa::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Self::append`]; [`Error::Mismatch`], [`Error::Empty`] or [`Error::Entry`] for ends that do not fit.
    pub fn append_ragged<'t>(
        &mut self,
        table: BlockTable<'_>,
        ends: &[usize],
        k: impl Into<Tensor<'t>>,
        v: impl Into<Tensor<'t>>,
    ) -> Result<(), Error> {
        let (k, v) = (k.into(), v.into());
        same("k", "batch", k.shape()[0], 1, "a ragged append")?;
        let parts = sdpa_kernels::cumulative("ends", ends, k.shape()[2])?;
        same("ends", "number of sequences", parts, table.lens.len(), "the block table")?;
        let tokens = ends.windows(2).enumerate();
        let tokens = tokens.map(|(sequence, at)| NewTokens { sequence, b: 0, rows: at[0]..at[1] });
        self.write(table, [k, v], tokens)
    }

    fn write(
        &mut self,
        table: BlockTable<'_>,
        [k, v]: [Tensor<'_>; 2],
        tokens: impl Iterator<Item = NewTokens> + Clone,
    ) -> Result<(), Error> {
        check_tokens(self.shape(), "the pool", [k.shape(), v.shape()])?;
        // What the tensors hold is looked at last: views may be huge, but not what the pool has pages for.
        let isa = self.isa;
        let first = tokens.clone();
        self.pool.append(isa, table, [k, v], tokens, |pool| {
            check_elements(pool.format(), isa, [k, v])?;
            if pool.reserve_first(table, first) {
                Ok(())
            } else {
                Err(Error::Memory { what: "page pool", bytes: pool.bytes() })
            }
        })
    }

    /// Keeps the first `from` tokens of a sequence of a table and, of the later ones, only the accepted, moved up, as
    /// [`KvCache::keep`](crate::KvCache::keep) does. The table's lengths count all of them; afterwards the sequence has `from +
    /// accepted.len()` tokens, and pages behind those are free.
    ///
    /// ```
    /// use sdpa::{BlockTable, CacheFormat, Dtype, KvShape, PagePool, View};
    /// let shape = KvShape { kv_heads: 1, head_dim: 2, value_dim: 2 };
    /// let mut pool = PagePool::new(8, 16, shape, CacheFormat::Elements(Dtype::Bf16))?;
    /// let rows = [0.5; 21 * 2]; // a prompt of 15 tokens, and a tree of six more
    /// let rows = View::bhld(&rows, [1, 1, 21, 2])?;
    /// let table = BlockTable { entries: &[4, 7], lens: &[21] };
    /// pool.append(table, rows, rows)?;
    /// pool.keep(table, 0, 15, &[1, 4])?; // one path of the tree was accepted
    /// let table = BlockTable { lens: &[17], ..table };
    /// # pool.pages(table)?;
    /// # Ok::<(), sdpa::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Pages`] if the table does not fit the pool, or a page that a token moves to belongs to another sequence of the
    /// table, too; [`Error::Range`] or [`Error::Empty`] if it has no such sequence; [`Error::Length`], [`Error::Range`] and
    /// [`Error::Entry`] as for a cache. The pool is then unchanged.
    pub fn keep(
        &mut self,
        table: BlockTable<'_>,
        sequence: usize,
        from: usize,
        accepted: &[usize],
    ) -> Result<(), Error> {
        let Some(last) = table.lens.len().checked_sub(1) else {
            return Err(Error::Empty { argument: "block table", what: "number of sequences" });
        };
        at_most("sequence", "index", sequence, last, "the last one of the block table")?;
        let len = table.lens[sequence];
        check_accepted(sequence, len, from, accepted)?;
        Ok(self.pool.keep(table, sequence, from, accepted)?)
    }

    /// Gives back the memory of all pages but the first `pages`, which a copy of these takes. Pages that are in use behind those
    /// are first copied to free ones: [`Self::copy_pages`].
    ///
    /// # Errors
    /// [`Error::Range`] if the pool has fewer pages, [`Error::Memory`]; the pool is then unchanged.
    pub fn shrink(&mut self, pages: usize) -> Result<(), Error> {
        at_most("page pool", "number of pages", pages, self.page_count(), "the pages that the pool has")?;
        let bytes = self.bytes() / self.page_count().max(1) * pages;
        if self.pool.shrink(pages) { Ok(()) } else { Err(Error::Memory { what: "page pool", bytes }) }
    }

    /// Copies pages, `[from, to]` each, in order: for sequences that share a page, before one of them appends to it.
    ///
    /// ```
    /// use sdpa::{BlockTable, CacheFormat, Dtype, KvShape, PagePool, View};
    /// let shape = KvShape { kv_heads: 1, head_dim: 2, value_dim: 2 };
    /// let mut pool = PagePool::new(8, 16, shape, CacheFormat::Elements(Dtype::Bf16))?;
    /// let row = [0.5; 2];
    /// let row = View::bhld(&row, [1, 1, 1, 2])?;
    /// pool.append(BlockTable { entries: &[3], lens: &[1] }, row, row)?;
    /// pool.copy_pages(&[[3, 6]])?; // two sequences go on from here: in page 3, and in page 6
    /// pool.append(BlockTable { entries: &[6], lens: &[2] }, row, row)?;
    /// # Ok::<(), sdpa::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Entry`] for a page that the pool does not have; [`Error::Memory`] for exact first tokens. Nothing is then copied.
    pub fn copy_pages(&mut self, copies: &[[u32; 2]]) -> Result<(), Error> {
        let pages = self.page_count();
        for (index, copy) in copies.iter().enumerate() {
            if let Some(&page) = copy.iter().find(|&&page| page as usize >= pages) {
                let (got, limit) = (page as usize, pages.saturating_sub(1));
                let (bound, of) = (Bound::AtMost, "the last page of the pool");
                return Err(Error::Entry { argument: "copies", index, got, bound, limit, of });
            }
        }
        for &[from, to] in copies {
            if self.pool.has_exact(from as usize) && !self.pool.reserve_exact(to as usize) {
                return Err(Error::Memory { what: "page pool", bytes: self.bytes() });
            }
        }
        copies.iter().for_each(|&[from, to]| self.pool.copy(from as usize, to as usize));
        Ok(())
    }
}
