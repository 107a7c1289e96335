//! Positions of the keys of a task by blocks, and the rule that says which of them its rows see.

use crate::attention::call::selection::KeyList;
use crate::attention::call::visibility::{VisiblePositions, least_and_most};
use crate::tensor::rows::KEY_BLOCK;

/// Positions of the keys of a task, by blocks: given ones, or the numbers of selected keys.
#[derive(Clone, Copy)]
pub(crate) struct BlockPositions<'t> {
    pub(crate) given: Option<&'t [i32]>,
    pub(crate) list: Option<KeyList<'t>>,
    /// Number of keys.
    pub(crate) len: usize,
}

impl BlockPositions<'_> {
    /// Returns the least and the greatest position of the keys of the block that starts at key `first`.
    fn ends(self, first: usize) -> [i32; 2] {
        let keys = first..self.len.min(first + KEY_BLOCK);
        match (self.given, self.list) {
            (Some(given), None) => least_and_most(&given[keys]),
            // In order.
            (None, Some(list)) => [keys.start, keys.end - 1].map(|key| list.key(key) as i32),
            (Some(given), Some(list)) => {
                let runs = list.runs(keys).map(|(key, len)| least_and_most(&given[key..key + len]));
                runs.fold([i32::MAX, i32::MIN], |[a, b], [least, most]| [a.min(least), b.max(most)])
            }
            (None, None) => unreachable!("keys without positions of their own"),
        }
    }
}

/// Positions of keys, and those that some row and that every row of a task sees.
#[derive(Clone, Copy)]
pub(crate) struct PositionRule<'t> {
    pub(crate) keys: BlockPositions<'t>,
    pub(crate) seen: [VisiblePositions; 2],
}

impl PositionRule<'_> {
    /// Returns true if some row may see a key of the block that starts at key `first`.
    pub(crate) fn may_show(self, first: usize) -> bool {
        self.seen[0].may_have(self.keys.ends(first))
    }

    /// Returns true if every row sees all keys of the block that starts at key `first`.
    pub(crate) fn shows_all(self, first: usize) -> bool {
        self.seen[1].has_all(self.keys.ends(first))
    }
}
