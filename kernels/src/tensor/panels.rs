//! Sets of panels of a key block, sixteen keys each: a bit for each panel, the first the lowest.

use crate::simd::LANES;
use crate::tensor::rows::KEY_BLOCK;
use core::ops::Range;

const _: () = assert!(KEY_BLOCK / LANES == u16::BITS as usize);

/// Returns a bit for each of some panels.
#[inline(always)]
pub(crate) fn panel_bits(panels: Range<usize>) -> u16 {
    (u32::MAX << panels.start & !(u32::MAX << panels.end)) as u16
}

/// Returns the runs of neighbouring panels among those that have a bit, in order.
#[inline(always)]
pub(crate) fn runs(mut bits: u16) -> impl Iterator<Item = Range<usize>> {
    core::iter::from_fn(move || {
        let start = bits.trailing_zeros();
        let run = (bits >> (start % u16::BITS)).trailing_ones();
        let found = start as usize..(start + run) as usize;
        bits &= !panel_bits(found.clone());
        (run > 0).then_some(found)
    })
}
