//! Writing tokens to blocks and pages.
//!
//! Rows are widened to floats by the instruction set's vectors, and placed by loops that are compiled once for all of them.

use super::layout::{Format, KeyOrder, Parts, Sizes, part_mut};
use super::store::Int8;
use super::token_part::TokenPart;
use crate::matmul::bf16_pairs;
use crate::matmul::e4m3::{self, E4m3};
use crate::matmul::hadamard::{Basis, MAX_BLOCK};
use crate::matmul::int4::{self, Int4, Place};
use crate::matmul::int8;
use crate::matmul::pack::{self, NonFinite};
use crate::simd::aligned::Plain;
use crate::simd::isa::Isa;
use crate::simd::{Bf16x2, LANES};
use crate::tensor::any::{AnyRows, Tensor};
use crate::tensor::element::{Bf16, Dtype, Element, F16};
use crate::tensor::rows::Rows;
use core::ops::Range;

/// Rows of keys and values, and their place in a block.
pub(super) struct NewRows<'a> {
    pub(super) sizes: Sizes,
    /// First row in the block.
    pub(super) row: usize,
    pub(super) k: Tensor<'a>,
    /// Values; `None` leaves those of the block as they are. Latent keys have no separate values.
    pub(super) v: Option<Tensor<'a>>,
    /// Batch and rows in the tensors.
    pub(super) b: usize,
    pub(super) rows: Range<usize>,
}

impl NewRows<'_> {
    /// Writes the rows to a block. `int8` is given if the format is int8.
    ///
    /// # Panics
    /// If the tensors do not have the rows, or the block has no room for them.
    pub(super) fn write(self, isa: Isa, block: &mut [f32], mut int8: Option<&mut Int8>) {
        let Self { sizes, row: first, k, v, b, rows } = self;
        let Sizes { kv_heads, head_dim, value_dim, .. } = sizes;
        for (x, dim) in [(Some(k), head_dim), (v, value_dim)] {
            let Some([batch, heads, n, own]) = x.map(|x| x.shape()) else { continue };
            assert!(b < batch && rows.end <= n, "rows outside the tensors");
            assert!([heads, own] == [kv_heads, dim], "keys and values do not fit the block");
        }
        assert!(first + rows.len() <= sizes.rows, "more rows than a block has");
        for h in 0..kv_heads {
            let source = |x: Tensor<'_>, dim, basis| {
                // SAFETY: the head and the rows, of `dim` elements, are inside both tensors, as was asserted.
                Source { rows: unsafe { x.rows(b, h, rows.start) }, n: rows.len(), dim, basis }
            };
            let key = source(k, head_dim, sizes.key_basis);
            let (key, value) = match sizes.key_order {
                KeyOrder::Packed => (Some(key), v.map(|v| source(v, value_dim, sizes.value_basis))),
                // The row that is stored as a value is the key; there is no other copy.
                KeyOrder::Latent => (None, Some(key)),
            };
            let mut head = Head { sizes, parts: sizes.parts(h), first, n: rows.len(), block, isa };
            if let Some(key) = key {
                head.write_keys(key, h, int8.as_deref_mut());
            }
            if let Some(value) = value {
                head.write_values(value, h, int8.as_deref_mut());
            }
        }
    }
}

impl NewRows<'_> {
    /// Writes those of the rows that are exact to the [exact rows](super::exact) of their sequence. Rows have the numbers of tokens.
    pub(super) fn write_exact(self, isa: Isa, exact: &mut [f32]) {
        let Self { sizes, row: first, k, v, b, rows } = self;
        let n = rows.len().min(sizes.exact.saturating_sub(first));
        let parts = [(TokenPart::Key, Some(k), Basis::Channels), (TokenPart::Value, v, sizes.value_basis)];
        for (part, x, basis) in parts {
            let Some(x) = x.filter(|_| n > 0 && !sizes.exact_row(part, [0, 0]).is_empty()) else { continue };
            let [batch, heads, len, dim] = x.shape();
            assert!(b < batch && heads == sizes.kv_heads && rows.end <= len, "rows outside the tensors");
            for head in 0..heads {
                // SAFETY: the head and the rows are inside the tensor, as was asserted.
                let source = Source { rows: unsafe { x.rows(b, head, rows.start) }, n, dim, basis };
                source.for_each_part(isa, |row, d, floats| {
                    let place = &mut exact[sizes.exact_row(part, [head, first + row])];
                    place[d..d + floats.len()].copy_from_slice(floats);
                });
            }
        }
    }
}

/// Message if bytes are written without scratch: stores of bytes have it.
const SCRATCH: &str = "bytes have what writing them takes";

/// Largest number of elements of a row that are widened together, in whole blocks of int4 and of a basis.
const PART: usize = 256;
const _: () = assert!(PART.is_multiple_of(int4::BLOCK) && PART.is_multiple_of(LANES) && PART.is_multiple_of(MAX_BLOCK));

