//! Exact first tokens of the sequences of a pool: they lie beside the pages that sequences begin with.

use super::exact::{ExactPage, ExactRows};
use super::pool::PackedPool;
use super::token_part::TokenPart;
use super::tokens::NewTokens;
use super::write::NewRows;
use crate::kv::block_table::BlockTable;
use crate::simd::aligned::{AlignedBuf, elements, elements_mut};
use crate::simd::isa::Isa;

impl PackedPool {
    /// Allocates the exact rows of a page, unless it has such or the pool has none. Returns false if there is no memory.
    ///
    /// # Panics
    /// If the pool has no such page.
    #[must_use]
    pub fn reserve_exact(&mut self, page: usize) -> bool {
        if self.exact.is_empty() || self.exact[page].is_some() {
            return true;
        }
        let rows = AlignedBuf::try_new(self.store.sizes.exact_floats());
        self.exact[page] = rows.map(|rows| ExactPage { rows, tokens: 0 });
        self.exact[page].is_some()
    }

    /// Allocates the exact rows of the pages that sequences of a table begin with, if their first tokens are among new ones. Returns
    /// false if there is no memory.
    ///
    /// # Panics
    /// If the table does not fit the pool.
    #[must_use]
    pub fn reserve_first(&mut self, table: BlockTable<'_>, tokens: impl Iterator<Item = NewTokens>) -> bool {
        let width = table.entries.len().checked_div(table.lens.len()).unwrap_or(0);
        let mut new = tokens.filter(|tokens| !tokens.rows.is_empty());
        new.all(|NewTokens { sequence, rows, .. }| {
            let starts = table.lens[sequence] - rows.len() < self.store.sizes.exact;
            !starts || self.reserve_exact(table.entries[sequence * width] as usize)
        })
    }

    /// Returns true if a page has exact rows.
    pub fn has_exact(&self, page: usize) -> bool {
        self.exact.get(page).is_some_and(Option::is_some)
    }

    /// Writes the exact rows of new tokens of a page; the first of them is token `at` of its sequence. Other tokens of a page end those
    /// that are exact.
    pub(super) fn write_exact(&mut self, isa: Isa, page: usize, at: usize, new: NewRows<'_>) {
        let (row, end, most) = (new.row, new.row + new.rows.len(), self.store.sizes.exact);
        self.end_exact(page, row);
        if let Some(ExactPage { rows, tokens }) = &mut self.exact[page]
            && at == row
            && row == *tokens
            && row < most
        {
            new.write_exact(isa, rows.floats_mut());
            *tokens = end.min(most);
        }
    }

    /// Ends the exact rows of a page at one that is overwritten.
    pub(super) fn end_exact(&mut self, page: usize, row: usize) {
        if let Some(Some(exact)) = self.exact.get_mut(page) {
            exact.tokens = exact.tokens.min(row);
        }
    }

    /// Returns the exact rows of a head of a page, if it has any, of its first tokens.
    #[inline]
    pub(crate) fn exact_rows(&self, [page, head]: [usize; 2], tokens: usize) -> Option<ExactRows<'_>> {
        let exact = self.exact.get(page)?.as_ref()?;
        self.store.sizes.exact_rows(exact.rows.floats(), head, tokens.min(exact.tokens))
    }

    /// Copies the exact key or value `[page, head, row]`; of a row that was not written as one of the first of a sequence, that of its
    /// integers.
    pub(super) fn read_exact(&self, part: TokenPart, [page, head, row]: [usize; 3], to: &mut [u8]) {
        let sizes = self.store.sizes;
        match self.exact[page].as_ref().filter(|exact| row < exact.tokens) {
            Some(exact) => {
                let floats = &exact.rows.floats()[sizes.exact_row(part, [head, row])];
                to.copy_from_slice(&elements(floats)[..to.len()]);
            }
            None => {
                let row = sizes.rebase_exact(part, self.stored([page, head, row], part));
                to.copy_from_slice(elements(&row));
            }
        }
    }

    /// Returns key or value `[page, head, row]` as its integers say.
    fn stored(&self, at: [usize; 3], part: TokenPart) -> Vec<f32> {
        let (dim, _) = self.store.sizes.row_form(part);
        self.elements(part, at, 0..dim).expect("the token is held")
    }

    /// Writes the exact key or value `[page, head, row]`, rows in order.
    pub(super) fn import_exact(&mut self, part: TokenPart, [page, head, row]: [usize; 3], from: &[u8]) {
        let exact = self.exact[page].as_mut().expect("reserved");
        let place = self.store.sizes.exact_row(part, [head, row]);
        elements_mut(&mut exact.rows.floats_mut()[place])[..from.len()].copy_from_slice(from);
        exact.tokens = exact.tokens.max(row + 1);
    }

    /// Copies the exact rows of a page to those of another, if that has [memory](Self::reserve_exact) for them.
    pub(super) fn copy_exact(&mut self, from: usize, to: usize) {
        let floats = self.store.sizes.exact_floats();
        let [from, to] = self.exact.get_disjoint_mut([from, to]).expect("two pages");
        match (from, to) {
            (Some(from), Some(to)) => {
                to.rows.floats_mut()[..floats].copy_from_slice(&from.rows.floats()[..floats]);
                to.tokens = from.tokens;
            }
            (None, Some(to)) => to.tokens = 0,
            (_, None) => {}
        }
    }

    /// Moves the exact rows of a token of a page to another row and page, if it has such, or makes them of what is stored.
    pub(super) fn move_exact(&mut self, [to_page, from_page]: [usize; 2], [to, from]: [usize; 2]) {
        let sizes = self.store.sizes;
        let Some(page) = self.exact[to_page].as_mut().filter(|page| to < page.tokens) else { return };
        if to_page == from_page && from < page.tokens {
            return sizes.copy_exact(page.rows.floats_mut(), [to, from]);
        }
        for (head, part) in sizes.exact_parts() {
            let row = self.stored([from_page, head, from], part);
            let page = self.exact[to_page].as_mut().expect("it has exact rows");
            sizes.set_exact(page.rows.floats_mut(), part, [head, to], row);
        }
    }
}
