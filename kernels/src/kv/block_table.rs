//! Block tables: which pages of a pool hold the keys of each sequence.

use core::fmt;

/// Pages of the sequences of a call. Every sequence has the same number of entries and uses the first ones, those that its length
/// needs. Pages may be shared, and come in any order.
#[derive(Debug, Clone, Copy)]
pub struct BlockTable<'a> {
    /// Page numbers, `[sequence][entry]`.
    pub entries: &'a [u32],
    /// Number of keys of each sequence.
    pub lens: &'a [usize],
}

/// Error in a block table, the pool it is for, or slots of that pool.
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
    /// A sequence has more than `isize::MAX` keys, which positions cannot count.
    TooLong {
        /// Index of the sequence.
        sequence: usize,
        /// Length of the sequence.
        len: usize,
    },
    /// An entry that a sequence uses is not a page of the pool.
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
    /// More tokens are appended to a sequence than it has keys.
    New {
        /// Index of the sequence.
        sequence: usize,
        /// Length of the sequence, which counts the new tokens.
        len: usize,
        /// Number of new tokens.
        new: usize,
    },
    /// The page size of a pool is not a multiple of 16 keys.
    PageSize {
        /// Number of keys of a page.
        page_size: usize,
    },
    /// Tokens would be written to a page that two sequences have, or one sequence twice.
    Shared {
        /// Page number.
        page: u32,
        /// Indices of the sequences.
        sequences: [usize; 2],
    },
    /// A block table has no such sequence.
    Sequence {
        /// Index of the sequence.
        sequence: usize,
        /// Number of sequences of the table.
        sequences: usize,
    },
    /// The last position of a sequence, or the last slot of one of its pages, does not fit `i32`.
    TooLarge {
        /// Index of the sequence.
        sequence: usize,
        /// Name of the number: `position` or `slot`.
        what: &'static str,
        /// Greatest number.
        got: usize,
    },
    /// Memory for the pages of a sequence could not be allocated.
    Memory {
        /// Number of entries of the sequence.
        entries: usize,
    },
    /// A buffer for slots or positions has another length than the numbers to translate.
    Buffer {
        /// Name of what the buffer is for: `slots` or `positions`.
        what: &'static str,
        /// Length of the buffer.
        got: usize,
        /// Number of numbers to translate.
        expected: usize,
    },
    /// A position is negative, or not below the length of its sequence.
    Position {
        /// Index of the sequence.
        sequence: usize,
        /// Place of the position in the list.
        place: usize,
        /// Position found.
        got: i32,
        /// Length of the sequence.
        len: usize,
    },
    /// A slot is negative, or in a page that the sequence does not have.
    Slot {
        /// Index of the sequence.
        sequence: usize,
        /// Place of the slot in the list.
        place: usize,
        /// Slot found.
        got: i32,
    },
    /// A slot is in the last page of a sequence, but after its last key.
    SlotBeyond {
        /// Index of the sequence.
        sequence: usize,
        /// Place of the slot in the list.
        place: usize,
        /// Slot found.
        got: i32,
        /// Position that the slot would have.
        position: usize,
        /// Length of the sequence.
        len: usize,
    },
    /// A slot has two positions, because the sequence has its page twice.
    SlotTwice {
        /// Index of the sequence.
        sequence: usize,
        /// Place of the slot in the list.
        place: usize,
        /// Slot found.
        got: i32,
        /// Its first two positions.
        positions: [usize; 2],
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
            Self::New { sequence, len, new } => write!(
                f,
                "block table: sequence {sequence} has {len} keys, but {new} are appended to it (lengths count them already)"
            ),
            Self::PageSize { page_size } => {
                write!(f, "page pool: pages have {page_size} keys, but must have 16 or a multiple of that")
            }
            Self::Shared { page, sequences: [a, b] } if a == b => {
                write!(f, "block table: tokens would be written to page {page}, which sequence {a} has twice")
            }
            Self::Shared { page, sequences: [a, b] } => write!(
                f,
                "block table: tokens would be written to page {page}, which sequences {a} and {b} share (a page that is shared is \
                 copied first)"
            ),
            Self::Page { sequence, entry, page, pages } => write!(
                f,
                "block table: entry {entry} of sequence {sequence} is page {page}, but the pool has {pages} pages"
            ),
            Self::Sequence { sequence, sequences } => {
                write!(f, "block table: there is no sequence {sequence}, the table has {sequences}")
            }
            Self::TooLarge { sequence, what, got } => write!(
                f,
                "block table: the last {what} of sequence {sequence} is {got}, but a {what} is an i32, at most {}",
                i32::MAX
            ),
            Self::Memory { entries } => write!(f, "block table: could not allocate memory for {entries} entries"),
            Self::Buffer { what, got, expected } => {
                write!(f, "{what}: the buffer has {got} places, but {expected} numbers are translated")
            }
            Self::Position { sequence, place, got, len } => {
                write!(f, "positions: place {place} is {got}, but sequence {sequence} has {len} keys")
            }
            Self::Slot { .. } | Self::SlotBeyond { .. } | Self::SlotTwice { .. } => self.slot_message(f),
        }
    }
}

