//! Keys and values that lie in several packed blocks: read where they lie, by tables, if they are whole panels, or gathered into one
//! block.

use super::layout::{Format, KeyOrder, Parts, Sizes, part};
use super::spare::rows_for;
use super::token_part::TokenPart;
use crate::kv::block_table::Stretch;
use crate::kv::key_block::{BlockValues, Int4Numbers, Keys};
use crate::kv::value_panels::ValuePanels;
use crate::matmul::int8::QUAD;
use crate::simd::LANES;
use crate::simd::aligned::{Plain, elements, elements_mut};
use crate::tensor::element::{Dtype, F16};
use crate::tensor::rows::{KEY_BLOCK, Room, Rows, Table};
use core::ops::Range;

/// Maximum number of table entries that keys or values take; entries of the numbers of int4 blocks follow them.
const ENTRIES: usize = KEY_BLOCK / QUAD;
const _: () = assert!(2 * (KEY_BLOCK / LANES) <= ENTRIES && ENTRIES + KEY_BLOCK / LANES <= KEY_BLOCK);

/// Packed blocks, by number: pages of a pool, or blocks of a sequence of a cache.
pub(crate) struct Scattered<F> {
    sizes: Sizes,
    /// Returns a block's memory, and the number of keys that it has room for.
    block: F,
}

impl<'a, F: Fn(usize) -> (&'a [f32], usize)> Scattered<F> {
    /// Takes blocks of these sizes.
    pub(super) fn new(sizes: Sizes, block: F) -> Self {
        Self { sizes, block }
    }

