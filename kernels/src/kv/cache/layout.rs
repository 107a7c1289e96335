//! Layout of a block of a cache, and of a page of a pool.

use super::blocks::Packed;
use super::token_part::TokenPart;
use crate::kv::value_panels::{ValueLayout, ValueOrder};
use crate::matmul::hadamard::Basis;
use crate::matmul::int4::{self, Int4, Place};
use crate::matmul::int8;
use crate::simd::LANES;
use crate::simd::aligned::{AlignedBuf, Plain, elements, elements_mut};
use crate::simd::width::LINE_BYTES;
use crate::tensor::element::{Dtype, F16};
use core::ops::Range;

/// Largest number of exact first tokens of a sequence: the first page of a pool has them all.
pub const MAX_EXACT: usize = LANES;

/// Storage format of keys or of values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Format {
    Elements(Dtype),
    /// Int8: each row has a scale.
    Int8,
    /// Int8 keys whose channels have scales.
    Int8Channels,
    /// E4M3: each row has a scale.
    E4m3,
    /// Int4: rows have numbers for each block of elements.
    Int4(Int4),
}

impl Format {
    /// Returns the number of bytes of an element, or of two where a byte holds them.
    #[inline(always)]
    pub(super) fn element_bytes(self) -> usize {
        if let Self::Elements(dtype) = self { dtype.bytes() } else { 1 }
    }

    /// Returns the number of scales and centres of a row of `dim` elements, and the bytes of each.
    #[inline(always)]
    pub(super) fn numbers(self, dim: usize) -> [usize; 2] {
        match self {
            Self::Elements(_) | Self::Int8Channels => [0, size_of::<f32>()],
            Self::Int8 | Self::E4m3 => [1, size_of::<f32>()],
            Self::Int4(kind) => [int4::blocks(dim) * kind.numbers(), size_of::<F16>()],
        }
    }

    /// Returns the number of elements that machines multiply at once, which lie side by side: of a packed key, or of a column of
    /// neighbouring keys' values.
    #[inline(always)]
    fn packed_group(self) -> usize {
        match self {
            Self::Elements(Dtype::Bf16) => 2,
            Self::Elements(_) | Self::E4m3 => 1,
            Self::Int8 | Self::Int8Channels | Self::Int4(_) => int8::QUAD,
        }
    }
}

/// Order of the keys of a head in a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum KeyOrder {
    /// Packed, beside the values.
    Packed,
    /// Those of the values, which are the first columns of the keys: latent heads.
    Latent,
}

