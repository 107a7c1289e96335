//! Reading a cache: blocks of packed keys and values for the kernels, and single elements.

use super::blocks::Packed;
use super::layout::{Format, KeyOrder, Parts, Sizes, part};
use super::store::Store;
use super::tokens::TokenPart;
use crate::kv::cache::Cache;
use crate::kv::key_block::{BlockValues, Int4Numbers, Keys};
use crate::kv::value_panels::ValuePanels;
use crate::matmul::int4;
use crate::simd::LANES;
use crate::tensor::any::Typed;
use crate::tensor::element::{Dtype, Element};
use crate::tensor::rows::{KEY_BLOCK, Rows};
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
        let sizes = self.store.sizes.with_rows(block.rows);
        let (block, at, panel) = (block.memory.floats(), sizes.parts(head), sizes.panel() as isize);
        match sizes.format {
            Format::Elements(dtype) if self.is_latent() => {
                let row = sizes.width() as isize;
                Keys::Rows(by_dtype!(dtype, |T| Rows::strided(part::<T>(block, at.values).as_ptr(), row, 1)))
            }
            _ if self.is_latent() => Keys::Latent,
            Format::Elements(Dtype::Bf16) => {
                Keys::Pairs(Rows::strided(part(block, at.keys).as_ptr(), panel / sizes.group() as isize, 1))
            }
            Format::Elements(dtype) => {
                Keys::Packed(by_dtype!(dtype, |T| Rows::strided(part::<T>(block, at.keys).as_ptr(), panel, 1)))
            }
            Format::Int8 { key_scales } => Keys::Int8 {
                panels: Rows::strided(part(block, at.keys).as_ptr(), panel, 1),
                scales: key_scales.then(|| part(block, at.key_scales) as *const _),
            },
            Format::Int4(kind) => Keys::Int4 {
                panels: Rows::strided(part(block, at.keys).as_ptr(), panel, 1),
                kind,
                numbers: Rows::strided(part(block, at.key_scales).as_ptr(), sizes.panel_numbers(kind) as isize, 1),
            },
        }
    }

    /// Returns a head's values of a block that is held: a row for each key that the block has room for.
    pub(crate) fn values(&self, sequence: usize, head: usize, block: usize) -> BlockValues {
        let block = self.held(sequence, block);
        let sizes = self.store.sizes.with_rows(block.rows);
        let (block, at, mut layout) = (block.memory.floats(), sizes.parts(head), sizes.value_layout());
        match sizes.format {
            Format::Elements(Dtype::Bf16) if !self.is_latent() => {
                BlockValues::Pairs(ValuePanels::together(part(block, at.values).as_ptr(), layout))
            }
            Format::Elements(dtype) => BlockValues::ValuePanels(by_dtype!(dtype, |T| {
                ValuePanels::together(part::<T>(block, at.values).as_ptr(), layout)
            })),
            Format::Int8 { .. } => BlockValues::Int8 {
                values: ValuePanels::together(part(block, at.values).as_ptr(), layout),
                scales: part(block, at.value_scales),
            },
            Format::Int4(kind) => {
                // Latent keys have more blocks of columns.
                layout.width = int4::blocks(sizes.value_dim) * LANES;
                BlockValues::Int4 {
                    values: ValuePanels::together(part(block, at.values).as_ptr(), layout),
                    numbers: Int4Numbers {
                        kind,
                        first: Rows::strided(part(block, at.value_scales).as_ptr(), LANES as isize, 1),
                        step: sizes.rows,
                    },
                }
            }
        }
    }

    fn held(&self, sequence: usize, block: usize) -> &Packed {
        self.block(sequence, block).expect("the block is held")
    }

    /// Returns element `[b, h, j, d]` of the keys or of the values; `None` where the cache has none.
    pub(crate) fn element(&self, part: TokenPart, [b, h, j, d]: [usize; 4]) -> Option<f32> {
        let block = self.block(b, j / KEY_BLOCK).filter(|_| j < self.lens[b])?;
        self.store.element(part, block.memory.floats(), block.rows, [h, j % KEY_BLOCK, d])
    }
}

impl Store {
    /// Returns element `[head, row, d]` of the keys or of the values of a block of `rows` keys, widened; `None` beyond the last
    /// head or element.
    pub(super) fn element(&self, part: TokenPart, block: &[f32], rows: usize, at: [usize; 3]) -> Option<f32> {
        let sizes = self.sizes.with_rows(rows);
        let dim = if part == TokenPart::Key { sizes.head_dim } else { sizes.value_dim };
        (at[0] < sizes.kv_heads && at[2] < dim).then(|| match (part, sizes.parts(at[0])) {
            (TokenPart::Key, parts) => sizes.key_element(block, &parts, at, self.channel_scales()),
            (_, parts) => sizes.value_element(block, &parts, [at[1], at[2]]),
        })
    }

    /// Widens key `row` of a head of a block of `rows` keys.
    pub(super) fn widen_key(&self, block: &[f32], rows: usize, [h, row]: [usize; 2], to: &mut Vec<f32>) {
        let (sizes, channels) = (self.sizes.with_rows(rows), self.channel_scales());
        let parts = sizes.parts(h);
        to.extend((0..sizes.head_dim).map(|d| sizes.key_element(block, &parts, [h, row, d], channels)));
    }
}

impl Sizes {
    /// Returns element `d` of key `row` of a head, which has these parts, widened; `channels` are the scales of the keys'
    /// channels, if there are any.
    fn key_element(self, block: &[f32], at: &Parts, [h, row, d]: [usize; 3], channels: Option<&[f32]>) -> f32 {
        match self.format {
            _ if self.key_order == KeyOrder::Latent => self.value_element(block, at, [row, d]),
            Format::Elements(dtype) => element(block, dtype, at.keys.clone(), self.key(row, d)),
            Format::Int8 { .. } => {
                let scale = match channels {
                    Some(channels) => channels[h * self.head_dim + d],
                    None => part::<f32>(block, at.key_scales.clone())[row],
                };
                f32::from(part::<i8>(block, at.keys.clone())[self.key(row, d)]) * scale
            }
            Format::Int4(kind) => {
                let numbers = part(block, at.key_scales.clone());
                self.int4_key(kind, [row, d]).read(kind, part(block, at.keys.clone()), numbers)
            }
        }
    }

    /// Returns element `d` of value `row` of a head, which has these parts, widened.
    fn value_element(self, block: &[f32], at: &Parts, [row, d]: [usize; 2]) -> f32 {
        match self.format {
            Format::Elements(dtype) => element(block, dtype, at.values.clone(), self.value(row, d)),
            Format::Int8 { .. } => {
                let byte = part::<i8>(block, at.values.clone())[self.value(row, d)];
                f32::from(byte) * part::<f32>(block, at.value_scales.clone())[row]
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
