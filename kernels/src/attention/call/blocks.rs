//! Key blocks that rows compute, by their numbers.

use crate::attention::call::visibility::VisibleKeys;
use crate::simd::LANES;
use crate::tensor::rows::KEY_BLOCK;
use core::ops::Range;

/// Numbers of key blocks, ascending, each once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Blocks<'t> {
    /// Blocks that hold keys: a range, or first keys that a window keeps and a range after them.
    Holding(VisibleKeys),
    /// Blocks of a list.
    #[cfg_attr(not(test), expect(dead_code, reason = "no option of a call lists blocks yet"))]
    Listed(&'t [u32]),
}

impl<'t> Blocks<'t> {
    /// No blocks.
    pub(crate) const NONE: Self = Self::all(0);

    /// Returns all blocks of a number of keys.
    pub(crate) const fn all(keys: usize) -> Self {
        Self::Holding(VisibleKeys { prefix: 0, start: 0, end: keys })
    }

    /// Number of blocks.
    pub(crate) fn len(self) -> usize {
        self.place(usize::MAX)
    }

    /// Number of keys to compute; with those of a whole block for the last one of a list.
    pub(crate) fn keys(self) -> usize {
        match self {
            Self::Holding(keys) => keys.count(),
            Self::Listed(numbers) => numbers.len() * KEY_BLOCK,
        }
    }

    /// Returns the number of the `n`th block.
    ///
    /// # Panics
    /// A list may panic if it has no `n`th block.
    #[inline]
    pub(crate) fn at(self, n: usize) -> usize {
        match self {
            Self::Holding(keys) => {
                let (kept, others) = ranges(keys);
                if n < kept { n } else { others.start + (n - kept) }
            }
            Self::Listed(numbers) => numbers[n] as usize,
        }
    }

    /// Returns how many of the blocks come before a number: its place, if it is one of theirs.
    #[inline]
    pub(crate) fn place(self, number: usize) -> usize {
        match self {
            Self::Holding(keys) => {
                let (kept, others) = ranges(keys);
                number.min(kept) + number.clamp(others.start, others.end) - others.start
            }
            Self::Listed(numbers) => numbers.partition_point(|&n| (n as usize) < number),
        }
    }

    /// Returns true if a block is one of these.
    pub(crate) fn contains(self, number: usize) -> bool {
        self.place(number) < self.place(number + 1)
    }

    /// Returns how many blocks there are before the first one that is missing.
    pub(crate) fn leading(self) -> usize {
        match self {
            Self::Holding(keys) => match ranges(keys) {
                (kept, others) if others.start == kept => others.end,
                (kept, _) => kept,
            },
            Self::Listed(numbers) => numbers.iter().zip(0..).take_while(|&(&n, expected)| n == expected).count(),
        }
    }

    /// Iterates over the numbers.
    pub(crate) fn iter(self) -> impl DoubleEndedIterator<Item = usize> + use<'t> {
        self.some(0..self.len())
    }

    /// Iterates over the numbers before a number.
    pub(crate) fn before(self, number: usize) -> impl DoubleEndedIterator<Item = usize> + use<'t> {
        self.some(0..self.place(number))
    }

    /// Iterates over the numbers after a number.
    pub(crate) fn after(self, number: usize) -> impl DoubleEndedIterator<Item = usize> + use<'t> {
        self.some(self.place(number + 1)..self.len())
    }

    fn some(self, places: Range<usize>) -> impl DoubleEndedIterator<Item = usize> + use<'t> {
        places.map(move |n| self.at(n))
    }

    /// Returns a range that holds all keys to compute of the block of `len` keys from key `first` on, counted from there; it
    /// begins with a panel.
    pub(crate) fn keys_in(self, first: usize, len: usize) -> Range<usize> {
        match self {
            Self::Holding(keys) => {
                let (start, end) = keys.within(first, len).key_range();
                start / LANES * LANES..end
            }
            Self::Listed(_) => 0..len,
        }
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
    fn assert_are(blocks: Blocks<'_>, expected: &[usize], what: &str) {
        assert!(blocks.iter().eq(expected.iter().copied()), "{what}");
        assert!(blocks.iter().rev().eq(expected.iter().rev().copied()), "{what}");
        assert_eq!(blocks.len(), expected.len(), "{what}");
        assert!(expected.iter().enumerate().all(|(n, &number)| blocks.at(n) == number), "{what}");
        assert_eq!(blocks.leading(), (0..).zip(expected).take_while(|(n, number)| n == *number).count(), "{what}");
        for number in 0..7 {
            assert_eq!(blocks.contains(number), expected.contains(&number), "{what}");
            assert!(blocks.before(number).eq(expected.iter().copied().filter(|&n| n < number)), "{what}");
            assert!(blocks.after(number).eq(expected.iter().copied().filter(|&n| n > number)), "{what}");
        }
    }

    /// Blocks of some keys, and the keys in each, are those that a scan over the keys finds.
    #[test]
    fn blocks_hold_their_keys() {
        let ends = [0, 1, 255, 256, 257, 300, 511, 512, 513, 900, 1024];
        for prefix in ends {
            for start in ends.into_iter().filter(|&start| start > prefix || prefix == 0) {
                for end in ends.into_iter().filter(|&end| end >= start) {
                    let blocks = Blocks::Holding(VisibleKeys { prefix, start, end });
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

    #[test]
    fn listed_blocks_are_those_of_the_list() {
        for list in [&[][..], &[0], &[5], &[0, 1, 2], &[0, 1, 4, 6], &[2, 3, 5]] {
            let expected: Vec<usize> = list.iter().map(|&n| n as usize).collect();
            assert_are(Blocks::Listed(list), &expected, &format!("{list:?}"));
            assert_eq!(Blocks::Listed(list).keys_in(512, 100), 0..100);
        }
    }
}
