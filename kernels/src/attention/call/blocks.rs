//! Key blocks that rows compute, by their numbers.

use crate::attention::call::visibility::VisibleKeys;
use crate::simd::LANES;
use crate::tensor::rows::KEY_BLOCK;
use core::ops::Range;

/// Numbers of key blocks that hold keys, ascending: a range, or first keys that a window keeps and a range after them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Blocks(pub(crate) VisibleKeys);

impl Blocks {
    /// Returns all blocks of a number of keys.
    pub(crate) const fn all(keys: usize) -> Self {
        Self(VisibleKeys { prefix: 0, start: 0, end: keys })
    }

    /// Number of blocks.
    pub(crate) fn len(self) -> usize {
        self.place(usize::MAX)
    }

    /// Number of keys to compute.
    pub(crate) fn keys(self) -> usize {
        self.0.count()
    }

    /// Returns the number of the `n`th block.
    #[inline]
    pub(crate) fn at(self, n: usize) -> usize {
        let (kept, others) = ranges(self.0);
        if n < kept { n } else { others.start + (n - kept) }
    }

    /// Returns how many of the blocks come before a number: its place, if it is one of theirs.
    #[inline]
    pub(crate) fn place(self, number: usize) -> usize {
        let (kept, others) = ranges(self.0);
        number.min(kept) + number.clamp(others.start, others.end) - others.start
    }

    /// Returns how many blocks there are before the first one that is missing.
    pub(crate) fn leading(self) -> usize {
        let (kept, others) = ranges(self.0);
        if others.start == kept { others.end } else { kept }
    }

    /// Iterates over those of the numbers that lie in a range.
    pub(crate) fn within(self, numbers: Range<usize>) -> impl DoubleEndedIterator<Item = usize> {
        (self.place(numbers.start)..self.place(numbers.end)).map(move |n| self.at(n))
    }

    /// Returns a range that holds all keys to compute of the block of `len` keys from key `first` on, counted from there; it
    /// begins with a panel.
    pub(crate) fn keys_in(self, first: usize, len: usize) -> Range<usize> {
        let (start, end) = self.0.within(first, len).key_range();
        start / LANES * LANES..end
    }
}

/// Returns the number of blocks that hold first keys, and the others.
#[inline]
fn ranges(keys: VisibleKeys) -> (usize, Range<usize>) {
    let kept = keys.prefix.div_ceil(KEY_BLOCK);
    // Both may have keys of one block.
    let start = (keys.start / KEY_BLOCK).max(kept);
    let end = if keys.start < keys.end { keys.end.div_ceil(KEY_BLOCK).max(start) } else { start };
    (kept, start..end)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Asserts what is said of blocks that are these.
    fn assert_are(blocks: Blocks, expected: &[usize], what: &str) {
        assert_eq!(blocks.len(), expected.len(), "{what}");
        assert!(expected.iter().enumerate().all(|(n, &number)| blocks.at(n) == number), "{what}");
        assert_eq!(blocks.leading(), (0..).zip(expected).take_while(|(n, number)| n == *number).count(), "{what}");
        for numbers in
            (0..8).flat_map(|start| [0, 1, 2, 3, 5, 8, usize::MAX].map(|len| start..len.saturating_add(start)))
        {
            let inside: Vec<usize> = expected.iter().copied().filter(|number| numbers.contains(number)).collect();
            assert!(blocks.within(numbers.clone()).eq(inside.iter().copied()), "{what} in {numbers:?}");
            assert!(blocks.within(numbers).rev().eq(inside.into_iter().rev()), "{what}, backwards");
        }
    }

    /// Blocks of some keys, and the keys in each, are those that a scan over the keys finds.
    #[test]
    fn blocks_hold_their_keys() {
        let ends = [0, 1, 255, 256, 257, 300, 511, 512, 513, 900, 1024];
        for prefix in ends {
            for start in ends.into_iter().filter(|&start| start > prefix || prefix == 0) {
                for end in ends.into_iter().filter(|&end| end >= start) {
                    let blocks = Blocks(VisibleKeys { prefix, start, end });
                    let mut expected: Vec<usize> = (0..prefix).chain(start..end).map(|key| key / KEY_BLOCK).collect();
                    expected.dedup();
                    assert_are(blocks, &expected, &format!("0..{prefix} and {start}..{end}"));
                    for number in expected {
                        let keys = number * KEY_BLOCK..1024.min((number + 1) * KEY_BLOCK);
                        let mut held =
                            keys.clone().filter(|key| (0..prefix).contains(key) || (start..end).contains(key));
                        let first = held.next().unwrap() - keys.start;
                        let last = held.next_back().unwrap_or(keys.start + first) - keys.start;
                        assert_eq!(blocks.keys_in(keys.start, keys.len()), first / LANES * LANES..last + 1);
                    }
                }
            }
        }
    }
}
