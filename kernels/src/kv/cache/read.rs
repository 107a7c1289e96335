//! Reading a cache: blocks of packed keys and values for the kernels, and single elements.

use super::blocks::Packed;
use super::layout::{Format, KeyOrder, Parts, Sizes, part};
use super::scattered::Scattered;
use super::store::Store;
use super::token_part::TokenPart;
use crate::kv::block_table::Stretch;
use crate::kv::cache::Cache;
use crate::kv::key_block::{BlockValues, Int4Numbers, Keys};
use crate::kv::value_panels::ValuePanels;
use crate::matmul::e4m3::E4m3;
use crate::matmul::hadamard::Basis;
use crate::matmul::int4;
use crate::simd::LANES;
use crate::simd::portable::Portable;
use crate::tensor::any::Typed;
use crate::tensor::element::{Dtype, Element};
use crate::tensor::rows::{KEY_BLOCK, Rows, Table};
use core::cmp::Ordering;
use core::ops::Range;

impl Cache {
    fn block(&self, sequence: usize, block: usize) -> Option<&Packed> {
        self.blocks.get(sequence)?.get(block).map(AsRef::as_ref)
    }

    /// Returns true if the block is held.
    pub(crate) fn holds(&self, sequence: usize, block: usize) -> bool {
        self.block(sequence, block).is_some()
    }

    /// Compares two sequences by the address of a block. Blocks that are not held are equal.
    pub(crate) fn compare_memory(&self, sequences: [usize; 2], block: usize) -> Ordering {
        let [a, b] = sequences.map(|sequence| self.block(sequence, block).map(core::ptr::from_ref));
        a.cmp(&b)
    }

    /// Returns a head's packed keys of a block that is held.
    pub(crate) fn keys(&self, sequence: usize, head: usize, block: usize) -> Keys {
        let block = self.held(sequence, block);
        self.store.sizes.with_rows(block.rows).keys_of(block.memory.floats(), head)
    }

    /// Returns a head's values of a block that is held: a row for each key that the block has room for.
    pub(crate) fn values(&self, sequence: usize, head: usize, block: usize) -> BlockValues {
        let block = self.held(sequence, block);
        self.store.sizes.with_rows(block.rows).values_of(block.memory.floats(), head)
    }

    /// Calls `f(address, bytes)` for the memory of keys and values of a head, as `KeyValues::memory_of` does.
    pub(crate) fn memory_of(
        &self,
        part: TokenPart,
        [b, h]: [usize; 2],
        keys: Range<usize>,
        f: &mut impl FnMut(*const u8, usize),
    ) {
        for Stretch { page, row, len } in in_blocks(keys) {
            let block = self.held(b, page);
            let sizes = self.store.sizes.with_rows(block.rows);
            sizes.memory_of(part, block.memory.floats(), h, row..row + len, f);
        }
    }

    /// Number of floats of room that [`Self::listed`] needs; `None` if it overflows.
    pub(crate) fn gathered_floats(&self) -> Option<usize> {
        self.store.sizes.gathered()
    }

    /// Returns keys and values of a head from runs of keys: where they lie, or else gathered in `room`.
    ///
    /// # Panics
    /// If a block with some of the keys is not held, or `room` is too small.
    pub(crate) fn listed(
        &self,
        [sequence, head]: [usize; 2],
        runs: impl Iterator<Item = (usize, usize)> + Clone,
        tables: [&mut Table; 2],
        room: &mut [f32],
    ) -> (Keys, BlockValues) {
        let stretches = runs.flat_map(|(first, len)| in_blocks(first..first + len));
        if let Some(rows) = self.latent_rows([sequence, head], stretches.clone(), &mut *tables[0]) {
            return rows;
        }
        // All blocks of a sequence have the same room, unless there is one only.
        let rows = self.blocks[sequence].held().first().map_or(KEY_BLOCK, |block| block.rows);
        let blocks = Scattered::new(self.store.sizes.with_rows(rows), |block| {
            let block = self.held(sequence, block);
            (block.memory.floats(), block.rows)
        });
        blocks.listed(head, stretches, tables, room)
    }