impl PageError {
    /// Writes the message of an error in slots.
    fn slot_message(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Slot { sequence, place, got } => {
                write!(f, "slots: place {place} is {got}, which is in no page of sequence {sequence}")
            }
            Self::SlotBeyond { sequence, place, got, position, len } => write!(
                f,
                "slots: place {place} is {got}, which is position {position}, but sequence {sequence} has {len} keys"
            ),
            Self::SlotTwice { sequence, place, got, positions: [a, b] } => write!(
                f,
                "slots: place {place} is {got}, which is both position {a} and position {b} of sequence {sequence}"
            ),
            _ => Ok(()),
        }
    }
}

impl std::error::Error for PageError {}

impl<'a> BlockTable<'a> {
    /// Returns the number of entries of a sequence, if every used entry is below `pages`; pages have `page_size` keys.
    ///
    /// # Errors
    /// [`PageError`] if the table does not fit them.
    pub(crate) fn checked(&self, pages: usize, page_size: usize) -> Result<usize, PageError> {
        let width = self.width()?;
        for sequence in 0..self.lens.len() {
            let used = self.used(sequence, width, page_size)?;
            if let Some((entry, &page)) = used.iter().enumerate().find(|&(_, &page)| page as usize >= pages) {
                return Err(PageError::Page { sequence, entry, page, pages });
            }
        }
        Ok(width)
    }

    /// Returns the number of entries of a sequence.
    pub(crate) fn width(&self) -> Result<usize, PageError> {
        let (entries, sequences) = (self.entries.len(), self.lens.len());
        let width = entries.checked_div(sequences).unwrap_or(0);
        if width * sequences == entries { Ok(width) } else { Err(PageError::Entries { entries, sequences }) }
    }

    /// Returns the entries that a sequence uses, of `width`; pages have `page_size` keys.
    pub(crate) fn used(&self, sequence: usize, width: usize, page_size: usize) -> Result<&'a [u32], PageError> {
        let len = self.lens[sequence];
        if len > width.saturating_mul(page_size) {
            return Err(PageError::Length { sequence, len, entries: width, page_size });
        }
        if len > isize::MAX as usize {
            return Err(PageError::TooLong { sequence, len });
        }
        // A length above 0 fits only pages of some size.
        let used = if len == 0 { 0 } else { len.div_ceil(page_size) };
        Ok(&self.entries[sequence * width..][..used])
    }
}

/// Keys of a sequence that lie together in a page.
#[derive(Clone, Copy)]
pub(crate) struct Stretch {
    pub(crate) page: usize,
    /// First key in the page.
    pub(crate) row: usize,
    /// Number of keys.
    pub(crate) len: usize,
}
