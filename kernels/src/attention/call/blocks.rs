//! Key blocks that rows compute, by their numbers.

use crate::tensor::rows::KEY_BLOCK;
use core::ops::Range;

/// Numbers of key blocks, ascending, in two ranges: a window that keeps first keys hides the blocks between.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Blocks {
    first: Range<usize>,
    others: Range<usize>,
}

impl Blocks {
    /// Returns the blocks that hold the keys of two ranges, the second after the first.
    pub(crate) fn holding(ranges: [Range<usize>; 2]) -> Self {
        let [first, others] = ranges.map(|keys| match keys.is_empty() {
            true => 0..0,
            false => keys.start / KEY_BLOCK..keys.end.div_ceil(KEY_BLOCK),
        });
        // Both may have keys of one block.
        Self { others: others.start.max(first.end)..others.end.max(first.end), first }
    }

    /// Returns true if a block is one of these.
    pub(crate) fn contains(&self, number: usize) -> bool {
        self.first.contains(&number) || self.others.contains(&number)
    }

    /// Returns those of these blocks before a number.
    pub(crate) fn before(self, number: usize) -> Self {
        let cut = |range: Range<usize>| range.start..range.end.min(number).max(range.start);
        Self { first: cut(self.first), others: cut(self.others) }
    }

    /// Returns those of these blocks after a number.
    pub(crate) fn after(self, number: usize) -> Self {
        let cut = |range: Range<usize>| range.start.max(number + 1).min(range.end)..range.end;
        Self { first: cut(self.first), others: cut(self.others) }
    }

    /// Iterates over the numbers.
    pub(crate) fn numbers(self) -> impl DoubleEndedIterator<Item = usize> {
        self.first.chain(self.others)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Blocks of some keys are those that a scan over the keys finds, whatever is cut off before or after a number.
    #[test]
    fn blocks_hold_their_keys() {
        let ends = [0, 1, 255, 256, 257, 300, 511, 512, 513, 900, 1024];
        for first in ends {
            for start in ends.into_iter().filter(|&start| start >= first) {
                for end in ends.into_iter().filter(|&end| end >= start) {
                    let blocks = Blocks::holding([0..first, start..end]);
                    let mut expected: Vec<usize> = (0..first).chain(start..end).map(|key| key / KEY_BLOCK).collect();
                    expected.dedup();
                    assert_eq!(blocks.clone().numbers().collect::<Vec<_>>(), expected, "0..{first} and {start}..{end}");
                    for number in 0..5 {
                        assert_eq!(blocks.contains(number), expected.contains(&number));
                        let before = expected.iter().copied().filter(|&n| n < number);
                        assert!(blocks.clone().before(number).numbers().eq(before));
                        let after = expected.iter().copied().filter(|&n| n > number);
                        assert!(blocks.clone().after(number).numbers().eq(after));
                    }
                }
            }
        }
    }
}
