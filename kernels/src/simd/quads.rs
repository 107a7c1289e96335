//! Groups of four numbers, in the forms that dot products of integers take.

/// Four 16-bit numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct Words4 {
    /// Numbers 0 and 2, number 0 in the lower half.
    pub(crate) even: i32,
    /// Numbers 1 and 3, number 1 in the lower half.
    pub(crate) odd: i32,
}

/// Half of a byte.
pub(crate) trait Half: Copy + 'static {
    const IS_UPPER: bool;
}

/// Lower half of a byte.
#[derive(Clone, Copy)]
pub(crate) struct Lower;

/// Upper half of a byte.
#[derive(Clone, Copy)]
pub(crate) struct Upper;

impl Half for Lower {
    const IS_UPPER: bool = false;
}

impl Half for Upper {
    const IS_UPPER: bool = true;
}

/// Four consecutive elements of an int8 query row, in the two forms that the instruction sets take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct Query4 {
    /// The four bytes, the first in the lowest.
    pub(super) bytes: i32,
    pub(super) words: Words4,
}

impl Query4 {
    pub(crate) const ZERO: Self = Self { bytes: 0, words: Words4 { even: 0, odd: 0 } };

    #[inline(always)]
    pub(crate) fn new(e: [i8; 4]) -> Self {
        let bytes = i32::from_le_bytes(e.map(i8::cast_unsigned));
        // Shifting up and back extends the sign. (Not one element at a time: so several groups of four in a row are
        // made at once.)
        let even = (bytes << 8 >> 24 << 16) | (bytes << 24 >> 24 & 0xFFFF);
        let odd = (bytes >> 24 << 16) | (bytes << 16 >> 24 & 0xFFFF);
        Self { bytes, words: Words4 { even, odd } }
    }

    /// Returns the sum of the elements.
    #[inline(always)]
    pub(crate) fn total(&self) -> i32 {
        let pair = |word: i32| (word << 16 >> 16) + (word >> 16);
        pair(self.words.even) + pair(self.words.odd)
    }
}