/// Rows of a head, of keys or of values: `n`, of `dim` elements, which are readable, and the basis in which they are stored.
#[derive(Clone, Copy)]
struct Source {
    rows: AnyRows,
    n: usize,
    dim: usize,
    basis: Basis,
}

impl Source {
    /// Returns the rows from one on, and their elements from one on.
    ///
    /// # Panics
    /// If there is no such row, or no such element.
    fn from(self, row: usize, element: usize) -> AnyRows {
        assert!(row < self.n && element < self.dim, "row {row}, element {element}");
        // SAFETY: these are some of the elements, which are readable.
        unsafe { self.rows.rows_from(row).columns_from(element) }
    }

    /// Widens elements of a row to floats, filled up with zeros to whole vectors, and takes them to the basis. They are the whole row
    /// or a [part](PART) of it.
    fn widen(self, isa: Isa, row: usize, elements: Range<usize>, to: &mut [f32]) {
        assert!(elements.end <= self.dim, "elements up to {}", elements.end);
        let (first, size) = (self.from(row, elements.start), [1, elements.len()]);
        dispatch!(isa, |s| {
            // SAFETY: one row, which has the elements.
            unsafe { pack::pack_rows(s, first, size, NonFinite::Ignored, to) };
            self.basis.transform(s, &mut to[..size[1]]);
        });
    }

    /// Calls a function with part after part of every row: with the row, the number of the part's first element, and all of its
    /// elements as floats.
    fn for_each_part(self, isa: Isa, mut place: impl FnMut(usize, usize, &[f32])) {
        let mut floats = [0.0; PART];
        for row in 0..self.n {
            for first in (0..self.dim).step_by(PART) {
                let n = PART.min(self.dim - first);
                self.widen(isa, row, first..first + n, &mut floats);
                place(row, first, &floats[..n]);
            }
        }
    }
}

/// Head of a block, and the rows of it that are written: `n` from the first on.
struct Head<'a> {
    sizes: Sizes,
    parts: Parts,
    first: usize,
    n: usize,
    block: &'a mut [f32],
    isa: Isa,
}

