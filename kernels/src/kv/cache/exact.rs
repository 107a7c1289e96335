//! First tokens of a sequence, kept exact beside their integers: softmax puts much weight on them (attention sinks: Xiao, Tian, Chen,
//! Han and Lewis 2023, arXiv:2309.17453), so their errors are everybody's.
//!
//! A sequence, or the first page of one, has for each head its exact keys, then its exact values, each a row of floats in whole
//! vectors. Keys are in the basis of their channels, values in that of the stored values, which outputs are brought back from. Only
//! what is stored as integers has exact rows.

use super::Cache;
use super::blocks::is_shared;
use super::layout::{Format, Sizes};
use super::pool::{ExactPage, PackedPool};
use super::store::Store;
use super::tokens::{NewTokens, TokenPart};
use super::write::NewRows;
use crate::kv::block_table::BlockTable;
use crate::matmul::hadamard::Basis;
use crate::simd::LANES;
use crate::simd::aligned::{AlignedBuf, elements, elements_mut};
use crate::simd::isa::Isa;
use crate::simd::portable::Portable;
use core::ops::Range;
use std::sync::Arc;

/// Largest number of exact tokens of a sequence: the first page of a pool has them all.
pub const MAX_EXACT: usize = LANES;

/// Exact keys and values of a head, of the first tokens of a sequence. Rows have whole vectors, with zeros behind their elements.
#[derive(Clone, Copy)]
pub(crate) struct ExactRows<'a> {
    /// Number of tokens.
    pub(crate) tokens: usize,
    /// Keys, if they are stored as integers.
    pub(crate) keys: Option<&'a [f32]>,
    /// Values, if they are stored as integers.
    pub(crate) values: Option<&'a [f32]>,
}

impl Sizes {
    /// Returns the number of floats of an exact key, and of an exact value; 0 for what is stored as floats.
    fn exact_widths(self) -> [usize; 2] {
        [(self.keys, self.head_dim), (self.values, self.value_dim)].map(|(format, dim)| match format {
            Format::Elements(_) | Format::E4m3 => 0,
            _ => dim.next_multiple_of(LANES),
        })
    }

    /// Returns the number of floats of the exact rows of all heads.
    pub(super) fn exact_floats(self) -> usize {
        self.kv_heads * self.exact * self.exact_widths().iter().sum::<usize>()
    }

    /// Returns the place of a row of a head among the exact rows.
    pub(super) fn exact_row(self, part: TokenPart, [head, token]: [usize; 2]) -> Range<usize> {
        let [key, value] = self.exact_widths();
        let head = head * self.exact * (key + value);
        let (first, width) = if part.is_of_key() { (head, key) } else { (head + self.exact * key, value) };
        // Without exact tokens, no row has a float.
        if token < self.exact { first + token * width..first + (token + 1) * width } else { first..first }
    }

    /// Returns the first `tokens` exact rows of a head, if it has any.
    pub(super) fn exact_rows(self, rows: &[f32], head: usize, tokens: usize) -> Option<ExactRows<'_>> {
        let tokens = tokens.min(self.exact);
        let [keys, values] = [(0, TokenPart::ExactKey), (1, TokenPart::ExactValue)].map(|(n, part)| {
            let width = self.exact_widths()[n];
            (width > 0 && tokens > 0).then(|| &rows[self.exact_row(part, [head, 0]).start..][..tokens * width])
        });
        (tokens > 0).then_some(ExactRows { tokens, keys, values })
    }

    /// Copies the exact rows of a token over those of another.
    pub(super) fn copy_exact(self, rows: &mut [f32], [to, from]: [usize; 2]) {
        let parts = [TokenPart::Key, TokenPart::Value];
        for (head, part) in (0..self.kv_heads).flat_map(|head| parts.map(|part| (head, part))) {
            rows.copy_within(self.exact_row(part, [head, from]), self.exact_row(part, [head, to]).start);
        }
    }
}

impl Store {
    /// Makes exact rows of a token of the elements that are stored for it: `stored` returns those of a head's key or value, in the
    /// basis of their channels.
    pub(super) fn fill_exact(&self, rows: &mut [f32], token: usize, stored: impl Fn(TokenPart, usize) -> Vec<f32>) {
        let sizes = self.sizes;
        for head in 0..sizes.kv_heads {
            for (part, basis) in [(TokenPart::Key, Basis::Channels), (TokenPart::Value, sizes.value_basis)] {
                let place = sizes.exact_row(part, [head, token]);
                if !place.is_empty() {
                    let mut row = stored(part, head);
                    basis.transform(Portable, &mut row);
                    rows[place][..row.len()].copy_from_slice(&row);
                }
            }
        }
    }

    /// Returns some elements of a head's exact key or value `token`, in the basis of the channels. `None` if that is not exact, or has
    /// no such elements.
    pub(super) fn exact_elements(
        &self,
        part: TokenPart,
        rows: ExactRows<'_>,
        token: usize,
        of: Range<usize>,
    ) -> Option<Vec<f32>> {
        let Sizes { head_dim, value_dim, value_basis, .. } = self.sizes;
        let (dim, basis, rows, tokens) = match part {
            TokenPart::Key => (head_dim, Basis::Channels, rows.keys?, rows.tokens),
            _ => (value_dim, value_basis, rows.values?, rows.tokens),
        };
        let mut row = rows.chunks_exact(rows.len() / tokens).nth(token)?[..dim].to_vec();
        basis.transform(Portable, &mut row);
        row.get(of).map(<[f32]>::to_vec)
    }
}

