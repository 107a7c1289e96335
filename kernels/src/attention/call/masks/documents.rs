//! Documents packed into one sequence.

use crate::attention::call::mods::{BlockClass, BlockPosition, MaskError, MaskMod, Position};
use core::ops::Range;
use std::collections::BTreeMap;

/// Mask of documents packed into one sequence: a row sees the keys of its document.
///
/// A row belongs to the document of the key at its position ([`Position::position`]: name the call's alignment where
/// rows and keys differ in number). Keys after the described ones belong to one more document, without an end; a row at
/// a negative position sees nothing. All sequences of a batch have the same documents; see [`PerSequence`] for others.
/// Memory: up to 40 bytes for each group of neighbouring keys of one document, whatever its length. A pair takes two
/// look-ups; a block takes a comparison for each pair of a group of its rows and a group of its keys.
///
/// [`PerSequence`]: crate::PerSequence
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Documents {
    /// Stretches of keys of one document each, none of them empty, from the first key on.
    stretches: Vec<DocumentKeys>,
    /// Number of the stretch of every `1 << shift`th key.
    index: Vec<usize>,
    shift: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct DocumentKeys {
    document: usize,
    /// One past its last key.
    end: usize,
}

impl DocumentKeys {
    /// All keys after the described ones.
    const BEHIND: Self = Self { document: usize::MAX, end: usize::MAX };
}

impl Documents {
    /// Creates the mask from the ends of the documents, counted from the start of the sequence: document `n` has the
    /// keys `ends[n - 1]..ends[n]`, document 0 the keys `0..ends[0]`. Cumulative lengths with a leading 0 work, too.
    ///
    /// # Errors
    /// [`MaskError::Ends`] if the ends are not in order.
    pub fn by_ends(ends: &[usize]) -> Result<Self, MaskError> {
        let (mut stretches, mut previous) = (Vec::with_capacity(ends.len()), 0);
        for (document, &end) in ends.iter().enumerate() {
            if end < previous {
                return Err(MaskError::Ends { document, end, previous });
            }
            if end > previous {
                stretches.push(DocumentKeys { document, end });
            }
            previous = end;
        }
        Ok(Self::of(stretches))
    }

    /// Creates the mask from the number or name of each key's document. Keys of one document need not be neighbours.
    pub fn by_ids<I: Ord>(ids: &[I]) -> Self {
        let (mut numbers, mut end) = (BTreeMap::new(), 0);
        let mut stretches = Vec::new();
        for ids in ids.chunk_by(|a, b| a == b) {
            let next = numbers.len();
            end += ids.len();
            stretches.push(DocumentKeys { document: *numbers.entry(&ids[0]).or_insert(next), end });
        }
        Self::of(stretches)
    }

    /// Creates the mask with an index of a few entries a stretch.
    fn of(stretches: Vec<DocumentKeys>) -> Self {
        let Some(last) = stretches.last().map(|stretch| stretch.end - 1) else {
            return Self { stretches, index: Vec::new(), shift: 0 };
        };
        let shift = (last / stretches.len()).checked_ilog2().unwrap_or(0);
        let mut number = 0;
        let index = (0..=last >> shift).map(|n| {
            number += stretches[number..].iter().take_while(|stretch| stretch.end <= n << shift).count();
            number
        });
        let index = index.collect();
        Self { stretches, index, shift }
    }

    /// Returns the index of the stretch that holds a key; at least the number of stretches if the key lies after them.
    #[inline(always)]
    fn number(&self, key: usize) -> usize {
        let entry = key >> self.shift;
        let Some(&from) = self.index.get(entry) else { return self.stretches.len() };
        let to = self.index.get(entry + 1).copied().unwrap_or(self.stretches.len());
        from + self.stretches[from..to].partition_point(|stretch| stretch.end <= key)
    }

    #[inline(always)]
    fn stretch(&self, number: usize) -> DocumentKeys {
        self.stretches.get(number).copied().unwrap_or(DocumentKeys::BEHIND)
    }

    #[inline(always)]
    fn document(&self, key: usize) -> usize {
        self.stretch(self.number(key)).document
    }

    /// Returns the document of each stretch of keys in a range.
    fn documents(&self, keys: Range<usize>) -> impl Iterator<Item = usize> {
        let (mut number, mut next) = (self.number(keys.start), keys.start);
        core::iter::from_fn(move || {
            let DocumentKeys { document, end } = self.stretch(number);
            let found = next < keys.end;
            (number, next) = (number + 1, end);
            found.then_some(document)
        })
    }
}

impl MaskMod for Documents {
    #[inline(always)]
    fn keep(&self, at: Position) -> bool {
        usize::try_from(at.position).is_ok_and(|row| self.document(row) == self.document(at.key))
    }

    fn class(&self, block: BlockPosition) -> BlockClass {
        let (first, last) = block.positions().into_inner();
        let before = (first < 0).then_some(false);
        // Empty if all rows are before the first key.
        let rows = first.max(0) as usize..usize::try_from(last).map_or(0, |last| last + 1);
        let pairs = self.documents(rows).flat_map(|row| self.documents(block.keys.clone()).map(move |key| row == key));
        before.into_iter().chain(pairs).collect()
    }
}