    /// Returns the memory of a block.
    ///
    /// # Panics
    /// If the block has room for another number of keys than the sizes say: tables have one layout for all.
    #[inline]
    fn block(&self, number: usize) -> &'a [f32] {
        let (memory, rows) = (self.block)(number);
        assert!(rows == self.sizes.rows, "a block of {rows} keys among those of {}", self.sizes.rows);
        memory
    }

    /// Returns true if keys in these ranges can be read where they lie: if these start and end at panels, but for the last.
    fn reads_in_place(&self, mut stretches: impl Iterator<Item = Stretch>) -> bool {
        let packed = self.sizes.key_order == KeyOrder::Packed && self.sizes.has_even_panels();
        let mut whole = true;
        packed
            && stretches.all(|Stretch { row, len, .. }| {
                let starts = whole && row.is_multiple_of(LANES);
                whole = len.is_multiple_of(LANES);
                starts
            })
    }

    /// Returns packed keys of a head from ranges of a sequence that start at panels.
    pub(crate) fn keys(
        &self,
        head: usize,
        stretches: impl Iterator<Item = Stretch> + Clone,
        table: &mut Table,
    ) -> Keys {
        let at = self.sizes.parts(head);
        match self.sizes.keys {
            Format::Elements(Dtype::Bf16) => Keys::Pairs(self.panels(&at, stretches, table)),
            Format::Elements(dtype) => Keys::Packed(by_dtype!(dtype, |T| self.panels::<T>(&at, stretches, table))),
            format @ (Format::Int8 | Format::Int8Channels) => {
                let panels = self.panels(&at, stretches.clone(), table);
                let scales = (format == Format::Int8).then(|| self.scales(&at.key_scales, stretches, table));
                Keys::Int8 { panels, scales }
            }
            Format::E4m3 => {
                let panels = self.panels(&at, stretches.clone(), table);
                Keys::E4m3 { panels, scales: self.scales(&at.key_scales, stretches, table) }
            }
            Format::Int4(kind) => {
                let panels = self.panels(&at, stretches.clone(), table);
                let numbers = self.numbers(&at.key_scales, self.sizes.panel_numbers(kind), stretches, table);
                Keys::Int4 { panels, kind, numbers }
            }
        }
    }

    /// Returns values of a head from ranges of a sequence that start at panels.
    pub(crate) fn values(
        &self,
        head: usize,
        stretches: impl Iterator<Item = Stretch> + Clone,
        table: &mut Table,
    ) -> BlockValues {
        let at = self.sizes.parts(head);
        match self.sizes.values {
            Format::Elements(Dtype::Bf16) => BlockValues::Pairs(self.value_panels(&at.values, stretches, table)),
            Format::Elements(dtype) => {
                BlockValues::ValuePanels(by_dtype!(dtype, |T| self.value_panels::<T>(&at.values, stretches, table)))
            }
            Format::Int8 | Format::Int8Channels => {
                let values = self.value_panels(&at.values, stretches.clone(), table);
                BlockValues::Int8 { values, scales: self.scales(&at.value_scales, stretches, table) }
            }
            Format::E4m3 => {
                let values = self.value_panels(&at.values, stretches.clone(), table);
                BlockValues::E4m3 { values, scales: self.scales(&at.value_scales, stretches, table) }
            }
            Format::Int4(kind) => {
                let values = self.value_panels(&at.values, stretches.clone(), table);
                let first = self.numbers(&at.value_scales, LANES, stretches, table);
                BlockValues::Int4 { values, numbers: Int4Numbers { kind, first, step: self.sizes.rows } }
            }
        }
    }

    /// Returns panels of keys as rows in a table. As many entries follow, to be prefetched: values of the same keys,
    /// which are read next.
    fn panels<T: Plain>(
        &self,
        at: &Parts,
        stretches: impl Iterator<Item = Stretch> + Clone,
        table: &mut Table,
    ) -> Rows<T> {
        // In elements of `T`, groups of elements where it is such.
        let number = |format: Format, elements: usize| elements * format.element_bytes() / size_of::<T>();
        let (panel, mut filled) = (number(self.sizes.keys, self.sizes.panel()), 0);
        for Stretch { page, row, len } in stretches.clone() {
            let panels = len.div_ceil(LANES);
            let first = &part::<T>(self.block(page), at.keys.clone())[row / LANES * panel..][..panels * panel];
            table.fill(filled, panels, first.as_ptr(), panel as isize);
            filled += panels;
        }
        let cols = self.sizes.value_layout().panel(0).len();
        for Stretch { page, row, len } in stretches {
            let panels = len.div_ceil(LANES);
            let values = |rows: usize| number(self.sizes.values, rows * cols);
            let first = part::<T>(self.block(page), at.values.clone()).as_ptr().wrapping_add(values(row));
            table.fill(filled, panels, first, values(LANES) as isize);
            filled += panels;
        }
        Rows::scattered(table, panel as isize, 1)
    }

    /// Returns values as rows of the first panel in a table; a row is the values of a group of keys.
    fn value_panels<T: Plain>(
        &self,
        values: &Range<usize>,
        stretches: impl Iterator<Item = Stretch>,
        table: &mut Table,
    ) -> ValuePanels<T> {
        let (layout, together, mut filled) = (self.sizes.value_layout(), self.sizes.value_group(), 0);
        let cols = layout.panel(0).len();
        for Stretch { page, row, len } in stretches {
            // A stretch starts with a panel.
            let (row, len) = (row / together, len.div_ceil(together));
            assert!(row + len <= layout.rows, "rows beyond a block");
            // The address of the first panel's rows, for all panels behind it.
            let first = part::<T>(self.block(page), values.clone()).as_ptr().wrapping_add(row * cols);
            table.fill(filled, len, first, cols as isize);
            filled += len;
        }
        ValuePanels { first: Rows::scattered(table, cols as isize, 1), layout }
    }

    /// Returns the numbers of int4 blocks as rows in a table: `each` numbers for a panel of sixteen keys.
    fn numbers(
        &self,
        numbers: &Range<usize>,
        each: usize,
        stretches: impl Iterator<Item = Stretch>,
        table: &mut Table,
    ) -> Rows<F16> {
        let mut filled = ENTRIES;
        for Stretch { page, row, len } in stretches {
            let panels = len.div_ceil(LANES);
            let (numbers, first) = (part::<F16>(self.block(page), numbers.clone()), row / LANES * each);
            assert!(first + panels * each <= numbers.len(), "panels outside a block");
            // Not a part of the slice: the numbers of later blocks of columns are found from here.
            table.fill(filled, panels, numbers.as_ptr().wrapping_add(first), each as isize);
            filled += panels;
        }
        // SAFETY: the stretches have a key, so the first entry was filled.
        unsafe { Rows::scattered(table, each as isize, 1).rows_from(ENTRIES) }
    }

    /// Copies the scales of keys or values, in whole panels, to a table.
    fn scales(
        &self,
        scales: &Range<usize>,
        stretches: impl Iterator<Item = Stretch>,
        table: &mut Table,
    ) -> *const [f32] {
        table.scales.fill_slices(stretches.map(|Stretch { page, row, len }| {
            &part::<f32>(self.block(page), scales.clone())[row..][..len.next_multiple_of(LANES)]
        }))
    }

    /// Returns keys and values of a head where they lie, or else gathered in `room`.
    ///
    /// # Panics
    /// As [`Self::gather`].
    pub(crate) fn listed(
        &self,
        head: usize,
        stretches: impl Iterator<Item = Stretch> + Clone,
        [key_table, value_table]: [&mut Table; 2],
        room: &mut [f32],
    ) -> (Keys, BlockValues) {
        match self.reads_in_place(stretches.clone()) {
            true => (self.keys(head, stretches.clone(), key_table), self.values(head, stretches, value_table)),
            false => self.gather(head, stretches, room),
        }
    }

    /// Copies keys of a head to one block that has room for them, in their order, and returns them and their values. `room` holds the
    /// [floats](Sizes::gathered) of the largest block.
    ///
    /// # Panics
    /// If the ranges have more keys than a block, or lie outside their blocks.
    fn gather(&self, head: usize, stretches: impl Iterator<Item = Stretch>, room: &mut [f32]) -> (Keys, BlockValues) {
        let mut keys = Room::new();
        let each = stretches.flat_map(|Stretch { page, row, len }| {
            let block = elements::<u8>(self.block(page));
            (row..row + len).map(move |row| (block, row))
        });
        let keys = keys.fill(each);
        let to = Sizes { rows: rows_for(keys.len()), kv_heads: 1, ..self.sizes };
        let block = &mut room[..to.floats()];
        // Padding is read: of groups of elements and keys, and of panels.
        block.fill(0.0);
        let bytes = elements_mut::<u8>(block);
        for token_part in TokenPart::IN_BLOCKS {
            for run in self.sizes.runs(token_part) {
                let starts =
                    [(self.sizes, head), (to, 0)].map(|(sizes, head)| sizes.starts(token_part, head, run.clone()));
                let [_, each] = self.sizes.elements(token_part);
                copy_runs(keys, starts, run.len() * each, bytes);
            }
        }
        (to.keys_of(room, 0), to.values_of(room, 0))
    }
}

