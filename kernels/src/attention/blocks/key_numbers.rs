//! Numbers of the keys of a block, and their positions: in order, or those of a list.

use crate::attention::blocks::task::{AttentionTask, Row};
use crate::attention::call::row_mods::{KeyBits, ListedKeys, RowRun};
use crate::attention::call::selection::KeyList;
use crate::simd::Simd;
use crate::tensor::rows::Room;

/// Numbers, in their sequence, of the keys of a block, and their positions.
#[derive(Clone, Copy)]
pub(crate) struct KeyNumbers<'b> {
    /// Number of the first key, in the sequence or in the list.
    first: usize,
    /// List of the keys, if they are selected.
    list: Option<KeyList<'b>>,
    /// Positions of the keys, if they have their own and some option asks for them.
    pub(crate) positions: Option<&'b [i32]>,
    /// Numbers of the keys, if they are those of a list and some option asks for them.
    pub(crate) listed: Option<ListedKeys<'b>>,
}

/// Columns of a bias or mask for the keys of a block.
pub(crate) struct KeyColumns {
    /// Number of the block's first keys without a column, and number of keys up to the last column.
    pub(crate) before: usize,
    pub(crate) len: usize,
    /// Column of key `before`, if there is one.
    pub(crate) first: usize,
    /// Numbers of the keys from `before` on, if they are those of a list.
    pub(crate) numbers: *const u32,
}

/// Memory for the numbers and positions of listed keys.
pub(crate) struct NumberMemory {
    numbers: Room<u32>,
    positions: Room<i32>,
    asked: Option<KeyBits>,
}

impl NumberMemory {
    #[inline(always)]
    pub(crate) fn new() -> Self {
        Self { numbers: Room::new(), positions: Room::new(), asked: None }
    }
}

impl<'b> KeyNumbers<'b> {
    /// Returns the numbers and positions of the `len` keys of a task from key `first` on.
    #[inline(always)]
    pub(crate) fn of<S: Simd>(
        task: &AttentionTask<'b, S>,
        first: usize,
        len: usize,
        memory: &'b mut NumberMemory,
    ) -> Self {
        let Some(list) = task.list else {
            let positions = task.key_positions().map(|positions| &positions[first..first + len]);
            return Self { first, list: None, positions, listed: None };
        };
        if !task.asks_for_numbers() {
            return Self { first, list: Some(list), positions: None, listed: None };
        }
        let (keys, given) = (first..first + len, task.key_positions());
        let NumberMemory { numbers, positions, asked } = memory;
        let runs = list.runs(keys.clone()).flat_map(|(key, len)| key..key + len);
        // Numbers of listed keys fit `i32`.
        let numbers = numbers.fill(runs.map(|key| key as u32));
        let positions =
            positions.fill(numbers.iter().map(|&key| given.map_or(key as i32, |given| given[key as usize])));
        *asked = if task.given.mask { list.asked(keys) } else { None };
        let listed = Some(ListedKeys { numbers, asked: asked.as_ref() });
        Self { first, list: Some(list), positions: Some(positions), listed }
    }

    /// Returns the number of key `j`.
    #[inline(always)]
    pub(crate) fn number(&self, j: usize) -> usize {
        self.list.map_or(self.first + j, |list| list.key(self.first + j))
    }

    /// Returns the keys of a row from key `j` on.
    pub(crate) fn run<S: Simd>(&self, task: &AttentionTask<'b, S>, row: Row, j: usize) -> RowRun<'b> {
        let run = task.keys_from(row, self.number(j));
        let (Some(listed), Some(positions)) = (self.listed, self.positions) else { return run };
        let listed = Some(ListedKeys { numbers: &listed.numbers[j..], ..listed });
        RowRun { place: j, key_positions: &positions[j..], listed, ..run }
    }

    /// Returns the columns, of `width` for the keys from `first_key` on, that belong to keys.
    pub(crate) fn columns(&self, first_key: isize, width: usize) -> KeyColumns {
        let Some(ListedKeys { numbers, .. }) = self.listed else {
            let before = first_key.saturating_sub_unsigned(self.first).max(0) as usize;
            let first = self.first.saturating_add_signed(first_key.saturating_neg());
            return KeyColumns { before, len: before + width.saturating_sub(first), first, numbers: core::ptr::null() };
        };
        let end = first_key.saturating_add_unsigned(width);
        let [before, len] = [first_key, end].map(|end| numbers.partition_point(|&key| (key as isize) < end));
        let first = numbers.get(before).map_or(width, |&key| (key as isize - first_key) as usize);
        KeyColumns { before, len, first, numbers: numbers[before..].as_ptr() }
    }
}
