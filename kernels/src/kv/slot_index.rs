//! Slots of a pool, and the positions that they are of a sequence.

use crate::kv::block_table::{BlockTable, PageError};

/// Pages of a sequence, by entry and by number: translates positions of the sequence to slots of the pool, and back.
///
/// A slot is a place for a key in a pool: slot = page · page size + offset in the page. Servers that keep keys in pages hand over
/// lists of slots; lists of selected keys name positions. An index is filled for a sequence, then translates any number of lists.
/// Filled again, it keeps its memory.
#[derive(Debug, Clone, Default)]
pub struct SlotIndex {
    sequence: usize,
    len: usize,
    page_size: usize,
    /// Page of each entry.
    pages: Vec<u32>,
    /// Each page and its entry, ascending.
    by_page: Vec<(u32, u32)>,
}

impl SlotIndex {
    /// Creates an index of a sequence without keys, to be filled.
    pub const fn new() -> Self {
        Self { sequence: 0, len: 0, page_size: 1, pages: Vec::new(), by_page: Vec::new() }
    }

    /// Takes in a sequence of a table; pages have `page_size` keys.
    ///
    /// Entries that the length does not need are not read. No number of pages is asked for: whether the pool has them, a call
    /// checks.
    ///
    /// Complexity: p log p for p pages; nothing is allocated if the index has had as many.
    ///
    /// # Errors
    /// [`PageError`] if the table has no such sequence, if its length exceeds its entries, or if a position or slot exceeds
    /// `i32`; the index is then empty.
    pub fn fill(&mut self, table: BlockTable<'_>, page_size: usize, sequence: usize) -> Result<(), PageError> {
        let Self { pages, by_page, .. } = self;
        pages.clear();
        by_page.clear();
        (self.sequence, self.len, self.page_size) = (sequence, 0, page_size);
        let (width, sequences) = (table.width()?, table.lens.len());
        if sequence >= sequences {
            return Err(PageError::Sequence { sequence, sequences });
        }
        let (used, len) = (table.used(sequence, width, page_size)?, table.lens[sequence]);
        let last_slot = used.iter().max().map_or(0, |&page| slot(page, page_size, page_size - 1));
        for (what, got) in [("position", len.saturating_sub(1)), ("slot", last_slot)] {
            if got > i32::MAX as usize {
                return Err(PageError::TooLarge { sequence, what, got });
            }
        }
        let memory = |_| PageError::Memory { entries: used.len() };
        pages.try_reserve(used.len()).map_err(memory)?;
        by_page.try_reserve(used.len()).map_err(memory)?;
        pages.extend_from_slice(used);
        by_page.extend(used.iter().copied().zip(0..));
        by_page.sort_unstable();
        self.len = len;
        Ok(())
    }

    /// Writes the slot of each position, in any order; −1 stays −1.
    ///
    /// Complexity: the positions. Nothing is allocated.
    ///
    /// # Errors
    /// [`PageError`] if the buffer has another length, or a position is below −1 or not below the length of the sequence; `slots`
    /// are then partly written.
    pub fn slots(&self, positions: &[i32], slots: &mut [i32]) -> Result<(), PageError> {
        translate(positions, slots, "slots", |place, got| {
            let position = usize::try_from(got).ok().filter(|&position| position < self.len);
            let position =
                position.ok_or(PageError::Position { sequence: self.sequence, place, got, len: self.len })?;
            Ok(slot(self.pages[position / self.page_size], self.page_size, position % self.page_size))
        })
    }

    /// Writes the position of each slot, in any order; −1 stays −1.
    ///
    /// Complexity: n log p for n slots and p pages. Nothing is allocated.
    ///
    /// # Errors
    /// [`PageError`] if the buffer has another length, or a slot is below −1, in a page that the sequence does not have, after its
    /// last key, or in a page that it has twice, so that the slot has two positions; `positions` are then partly written.
    pub fn positions(&self, slots: &[i32], positions: &mut [i32]) -> Result<(), PageError> {
        translate(slots, positions, "positions", |place, got| self.position(place, got))
    }

    /// Returns the position of the slot at a place of a list.
    fn position(&self, place: usize, got: i32) -> Result<usize, PageError> {
        let (sequence, len) = (self.sequence, self.len);
        let nowhere = PageError::Slot { sequence, place, got };
        // An empty sequence may have pages of size 0.
        let (Ok(slot), false) = (u32::try_from(got), self.by_page.is_empty()) else { return Err(nowhere) };
        let (page, offset) = (slot as usize / self.page_size, slot as usize % self.page_size);
        let first = self.by_page.partition_point(|&(known, _)| (known as usize) < page);
        let mut positions = self.by_page[first..]
            .iter()
            .take_while(|&&(known, _)| known as usize == page)
            .map(|&(_, entry)| entry as usize * self.page_size + offset);
        let position = positions.next().ok_or(nowhere)?;
        if position >= len {
            return Err(PageError::SlotBeyond { sequence, place, got, position, len });
        }
        match positions.next().filter(|&second| second < len) {
            Some(second) => Err(PageError::SlotTwice { sequence, place, got, positions: [position, second] }),
            None => Ok(position),
        }
    }
}

/// Returns the slot at an offset in a page; `usize::MAX` on overflow.
fn slot(page: u32, page_size: usize, offset: usize) -> usize {
    (page as usize).saturating_mul(page_size).saturating_add(offset)
}

/// Writes what each number becomes, by its place and itself, into the buffer for `what`. −1 stays; the others fit `i32`.
fn translate(
    from: &[i32],
    to: &mut [i32],
    what: &'static str,
    mut of: impl FnMut(usize, i32) -> Result<usize, PageError>,
) -> Result<(), PageError> {
    if to.len() != from.len() {
        return Err(PageError::Buffer { what, got: to.len(), expected: from.len() });
    }
    for (place, (&from, to)) in from.iter().zip(to).enumerate() {
        *to = if from == -1 { -1 } else { of(place, from)? as i32 };
    }
    Ok(())
}