    /// Returns rows of latent floats of a head, each a key that the value is a part of, at the addresses that a table is filled with.
    /// `None` if keys are not such.
    fn latent_rows(
        &self,
        [sequence, head]: [usize; 2],
        stretches: impl Iterator<Item = Stretch>,
        table: &mut Table,
    ) -> Option<(Keys, BlockValues)> {
        let Format::Elements(dtype) = self.store.sizes.values else { return None };
        if !self.is_latent() {
            return None;
        }
        let rows = by_dtype!(dtype, |T| {
            let (width, mut filled) = (self.store.sizes.width(), 0);
            for Stretch { page, row, len } in stretches {
                let block = self.held(sequence, page);
                let values = self.store.sizes.with_rows(block.rows).parts(head).values;
                let rows = &part::<T>(block.memory.floats(), values)[row * width..][..len * width];
                table.fill(filled, len, rows.as_ptr(), width as isize);
                filled += len;
            }
            Rows::<T>::scattered(table, width as isize, 1)
        });
        let layout = self.store.sizes.value_layout();
        let values = by_type!(Typed => Typed, rows, |rows| ValuePanels { first: rows, layout });
        Some((Keys::Rows(rows), BlockValues::ValuePanels(values)))
    }

    fn held(&self, sequence: usize, block: usize) -> &Packed {
        self.block(sequence, block).expect("the block is held")
    }

    /// Returns some elements of key or value `[b, h, j]`, widened; `None` where the cache has none.
    pub(crate) fn elements(&self, part: TokenPart, [b, h, j]: [usize; 3], of: Range<usize>) -> Option<Vec<f32>> {
        let block = self.block(b, j / KEY_BLOCK).filter(|_| j < self.lens[b])?;
        if j < self.store.sizes.exact
            && h < self.kv_heads()
            && let Some(rows) = self.exact_rows(b, h)
            && let Some(elements) = self.store.sizes.exact_elements(part, rows, j, of.clone())
        {
            return Some(elements);
        }
        self.store.elements(part, (block.memory.floats(), block.rows), [h, j % KEY_BLOCK], of)
    }
}

/// Iterates over keys, block by block.
fn in_blocks(keys: Range<usize>) -> impl Iterator<Item = Stretch> + Clone {
    let blocks = keys.start / KEY_BLOCK..keys.end.div_ceil(KEY_BLOCK);
    blocks.map(move |page| {
        let [start, end] = [0, 1].map(|next| ((page + next) * KEY_BLOCK).clamp(keys.start, keys.end));
        Stretch { page, row: start % KEY_BLOCK, len: end - start }
    })
}

impl Store {
    /// Returns some elements of key or value `[head, row]` of a block with room for a number of keys, widened; `None` beyond the last
    /// head or element.
    pub(super) fn elements(
        &self,
        part: TokenPart,
        (block, rows): (&[f32], usize),
        [h, row]: [usize; 2],
        of: Range<usize>,
    ) -> Option<Vec<f32>> {
        let (sizes, channels) = (self.sizes.with_rows(rows), self.channel_scales());
        let (dim, basis) = sizes.row_form(part);
        let parts = (h < sizes.kv_heads && of.end <= dim).then(|| sizes.parts(h))?;
        let stored = |d| match part.is_of_key() {
            true => sizes.key_element(block, &parts, [h, row, d], channels),
            false => sizes.value_element(block, &parts, [row, d]),
        };
        if basis == Basis::Channels {
            return Some(of.map(stored).collect());
        }
        let mut all: Vec<f32> = (0..dim).map(stored).collect();
        basis.transform(Portable, &mut all);
        Some(all[of].to_vec())
    }
}

impl Sizes {
    /// Returns a head's packed keys of a block.
    pub(super) fn keys_of(self, block: &[f32], head: usize) -> Keys {
        let (at, panel) = (self.parts(head), self.panel() as isize);
        let latent = self.key_order == KeyOrder::Latent;
        match self.keys {
            Format::Elements(dtype) if latent => {
                let row = self.width() as isize;
                Keys::Rows(by_dtype!(dtype, |T| Rows::strided(part::<T>(block, at.values).as_ptr(), row, 1)))
            }
            _ if latent => Keys::Latent,
            Format::Elements(Dtype::Bf16) => {
                Keys::Pairs(Rows::strided(part(block, at.keys).as_ptr(), panel / self.key_group() as isize, 1))
            }
            Format::Elements(dtype) => {
                Keys::Packed(by_dtype!(dtype, |T| Rows::strided(part::<T>(block, at.keys).as_ptr(), panel, 1)))
            }
            format @ (Format::Int8 | Format::Int8Channels) => Keys::Int8 {
                panels: Rows::strided(part(block, at.keys).as_ptr(), panel, 1),
                scales: (format == Format::Int8).then(|| part(block, at.key_scales) as *const _),
            },
            Format::E4m3 => Keys::E4m3 {
                panels: Rows::strided(part(block, at.keys).as_ptr(), panel, 1),
                scales: part(block, at.key_scales),
            },
            Format::Int4(kind) => Keys::Int4 {
                panels: Rows::strided(part(block, at.keys).as_ptr(), panel, 1),
                kind,
                numbers: Rows::strided(part(block, at.key_scales).as_ptr(), self.panel_numbers(kind) as isize, 1),
            },
        }
    }

