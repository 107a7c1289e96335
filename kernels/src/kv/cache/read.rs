//! Reading a cache: blocks of packed keys and values for the kernels, and single elements.

use super::layout::{Format, part};
use crate::kv::cache::Cache;
use crate::kv::key_block::{BlockValues, Keys};
use crate::kv::value_panels::ValuePanels;
use crate::simd::aligned::AlignedBuf;
use crate::tensor::any::Typed;
use crate::tensor::element::{Bf16, Dtype, Element, F16, Load};
use crate::tensor::rows::KEY_BLOCK;
use core::cmp::Ordering;
use core::ops::Range;

impl Cache {
    fn block(&self, sequence: usize, block: usize) -> Option<&AlignedBuf> {
        self.sequences.get(sequence)?.get(block).map(AsRef::as_ref)
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
        let (buffer, at) = (self.held(sequence, block), self.sizes.parts(head));
        match self.sizes.format {
            Format::Elements(Dtype::F32) => Keys::Packed(Typed::F32(part(buffer, at.keys).as_ptr())),
            Format::Elements(Dtype::Bf16) => Keys::Packed(Typed::Bf16(part(buffer, at.keys).as_ptr())),
            Format::Elements(Dtype::F16) => Keys::Packed(Typed::F16(part(buffer, at.keys).as_ptr())),
            Format::Int8 { key_scales } => Keys::Int8 {
                keys: part(buffer, at.keys),
                scales: key_scales.then(|| part(buffer, at.key_scales) as *const _),
            },
        }
    }

    /// Returns a head's values of a block that is held: 256 rows.
    pub(crate) fn values(&self, sequence: usize, head: usize, block: usize) -> BlockValues {
        fn value_panels<T: Load>(buffer: &AlignedBuf, bytes: Range<usize>, width: usize) -> ValuePanels<T> {
            ValuePanels { first: part(buffer, bytes).as_ptr(), width }
        }
        let (buffer, at, width) = (self.held(sequence, block), self.sizes.parts(head), self.sizes.width());
        BlockValues::ValuePanels(match self.sizes.format {
            Format::Elements(Dtype::F32) => Typed::F32(value_panels(buffer, at.values, width)),
            Format::Elements(Dtype::Bf16) => Typed::Bf16(value_panels(buffer, at.values, width)),
            Format::Elements(Dtype::F16) => Typed::F16(value_panels(buffer, at.values, width)),
            Format::Int8 { .. } => {
                let scales = part(buffer, at.value_scales) as *const _;
                return BlockValues::Int8 { value_panels: value_panels(buffer, at.values, width), scales };
            }
        })
    }

    fn held(&self, sequence: usize, block: usize) -> &AlignedBuf {
        self.block(sequence, block).expect("the block is held")
    }

    pub(crate) fn key(&self, [b, h, j, d]: [usize; 4]) -> Option<f32> {
        let inside = h < self.sizes.kv_heads && d < self.sizes.head_dim && j < *self.lens.get(b)?;
        let (block, row) = (self.block(b, j / KEY_BLOCK).filter(|_| inside)?, j % KEY_BLOCK);
        let (at, i) = (self.sizes.parts(h), self.sizes.key(row, d));
        Some(match self.sizes.format {
            Format::Elements(dtype) => element(block, dtype, at.keys, i),
            Format::Int8 { .. } => {
                let scale = match self.channels(h)? {
                    Some(channels) => channels[d],
                    None => part::<f32>(block, at.key_scales)[row],
                };
                f32::from(part::<i8>(block, at.keys)[i]) * scale
            }
        })
    }

    pub(crate) fn value(&self, [b, h, j, d]: [usize; 4]) -> Option<f32> {
        let inside = h < self.sizes.kv_heads && d < self.sizes.value_dim && j < *self.lens.get(b)?;
        let (block, row) = (self.block(b, j / KEY_BLOCK).filter(|_| inside)?, j % KEY_BLOCK);
        let (at, i) = (self.sizes.parts(h), self.sizes.value(row, d));
        Some(match self.sizes.format {
            Format::Elements(dtype) => element(block, dtype, at.values, i),
            Format::Int8 { .. } => {
                f32::from(part::<i8>(block, at.values)[i]) * part::<f32>(block, at.value_scales)[row]
            }
        })
    }
}

/// Returns an element of a part of a block, widened.
fn element(buffer: &AlignedBuf, dtype: Dtype, bytes: Range<usize>, i: usize) -> f32 {
    match dtype {
        Dtype::F32 => part::<f32>(buffer, bytes)[i],
        Dtype::Bf16 => part::<Bf16>(buffer, bytes)[i].widen(),
        Dtype::F16 => part::<F16>(buffer, bytes)[i].widen(),
    }
}
