//! Documents packed into one sequence.

use crate::attention::masks::MaskError;
use crate::attention::mods::{BlockClass, BlockPosition, MaskMod, Position};
use core::ops::Range;
use std::collections::BTreeMap;

/// Mask of documents packed into one sequence: a row sees the keys of its own document.
///
/// A row belongs to the document of the key at its position ([`Position::position`]: name the call's alignment where rows
/// and keys differ in number). Keys behind those that are described belong to one more document, which is open at its
/// end; a row at a negative position sees nothing. All sequences of a batch have the same documents; see [`PerSequence`]
/// for others. Memory: 16 bytes a key. A pair takes two look-ups, a block as many comparisons as it has stretches of rows
/// times stretches of keys.
///
/// [`PerSequence`]: crate::PerSequence
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Documents {
    keys: Vec<Key>,
}

/// Place of a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Key {
    document: usize,
    /// One past the last key of the stretch of this document's keys that holds it.
    stretch_end: usize,
}

impl Key {
    /// Place of all keys behind those that are described.
    const BEHIND: Self = Self { document: usize::MAX, stretch_end: usize::MAX };
}

impl Documents {
    /// Creates the mask from the ends of the documents, counted from the start of the sequence: document `n` has the keys
    /// `ends[n - 1]..ends[n]`, the first one those from 0 on. Cumulative lengths with a leading 0 are fine.
    ///
    /// # Errors
    /// [`MaskError::Ends`] if the ends are not in order.
    pub fn by_ends(ends: &[usize]) -> Result<Self, MaskError> {
        let (mut keys, mut previous) = (Vec::with_capacity(ends.last().copied().unwrap_or(0)), 0);
        for (document, &end) in ends.iter().enumerate() {
            if end < previous {
                return Err(MaskError::Ends { document, end, previous });
            }
            keys.resize(end, Key { document, stretch_end: end });
            previous = end;
        }
        Ok(Self { keys })
    }

    /// Creates the mask from the document of each key, by any numbers or names. Keys of one document need not lie
    /// together.
    pub fn by_ids<I: Ord>(ids: &[I]) -> Self {
        let (mut numbers, mut keys) = (BTreeMap::new(), Vec::with_capacity(ids.len()));
        for stretch in ids.chunk_by(|a, b| a == b) {
            let next = numbers.len();
            let document = *numbers.entry(&stretch[0]).or_insert(next);
            let stretch_end = keys.len() + stretch.len();
            keys.resize(stretch_end, Key { document, stretch_end });
        }
        Self { keys }
    }

    #[inline(always)]
    fn key(&self, key: usize) -> Key {
        self.keys.get(key).copied().unwrap_or(Key::BEHIND)
    }

    /// Returns the document of each stretch of keys in a range.
    fn stretches(&self, keys: Range<usize>) -> impl Iterator<Item = usize> {
        let mut next = keys.start;
        core::iter::from_fn(move || {
            let Key { document, stretch_end } = self.key(next);
            let found = next < keys.end;
            next = stretch_end;
            found.then_some(document)
        })
    }
}

impl MaskMod for Documents {
    #[inline(always)]
    fn keep(&self, at: Position) -> bool {
        usize::try_from(at.position).is_ok_and(|row| self.key(row).document == self.key(at.key).document)
    }

    fn class(&self, block: BlockPosition) -> BlockClass {
        let (first, last) = block.positions().into_inner();
        let before = (first < 0).then_some(false);
        // Empty if all rows are before the first key.
        let rows = first.max(0) as usize..usize::try_from(last).map_or(0, |last| last + 1);
        let pairs = self.stretches(rows).flat_map(|row| self.stretches(block.keys.clone()).map(move |key| row == key));
        before.into_iter().chain(pairs).collect()
    }
}