impl Cache {
    /// Returns true if a write to the first tokens of a sequence takes new memory for their exact rows.
    pub(super) fn lacks_exact(&self, sequence: usize) -> bool {
        self.store.sizes.exact > 0 && self.exact[sequence].as_ref().is_none_or(is_shared)
    }

    /// Returns the exact rows of a sequence to write to: its own, taken from the spare ones unless it has them.
    pub(super) fn exact_mut(&mut self, sequence: usize) -> &mut [f32] {
        if self.lacks_exact(sequence) {
            let floats = self.store.sizes.exact_floats();
            let fresh = || Arc::new(AlignedBuf::try_new(floats).expect("memory for exact rows"));
            let mut own = self.spare.pop_exact().unwrap_or_else(fresh);
            let to = Arc::get_mut(&mut own).expect("spare rows have one owner").floats_mut();
            match &self.exact[sequence] {
                Some(shared) => to[..floats].copy_from_slice(&shared.floats()[..floats]),
                None => to.fill(0.0),
            }
            self.exact[sequence] = Some(own);
        }
        let rows = self.exact[sequence].as_mut().expect("just made");
        Arc::get_mut(rows).expect("the rows have one owner").floats_mut()
    }

    /// Returns the exact rows of a head of a sequence, if it has any.
    #[inline]
    pub(crate) fn exact_rows(&self, sequence: usize, head: usize) -> Option<ExactRows<'_>> {
        let rows = self.exact[sequence].as_ref()?;
        self.store.sizes.exact_rows(rows.floats(), head, self.lens[sequence])
    }

    /// Moves the exact rows of a token that moves, or makes them of what is stored of it.
    pub(super) fn move_exact(&mut self, sequence: usize, [to, from]: [usize; 2]) {
        let sizes = self.store.sizes;
        if to >= sizes.exact {
            return;
        }
        self.exact_mut(sequence);
        let mut rows = self.exact[sequence].take().expect("just made");
        let own = Arc::get_mut(&mut rows).expect("the rows have one owner").floats_mut();
        if from < sizes.exact {
            sizes.copy_exact(own, [to, from]);
        } else {
            self.store.fill_exact(own, to, |part, head| {
                let dim = if part == TokenPart::Key { sizes.head_dim } else { sizes.value_dim };
                self.elements(part, [sequence, head, from], 0..dim).expect("the token is held")
            });
        }
        self.exact[sequence] = Some(rows);
    }
}

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

    /// Writes the exact rows of new tokens of a page, of which the first is token `at` of its sequence. Other tokens of a page end those
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
                let mut rows = vec![0.0; sizes.exact_floats()];
                self.store.fill_exact(&mut rows, 0, |part, head| self.stored([page, head, row], part));
                to.copy_from_slice(&elements(&rows[sizes.exact_row(part, [head, 0])])[..to.len()]);
            }
        }
    }

    /// Returns key or value `[page, head, row]` as its integers say.
    fn stored(&self, at: [usize; 3], part: TokenPart) -> Vec<f32> {
        let [head_dim, value_dim] = self.dims();
        let dim = if part.is_of_key() { head_dim } else { value_dim };
        self.elements(part, at, 0..dim).expect("the token is held")
    }

    /// Writes the exact key or value `[page, head, row]`, rows in order.
    pub(super) fn import_exact(&mut self, part: TokenPart, [page, head, row]: [usize; 3], from: &[u8]) {
        let exact = self.exact[page].as_mut().expect("reserved");
        let place = self.store.sizes.exact_row(part, [head, row]);
        elements_mut(&mut exact.rows.floats_mut()[place])[..from.len()].copy_from_slice(from);
        exact.tokens = exact.tokens.max(row + 1);
    }

    /// Copies the exact rows of a page to those of another. If that has no memory for them, it has none.
    pub(super) fn copy_exact(&mut self, from: usize, to: usize) {
        let floats = self.store.sizes.exact_floats();
        let [from, to] = self.exact.get_disjoint_mut([from, to]).expect("two pages");
        match (from, to) {
            (Some(from), Some(to)) => {
                to.rows.floats_mut()[..floats].copy_from_slice(&from.rows.floats()[..floats]);
                to.tokens = from.tokens;
            }
            (_, to) => *to = None,
        }
    }

    /// Moves the exact rows of a token of a page to another row and page, if it has such, or makes them of what is stored.
    pub(super) fn move_exact(&mut self, [to_page, from_page]: [usize; 2], [to, from]: [usize; 2], exact: bool) {
        let (sizes, Some(mut page)) = (self.store.sizes, self.exact[to_page].take_if(|page| to < page.tokens)) else {
            return;
        };
        if to_page == from_page && exact && from < page.tokens {
            sizes.copy_exact(page.rows.floats_mut(), [to, from]);
        } else {
            self.store.fill_exact(page.rows.floats_mut(), to, |part, head| self.stored([from_page, head, from], part));
        }
        self.exact[to_page] = Some(page);
    }
}
