//! Layout of a cache block.

use crate::kv::value_panels;
use crate::matmul::int8;
use crate::simd::LANES;
use crate::simd::aligned::{AlignedBuf, Plain};
use crate::tensor::element::Dtype;
use crate::tensor::rows::KEY_BLOCK;
use core::ops::Range;

/// Storage format of keys and values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Format {
    Elements(Dtype),
    /// Int8. Every value has a scale; so has every key, or every channel of the keys.
    Int8 {
        key_scales: bool,
    },
}

/// Sizes of a block's contents.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Sizes {
    pub(super) format: Format,
    pub(super) kv_heads: usize,
    pub(super) head_dim: usize,
    pub(super) value_dim: usize,
}

/// Byte ranges of the parts of a head. Each starts on a cache line.
pub(super) struct Parts {
    pub(super) key_scales: Range<usize>,
    pub(super) keys: Range<usize>,
    pub(super) value_scales: Range<usize>,
    pub(super) values: Range<usize>,
}

impl Sizes {
    /// Returns the number of columns of values, filled up to whole vectors.
    pub(super) fn width(self) -> usize {
        self.value_dim.next_multiple_of(LANES)
    }

    /// Returns the number of bytes of each part of a head.
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

    /// Returns the number of bytes of a block; `None` if it overflows.
    pub(super) fn bytes(self) -> Option<usize> {
        self.kv_heads.checked_mul(self.lens().iter().sum::<usize>())
    }

    /// Returns the ranges of a head's parts in a block: one behind the other, and the next head's behind them, so that
    /// a step reads a block from front to back. Scales are stored before what they scale: those of keys are read with
    /// the first scores, those of values are multiplied into weights.
    pub(super) fn parts(self, head: usize) -> Parts {
        let lens = self.lens();
        let mut at = head * lens.iter().sum::<usize>();
        let [key_scales, keys, value_scales, values] = lens.map(|len| {
            at += len;
            at - len..at
        });
        Parts { key_scales, keys, value_scales, values }
    }

    /// Returns the index of column `d` of value `row` of a head among the head's values.
    pub(super) fn value(self, row: usize, d: usize) -> usize {
        value_panels::at(row, d, self.width())
    }

    /// Returns the index of element `d` of key `row` of a head among the head's packed keys.
    pub(super) fn key(self, row: usize, d: usize) -> usize {
        match self.format {
            Format::Elements(_) => (row / LANES * self.head_dim + d) * LANES + row % LANES,
            Format::Int8 { .. } => int8::key_at(self.head_dim, row, d),
        }
    }
}

/// State and scratch for appending to an int8 cache.
#[derive(Debug, Clone)]
pub(super) struct Int8 {
    /// Scales of the keys' channels, `[kv_heads][head_dim]`, if keys have none of their own.
    pub(super) channels: Option<Box<[f32]>>,
    /// Scratch of a row: widened, in whole vectors; then a key and a value as bytes. Empty until it is reserved.
    pub(super) row: Vec<f32>,
    pub(super) bytes: Vec<i8>,
}

impl Int8 {
    /// Makes the scratch as long as rows of these sizes take.
    pub(super) fn fit(&mut self, sizes: Sizes) {
        self.row.resize(sizes.head_dim.max(sizes.value_dim).next_multiple_of(LANES), 0.0);
        self.bytes.resize(sizes.head_dim + sizes.width(), 0);
    }
}

/// Returns part of a block, given as a range of bytes.
pub(super) fn part<T: Plain>(buffer: &AlignedBuf, bytes: Range<usize>) -> &[T] {
    &buffer.elements()[bytes.start / size_of::<T>()..bytes.end / size_of::<T>()]
}

/// Returns part of a block to write to, given as a range of bytes.
pub(super) fn part_mut<T: Plain>(buffer: &mut AlignedBuf, bytes: Range<usize>) -> &mut [T] {
    &mut buffer.elements_mut()[bytes.start / size_of::<T>()..bytes.end / size_of::<T>()]
}
