//! Pairs of bfloat16, which some machines multiply at once.

use crate::simd::aligned::Plain;

/// Pair of bfloat16, the first in the lower half.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(transparent)]
pub(crate) struct Bf16x2(pub(crate) u32);

// SAFETY: a four-byte number; every bit pattern is valid.
unsafe impl Plain for Bf16x2 {}

impl Bf16x2 {
    #[inline(always)]
    pub(crate) fn new(first: u16, second: u16) -> Self {
        Self(u32::from(first) | u32::from(second) << 16)
    }

    /// Returns both elements.
    #[inline(always)]
    pub(crate) fn elements(self) -> [u16; 2] {
        [self.0 as u16, (self.0 >> 16) as u16]
    }
}