    /// Returns a head's values of a block: a row for each key that the block has room for.
    pub(super) fn values_of(self, block: &[f32], head: usize) -> BlockValues {
        let (at, mut layout) = (self.parts(head), self.value_layout());
        match self.values {
            Format::Elements(Dtype::Bf16) if self.key_order == KeyOrder::Packed => {
                BlockValues::Pairs(ValuePanels::together(part(block, at.values).as_ptr(), layout))
            }
            Format::Elements(dtype) => BlockValues::ValuePanels(by_dtype!(dtype, |T| {
                ValuePanels::together(part::<T>(block, at.values).as_ptr(), layout)
            })),
            Format::Int8 | Format::Int8Channels => BlockValues::Int8 {
                values: ValuePanels::together(part(block, at.values).as_ptr(), layout),
                scales: part(block, at.value_scales),
            },
            Format::E4m3 => BlockValues::E4m3 {
                values: ValuePanels::together(part(block, at.values).as_ptr(), layout),
                scales: part(block, at.value_scales),
            },
            Format::Int4(kind) => {
                // Latent keys have more blocks of columns.
                layout.width = int4::blocks(self.value_dim) * LANES;
                BlockValues::Int4 {
                    values: ValuePanels::together(part(block, at.values).as_ptr(), layout),
                    numbers: Int4Numbers {
                        kind,
                        first: Rows::strided(part(block, at.value_scales).as_ptr(), LANES as isize, 1),
                        step: self.rows,
                    },
                }
            }
        }
    }

    /// Returns element `d` of key `row` of a head, which has these parts, widened; `channels` are the scales of the keys'
    /// channels, if there are any.
    fn key_element(self, block: &[f32], at: &Parts, [h, row, d]: [usize; 3], channels: Option<&[f32]>) -> f32 {
        match self.keys {
            _ if self.key_order == KeyOrder::Latent => self.value_element(block, at, [row, d]),
            Format::Elements(dtype) => element(block, dtype, at.keys.clone(), self.key(row, d)),
            Format::Int8 | Format::Int8Channels => {
                let scale = match channels {
                    Some(channels) => channels[h * self.head_dim + d],
                    None => part::<f32>(block, at.key_scales.clone())[row],
                };
                f32::from(part::<i8>(block, at.keys.clone())[self.key(row, d)]) * scale
            }
            Format::E4m3 => {
                let code = part::<E4m3>(block, at.keys.clone())[self.key(row, d)];
                code.widen() * part::<f32>(block, at.key_scales.clone())[row].abs()
            }
            Format::Int4(kind) => {
                let numbers = part(block, at.key_scales.clone());
                self.int4_key(kind, [row, d]).read(kind, part(block, at.keys.clone()), numbers)
            }
        }
    }

    /// Returns element `d` of value `row` of a head, which has these parts, widened.
    fn value_element(self, block: &[f32], at: &Parts, [row, d]: [usize; 2]) -> f32 {
        match self.values {
            Format::Elements(dtype) => element(block, dtype, at.values.clone(), self.value(row, d)),
            Format::Int8 | Format::Int8Channels => {
                let byte = part::<i8>(block, at.values.clone())[self.value(row, d)];
                f32::from(byte) * part::<f32>(block, at.value_scales.clone())[row]
            }
            Format::E4m3 => {
                let code = part::<E4m3>(block, at.values.clone())[self.value(row, d)];
                code.widen() * part::<f32>(block, at.value_scales.clone())[row].abs()
            }
            Format::Int4(kind) => {
                let place = self.int4_value(kind, [row, d]);
                place.read(kind, part(block, at.values.clone()), part(block, at.value_scales.clone()))
            }
        }
    }
}

/// Returns an element of a part of a block, widened.
fn element(block: &[f32], dtype: Dtype, bytes: Range<usize>, i: usize) -> f32 {
    by_type!(Typed, by_dtype!(dtype, |T| part::<T>(block, bytes)[i]), |x| x.widen())
}
