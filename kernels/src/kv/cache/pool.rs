//! Pool of pages that are packed like the blocks of a cache: a page is a small block.
//!
//! The caller's block tables say which page belongs to which sequence (`block_table.rs`).

use super::exact::ExactPage;
use super::scattered::Scattered;
use super::store::{KvFormat, Store};
use super::token_part::TokenPart;
use super::tokens::NewTokens;
use super::write::NewRows;
use crate::kv::block_table::{BlockTable, PageError};
use crate::kv::value_panels::ValueOrder;
use crate::simd::LANES;
use crate::simd::aligned::AlignedBuf;
use crate::simd::isa::Isa;
use crate::tensor::any::Tensor;
use core::ops::Range;

/// Keys and values in pages.
#[derive(Debug)]
pub struct PackedPool {
    pub(super) store: Store,
    pub(super) pages: usize,
    pub(super) memory: AlignedBuf,
    /// Exact rows of pages that a sequence begins with, if there are such.
    pub(super) exact: Vec<Option<ExactPage>>,
    /// Scratch: the pages that an append writes, and their sequences.
    pub(super) written: Vec<(u32, usize)>,
}

impl PackedPool {
    /// Makes a pool of pages of `page_size` keys, whole panels of 16: keys of `head_dim`, values of `value_dim` elements, all 0.
    /// `None` if there is no memory for them.
    ///
    /// # Panics
    /// If a page does not have whole panels, or a length is 0; for formats that [`Cache::with_format`] refuses.
    ///
    /// [`Cache::with_format`]: super::Cache::with_format
    pub fn new(
        [pages, page_size]: [usize; 2],
        kv_heads: usize,
        [head_dim, value_dim]: [usize; 2],
        format: KvFormat<'_>,
    ) -> Option<Self> {
        assert!(page_size > 0 && page_size.is_multiple_of(LANES), "pages of {page_size} keys");
        assert!(head_dim > 0 && value_dim > 0, "keys and values need a length");
        let mut store = Store::new(page_size, kv_heads, [head_dim, value_dim], format);
        // A table has one address for the rows of all panels of a page, which therefore must be equally wide.
        if !store.sizes.has_even_panels() {
            store.sizes.value_order = ValueOrder::Rows;
        }
        store.reserve_scratch();
        let floats = (store.sizes.bytes()? / size_of::<f32>()).checked_mul(pages)?;
        let exact = if format.exact_first > 0 { pages } else { 0 };
        let mut rows = Vec::new();
        rows.try_reserve_exact(exact).ok()?;
        rows.resize_with(exact, || None);
        Some(Self { store, pages, memory: AlignedBuf::try_new(floats)?, exact: rows, written: Vec::new() })
    }

    /// Number of pages.
    pub fn pages(&self) -> usize {
        self.pages
    }

    /// Number of keys of a page.
    pub fn page_size(&self) -> usize {
        self.store.sizes.rows
    }

    /// Number of key/value heads.
    pub fn kv_heads(&self) -> usize {
        self.store.sizes.kv_heads
    }

    /// Numbers of elements of a key and of a value.
    pub fn dims(&self) -> [usize; 2] {
        [self.store.sizes.head_dim, self.store.sizes.value_dim]
    }

