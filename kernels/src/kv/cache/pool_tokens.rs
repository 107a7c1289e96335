//! Stored tokens of a pool: moved within a sequence, read and written bit for bit; and memory given back.

use super::pool::PackedPool;
use super::token_part::TokenPart;
use super::tokens::moved;
use crate::kv::block_table::{BlockTable, PageError};
use crate::simd::aligned::{AlignedBuf, elements, elements_mut};
use core::ops::Range;

impl PackedPool {
    /// Moves tokens of a sequence of a table: token `from + accepted[i]` becomes token `from + i`, with its bits.
    ///
    /// # Errors
    /// [`PageError`] if the table does not fit the pool, or a page that is written belongs to another sequence of it, too.
    ///
    /// # Panics
    /// If `accepted` does not increase, or names a token that the sequence does not have.
    pub fn keep(
        &mut self,
        table: BlockTable<'_>,
        sequence: usize,
        from: usize,
        accepted: &[usize],
    ) -> Result<(), PageError> {
        let (width, size) = (table.checked(self.pages, self.store.sizes.rows)?, self.store.sizes.rows);
        let moved = moved(from, accepted);
        let row = |sequence: usize, keys: Range<usize>| {
            &table.entries[sequence * width..][keys.start / size..keys.end.div_ceil(size)]
        };
        for (other, &len) in table.lens.iter().enumerate().filter(|_| !moved.is_empty()) {
            let times = |page: &u32| row(other, 0..len).iter().filter(|&other| other == page).count();
            let allowed = usize::from(other == sequence);
            if let Some(&page) = row(sequence, moved.clone()).iter().find(|page| times(page) > allowed) {
                return Err(PageError::Shared { page, sequences: [sequence.min(other), sequence.max(other)] });
            }
        }
        let (sizes, bytes) = (self.store.sizes, self.store.sizes.floats() * size_of::<f32>());
        for (to, &token) in moved.clone().zip(&accepted[moved.start - from..]) {
            let at = [to, from + token];
            assert!(at[0] < at[1] && at[1] < table.lens[sequence], "token {token} behind {from}");
            let pages = at.map(|token| table.entries[sequence * width + token / size] as usize);
            let (rows, starts) = (at.map(|token| token % size), pages.map(|page| page * bytes));
            if at[0] < sizes.exact {
                self.move_exact(pages, rows);
            } else if at[0] >= size {
                self.end_exact(pages[0], rows[0]);
            }
            let memory = self.memory.elements_mut::<u8>();
            sizes.for_each_run(rows, |to, from| {
                memory.copy_within(starts[1] + from.start..starts[1] + from.end, starts[0] + to.start);
            });
        }
        Ok(())
    }

    /// Returns the number of elements of a part of a token in one head, and the bytes of each, as [`Cache::token_elements`]
    /// does.
    ///
    /// [`Cache::token_elements`]: super::Cache::token_elements
    pub fn token_elements(&self, part: TokenPart) -> [usize; 2] {
        self.store.sizes.elements(part)
    }

    /// Copies the elements of a part of token `[page, head, row]`. Exact ones of a row that was not written as one of the first of a
    /// sequence are those of its integers.
    ///
    /// # Panics
    /// If the pool has no such token.
    pub fn read_token(&self, part: TokenPart, [page, head, row]: [usize; 3], to: &mut [u8]) {
        if part.is_exact() {
            return self.read_exact(part, [page, head, row], to);
        }
        self.store.sizes.read_token(part, [head, row], elements(self.page(page)), to);
    }

    /// Writes the elements of a part of token `[page, head, row]`, as [`Cache::write_token`] does. There is
    /// [memory](Self::reserve_exact) for exact ones.
    ///
    /// # Panics
    /// If the pool has no such token.
    ///
    /// [`Cache::write_token`]: super::Cache::write_token
    pub fn write_token(&mut self, part: TokenPart, [page, head, row]: [usize; 3], from: &[u8]) {
        if part.is_exact() {
            return self.import_exact(part, [page, head, row], from);
        }
        self.end_exact(page, row);
        let at = self.place(page);
        self.store.sizes.write_token(part, [head, row], from, elements_mut(&mut self.memory.floats_mut()[at]));
    }

    /// Gives back the memory of all pages but the first `pages`. Returns false, and changes nothing, if there is no memory for
    /// a copy of those.
    ///
    /// # Panics
    /// If the pool has fewer.
    #[must_use]
    pub fn shrink(&mut self, pages: usize) -> bool {
        assert!(pages <= self.pages, "{pages} pages of {}", self.pages);
        let floats = pages * self.store.sizes.floats();
        let Some(mut memory) = AlignedBuf::try_new(floats) else { return false };
        memory.floats_mut()[..floats].copy_from_slice(&self.memory.floats()[..floats]);
        (self.memory, self.pages, self.written) = (memory, pages, Vec::new());
        self.exact.truncate(pages);
        true
    }
}
