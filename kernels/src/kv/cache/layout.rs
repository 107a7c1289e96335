//! Where things lie in a block.

use crate::kv::value_panels;
use crate::matmul::int8;
use crate::simd::LANES;
use crate::simd::aligned::{AlignedBuf, Plain};
use crate::tensor::element::Dtype;
use crate::tensor::rows::KEY_BLOCK;
use core::ops::Range;

/// What keys and values are narrow_by_mask as.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Format {
    Elements(Dtype),
    /// Bytes. Values have a scale each; keys too, or their channels have.
    Int8 {
        key_scales: bool,
    },
}

/// Sizes of what a block holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Sizes {
    pub(super) format: Format,
    pub(super) kv_heads: usize,
    pub(super) head_dim: usize,
    pub(super) value_dim: usize,
}

/// The parts of a head, in bytes. Each starts on a cache line.
pub(super) struct Parts {
    pub(super) key_scales: Range<usize>,
    pub(super) keys: Range<usize>,
    pub(super) value_scales: Range<usize>,
    pub(super) values: Range<usize>,
}

impl Sizes {
    /// Columns of values, filled up to whole vectors.
    pub(super) fn width(self) -> usize {
        self.value_dim.next_multiple_of(LANES)
    }

    /// Bytes of the parts of a head.
    fn lens(self) -> [usize; 4] {
        let (keys, values) = (KEY_BLOCK * self.head_dim, KEY_BLOCK * self.width());
        let scales = KEY_BLOCK * size_of::<f32>();
        match self.format {
            Format::Elements(dtype) => [0, keys * dtype.bytes(), 0, values * dtype.bytes()],
            Format::Int8 { key_scales } => {
                let keys = KEY_BLOCK / LANES * int8::panel_bytes(self.head_dim);
                [if key_scales { scales } else { 0 }, keys, scales, values]
            }
        }
    }

    /// Memory of a block; `None` for more than can be counted.
    pub(super) fn bytes(self) -> Option<usize> {
        self.kv_heads.checked_mul(self.lens().iter().sum::<usize>())
    }

    /// Where the parts of a head lie in a block: one behind the other, and the next head's behind them, so that a step
    /// reads a block from front to back. It needs scales before what they scale: those of keys with the first scores, those
    /// of values go into weights.
    pub(super) fn parts(self, head: usize) -> Parts {
        let lens = self.lens();
        let mut at = head * lens.iter().sum::<usize>();
        let [key_scales, keys, value_scales, values] = lens.map(|len| {
            at += len;
            at - len..at
        });
        Parts { key_scales, keys, value_scales, values }
    }

    /// Where column `d` of value `row` of a head lies among the head's values.
    pub(super) fn value(self, row: usize, d: usize) -> usize {
        value_panels::at(row, d, self.width())
    }

    /// Where element `d` of key `row` of a head lies among the head's packed keys.
    pub(super) fn key(self, row: usize, d: usize) -> usize {
        match self.format {
            Format::Elements(_) => (row / LANES * self.head_dim + d) * LANES + row % LANES,
            Format::Int8 { .. } => int8::key_at(self.head_dim, row, d),
        }
    }
}

/// What appending to a cache of bytes takes.
#[derive(Debug, Clone)]
pub(super) struct Int8 {
    /// Scales of the keys' channels, `[kv_heads][head_dim]`, if keys have none of their own.
    pub(super) channels: Option<Box<[f32]>>,
    /// A row on its way: widened, in whole vectors; a key and a value as bytes.
    pub(super) row: Vec<f32>,
    pub(super) bytes: Vec<i8>,
}

/// Part of a block, given in bytes.
pub(super) fn part<T: Plain>(lines: &AlignedBuf, bytes: Range<usize>) -> &[T] {
    &lines.elements()[bytes.start / size_of::<T>()..bytes.end / size_of::<T>()]
}

/// The same, to write to.
pub(super) fn part_mut<T: Plain>(lines: &mut AlignedBuf, bytes: Range<usize>) -> &mut [T] {
    &mut lines.elements_mut()[bytes.start / size_of::<T>()..bytes.end / size_of::<T>()]
}