    /// Returns the format of its elements.
    pub fn format(&self) -> KvFormat<'_> {
        self.store.format()
    }

    /// Returns the sizes and the format of what is stored.
    #[inline]
    pub(crate) fn store(&self) -> &Store {
        &self.store
    }

    /// Number of bytes held.
    pub fn bytes(&self) -> usize {
        let exact = self.exact.iter().flatten().map(|page| page.rows.bytes());
        self.memory.bytes() + exact.sum::<usize>()
    }

    /// Appends tokens of head-first tensors `[_, kv_heads, _, dim]` to sequences of a table; its lengths count them already: they
    /// are the last tokens of each sequence. Appends nothing if the table does not fit, or if `contents`, which is called next,
    /// refuses the elements.
    ///
    /// # Errors
    /// [`PageError`] if the table does not fit the pool, a sequence has fewer keys than new tokens, or two would append to
    /// the same page; the error of `contents`.
    ///
    /// # Panics
    /// If the tensors do not fit the pool or have fewer rows. Tokens for an int8 or int4 pool must be finite, or scores and
    /// outputs are wrong.
    pub fn append<E: From<PageError>>(
        &mut self,
        isa: Isa,
        table: BlockTable<'_>,
        [k, v]: [Tensor<'_>; 2],
        tokens: impl Iterator<Item = NewTokens> + Clone,
        contents: impl FnOnce(&mut Self) -> Result<(), E>,
    ) -> Result<(), E> {
        let width = table.checked(self.pages, self.store.sizes.rows)?;
        self.check_new(table, width, tokens.clone())?;
        contents(self)?;
        let (sizes, size) = (self.store.sizes, self.store.sizes.rows);
        for NewTokens { sequence, b, rows } in tokens {
            let mut at = table.lens[sequence].checked_sub(rows.len()).expect("checked above");
            let mut next = rows.start;
            while next < rows.end {
                let (page, row) = (table.entries[sequence * width + at / size], at % size);
                let here = (rows.end - next).min(size - row);
                if sizes.exact > 0 {
                    let new = NewRows { sizes, row, k, v: Some(v), b, rows: next..next + here };
                    self.write_exact(isa, page as usize, at, new);
                }
                let new = NewRows { sizes, row, k, v: Some(v), b, rows: next..next + here };
                let at_page = self.place(page as usize);
                new.write(isa, &mut self.memory.floats_mut()[at_page], self.store.int8.as_mut());
                (next, at) = (next + here, at + here);
            }
        }
        Ok(())
    }

    /// Refuses appends of two sequences to one page, and sequences shorter than their new tokens.
    fn check_new(
        &mut self,
        table: BlockTable<'_>,
        width: usize,
        tokens: impl Iterator<Item = NewTokens>,
    ) -> Result<(), PageError> {
        self.written.clear();
        for NewTokens { sequence, rows, .. } in tokens.filter(|tokens| !tokens.rows.is_empty()) {
            let (len, new) = (table.lens[sequence], rows.len());
            let Some(first) = len.checked_sub(new) else { return Err(PageError::New { sequence, len, new }) };
            let pages = first / self.store.sizes.rows..len.div_ceil(self.store.sizes.rows);
            let entries = &table.entries[sequence * width..][pages];
            self.written.extend(entries.iter().map(|&page| (page, sequence)));
        }
        self.written.sort_unstable();
        match self.written.windows(2).find(|pair| pair[0].0 == pair[1].0) {
            Some(&[(page, a), (_, b)]) => Err(PageError::Shared { page, sequences: [a, b] }),
            _ => Ok(()),
        }
    }

    /// Copies a page over another one. Its exact rows too, if the other has [memory](Self::reserve_exact) for them.
    ///
    /// # Panics
    /// If the pool has no such pages.
    pub fn copy(&mut self, from: usize, to: usize) {
        let places = [from, to].map(|page| self.place(page));
        self.memory.floats_mut().copy_within(places[0].clone(), places[1].start);
        if from != to && !self.exact.is_empty() {
            self.copy_exact(from, to);
        }
    }

    /// Returns the place of a page in memory, in floats.
    ///
    /// # Panics
    /// If the pool has no such page.
    #[inline]
    pub(super) fn place(&self, page: usize) -> Range<usize> {
        assert!(page < self.pages, "page {page} of {}", self.pages);
        let floats = self.store.sizes.floats();
        page * floats..(page + 1) * floats
    }

    #[inline]
    pub(super) fn page(&self, page: usize) -> &[f32] {
        &self.memory.floats()[self.place(page)]
    }

    /// Calls `f(address, bytes)` for the memory of some rows of a page in a head.
    pub(crate) fn memory_of(
        &self,
        part: TokenPart,
        [page, head]: [usize; 2],
        rows: Range<usize>,
        f: &mut impl FnMut(*const u8, usize),
    ) {
        self.store.sizes.memory_of(part, self.page(page), head, rows, f);
    }

    /// Number of floats of room that keys of several pages are gathered in; `None` if it overflows.
    pub(crate) fn gathered_floats(&self) -> Option<usize> {
        self.store.sizes.gathered()
    }

    /// Returns the pages that keys and values of several are read from.
    pub(crate) fn scattered<'p>(&'p self) -> Scattered<impl Fn(usize) -> (&'p [f32], usize)> {
        let rows = self.page_size();
        Scattered::new(self.store.sizes, move |page| (self.page(page), rows))
    }

    /// Returns some elements of key or value `[page, head, row]`, widened. The page has the row.
    pub(crate) fn elements(
        &self,
        part: TokenPart,
        [page, head, row]: [usize; 3],
        of: Range<usize>,
    ) -> Option<Vec<f32>> {
        self.store.elements(part, (self.page(page), self.page_size()), [head, row], of)
    }

    /// Returns some elements of exact key or value `[page, head, row]`, if it has been written as one of the first of a sequence.
    pub(crate) fn exact_elements(
        &self,
        part: TokenPart,
        [page, head, row]: [usize; 3],
        of: Range<usize>,
    ) -> Option<Vec<f32>> {
        let rows = (head < self.kv_heads()).then(|| self.exact_rows([page, head], row + 1))?;
        self.store.sizes.exact_elements(part, rows.filter(|rows| rows.tokens > row)?, row, of)
    }
}