/// Sizes of a block's contents.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Sizes {
    pub(super) keys: Format,
    pub(super) values: Format,
    /// Bases of their elements.
    pub(super) key_basis: Basis,
    pub(super) value_basis: Basis,
    /// Number of first tokens of a sequence that are exact, too.
    pub(super) exact: usize,
    /// Number of keys of a block, in whole panels.
    pub(super) rows: usize,
    pub(super) key_order: KeyOrder,
    pub(super) value_order: ValueOrder,
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
    /// Returns the number of elements of a key or of a value, and the basis in which they are stored.
    pub(super) fn row_form(self, part: TokenPart) -> (usize, Basis) {
        match part.is_of_key() {
            true => (self.head_dim, self.key_basis),
            false => (self.value_dim, self.value_basis),
        }
    }

    /// Returns the number of columns of values, or of latent keys, which hold the values, filled up to whole vectors or
    /// blocks.
    #[inline(always)]
    pub(super) fn width(self) -> usize {
        let multiple = if let Format::Int4(_) = self.values { int4::BLOCK } else { LANES };
        self.row_dim().next_multiple_of(multiple)
    }

    /// Returns the number of elements that are stored as a value: those of the key in a latent cache.
    #[inline(always)]
    pub(super) fn row_dim(self) -> usize {
        match self.key_order {
            KeyOrder::Packed => self.value_dim,
            KeyOrder::Latent => self.head_dim,
        }
    }

    /// Returns the number of neighbouring elements of a key that lie side by side.
    #[inline(always)]
    pub(super) fn key_group(self) -> usize {
        self.keys.packed_group()
    }

    /// Returns the number of neighbouring keys whose values lie side by side. Latent floats are rows.
    #[inline(always)]
    pub(super) fn value_group(self) -> usize {
        match (self.values, self.key_order) {
            (Format::Elements(_), KeyOrder::Latent) => 1,
            _ => self.values.packed_group(),
        }
    }

    /// Returns the number of bytes of each part of a head, whole cache lines; `None` if one overflows.
    fn lens(self) -> Option<[usize; 4]> {
        let rows = |each: usize, bytes: usize| {
            self.rows.checked_mul(each)?.checked_mul(bytes)?.checked_next_multiple_of(LINE_BYTES)
        };
        let numbers = |format: Format, dim: usize| {
            let [each, bytes] = format.numbers(dim);
            rows(each, bytes)
        };
        let int4 = |dim: usize| rows(int4::blocks(dim) * (int4::BLOCK / 2), 1);
        let keys = match self.keys {
            format @ (Format::Elements(_) | Format::E4m3) => {
                rows(self.head_dim.next_multiple_of(self.key_group()), format.element_bytes())?
            }
            Format::Int8 | Format::Int8Channels => (self.rows / LANES).checked_mul(int8::panel_bytes(self.head_dim))?,
            Format::Int4(_) => int4(self.head_dim)?,
        };
        let values = match self.values {
            Format::Int4(_) => int4(self.row_dim())?,
            format => rows(self.width(), format.element_bytes())?,
        };
        let value_numbers = numbers(self.values, self.row_dim())?;
        Some(match self.key_order {
            KeyOrder::Packed => [numbers(self.keys, self.head_dim)?, keys, value_numbers, values],
            KeyOrder::Latent => [0, 0, value_numbers, values],
        })
    }

    /// Returns the number of bytes of a block; `None` if it overflows.
    pub(super) fn bytes(self) -> Option<usize> {
        let head = self.lens()?.into_iter().try_fold(0usize, usize::checked_add)?;
        self.kv_heads.checked_mul(head)
    }

    /// Returns the sizes of a block of another number of keys.
    #[inline(always)]
    pub(super) fn with_rows(self, rows: usize) -> Self {
        Self { rows, ..self }
    }

    /// Returns the number of floats of a block; its bytes were counted when the sizes were chosen.
    pub(super) fn floats(self) -> usize {
        self.bytes().expect("counted when the sizes were chosen") / size_of::<f32>()
    }

    /// Returns the ranges of a head's parts in a block: one after the other, then the next head's, so that a step reads
    /// a block from front to back. Scales are stored before what they scale: scales of keys are read with the first
    /// scores, scales of values are multiplied into weights.
    pub(super) fn parts(self, head: usize) -> Parts {
        let lens = self.lens().expect("counted when the sizes were chosen");
        let mut at = head * lens.iter().sum::<usize>();
        let [key_scales, keys, value_scales, values] = lens.map(|len| {
            at += len;
            at - len..at
        });
        Parts { key_scales, keys, value_scales, values }
    }

    /// Returns the number of elements of a panel of sixteen keys; in int4, of bytes.
    #[inline(always)]
    pub(super) fn panel(self) -> usize {
        match self.keys {
            Format::Int4(_) => int4::blocks(self.head_dim) * int4::BLOCK_BYTES,
            _ => self.head_dim.next_multiple_of(self.key_group()) * LANES,
        }
    }

    /// Returns the number of numbers beside the blocks of a panel of int4 keys.
    #[inline(always)]
    pub(super) fn panel_numbers(self, kind: Int4) -> usize {
        int4::blocks(self.head_dim) * kind.numbers() * LANES
    }

    /// Returns the layout of a head's values. A row holds a group of keys.
    #[inline(always)]
    pub(super) fn value_layout(self) -> ValueLayout {
        let rows = self.rows / self.value_group();
        match self.values {
            Format::Int4(_) => ValueLayout { order: ValueOrder::Vectors, rows, width: self.width() / 2 },
            _ => ValueLayout { order: self.value_order, rows, width: self.width() },
        }
    }

    /// Returns the index, among a head's values, of element `column` of value `row`; in int4, the index of its byte.
    #[inline(always)]
    pub(super) fn value(self, row: usize, column: usize) -> usize {
        if let Format::Int4(kind) = self.values {
            return self.int4_value(kind, [row, column]).byte;
        }
        let group = self.value_group();
        self.value_layout().at(row / group, column) * group + row % group
    }

    /// Returns the place of an element of a head's int4 keys.
    #[inline(always)]
    pub(super) fn int4_key(self, kind: Int4, at: [usize; 2]) -> Place {
        Place::of_key(kind, int4::blocks(self.head_dim), at)
    }

    /// Returns the place of an element of a head's int4 values.
    #[inline(always)]
    pub(super) fn int4_value(self, kind: Int4, at: [usize; 2]) -> Place {
        Place::of_value(kind, self.rows, at)
    }

    /// Returns the index, among a head's packed keys, of element `d` of key `row`; in int4, the index of its byte.
    #[inline(always)]
    pub(super) fn key(self, row: usize, d: usize) -> usize {
        if let Format::Int4(kind) = self.keys {
            return self.int4_key(kind, [row, d]).byte;
        }
        let group = self.key_group();
        row / LANES * self.panel() + (d / group * LANES + row % LANES) * group + d % group
    }

    /// Makes a block of `rows` keys, all 0. `None` if there is no memory for it.
    pub(super) fn try_block(self, rows: usize) -> Option<Packed> {
        Some(Packed { rows, memory: AlignedBuf::try_new(self.with_rows(rows).floats())? })
    }

    /// Copies the keys and values of a block to a block of another size: those that fit.
    pub(super) fn copy_keys(self, from: &Packed, to: &mut Packed) {
        let [old, new] = [from.rows, to.rows].map(|rows| self.with_rows(rows));
        let (from, to) = (from.memory.elements::<u8>(), to.memory.elements_mut::<u8>());
        for head in 0..self.kv_heads {
            for (old, new) in old.strips(head).zip(new.strips(head)) {
                let bytes = old.len().min(new.len());
                to[new.start..][..bytes].copy_from_slice(&from[old.start..][..bytes]);
            }
        }
    }

    /// Iterates over byte ranges of a head's parts, each with the keys in order. Blocks of other sizes have the same
    /// ranges, longer or shorter.
    pub(super) fn strips(self, head: usize) -> impl Iterator<Item = Range<usize>> {
        let Parts { key_scales, keys, value_scales, values } = self.parts(head);
        let (layout, [numbers, bytes]) = (self.value_layout(), self.values.numbers(self.row_dim()));
        let number = self.rows * bytes;
        let scales = (0..numbers).map(move |i| value_scales.start + i * number..value_scales.start + (i + 1) * number);
        let element = self.value_group() * self.values.element_bytes();
        let values = layout.panels().map(move |panel| {
            let start = values.start + layout.at(0, panel.start) * element;
            start..start + layout.rows * panel.len() * element
        });
        [key_scales, keys].into_iter().chain(scales).chain(values)
    }
}

/// Returns part of a block, given as a range of bytes.
pub(super) fn part<T: Plain>(block: &[f32], bytes: Range<usize>) -> &[T] {
    &elements(block)[bytes.start / size_of::<T>()..bytes.end / size_of::<T>()]
}

/// Returns part of a block to write to, given as a range of bytes.
pub(super) fn part_mut<T: Plain>(block: &mut [f32], bytes: Range<usize>) -> &mut [T] {
    &mut elements_mut(block)[bytes.start / size_of::<T>()..bytes.end / size_of::<T>()]
}
