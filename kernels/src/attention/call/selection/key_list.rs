//! List of keys of some rows, as the fused loop reads it.

use crate::attention::call::row_mods::KeyBits;
use crate::tensor::rows::KEY_BLOCK;
use core::ops::Range;

/// List of keys: its keys, in order, are numbered from 0 on and make blocks of 256, as the keys of a sequence do.
#[derive(Debug, Clone, Copy)]
pub(crate) struct KeyList<'t> {
    /// Twice the number of each unit, plus 1 if the mask function is asked about it.
    units: &'t [u32],
    /// Number of keys of a unit.
    unit: usize,
    /// Number of keys.
    len: usize,
    /// True if the mask function is not asked about some unit.
    partly_asked: bool,
}

impl<'t> KeyList<'t> {
    /// Creates the list of units of a sequence of `kv_len` keys, which the last one may exceed.
    pub(super) fn new(units: &'t [u32], unit: usize, kv_len: usize, partly_asked: bool) -> Self {
        let beyond = units.last().map_or(0, |&last| (((last >> 1) as usize + 1) * unit).saturating_sub(kv_len));
        Self { units, unit, len: units.len() * unit - beyond, partly_asked }
    }

    /// Number of keys of a unit.
    #[inline]
    pub(crate) fn unit(self) -> usize {
        self.unit
    }

    /// Number of keys.
    #[inline]
    pub(crate) fn len(self) -> usize {
        self.len
    }

    /// Returns the number, in the sequence, of key `i` of the list, which has it.
    #[inline]
    pub(crate) fn key(self, i: usize) -> usize {
        // Units of one key need no division.
        match self.unit {
            1 => (self.units[i] >> 1) as usize,
            unit => (self.units[i / unit] >> 1) as usize * unit + i % unit,
        }
    }

    /// Iterates over some keys of the list in runs: each run's first number in the sequence, and its length.
    #[inline]
    pub(crate) fn runs(self, keys: Range<usize>) -> impl Iterator<Item = (usize, usize)> + Clone + use<'t> {
        let (units, unit) = (self.units, self.unit);
        // Units of one key need no division.
        let (mut next, mut skip) = if unit == 1 { (keys.start, 0) } else { (keys.start / unit, keys.start % unit) };
        let mut left = keys.len();
        core::iter::from_fn(move || {
            if left == 0 {
                return None;
            }
            let number = (units[next] >> 1) as usize;
            let first = number * unit + skip;
            let (mut len, mut end) = (unit - skip, number + 1);
            (next, skip) = (next + 1, 0);
            while len < left && (units[next] >> 1) as usize == end {
                (next, len, end) = (next + 1, len + unit, end + 1);
            }
            len = len.min(left);
            left -= len;
            Some((first, len))
        })
    }

    /// Returns a bit for each of some keys, at most a block: 1 if the mask function is asked about it. `None` if it is asked about
    /// all.
    pub(crate) fn asked(self, keys: Range<usize>) -> Option<KeyBits> {
        if !self.partly_asked {
            return None;
        }
        let mut bits = [0; KEY_BLOCK / 64];
        for (j, key) in keys.enumerate().filter(|&(_, key)| self.units[key / self.unit] & 1 == 1) {
            debug_assert!(key < self.len, "key {key} of {}", self.len);
            bits[j / 64] |= 1 << (j % 64);
        }
        Some(bits)
    }
}