impl Head<'_> {
    /// Writes keys of head `head`, in their format.
    fn write_keys(&mut self, key: Source, head: usize, int8: Option<&mut Int8>) {
        let (sizes, first) = (self.sizes, self.first);
        match sizes.keys {
            Format::Elements(Dtype::F32) => self.write_float_keys(key),
            Format::Elements(Dtype::Bf16) => self.write_key_pairs(key),
            Format::Elements(Dtype::F16) => self.place_keys::<F16>(key),
            Format::Int8 | Format::Int8Channels => self.write_key_bytes(key, head, int8.expect(SCRATCH)),
            Format::E4m3 => self.write_e4m3(TokenPart::Key, key, int8.expect(SCRATCH).head_scale(TokenPart::Key, head)),
            Format::Int4(kind) => {
                let at = |row, d| sizes.int4_key(kind, [first + row, d]);
                self.place_int4(key, kind, self.parts.keys.clone(), self.parts.key_scales.clone(), at);
            }
        }
    }

    /// Writes values, or latent keys, in their format.
    fn write_values(&mut self, value: Source, head: usize, int8: Option<&mut Int8>) {
        let (sizes, first) = (self.sizes, self.first);
        match sizes.values {
            Format::Elements(_) if sizes.value_group() > 1 => self.write_value_pairs(value),
            Format::Elements(Dtype::F32) => self.write_value_rows::<f32>(value),
            Format::Elements(Dtype::Bf16) => self.write_value_rows::<Bf16>(value),
            Format::Elements(Dtype::F16) => self.write_value_rows::<F16>(value),
            Format::Int8 | Format::Int8Channels => self.write_value_bytes(value, int8.expect(SCRATCH)),
            Format::E4m3 => {
                self.write_e4m3(TokenPart::Value, value, int8.expect(SCRATCH).head_scale(TokenPart::Value, head));
            }
            Format::Int4(kind) => {
                let at = |row, c| sizes.int4_value(kind, [first + row, c]);
                self.place_int4(value, kind, self.parts.values.clone(), self.parts.value_scales.clone(), at);
            }
        }
    }

    /// Writes keys as floats: whole panels are transposed in registers, the last one filled up, and keys before them placed row by
    /// row.
    fn write_float_keys(&mut self, key: Source) {
        let before = self.place_keys_before_panels::<f32>(key);
        if before < key.n {
            let (rows, left) = (key.from(before, 0), [key.n - before; 2]);
            let places = part_mut(self.block, self.parts.keys.clone());
            let places = &mut places[self.sizes.key(self.first + before, 0)..];
            // SAFETY: `left` rows are left, of `dim` elements.
            dispatch!(self.isa, |s| unsafe { pack::pack_keys(s, rows, left, key.dim, places) });
        }
    }

    /// Writes keys as pairs of elements, in panels as [`Self::write_float_keys`] does.
    fn write_key_pairs(&mut self, key: Source) {
        let before = self.place_keys_before_panels::<Bf16>(key);
        let (sizes, at) = (self.sizes, self.first);
        let places = part_mut::<Bf16x2>(self.block, self.parts.keys.clone());
        for first in (before..key.n).step_by(LANES) {
            for column in (0..key.dim).step_by(PART) {
                let [n, cols] = [LANES.min(key.n - first), PART.min(key.dim - column)];
                let (from, mut rows) = (key.from(first, column), [Bf16::default(); LANES * PART]);
                let places = &mut places[sizes.key(at + first, column) / 2..][..cols.div_ceil(2) * LANES];
                // SAFETY: `n` rows, which have the columns; copied, they lie in whole vectors.
                dispatch!(self.isa, |s| unsafe {
                    pack::pack_rows(s, from, [n, cols], NonFinite::Ignored, &mut rows);
                    let rows = Rows::strided(rows.as_ptr(), cols.next_multiple_of(LANES) as isize, 1);
                    bf16_pairs::pack(s, rows, [n; 2], [cols, cols.div_ceil(2)], places);
                });
            }
        }
    }

    /// Writes the keys before the first whole panel row by row, or all if they fill none. Returns their number.
    fn place_keys_before_panels<T: Element + Plain>(&mut self, key: Source) -> usize {
        let before = key.n.min(self.first.wrapping_neg() % LANES);
        let n = if key.n - before < LANES { key.n } else { before };
        self.place_keys::<T>(Source { n, ..key });
        n
    }

    /// Writes keys to their lanes of packed panels, row by row.
    fn place_keys<T: Element + Plain>(&mut self, key: Source) {
        let (sizes, first, group) = (self.sizes, self.first, self.sizes.key_group());
        let places = part_mut::<T>(self.block, self.parts.keys.clone());
        key.for_each_part(self.isa, |row, d, floats| {
            let places = &mut places[sizes.key(first + row, d)..];
            for e in 0..group.min(floats.len()) {
                let places = places[e..].iter_mut().step_by(group * LANES);
                for (place, &x) in places.zip(floats[e..].iter().step_by(group)) {
                    *place = T::narrow(x);
                }
            }
        });
    }

    /// Writes values, in their panels of columns.
    fn write_value_rows<T: Element + Plain>(&mut self, value: Source) {
        let places = part_mut::<T>(self.block, self.parts.values.clone());
        for run in self.sizes.value_layout().panels() {
            let (columns, size) = (value.from(0, run.start), [value.n, value.dim.min(run.end) - run.start]);
            let places = &mut places[self.sizes.value(self.first, run.start)..];
            // SAFETY: all rows, with those of their columns that the panel has.
            dispatch!(self.isa, |s| unsafe { pack::pack_rows(s, columns, size, NonFinite::Ignored, places) });
        }
    }

    /// Writes values as pairs of keys; beside the last one of an odd number are zeros.
    fn write_value_pairs(&mut self, value: Source) {
        let (sizes, isa, odd) = (self.sizes, self.isa, self.first % 2);
        let places = part_mut::<Bf16x2>(self.block, self.parts.values.clone());
        for run in sizes.value_layout().panels() {
            let (cols, width) = (value.dim.min(run.end) - run.start, run.len());
            let places = &mut places[sizes.value(self.first - odd, run.start) / 2..];
            for column in (0..cols * odd).step_by(PART) {
                let (n, mut row) = (PART.min(cols - column), [Bf16::default(); PART]);
                let from = value.from(0, run.start + column);
                // SAFETY: one row, which has the columns.
                dispatch!(isa, |s| unsafe { pack::pack_rows(s, from, [1, n], NonFinite::Ignored, &mut row) });
                for (place, x) in places[column..column + n].iter_mut().zip(row) {
                    *place = Bf16x2::new(place.elements()[0], x.0);
                }
            }
            if odd < value.n {
                let (from, size) = (value.from(odd, run.start), [value.n - odd, cols]);
                let places = &mut places[odd * width..];
                // SAFETY: all other rows, with those of their columns that the panel has.
                dispatch!(isa, |s| unsafe { bf16_pairs::pack_values(s, from, size, NonFinite::Ignored, places) });
            }
        }
    }

    /// Writes keys of head `head` as bytes, and their scales.
    fn write_key_bytes(&mut self, key: Source, head: usize, int8: &mut Int8) {
        let Self { parts: Parts { keys, key_scales, .. }, isa, first, n, block, .. } = self;
        let Int8 { channels, row: floats, bytes, .. } = int8;
        let bytes = &mut bytes[..key.dim];
        let channels = channels.as_deref().map(|scales| &scales[head * key.dim..][..key.dim]);
        for (row, place) in (0..*n).zip(*first..) {
            key.widen(*isa, row, 0..key.dim, floats);
            let floats = &floats[..key.dim];
            match channels {
                // Keys that are not finite were refused, or are the caller's responsibility.
                Some(scales) => dispatch!(isa, |s| _ = int8::quantise_by_channel(s, floats, scales, bytes)),
                None => {
                    let scale = dispatch!(isa, |s| int8::quantise(s, floats, bytes));
                    part_mut(block, key_scales.clone())[place] = scale;
                }
            }
            int8::place_key(bytes, place, part_mut(block, keys.clone()));
        }
    }

    /// Writes values as bytes, and their scales.
    fn write_value_bytes(&mut self, value: Source, Int8 { row: floats, bytes, .. }: &mut Int8) {
        let Self { sizes, parts: Parts { values, value_scales, .. }, isa, first, n, block } = self;
        let bytes = &mut bytes[..sizes.width()];
        for (row, place) in (0..*n).zip(*first..) {
            value.widen(*isa, row, 0..value.dim, floats);
            let scale = dispatch!(isa, |s| int8::quantise(s, &floats[..value.dim], bytes));
            part_mut(block, value_scales.clone())[place] = scale;
            let places = part_mut(block, values.clone());
            for run in sizes.value_layout().panels() {
                let places = places[sizes.value(place, run.start)..].iter_mut().step_by(int8::QUAD);
                for (place, &byte) in places.zip(&bytes[run]) {
                    *place = byte;
                }
            }
        }
    }

    /// Writes keys or values as E4M3, and their scales: that of the head, if it has one.
    fn write_e4m3(&mut self, part: TokenPart, rows: Source, scale: Option<f32>) {
        let Self { sizes, parts, isa, first, n, block } = self;
        let (numbers, scales) = match part {
            TokenPart::Key => (parts.keys.clone(), parts.key_scales.clone()),
            _ => (parts.values.clone(), parts.value_scales.clone()),
        };
        let own = &mut part_mut::<f32>(block, scales.clone())[*first..*first + *n];
        own.fill(scale.unwrap_or(f32::MIN_POSITIVE));
        if scale.is_none() {
            rows.for_each_part(*isa, |row, _, floats| {
                let most = floats.iter().fold(0.0, |most: f32, x| most.max(x.abs()));
                own[row] = own[row].max(most / e4m3::LARGEST);
            });
        }
        rows.for_each_part(*isa, |row, d, floats| {
            let (place, mut codes) = (*first + row, [E4m3::default(); PART]);
            let scale = &mut part_mut::<f32>(block, scales.clone())[place];
            let codes = &mut codes[..floats.len()];
            dispatch!(isa, |s| e4m3::quantise(s, floats, scale.abs(), codes));
            *scale = e4m3::row_scale(*scale, codes.iter().copied());
            let places = part_mut::<E4m3>(block, numbers.clone());
            if part == TokenPart::Key {
                let places = places[sizes.key(place, d)..].iter_mut().step_by(LANES);
                places.zip(codes).for_each(|(place, code)| *place = *code);
                return;
            }
            for run in sizes.value_layout().panels() {
                let run = run.start.max(d)..run.end.min(d + codes.len());
                if !run.is_empty() {
                    let codes = &codes[run.start - d..run.end - d];
                    places[sizes.value(place, run.start)..][..codes.len()].copy_from_slice(codes);
                }
            }
        });
    }

    /// Writes rows as half bytes, each element where `at` says, among the bytes of the head's elements, and the numbers of
    /// blocks among theirs.
    fn place_int4(
        &mut self,
        rows: Source,
        kind: Int4,
        elements: Range<usize>,
        numbers: Range<usize>,
        at: impl Fn(usize, usize) -> Place,
    ) {
        let (isa, block) = (self.isa, &mut *self.block);
        rows.for_each_part(isa, |row, first, floats| {
            for (floats, first) in floats.chunks(int4::BLOCK).zip((first..).step_by(int4::BLOCK)) {
                let mut integers = [0; int4::BLOCK];
                let own = dispatch!(isa, |s| int4::quantise(s, floats, kind, &mut integers));
                let bytes = part_mut(block, elements.clone());
                let [lower, upper] = *integers.as_chunks::<{ int4::BLOCK / 2 }>().0 else { unreachable!("two halves") };
                for (i, halves) in lower.into_iter().zip(upper).enumerate().take(floats.len()) {
                    at(row, first + i).write(halves.into(), bytes);
                }
                at(row, first).write_numbers(kind, own, part_mut(block, numbers.clone()));
            }
        });
    }
}