/// Places of a range of elements of any key of a block: byte offsets of those of the first sixteen keys, and the distance from a
/// panel to the next.
struct Starts {
    first: [usize; LANES],
    panel: usize,
}

impl Starts {
    /// Returns the offset for key `row`.
    #[inline(always)]
    fn of(&self, row: usize) -> usize {
        self.first[row % LANES] + row / LANES * self.panel
    }
}

impl Sizes {
    /// Returns true if the panels of values are equally wide: then one address serves for the rows of all.
    pub(super) fn has_even_panels(self) -> bool {
        let layout = self.value_layout();
        layout.panels().all(|panel| panel.len() == layout.panel(0).len())
    }

    /// Calls `f(address, bytes)` for the memory of some rows of a block in a head: of keys, whole panels.
    pub(super) fn memory_of(
        self,
        part: TokenPart,
        block: &[f32],
        head: usize,
        rows: Range<usize>,
        f: &mut impl FnMut(*const u8, usize),
    ) {
        let (memory, latent) = (elements::<u8>(block), self.key_order == KeyOrder::Latent);
        // Scales of keys, keys, then what values have, where latent keys lie too.
        let of_keys = part == TokenPart::Key && !latent;
        let rows = if of_keys { rows.start / LANES * LANES..rows.end.next_multiple_of(LANES) } else { rows };
        for (_, strip) in self.strips(head).enumerate().filter(|&(n, _)| (n < 2) == of_keys) {
            let [start, end] =
                [rows.start, rows.end].map(|row| strip.start + strip.len() * row.min(self.rows) / self.rows);
            if start < end {
                f(memory[start..end].as_ptr(), end - start);
            }
        }
    }

    /// Number of floats of a block that keys of a head are gathered in.
    pub(super) fn gathered(self) -> Option<usize> {
        Some(Self { rows: KEY_BLOCK, kv_heads: 1, ..self }.bytes()? / size_of::<f32>())
    }

    /// Returns the places of a range of elements of a part.
    fn starts(self, token_part: TokenPart, head: usize, run: Range<usize>) -> Starts {
        let start = |row: usize| self.run_bytes(token_part, [head, row], run.clone()).start;
        let panel = if self.rows > LANES { start(LANES) - start(0) } else { 0 };
        Starts { first: core::array::from_fn(start), panel }
    }
}

/// Copies `n` bytes of each key to its place in a block.
fn copy_runs(keys: &[(&[u8], usize)], [from, to]: [Starts; 2], n: usize, block: &mut [u8]) {
    // Short copies of a known length are a load and a store.
    match n {
        1 => copy_each::<1>(keys, &from, &to, block),
        2 => copy_each::<2>(keys, &from, &to, block),
        4 => copy_each::<4>(keys, &from, &to, block),
        _ => {
            for (j, &(memory, row)) in keys.iter().enumerate() {
                block[to.of(j)..][..n].copy_from_slice(&memory[from.of(row)..][..n]);
            }
        }
    }
}

fn copy_each<const N: usize>(keys: &[(&[u8], usize)], from: &Starts, to: &Starts, block: &mut [u8]) {
    for (j, &(memory, row)) in keys.iter().enumerate() {
        let (from, to) = (from.of(row), to.of(j));
        block[to..to + N].copy_from_slice(&memory[from..from + N]);
    }
}
